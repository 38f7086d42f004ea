"""compile=auto, decided: for one run by the steps ahead of it, for a comparison once, by those of all its runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from .. import config
from ..core.batches import Federation
from ..core.errors import BadInput
from ..core.network import Network
from ..engines import compiling
from ..engines.process import matmuls, threads
from ..experiment import Experiment
from ..runs.folder import RunFolder


def steps_ahead(experiment: Experiment, sizes: Sequence[int]) -> float:
    """Local steps of all clients in all rounds, where clients own so many images."""
    turns = [turn.stage for turn in experiment.timetable()]
    mean = {stage: sum(map(stage.local_steps, sizes)) / len(sizes) for stage in dict.fromkeys(turns)}
    return sum(stage.cohort.size(experiment.clients) * mean[stage] for stage in turns)


def settled(
    experiment: Experiment, net: Network, federation: Federation, steps: float | None = None
) -> tuple[Experiment, list[str]]:
    """The experiment with compile decided, in its network too; and a sentence for whoever starts it.

    `steps`: those of other runs with this network as well.
    """
    if experiment.execution.compile != "auto":
        return experiment, []
    where, size = experiment.execution, experiment.local.batch_size
    ahead = steps_ahead(experiment, [len(own) for own in federation.train.values()]) if steps is None else steps
    with threads(1), matmuls(where.precision):
        measure = partial(compiling.measured, net, federation, experiment.plan, where.device)
        on, said = compiling.decide(compiling.store(net, federation, size, where.device), ahead, measure)
    net.compile = on
    return experiment.with_execution(compile=on), [said]


def note_compiling(experiment: Experiment, engine: Any) -> None:
    """Remember what compiling took in this run: the next one is decided by it."""
    seconds = getattr(engine, "compile_seconds", 0.0)
    if seconds:
        size, device = experiment.local.batch_size, experiment.execution.device
        compiling.note(compiling.store(engine.net, engine.federation, size, device), seconds)


def settled_alike(experiments: Iterable[Experiment]) -> dict[Path, bool]:
    """{folder: compile} of runs that are compared: one answer for each network, so that all seeds have the same.

    A run that has begun has decided for all. Empty where there is nothing to decide, as on a CPU.
    """
    groups: dict[str, list[Experiment]] = {}
    for experiment in experiments:
        with suppress(BadInput):  # said of the run itself
            placed = config.check(experiment).resolved()
            if placed.execution.compile == "auto":
                groups.setdefault(_network(placed), []).append(placed)
    found: dict[Path, bool] = {}
    for group in groups.values():
        begun = {out: on for each in group if (on := _begun(out := Path(each.execution.out))) is not None}
        usual = next(iter(begun.values())) if begun else _together(group)
        found |= {out: begun.get(out, usual) for out in (Path(each.execution.out) for each in group)}
    return found


def with_decision(experiment: Experiment, found: Mapping[Path, bool]) -> Experiment:
    on = found.get(Path(experiment.execution.out))
    return experiment if on is None else experiment.with_execution(compile=on)


def _network(experiment: Experiment) -> str:
    """What is compiled: the same for all seeds and most methods."""
    parts: list[Any] = [experiment.data, experiment.model, experiment.local.batch_size, experiment.buffers]
    return str([*map(config.to_dict, parts), experiment.execution.precision, experiment.execution.device])


def _begun(out: Path) -> bool | None:
    """What a run in this folder decided; None where there is none, or none that decided."""
    folder = RunFolder(out)
    if not folder.config.exists():
        return None
    decided = config.read(folder.config).execution.compile
    return None if decided == "auto" else decided


def _together(group: Sequence[Experiment]) -> bool:
    first = group[0]
    images = first.images()
    federation, _ = first.federation(images)
    sizes = [len(own) for own in federation.train.values()]
    steps = sum(steps_ahead(each, sizes) for each in group)
    decided, _ = settled(first, first.network(images), federation, steps)
    return decided.execution.compile is True
