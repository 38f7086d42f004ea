"""Commands that train: run, resume, compare; and recommend and bench, which say what is worth training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import Explained, complain, explain_error
from .format import (
    Json,
    Style,
    Width,
    Words,
    columns,
    figures,
    is_setting,
    print_rows,
    print_text,
    say_json,
    split_words,
)
from .runs import Tags
from .startup import importing, start_workers_early

_MEASURES = "Rank by accuracy, loss, balanced_accuracy, auroc, ece, or of a class, as sensitivity/ill."
By = Annotated[str, typer.Option(metavar="MEASURE", help=_MEASURES)]


def run(
    words: Words = None,
    keys: Annotated[
        bool,
        typer.Option(
            "--keys",
            help="Only print keys: all, or those of what is named, as local, topk or local.lr.",
        ),
    ] = False,
    tag: Tags = None,
    json: Json = False,
) -> None:
    """Run one experiment; with no arguments a small real one that ends in under a minute.

    Every field of the configuration is a key: data=cifar10 partition.alpha=0.1 algorithm=scaffold rounds=50 ...
    """
    if keys:
        _print_keys(words or [], json)
        return
    start_workers_early(words or [])
    with importing():
        from .. import config
        from ..runs.labels import checked
        from ..simulate import progress  # noqa: F401
        from ..simulate import run as simulate
    experiment, tags = config.read(*split_words(words)), checked(tag or ())
    _closing(_watched(json, lambda watcher: simulate.run(experiment, watcher=watcher, tags=tags)), json)


def _print_keys(words: list[str], json: bool) -> None:
    """Keys with their meaning, type, unit and default, by group; the names that the largest parts can have."""
    from .. import config
    from .keys import GROUPS, LISTED, OPTIONAL, chosen, names_of

    parts = [word for word in words if not is_setting(word) and not word.endswith((".yaml", ".yml"))]
    rows = chosen(parts, config.read(*split_words([word for word in words if word not in parts])))
    if json:
        say_json({"keys": [key._asdict() for key in rows]})
        return
    wide = columns()
    for group in dict.fromkeys(key.group for key in rows):
        print_text(f"# {group}: {GROUPS[group]}", "# ")
        for key in (key for key in rows if key.group == group):
            print(*(key.lines(wide, min(32, wide // 3)) if wide else [key.line]), sep="\n")
    for key in LISTED:
        if any(row.key == key for row in rows):
            print_text(f"\n{key}= may be {', '.join(names_of(key))}")
    if none := [row.key for row in rows if row.key in OPTIONAL and not row.value]:
        print_text(f"\nKeys of {', '.join(none)} depend on what is chosen: fedlens run --keys {names_of(none[0])[-1]}")


def resume(
    run: Annotated[str, typer.Argument(help="The run's folder.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", show_default=False)] = None,
    json: Json = False,
) -> None:
    """Go on after a crash: on a CPU to the same bits, on a GPU to rounding."""
    start_workers_early(words or [])
    with importing():
        from ..simulate import progress  # noqa: F401
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
        rounds = f"{done} round{'s' * (done != 1)}"
        print(f"accuracy {percent(result.accuracy, 2)} (global model, pooled test set, after {rounds})")
    for name, spread in result.personal.items():
        words = {"before": "personal models before local training", "after": "personal models after local training"}
        mean, std, worst = (percent(spread[part], 2) for part in ("mean", "std", "worst_decile"))
        numbers = f"mean {mean}, std {std}, worst tenth {worst}"
        print(f"{words.get(name, f'{name} models')}: {numbers} (each on its client's own test images)")
    for line in _measure_lines(result):
        print(line)
    for line in _privacy_lines(Path(result.run) / "privacy.json"):
        print(line)
    print(f"sent up {size(result.bytes_up)}, down {size(result.bytes_down)}; {duration(result.seconds)}; {result.run}")


def _measure_lines(result: Any) -> Iterator[str]:
    """Of evaluate.measures=all, and of the round that evaluate.validation chose."""
    from ..runs.measures import best_line, measure_line

    if line := measure_line(result.measures):
        yield line
    if result.best:
        yield f"{best_line(result.best)}; fedlens export {result.run} --round best"


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


def compare(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="METHOD ... [METHOD.key=value ...] [key=value ...]", show_default=False),
    ] = None,
    seeds: Annotated[str, typer.Option(help="How many, such as 3, or which, such as 0,1,2.")] = "1",
    runs: Annotated[bool, typer.Option("--runs", help="The words are folders of runs that are there already.")] = False,
    processes: Annotated[int, typer.Option(min=0, help="Runs side by side; 0: as many as pay.")] = 0,
    by: By = "accuracy",
    out: Annotated[
        str, typer.Option(help="Its folder; without one runs/compare-..., the same for the same settings.")
    ] = "",
    tag: Tags = None,
    style: Style = "screen",
    width: Width = "3.3in",
    json: Json = False,
) -> None:
    """Compare methods on the same data and splits: table, significance, curves, fairness, costs, and a page of it all.

    Several values make a sweep: partition.alpha=0.05,0.1,0.5 or, of one method, fedprox.mu=0.01,0.1. What is done is
    not run again: the same command goes on. Defaults are those of `fedlens run`.
    """
    from ..compare.board import board
    from ..compare.run import asked, compare, compare_existing, pictures
    from ..core.measures import check_measure
    from ..report.page import write
    from ..runs.grid import seeds_of
    from ..runs.labels import checked, label

    tags, look = checked(tag or ()), figures(style, width)
    check_measure("--by", by)
    try:
        if runs:
            found, place = compare_existing([Path(word) for word in words or ()], by), Path(out or "runs/compared")
            found.write(place)
        else:
            more = ["evaluate.measures=all"] if by not in ("accuracy", "loss") else []
            what = asked([*(words or ()), *more])
            what.check_measure(by)
            place = Path(out) if out else what.folder
            found = compare(what, seeds_of(seeds), place, board(json), processes, by)
        with look as printed:
            drawn = [*map(str, [*pictures(found, place), *printed])]
        there = [run.run for run in found.runs if (run.run / "config.yaml").exists()]
        for path in there if tags else ():
            label(path, tags=tags)
        page = write(there, place / "report.html") if there else None
    except KeyboardInterrupt:
        raise Explained(complain("stopped; the same command goes on where it was", 130)) from None
    if json:
        say_json({**found.plain(), "pictures": drawn, "report": page and str(page), "folder": str(place)})
    else:
        _print_comparison(found)
        print(*drawn, place / "compare.md", place / "compare.tex", *([page] if page else []), sep="\n")
    raise typer.Exit(0 if found.complete else 1)


def _print_comparison(found: Any) -> None:
    """The verdict, the tables, and what must be known to read them."""
    for sentence in found.verdict():
        print_text(sentence)
    for setting, *tables in found.tables():
        print(f"\n{setting}" if setting else "")
        for table in tables:
            print_rows(table)
    for sentence in found.said():
        print_text(sentence)


def recommend(
    words: Words = None,
    runs: Annotated[str, typer.Option(help="A comparison of your own, as evidence beside ours.")] = "",
    megabytes: Annotated[float, typer.Option("--bytes", min=0, help="Megabytes a client may send in a round.")] = 0.0,
    privacy: Annotated[bool, typer.Option("--privacy", help="Nothing but model updates may leave a client.")] = False,
    personal: Annotated[
        bool | None, typer.Option("--personal/--global", help="Which model counts; as --runs ranks, or global.")
    ] = None,
    json: Json = False,
) -> None:
    """Methods worth trying on a split like yours (data=... partition.alpha=... clients=...), with the evidence."""
    from dataclasses import asdict

    from .. import config
    from ..recommend.rank import experiment_of, known, recommend, results_of

    own = results_of(Path(runs), runs) if runs else []
    kind = own[0]["ranked_by"] if own and personal is None else "personal" if personal else "global"
    experiment = experiment_of(Path(runs)) if own and not words else config.read(*split_words(words))
    found = recommend(experiment, known(), kind, own=own, megabytes=megabytes, private=privacy)
    if json:
        say_json(asdict(found))
        return
    if worth := [one for one in found.advice if one.verdict == "try"]:
        named = [f"{one.method} ({one.privacy})" if one.privacy else one.method for one in worth[:3]]
        others = f" {len(worth) - 3} more cannot be told from them." if len(worth) > 3 else ""
        print_text(f"Try {' or '.join(named)}.{others}")
    if found.advice:
        _print_advice(found.advice)
    for sentence in found.notes:
        print_text(sentence)


def _print_advice(advice: Sequence[Any]) -> None:
    """As people read it; --json has fractions and sources. Of many methods, those behind take a sentence."""
    from ..core.format import percent

    is_long = any(one.low is not None for one in advice)  # from several worlds, whose accuracies say nothing together
    rows = []
    for one in advice:
        gain = "" if one.over_fedavg is None else f"{100 * one.over_fedavg:+.1f}"
        row = {"method": one.method, "verdict": one.verdict}
        if is_long:
            row["over FedAvg"] = gain if one.low is None else f"{gain} [{100 * one.low:+.1f}, {100 * one.high:+.1f}]"
        else:
            row |= {"accuracy": percent(one.accuracy), "over FedAvg": gain}
        parts = one.why.split("; ")[is_long and one.verdict == "try" :]  # that it cannot be told from the best is said
        why = "; ".join(part for part in parts if part != one.cost)
        rows.append({**row, "worlds": str(one.worlds), **({"cost": one.cost} if one.cost else {}), "why": why})
    print_rows([row for row in rows if not is_long or row["verdict"] != "behind"])
    behind = [f"{one.method} {100 * one.over_fedavg:+.1f}" for one in advice if one.verdict == "behind" and is_long]
    if behind:
        print_text(f"Behind, in points over fedavg: {', '.join(behind)}. --json says why.")


def bench(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds in each of three timed series.")] = 3,
    small: Annotated[bool, typer.Option(help="A few steps of small models: a look, no measurement.")] = False,
    out: Annotated[str, typer.Option(help="A picture of the result.")] = "",
    style: Style = "screen",
    width: Width = "3.3in",
    json: Json = False,
) -> None:
    """Images per second of each engine on this machine, beside one model trained centrally on as many images."""
    import torch

    from ..engines.process import matmuls, threads
    from ..experiment import Execution, Experiment
    from .bench import JOBS, ON_CPU, SMALL, bench, draw

    look = figures(style, width)
    placed = Experiment(execution=Execution(device=device)).resolved().execution
    jobs = SMALL if small else ON_CPU if placed.device == "cpu" else JOBS
    with threads(1), matmuls(placed.precision):
        rows = [*bench(jobs, placed.precision, placed.device, placed.workers, repeats)]  # pyright: ignore[reportArgumentType]
    if out:
        with look:
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
        **({"peak_gib": "peak, GiB", "lane_mib": "a lane, MiB"} if placed.device != "cpu" else {}),
    }
    print_rows([{short: row[name] for name, short in columns.items()} for row in rows])
