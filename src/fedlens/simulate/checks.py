"""What a method's own hooks refuse, and whether it can be defended or attacked: found by asking them."""

from __future__ import annotations

from dataclasses import replace

from .. import config
from ..algorithms import name_of
from ..core.algorithm import Errand, chain
from ..core.errors import BadInput
from ..core.measures import numbered
from ..data import Images
from ..experiment import Experiment
from ..robust.defence import UPDATES
from .describe import describe


def check(experiment: Experiment, images: Images) -> None:
    """Refuses, before anything is trained, what defences or an attack on uploads would have no say in.

    An uplink that does not cover a method's uploads, and a last stage that cannot work on this model, refuse here. So
    do faults that lose replies, where a method needs all of them.
    """
    _check_faults(experiment)
    shape = len(images.classes), images.x.shape[1], images.x.shape[3]
    last = experiment.timetable()[-1].stage
    asked = experiment.evaluate
    numbered("evaluate.watch", asked.watch, images.classes)
    if asked.patience and not asked.validation:
        raise BadInput("evaluate.patience needs images to choose by: set evaluate.validation, as in 0.1")
    if asked.patience and (not last.algorithm.updates_model or last.rounds == 1 < experiment.rounds):
        raise BadInput(
            "evaluate.patience: this method ends with a stage of its own, which would be left out: set it to 0"
        )
    changes_late = isinstance(last.algorithm, Errand) and last.algorithm.updates_model and last.rounds == 1
    if experiment.uplink or changes_late:
        describe(replace(experiment, defences=(), attack=None), *shape)
    forges = experiment.attack is not None and experiment.attack.forges
    if not experiment.defences and not forges:
        return
    method = config.to_dict(experiment.algorithm)["is"]
    plain = replace(experiment, uplink=(), defences=(), attack=None)  # how it travels does not change what it is
    leaves = describe(plain, *shape)
    sent = [leaf for leaf in leaves if leaf.where == "up" and leaf.name != "(header)"]
    entries = {leaf.name.split("/")[0] for leaf in sent}
    if "delta" not in entries:
        what = f"{', '.join(sorted(entries))} and no delta" if entries else "nothing"
        who = "defences" if experiment.defences else "attack"
        raise BadInput(f"{who}: {method} uploads {what}, so that there is no update to act on; take another method")
    others = {
        leaf.name.split("/")[0]
        for leaf in sent
        if not leaf.name.startswith(tuple(f"{name}/" for name in UPDATES))
        and (leaf.shape or not leaf.dtype.startswith("float"))
    }
    if experiment.defences and others:
        raise BadInput(
            f"defences: {method} also uploads {', '.join(sorted(others))}, which is neither an update nor a number and "
            "would be believed as it is; take a method that uploads delta alone"
        )
    for stage, _, _ in experiment.timetable():
        for defence in stage.defences:
            defence.check(stage.cohort.size(experiment.clients))


def _check_faults(experiment: Experiment) -> None:
    faults, late = experiment.faults, experiment.policy.deadline is not None
    kinds = ("dropout", "stale", "corrupt", "oversized", *(("straggler",) if late else ()))
    lossy = [kind for kind in kinds if getattr(faults, kind)]
    stages = dict.fromkeys(turn.stage for turn in experiment.timetable()) if lossy else ()
    for part in (part for stage in stages for part in chain(stage.algorithm)):
        if getattr(part, "needs_every_reply", False):
            raise BadInput(
                f"{name_of(part)} needs a reply of every client in every round, and faults.{lossy[0]} loses some: set "
                "it to 0"
            )
