"""What a deployment adds to settings: no client decides a round alone, unless somebody says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .. import config
from ..core.errors import BadInput
from ..robust.aggregators import DEFENCES
from ..simulate import checks as scope

_FEWEST = 3  # clients in a round; of two, neither the larger share nor the longer update is suspicious
_SHARE = 0.2  # of a round's weight; in small cohorts twice a client's equal part
_BOUND, _CLIP = "policy.max_weight_share", "defences"


def added(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(words that a deployment adds, sentences on what it does not add and why). What is typed stays as it is."""
    experiment = config.read(None, words)
    typed = {config.setting(word)[0] for word in words}
    cohort = experiment.cohort.size(experiment.clients)
    if cohort < _FEWEST:
        return [], [f"no bound on a client's weight or update: a round has {cohort} clients, and none can be outvoted"]
    more, said = [], []
    if _BOUND in typed:
        said += [] if experiment.policy.max_weight_share else ["no bound on a client's weight, as you say"]
    else:
        more.append(f"{_BOUND}={max(2 / cohort, _SHARE):.4g}")
    if any(key.partition(".")[0] == _CLIP for key in typed):
        said += [] if experiment.defences else ["updates are not clipped, as you say"]
        return more, said
    try:
        clipped = config.check(replace(experiment, defences=(DEFENCES["clip"](),)))
        clipped.resolved()
        scope.check(clipped, clipped.images())
        more.append(f"{_CLIP}=clip")
    except BadInput as error:
        said.append(f"updates are not clipped: {error}")
    return more, said
