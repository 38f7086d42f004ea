"""One file per paper. Adding one is a file here, its import, its name below and a place in families.json."""

import json
from pathlib import Path

from ..core.algorithm import Recipe
from .apfl import APFL as APFL
from .ccvr import CCVR as CCVR
from .ditto import Ditto as Ditto
from .elastic import Elastic as Elastic
from .fedala import FedALA as FedALA
from .fedamp import FedAMP as FedAMP
from .fedas import FedAS as FedAS
from .fedau import FedAU as FedAU
from .fedaux import FedAux as FedAux
from .fedavg import FedAvg as FedAvg
from .fedavgm import FedAvgM as FedAvgM
from .fedbabu import FedBABU as FedBABU
from .fedbn import FedBN as FedBN
from .fedcm import FedCM as FedCM
from .feddbe import FedDBE as FedDBE
from .feddecorr import FedDecorr as FedDecorr
from .feddf import FedDF as FedDF
from .feddisco import FedDISCO as FedDISCO
from .feddyn import FedDyn as FedDyn
from .fedexp import FedExP as FedExP
from .fedfed import FedFed as FedFed
from .fedfomo import FedFomo as FedFomo
from .fedftg import FedFTG as FedFTG
from .fedgen import FedGen as FedGen
from .fedlc import FedLC as FedLC
from .fedmtl import FedMTL as FedMTL
from .fednova import FedNova as FedNova
from .fedntd import FedNTD as FedNTD
from .fedopt import FedAdagrad as FedAdagrad
from .fedopt import FedAdam as FedAdam
from .fedopt import FedYogi as FedYogi
from .fedpac import FedPAC as FedPAC
from .fedper import FedPer as FedPer
from .fedproto import FedProto as FedProto
from .fedprox import FedProx as FedProx
from .fedrep import FedRep as FedRep
from .fedrod import FedRoD as FedRoD
from .fedrs import FedRS as FedRS
from .fedsam import FedSAM as FedSAM
from .fedsl import FedSL as FedSL
from .fedsls import FedSLS as FedSLS
from .fedxds import FedXDS as FedXDS
from .finetune import FineTuned as FineTuned
from .ifca import IFCA as IFCA
from .knnper import KNNPer as KNNPer
from .l2gd import L2GD as L2GD
from .lgfedavg import LGFedAvg as LGFedAvg
from .local import Local as Local
from .moon import Moon as Moon
from .perfedavg import PerFedAvg as PerFedAvg
from .pfedme import PFedMe as PFedMe
from .pse import PSE as PSE
from .scaffnew import Scaffnew as Scaffnew
from .scaffold import Scaffold as Scaffold
from .spatl import SPATL as SPATL

ALGORITHMS = {
    "apfl": APFL,
    "ccvr": CCVR,
    "ditto": Ditto,
    "elastic": Elastic,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedala": FedALA,
    "fedamp": FedAMP,
    "fedas": FedAS,
    "fedau": FedAU,
    "fedaux": FedAux,
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "fedbabu": FedBABU,
    "fedbn": FedBN,
    "fedcm": FedCM,
    "feddbe": FedDBE,
    "feddecorr": FedDecorr,
    "feddf": FedDF,
    "feddisco": FedDISCO,
    "feddyn": FedDyn,
    "fedexp": FedExP,
    "fedfed": FedFed,
    "fedfomo": FedFomo,
    "fedftg": FedFTG,
    "fedgen": FedGen,
    "fedlc": FedLC,
    "fedmtl": FedMTL,
    "fednova": FedNova,
    "fedntd": FedNTD,
    "fedpac": FedPAC,
    "fedper": FedPer,
    "fedproto": FedProto,
    "fedprox": FedProx,
    "fedrep": FedRep,
    "fedrod": FedRoD,
    "fedrs": FedRS,
    "fedsam": FedSAM,
    "fedsl": FedSL,
    "fedsls": FedSLS,
    "fedxds": FedXDS,
    "fedyogi": FedYogi,
    "finetune": FineTuned,
    "ifca": IFCA,
    "knnper": KNNPer,
    "l2gd": L2GD,
    "lgfedavg": LGFedAvg,
    "local": Local,
    "moon": Moon,
    "perfedavg": PerFedAvg,
    "pfedme": PFedMe,
    "pse": PSE,
    "scaffnew": Scaffnew,
    "scaffold": Scaffold,
    "spatl": SPATL,
}

# family -> method -> the models that it is about: global, personal or both. A file, so that help need not import torch.
FAMILIES: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("families.json").read_text("utf-8"))

FORMERLY = {"spatl_official": "spatl/official"}  # names that earlier versions had for them


def name_of(recipe: Recipe) -> str:
    """As users write it: its name here, or module:Class for one of their own."""
    kind = type(recipe)
    known = (name for name, part in ALGORITHMS.items() if part is kind)
    return next(known, f"{kind.__module__}:{kind.__qualname__}")


def family_of(method: str) -> str:
    """Of a method by its name, with or without fine-tuning and presets; nothing where it is a user's own."""
    plain = method.partition("+")[0].partition("/")[0]
    return next((family for family, names in FAMILIES.items() if plain in names), "")
