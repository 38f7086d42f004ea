from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from ..core.algorithm import Algorithm
from ..core.network import Network

Part = Literal["head", "classifier", "none"]


@dataclass(frozen=True)
class FedPer(Algorithm):
    """Arivazhagan et al., 2019: every client has a head of its own over a shared body.

    down: model; up: delta, weight; memory: private
    """

    private: Part = "head"  # classifier: all that follows the extractor, in a network that has one (PSE's split)

    def is_private(self, net, name):
        stays = {"head": name in net.head, "classifier": not is_extractor(net, name), "none": False}
        return stays[self.private] or super().is_private(net, name)


def is_extractor(net: Network, name: str) -> bool:
    """Whether this weight belongs to the network's `extractor`; without such a part, to all but the head."""
    return name.startswith("extractor.") if has_extractor(net) else name not in net.head


def has_extractor(net: Network) -> bool:
    return isinstance(getattr(net.module, "extractor", None), nn.Module)
