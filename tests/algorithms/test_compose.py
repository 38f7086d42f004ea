"""The four papers' methods over each other: each pair that the design allows runs, and is exact."""

from dataclasses import replace

import pytest

from fedlens.algorithms import (
    PSE,
    SPATL,
    FedAU,
    FedAux,
    FedAvg,
    FedDISCO,
    FedDyn,
    FedSAM,
    FedSL,
    FedSLS,
    FedXDS,
    Scaffold,
)
from fedlens.core.algorithm import Errand
from fedlens.core.cohort import Uniform
from fedlens.core.errors import BadInput
from fedlens.core.run import run
from fedlens.core.tree import Tree
from fedlens.engines.sequential import Sequential
from small import PLAN, same
from test_fedxds import After, colours, owners

OWN_HEADS = PSE(attention="self", xi=0.5, tap="conv")  # the small network has no attention
SHARING = FedXDS(warmup_rounds=2, warmup_epochs=1)
BASES = {
    "feddyn": FedDyn(),
    "fedsam": FedSAM(),
    "fedsls": FedSLS(pretrain_epochs=1),
    "fedsls over scaffold": FedSLS(Scaffold(), pretrain_epochs=1),
    "fedsls over spatl": FedSLS(SPATL(episodes=2), pretrain_epochs=1),
    "feddisco": FedDISCO(),
    "spatl": SPATL(episodes=2),
}


class Finished:
    """A run, and what is left of it: the server's state, rounds, the last replies, what clients keep."""

    def __init__(self, recipe):
        net, replies = colours(), []
        engine = Sequential(net, owners(), checked=True)
        server = run(recipe, net, engine, replace(PLAN, cohort=Uniform(2)), observe=lambda *seen: replies.append(seen))
        self.state, self.rounds, self.replies = server.state, server.round, replies[-1][2]
        self.kept = [engine.memories.get(client) for client in range(3)]

    def uploads(self):
        return [reply.upload for reply in self.replies]


@pytest.mark.parametrize("name", BASES)
def test_fedxds_over_it_without_weight_is_its_base_to_the_bit(name):
    """Warm-up, exchange and shared objective touch nothing else: weights, controls, private heads and agents."""
    recipe = replace(SHARING, base=BASES[name], lam=0)
    found, alone = Finished(recipe), Finished(BASES[name])
    weighs = "fedsls" in name  # once for the warm-up, once for what begins afresh
    assert found.rounds == 2 + weighs + 1 + alone.rounds
    plain = Finished(After(BASES[name], found.rounds - alone.rounds))
    assert same(Tree({k: v for k, v in found.state.items() if k != "shared"}), plain.state)
    assert all(map(same, found.uploads(), plain.uploads()))
    assert all(map(same, found.kept, plain.kept))
    assert not same(Finished(replace(recipe, lam=0.5)).state.model, plain.state.model)


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
    """The round in which everybody looks at its images leaves nothing but numbers, and these decide all later ones."""
    weighed = Finished(FedSLS(base, pretrain_epochs=1, blend=1.0, blend_with=weights))
    plain = Finished(Idle(base))
    assert far(weighed.state.model, plain.state.model) < 1e-12
    by_saliency = Finished(FedSLS(base, pretrain_epochs=1))
    assert far(by_saliency.state.model, plain.state.model) > 1e-4 and int(by_saliency.state.fallbacks) == 0
    saliency = [by_saliency.kept[reply.client].saliency.total for reply in by_saliency.replies]
    assert [float(u.weight) for u in by_saliency.uploads()] == [float(total) for total in saliency]


def far(a: Tree, b: Tree) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a.leaves(), b.leaves(), strict=True))


def test_two_networks_at_once_cannot_share():
    for base in (OWN_HEADS, FedSLS(OWN_HEADS)):
        with pytest.raises(BadInput, match="cannot be pse, which asks two networks about the same images; fedper or"):
            Finished(FedXDS(base))


def test_what_hands_out_data_of_its_own_cannot_share():
    for base in (FedAux(), FedSLS(FedAux())):
        with pytest.raises(BadInput, match="of fedxds cannot be fedaux, whose features of public images"):
            Finished(FedXDS(base))


@pytest.mark.parametrize("recipe", [FedSLS, FedSL, FedDISCO])
@pytest.mark.parametrize("base", [FedSLS(), FedSL(), FedDISCO(), FedAU(), FedXDS(FedDISCO())])
def test_two_methods_cannot_both_decide_how_much_a_client_counts(recipe, base):
    name = type(base.base if isinstance(base, FedXDS) else base).__name__.lower()
    with pytest.raises(BadInput, match=f"algorithm.base {name} decides itself how much a client counts: leave out one"):
        [*recipe(base).stages(PLAN)]
