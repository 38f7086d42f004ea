"""What a node is told to do: an experiment by names and numbers, and which of its rounds; never code, never a path."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from .. import __version__, config
from ..core.algorithm import Stage
from ..core.engine import Job
from ..core.errors import BadInput, RunFailed
from ..core.evaluate import Evaluate, personal_evaluations
from ..core.names import written_by_a_stranger
from ..core.tree import Tree
from ..core.wire import encode
from ..data import Images
from ..experiment import Execution, Experiment
from ..models import Custom
from ..robust.defence import Defence

Timetable = Sequence[tuple[Stage, int, int]]

# All that a node is told. Where data lie and results go, what is simulated and how the server runs is nobody's
# business there; `partition` is for nodes that take part of a simulation's data, which their own file names.
_TOLD = {"partition", "clients", "cohort", "model", "algorithm", "local", "rounds", "weighting", "buffers", "uplink"}
_TOLD |= {"defences", "augment", "evaluate", "seed", "precision", "compile"}
_ABOUT = "detailed", "validation"  # what an evaluation is asked for
SUMS = "accuracy", "loss"  # measures that need no counts of single classes
_SIDES, _CLASSES, _NAMED = 4096, 100_000, 200  # pixels of an image; classes; characters of a name
_MOST, _WIDEST = 1_000_000, 10_000  # any number of a contract but its seed; one of a model
_TURNS, _PARAMETERS = 10**9, 10**9  # rounds times clients; weights of a model
_SIMULATED = {
    "faults": "faults are injected into simulations; a deployed run has its own: leave faults out",
    "attack": "attack makes clients of a simulation hostile; nodes are what they are: leave attack out",
    "devices": "devices are for the clock of a simulation; a deployed run takes real seconds: leave devices out",
}


def contract(experiment: Experiment, images: Images, run: str, first: Tree | None = None) -> dict[str, Any]:
    """What all orders of a run have in common; refused where a setting cannot be told to others.

    `first`: the network's weights where they were loaded from somewhere; nodes are told their hash, and get them once.
    """
    here = replace(_without_weights(experiment), execution=_execution(experiment))
    told = {name: value for name, value in config.to_dict(here).items() if name in _TOLD}
    told["evaluate"] = {name: value for name, value in told["evaluate"].items() if name != "watch"}
    found = {
        "version": __version__,
        "run": run,
        "experiment": told,
        "counts": experiment.evaluate.watch not in SUMS,  # all that a node is told of what is watched
        "initial": "" if first is None else version(first),
        "simulation": config.to_dict(experiment.data),  # for nodes without an owner; all others have data of their own
        "data": {
            "classes": list(images.classes),
            "shape": list(images.x.shape[1:]),
            "mean": list(images.mean),
            "std": list(images.std),
        },
    }
    try:
        experiment_of(found, _own_names(told))
    except BadInput as error:
        raise BadInput(f"this cannot be told to nodes: {error}") from None
    return found


def _execution(experiment: Experiment) -> Execution:
    mine = experiment.execution
    return Execution(engine="sequential", precision=mine.precision, compile=mine.compile, picture=False)


def _without_weights(experiment: Experiment) -> Experiment:
    """Initial weights travel as the first download, and no node is told where they lie."""
    if getattr(experiment.model, "weights", ""):
        return replace(experiment, model=replace(experiment.model, weights=""))  # pyright: ignore[reportCallIssue]
    return experiment


def _own_names(value: Any) -> set[str]:
    """The module:Class names in a configuration: nodes refuse them unless their owners allow them by name."""
    if isinstance(value, dict):
        name = str(value.get("path") or "custom") if value.get("is") == "custom" else value.get("is")
        mine = {name} if isinstance(name, str) and (":" in name or value.get("is") == "custom") else set()
        return mine.union(*map(_own_names, value.values()))
    return set().union(*map(_own_names, value)) if isinstance(value, list) else set()


def experiment_of(contract: dict[str, Any], allowed: Collection[str] = ()) -> Experiment:
    """What a server asks for, refused before anything is imported or opened.

    Other versions, whose bits may differ; settings that are no matter of a node; names beyond the installed package,
    but for those of `allowed`; any text.
    """
    if contract.get("version") != __version__:
        theirs = str(contract.get("version"))[:20]
        raise BadInput(f"the server runs fedlens {theirs!r}, this node {__version__}: install the same version on both")
    asked = contract.get("experiment")
    if not isinstance(asked, dict) or not all(isinstance(key, str) for key in asked):
        raise BadInput("the contract has no experiment")
    if extra := sorted(asked.keys() - _TOLD):
        raise BadInput(f"{extra[0][:40]!r} is no part of a contract: where things lie and run is each party's own")
    if foreign := sorted(_own_names(asked) - set(allowed)):
        raise BadInput(f"{foreign[0][:80]!r} is code that this node's owner has not allowed (policy.classes)")
    if not isinstance(contract.get("initial", ""), str) or not str(contract.get("initial") or "0").isalnum():
        raise BadInput("the contract does not say which weights it begins with")
    run = contract.get("run")
    if not (isinstance(run, str) and run.isalnum() and len(run) <= _NAMED):
        raise BadInput("the run has no name of letters and digits")
    _check_data(contract.get("data"))
    with written_by_a_stranger(allowed):
        found = config.resolve(Experiment, asked)
    _check_numbers(found)
    watched = "auroc" if contract.get("counts") is True else "loss"
    return replace(found, evaluate=replace(found.evaluate, watch=watched))


def _check_numbers(experiment: Experiment) -> None:
    """Refuses what no federation asks for, before a node counts to it."""
    told = config.to_dict(experiment)
    for path, number in _numbers({name: told[name] for name in _TOLD - {"seed"} if name in told}):
        most = _WIDEST if path.startswith("model.") else _MOST
        if abs(number) > most:
            raise BadInput(f"{path} is {number:.6g}, and a contract's numbers go to {most:,}")
    turns = sum(stage.rounds for stage in experiment.algorithm.stages(experiment.plan))
    if turns > _MOST or turns * experiment.clients > _TURNS:
        raise BadInput(f"{turns:,} rounds with {experiment.clients:,} clients are more than a node counts to")


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, int]]:
    """Every whole number of a configuration, and what it is called."""
    if type(value) is int:
        yield path, value
    for name, inner in value.items() if isinstance(value, dict) else enumerate(value) if type(value) is list else ():
        yield from _numbers(inner, f"{path}.{name}" if path else str(name))


def check_size(experiment: Experiment, classes: int, channels: int, size: int) -> None:
    """Refuses a network that no node can hold, before it is made; one of the owner's own code is the owner's matter."""
    if isinstance(experiment.model, Custom):
        return
    with torch.device("meta"):  # shapes alone
        module = experiment.model.build(classes, channels, size)
    if (weights := sum(each.numel() for each in module.parameters())) > _PARAMETERS:
        raise BadInput(f"the model has {weights:,} weights, and a node holds {_PARAMETERS:,}")


def _check_data(asked: Any) -> None:
    """Numbers and short names, of images that can exist. Owners read the names, so that they are plain text."""
    data = asked if isinstance(asked, dict) else {}
    classes, shape = data.get("classes"), data.get("shape")
    fine = isinstance(classes, list) and 2 <= len(classes) <= _CLASSES and len(set(map(repr, classes))) == len(classes)
    fine = fine and all(isinstance(n, str) and n.isprintable() and len(n) <= _NAMED for n in classes or ())
    fine = fine and isinstance(shape, list) and len(shape) == 3
    fine = fine and all(type(side) is int and 0 < side <= _SIDES for side in shape or ())
    for name in ("mean", "std"):
        values = data.get(name)
        fine = fine and isinstance(values, list) and len(values) == (shape or [0])[0]
        fine = fine and all(type(value) in (int, float) and math.isfinite(value) for value in values or ())
    if not fine:
        raise BadInput("the contract does not say what images it is about: classes, shape, mean and std")


# ---- one round -------------------------------------------------------------------------------------------------------
def order_of(timetable: Timetable, job: Job) -> dict[str, Any]:
    """Which job this is, in numbers; checked by reading them back."""
    order = {"round": job.round, "at": job.at, "since": job.since, "seed": job.seed, "shared": version(job.shared)}
    look = {"epochs": job.stage.epochs, "steps": job.stage.steps}
    look |= {name: int(getattr(job.stage.algorithm, name, False)) for name in _ABOUT}
    for stage, kind in ((job.round, None), (job.round - 1, look)):
        if 0 <= stage < len(timetable):
            found = {**order, "stage": stage, "look": kind}
            if _stage(timetable, found) == job.stage:
                return found
    raise RunFailed(f"the job of round {job.round + 1} is no part of the experiment, so that no node can be told of it")


def job_of(timetable: Timetable, order: dict[str, Any], download: Tree, shared: Tree) -> Job:
    """The job that an order means. A server that asks for rounds the experiment does not have is refused."""
    check_order(order)
    stage, round = order["stage"], order["round"]
    if not 0 <= stage < len(timetable) or round != stage + (order["look"] is not None):
        raise BadInput(f"round {round + 1} is no part of the experiment, which has {len(timetable)}")
    _, at, since = timetable[stage]
    if (order["at"], order["since"]) != (at, since):
        raise BadInput(f"round {round + 1} is described in two ways: the server's fedlens differs from this node's")
    return Job(_stage(timetable, order), download, shared, round, at, since, order["seed"])


def check_look(experiment: Experiment, order: dict[str, Any]) -> None:
    """Refuses an evaluation that the contract does not have: its owner has approved none but these."""
    if order["look"] is None:
        return
    asked, local = experiment.evaluate, experiment.local
    algorithm = experiment.timetable()[order["stage"]].stage.algorithm
    personal = personal_evaluations(algorithm, asked.personal, local.epochs, local.steps)
    known = [{**how, "detailed": int(asked.measures == "all"), "validation": 0} for _, how in personal]
    if asked.validation:
        detailed = int(asked.watch not in SUMS)
        known.append({"epochs": 0, "steps": None, "detailed": detailed, "validation": 1})
    if order["look"] not in known:
        raise BadInput("the server asks for an evaluation that the contract does not have")


def check_order(order: Any) -> dict[str, Any]:
    """The same; refuses what `order_of` cannot have written."""
    given = order if isinstance(order, dict) else {}
    look = given.get("look")
    numbers = [given.get(name) for name in ("round", "at", "since", "seed", "stage")]
    numbers += [value for value in look.values() if value is not None] if isinstance(look, dict) else []
    fine = "look" in given and isinstance(given.get("shared"), str)
    fine &= look is None or (isinstance(look, dict) and look.keys() == {"epochs", "steps", *_ABOUT})
    if not (fine and all(type(value) is int for value in numbers)):
        raise BadInput("the order is damaged: it does not say which round it is")
    return given


def _stage(timetable: Timetable, order: dict[str, Any]) -> Stage:
    stage, _, _ = timetable[order["stage"]]
    if order["look"] is None:
        return stage
    how = dict(order["look"])
    about = {name: bool(how.pop(name)) for name in _ABOUT}
    return stage.errand(Evaluate(base=stage.algorithm, **about), **how)


def version(shared: Tree) -> str:
    """The name under which a common payload is remembered; the ledger's own."""
    return hashlib.sha256(encode(shared)).hexdigest()[:16] if shared else ""


def digest(*parts: Any) -> str:
    """What a contract or an order says, in 32 bytes: parts are plain data or bytes."""
    found = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else json.dumps(part, sort_keys=True).encode()
        found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()


# ---- what cannot be deployed -----------------------------------------------------------------------------------------
def check_deployable(experiment: Experiment) -> None:
    """Refuses what means something in a simulation alone, and what silent nodes would make untrue."""
    for name, sentence in _SIMULATED.items():
        if getattr(experiment.execution if name == "devices" else experiment, name):
            raise BadInput(sentence)
    if experiment.execution.checkpoint != 1:  # nodes remember two rounds, and no more
        raise BadInput(
            f"checkpoint is {experiment.execution.checkpoint}, but a deployed run keeps every round for a server "
            "that is killed: leave checkpoint out"
        )
    for stage, _, _ in experiment.timetable():
        whole = stage.cohort.size(experiment.clients)
        trusting = any(getattr(transform, "trust", "") == "aggregator" for transform in stage.uplink)
        if trusting and experiment.policy.min_replies < whole:
            raise BadInput(
                "uplink dp with trust=aggregator counts on everyone's noise, and a node can be silent: set "
                f"policy.min_replies={whole}, with which a round does not count unless everyone answers, or "
                "trust=nobody"
            )
        for defence in stage.defences:
            enough = [count for count in range(1, whole + 1) if _promises(defence, count)]
            if enough and experiment.policy.min_replies < enough[0]:
                raise BadInput(
                    f"defences.{defence.name} promises nothing for fewer than {enough[0]} replies, and nodes can be "
                    f"silent: set policy.min_replies={enough[0]}, below which a round does not count"
                )


def _promises(defence: Defence, replies: int) -> bool:
    try:
        defence.check(replies)
    except BadInput:
        return False
    return True
