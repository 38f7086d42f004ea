"""One file per paper. Adding one is a file here and a line in this list."""

from ..core.algorithm import Recipe
from .apfl import APFL
from .ditto import Ditto
from .fedau import FedAU
from .fedaux import FedAux
from .fedavg import FedAvg
from .fedavgm import FedAvgM
from .fedbn import FedBN
from .feddecorr import FedDecorr
from .feddf import FedDF
from .feddisco import FedDISCO
from .feddyn import FedDyn
from .fedfed import FedFed
from .fedftg import FedFTG
from .fedgen import FedGen
from .fedmtl import FedMTL
from .fednova import FedNova
from .fedper import FedPer
from .fedprox import FedProx
from .fedrep import FedRep
from .fedsam import FedSAM
from .fedsl import FedSL
from .fedsls import FedSLS
from .fedxds import FedXDS
from .finetune import FineTuned
from .l2gd import L2GD
from .lgfedavg import LGFedAvg
from .local import Local
from .moon import Moon
from .pse import PSE
from .scaffold import Scaffold
from .spatl import SPATL, OfficialSPATL

ALGORITHMS = {
    "apfl": APFL,
    "ditto": Ditto,
    "fedau": FedAU,
    "fedaux": FedAux,
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "fedbn": FedBN,
    "feddecorr": FedDecorr,
    "feddf": FedDF,
    "feddisco": FedDISCO,
    "feddyn": FedDyn,
    "fedfed": FedFed,
    "fedftg": FedFTG,
    "fedgen": FedGen,
    "fedmtl": FedMTL,
    "fednova": FedNova,
    "fedper": FedPer,
    "fedprox": FedProx,
    "fedrep": FedRep,
    "fedsam": FedSAM,
    "fedsl": FedSL,
    "fedsls": FedSLS,
    "fedxds": FedXDS,
    "finetune": FineTuned,
    "l2gd": L2GD,
    "lgfedavg": LGFedAvg,
    "local": Local,
    "moon": Moon,
    "pse": PSE,
    "scaffold": Scaffold,
    "spatl": SPATL,
    "spatl_official": OfficialSPATL,
}


def name_of(recipe: Recipe) -> str:
    """As users write it: its name here, or module:Class for one of their own."""
    kind = type(recipe)
    known = (name for name, part in ALGORITHMS.items() if part is kind)
    return next(known, f"{kind.__module__}:{kind.__qualname__}")


__all__ = [
    "ALGORITHMS",
    "APFL",
    "L2GD",
    "PSE",
    "SPATL",
    "Ditto",
    "FedAU",
    "FedAux",
    "FedAvg",
    "FedAvgM",
    "FedBN",
    "FedDF",
    "FedDISCO",
    "FedDecorr",
    "FedDyn",
    "FedFTG",
    "FedFed",
    "FedGen",
    "FedMTL",
    "FedNova",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedSAM",
    "FedSL",
    "FedSLS",
    "FedXDS",
    "FineTuned",
    "LGFedAvg",
    "Local",
    "Moon",
    "OfficialSPATL",
    "Scaffold",
    "name_of",
]
