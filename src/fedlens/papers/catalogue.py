"""Every table and figure that the four papers print, in their order, and what reproduces each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..core.errors import BadInput, nearest

DRAWING = "a drawing of the method: nothing to run"


class PaperItem(NamedTuple):
    """One table or figure of a paper."""

    paper: str
    item: str  # such as table 1, figure 2a
    shows: str
    by: tuple[str, ...] = ()  # names for `fedlens reproduce`; none: nothing was measured

    @property
    def name(self) -> str:
        return f"{self.paper.lower()}/{self.item.replace(' ', '')}"


_FEDSLS = {
    "figure 1": ("gain over FedAvg and FedAU by alpha, CIFAR-10 and CINIC-10", "fedsls/figure1"),
    "figure 2": (DRAWING,),
    "figure 3": ("images, saliency latents and down-sampled latents", "fedsls/figure3"),
    "figure 4": ("who owns how many images of which class", "fedsls/figure4"),
    "table 1": ("nine methods on four data sets, three alphas", "fedsls/table1"),
    "figure 5": ("SSIM, cosine and distance of latents to their images", "fedsls/figure5"),
}
_PSE = {
    "figure 1": ("where the global and one client's models look", "pse/figure1"),
    "table 1": ("label shift and modality shift together", "pse/table1"),
    "table 2": ("label shift", "pse/table2"),
    "figure 2": ("PSE without its parts: accuracy (a), where its models look (b)", "pse/figure2"),
    "table 3": ("other explanations in Grad-CAM's place", "pse/table3"),
    "figure 3": ("accuracy of every client (a), training loss over rounds (b)", "pse/figure3"),
    "figure 4": ("confusions of one client", "pse/figure4"),
}
_FEDXDS = {
    "figure 1": ("one image on its way: attribution, mask, noise", "fedxds/figure1"),
    "table 1": ("accuracy of fifteen methods", "fedxds/table1", "fedxds/public"),
    "table 2": ("rounds to an accuracy", "fedxds/table2", "fedxds/public_rounds"),
    "table 3": ("CelebA and FEMNIST", "fedxds/table3"),
    "table 4": ("base methods alone and under FedXDS", "fedxds/table4"),
    "table 5": ("sparsity by attribution", "fedxds/table5"),
    "figure 2a": ("membership inference over epsilon", "fedxds/figure2a"),
    "figure 2b": ("inversion over sparsity", "fedxds/figure2b"),
    "figure 2c": ("the weight of shared data, three data sets", "fedxds/figure2c"),
    "figure 2d": ("warm-up rounds", "fedxds/figure2d"),
    "table 6": ("epsilon by attribution", "fedxds/table6"),
}
_SPATL = {
    "figure 1": (DRAWING,),
    "figure 2": (DRAWING,),
    "figure 3": (DRAWING,),
    "figure 4": ("accuracy over rounds, four networks", "spatl/figure4"),
    "figure 5": ("accuracy of every client", "spatl/figure5"),
    "table 1": ("rounds and bytes to 80 %, bytes of a round", "spatl/bytes", "spatl/table1"),
    "table 2": ("parameters and operations of sub-models", "spatl/submodels"),
    "figure 6": ("with and without gradient control", "spatl/figure6"),
    "figure 7": ("the agent's reward over its updates", "spatl/figure7"),
    "section 4.5": ("transfer of the encoder to new images", "spatl/transfer", "spatl/transfer_whole"),
}
PRINTED = [
    PaperItem(paper, item, shows, tuple(by))
    for paper, items in (("FedSLS", _FEDSLS), ("PSE", _PSE), ("FedXDS", _FEDXDS), ("SPATL", _SPATL))
    for item, (shows, *by) in items.items()
]


def resolved(name: str, known: Mapping[str, Any]) -> str:
    """The name under which something is reproduced; what a paper calls it is understood, too."""
    if name in known:
        return name
    printed = {one.name: one for one in PRINTED}
    if name not in printed:
        raise BadInput(f"{name!r} is nothing that can be reproduced; {nearest(name, [*known, *printed])}")
    if not printed[name].by:
        raise BadInput(f"{name} is {DRAWING}")
    return printed[name].by[0]


def listed(known: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row for each table and figure of the papers, then for what is ours."""
    rows = [
        {"paper": one.paper, "item": one.item, "name": name, "about": known[name].about if one.by[1:] else one.shows}
        for one in PRINTED
        for name in one.by or ("",)
    ]
    named = {row["name"] for row in rows}
    ours = [{"paper": "ours", "item": "", "name": n, "about": one.about} for n, one in known.items() if n not in named]
    return [*rows, *ours]
