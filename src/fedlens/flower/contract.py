"""What a node is told to do: an experiment by names and numbers, and which of its rounds; never code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .. import __version__, config
from ..core.algorithm import Stage
from ..core.engine import Job
from ..core.errors import BadInput, RunFailed
from ..core.evaluate import Evaluate
from ..core.tree import Tree
from ..core.wire import encode
from ..data import Images
from ..experiment import Execution, Experiment

Timetable = Sequence[tuple[Stage, int, int]]


def contract(experiment: Experiment, images: Images, run: str) -> dict[str, Any]:
    """What all orders of a run have in common. Where things lie and run is each party's own matter."""
    mine = experiment.execution
    here = Execution(engine="sequential", precision=mine.precision, compile=mine.compile, picture=False)
    return {
        "version": __version__,
        "run": run,
        "experiment": config.to_dict(replace(experiment, execution=here)),
        "data": {
            "classes": list(images.classes),
            "shape": list(images.x.shape[1:]),
            "mean": list(images.mean),
            "std": list(images.std),
        },
    }


def experiment_of(contract: dict[str, Any]) -> Experiment:
    """Refuses other versions, whose bits may differ, and names that would import a module of somebody's choice."""
    if contract.get("version") != __version__:
        theirs = contract.get("version")
        raise BadInput(f"the server runs fedlens {theirs}, this node {__version__}: install the same version on both")
    if foreign := next(_foreign(contract["experiment"]), None):
        raise BadInput(f"{foreign!r} is code of its own; nodes run what their own fedlens has, and nothing else")
    return config.resolve(Experiment, contract["experiment"])


def _foreign(value: Any):
    if isinstance(value, dict):
        name = value.get("is")
        if isinstance(name, str) and (":" in name or name == "custom"):
            yield value.get("path", name)
        for inner in value.values():
            yield from _foreign(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _foreign(inner)


# ---- one round -------------------------------------------------------------------------------------------------------
def order_of(timetable: Timetable, job: Job) -> dict[str, Any]:
    """Which job this is, in numbers; checked by reading them back."""
    order = {"round": job.round, "at": job.at, "since": job.since, "seed": job.seed, "shared": version(job.shared)}
    look = {"epochs": job.stage.epochs, "steps": job.stage.steps}
    for stage, kind in ((job.round, None), (job.round - 1, look)):
        if 0 <= stage < len(timetable):
            found = {**order, "stage": stage, "look": kind}
            if _stage(timetable, found) == job.stage:
                return found
    raise RunFailed(f"the job of round {job.round + 1} is no part of the experiment, so that no node can be told of it")


def job_of(timetable: Timetable, order: dict[str, Any], download: Tree, shared: Tree) -> Job:
    """The job that an order means. A server that asks for rounds the experiment does not have is refused."""
    stage, round = order["stage"], order["round"]
    if not 0 <= stage < len(timetable) or round != stage + (order["look"] is not None):
        raise BadInput(f"round {round + 1} is no part of the experiment, which has {len(timetable)}")
    _, at, since = timetable[stage]
    if (order["at"], order["since"]) != (at, since):
        raise BadInput(f"round {round + 1} is described in two ways: the server's fedlens differs from this node's")
    return Job(_stage(timetable, order), download, shared, round, at, since, order["seed"])


def _stage(timetable: Timetable, order: dict[str, Any]) -> Stage:
    stage, _, _ = timetable[order["stage"]]
    return stage if order["look"] is None else stage.errand(Evaluate(base=stage.algorithm), **order["look"])


def version(shared: Tree) -> str:
    """The name under which a common payload is remembered; the ledger's own."""
    return hashlib.sha256(encode(shared)).hexdigest()[:16] if shared else ""


def digest(contract: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contract, sort_keys=True).encode()).hexdigest()[:16]
