"""One file per paper. Adding one is a file here and a line in this list."""

from .apfl import APFL
from .ditto import Ditto
from .fedau import FedAU
from .fedavg import FedAvg
from .fedavgm import FedAvgM
from .fedbn import FedBN
from .feddecorr import FedDecorr
from .feddyn import FedDyn
from .fedmtl import FedMTL
from .fednova import FedNova
from .fedper import FedPer
from .fedprox import FedProx
from .fedrep import FedRep
from .fedsam import FedSAM
from .fedsl import FedSL
from .fedsls import FedSLS
from .finetune import FineTuned
from .l2gd import L2GD
from .lgfedavg import LGFedAvg
from .local import Local
from .moon import Moon
from .pse import PSE
from .scaffold import Scaffold

ALGORITHMS = {
    "apfl": APFL,
    "ditto": Ditto,
    "fedau": FedAU,
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "fedbn": FedBN,
    "feddecorr": FedDecorr,
    "feddyn": FedDyn,
    "fedmtl": FedMTL,
    "fednova": FedNova,
    "fedper": FedPer,
    "fedprox": FedProx,
    "fedrep": FedRep,
    "fedsam": FedSAM,
    "fedsl": FedSL,
    "fedsls": FedSLS,
    "finetune": FineTuned,
    "l2gd": L2GD,
    "lgfedavg": LGFedAvg,
    "local": Local,
    "moon": Moon,
    "pse": PSE,
    "scaffold": Scaffold,
}

__all__ = [
    "ALGORITHMS",
    "APFL",
    "L2GD",
    "PSE",
    "Ditto",
    "FedAU",
    "FedAvg",
    "FedAvgM",
    "FedBN",
    "FedDecorr",
    "FedDyn",
    "FedMTL",
    "FedNova",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedSAM",
    "FedSL",
    "FedSLS",
    "FineTuned",
    "LGFedAvg",
    "Local",
    "Moon",
    "Scaffold",
]
