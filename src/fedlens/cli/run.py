"""Commands that train: run, resume, compare; and describe, recommend and bench, which say what is worth training."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import Explained, complain, explain_error
from .format import Json, Words, print_rows, say_json, split_words


def run(
    words: Words = None,
    keys: Annotated[bool, typer.Option("--keys", help="Only print every key with its value, and the names.")] = False,
    json: Json = False,
) -> None:
    """Run one experiment; with no arguments a small real one that ends in under a minute.

    Every field of the configuration is a key: data=cifar10 partition.alpha=0.1 algorithm=scaffold rounds=50 ...
    """
    from .. import config
    from ..simulate import run as simulate

    experiment = config.read(*split_words(words))
    if keys:
        say_json(config.to_dict(experiment)) if json else _print_keys(experiment)
        return
    _closing(_watched(json, lambda watcher: simulate.run(experiment, watcher=watcher)), json)


def _print_keys(experiment: Any) -> None:
    """Every key of this experiment, and the names that its largest parts can have."""
    from .. import config
    from ..algorithms import ALGORITHMS
    from ..data import DATASETS, PARTITIONS
    from ..models import MODELS
    from ..runs.read import flat

    for key, value in flat(config.to_dict(experiment)).items():
        print(f"{key}={'none' if value is None else str(value).lower() if isinstance(value, bool) else value}")
    for key, names in {"data": DATASETS, "partition": PARTITIONS, "model": MODELS, "algorithm": ALGORITHMS}.items():
        print(f"\n{key}= may be {', '.join(sorted(names))}")


def resume(
    run: Annotated[str, typer.Argument(help="The run's folder.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", show_default=False)] = None,
    json: Json = False,
) -> None:
    """Go on after a crash, to the same bits."""
    from ..simulate import resume as again

    _closing(_watched(json, lambda watcher: again.resume(run, tuple(words or ()), watcher=watcher)), json)


def _watched(json: bool, work: Callable[[Any], Any]) -> Any:
    """Work on a run before somebody's eyes; when it stops early, they are told how to go on."""
    from ..simulate import progress as panel

    watcher = panel.watcher(json)
    try:
        with watcher:
            return work(watcher)
    except BaseException as error:  # also Ctrl-C, which typer would swallow
        raise Explained(explain_error(error, watcher.folder)) from None


def _closing(result: Any, json: bool) -> None:
    if json:
        say_json(result.plain())
        return
    from ..core.format import duration, percent, size

    if result.accuracy is not None and (result.loss is None or not math.isfinite(result.loss)):
        print("note: the loss is not finite: training diverged, which a lower local.lr or uplink=clip may mend")
    if result.accuracy is not None:
        done = result.rounds if result.training_rounds is None else result.training_rounds
        print(f"accuracy {percent(result.accuracy, 2)} (global model, pooled test set, after {done} rounds)")
    for name, spread in result.personal.items():
        words = {"before": "personal models before local training", "after": "personal models after local training"}
        mean, std, worst = (percent(spread[part], 2) for part in ("mean", "std", "worst_decile"))
        numbers = f"mean {mean}, std {std}, worst tenth {worst}"
        print(f"{words.get(name, f'{name} models')}: {numbers} (each on its client's test shard)")
    for line in _privacy_lines(Path(result.run) / "privacy.json"):
        print(line)
    print(f"sent up {size(result.bytes_up)}, down {size(result.bytes_down)}; {duration(result.seconds)}; {result.run}")


def _privacy_lines(file: Path) -> Iterator[str]:
    """What was promised about what left, where anything but plain updates did."""
    from ..core.files import read_json

    for said in read_json(file)["statements"] if file.exists() else ():
        if said["epsilon"] is None:
            promise = "no privacy"
        else:
            promise = f"epsilon {said['epsilon']:.4g} at delta {said['delta']:g}"
        holds = "" if said["holds"] else f", which does not hold: {said['because']}"
        yield f"privacy, as simulated: {promise} of {said['unit'].partition(';')[0]}{holds} ({file})"


def describe(
    algorithm: Annotated[str, typer.Argument(help="A method's name, such as fedavg.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", show_default=False)] = None,
    model: Annotated[
        str, typer.Option(help="The model its messages are about; without one the method's usual one.")
    ] = "",
    classes: Annotated[int, typer.Option(min=1)] = 10,
    channels: Annotated[int, typer.Option(min=1)] = 3,
    size: Annotated[int, typer.Option(min=1, help="Pixels of a side.")] = 32,
    json: Json = False,
) -> None:
    """What a method sends, keeps and costs, from its own hooks."""
    from .. import config
    from ..simulate.describe import describe, described_with, own_hooks, preset_table, settings, traffic, usual_model

    model = model or usual_model(algorithm)
    given = [f"algorithm={algorithm}", f"model={model}", *described_with(algorithm), *(words or ())]
    experiment = config.read(None, given)
    if ":" in algorithm:  # the user's own: all its hooks are tried
        with own_hooks(algorithm):
            leaves = describe(experiment, classes, channels, size, to_the_end=True)
    else:
        leaves = describe(experiment, classes, channels, size)
    if json:
        rows = [leaf.__dict__ for leaf in leaves]
        about = {"algorithm": config.to_dict(experiment.algorithm), "discloses": experiment.discloses}
        say_json({**about, "bytes": traffic(leaves), "leaves": rows})
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 200)  # a file has room for long names
    console.print(
        Text.assemble((algorithm, "bold"), ": ", " ".join((type(experiment.algorithm).__doc__ or "").split()))
    )
    console.print(Text(", ".join(f"{k}={v}" for k, v in settings(experiment.algorithm)) or "no settings"))
    for name, said in experiment.discloses.items():
        console.print(Text(f"Beside model updates, {name}: {said}."))
    head, rows = preset_table(experiment.algorithm)
    if rows:
        named = Table(*head, title=f"where presets differ: algorithm={algorithm.partition('/')[0]}/PRESET")
        for row in rows:
            named.add_row(*row)
        console.print(named)
    table = Table("stage", "where", "leaf", "shape", "type", "bytes")
    table.columns[2].overflow = "fold"
    table.columns[-1].justify = "right"
    for leaf in leaves:
        shape = " x ".join(map(str, leaf.shape))
        table.add_row(leaf.stage, leaf.where, leaf.name, shape, leaf.dtype, f"{leaf.bytes:,}")
    console.print(table)
    for stage, row in traffic(leaves).items():
        console.print(
            f"{stage}: " + ", ".join(f"{where} {count:,} bytes" for where, count in row.items()), highlight=False
        )


def compare(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="METHOD ... [METHOD.key=value ...] [key=value ...]", show_default=False),
    ] = None,
    seeds: Annotated[str, typer.Option(help="How many, such as 3, or which, such as 0,1,2.")] = "1",
    runs: Annotated[bool, typer.Option("--runs", help="The words are folders of runs that are there already.")] = False,
    processes: Annotated[int, typer.Option(min=0, help="Runs side by side; 0: as many as pay.")] = 0,
    out: Annotated[
        str, typer.Option(help="Its folder; without one runs/compare-..., the same for the same settings.")
    ] = "",
    json: Json = False,
) -> None:
    """Compare methods on the same data and splits: table, significance, curves, fairness, costs, and a page of it all.

    Several values make a sweep: partition.alpha=0.05,0.1,0.5 or, of one method, fedprox.mu=0.01,0.1. What is done is
    not run again: the same command goes on. Without data=, a look at the embedded digits that takes about two minutes.
    """
    from ..compare.board import board
    from ..compare.run import asked, compare, compare_existing, pictures
    from ..report.page import write
    from ..runs.grid import seeds_of

    try:
        if runs:
            found, place = compare_existing([Path(word) for word in words or ()]), Path(out or "runs/compared")
            found.write(place)
        else:
            what = asked(words or ())
            place = Path(out) if out else what.folder
            found = compare(what, seeds_of(seeds), place, board(json), processes)
        drawn = [str(path) for path in pictures(found, place)]
        there = [run.run for run in found.runs if (run.run / "config.yaml").exists()]
        page = write(there, place / "report.html") if there else None
    except KeyboardInterrupt:
        raise Explained(complain("stopped; the same command goes on where it was", 130)) from None
    if json:
        say_json({**found.plain(), "pictures": drawn, "report": page and str(page), "folder": str(place)})
    else:
        for setting, *tables in found.tables():
            print(f"\n{setting}" if setting else "")
            for table in tables:
                print_rows(table)
        print("\n".join(found.said()))
        print(*drawn, place / "compare.md", *([page] if page else []), sep="\n")
    raise typer.Exit(0 if found.complete else 1)


def recommend(
    words: Words = None,
    runs: Annotated[str, typer.Option(help="A comparison of your own, as evidence beside ours.")] = "",
    megabytes: Annotated[float, typer.Option("--bytes", min=0, help="Megabytes a client may send in a round.")] = 0.0,
    privacy: Annotated[bool, typer.Option("--privacy", help="Nothing but model updates may leave a client.")] = False,
    personal: Annotated[bool, typer.Option("--personal/--global", help="Which model counts.")] = False,
    json: Json = False,
) -> None:
    """Methods worth trying on a split like yours (data=... partition.alpha=... clients=...), with the evidence."""
    from dataclasses import asdict

    from .. import config
    from ..recommend.rank import known, recommend, results_of

    evidence = [*(results_of(Path(runs), runs) if runs else ()), *known()]
    kind = "personal" if personal else "global"
    found = recommend(config.read(*split_words(words)), evidence, kind, megabytes=megabytes, private=privacy)
    if json:
        say_json(asdict(found))
        return
    if found.advice:
        print_rows([asdict(one) for one in found.advice])
    print("\n".join(found.notes))


def bench(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds in each of three timed series.")] = 3,
    small: Annotated[bool, typer.Option(help="A few steps of small models: a look, no measurement.")] = False,
    out: Annotated[str, typer.Option(help="A picture of the result.")] = "",
    json: Json = False,
) -> None:
    """Images per second of each engine on this machine, beside one model trained centrally on as many images."""
    import torch

    from ..engines.process import matmuls, threads
    from ..experiment import Execution, Experiment
    from .bench import JOBS, ON_CPU, SMALL, bench, draw

    placed = Experiment(execution=Execution(device=device)).resolved().execution
    jobs = SMALL if small else ON_CPU if placed.device == "cpu" else JOBS
    with threads(1), matmuls(placed.precision):
        rows = [*bench(jobs, placed.precision, placed.device, placed.workers, repeats)]  # pyright: ignore[reportArgumentType]
    if out:
        draw(rows, Path(out))
    if json:
        name = torch.cuda.get_device_name() if placed.device != "cpu" else "CPU"
        say_json({"device": name, "precision": placed.precision, "torch": torch.__version__, "rows": rows})
        return
    columns = {
        "job": "job",
        "engine": "engine",
        "images_per_second": "images/s",
        "over_sequential": "x sequential",
        "over_central": "x central",
        "first_round_seconds": "first round, s",
    }
    print_rows([{short: row[name] for name, short in columns.items()} for row in rows])
