"""The ServerApp: our own round loop over Flower's Grid, into a run folder like any other; started again, it goes on."""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from .. import config
from ..core.errors import BadInput
from ..core.ledger import Ledger
from ..core.run import run as run_rounds
from ..core.tree import Tree
from ..data import PARTITIONS
from ..engines.allocator import keep_freed_memory
from ..engines.flower import Flower, Nodes
from ..engines.sequential import Sequential
from ..experiment import Experiment, settled
from ..runs import Checkpoint, RunFolder, config_hash, passport
from ..simulate import Nobody, Recorder, Result, Watcher, label_counts, matmuls, public_images, threads
from .orders import contract, order_of

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    federate(grid, context.run_config, watcher=Printed())


class Printed(Nobody):
    """Lines for Flower's log."""

    def round(self, progress):
        from ..simulate import line

        print(line(progress), flush=True)

    def note(self, text):
        print(f"note: {text}", flush=True)


def federate(grid: Grid, settings: Mapping[str, Any], *, watcher: Watcher | None = None) -> Result:
    """A deployed run. settings: the words of `fedlens run`, with out; seconds to wait for nodes, and for replies."""
    asked = config.read(None, shlex.split(str(settings["settings"])))
    if not Path(asked.out).is_absolute():
        raise BadInput(
            f"out is {asked.out!r}, but a server needs the whole path of the run's folder, such as /data/run"
        )
    experiment = config.check(replace(asked, engine="sequential")).placed()
    folder = _folder(experiment)
    with folder.locked():
        checkpoint, _ = folder.load()
        if (before := folder.result()) and checkpoint and checkpoint.round == len(experiment.timetable()):
            return Result(**before)
        start = checkpoint or Checkpoint(0, Tree(), Ledger(), 0.0)
        waits = {name: float(settings.get(name, usual)) for name, usual in (("wait", 600), ("patience", 600))}
        return _carry_on(grid, folder, experiment, start, watcher or Nobody(), **waits)


def _folder(experiment: Experiment) -> RunFolder:
    """A new one, or that of the same experiment, which goes on."""
    text = config.to_yaml(experiment)
    if not (Path(experiment.out) / "config.yaml").exists():
        folder = RunFolder.create(experiment, text)
        folder.write_json("federation.json", {"run": secrets.token_hex(8)})
        return folder
    folder = RunFolder.open(experiment.out)
    before = config.read(folder.config)
    if config_hash(config.plain(before)) != config_hash(config.plain(experiment)):
        raise BadInput(f"{folder.path} holds a run with other settings; choose another out=")
    return folder


def _carry_on(
    grid: Grid,
    folder: RunFolder,
    experiment: Experiment,
    start: Checkpoint,
    watcher: Watcher,
    *,
    wait: float,
    patience: float,
) -> Result:
    def say(text: str) -> None:
        folder.log(f"note: {text}")
        watcher.note(text)

    images, public = experiment.data.load(), public_images(experiment)
    agreed = contract(experiment, images, json.loads((folder.path / "federation.json").read_text())["run"])
    keep_freed_memory()
    with threads(1), matmuls(experiment.precision):
        net = experiment.network(images).to(experiment.device)
        nodes = Nodes(grid, agreed, experiment.clients, say)
        nodes.gather(wait)
        # Where nodes bring their own data, the server's is one party's alone, and only its test part is looked at.
        seen = replace(experiment, partition=PARTITIONS["iid"](), clients=1) if nodes.own_data else experiment
        federation, split = seen.federation(images)
        engine = Flower(
            nodes,
            Sequential(net, settled(experiment, federation)),
            partial(order_of, experiment.timetable()),
            journal=folder.path / "journal",
            holders=start.ledger.holders,
            patience=patience,
        )
        if not (folder.path / "passport.json").exists():
            card = passport(experiment, config.plain(experiment), images, split)
            card |= {"engine": "flower", "nodes_own_data": nodes.own_data}
            if nodes.own_data:
                card |= {"split_hash": None, "split_notes": []}  # nobody here knows it
            else:
                split.save(folder.path / "split.json")
                folder.write_json("label_counts.json", label_counts(federation, len(images.classes)))
            folder.write_json("passport.json", card)
        recorder = Recorder(folder, experiment, engine, start, watcher)
        recorder.disclosure.refuse(start.round)
        watcher.begin(experiment, folder.path, [], start.round, recorder.rounds)
        run_rounds(
            experiment.algorithm,
            net,
            engine,
            experiment.plan,
            seed=experiment.seed,
            auxiliary=None if public is None else experiment.public(public, images),
            state=start.state.map(lambda leaf: leaf.to(experiment.device)),
            round=start.round,
            observe=recorder,
        )
        result = replace(recorder.conclude(), engine="flower")
    folder.write_json("result.json", result.plain())
    if experiment.picture and not nodes.own_data:
        from ..report.figures import first_look

        first_look(folder, folder.figures / "run")
    return result
