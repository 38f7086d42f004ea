from __future__ import annotations

from dataclasses import dataclass

from ..core.algorithm import Algorithm


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """McMahan et al., 2017: the weighted mean of what clients learned.

    down: model; up: delta, weight; memory: nothing
    """
