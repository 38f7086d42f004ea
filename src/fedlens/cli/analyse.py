"""Commands about runs that are there: diff, clients, time, audit, report, ui."""

from __future__ import annotations

import contextlib
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .format import (
    CLIENTS,
    Json,
    Style,
    Width,
    figures,
    is_setting,
    one_run,
    print_rows,
    print_text,
    runs_among,
    say_json,
    shares,
)


def diff(a: str, b: str, json: Json = False) -> None:
    """Whether two runs are the same to the bit: weights, client memories, metrics without timings. Exit code 0 or 1."""
    from ..runs.diff import differences

    found = list(differences(a, b))
    if json:
        say_json({"same": not found, "differences": found})
    elif found:
        print(f"{a} and {b} differ: {found[0]}" + (f" (and {len(found) - 1} more)" if len(found) > 1 else ""))
    else:
        print(f"{a} and {b} are the same to the bit")
    raise typer.Exit(1 if found else 0)


def clients(
    words: Annotated[list[str], typer.Argument(metavar="RUN ... [data.path=PLACE]", show_default=False)],
    confusion: Annotated[str, typer.Option(metavar="CLIENT", help="Also its confusion matrix; number or name.")] = "",
    loss: Annotated[bool, typer.Option("--loss", help="Also the training loss of rounds kept with keep=N.")] = False,
    out: Annotated[str, typer.Option(help="The picture; others are named after it.")] = "",
    style: Style = "screen",
    width: Width = "3.3in",
    json: Json = False,
) -> None:
    """What each client gets out of a run, how fair that is, and how runs differ in it; the first is the reference.

    Clients are listed by their accuracy in the first run, the worst first.
    """
    from ..report.client_figures import accuracy_bars, confusion_matrices, loss_curves
    from ..runs.folder import RunFolder
    from ..runs.opened import OpenedRun, named
    from ..runs.read import client_evaluation, fairness

    paths = named(runs := runs_among(words))
    evaluated = {name: client_evaluation(RunFolder.open(path)) for name, path in paths.items()}
    accuracies = {name: by for name, (_, by) in evaluated.items()}
    fair = {name: fairness(list(by.values())) for name, by in accuracies.items()}
    rows = [
        {"run": name, "model": evaluated[name][0], "clients": len(accuracies[name]), **fair[name]} for name in paths
    ]
    place = (Path(out) if out else RunFolder(runs[0]).figures / "clients").with_suffix("")
    names = RunFolder.open(runs[0]).names()
    with figures(style, width) as printed:
        # What may be refused comes first: a command that fails draws nothing.
        number = names.number(confusion) if confusion else 0
        counts = _confusions(paths, evaluated, number) if confusion else {}
        losses = {name: OpenedRun.open(path).training_losses() for name, path in paths.items()} if loss else {}
        drawn = [accuracy_bars(accuracies, fair, place, names)]
        if counts:
            where = place.with_name(f"{place.name}-confusion-{number}")
            classes = [names.label(label) for label in range(len(next(iter(counts.values()))))]
            drawn.append(confusion_matrices(counts, classes, where, f"{names.client(number)}, % of each class"))
        if losses:
            drawn.append(loss_curves(losses, place.with_name(f"{place.name}-loss")))
    drawn = printed or drawn
    if json:
        shown = {name: found.tolist() for name, found in counts.items()}
        more = {"confusion": shown} if shown else {}
        say_json({"runs": rows, "accuracies": accuracies, **more, "pictures": [str(path) for path in drawn]})
        return
    _print_clients(rows, accuracies, names)
    print(*drawn, sep="\n")


def _confusions(paths: dict[str, Path], evaluated: dict[str, tuple[str, Any]], client: int) -> dict[str, Any]:
    """Run -> [truth, prediction] of a client's test images: as the tables have it, or its model predicts it again."""
    import torch

    from ..runs.folder import RunFolder
    from ..runs.measures import confusion
    from ..runs.opened import OpenedRun, same_split

    found, splits = {}, set()
    for name, path in paths.items():
        folder = RunFolder.open(path)
        found[name] = confusion(folder.metrics(), evaluated[name][0], len(folder.names().classes), client)
        card = folder.passport()
        splits.add((card["split_hash"], card["data"]["sha256"]))
    if len(splits) == 1 and all(counts is not None for counts in found.values()):
        return {name: torch.tensor(counts) for name, counts in found.items()}
    opened = {name: OpenedRun.open(path) for name, path in paths.items()}
    same_split(opened)
    return {name: run.confusion(client) for name, run in opened.items()}


def _print_clients(rows: list[dict[str, Any]], accuracies: dict[str, dict[int, float]], names: Any) -> None:
    """The verdict, fairness by run, and the clients who are worst off."""
    from ..core.format import percent

    fair = {row["run"]: row for row in rows}
    best = max(fair, key=lambda name: fair[name]["worst_decile"])
    print_text(
        f"The worst-off tenth of clients has {percent(fair[best]['worst_decile'])} on average"
        + (f" with {best}, the most of these {len(fair)} runs." if len(fair) > 1 else ".")
    )
    titles = {"mean": "mean, %", "std": "std, %", "worst_decile": "worst tenth, %"}
    print_rows([{titles.get(k, k): f"{100 * v:.2f}" if k in titles else v for k, v in row.items()} for row in rows])
    everyone = sorted({client for by in accuracies.values() for client in by})
    reference = next(iter(accuracies.values()))
    everyone.sort(key=lambda client: reference.get(client, math.inf))
    print_rows(
        [
            {
                "client": client,
                **({"name": names.clients[client]} if names.clients else {}),
                **{f"{n}, %": f"{100 * by[client]:.2f}" if client in by else "–" for n, by in accuracies.items()},
            }
            for client in everyone[:CLIENTS]
        ]
    )
    if len(everyone) > CLIENTS:
        print(f"and {len(everyone) - CLIENTS} more, who are better off; --json has them all")


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
    from ..runs.read import evaluations, rounds_of
    from ..simulate.timing import timing

    words = [word for word in runs if is_setting(word) and word.startswith("devices.")]
    if others := [word for word in runs if is_setting(word) and word not in words and ".path=" not in word]:
        raise BadInput(f"{others[0]} is no setting of devices; they look like devices.up=5")
    profile = config.read(None, [f"devices={devices}", *words]).execution.devices
    if profile is None:
        raise BadInput("--devices names no devices; there are phone, hospital and iot")
    wanted = shares("--targets", targets, "accuracies such as 0.8,0.9")
    rows = []
    for name, path in named(runs_among([word for word in runs if word not in words])).items():
        found, folder = timing(path, profile), RunFolder.open(path)
        counts = rounds_of(folder)
        curve = evaluations(folder.metrics(), "accuracy", counts).values()
        reached = {f"seconds to {target:g}": time_to(curve, target, found.rounds) for target in wanted}
        parts = {part: sum(getattr(each, part) for each in found.slowest.values()) for part in Seconds._fields}
        rows.append(
            {
                "run": name,
                "rounds": counts.trained(len(found.rounds)),
                "seconds": sum(found.rounds.values()),
                **parts,
                **reached,
            }
        )
    say_json({"devices": config.to_dict(profile), "runs": rows}) if json else print_rows(rows)


def audit(
    run: Annotated[str, typer.Argument(help="The folder of a run with transcript=MiB.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[data.path=PLACE]", show_default=False)] = None,
    attacks: Annotated[str, typer.Option(help="Such as loss,lira,gradients,labels; without it all that apply.")] = "",
    fpr: Annotated[str, typer.Option(help="Rates of false alarms, such as 0.01,0.001.")] = "",
    candidates: Annotated[int, typer.Option(min=10, help="Members that are asked about, and as many others.")] = 500,
    seeds: Annotated[int, typer.Option(min=1, help="Repeats of attacks that train something.")] = 2,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    style: Style = "screen",
    width: Width = "3.3in",
    json: Json = False,
) -> None:
    """Attack what the server received in a run: who was trained on, which images, which labels."""
    from ..audit.attack import LEGEND
    from ..audit.run import audit
    from ..engines.process import threads

    rates = shares("--fpr", fpr, "rates such as 0.01,0.001")
    names = [part.strip() for part in attacks.split(",") if part.strip()]
    one_run("audited", run, words)
    out = sys.stderr if json else sys.stdout
    with threads(1), figures(style, width) as printed:
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
        say_json(found.plain())
        return
    print_text(found.verdict())
    rows = [
        {"attack": v.attack, "measure": measure, **dict(zip(LEGEND, v.beside(measure), strict=True))}
        for v in found.verdicts
        for measure in v.found
    ]
    print_rows(rows)
    for name, meaning in LEGEND.items():
        print_text(f"{name}: {meaning}.")
    for name, why in found.skipped.items():
        print_text(f"{name} was not tried: {why}")
    print(*printed, f"{found.run}/audit.md, pictures in {found.run}/figures; {found.seconds:.1f} s", sep="\n")


def report(
    words: Annotated[
        list[str],
        typer.Argument(metavar="RUN ... [data.path=PLACE]", show_default=False, help="Runs, or folders of them."),
    ],
    out: Annotated[str, typer.Option(help="The HTML file; without it report.html beside the runs.")] = "",
    latency: Annotated[bool, typer.Option("--latency", help="Time selected sub-models on this machine, too.")] = False,
    json: Json = False,
) -> None:
    """One HTML file about runs that needs nothing else: the answer in words, curves, tables, clients, bytes, audits."""
    from ..report.page import write

    runs = runs_among(words)
    place = Path(out) if out else (Path(runs[0]) if len(runs) == 1 else Path()) / "report.html"
    written = write([Path(run) for run in runs], place, latency)
    say_json({"report": str(written), "bytes": written.stat().st_size}) if json else print(written)


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
