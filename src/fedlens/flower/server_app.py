"""The ServerApp: our own round loop over Flower's Grid, into a run folder like any other; started again, it goes on."""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from .. import config
from ..core.check import MIB
from ..core.errors import BadInput
from ..core.files import read_json
from ..core.ledger import Ledger
from ..core.network import Network
from ..core.tree import Tree
from ..data import Images
from ..engines.process import keep_freed_memory, matmuls, threads
from ..engines.sequential import Sequential
from ..experiment import Experiment, to_device
from ..runs.checkpoints import Checkpoint
from ..runs.figure import draw_run
from ..runs.folder import RunFolder, config_hash, passport
from ..runs.places import remember
from ..runs.read import Result
from ..runs.start import with_run_weights
from ..runs.trackers import check as check_trackers
from ..runs.trackers import tracked
from ..simulate import checks as scope
from ..simulate.recorder import Nobody, Parts, Recorder, Watcher, progress_line
from ..simulate.run import check_pool, label_counts, public_images, reply_check, session
from .contract import check_deployable, contract, order_of
from .engine import Flower, Nodes
from .launch import SERVER, flower_runs

if TYPE_CHECKING:
    from .identity import Coordinator

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    place = os.environ.get(SERVER)  # as `fedlens deploy server` has set it; none: a simulation of Flower's
    coordinator = None
    if place:
        from .identity import Coordinator

        coordinator = Coordinator(Path(place))
    federate(grid, context.run_config, watcher=Printed(), flower_run=context.run_id, coordinator=coordinator)


class Printed(Nobody):
    """Lines for Flower's log."""

    def round(self, progress):
        print(progress_line(progress), flush=True)

    def note(self, text):
        print(f"note: {text}", flush=True)


def federate(
    grid: Grid,
    settings: Mapping[str, Any],
    *,
    watcher: Watcher | None = None,
    flower_run: int | None = None,
    coordinator: Coordinator | None = None,
) -> Result:
    """A deployed run. settings: the words of `fedlens run`, with out; seconds to wait for nodes, and for replies."""
    asked = config.read(None, shlex.split(str(settings["settings"])))
    if not Path(asked.execution.out).is_absolute():
        raise BadInput(
            f"out is {asked.execution.out!r}, but a server needs the whole path of the run's folder, such as /data/run"
        )
    experiment = with_run_weights(config.check(asked.with_execution(engine="sequential"))).resolved()
    check_deployable(experiment)
    images = experiment.images()
    scope.check(experiment, images)
    check_trackers(experiment)
    with threads(1):
        ready = images, experiment.network(images), public_images(experiment)
    folder = _folder(experiment)  # from here on it is written to
    with folder.locked():
        checkpoint, notes = folder.load()
        if (before := folder.result()) and checkpoint and checkpoint.round == len(experiment.timetable()):
            return Result.stored(before)
        start = checkpoint or Checkpoint(0, Tree(), Ledger(), 0.0)
        waits = {name: float(settings.get(name, usual)) for name, usual in (("wait", 600), ("patience", 600))}
        book = _Book(folder, flower_run)
        with tracked(watcher or Nobody(), experiment, folder.path, start.round) as told:
            gathered = partial(Nodes, grid, coordinator=coordinator)
            result = _carry_on(gathered, folder, book.run, experiment, ready, start, told, notes, **waits)
        book.close()
        return result


class _Book:
    """Under which name nodes know the run, and which of Flower's it was, several after a crash; then their bytes."""

    def __init__(self, folder: RunFolder, flower_run: int | None):
        self.folder, path = folder, folder.path / "federation.json"
        card = read_json(path) if path.exists() else {"run": secrets.token_hex(8), "flower_runs": []}
        self.run: str = card["run"]
        self.flower_runs: list[int] = card["flower_runs"] + ([] if flower_run is None else [flower_run])
        folder.write_json("federation.json", {"run": self.run, "flower_runs": self.flower_runs})
        folder.sync()

    def close(self) -> None:
        ours = {str(each) for each in self.flower_runs}
        rows = [row for row in flower_runs({}) if str(row["run-id"]) in ours] if ours else []
        if len(rows) == len(ours) > 0:
            self.folder.write_json("flower.json", {"flower": rows})
        elif ours:
            self.folder.log("note: Flower did not report how many bytes it sent")


def _folder(experiment: Experiment) -> RunFolder:
    """A new one, or that of the same experiment, which goes on."""
    RunFolder(experiment.execution.out).mend()
    if not (Path(experiment.execution.out) / "config.yaml").exists():
        return RunFolder.create(experiment)
    folder = RunFolder.open(experiment.execution.out)
    before = config.read(folder.config)
    if config_hash(before) != config_hash(experiment):
        raise BadInput(f"{folder.path} holds a run with other settings; choose another out=")
    return folder


def _carry_on(
    gathered: Callable[..., Nodes],
    folder: RunFolder,
    run: str,
    experiment: Experiment,
    ready: tuple[Images, Network, Images | None],
    start: Checkpoint,
    watcher: Watcher,
    notes: list[str],
    *,
    wait: float,
    patience: float,
) -> Result:
    def say(text: str) -> None:
        folder.log(f"note: {text}")
        watcher.note(text)

    images, net, public = ready
    first = net.initial_weights() if experiment.model.weights else None
    agreed = contract(experiment, images, run, first)
    keep_freed_memory()
    with threads(1), matmuls(experiment.execution.precision):
        net = net.to(experiment.execution.device)
        nodes = gathered(agreed, experiment.clients, say, experiment.policy.max_reply_mib * MIB)
        nodes.gather(wait)
        # Where nodes bring their own data, the server's is one party's alone, and only its test part is looked at.
        seen = experiment.undivided() if nodes.own_data else experiment
        federation, split = seen.federation(images)
        check_pool(federation, images)
        engine = Flower(
            nodes,
            Sequential(net, to_device(experiment, federation)),
            partial(order_of, experiment.timetable()),
            journal=folder.path / "journal",
            holders=start.ledger.holders,
            patience=patience,
            deadline=experiment.policy.deadline,
            first=first,
        )
        if not (folder.path / "passport.json").exists():
            card = passport(experiment, images, split)
            card |= {"engine": "flower", "nodes_own_data": nodes.own_data, **remember(folder, experiment)}
            if nodes.own_data:
                card |= {"split_hash": None, "split_notes": []}  # nobody here knows it
            known = None if nodes.own_data else split
            folder.register(card, known, label_counts(federation, len(images.classes)))
        folder.tidy(start)
        check = reply_check(experiment, net, engine.local.federation)
        recorder = Recorder(folder, experiment, engine, start, watcher, Parts(own_noise=nodes.own_noise, check=check))
        auxiliary = None if public is None else experiment.public(public, images)
        result = replace(session(recorder, engine, net, notes, auxiliary, check), engine="flower")
    folder.write_json("result.json", result.plain())
    folder.sync()
    if experiment.execution.picture and folder.has_all_rows and not nodes.own_data:
        draw_run(folder, folder.figures / "run")
    return result
