"""Uplink transforms against their definitions, alone and in a run."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedlens.algorithms import FedAvg, FedAvgM, FedDyn, FedNova, FedProx, FedSAM, FineTuned, Local, Scaffold
from fedlens.core.errors import BadInput
from fedlens.core.rng import generator, key
from fedlens.core.transform import TRANSFORMS, Clip, GaussianNoise, Quantise, TopK, Transform
from fedlens.core.tree import Tree
from small import same
from textbook import (
    NEVER_THE_LAST,
    SIZES,
    TOLERANCE,
    TWO_OF_THREE,
    World,
    assert_same,
    flat,
    local_training,
    scaffold,
    total,
)

MILLION = 1_000_000


def client(number: int = 0, round: int = 0, seed: int = 0, **memory: Tree) -> SimpleNamespace:
    """What a transform reads of a client: its key in this round, and its memory."""
    return SimpleNamespace(key=key(seed, "client", round, number), memory=Tree(memory))


def update(seed: int = 0, dtype: torch.dtype = torch.float64) -> Tree:
    draw, shapes = generator(seed), {"weight": (6, 5), "bias": (7,), "scale": ()}
    return Tree({n: torch.randn(shape, generator=draw, dtype=dtype) for n, shape in shapes.items()})


def upload(params: Tree, **more: object) -> Tree:
    return Tree(delta=Tree(params=params, buffers=Tree(running_mean=torch.ones(3))), weight=torch.tensor(13.0), **more)


def through(transform: Transform, at: SimpleNamespace, params: Tree) -> Tree:
    """Encoded at the client and decoded at the server."""
    sent, _ = transform.encode(at, upload(params))
    server = SimpleNamespace(state=Tree(model=Tree(params=params.zeros())))
    return transform.decode(server, sent).delta.params


def norm(params: Tree) -> float:
    return math.sqrt(sum(float((leaf.double() ** 2).sum()) for leaf in params.leaves()))


def start_of(transform: Transform, params: Tree) -> SimpleNamespace:
    return client(residual=params.zeros()) if isinstance(transform, TopK) else client()


ALL = [Clip(0.5), GaussianNoise(0.1), TopK(0.3), Quantise()]
every = pytest.mark.parametrize("transform", ALL, ids=lambda transform: type(transform).__name__)


def test_all_are_tested():
    assert {type(transform) for transform in ALL} == set(TRANSFORMS.values())


@every
def test_only_the_update_of_parameters_changes(transform):
    control = update(5)
    whole = upload(update(), control=control)
    sent, _ = transform.encode(start_of(transform, update()), whole)
    server = SimpleNamespace(state=Tree(model=Tree(params=update().zeros())))
    for seen in (sent, transform.decode(server, sent)):
        assert seen.keys() == whole.keys()
        assert same(seen.control, control)
        assert same(seen.delta.buffers, whole.delta.buffers)
        assert torch.equal(seen.weight, whole.weight)
    decoded = transform.decode(server, sent).delta.params
    assert {n: (t.shape, t.dtype) for n, t in decoded.items()} == {n: (t.shape, t.dtype) for n, t in update().items()}
    assert not same(decoded, update())


@every
def test_what_is_encoded_is_not_written(transform):
    params = update()
    transform.encode(start_of(transform, params), upload(params))
    assert same(params, update())


# ---- clip ------------------------------------------------------------------------------------------------------------
@settings(deadline=None, max_examples=50)
@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_clip_is_the_nearest_point_of_the_ball(bound, length):
    """The same direction, as long as allowed; the norm is of all tensors together."""
    params = update() * (length / norm(update()))
    clipped = through(Clip(bound), client(), params)
    assert norm(clipped) == pytest.approx(min(bound, length), rel=1e-12)
    shorter = params * min(1, bound / length)
    assert max((clipped[n] - shorter[n]).abs().max() for n in params) <= 1e-12 * length


def test_clip_leaves_what_is_short_enough_bit_for_bit():
    assert same(through(Clip(norm(update()) * 1.001), client(), update()), update())
    assert same(through(Clip(0.1), client(), update().zeros()), update().zeros())


# ---- noise -----------------------------------------------------------------------------------------------------------
def noise(name: str = "weight", size: int = MILLION, std: float = 1.0, at: SimpleNamespace | None = None) -> np.ndarray:
    params = Tree({name: torch.zeros(size, dtype=torch.float64)})
    return through(GaussianNoise(std), at or client(), params)[name].numpy()


@pytest.mark.parametrize("std", [0.003, 1.0, 40.0])
def test_noise_has_its_standard_deviation(std):
    drawn = noise(std=std)
    assert drawn.std() == pytest.approx(std, rel=0.01)
    assert abs(drawn.mean()) < 4 * std / math.sqrt(MILLION)


def test_noise_is_normal():
    """Shares within one to four deviations against the error function; no value is drawn twice in a row."""
    drawn = noise()
    for deviations in (0.5, 1, 2, 3, 4):
        expected = math.erf(deviations / math.sqrt(2))
        error = math.sqrt(expected * (1 - expected) / MILLION)
        assert np.mean(np.abs(drawn) < deviations) == pytest.approx(expected, abs=4 * error)
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 4 / math.sqrt(MILLION)


def test_noise_is_independent_over_names_clients_rounds_and_seeds():
    size = 200_000
    drawn = [
        noise("weight", size),
        noise("bias", size),
        noise(size=size, at=client(number=1)),
        noise(size=size, at=client(round=1)),
        noise(size=size, at=client(number=1, round=1)),
        noise(size=size, at=client(seed=1)),
    ]
    for one, other in combinations(drawn, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / math.sqrt(size)
        assert not np.array_equal(one, other)


def test_noise_is_added_and_is_the_same_for_the_same_key():
    noisy, drawn = (through(GaussianNoise(0.1), client(3, 2), params) for params in (update(), update().zeros()))
    assert max((noisy[n] - drawn[n] - update()[n]).abs().max() for n in noisy) <= TOLERANCE
    assert same(through(GaussianNoise(0.0), client(), update()), update())


# ---- top k -----------------------------------------------------------------------------------------------------------
def largest(values: list[float], count: int) -> list[int]:
    """By definition: by size, of equals the lower index, in order."""
    return sorted(sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))[:count])


def sent_by(topk: TopK, params: Tree, residual: Tree | None = None) -> tuple[Tree, Tree]:
    sent, memory = topk.encode(client(residual=residual or params.zeros()), upload(params))
    assert memory.keys() == {"residual"}
    return sent.delta.params, memory.residual


@pytest.mark.parametrize("share", ["0.0", "0.01", "0.1", "0.25", "0.29", "0.3", "0.57", "0.7", "0.999", "1.0"])
def test_topk_keeps_exactly_its_share(share):
    """Rounded down as the decimal that was asked for, not as its nearest double, and one entry at least."""
    wrong = {}
    for size in (1, 2, 3, 7, 10, 20, 64, 100, 300, 1000):
        expected = max(1, math.floor(Fraction(share) * size))
        sent, _ = sent_by(TopK(float(share)), Tree(w=torch.arange(1.0, size + 1)))
        if len(sent.w.index) != expected or len(sent.w.kept) != expected:
            wrong[size] = (len(sent.w.index), expected)
    assert not wrong, f"size: (kept, expected) {wrong}"


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30), st.sampled_from([0.1, 0.25, 0.5, 0.75]))
def test_topk_keeps_the_largest_and_of_equals_the_lower_index(values, share):
    sent, _ = sent_by(TopK(share), Tree(w=torch.tensor(values, dtype=torch.float64)))
    index = largest(values, max(1, int(len(values) * share)))
    assert sent.w.index.tolist() == index
    assert sent.w.kept.tolist() == [values[i] for i in index]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.sampled_from([0.05, 0.3, 0.9, 1.0]))
def test_topk_sends_or_saves_every_entry(seed, share):
    """sent + residual == update + old residual to the bit, and never both."""
    params, before = update(seed), update(seed + 1)
    whole = params + before
    sent, residual = sent_by(TopK(share), params, before)
    dense = TopK(share).unpack(whole, sent)
    assert same(dense + residual, whole)
    assert all(not (dense[n] * residual[n]).any() for n in whole)


def test_topk_sends_everything_in_the_end():
    """Over rounds: what was sent and what is left make up all updates."""
    topk, residual, arrived, asked = TopK(0.1), update().zeros(), update().zeros(), update().zeros()
    for round in range(30):
        sent, residual = sent_by(topk, update(round), residual)
        arrived, asked = arrived + topk.unpack(residual, sent), asked + update(round)
    assert max((arrived[n] + residual[n] - asked[n]).abs().max() for n in asked) <= TOLERANCE
    assert norm(residual) > 0.1
    for _ in range(30):  # enough rounds for a tenth of 30 entries at a time
        sent, residual = sent_by(topk, asked.zeros(), residual)
    assert norm(residual) == 0


def test_topk_of_everything_is_the_identity():
    sent, residual = sent_by(TopK(1.0), update())
    assert same(TopK(1.0).unpack(update(), sent), update())
    assert same(residual, update().zeros())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_topk_sends_four_bytes_of_index_with_every_value(dtype):
    sent, _ = sent_by(TopK(0.2), update(dtype=dtype))
    count = 6 + 1 + 1  # of 30, 7 and 1 entries
    assert sent.nbytes == count * (4 + update(dtype=dtype).weight.element_size())


# ---- quantise --------------------------------------------------------------------------------------------------------
@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.floats(1e-6, 1e6), st.sampled_from([torch.float32, torch.float64]))
def test_quantised_values_are_within_one_step(seed, spread, dtype):
    params = update(seed, dtype) * spread
    decoded = through(Quantise(), client(), params)
    for name, value in params.items():
        step = (value.max() - value.min()) / 255
        rounding = 4 * torch.finfo(dtype).eps * value.abs().max()
        assert (decoded[name] - value).abs().max() <= step + rounding
        assert (decoded[name] - value).abs().flatten()[value.argmin()] == 0
        assert (decoded[name] - value).abs().flatten()[value.argmax()] <= rounding


class Nearest(Quantise):
    """Rounded to the nearest code: the error of an entry is the same for all keys."""

    def quantised(self, seed, tensor):
        low, high = tensor.aminmax()
        scale = (high - low) / 255
        return Tree(code=((tensor - low) / scale).round().to(torch.uint8), low=low, scale=scale)


def test_quantisation_keeps_the_mean():
    """Over keys: no bias, and the deviation of a step that is taken with probability f; rounding has a bias."""
    value, draws = update().weight, 3000
    step = (value.max() - value.min()) / 255
    f = ((value - value.min()) / step).frac()
    deviation = step * (f * (1 - f)).sqrt()
    inside = (f > 0.05) & (f < 0.95)
    assert inside.sum() >= 20
    bias = {}
    for transform in (Quantise(), Nearest()):
        decoded = torch.stack([through(transform, client(i), Tree(w=value)).w for i in range(draws)])
        bias[type(transform)] = ((decoded.mean(0) - value).abs() / (deviation / math.sqrt(draws)))[inside].max()
        if isinstance(transform, Nearest):
            continue
        assert (decoded.std(0) / deviation - 1)[inside].abs().max() < 0.1
    assert bias[Quantise] < 4
    assert bias[Nearest] > 10


def test_quantisation_draws_anew_for_names_clients_and_rounds():
    def codes(name="w", **at):
        sent, _ = Quantise().encode(client(**at), upload(Tree({name: update().weight})))
        return sent.delta.params[name].code

    assert torch.equal(codes(), codes())
    for other in (codes("v"), codes(number=1), codes(round=1)):
        assert not torch.equal(codes(), other)
        assert (codes().int() - other.int()).abs().max() <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.7, 1e-30, 1e30])
def test_constant_tensors_are_exact(value, dtype):
    params = Tree(many=torch.full((3, 4), value, dtype=dtype), one=torch.tensor(value, dtype=dtype))
    assert same(through(Quantise(), client(), params), params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_entry_is_one_byte(dtype):
    sent, _ = Quantise().encode(client(), upload(update(dtype=dtype)))
    packed, entries, tensors = sent.delta.params, 30 + 7 + 1, 3
    assert {packed[name].code.dtype for name in packed} == {torch.uint8}
    extremes = 2 * torch.empty(0, dtype=dtype).element_size()  # low and scale of every tensor
    assert packed.nbytes == entries * 1 + tensors * extremes


# ---- in a run --------------------------------------------------------------------------------------------------------
def pieces(world: World, whole: Tensor) -> dict[str, Tensor]:
    """A flat vector as the module's parameters, each flat."""
    names, parameters = zip(*world.model().named_parameters(), strict=True)
    return dict(zip(names, whole.split([p.numel() for p in parameters]), strict=True))


def topk_by_hand(world: World, share: float) -> dict[str, Tensor]:
    """FedAvg with error feedback, tensor by tensor."""
    theta, running = world.start()
    residuals: dict[int, Tensor] = {}
    for round, cohort in enumerate(world.cohorts):
        p, local, arrived = world.shares(cohort), {}, {}
        for k in cohort:
            local[k] = local_training(world, theta, running, round, k)
            asked = local[k].theta - theta + residuals.get(k, torch.zeros_like(theta))
            kept = []
            for piece in pieces(world, asked).values():
                index = largest(piece.tolist(), max(1, int(len(piece) * share)))
                kept.append(torch.zeros_like(piece))
                for i in index:
                    kept[-1][i] = piece[i]
            arrived[k] = torch.cat(kept)
            residuals[k] = asked - arrived[k]
        theta = theta + total(p[k] * arrived[k] for k in cohort)
        running = total(p[k] * local[k].statistics for k in cohort)
    return {
        "model": theta,
        "model statistics": running,
        **{f"residual of {k}": residual for k, residual in residuals.items()},
    }


@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("cohorts", [TWO_OF_THREE, NEVER_THE_LAST])
def test_topk_in_a_run_is_error_feedback_by_hand(cohorts, share):
    """What a client did not send waits through the rounds it misses."""
    world = World(cohorts, uplink=(TopK(share),))
    assert_same(world.run(FedAvg()).values, topk_by_hand(world, share))


class Forgetful(TopK):
    """What is not sent is lost."""

    def encode(self, client, upload):
        sent, memory = super().encode(client, upload)
        return sent, memory.replace(residual=memory.residual.zeros())


def test_error_feedback_by_hand_notices_a_client_that_forgets():
    world = World(TWO_OF_THREE)
    found = replace(world, uplink=(Forgetful(0.1),)).run(FedAvg()).values
    assert (found["model"] - topk_by_hand(world, 0.1)["model"]).abs().max() > 1e-6


METHODS = [FedAvg(), FedAvgM(), FedProx(), FedSAM(), FedNova(), Scaffold(), FedDyn(alpha=0.1)]
methods = pytest.mark.parametrize("recipe", METHODS, ids=lambda recipe: type(recipe).__name__)


@methods
def test_topk_of_everything_changes_no_run(recipe):
    plain = World(TWO_OF_THREE).run(recipe).values
    found = World(TWO_OF_THREE, uplink=(TopK(1.0),)).run(recipe).values
    left = {name: found.pop(name) for name in [*found] if name.startswith("residual")}
    assert len(left) == 3
    assert not any(residual.any() for residual in left.values())
    assert_same(found, plain)


@methods
def test_a_wide_clip_changes_no_run(recipe):
    plain = World(TWO_OF_THREE).run(recipe).values
    assert_same(World(TWO_OF_THREE, uplink=(Clip(1e6),)).run(recipe).values, plain)


def test_clip_in_a_run():
    bound, world = 0.5, World(TWO_OF_THREE, uplink=(Clip(0.5),))
    theta, running = world.start()
    outcome, lengths = world.run(FedAvg()), []
    for round, cohort in enumerate(world.cohorts):
        p, local = world.shares(cohort), {k: local_training(world, theta, running, round, k) for k in cohort}
        delta = {k: local[k].theta - theta for k in cohort}
        lengths += [float(delta[k].norm()) for k in cohort]
        clipped = {k: delta[k] * min(1, bound / float(delta[k].norm())) for k in cohort}
        for reply in outcome.replies[round]:
            assert norm(reply.upload.delta.params) <= bound * (1 + 1e-12)
        theta = theta + total(p[k] * clipped[k] for k in cohort)
        running = total(p[k] * local[k].statistics for k in cohort)
    assert_same(outcome.values, {"model": theta, "model statistics": running})
    assert max(lengths) > bound  # else there was nothing to clip


UPLINKS = {
    "clip, noise": (Clip(0.5), GaussianNoise(0.01)),
    "clip, topk": (Clip(0.5), TopK(0.2)),
    "clip, quantise": (Clip(0.5), Quantise()),
    "clip, noise, topk": (Clip(0.5), GaussianNoise(0.01), TopK(0.2)),
    "clip, noise, quantise": (Clip(0.5), GaussianNoise(0.01), Quantise()),
}


def dense(packed: Tree, shape: torch.Size) -> np.ndarray:
    """What the server should make of one tensor of a message, by its fields."""
    if "code" in packed:
        return (packed.code.numpy() * packed.scale.item() + packed.low.item()).reshape(shape)
    values = np.zeros(math.prod(shape))
    values[packed.index.numpy()] = packed.kept.numpy()
    return values.reshape(shape)


@pytest.mark.parametrize("uplink", UPLINKS.values(), ids=UPLINKS.keys())
def test_the_server_moves_by_the_mean_of_what_was_sent(uplink):
    """From messages to model by numpy; the clip bounds what noise and packing start from."""
    world = World(((0, 1, 2),), uplink=uplink)
    outcome = world.run(FedAvg())
    theta = pieces(world, world.start()[0])
    shapes = {name: parameter.shape for name, parameter in world.model().named_parameters()}
    for name, shape in shapes.items():
        sent = {reply.client: reply.upload.delta.params[name] for reply in outcome.replies[0]}
        values = [dense(s, shape) if isinstance(s, Tree) else s.numpy() for s in sent.values()]
        moved = np.average(values, axis=0, weights=[SIZES[k] for k in sent])
        expected = theta[name].view(shape).numpy() + moved
        assert np.abs(outcome.server.state.model.params[name].numpy() - expected).max() <= TOLERANCE


@pytest.mark.parametrize("uplink", [(GaussianNoise(0.02),), (Clip(0.5), GaussianNoise(0.02))], ids=["noise", "clipped"])
def test_noise_in_a_run_is_drawn_for_every_client_and_round(uplink):
    """Without local epochs nothing is learned, so that uploads are noise alone."""
    world = World(((0, 1, 2),) * 3, uplink=uplink)
    quiet = replace(world, epochs=0)
    replies = [reply for answers in quiet.run(FedAvg()).replies for reply in answers]
    drawn = [flat("delta", reply.upload.delta, world.model())["delta"] for reply in replies]
    assert len(drawn) == 9
    assert torch.cat(drawn).std().item() == pytest.approx(0.02, rel=0.05)
    limit = 4.5 / math.sqrt(len(drawn[0]))
    assert max(abs(np.corrcoef(a, b)[0, 1]) for a, b in combinations(drawn, 2)) < limit


@pytest.mark.parametrize("uplink", UPLINKS.values(), ids=UPLINKS.keys())
@methods
def test_every_method_runs_with_every_uplink(recipe, uplink):
    outcome = World(TWO_OF_THREE, uplink=uplink).run(recipe)
    assert all(value.isfinite().all() for value in outcome.values.values())
    plain = World(TWO_OF_THREE).run(recipe)
    assert (outcome.values["model"] - plain.values["model"]).abs().max() > 1e-6
    packed = any(isinstance(transform, TopK | Quantise) for transform in uplink)
    sizes = [run.replies[0][0].upload.delta.params.nbytes for run in (outcome, plain)]
    assert (sizes[0] < sizes[1] / 2) == packed


def test_control_variates_pass_an_uplink_whole():
    """Round one: SCAFFOLD's controls come from local training, which the uplink does not touch."""
    world = World(((0, 1, 2),))
    found = replace(world, uplink=(Clip(0.01), Quantise())).run(Scaffold()).values
    expected = scaffold(world)
    for name in ("control", "control of 0", "control of 1", "control of 2", "model statistics"):
        assert (found[name] - expected[name]).abs().max() <= TOLERANCE
    assert (found["model"] - expected["model"]).abs().max() > 1e-3


def test_fine_tuning_sends_nothing_through_the_uplink():
    outcome = World(TWO_OF_THREE, uplink=(TopK(0.2),)).run(FineTuned(FedAvg(), epochs=1))
    assert not any(reply.upload for reply in outcome.replies[-1])
    assert {"residual of 0", "tuned of 0"} <= outcome.values.keys()


# ---- what is refused -------------------------------------------------------------------------------------------------
@every
@pytest.mark.parametrize("recipe", [Local(), FineTuned(Local())], ids=["local", "local+ft"])
def test_a_method_without_update_has_no_uplink(recipe, transform):
    with pytest.raises(BadInput, match=r"uplink.* delta"):
        World(uplink=(transform,)).run(recipe)


@pytest.mark.parametrize(
    "uplink",
    [
        (TopK(0.5), Clip(0.5)),
        (TopK(0.5), GaussianNoise(0.1)),
        (TopK(0.5), Quantise()),
        (TopK(0.5), TopK(0.5)),
        (Quantise(), Clip(0.5)),
        (Quantise(), GaussianNoise(0.1)),
        (Quantise(), TopK(0.5)),
        (Quantise(), Quantise()),
    ],
    ids=lambda uplink: ", ".join(type(transform).__name__ for transform in uplink),
)
def test_nothing_can_follow_a_packing(uplink):
    """Indices and codes are not an update: arithmetic on them would be silently wrong."""
    with pytest.raises(BadInput, match="uplink"):
        World(uplink=uplink).run(FedAvg())
