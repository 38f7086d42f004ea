"""Robust rules against their definitions, what attackers can do to them, and both in whole runs."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from fedlens import config
from fedlens.algorithms import ALGORITHMS, PSE, FedAU, FedAvg, FedDyn, FedNova, FedSLS, Scaffold
from fedlens.core.algorithm import Server
from fedlens.core.batches import Shard
from fedlens.core.cohort import Everyone, Uniform
from fedlens.core.errors import BadInput, RunFailed
from fedlens.core.objective import uniformly
from fedlens.core.optimizer import Sgd
from fedlens.core.rng import generator, numpy_generator
from fedlens.core.run import run
from fedlens.core.transform import Clip as UplinkClip
from fedlens.core.transform import Quantise, TopK
from fedlens.core.tree import Tree
from fedlens.data import Images
from fedlens.engines.lanes import Lanes
from fedlens.engines.sequential import Sequential
from fedlens.engines.workers import Workers
from fedlens.experiment import Experiment
from fedlens.models import MODELS
from fedlens.robust.aggregators import (
    DEFENCES,
    Claims,
    ClipUploads,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    TrimmedMean,
)
from fedlens.robust.attacks import ATTACKS, Backdoor, Hostile, LabelFlip, Noise, SignFlip
from fedlens.runs.folder import RunFolder
from fedlens.simulate import checks as scope
from fedlens.simulate.describe import described_with
from fedlens.simulate.resume import resume
from fedlens.simulate.run import run as simulate
from recipes import Late
from small import PLAN, SIZES, build, federation, network, same

SERVER = SimpleNamespace()
SHAPES = {"conv.weight": (4, 3, 2), "conv.bias": (4,), "scale": ()}
RULES = [Median(), TrimmedMean(0.3), MultiKrum(0.2), MultiKrum(0.3, keep=2), Krum(0.2), GeometricMedian()]
every_rule = pytest.mark.parametrize("rule", RULES, ids=str)


def upload(seed: int, scale: float = 1.0) -> Tree:
    draw = generator(seed)

    def part(around: float) -> Tree:
        drawn = {n: torch.randn(s, generator=draw, dtype=torch.float64) for n, s in SHAPES.items()}
        return Tree({n: scale * (around + t) for n, t in drawn.items()})

    delta = Tree(params=part(0.5), buffers=Tree(running_mean=part(9.0)["conv.bias"]))
    return Tree(delta=delta, control=part(-3.0), weight=torch.tensor(float(1 + seed % 5), dtype=torch.float64))


def uploads(count: int, begin: int = 0) -> list[Tree]:
    return [upload(seed) for seed in range(begin, begin + count)]


def parts(some: list[Tree]) -> dict[str, np.ndarray]:
    """[clients, values] of every part of an upload."""
    found = {"params": [u.delta.params for u in some], "buffers": [u.delta.buffers for u in some]}
    return {name: np.stack([flat(tree) for tree in trees]) for name, trees in found.items()} | {
        "control": np.stack([flat(u.control) for u in some])
    }


def flat(tree: Tree) -> np.ndarray:
    return np.concatenate([leaf.numpy().ravel() for _, leaf in sorted(tree.paths())])


# ---- rules by their definitions --------------------------------------------------------------------------------------
def krum_by_hand(points: np.ndarray, hostile: int, keep: int) -> np.ndarray:
    scores = []
    for i, mine in enumerate(points):
        squares = sorted(float(((mine - other) ** 2).sum()) for j, other in enumerate(points) if j != i)
        scores.append(sum(squares[: len(points) - hostile - 2]))
    best = sorted(range(len(points)), key=lambda i: (scores[i], i))[:keep]
    return points[best].mean(0)


def geometric_median_by_scipy(points: np.ndarray) -> np.ndarray:
    def far(z: np.ndarray) -> tuple[float, np.ndarray]:
        away = z - points
        lengths = np.linalg.norm(away, axis=1)
        return lengths.sum(), (away / lengths[:, None]).sum(0)

    return optimize.minimize(far, points.mean(0), jac=True, method="BFGS", options={"gtol": 1e-9}).x


BY_HAND = {
    "median": (Median(), lambda p: np.median(p, axis=0), 0),
    "trimmed": (TrimmedMean(0.3), lambda p: stats.trim_mean(p, 0.3, axis=0), 1e-14),
    "krum": (Krum(0.2), lambda p: krum_by_hand(p, len(p) // 5, 1), 0),
    "multikrum": (MultiKrum(0.2), lambda p: krum_by_hand(p, len(p) // 5, len(p) - len(p) // 5 - 2), 1e-14),
    "multikrum, 2": (MultiKrum(0.2, keep=2), lambda p: krum_by_hand(p, len(p) // 5, 2), 1e-14),
    "geometric median": (GeometricMedian(), geometric_median_by_scipy, 1e-7),
}


def test_all_are_tested():
    tested = {type(rule) for rule, _, _ in BY_HAND.values()} | {ClipUploads, Claims}
    assert tested == set(DEFENCES.values())


@pytest.mark.parametrize("count", [5, 10, 11, 100])
@pytest.mark.parametrize("name", BY_HAND)
def test_a_rule_is_its_definition_part_by_part(name, count, monkeypatch):
    """In blocks that are smaller than a tensor; every upload carries the centre, its numbers are as they were."""
    monkeypatch.setattr("fedlens.robust.defence._BLOCK", 7 * count)
    rule, by_hand, tolerance = BY_HAND[name]
    given = uploads(count)
    before = [u.clone() for u in given]
    found = rule(SERVER, given)
    assert all(same(a, b) for a, b in zip(given, before, strict=True))
    for part, points in parts(given).items():
        expected = np.broadcast_to(by_hand(points), points.shape)
        np.testing.assert_allclose(parts(found)[part], expected, rtol=tolerance, atol=tolerance)
    assert [float(u.weight) for u in found] == [float(u.weight) for u in given]


def test_a_share_of_clients_is_rounded_down_as_it_was_written():
    """0.29 times 100 is 28.999... in floats."""
    some = uploads(100)
    expected = np.sort(parts(some)["params"], axis=0)[29:-29].mean(0)
    np.testing.assert_allclose(parts(TrimmedMean(0.29)(SERVER, some))["params"][0], expected, rtol=1e-14, atol=1e-14)


def test_geometric_median_of_a_majority_at_one_point_is_that_point():
    """Where the sum of distances has no gradient."""
    some = [upload(1)] * 4 + uploads(3, begin=20)
    (found, *_) = GeometricMedian(smoothing=1e-9)(SERVER, some)
    np.testing.assert_allclose(flat(found.delta.params), flat(upload(1).delta.params), atol=1e-6)


@every_rule
def test_whatever_mean_follows_yields_the_centre(rule):
    some = [u.replace(delta=u.delta.replace(buffers=Tree())) for u in uploads(10)]
    model = some[0].delta.zeros()
    server = Server(SimpleNamespace(), Tree(model=model), 10)  # pyright: ignore[reportArgumentType]
    state = FedAvg().aggregate(server, rule(server, some))
    np.testing.assert_allclose(flat(state.model.params), flat(rule(server, some)[0].delta.params), rtol=1e-13)


@pytest.mark.parametrize("defence", [*RULES, ClipUploads(), ClipUploads(1.0), Claims()], ids=str)
def test_the_order_of_clients_does_not_matter(defence):
    some = uploads(11)
    order = numpy_generator(4).permutation(11)
    there = defence(SERVER, some)
    back = defence(SERVER, [some[i] for i in order])
    for place, i in enumerate(order):
        for part, points in parts(there).items():
            np.testing.assert_allclose(parts(back)[part][place], points[i], rtol=1e-12, atol=1e-12)
        assert float(back[place].weight) == float(there[i].weight)


@pytest.mark.parametrize("count", [1, 2, 3])
@every_rule
def test_rounds_of_few_uploads(rule, count):
    """Where almost nobody answered a rule promises nothing, but it still gives something between the uploads."""
    some = uploads(count)
    for part, points in parts(some).items():
        found = parts(rule(SERVER, some))[part][0]
        assert (found >= points.min(0) - 1e-12).all() and (found <= points.max(0) + 1e-12).all()


# ---- bounds ----------------------------------------------------------------------------------------------------------
def test_clip_shortens_to_the_median_norm_of_each_part():
    some = [upload(0), upload(1, 0.1), upload(2, 50.0), upload(3), upload(4)]
    found = ClipUploads()(SERVER, some)
    for part, points in parts(some).items():
        lengths = np.linalg.norm(points, axis=1)
        scale = np.minimum(1, np.median(lengths) / lengths)
        np.testing.assert_allclose(parts(found)[part], points * scale[:, None], rtol=1e-13)
    assert same(found[1], some[1])


def test_a_norm_that_is_given_bounds_the_parameters():
    some = uploads(5)
    found = parts(ClipUploads(0.25)(SERVER, some))
    np.testing.assert_allclose(np.linalg.norm(found["params"], axis=1), 0.25, rtol=1e-13)
    np.testing.assert_array_equal(found["control"], parts(ClipUploads()(SERVER, some))["control"])


def test_what_is_not_finite_is_clipped_to_nothing():
    broken = upload(3).map(lambda leaf: leaf * math.nan)
    found = ClipUploads()(SERVER, [upload(0), upload(1), broken.replace(weight=torch.tensor(1.0)), upload(2)])
    assert not np.any(parts(found)["params"][2]) and np.isfinite(parts(found)["params"]).all()


def test_claims_are_bounded_by_what_others_say():
    told = [2.0, 4.0, 3.0, 1e9, 5.0, math.nan, -1.0, math.inf]
    some = [u.replace(weight=torch.tensor(t), reach=torch.tensor(1.0)) for u, t in zip(uploads(8), told, strict=True)]
    found = Claims(most=2.5)(SERVER, some)
    assert [float(u.weight) for u in found] == [2, 4, 3, 10, 5, 0, 0, 0]  # the median of 2, 3, 4, 5 and 1e9 is 4
    assert [float(u.reach) for u in found] == [1.0] * 8
    np.testing.assert_array_equal(parts(found)["params"], parts(some)["params"])


# ---- breakdown -------------------------------------------------------------------------------------------------------
SIZES_OF_LIES = st.sampled_from([-1e30, -1e6, -100.0, 100.0, 1e6, 1e30])


def lying(seed: int, size: float) -> Tree:
    return upload(1000 + seed, size)


@settings(deadline=None, max_examples=40)
@given(st.lists(SIZES_OF_LIES, min_size=0, max_size=3), st.integers(0, 100), st.booleans())
def test_few_attackers_of_any_size_leave_the_result_among_honest_uploads(sizes, seed, agreed):
    """Three of eleven are tolerated by each of these rules; alone, or all with one voice."""
    honest = uploads(11 - len(sizes), begin=20 * seed)
    lies = [lying(0 if agreed else at, sizes[0] if agreed else size) for at, size in enumerate(sizes)]
    for rule in (Median(), TrimmedMean(0.28), Krum(0.28), MultiKrum(0.28)):
        found = parts(rule(SERVER, lies + honest))
        for part, points in parts(honest).items():
            low, high = points.min(0), points.max(0)
            assert (found[part][0] >= low - 1e-12).all() and (found[part][0] <= high + 1e-12).all(), rule
    found = parts(GeometricMedian()(SERVER, lies + honest))
    for part, points in parts(honest).items():
        # Of a share a < 1/2 of liars: |z| <= 2 (1 - a) / (1 - 2 a) max |honest| (Lopuhaa & Rousseeuw, 1991).
        a = len(sizes) / 11
        most = 2 * (1 - a) / (1 - 2 * a) * np.linalg.norm(points, axis=1).max()
        assert np.linalg.norm(found[part][0]) <= most


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@every_rule
def test_uploads_that_are_not_finite_do_not_get_through(rule, value):
    lie = upload(99).map(lambda leaf: torch.full_like(leaf, value))
    honest = uploads(9)
    found = parts(rule(SERVER, [*honest[:4], lie, *honest[4:], lie]))
    for part, points in parts(honest).items():
        assert (found[part] >= points.min(0) - 1e-12).all() and (found[part] <= points.max(0) + 1e-12).all()


def test_a_lie_in_the_control_alone_is_seen():
    """Krum judges part by part: an honest delta does not vouch for what comes with it."""
    liar = upload(5).replace(control=upload(5).control * 1e6)
    found = parts(Krum(0.2)(SERVER, [*uploads(9, begin=50), liar]))
    assert np.abs(found["control"]).max() < 100


def test_nothing_finite_is_one_sentence():
    lies = [upload(seed).map(lambda leaf: leaf * math.nan) for seed in range(4)]
    with pytest.raises(RunFailed, match="no upload of this round is finite"):
        Krum()(SERVER, lies)


def test_a_round_without_updates_is_not_taken_for_defended():
    for defence in (Median(), ClipUploads()):
        with pytest.raises(BadInput, match="defences act on delta, and this method uploads model, weight"):
            defence(SERVER, [Tree(model=upload(0).delta, weight=torch.tensor(1.0))])


@pytest.mark.parametrize("rule", [Krum(0.3), MultiKrum(0.3)], ids=str)
def test_krum_says_what_it_cannot_tolerate(rule):
    rule.check(10)
    with pytest.raises(BadInput, match=f"defences.{rule.name} cannot tolerate 2 hostile of 6 .* cohort, or lower"):
        replace(rule, hostile=0.4).check(6)


# ---- composition with methods ----------------------------------------------------------------------------------------
def middle(trees: list[Tree]) -> Tree:
    """Leaf by leaf, by numpy."""
    leaves = zip(*(tree.leaves(trees[0]) for tree in trees), strict=True)
    return trees[0].rebuild(torch.from_numpy(np.asarray(np.median(np.stack(some), axis=0))) for some in leaves)


def by_hand(recipe, before: Tree, sent: list[Tree], population: int) -> dict[str, Tree]:
    """What the papers' servers make of the median in place of the mean."""
    delta, count = middle([u.delta for u in sent]), len(sent)
    if isinstance(recipe, FedAU):
        scale = sum(float(u.weight) for u in sent) / population
        return {"model": before.model + delta.replace(params=delta.params * scale)}
    if isinstance(recipe, FedNova):
        total = sum(float(u.weight) for u in sent)
        reach = sum(float(u.weight) * float(u.reach) for u in sent) / total
        return {"model": before.model + delta.replace(params=delta.params * reach)}
    if isinstance(recipe, FedDyn):
        averaged = before.model + delta
        dual = before.dual - delta.params * (recipe.alpha * count / population)
        shifted = averaged.replace(params=averaged.params - dual / recipe.alpha)
        return {"averaged": averaged, "dual": dual, "model": shifted}
    new = {"model": before.model + delta}
    if "control" in sent[0]:
        new["control"] = before.control + middle([u.control for u in sent]) * (count / population)
    return new


BASES = {
    "fedavg": FedAvg(),
    "scaffold": Scaffold(),
    "feddyn": FedDyn(),
    "fednova": FedNova(),
    "fedau": FedAU(),
    "fedsls": FedSLS(pretrain_epochs=1),
    "fedsls, scaffold": FedSLS(Scaffold(), pretrain_epochs=1),
}


@pytest.mark.parametrize("name", BASES)
def test_every_method_takes_the_median_for_its_mean(name):
    recipe, states, checked = BASES[name], [], []
    plan = replace(PLAN, defences=(Median(),), optimizer=Sgd(0.1))

    def look(server, job, replies):
        if states and "delta" in replies[0].upload:
            expected = by_hand(recipe, states[-1], [reply.upload for reply in replies], server.population)
            for part, tree in expected.items():
                for (path, a), b in zip(tree.paths(), server.state[part].leaves(tree), strict=True):
                    torch.testing.assert_close(b, a, rtol=1e-11, atol=1e-12, msg=f"{part}/{path}")
            checked.append(len(replies))
        states.append(server.state)

    run(recipe, network(), Sequential(network(), federation()), plan, observe=look)
    assert checked and min(checked) == 3


def test_hostile_weights_and_reaches_do_not_get_through():
    """A weight of a billion makes FedAU leap, and the plain mean follow its owner; claims are bounded in both."""
    params = Tree(w=torch.ones(3, dtype=torch.float64))
    honest = [Tree(delta=Tree(params=params * v, buffers=Tree()), weight=torch.tensor(1.0)) for v in (1.0, 2.0, 3.0)]
    liar = honest[0].replace(delta=Tree(params=params * -4, buffers=Tree()), weight=torch.tensor(1e9))
    state = Tree(model=Tree(params=params * 0, buffers=Tree()))
    server = Server(SimpleNamespace(), state, 4)  # pyright: ignore[reportArgumentType]

    def moved(recipe, *defences) -> float:
        some = [*honest, liar]
        for defence in defences:
            some = defence(server, some)
        return float(recipe.aggregate(server, some).model.params.w[0])

    assert moved(FedAvg()) == pytest.approx(-4)
    assert moved(FedAvg(), Claims(3)) == pytest.approx((1 + 2 + 3 - 4 * 3) / 6)
    assert moved(FedAU()) == pytest.approx(-1e9)
    assert moved(FedAU(), Claims(2), Median()) == pytest.approx(1.5 * (3 + 2) / 4)


def test_without_trimming_and_weights_the_trimmed_mean_is_fedavg():
    plan = replace(PLAN, weighting=uniformly)
    plain, trimmed = (
        run(FedAvg(), network(), Sequential(network(), federation()), replace(plan, defences=some)).state
        for some in ((), (TrimmedMean(0.0),))
    )
    for (path, a), b in zip(plain.paths(), trimmed.leaves(plain), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12, msg=path)


def test_errands_are_asked_without_defences():
    stages = list(FedSLS(pretrain_epochs=1).stages(replace(PLAN, defences=(Median(),))))
    assert [stage.defences for stage in stages] == [(), (Median(),)]


# ---- engines ---------------------------------------------------------------------------------------------------------
ATTACKED = {
    "scaffold, signflip, krum": (Scaffold(), (Krum(0.0),), SignFlip(share=0.4), ()),
    "feddyn, noise, geometric median": (FedDyn(), (GeometricMedian(),), Noise(share=0.4), ()),
    "fednova, boosted, trimmed": (FedNova(), (Claims(), TrimmedMean(0.3)), Backdoor(share=0.4, strength=5.0), ()),
    "fedavg, topk, clip": (FedAvg(), (ClipUploads(),), SignFlip(share=0.4), (TopK(0.5),)),
    "fedsls, median": (FedSLS(pretrain_epochs=0), (Median(),), Noise(share=0.4), (UplinkClip(0.5),)),
}


@pytest.fixture(scope="module")
def pool():
    engine = Workers(build, SIZES, 2)
    yield engine
    engine.close()


@pytest.mark.parametrize("name", ATTACKED)
def test_engines_agree_on_attacks_and_defences(name, pool):
    recipe, defences, attack, uplink = ATTACKED[name]
    plan = replace(PLAN, rounds=2, cohort=Everyone(), defences=defences, uplink=uplink)
    begin = 10 * list(ATTACKED).index(name)  # what the pool's clients know of other methods is from before these rounds

    def state(engine) -> Tree:
        return run(Late(recipe, begin), network(), engine, plan, round=begin).state

    found = state(Hostile(Sequential(network(), federation()), attack, 0))
    assert same(found, state(Hostile(Lanes(network(), federation(), lanes=2), attack, 0)))
    assert same(found, state(Hostile(pool, attack, 0)))
    assert not same(found.model, state(Sequential(network(), federation())).model)


# ---- attacks ---------------------------------------------------------------------------------------------------------
@given(st.floats(0, 1), st.integers(1, 60), st.integers(0, 5))
def test_attackers_are_drawn_once(share, population, seed):
    chosen = SignFlip(share=share).attackers(population, seed)
    assert chosen == Noise(share=share).attackers(population, seed) and len(set(chosen)) == round(share * population)
    assert set(chosen) <= set(range(population))


def replies(attack, plan, seed: int = 0, engine=None) -> list[dict[int, Tree]]:
    """What every round's clients send."""
    seen: list[dict[int, Tree]] = []
    engine = engine or Hostile(Sequential(network(), federation()), attack, seed)
    run(
        Scaffold(),
        network(),
        engine,
        plan,
        seed=seed,
        observe=lambda server, job, some: seen.append({reply.client: reply.upload for reply in some}),
    )
    return seen


@pytest.mark.parametrize("uplink", [(), (TopK(0.3),), (Quantise(),)], ids=["plain", "topk", "quantise"])
def test_a_flipped_update_is_the_honest_one_times_minus_strength(uplink):
    """Whether it is packed or not, after decoding; numbers stay as they are. All honest clients say what they did."""
    plan, attack = replace(PLAN, rounds=1, cohort=Everyone(), uplink=uplink), SignFlip(share=0.5, strength=3.0)
    (honest,) = replies(attack, plan, engine=Sequential(network(), federation()))
    (found,) = replies(attack, plan)
    server = SimpleNamespace(state=Tree(model=network().initial_weights()))
    attackers = attack.attackers(6, 0)
    assert len(attackers) == 3
    for client, sent in found.items():
        told, meant = sent, honest[client]
        for transform in uplink:
            told, meant = transform.decode(server, told), transform.decode(server, meant)
        times = -3.0 if client in attackers else 1.0
        for name in ("delta", "control"):
            for a, b in zip(told[name].leaves(), meant[name].leaves(told[name]), strict=True):
                torch.testing.assert_close(a, b * times, rtol=1e-12, atol=1e-12)
        assert torch.equal(told.weight, meant.weight)


def test_noise_is_normal_and_as_strong_as_it_says():
    update = Tree(a=torch.full((400, 500), -0.02, dtype=torch.float64), b=torch.arange(3))
    noisy = Noise(strength=7.0).forged(update, 5)
    drawn = ((noisy.a - update.a) / (7 * 0.02)).flatten().numpy()
    assert stats.kstest(drawn, "norm").pvalue > 1e-3
    assert torch.equal(noisy.b, update.b)
    assert same(noisy, Noise(strength=7.0).forged(update, 5))
    assert not same(noisy, Noise(strength=7.0).forged(update, 6))


def test_noise_differs_from_client_to_client_and_round_to_round():
    plan, attack = replace(PLAN, rounds=2, cohort=Everyone()), Noise(share=1.0, strength=100.0)
    first, second = replies(attack, plan)
    drawn = [some[client].delta.params["head.weight"].flatten() for some in (first, second) for client in (0, 1)]
    assert (torch.corrcoef(torch.stack(drawn)) - torch.eye(4)).abs().max() < 0.3  # of 192 independent numbers each
    again, _ = replies(attack, plan)
    assert all(same(first[client], again[client]) for client in first)


def images(count: int = 40, side: int = 16, classes: int = 4) -> Images:
    draw = numpy_generator(2)
    x = torch.from_numpy(draw.integers(0, 200, (count, 1, side, side), np.uint8))
    y = torch.from_numpy(draw.integers(0, classes, count))
    index = torch.arange(count)
    names = tuple("abcdefghij"[:classes])
    return Images(x, y, index[: count // 2], index[count // 2 :], names, (0.5,), (0.25,), None, None, "", "", "made up")


WORDS = "data=mnist5k clients=10 cohort=5 model=cnn2 partition=iid"


def dealt(*words: str):
    experiment = config.read(words=[*WORDS.split(), *words])
    return experiment, experiment.federation(images())[0]


def test_flipped_labels_are_the_attackers_alone():
    experiment, found = dealt("attack=labelflip", "attack.share=0.3")
    _, honest = dealt()
    attackers = LabelFlip(share=0.3).attackers(10, experiment.seed)
    assert len(attackers) == 3
    for client, index in honest.train.items():
        y = honest.data.y[index]
        assert torch.equal(found.data.y[index], 3 - y if client in attackers else y)
    assert torch.equal(found.data.y[honest.pool], honest.data.y[honest.pool])
    assert found.data.x is honest.data.x or torch.equal(found.data.x, honest.data.x)
    assert torch.equal(images().y, honest.data.y)  # what was loaded is not written


def test_patched_images_are_some_of_the_attackers_alone():
    experiment, found = dealt("attack.kind=backdoor", "attack.share=0.4", "attack.patch=2", "attack.target=3")
    _, honest = dealt()
    attackers, seen = Backdoor(share=0.4).attackers(10, experiment.seed), 0
    for client, index in honest.train.items():
        expected_x, expected_y = honest.data.x[index].clone(), honest.data.y[index].clone()
        marked = (found.data.x[index][:, :, -2:, -2:] == 255).flatten(1).all(1)
        assert int(marked.sum()) == (round(0.5 * len(index)) if client in attackers else 0)
        expected_x[marked, :, -2:, -2:] = 255
        expected_y[marked] = 3
        assert torch.equal(found.data.x[index], expected_x) and torch.equal(found.data.y[index], expected_y)
        seen += int(marked.sum())
    assert seen == 4 and torch.equal(found.data.x[honest.pool], honest.data.x[honest.pool])


def test_success_counts_patched_images_of_other_classes():
    experiment, dealt_out = dealt("attack=backdoor", "attack.target=1")
    net = experiment.network(images())
    weights = net.initial_weights()
    logits = net(weights, Shard(dealt_out.data, dealt_out.pool).x)
    # As high as the others, so that image and patch decide.
    weights.params["head.last.bias"][1] += (logits.amax(1) - logits[:, 1]).median()
    expected, others = 0, 0
    for i in dealt_out.pool.tolist():
        if int(images().y[i]) != 1:
            x = images().x[i : i + 1].clone()
            x[0, 0, 13:, 13:] = 255
            expected += int(net(weights, (x / 255 - 0.5) / 0.25).argmax()) == 1
            others += 1
    assert 0 < expected < others
    assert Backdoor(target=1).success(net, dealt_out)(weights) == expected / others


# ---- what can be defended --------------------------------------------------------------------------------------------
UNDEFENDED = {
    "ccvr": "also uploads counts, means, scatter",
    "elastic": "also uploads sensitivity",
    "fedamp": "uploads model, ticket and no delta",
    "fedaux": "also uploads scores, ticket",
    "feddbe": "also uploads mean",
    "fedfed": "also uploads .*vae, x, y",
    "fedfomo": "uploads model, ticket and no delta",
    "fedftg": "also uploads counts",
    "fedgen": "also uploads counts",
    "fedpac": "also uploads counts, prototypes, row",
    "fedproto": "uploads counts, prototypes and no delta",
    "fedxds": "also uploads .*x, y",
    "ifca": "also uploads cluster",
    "l2gd": "uploads model, weight and no delta",
    "local": "uploads nothing",
    "spatl": "also uploads kept",
}


ONE_LAYER = ("ccvr", "feddbe", "fedproto", "fedrod")  # need a head of one layer


@pytest.mark.parametrize("name", ALGORITHMS)
def test_methods_that_upload_more_than_updates_are_refused(name):
    recipe = PSE(attention="self") if name == "pse" else ALGORITHMS[name]()
    model = MODELS["cnn2"](predictor="linear" if name in ONE_LAYER else "mlp")
    words = (f"algorithm={name}", *described_with(name))
    experiment = replace(config.read(None, words), algorithm=recipe, model=model, defences=(Median(), Claims()))
    if name in UNDEFENDED or name == "scaffnew":  # scaffnew's controls need the plain mean
        said = f"defences: {name} {UNDEFENDED[name]}" if name in UNDEFENDED else "as trained: leave out defences"
        with pytest.raises(BadInput, match=said):
            scope.check(experiment, images())
    else:
        scope.check(experiment, images())


def test_refusals_before_a_run():
    small = Experiment(model=MODELS["cnn2"](), cohort=Uniform(4))
    with pytest.raises(BadInput, match=r"defences\.krum cannot tolerate 1 hostile of 4 clients a round, only 0: raise"):
        scope.check(replace(small, defences=(Krum(0.3),)), images())
    with pytest.raises(BadInput, match="attack: l2gd uploads model, weight and no delta"):
        scope.check(replace(small, attack=SignFlip(), algorithm=ALGORITHMS["l2gd"]()), images())
    scope.check(replace(small, attack=LabelFlip(), algorithm=ALGORITHMS["l2gd"]()), images())
    with pytest.raises(BadInput, match=r"attack.target is 4, but classes are numbered from 0 to 3"):
        dealt("attack=backdoor", "attack.target=4")


def test_configuration():
    def of(words: str) -> Experiment:
        return config.read(words=words.split())

    assert of("defences=[median]").defences == (Median(),)
    assert of("defences=clip,trimmed_mean defence.trimmed_mean.trim=0.1").defences == (ClipUploads(), TrimmedMean(0.1))
    assert of("defence=trimmedmean defence.trim=0.2").defences == (TrimmedMean(0.2),)
    assert of("defences=claims defences.most=5").defences == (Claims(5.0),)
    assert of("attack.kind=signflip attack.share=0.3 attack.strength=2").attack == SignFlip(0.3, 2.0)
    assert of("").attack is None and of("attack=none").attack is None
    asked = of("defences=krum,claims attack=backdoor attack.patch=4")
    assert config.resolve(Experiment, config.to_dict(asked)) == asked
    for words, sentence in {
        "defences=medain": "defences 'medain' is unknown; did you mean 'median'",
        "attack=flip": "attack 'flip' is unknown",
        "defences=median defences.trim=0.1": "it belongs to trimmed_mean",
        "defences=trimmed_mean defences.trim=0.5": "defences.trimmed_mean.trim is 0.5, but it should be less than 0.5",
    }.items():
        with pytest.raises(BadInput, match=sentence):
            of(words)
    assert set(ATTACKS) == {"signflip", "noise", "labelflip", "backdoor"}


# ---- whole runs ------------------------------------------------------------------------------------------------------
RUN = (
    "clients=8 cohort=6 rounds=4 model=cnn2 local.steps=4 algorithm=scaffold picture=false evaluate.personal=none "
    "attack=backdoor attack.strength=2 defences=clip,geometric_median"
)


def finished(folder, *words: str):
    return simulate(config.read(words=[*RUN.split(), f"out={folder}", *words]))


def metrics(folder) -> list[tuple]:
    rows = RunFolder.open(folder).metrics().to_pylist()
    return sorted((row["metric"], row["round"], row["value"]) for row in rows if "seconds" not in row["metric"])


def test_a_run_is_the_same_in_processes_and_after_a_stop(tmp_path):
    whole = finished(tmp_path / "whole", "engine=sequential")
    finished(tmp_path / "processes", "engine=workers", "workers=2")
    finished(tmp_path / "stopped", "engine=sequential", "rounds=2")
    again = resume(tmp_path / "stopped", ["rounds=4", "engine=lanes", "lanes=2"])
    for other in ("processes", "stopped"):
        assert metrics(tmp_path / other) == metrics(tmp_path / "whole")
        assert same(RunFolder.open(tmp_path / other).at(4).state, RunFolder.open(tmp_path / "whole").at(4).state)
    assert [m for m, _, _ in metrics(tmp_path / "whole")].count("backdoor") == 4
    assert whole.backdoor == again.backdoor == metrics(tmp_path / "whole")[7][2]
    assert 0 <= whole.backdoor <= 1


def test_a_fifth_that_flips_signs_stops_the_mean_and_not_the_median(tmp_path):
    words = ["clients=10", "cohort=10", "rounds=5", "local.steps=8", "local.lr=0.1", "partition=iid", "model=cnn2"]
    words += ["algorithm=fedavg", "attack=signflip", "attack.strength=5", "engine=sequential", "evaluate.every=0"]
    mean = finished(tmp_path / "mean", *words, "defences=none")
    for name in ("median", "multikrum"):
        assert finished(tmp_path / name, *words, f"defences={name}").accuracy > mean.accuracy + 0.3
