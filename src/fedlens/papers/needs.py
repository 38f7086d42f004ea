"""What an experiment needs that this machine has not: data, a whole data set where a part is at hand, weights."""

from __future__ import annotations

from .. import config
from ..core.errors import BadInput
from ..data import DataSource
from ..experiment import Experiment
from ..models.weights import at_hand


def lacking(experiment: Experiment) -> list[str]:
    """Names of what is not here; without them a run cannot begin."""
    missing = [source.name for source in sources(experiment) if _origin(source) is None]
    weights = getattr(experiment.model, "weights", "")
    return missing + ([f"the weights {weights}"] if weights and not at_hand(weights) else [])


def partial(experiment: Experiment) -> list[str]:
    """Names of data sets of which a part alone is here: a run begins, but on other images than the paper's."""
    return [source.name for source in sources(experiment) if is_part(_origin(source) or "")]


def standing_in(experiment: Experiment) -> list[str]:
    """Names of weights that others stand in for: a run begins, but from elsewhere than the paper's."""
    if getattr(experiment.model, "weights", "") != "stand-in":
        return []
    return [f"ImageNet weights of {config.to_dict(experiment.model)['is']}"]


def remarks(experiment: Experiment) -> list[str]:
    """Sentences on what of the paper's own is not here."""
    if needs := lacking(experiment):
        return [f"not run here: needs {', '.join(needs)}"]
    said = []
    if parts := partial(experiment):
        said.append(f"on a part of the images here: for the paper's needs all of {', '.join(parts)}")
    if weights := standing_in(experiment):
        said.append(f"from stand-in weights here: for the paper's needs {', '.join(weights)}")
    return said


def is_part(origin: str) -> bool:
    """Whether data that were found there are a subset of the published ones."""
    return "subset" in origin


def sources(experiment: Experiment) -> list[DataSource]:
    """Its data and the server's, and of views of other data these, too."""
    found: list[DataSource] = []
    asked = [experiment.data]
    if experiment.auxiliary is not None and experiment.needs_public_data:
        asked.append(experiment.auxiliary)
    for source in asked:
        base = getattr(source, "base", None)
        found += [base] if isinstance(base, DataSource) and _origin(base) is None else [source]
    return found


def _origin(source: DataSource) -> str | None:
    try:
        return source.find().origin
    except BadInput:
        return None
