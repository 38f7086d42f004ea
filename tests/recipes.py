"""Every method of the registry, and compositions, as the engine tests run them."""

from fedlens.algorithms import ALGORITHMS, FedAvg, FedAvgM, FedDyn, FineTuned, Local, Scaffold
from fedlens.core.transform import Clip, GaussianNoise, Quantise, TopK

RECIPES = {
    **{name: recipe() for name, recipe in ALGORITHMS.items()},
    "scaffold, slow server": Scaffold(server_lr=0.5),
    "fedavgm, nesterov": FedAvgM(beta=0.5, nesterov=True),
    "feddyn, unclipped": FedDyn(clip=None),
    "scaffold+ft": FineTuned(Scaffold()),
    "fedavg+ft, head": FineTuned(FedAvg(), part="head"),
    "local+ft": FineTuned(Local()),
}
UPLINKS = {
    "clip": (Clip(0.5),),
    "noise": (Clip(0.5), GaussianNoise(0.01)),
    "topk": (TopK(0.25),),
    "quantise": (Quantise(),),
}
