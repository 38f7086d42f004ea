"""Every method of the registry, and compositions, as the engine tests run them."""

from dataclasses import dataclass, replace

import torch

from fedlens.algorithms import (
    ALGORITHMS,
    APFL,
    CCVR,
    L2GD,
    PSE,
    SPATL,
    Ditto,
    FedAU,
    FedAux,
    FedAvg,
    FedAvgM,
    FedDecorr,
    FedDF,
    FedDISCO,
    FedDyn,
    FedFed,
    FedFTG,
    FedGen,
    FedMTL,
    FedPer,
    FedProx,
    FedRep,
    FedSL,
    FedSLS,
    FedXDS,
    FineTuned,
    KNNPer,
    LGFedAvg,
    Local,
    Moon,
    PerFedAvg,
    PFedMe,
    Scaffold,
)
from fedlens.core.algorithm import Errand, Recipe
from fedlens.core.batches import Dataset
from fedlens.core.cohort import Everyone
from fedlens.core.rng import generator
from fedlens.core.transform import Clip, GaussianNoise, Quantise, TopK
from small import PLAN, SGD


def public_data(images: int = 20, device: torch.device | str = "cpu") -> Dataset:
    """Like the engine tests' images, and nobody's."""
    x = torch.randn(images, 1, 6, 6, generator=generator(5), dtype=torch.float64)
    return Dataset(x.to(device), torch.zeros(images, dtype=torch.long, device=device))


def beside(server) -> Dataset:
    """Public data where the server's model is."""
    return public_data(device=next(server.net.module.parameters()).device)


@dataclass(frozen=True)
class Given(Errand):
    """Another algorithm, whose server has public data."""

    def setup(self, server):
        return self.base.setup(replace(server, auxiliary=beside(server)))

    def start(self, client):
        return self.base.start(client)

    def finish(self, client, local):
        return self.base.finish(client, local)

    def aggregate(self, server, uploads):
        return self.base.aggregate(replace(server, auxiliary=beside(server)), uploads)


@dataclass(frozen=True)
class WithPublicData:
    base: Recipe

    def stages(self, plan):
        for stage in self.base.stages(plan):
            yield replace(stage, algorithm=Given(base=stage.algorithm))


ALONE = PSE(attention="self")  # the engine tests' network has no attention; test_pse.py runs the exchange in lanes
RECIPES = {
    **{name: recipe() for name, recipe in ALGORITHMS.items()},
    "scaffold, slow server": Scaffold(server_lr=0.5),
    "scaffold, by samples": Scaffold(by="samples"),
    "fedavgm, nesterov": FedAvgM(beta=0.5, nesterov=True),
    "feddyn, unclipped": FedDyn(clip=None),
    "scaffold+ft": FineTuned(Scaffold()),
    "fedavg+ft, head": FineTuned(FedAvg(), part="head"),
    "local+ft": FineTuned(Local()),
    "fedau, cutoff": FedAU(cutoff=2),
    "feddecorr, moon": FedDecorr(Moon()),
    "fedsls, scaffold": FedSLS(Scaffold(), pretrain_epochs=1),
    "fedsls, moon": FedSLS(Moon(), pretrain_epochs=1, normalize="mean", blend=0.5, blend_with="uniform"),
    "fedsls, dynamic": FedSLS(FedProx(), pretrain_epochs=1, recompute_every=2, saliency="guided_grad", tap="relu"),
    "fedsls+ft": FineTuned(FedSLS(FedAvg(), pretrain_epochs=0)),
    "fedsls, fedavg+ft": FedSLS(FineTuned(FedDecorr(FedAvgM())), pretrain_epochs=0, target="pred", score="prob"),
    "fedsl, autoencoder": FedSL(Scaffold(), f=4, down="autoencoder", epochs=1),
    "fedsl, bilinear": FedSL(FedDyn(), f=8, down="bilinear"),
    "fedper, nothing private": FedPer(private="none"),
    "fedper+ft, head": FineTuned(FedPer(), part="head"),
    "fedrep, slow server": FedRep(head_epochs=1, body_epochs=1, server_lr=0.5),
    "lgfedavg, all shared": LGFedAvg(shared_layers=2),
    "ditto+ft": FineTuned(Ditto(pull=0.1)),
    "apfl, by round": APFL(alpha=0.75, alpha_every="round", order="sequential"),
    "apfl, fixed": APFL(alpha_every="never"),
    "l2gd, often alone": L2GD(p=0.3, pull=2.0),
    "l2gd+ft": FineTuned(L2GD()),
    "fedmtl, code": FedMTL(omega="code", strength=0.01),
    "pse": ALONE,
    "pse, penalty": replace(ALONE, xi=0.5, excite="penalty", cam="gradcam++", score="prob", threshold_scope="global"),
    "pse, scorecam": replace(ALONE, xi=0.5, cam="scorecam", reduce="sum", local_init="persistent"),
    "pse, not excited": replace(ALONE, excite="none", private="none"),
    "fedsls, pse": FedSLS(replace(ALONE, xi=0.5, tap="conv"), pretrain_epochs=1),
    "pse+ft": FineTuned(ALONE, part="head"),
    "fedxds": FedXDS(warmup_rounds=2, warmup_epochs=1),
    "fedxds, scaffold": FedXDS(
        Scaffold(), warmup_rounds=2, warmup_epochs=1, attribution="ig", ig="right", sparse=True, share_as="float16"
    ),
    "fedxds, official": FedXDS(
        FedProx(),
        warmup_rounds=2,
        warmup_epochs=None,
        warmup_fraction=0.5,
        attribution_model="local",
        target="batch_labels",
        mask="soft",
        share_as="uint8",
    ),
    "fedxds, fedsls, fedrep": FedXDS(
        FedSLS(FedRep(head_epochs=1), pretrain_epochs=1),
        warmup_rounds=1,
        warmup_epochs=2,
        attribution="random",
        continue_from_warmup=True,
        share_fraction=0.5,
        mix="convex",
    ),
    "fedsls, fedxds, feddyn": FedSLS(
        FedXDS(FedDyn(), warmup_rounds=2, warmup_epochs=1, lrp="epsilon", mask_source="class", accounting="metric"),
        pretrain_epochs=0,
    ),
    "fedxds, spatl": FedXDS(SPATL(episodes=2), warmup_rounds=1, warmup_epochs=1),
    "fedxds, fedsls, scaffold": FedXDS(FedSLS(Scaffold(), pretrain_epochs=1), warmup_rounds=1, warmup_epochs=1),
    "spatl": SPATL(episodes=2),
    "spatl, salient": SPATL(selector="uniform", budget=0.5, control_upload="salient", normalise="per_index"),
    "spatl, norms": SPATL(selector="l2_global", constraint="params", budget=0.6, control_at="post_step"),
    "spatl, no transfer": SPATL(selector="rl", private="none", agent="fresh", episodes=2, control_scale=0.5),
    "spatl, no control": SPATL(selector="random", budget=0.5, control_scale=0.0, server_lr=0.5),
    "spatl, official": SPATL(**SPATL.presets["official"] | {"private": "predictor"}),
    "fedsls, spatl+ft": FedSLS(FineTuned(SPATL(selector="all")), pretrain_epochs=0),
    "feddisco, scaffold": FedDISCO(Scaffold(), target="global", discrepancy="l1"),
    "feddisco, moon": FedDISCO(Moon(), a=2.0),
    "pfedme, restart": PFedMe(pull=4.0, rate=0.05, inner=2, restart=True, server_lr=0.5),
    "perfedavg, hf": PerFedAvg(order="hessian_free"),
    "ccvr": CCVR(samples=10, epochs=2),
    "ccvr, scaffold+ft": FineTuned(CCVR(Scaffold(), samples=5, epochs=1, covariance="diagonal")),
    "knnper, fedper+ft": FineTuned(KNNPer(FedPer(), neighbours=2)),
    "fedgen": FedGen(steps=2, noise=3, hidden=5, batch=6),
    "fedftg": FedFTG(iterations=2, student_steps=2, noise=3, width=2, batch=6),
    "feddf": WithPublicData(FedDF(steps=3, batch=5)),
    "fedaux": WithPublicData(FedAux(pretrain_steps=2, pretrain_batch=6, steps=3, batch=5)),
    "fedfed": FedFed(distil_rounds=2, latent=3, width=4),
    "fedfed, scaffold": FedFed(FineTuned(Scaffold()), distil_rounds=1, latent=3, width=4, share_as="uint8"),
}
UPLINKS = {
    "clip": (Clip(0.5),),
    "noise": (Clip(0.5), GaussianNoise(0.01)),
    "topk": (TopK(0.25),),
    "quantise": (Quantise(),),
}
# Fewer steps than elsewhere: the largest client takes six a round, and most have a batch that is not full.
FEW = replace(PLAN, size=6)
# Methods that are refused with the plan of all others.
PLANS = {
    "scaffnew": replace(FEW, cohort=Everyone(), optimizer=replace(SGD, momentum=0.0), steps=3),
}
CASES = {
    **{name: (recipe, PLANS.get(name, FEW)) for name, recipe in RECIPES.items()},
    **{f"scaffold, {name}": (Scaffold(), replace(FEW, uplink=uplink)) for name, uplink in UPLINKS.items()},
    "steps": (FedAvg(), replace(FEW, steps=3)),
}
# One stage, memories, several stages, part of a network, a payload for all: for what cannot differ between all others.
STRUCTURES = ("fedavg", "scaffold+ft", "fedxds, fedsls, fedrep", "spatl, salient", "feddisco, moon", "pse+ft")


@dataclass(frozen=True)
class Late:
    """The same recipe after so many rounds of something else, of which nothing is remembered."""

    base: object
    begin: int

    def stages(self, plan):
        yield replace(plan, algorithm=FedAvg(), rounds=self.begin)
        first, *rest = self.base.stages(plan)
        yield replace(first, fresh=True)
        yield from rest
