"""Which methods can be defended or attacked: those that upload updates and plain numbers, found by asking them."""

from __future__ import annotations

from dataclasses import replace

from .. import config
from ..core.errors import BadInput
from ..data import Images
from ..experiment import Experiment
from ..robust.defence import UPDATES
from .describe import describe


def check(experiment: Experiment, images: Images) -> None:
    """Refuses, before anything is trained, what defences or an attack on uploads would have no say in."""
    forges = experiment.attack is not None and experiment.attack.forges
    if not experiment.defences and not forges:
        return
    method, channels = config.to_dict(experiment.algorithm)["is"], images.x.shape[1]
    plain = replace(experiment, uplink=(), defences=(), attack=None)  # how it travels does not change what it is
    leaves = describe(plain, len(images.classes), channels, images.x.shape[3])
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
