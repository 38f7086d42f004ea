"""The four papers' methods over each other: each pair that the design allows runs, and is exact."""

from dataclasses import replace

import pytest

from fedlens.algorithms import PSE, SPATL, FedAvg, FedDISCO, FedSLS, FedXDS, Scaffold
from fedlens.core.algorithm import Errand
from fedlens.core.errors import BadInput
from fedlens.core.tree import Tree
from small import same
from test_fedxds import After, carried_out

OWN_HEADS = PSE(attention="self", xi=0.5, tap="conv")  # the small network has no attention
SHARING = FedXDS(warmup_rounds=2, warmup_epochs=1)
BASES = {
    "fedsls over scaffold": FedSLS(Scaffold(), pretrain_epochs=1),
    "fedsls over spatl": FedSLS(SPATL(episodes=2), pretrain_epochs=1),
    "feddisco": FedDISCO(),
    "spatl": SPATL(episodes=2),
}


@pytest.mark.parametrize("name", BASES)
def test_fedxds_over_it_without_weight_is_its_base_to_the_bit(name):
    """Warm-up, exchange and shared objective touch nothing else: weights, controls, private heads and agents."""
    recipe = replace(SHARING, base=BASES[name], lam=0)
    found, seen = carried_out(recipe)
    before = len(seen) - len(carried_out(BASES[name])[1])
    plain, expected = carried_out(After(BASES[name], before))
    assert same(Tree({k: v for k, v in found.state.items() if k != "shared"}), plain.state)
    assert all(same(a.upload, b.upload) for a, b in zip(seen[-1][1], expected[-1][1], strict=True))
    moved, _ = carried_out(replace(recipe, lam=0.5))
    assert not same(moved.state.model, plain.state.model)


class Idle:
    """The same method with a round of which nothing is left wherever FedSLS would look at images."""

    def __init__(self, base):
        self.base = base

    def stages(self, plan):
        known = False
        for stage in self.base.stages(plan):
            known = known and not stage.fresh
            if not known and not isinstance(stage.algorithm, Errand):
                yield replace(stage, algorithm=FedAvg(), rounds=1, weighting=lambda c: 1.0)
                known, stage = True, replace(stage, fresh=True)
            yield stage


@pytest.mark.parametrize(
    "base, weights",
    [(OWN_HEADS, "samples"), (SPATL(episodes=2), "uniform"), (SHARING, "samples")],
    ids=["pse", "spatl", "fedxds"],
)
def test_fedsls_over_it_with_its_own_weights_is_its_base(base, weights):
    """The round in which everybody looks at its images leaves nothing but numbers."""
    weighed, _ = carried_out(FedSLS(base, pretrain_epochs=1, blend=1.0, blend_with=weights))
    plain, _ = carried_out(Idle(base))
    assert far(weighed.state.model, plain.state.model) < 1e-12
    by_saliency, _ = carried_out(FedSLS(base, pretrain_epochs=1))
    assert far(by_saliency.state.model, plain.state.model) > 1e-4


def far(a: Tree, b: Tree) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a.leaves(), b.leaves(), strict=True))


def test_two_networks_at_once_cannot_share():
    for base in (OWN_HEADS, FedSLS(OWN_HEADS)):
        with pytest.raises(BadInput, match="cannot be pse, which asks two networks about the same images; fedper or"):
            carried_out(FedXDS(base))
