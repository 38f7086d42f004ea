"""pFedMe against a plain loop, its limits, and one step by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from fedlens import config
from fedlens.algorithms import FedAvg, PFedMe
from fedlens.core.errors import BadInput
from fedlens.core.objective import uniformly
from fedlens.core.optimizer import Adam, Sgd
from fedlens.core.tree import Tree
from personal import Values, assert_same, by_package, gap, label, loaded, loss, mean, weights
from scalar import number, scalar_run
from textbook import TWO_OF_THREE, WEIGHT_DECAY, World

WORLD = World(TWO_OF_THREE, momentum=0.0)


def pfedme(world: World, pull: float, rate: float, inner: int, restart: bool, server_lr: float = 1.0) -> Values:
    """v by inner steps on f + decay |v|^2 / 2 + pull / 2 |v - w_k|^2; then w_k goes towards v."""
    w, own = weights(world.model()), {}
    for round, cohort in enumerate(world.cohorts):
        local = {}
        for k in cohort:
            model = loaded(world, w).train()  # its parameters are v's, and its statistics everyone's
            copy = {n: p.detach().clone() for n, p in model.named_parameters()}
            velocity = {n: torch.zeros_like(p) for n, p in copy.items()}
            for batch in world.batches(round, k):
                if restart:
                    model.load_state_dict(copy, strict=False)
                for _ in range(inner):
                    model.zero_grad()
                    named = dict(model.named_parameters())
                    near = sum(((p - copy[n]) ** 2).sum() for n, p in named.items())
                    small = sum((p**2).sum() for p in named.values())
                    (loss(model, *batch) + pull / 2 * near + WEIGHT_DECAY / 2 * small).backward()
                    with torch.no_grad():
                        for p in named.values():
                            p -= rate * p.grad
                for n, p in model.named_parameters():
                    velocity[n] = world.momentum * velocity[n] + pull * (copy[n] - p.detach())
                    copy[n] = copy[n] - world.rate(round) * velocity[n]
            own[k] = weights(model)
            local[k] = own[k] | copy
        middle = mean(local, world.shares(cohort, uniformly))
        w = {n: w[n] + (1.0 if "running" in n else server_lr) * (middle[n] - w[n]) for n in w}
    found = label("model", w)
    for k, values in own.items():
        found |= label(f"own of {k}", values)
    return found


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize(("restart", "server_lr"), [(False, 1.0), (True, 0.5)], ids=["carry", "restart"])
def test_pfedme(restart, server_lr, momentum):
    world = replace(WORLD, momentum=momentum)
    recipe = PFedMe(pull=2.0, rate=0.05, inner=3, restart=restart, server_lr=server_lr)
    found = by_package(world, recipe)
    expected = pfedme(world, 2.0, 0.05, 3, restart, server_lr)
    assert_same(found.values, expected)
    for k in found.engine.memories:  # what is judged is the personal model, and neither the copy nor the global one
        mine = found.personal(k, recipe)
        assert all(torch.equal(mine[n], found.values[f"own of {k} {n}"]) for n in mine)
        assert (mine["head.weight"] - found.values["model head.weight"]).abs().max() > 1e-4


def test_whoever_never_took_part_predicts_with_the_global_model():
    found = by_package(World(((0, 1),), momentum=0.0), PFedMe(pull=2.0))
    mine = found.personal(2, PFedMe(pull=2.0))
    assert all(torch.equal(mine[n], found.values[f"model {n}"]) for n in mine)


def test_with_one_inner_step_from_the_copy_it_is_fedavg():
    """At a rate of lr pull rate; the decay is on the gradient in both."""
    pull, rate = 4.0, 0.05
    recipe, plan = PFedMe(pull=pull, rate=rate, inner=1, restart=True), replace(WORLD, weighting=uniformly)
    slower = FedAvg()

    @dataclass(frozen=True)
    class Slower:
        def stages(self, plan):
            yield from slower.stages(
                replace(plan, optimizer=replace(plan.optimizer, lr=plan.optimizer.lr * pull * rate))
            )

    found, usual = by_package(plan, recipe).values, by_package(plan, Slower()).values
    assert gap({n: found[n] for n in usual}, usual) < 1e-13


def test_without_pull_the_global_model_stays():
    found = by_package(WORLD, PFedMe(pull=0.0)).values
    first = weights(WORLD.model())
    moved = [n for n in first if not torch.equal(found[f"model {n}"], first[n])]
    assert moved and all("running" in n for n in moved)


def test_by_hand():
    """With many inner steps v is exact, (a c + pull w) / (a + pull): 2/3 and 2.8; one outer step: 14/15 and 1.36."""
    recipe = PFedMe(pull=2.0, rate=0.3, inner=80)
    assert number(scalar_run(recipe, steps=1)) == pytest.approx((14 / 15 + 1.36) / 2, abs=1e-14)


@dataclass(frozen=True)
class PulledToItself(PFedMe):
    """As one public code does: the personal model is pulled to where it is, that is, not at all."""

    def step(self, client, local, batch):
        own = local.own
        for _ in range(self.inner):
            grads = self.gradient(client, local.replace(params=own), batch) + own * client.optimizer.weight_decay
            own = own - grads * self.rate
        plain = replace(client.optimizer, weight_decay=0.0)
        plain.update_(local.params, (local.params - own) * self.pull, local.optimizer)
        return local.replace(own=own)


@dataclass(frozen=True)
class JudgesTheCopy(PFedMe):
    """As two public codes do: personal weights are the model's own, which is the copy in the end."""

    def personal(self, client, local=None):
        return client.memory.own if local is None else Tree(params=local.params, buffers=local.buffers)


@pytest.mark.parametrize("mutant", [PulledToItself, JudgesTheCopy])
def test_the_textbook_notices(mutant):
    found = by_package(WORLD, mutant(pull=2.0, rate=0.05, inner=3)).values
    assert gap(found, pfedme(WORLD, 2.0, 0.05, 3, restart=False)) > 1e-4


def test_refused_and_spoken_of():
    with pytest.raises(BadInput, match=r"needs local\.optimizer=sgd"):
        list(PFedMe().stages(replace(WORLD.stage(), optimizer=Adam())))
    with pytest.raises(BadInput, match=r"local\.lr=0\.2 times algorithm\.pull=15 is not below 2"):
        list(PFedMe().stages(replace(WORLD.stage(), optimizer=Sgd(0.2))))
    usual, plain = (config.read(None, ["algorithm=pfedme", *more]) for more in ((), ("local.momentum=0",)))
    assert usual._start_notes([10]) == (
        "pfedme means plain local steps, and local.momentum is 0.9: try local.momentum=0",
    )
    assert plain._start_notes([10]) == ()
