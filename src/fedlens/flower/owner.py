"""What an owner reads at the node: what it would run and release, contracts that wait, and what is left of a budget."""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import config
from ..core.errors import BadInput
from ..core.evaluate import personal_evaluations
from ..experiment import Experiment
from ..simulate.describe import describe, traffic
from .contract import SUMS, experiment_of
from .node import Node, named, private, rounds_of


def shown(node: Node) -> Iterator[str]:
    """What this node would run and let out, in words."""
    source = node.data or node.simulation
    whose = "the owner's own" if node.data is not None else "of a trial, which all nodes have"
    yield f"It is client {node.client}. Its data are {whose}: {json.dumps(config.to_dict(source))}."
    yield "It runs the fedlens that is installed here. A contract brings names and numbers, never code or paths."
    allowed = ", ".join(node.policy.algorithms) or "all that are installed"
    yield f"Methods: {allowed}. Code of your own that contracts may name: {', '.join(node.policy.classes) or 'none'}."
    out = "model updates, and what a method makes of the data" if node.policy.raw_derived else "only model updates"
    measured = "leave where a contract says so" if node.privacy is None else "stay here"
    yield f"What may leave: {out}. The number of its images and accuracies on them {measured}."
    if node.data is None:
        yield "Noise is drawn from the run's seed, as in a simulation."
        return
    if node.privacy is None:
        yield "No budget is set: updates may leave without noise, and crafted weights can draw images out of them."
    else:
        yield from budget(node)
    asks = node.policy.contracts == "ask"
    yield "New contracts " + ("wait for `fedlens deploy approve`." if asks else "within this policy are carried out.")


def identity(place: Path) -> Iterator[str]:
    """Whom this node obeys, and by which key it answers."""
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    from .identity import COORDINATOR, fingerprint, read_public

    kinds = {f"{COORDINATOR}.pub": ed25519.Ed25519PublicKey, "node.pub": ec.EllipticCurvePublicKey}
    if not all((place / name).exists() for name in kinds):
        raise BadInput(f"{place} has joined no federation: `fedlens deploy join` comes first")
    theirs, mine = (fingerprint(read_public((place / n).read_bytes(), kind, n)) for n, kind in kinds.items())
    yield f"Only messages signed by the coordinator {theirs} are answered, each once."
    yield f"Its own answers are signed by the key {mine}."


def budget(node: Node) -> Iterator[str]:
    """What has left the node's data, and what is left to spend."""
    ledger = node.ledger
    if ledger is None:
        raise BadInput("this node has no ledger: it has no data of its owner's own, or no storage")
    releases = sum(line["kind"] == "booked" for line in ledger.lines())
    if ledger.epsilon is None:
        yield f"No budget is set. {releases} releases have been written down in {ledger.path}."
        return
    spent = ledger.spent()
    yield (
        f"Budget: epsilon {ledger.epsilon:g} at delta {ledger.delta:g}, for life. Spent: {spent:.4g} by {releases} "
        f"releases. Left: {max(0.0, ledger.epsilon - spent):.4g}."
    )
    yield f"Ledger: {ledger.path}."


def waiting(node: Node) -> list[Path]:
    """Contracts that the owner has not approved."""
    found = sorted((Path(node.storage) / "contracts").glob("*.json")) if node.storage else []
    return [path for path in found if not path.with_suffix(".approved").exists()]


def summary(node: Node, contract: dict[str, Any]) -> Iterator[str]:
    """A contract in words: what it trains, what leaves and how often, and what it costs."""
    experiment = experiment_of(contract, node.policy.classes)
    about = contract["data"]
    yield f"Run {contract['run']}: {' over '.join(named(experiment.algorithm))}, {experiment.clients} clients."
    names = ", ".join(json.dumps(name, ensure_ascii=False) for name in about["classes"][:20])
    yield f"Classes ({len(about['classes'])}): {names}. Images: {about['shape']}."
    turns = experiment.timetable()
    yield f"{len(turns)} rounds, of which this node takes part in those whose cohort it is in."
    channels, _, size = about["shape"]
    leaves = describe(experiment, len(about["classes"]), channels, size)
    for stage, moved in traffic(leaves).items():
        names = sorted({leaf.name.split("/")[0] for leaf in leaves if leaf.where == "up" and leaf.stage == stage})
        sent = ", ".join(name for name in names if name != "(header)") or "nothing"
        yield f"Each round of {stage} sends {sent} ({moved.get('up', 0):,} bytes)."
    yield from _evaluations(experiment)
    local = experiment.local
    work = f"{local.steps} steps" if local.steps else f"{local.epochs} epochs"
    yield f"Each round trains {work} with batches of {local.batch_size} images."
    if contract.get("initial"):
        yield "Training starts from weights that the server sends."
    dp = private(experiment.uplink)
    if dp is None:
        yield "Nothing that leaves has noise by which an account could be kept."
        return
    yield f"Every update has noise {dp.multiplier:g} times the norm {dp.norm:g} that it is cut to."
    if node.ledger is not None:
        times = rounds_of(experiment, node.client)
        spent, after = node.ledger.spent(), node.ledger.spent(dp.multiplier / 2, times)
        yield (
            f"It would take {times} updates of this node. Spent before: epsilon {spent:.4g}; afterwards {after:.4g}, "
            f"at delta {node.ledger.delta:g}."
        )


def _evaluations(experiment: Experiment) -> Iterator[str]:
    """What leaves besides uploads of rounds: how well models do on the owner's images."""
    asked, local = experiment.evaluate, experiment.local
    stages = [turn.stage.algorithm for turn in experiment.timetable()[-1:]]
    personal = any([*personal_evaluations(each, asked.personal, local.epochs, local.steps)] for each in stages)
    if not personal and not asked.validation:
        yield "Nobody is told how well models do on this node's images."
        return
    detailed = asked.measures == "all" or (asked.validation and asked.watch not in SUMS)
    more = ", class by class" if detailed else ""
    yield f"It also sends how many images it tests on, how many a model gets right, and the loss{more}."


def approve(node: Node, path: Path) -> None:
    """Once approved a contract is carried out, to its last round."""
    path.with_suffix(".approved").touch(mode=0o600)
