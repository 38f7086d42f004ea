"""The command line. Nothing heavy is imported before a command needs it: help answers at once."""

from __future__ import annotations

import contextlib
import errno
import json as json_module
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from .deploy import deploy

typer.core.HAS_RICH = False  # help is plain text: brackets escaped for rich would show as \[default: 1]

app = typer.Typer(
    name="fedlens",
    help="Federated learning on data that differs, guided by what models look at.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Json = Annotated[bool, typer.Option("--json", help="End with one line of JSON on standard output.")]
_CLIENTS = 20  # listed at most: they must fit a screen
Words = Annotated[list[str] | None, typer.Argument(metavar="[FILE.yaml] [key=value ...]", show_default=False)]


def _say_version(asked: bool) -> None:
    if asked:
        from .. import __version__

        typer.echo(f"fedlens {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_say_version, is_eager=True, help="Say which FedLens this is, and stop."),
]


@app.callback()
def about(version: Version = False) -> None:
    pass


def _is_setting(word: str) -> bool:
    """key=value; folders of runs that `fedlens reproduce` makes have a = in their names, too."""
    return "=" in word and not Path(word).exists()


def _split(words: list[str] | None) -> tuple[str | None, list[str]]:
    from ..core.errors import BadInput

    files = [word for word in words or () if not _is_setting(word)]
    if options := [word for word in files if word.startswith("-")]:
        raise BadInput(f"unknown option {options[0]}; there is --json, and settings look like key=value")
    if len(files) > 1:
        raise BadInput(f"one YAML file at most, not {' and '.join(files)}; settings look like key=value")
    return (files[0] if files else None), [word for word in words or () if _is_setting(word)]


@app.command(context_settings={"ignore_unknown_options": True})
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

    experiment = config.read(*_split(words))
    if keys:
        _say_json(config.plain(experiment)) if json else _print_keys(experiment)
        return
    _closing(_watched(json, lambda watcher: simulate.run(experiment, watcher=watcher)), json)


def _print_keys(experiment: Any) -> None:
    """Every key of this experiment, and the names that its largest parts can have."""
    from .. import config
    from ..algorithms import ALGORITHMS
    from ..data import DATASETS, PARTITIONS
    from ..models import MODELS
    from ..runs.read import flat

    for key, value in flat(config.plain(experiment)).items():
        print(f"{key}={'none' if value is None else str(value).lower() if isinstance(value, bool) else value}")
    for key, names in {"data": DATASETS, "partition": PARTITIONS, "model": MODELS, "algorithm": ALGORITHMS}.items():
        print(f"\n{key}= may be {', '.join(sorted(names))}")


@app.command()
def resume(
    run: Annotated[str, typer.Argument(help="The run's folder.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", show_default=False)] = None,
    json: Json = False,
) -> None:
    """Go on after a crash, to the same bits."""
    from ..simulate import run as simulate

    _closing(_watched(json, lambda watcher: simulate.resume(run, tuple(words or ()), watcher=watcher)), json)


@app.command()
def describe(
    algorithm: Annotated[str, typer.Argument(help="A method's name, such as scaffold.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", show_default=False)] = None,
    model: Annotated[
        str, typer.Option(help="The model its messages are about; without one cnn, for pse pse_net.")
    ] = "",
    classes: Annotated[int, typer.Option(min=1)] = 10,
    channels: Annotated[int, typer.Option(min=1)] = 3,
    size: Annotated[int, typer.Option(min=1, help="Pixels of a side.")] = 32,
    json: Json = False,
) -> None:
    """What a method sends, keeps and costs, from its own hooks."""
    from .. import config
    from ..simulate.describe import describe, own_hooks, presets, settings, traffic, usual_model

    model = model or usual_model(algorithm)
    experiment = config.read(None, [f"algorithm={algorithm}", f"model={model}", *(words or ())])
    if ":" in algorithm:  # the user's own: all its hooks are tried
        with own_hooks(algorithm):
            leaves = describe(experiment, classes, channels, size, to_the_end=True)
    else:
        leaves = describe(experiment, classes, channels, size)
    if json:
        rows = [leaf.__dict__ for leaf in leaves]
        _say_json({"algorithm": config.plain(experiment.algorithm), "bytes": traffic(leaves), "leaves": rows})
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 200)  # a file has room for long names
    console.print(
        Text.assemble((algorithm, "bold"), ": ", " ".join((type(experiment.algorithm).__doc__ or "").split()))
    )
    console.print(Text(", ".join(f"{k}={v}" for k, v in settings(experiment.algorithm)) or "no settings"))
    for chosen, meaning in presets(experiment.algorithm).items():
        console.print(Text(f"{chosen}: {meaning or 'its defaults'}"))
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


@app.command()
def diff(a: str, b: str, json: Json = False) -> None:
    """Whether two runs are the same to the bit: weights, client memories, metrics without timings. Exit code 0 or 1."""
    from ..runs.diff import differences

    found = list(differences(a, b))
    if json:
        _say_json({"same": not found, "differences": found})
    elif found:
        print(f"{a} and {b} differ: {found[0]}" + (f" (and {len(found) - 1} more)" if len(found) > 1 else ""))
    else:
        print(f"{a} and {b} are the same to the bit")
    raise typer.Exit(1 if found else 0)


@app.command(context_settings={"ignore_unknown_options": True})
def explain(
    words: Annotated[list[str] | None, typer.Argument(metavar="[RUN ...] [key=value ...]", show_default=False)] = None,
    weights: Annotated[str, typer.Option(help="A safetensors file, when there is no run.")] = "",
    clients: Annotated[str, typer.Option(help="Clients whose personal models are shown, by number or name: 0,3.")] = "",
    rounds: Annotated[str, typer.Option("--round", help="Rounds whose models are shown, such as 50,100.")] = "",
    methods: Annotated[str, typer.Option(help="Such as lrp,guided_backprop,grad_cam.")] = "",
    images: Annotated[int, typer.Option(min=1, max=64)] = 6,
    which: Annotated[str, typer.Option(help="With several runs: places in the client's test images, as 0,7.")] = "",
    out: Annotated[str, typer.Option(help="PNG, SVG or PDF.")] = "",
    json: Json = False,
) -> None:
    """Draw what models look at: a run's, or model=... with --weights FILE on data=...

    Several runs are drawn side by side: their models of one client (--clients 3) by one method, on its test images.
    """
    from .. import config
    from ..attribution import METHODS
    from ..attribution.figures import ASKED, USUAL, legend
    from ..core.errors import BadInput, nearest
    from ..explain.run import explain_model, explain_run
    from ..papers.fedsls.weights import explain_weights, legends

    chosen = [name.strip() for name in methods.split(",") if name.strip()] or list(USUAL)
    for name in chosen:
        if name not in METHODS:
            raise BadInput(f"--methods {name!r} is unknown; {nearest(name, METHODS)}")
    place = Path(out) if out else None
    if len(runs := [word for word in words or () if not _is_setting(word) and not word.startswith("-")]) > 1:
        from ..explain.runs import LEGEND, explain_runs

        who, method = _clients(runs[0], clients) or [0], chosen if methods else ["grad_cam"]
        if len(who) > 1 or len(method) > 1 or rounds or weights or len(runs) < len(words or ()):
            raise BadInput("several runs are compared by one client's models and one method: --clients 0 --methods lrp")
        at = _numbers("--which", which)
        drawn = explain_runs(runs, place, client=who[0], count=images, which=at, method=method[0])
        _say_json({"picture": str(drawn), "more": []}) if json else print(drawn, f"  {LEGEND}", sep="\n")
        return
    run, settings = _split(words)
    if which:
        raise BadInput("--which is for several runs; name two or more")
    if run:
        if settings or weights:
            raise BadInput("a run has its own model, data and weights: name a RUN, or model=, data= and --weights")
        whose = {"clients": _clients(run, clients), "rounds": _numbers("--round", rounds)}
        drawn = explain_run(run, place, **whose, count=images, methods=chosen)
        more = explain_weights(run, place, clients=whose["clients"], count=images)
    else:
        where = place or Path("explain.png")
        drawn = explain_model(config.read(None, settings), weights, where, count=images, methods=chosen)
        more = []
    if json:
        _say_json({"picture": str(drawn), "more": [str(path) for path in more]})
        return
    said = [legend(ASKED["true" if run else "given"]), *legends(maps=len(more) > 1)]
    for path, how_to_read in zip([drawn, *more], said, strict=False):  # a run without weights has one picture
        print(path, f"  {how_to_read}", sep="\n")


def _numbers(option: str, text: str) -> list[int]:
    from ..core.errors import BadInput

    if not all(part.strip().isdigit() for part in text.split(",") if part):
        raise BadInput(f"{option} is {text!r}, but it should be numbers such as 0,3")
    return [int(part) for part in text.split(",") if part]


def _clients(run: str, text: str) -> list[int]:
    from ..runs.folder import RunFolder

    names = RunFolder.open(run).names()
    return [names.number(part.strip()) for part in text.split(",") if part.strip()]


@app.command()
def clients(
    runs: Annotated[list[str], typer.Argument(metavar="RUN ...", show_default=False)],
    confusion: Annotated[str, typer.Option(metavar="CLIENT", help="Also its confusion matrix; number or name.")] = "",
    loss: Annotated[bool, typer.Option("--loss", help="Also the training loss of rounds kept with keep=N.")] = False,
    out: Annotated[str, typer.Option(help="The picture; others are named after it.")] = "",
    json: Json = False,
) -> None:
    """What each client gets out of a run, how fair that is, and how runs differ in it; the first is the reference.

    Clients are listed by their accuracy in the first run, the worst first.
    """
    from ..report.client_figures import accuracy_bars, confusion_matrices, loss_curves
    from ..runs.folder import RunFolder
    from ..runs.opened import OpenedRun, named, same_split
    from ..runs.read import client_evaluation, fairness

    paths = named(runs)
    evaluated = {name: client_evaluation(RunFolder.open(path)) for name, path in paths.items()}
    accuracies = {name: by for name, (_, by) in evaluated.items()}
    fair = {name: fairness(list(by.values())) for name, by in accuracies.items()}
    rows = [
        {"run": name, "model": evaluated[name][0], "clients": len(accuracies[name]), **fair[name]} for name in paths
    ]
    place = (Path(out) if out else RunFolder(runs[0]).figures / "clients").with_suffix("")
    names = RunFolder.open(runs[0]).names()
    drawn = [accuracy_bars(accuracies, fair, place, names)]
    opened = {n: OpenedRun.open(p) for n, p in paths.items()} if loss or confusion else {}
    if confusion:
        same_split(opened)
        number = names.number(confusion)
        counts = {name: run.confusion(number) for name, run in opened.items()}
        where, classes = (
            place.with_name(f"{place.name}-confusion-{number}"),
            next(iter(opened.values())).images.classes,
        )
        drawn.append(confusion_matrices(counts, classes, where, f"{names.client(number)}, % of each class"))
    if loss:
        losses = {name: run.training_losses() for name, run in opened.items()}
        drawn.append(loss_curves(losses, place.with_name(f"{place.name}-loss")))
    if json:
        _say_json({"runs": rows, "accuracies": accuracies, "pictures": [str(path) for path in drawn]})
        return
    titles = {"mean": "mean, %", "std": "std, %", "worst_decile": "worst tenth, %"}
    _print_rows([{titles.get(k, k): f"{100 * v:.2f}" if k in titles else v for k, v in row.items()} for row in rows])
    everyone = sorted({client for by in accuracies.values() for client in by})
    reference = next(iter(accuracies.values()))
    everyone.sort(key=lambda client: reference.get(client, math.inf))
    _print_rows(
        [
            {
                "client": client,
                **({"name": names.clients[client]} if names.clients else {}),
                **{f"{n}, %": f"{100 * by[client]:.2f}" if client in by else "–" for n, by in accuracies.items()},
            }
            for client in everyone[:_CLIENTS]
        ]
    )
    if len(everyone) > _CLIENTS:
        print(f"and {len(everyone) - _CLIENTS} more, who are better off; --json has them all")
    print(*drawn, sep="\n")


@app.command("time")
def time_on_devices(
    runs: Annotated[list[str], typer.Argument(metavar="RUN ... [devices.KEY=VALUE ...]", show_default=False)],
    devices: Annotated[str, typer.Option(help="phone, hospital or iot.")] = "phone",
    targets: Annotated[str, typer.Option(help="Accuracies to reach, such as 0.8,0.9.")] = "",
    json: Json = False,
) -> None:
    """How long runs would have taken on such devices, and until which accuracy; what their slowest clients did."""
    from .. import config
    from ..core.errors import BadInput
    from ..devices.clock import Seconds, time_to
    from ..runs.folder import RunFolder
    from ..runs.opened import named
    from ..runs.read import curve
    from ..simulate.timing import timing

    words = [word for word in runs if _is_setting(word)]
    if others := [word for word in words if not word.startswith("devices.")]:
        raise BadInput(f"{others[0]} is no setting of devices; they look like devices.up=5")
    profile = config.read(None, [f"devices={devices}", *words]).devices
    if profile is None:
        raise BadInput("--devices names no devices; there are phone, hospital and iot")
    try:
        wanted = [float(part) for part in targets.split(",") if part]
    except ValueError:
        raise BadInput(f"--targets is {targets!r}, but it should be accuracies such as 0.8,0.9") from None
    rows = []
    for name, path in named([word for word in runs if not _is_setting(word)]).items():
        found = timing(path, profile)
        evaluations = [*zip(*curve(RunFolder.open(path)), strict=True)]
        reached = {f"seconds to {target:g}": time_to(evaluations, target, found.rounds) for target in wanted}
        parts = {part: sum(getattr(each, part) for each in found.slowest.values()) for part in Seconds._fields}
        rows.append(
            {"run": name, "rounds": len(found.rounds), "seconds": sum(found.rounds.values()), **parts, **reached}
        )
    _say_json({"devices": config.plain(profile), "runs": rows}) if json else _print_rows(rows)


@app.command()
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
    from ..experiment import Experiment
    from .bench import JOBS, ON_CPU, SMALL, bench, draw

    placed = Experiment(device=device).resolved()
    jobs = SMALL if small else ON_CPU if placed.device == "cpu" else JOBS
    with threads(1), matmuls(placed.precision):
        rows = [*bench(jobs, placed.precision, placed.device, placed.workers, repeats)]  # pyright: ignore[reportArgumentType]
    if out:
        draw(rows, Path(out))
    if json:
        name = torch.cuda.get_device_name() if placed.device != "cpu" else "CPU"
        _say_json({"device": name, "precision": placed.precision, "torch": torch.__version__, "rows": rows})
        return
    columns = {
        "job": "job",
        "engine": "engine",
        "images_per_second": "images/s",
        "over_sequential": "x sequential",
        "over_central": "x central",
        "first_round_seconds": "first round, s",
    }
    _print_rows([{short: row[name] for name, short in columns.items()} for row in rows])


@app.command(context_settings={"ignore_unknown_options": True})
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
        raise _Explained(_complain("stopped; the same command goes on where it was", 130)) from None
    if json:
        _say_json({**found.plain(), "pictures": drawn, "report": page and str(page), "folder": str(place)})
    else:
        for setting, *tables in found.tables():
            print(f"\n{setting}" if setting else "")
            for table in tables:
                _print_rows(table)
        print("\n".join(found.said()))
        print(*drawn, place / "compare.md", *([page] if page else []), sep="\n")
    raise typer.Exit(0 if found.complete else 1)


@app.command(context_settings={"ignore_unknown_options": True})
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
    found = recommend(config.read(*_split(words)), evidence, kind, megabytes=megabytes, private=privacy)
    if json:
        _say_json(asdict(found))
        return
    if found.advice:
        _print_rows([asdict(one) for one in found.advice])
    print("\n".join(found.notes))


@app.command()
def reproduce(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[PAPER/WHAT] [key=value ...]", show_default=False)
    ] = None,
    rows: Annotated[list[str] | None, typer.Option(help="Such as fedavg,fedsls; without it all.")] = None,
    columns: Annotated[
        list[str] | None, typer.Option(help="Such as cifar10 or cifar10/0.05,cifar10/0.1; without it all.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="How many, such as 3, or which, such as 0,1,2.")] = "1",
    images: Annotated[int, typer.Option(min=0, help="That a figure looks at; 0: as many as the paper.")] = 0,
    out: Annotated[str, typer.Option(help="Where runs, tables and pictures go.")] = "reproduced",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command of each missing run.")] = False,
    json: Json = False,
) -> None:
    """Run what is missing of a paper's table, or draw one of its figures; alone, list what there is.

    Settings change every run of the table: that is another protocol, which the table says and keeps apart.
    """
    from ..core.errors import BadInput, nearest
    from ..papers.figure_runs import Figure
    from ..papers.registry import reproducible
    from ..papers.table import gather, reproduce
    from ..papers.table_figure import draw
    from ..runs.grid import seeds_of
    from ..simulate import progress as panel

    known = reproducible()
    name, settings = _split(words)
    if name is None:
        listed = [{"name": one.name, "about": one.about} for one in known.values()]
        _say_json(listed) if json else _print_rows(listed)
        return
    if name not in known:
        raise BadInput(f"{name!r} is nothing that can be reproduced; {nearest(name, known)}")
    asked, place = known[name], Path(out)
    if isinstance(asked, Figure):
        if rows or columns or dry_run:
            raise BadInput(f"{name} is a figure: --rows, --columns and --dry-run are for tables")
        drawn = [str(path) for path in asked.draw(settings, images or asked.images, place / name)]
        _say_json({"files": drawn}) if json else print("\n".join(drawn))
        return
    chosen_rows, chosen_columns = _listed("--rows", rows, asked.rows), _listed("--columns", columns, asked.columns)
    wanted = seeds_of(seeds)
    if dry_run:
        cells = asked.cells(chosen_rows, chosen_columns, settings)
        done = gather(asked, place, settings).done
        missing = [(cell, seed) for seed in wanted for cell in cells if seed not in done[cell.row, cell.column]]
        commands = [cell.command(place, seed) for cell, seed in missing]
        _say_json(commands) if json else print("\n".join(commands))
        return
    try:
        table = reproduce(
            asked,
            place,
            rows=chosen_rows,
            columns=chosen_columns,
            seeds=wanted,
            words=settings,
            watch=lambda: panel.watcher(json),
            say=lambda text: print(text, file=sys.stderr if json else sys.stdout),
        )
    except KeyboardInterrupt:
        raise _Explained(_complain("stopped; the same command goes on where it was", 130)) from None
    drawn = draw(table)
    _say_json(table.entries()) if json else print(
        f"{table.markdown()}\n{place / table.name}.md\n{drawn or ''}".rstrip()
    )
    raise typer.Exit(1 if table.failures else 0)


def _listed(option: str, texts: list[str] | None, known: Iterable[str]) -> list[str]:
    """Names with commas between them, where a name may have a comma itself: the longest that is known is meant."""
    from ..core.errors import BadInput

    found, longest_first = [], sorted(known, key=len, reverse=True)
    for text in texts or ():
        rest = text.strip(", ")
        if not rest:
            raise BadInput(f"{option} {text!r} names nothing")
        while rest:
            whole = next((name for name in longest_first if f"{rest},".startswith(f"{name},")), rest.partition(",")[0])
            found.append(whole.strip())
            rest = rest[len(whole) :].lstrip(", ")
    return found


@app.command()
def audit(
    run: Annotated[str, typer.Argument(help="The folder of a run with transcript=MiB.")],
    attacks: Annotated[str, typer.Option(help="Such as loss,lira,gradients,labels; without it all that apply.")] = "",
    fpr: Annotated[str, typer.Option(help="Rates of false alarms, such as 0.01,0.001.")] = "",
    candidates: Annotated[int, typer.Option(min=10, help="Members that are asked about, and as many others.")] = 500,
    seeds: Annotated[int, typer.Option(min=1, help="Repeats of attacks that train something.")] = 2,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json: Json = False,
) -> None:
    """Attack what the server received in a run: who was trained on, which images, which labels."""
    from ..audit.attack import LEGEND
    from ..audit.run import audit
    from ..core.errors import BadInput
    from ..engines.process import threads

    try:
        rates = [float(part) for part in fpr.split(",") if part]
    except ValueError:
        raise BadInput(f"--fpr is {fpr!r}, but it should be rates such as 0.01,0.001") from None
    names = [part.strip() for part in attacks.split(",") if part.strip()]
    out = sys.stderr if json else sys.stdout
    with threads(1):
        found = audit(
            run,
            names,
            fprs=rates,
            candidates=candidates,
            seeds=seeds,
            device=device,
            say=lambda text: print(text, file=out, flush=True),
        )
    if json:
        _say_json(found.plain())
        return
    rows = [
        {"attack": v.attack, "measure": measure, **dict(zip(LEGEND, v.beside(measure), strict=True))}
        for v in found.verdicts
        for measure in v.found
    ]
    _print_rows(rows)
    for name, meaning in LEGEND.items():
        print(f"{name}: {meaning}.")
    for name, why in found.skipped.items():
        print(f"{name} was not tried: {why}")
    print(f"{found.run}/audit.md, pictures in {found.run}/figures; {found.seconds:.1f} s")


@app.command()
def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN ...", show_default=False, help="Runs, or folders of them.")],
    out: Annotated[str, typer.Option(help="The HTML file; without it report.html beside the runs.")] = "",
    latency: Annotated[bool, typer.Option("--latency", help="Time SPATL's sub-models on this machine, too.")] = False,
    json: Json = False,
) -> None:
    """One HTML file about runs that needs nothing else: the answer in words, curves, tables, clients, bytes, audits."""
    from ..report.page import write

    place = Path(out) if out else (Path(runs[0]) if len(runs) == 1 else Path()) / "report.html"
    written = write([Path(run) for run in runs], place, latency)
    _say_json({"report": str(written), "bytes": written.stat().st_size}) if json else print(written)


@app.command()
def ui(
    folder: Annotated[str, typer.Argument(help="Where runs are, or one of them.")] = "runs",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8765,
    host: Annotated[str, typer.Option(help="Another address lets others in, and needs --token.")] = "127.0.0.1",
    token: Annotated[
        str, typer.Option(envvar="FEDLENS_UI_TOKEN", help="A word of 16 letters or more that visitors must know.")
    ] = "",
) -> None:
    """A live page over a folder of runs: curves as they grow, comparisons, clients, reports; it can stop a run."""
    from ..ui.server import LiveServer

    with LiveServer(folder, host, port, token) as server:
        print(f"{server.address}  (Ctrl-C ends it)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


data_app = typer.Typer(no_args_is_help=True, help="Data sets and splits.", rich_markup_mode=None)
app.add_typer(data_app, name="data")
app.add_typer(deploy, name="deploy")


@data_app.command("list")
def data_list(json: Json = False) -> None:
    """Every data set and where it was found, and every partition."""
    from ..data.show import list_rows

    rows = list_rows()
    if json:
        _say_json(rows)
        return
    for kind, columns in {"data": ("name", "state", "about"), "partition": ("name", "about", "options")}.items():
        _print_rows([{name: row[name] for name in columns} for row in rows if row["kind"] == kind])
    print("`fedlens data get NAME` says what to fetch and where to put it")


@data_app.command("get")
def data_get(name: str, json: Json = False) -> None:
    """Fetch and decode a data set into the cache."""
    from ..data.show import get

    row = get(name)
    _say_json(row) if json else _print_rows([row])


@data_app.command("check")
def data_check(
    names: Annotated[list[str] | None, typer.Argument(show_default=False)] = None, json: Json = False
) -> None:
    """Verify checksums of what is here; exit code 1 when something is damaged."""
    from ..data.show import check_rows

    rows = check_rows(names or ())
    _say_json(rows) if json else _print_rows(rows)
    raise typer.Exit(1 if any(row["state"] == "damaged" for row in rows) else 0)


@data_app.command("show")
def data_show(
    words: Words = None, out: Annotated[str, typer.Option(help="The picture.")] = "split.png", json: Json = False
) -> None:
    """Draw a split: data=cifar10 partition.alpha=0.1 clients=100 ..."""
    from dataclasses import asdict

    from .. import config
    from ..data import Names, skew
    from ..data.show import draw_split

    experiment = config.read(*_split(words))
    images = experiment.data.load()
    _, split = experiment.federation(images)
    pictures = [str(path) for path in draw_split(images, split, out)]
    names = asdict(Names.of(images, split))
    row = {"hash": split.hash, "notes": list(split.notes), "skew": asdict(skew(split, images)), "pictures": pictures}
    if json:
        _say_json({**row, "names": names})
        return
    for note in split.notes:
        print(f"note: {note}")
    if named := [f"{number} {name}" for number, name in enumerate(names["clients"])]:
        print(f"clients: {', '.join(named[:_CLIENTS])}" + (", ..." if len(named) > _CLIENTS else ""))
    print(f"{pictures[0]}  (split {split.hash[:16]})")


def _print_rows(rows: list[dict[str, Any]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)  # all the room of a narrow terminal is theirs
    for key in dict.fromkeys(key for row in rows for key in row):
        cells = [_cell(row.get(key, "")) for row in rows]
        is_name = key in ("method", "run")  # never cut, nor in two lines
        table.add_column(key, min_width=max(map(len, cells)) if is_name else None, no_wrap=is_name, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(str(column.header), "")) for column in table.columns))
    Console().print(table)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)


class _Explained(Exception):
    """What stopped a run has been said; the exit code is left."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


def _watched(json: bool, work: Callable[[Any], Any]) -> Any:
    """Work on a run before somebody's eyes; when it stops early, they are told how to go on."""
    from ..simulate import progress as panel

    watcher = panel.watcher(json)
    try:
        with watcher:
            return work(watcher)
    except BaseException as error:  # also Ctrl-C, which typer would swallow
        raise _Explained(_explain(error, watcher.folder)) from None


def _closing(result: Any, json: bool) -> None:
    if json:
        _say_json(result.plain())
        return
    from ..core.format import duration, percent, size

    if result.accuracy is not None and (result.loss is None or not math.isfinite(result.loss)):
        print("note: the loss is not finite: training diverged, which a lower local.lr or uplink=clip may mend")
    if result.accuracy is not None:
        print(f"accuracy {percent(result.accuracy, 2)} (global model, pooled test set, after {result.rounds} rounds)")
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
    for said in json_module.loads(file.read_text())["statements"] if file.exists() else ():
        if said["epsilon"] is None:
            promise = "no privacy"
        else:
            promise = f"epsilon {said['epsilon']:.4g} at delta {said['delta']:g}"
        holds = "" if said["holds"] else f", which does not hold: {said['because']}"
        yield f"privacy, as simulated: {promise} of {said['unit'].partition(';')[0]}{holds} ({file})"


def _say_json(value: Any) -> None:
    from ..core.files import finite

    print(json_module.dumps(finite(value)))


def main() -> None:
    """One clear sentence for everything that can go wrong; the exit code says whose turn it is."""
    try:
        code = _guarded()
    except BrokenPipeError:  # whoever read it, such as head, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    sys.exit(code)


def _guarded() -> int:
    try:
        code = app(prog_name="fedlens", standalone_mode=False)
    except _Explained as stop:
        return stop.code
    except Exception as error:
        return _explain(error, None)
    return _explain(KeyboardInterrupt(), None) if code == 130 else code or 0  # typer's answer to Ctrl-C


def _explain(error: BaseException, run: Path | None) -> int:
    """Say what happened, and how to go on with a run that had begun; anything else is a bug, and stays one."""
    from ..core.errors import BadInput, ClientFailed, RunFailed

    go_on = f"; go on with `fedlens resume {shlex.quote(str(run))}`" if run else ""
    if isinstance(error, BadInput):
        return _complain(str(error), 2)
    if isinstance(error, ClientFailed):
        print(error.trace, file=sys.stderr)
    if isinstance(error, RunFailed):
        return _complain(f"{error}{go_on}", 1)
    if isinstance(error, KeyboardInterrupt):
        return _complain(f"stopped{', and the last checkpoint is kept' if run else ''}{go_on}", 130)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate" in str(error)):
        return _complain(f"there is not enough memory{go_on}", 1)
    if isinstance(error, OSError):
        return _complain(f"{_trouble(error)}{go_on}", 1)
    if hasattr(error, "format_message"):
        return _usage(error)
    raise error


def _trouble(error: OSError) -> str:
    place = f" at {Path(error.filename).parent}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"the disk is full{place}, make room; what was saved is intact"
    if error.errno == errno.EPIPE:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain once more at its end
        return "nobody reads the output any more"
    return f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")


def _usage(error: Any) -> int:
    """What typer found wrong with the words themselves."""
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message())
        return 0
    # typer and click both add the same suggestion.
    said = dict.fromkeys(error.format_message().replace("? ", "?\n").replace(". ", ".\n").splitlines())
    command = error.ctx.command_path if getattr(error, "ctx", None) else "fedlens"
    return _complain(f"{' '.join(said)} See `{command} --help`.", 2)


def _complain(sentence: str, code: int) -> int:
    print(f"fedlens: {sentence}", file=sys.stderr)
    return code
