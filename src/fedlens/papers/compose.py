"""The four papers' methods over each other: which composition is worth having."""

from __future__ import annotations

from ..runs.grid import Grid, Row, merged_words
from .fedxds.tables import ALPHAS, CLIENTS, WORDS, column

_XDS = "algorithm=fedxds"
ROWS = {
    "fedavg": ("algorithm=fedavg",),
    "uniform": ("algorithm=fedavg", "weighting=uniform"),
    "scaffold": ("algorithm=scaffold",),
    "fedavg+ft": ("algorithm=fedavg+ft",),  # personal models, to be read with `evaluate.personal=both`
    "spatl": ("algorithm=spatl/paper",),
    "fedsls": ("algorithm=fedsls",),
    "fedsls, towards uniform": (
        "algorithm=fedsls",
        "algorithm.normalize=mean",
        "algorithm.blend=0.5",
        "algorithm.blend_with=uniform",
    ),
    "fedsls over scaffold": ("algorithm=fedsls", "algorithm.base=scaffold"),
    "fedxds": (_XDS,),
    "fedxds, uniform": (_XDS, "weighting=uniform"),
    "fedxds over scaffold": (_XDS, "algorithm.base=scaffold"),
    "fedxds over fedsls": (_XDS, "algorithm.base=fedsls"),
    "fedxds over fedsls over scaffold": (_XDS, "algorithm.base=fedsls", "algorithm.base.base=scaffold"),
    "fedxds over feddisco": (_XDS, "algorithm.base=feddisco"),
    "fedxds over fedsam": (_XDS, "algorithm.base=fedsam"),
}


def tables() -> list[Grid]:
    columns = {f"cifar10/{k}/{alpha}": column("cifar10", k, alpha) for k in CLIENTS for alpha in ALPHAS}
    return [
        Grid(
            "compose/cifar10",
            "methods over each other, with their parts alone, in the setting of fedxds/table1 but for the split",
            {name: Row(words) for name, words in ROWS.items()},
            columns,
            tuple(merged_words((*WORDS, "partition.dialect=class")).values()),
            notes=("FedXDS's exchange gives noised, masked images to all; docs/privacy-fedxds.md says more.",),
        )
    ]
