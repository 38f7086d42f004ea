"""FedDF and FedAux as their released code distils, against plain loops in float64."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.func import functional_call

from fedlens import config
from fedlens.algorithms import FedAux, FedDF
from fedlens.algorithms.fedaux import WeightedDistillation
from fedlens.core.algorithm import Server
from fedlens.core.batches import Dataset, plan
from fedlens.core.rng import generator, key
from fedlens.core.run import run
from fedlens.core.tree import Tree
from fedlens.data.prepare import Prepare
from fedlens.engines.sequential import Sequential
from recipes import public_data
from small import PLAN, Net, federation, jitter, network

PUBLIC = Dataset(public_data(40).x * 3, public_data(40).y, jitter)
FULL = FedDF(steps=12, batch=8, lr=0.02, clip=0.05, validation=3, check_every=4)


def cohort(scale: float = 0.4, norm: bool = True, state: Tree | None = None, seed: int = 9, auxiliary=PUBLIC):
    """(server, uploads) of two clients whose models are far apart."""
    net = network(norm)
    state = state or Tree(model=net.initial_weights())
    deltas = [
        state.model.map(lambda leaf, s=s: scale * torch.rand(leaf.shape, generator=generator(s)).to(leaf))
        for s in (1, 2)
    ]
    uploads = [Tree(delta=d, weight=torch.tensor(w).double()) for d, w in zip(deltas, (1.0, 3.0), strict=True)]
    return Server(net, state, 2, key=seed, auxiliary=auxiliary), uploads


class ByHand:
    """The released distillation: torch's functions, one step after another."""

    def __init__(self, by, server, uploads, norm=True):
        self.by, self.server, self.module = by, server, Net(norm).double()
        self.teachers = [server.state.model + upload.delta for upload in uploads]
        share = torch.stack([upload.weight for upload in uploads]) / sum(upload.weight for upload in uploads)
        both = [dict(t.params) | dict(t.buffers) for t in self.teachers]
        self.average = {name: sum(w * t[name] for w, t in zip(share, both, strict=True)) for name in both[0]}
        self.names = list(server.state.model.params)
        self.rates, self.norms, self.chosen_at = [], [], None

    def said(self, weights, x, train=False):
        self.module.train(train)
        return functional_call(self.module, dict(weights), (x,))

    def told(self, x):
        with torch.no_grad():
            return (sum(self.said(dict(t.params) | dict(t.buffers), x) for t in self.teachers) / 2).softmax(1)

    def distil(self, adam=None):
        by, data, steps = self.by, self.server.auxiliary, self.by.steps
        order = torch.randperm(len(data), generator=generator(key("public images held back")))
        held = min(by.validation, len(data) // 10)
        learned, back = (order[held:], order[:held]) if held else (torch.arange(len(data)), order[:0])
        student = {name: leaf.clone().requires_grad_(name in self.names) for name, leaf in self.average.items()}
        first, second, count = adam or ({n: 0.0 for n in self.names}, {n: 0.0 for n in self.names}, 0)
        best = None
        rows, weights, _ = plan(len(learned), by.batch, key(self.server.key, "distil"), steps=steps)
        for t in range(steps):
            at = torch.tensor(key(self.server.key, "public views", t))
            x = data.prepare(data.x[learned[rows[t]]], at if by.augment else None)
            target = self.told(x)
            if by.train_mode:
                for name, leaf in student.items():  # torch would write statistics in place
                    student[name] = leaf.detach().clone().requires_grad_(name in self.names)
            log = self.said(student, x, by.train_mode).log_softmax(1)
            each = (target * (target.log() - log)).sum(1)
            loss = (each * weights[t]).sum() / weights[t].sum()
            grads = dict(zip(self.names, torch.autograd.grad(loss, [student[n] for n in self.names]), strict=True))
            norm = math.sqrt(sum(float((g**2).sum()) for g in grads.values()))
            self.norms.append(norm)
            factor = 1.0 if by.clip is None else min(1.0, by.clip / norm)
            rate = by.lr * (1.0 if by.schedule == "constant" else (1 + math.cos(math.pi * t / steps)) / 2)
            self.rates.append(rate)
            count += 1
            for n in self.names:
                g = grads[n] * factor
                first[n], second[n] = 0.9 * first[n] + 0.1 * g, 0.999 * second[n] + 0.001 * g * g
                move = first[n] / (1 - 0.9**count) / ((second[n] / (1 - 0.999**count)).sqrt() + 1e-8)
                student[n] = (student[n] - rate * move).detach().requires_grad_()
            if held and ((t + 1) % by.check_every == 0 or t + 1 == steps):
                x = data.prepare(data.x[back], None)
                with torch.no_grad():
                    p, q = self.told(x), self.said(student, x).softmax(1)
                far = float((p * (p.log() - q.log())).sum(1).mean())
                if best is None or far < best[0]:
                    best = far, {n: leaf.detach().clone() for n, leaf in student.items()}
                    self.chosen_at = t + 1
        self.adam = first, second, count
        return best[1] if best else student


def apart(found: Tree, expected: dict) -> float:
    ours = dict(found.params) | dict(found.buffers)
    return max(float((ours[name] - leaf.detach()).abs().max()) for name, leaf in expected.items())


@pytest.mark.parametrize("norm", [True, False])
def test_feddf_clips_augments_and_keeps_the_best_student(norm):
    server, uploads = cohort(norm=norm)
    hand = ByHand(FULL, server, uploads, norm)
    expected = hand.distil()
    assert max(hand.norms) > FULL.clip  # some gradients were clipped
    assert apart(FULL.aggregate(server, uploads).model, expected) < 1e-12


def test_the_best_student_is_not_always_the_last():
    by = FedDF(steps=12, batch=8, lr=0.5, validation=4, check_every=1)
    server, uploads = cohort()
    hand = ByHand(by, server, uploads)
    expected = hand.distil()
    assert hand.chosen_at < 12
    assert apart(by.aggregate(server, uploads).model, expected) < 1e-10


def test_no_step_of_feddf_stands_still():
    steps = 7
    one = FedDF(steps=steps)
    assert one.pace(steps - 1, steps) == pytest.approx((1 + math.cos(math.pi * 6 / 7)) / 2) and one.pace(0, 1) == 1
    assert FedDF(**FedDF.presets["earlier"]).pace(steps - 1, steps) == pytest.approx(0, abs=1e-15)


def test_in_train_mode_public_images_move_the_statistics():
    server, uploads = cohort()
    by = FedDF(steps=3, batch=8, train_mode=True, validation=0, augment=False)
    still = FedDF(steps=3, batch=8, validation=0, augment=False)
    name = "norm.running_mean"
    mean = sum(u.weight * (server.state.model.buffers[name] + u.delta.buffers[name]) for u in uploads) / 4
    assert (still.aggregate(server, uploads).model.buffers[name] - mean).abs().max() < 1e-12
    found = by.aggregate(server, uploads).model
    expected = ByHand(by, server, uploads).distil()
    assert (found.buffers[name] - mean).abs().max() > 1e-3
    assert apart(found, expected) < 1e-12


def test_public_images_are_moved_by_a_key_alone():
    asked = ["data=mnist5k", "algorithm=feddf", "auxiliary=fashion_mnist", "device=cpu"]
    experiment = config.read(None, asked)
    images = experiment.data.load()
    few = Prepare(images.mean, images.std)
    x = torch.randint(0, 256, (6, 1, 28, 28), generator=generator(0)).to(torch.uint8)
    found: Any = SimpleNamespace(x=x, y=torch.zeros(6, dtype=torch.long), train=torch.arange(6))
    public = experiment.public(found, images)
    assert torch.equal(public.prepare(public.x, None), few(x, None))
    moved = public.prepare(public.x, torch.tensor(3))
    assert not torch.equal(moved, few(x, None)) and moved.shape == x.shape


# ---- FedAux ----------------------------------------------------------------------------------------------------------
def test_fedaux_goes_on_with_adam_at_a_constant_rate():
    """Two rounds: the second starts from the new average, with the moments and the count of the first."""
    training = next(s for s in FedAux().stages(PLAN) if isinstance(s.algorithm, WeightedDistillation)).algorithm
    assert (training.lr, training.schedule, training.kept) == (5e-5, "constant", True)
    by = WeightedDistillation(
        steps=4, batch=8, lr=0.01, schedule="constant", kept=True, clip=None, augment=False, validation=0
    )
    server, uploads = cohort()
    scored = {"scores": torch.full((2, 40), 0.5), "tickets": torch.tensor([1, 2]), "distil": torch.arange(40)}
    uploads = [u.replace(ticket=torch.tensor(t)) for u, t in zip(uploads, (1, 2), strict=True)]
    server = Server(server.net, server.state.replace(**scored), 2, key=9, auxiliary=PUBLIC)
    hand = ByHand(by, server, uploads)
    expected, state = hand.distil(), by.aggregate(server, uploads)
    assert apart(state.model, expected) < 1e-12 and hand.rates == [0.01] * 4
    later = Server(server.net, state, 2, round=1, key=10, auxiliary=PUBLIC)
    again = ByHand(by, later, uploads)
    expected = again.distil(hand.adam)
    assert apart(by.aggregate(later, uploads).model, expected) < 1e-12
    assert again.adam[2] == 8


def test_fedauxs_adam_is_in_the_state_between_rounds():
    recipe = FedAux(pretrain_steps=0, steps=2, batch=6)
    state = run(recipe, network(), Sequential(network(), federation()), PLAN, auxiliary=public_data()).state
    assert set(state.adam) == {"first", "second", "steps"} and float(state.adam.steps["head.bias"]) == 2 * PLAN.rounds
    earlier = FedAux(**FedAux.presets["earlier"] | {"pretrain_steps": 0, "steps": 2, "batch": 6})
    again = run(earlier, network(), Sequential(network(), federation()), PLAN, auxiliary=public_data()).state
    assert "adam" not in again


def test_settings_are_the_released_ones():
    by, whole = FedDF(), FedDF(**FedDF.presets["paper"])
    assert (by.batch, by.lr, by.clip, by.augment, by.schedule, by.kept) == (64, 1e-3, 5, True, "cosine", False)
    assert by.validation > 0 and (whole.steps, whole.train_mode) == (10_000, True)
    ours = FedAux()
    assert (ours.lr, ours.schedule, ours.kept) == (5e-5, "constant", True)
