"""One file per paper. Adding one is a file here and a line in this list."""

from .fedavg import FedAvg
from .fedavgm import FedAvgM
from .feddyn import FedDyn
from .fednova import FedNova
from .fedprox import FedProx
from .fedsam import FedSAM
from .finetune import FineTuned
from .local import Local
from .scaffold import Scaffold

ALGORITHMS = {
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "feddyn": FedDyn,
    "fednova": FedNova,
    "fedprox": FedProx,
    "fedsam": FedSAM,
    "finetune": FineTuned,
    "local": Local,
    "scaffold": Scaffold,
}

__all__ = [
    "ALGORITHMS",
    "FedAvg",
    "FedAvgM",
    "FedDyn",
    "FedNova",
    "FedProx",
    "FedSAM",
    "FineTuned",
    "Local",
    "Scaffold",
]
