"""Noise and what it costs, against published numbers, integrals and another library; a budget that stops a run."""

import itertools
import json
import math

import numpy as np
import pytest
import torch

import fedlens
from fedlens import config
from fedlens.algorithms import FedAvg, FedSLS, FedXDS, FineTuned, KNNPer, Scaffold
from fedlens.core.algorithm import Stage
from fedlens.core.cohort import Uniform
from fedlens.core.errors import BadInput, RunFailed
from fedlens.core.objective import by_examples, uniformly
from fedlens.core.run import run
from fedlens.core.transform import Clip, GaussianNoise
from fedlens.core.tree import Tree, dot
from fedlens.engines.sequential import Sequential
from fedlens.experiment import Evaluation, LocalTraining
from fedlens.models.cnn import Mlp
from fedlens.privacy.accounting import Release, _converted, rdp, rdp_epsilon, total_epsilon
from fedlens.privacy.client_level import ClientPrivacy
from fedlens.privacy.gaussian import (
    analytic_sigma,
    classic_sigma,
    gaussian_delta,
    gaussian_epsilon,
    metric_delta,
    metric_sigma,
)
from fedlens.privacy.randomised_response import flip_rate, randomised_response, whole_mask_epsilon
from fedlens.runs.diff import differences
from fedlens.simulate import run as simulate
from fedlens.simulate.resume import resume
from small import PLAN, federation, network


# ---- the Gaussian mechanism ----
@pytest.mark.parametrize(
    ("delta", "row"),
    [
        (1e-2, (0.622, 0.444, 0.311, 0.207, 0.155)),
        (1e-3, (0.755, 0.540, 0.378, 0.252, 0.189)),
        (1e-5, (0.969, 0.692, 0.485, 0.323, 0.242)),
    ],
)
def test_classic_noise_of_the_fact_sheet(delta, row):
    for epsilon, sigma in zip((5, 7, 10, 15, 20), row, strict=True):
        assert classic_sigma(epsilon, delta) == pytest.approx(sigma, abs=1e-3)  # three digits, some rounded up


def test_analytic_noise_of_the_fact_sheet():
    assert analytic_sigma(20, 1e-5) == pytest.approx(0.290, abs=5e-4)
    assert analytic_sigma(20, 1e-5, 20) == pytest.approx(5.80, abs=5e-3)
    assert analytic_sigma(1, 1e-6) == pytest.approx(4.2247, abs=1e-4)  # Balle & Wang's own program


def test_the_classic_formula_is_safe_below_one_and_wrong_above():
    for epsilon in (0.01, 0.1, 0.5, 0.99):
        assert gaussian_delta(classic_sigma(epsilon, 1e-5), epsilon) <= 1e-5
        assert analytic_sigma(epsilon, 1e-5) < classic_sigma(epsilon, 1e-5)
    assert gaussian_delta(classic_sigma(20, 1e-5), 20) == pytest.approx(1.5e-3, rel=0.03)


@pytest.mark.parametrize(
    ("sigma", "epsilon", "sensitivity"), [*itertools.product((0.3, 1, 4), (0, 0.5, 3), (0.5, 1, 2))]
)
def test_delta_is_the_integral_it_stands_for(sigma, epsilon, sensitivity):
    """The largest difference P(U) - e^epsilon P'(U): over all U where the one density exceeds the other."""
    x = np.linspace(-12 * sigma - sensitivity, 12 * sigma + sensitivity, 2_000_001)
    density = [np.exp(-((x - m) ** 2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi)) for m in (sensitivity, 0)]
    integral = np.trapezoid(np.clip(density[0] - math.exp(epsilon) * density[1], 0, None), x)
    assert gaussian_delta(sigma, epsilon, sensitivity) == pytest.approx(integral, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0.01, 1e-3), (1, 1e-6), (5, 1e-5), (20, 1e-5), (400, 1e-5), (3, 1e-12)]
)
def test_noise_and_epsilon_are_inverse(epsilon, delta):
    sigma = analytic_sigma(epsilon, delta, 3.0)
    assert gaussian_epsilon(sigma, delta, 3.0) == pytest.approx(epsilon, rel=1e-9)
    assert gaussian_delta(sigma, epsilon, 3.0) <= delta < gaussian_delta(sigma * (1 - 1e-9), epsilon, 3.0)


def test_extremes():
    assert gaussian_epsilon(0, 1e-5) == math.inf and gaussian_epsilon(1e9, 1e-5) == 0
    assert gaussian_delta(0, 1) == 1 and gaussian_delta(1, 1, 0) == 0
    assert gaussian_delta(1e-3, 5) == 1 and gaussian_delta(1e3, 5) == 0


def test_metric_delta_of_the_fact_sheet():
    found = [metric_delta(0.242, 20, d) for d in (0.25, 0.5, 1, 2)]
    assert found == pytest.approx([1.4e-6, 2.3e-5, 1.56e-3, 0.205], rel=0.02)
    assert metric_delta(0.2422, 20, 1) == pytest.approx(1.5e-3, rel=0.03)
    assert [metric_delta(0.15, 20, d) for d in (0.5, 1)] == pytest.approx([0.057, 0.57], rel=0.01)
    sigmas = [metric_sigma(20, 1e-5, farthest) for farthest in (1, 5, 10, 20)]
    assert sigmas == pytest.approx([0.29, 0.47, 0.62, 0.82], abs=5e-3)


def test_the_farthest_pair_decides():
    for epsilon, sigma in itertools.product((0.1, 1, 20), (0.1, 0.8, 5)):
        deltas = [metric_delta(sigma, epsilon, d) for d in np.linspace(0.01, 30, 300)]
        assert all(b >= a - 1e-15 for a, b in itertools.pairwise(deltas))


@pytest.mark.parametrize(("epsilon", "delta"), [(0, 1e-5), (-1, 1e-5), (math.nan, 1e-5), (1, 0), (1, 1), (1, -0.1)])
@pytest.mark.parametrize("calibrate", [classic_sigma, analytic_sigma, lambda e, d: metric_sigma(e, d, 1.0)])
def test_impossible_budgets(calibrate, epsilon, delta):
    with pytest.raises(BadInput, match=r"^(epsilon|delta) is .*, but it should"):
        calibrate(epsilon, delta)


# ---- randomised response ----
def test_a_bit_of_randomised_response_is_epsilon_private():
    for epsilon in (0.1, 1, 5):
        p = flip_rate(epsilon)
        assert math.log((1 - p) / p) == pytest.approx(epsilon)
    mask = torch.arange(400_000) % 2 == 0
    turned = (randomised_response(mask, 1.0, torch.tensor(5)) != mask).double().mean()
    assert float(turned) == pytest.approx(flip_rate(1.0), abs=3e-3)
    assert torch.equal(randomised_response(mask, 800.0, torch.tensor(5)), mask)
    with pytest.raises(BadInput, match="epsilon is 0"):
        flip_rate(0)


@pytest.mark.parametrize("kept", range(6))
def test_a_whole_mask_by_counting(kept):
    """The worst pair of masks and answers, all of them tried."""
    bits, epsilon = 5, 0.7
    masks = [m for m in itertools.product((0, 1), repeat=bits) if sum(m) == kept]
    p = flip_rate(epsilon)

    def log_chance(answer, mask):
        return sum(math.log(p if a != m else 1 - p) for a, m in zip(answer, mask, strict=True))

    answers = list(itertools.product((0, 1), repeat=bits))
    worst = max(log_chance(a, m) - log_chance(a, n) for m in masks for n in masks for a in answers)
    assert whole_mask_epsilon(epsilon, kept, bits) == pytest.approx(worst, abs=1e-12)


# ---- many rounds ----
@pytest.mark.parametrize(("noise", "rate", "order"), [(1.0, 0.1, 2), (2.0, 0.3, 5), (0.7, 0.01, 8), (4.0, 0.5, 32)])
def test_renyi_divergence_of_a_sampled_gaussian_is_its_integral(noise, rate, order):
    x = np.linspace(-40 * noise, 40 * noise + order, 4_000_001)
    base = np.exp(-(x**2) / (2 * noise**2)) / (noise * math.sqrt(2 * math.pi))
    ratio = 1 - rate + rate * np.exp((2 * x - 1) / (2 * noise**2))
    integral = np.log(np.trapezoid(base * ratio**order, x)) / (order - 1)
    assert rdp(Release(noise, rate, "poisson"), order) == pytest.approx(integral, rel=1e-7)


def test_without_sampling_rounds_add_up_exactly():
    assert total_epsilon({Release(3.0): 9}, 1e-5) == pytest.approx(gaussian_epsilon(1.0, 1e-5))
    both = {Release(3.0): 9, Release(1.0): 3}
    assert total_epsilon(both, 1e-5) == pytest.approx(gaussian_epsilon(0.5, 1e-5))
    assert total_epsilon({}, 1e-5) == 0 == total_epsilon({Release(1.0): 0}, 1e-5)
    assert total_epsilon({Release(0.0): 1}, 1e-5) == math.inf
    # Renyi divergence is an upper bound of the same thing, and not far from it.
    assert gaussian_epsilon(1.0, 1e-5) < rdp_epsilon({Release(1.0): 1}, 1e-5) < 1.15 * gaussian_epsilon(1.0, 1e-5)


def test_sampling_helps_and_rounds_cost():
    epsilons = [total_epsilon({Release(2.0, rate): 50}, 1e-5) for rate in (0.01, 0.1, 0.5, 1.0)]
    assert epsilons == sorted(epsilons) and epsilons[0] < epsilons[-1] / 5
    costs = [total_epsilon({Release(2.0, 0.1): rounds}, 1e-5) for rounds in (1, 10, 100)]
    assert costs == sorted(costs)
    # A fixed number with one client replaced tells more than coins with one client removed.
    assert rdp(Release(2.0, 0.1), 4) > rdp(Release(2.0, 0.1, "poisson"), 4)


def test_the_moments_accountant_example():
    """Abadi et al., 2016: rate 0.01, noise 4, 10,000 steps, delta 1e-5: epsilon 1.26; conversions are better now.

    The number is what RdpAccountant of dp-accounting 0.6.0 says. Its PLDAccountant finds 0.947 to be enough.
    """
    assert rdp_epsilon({Release(4.0, 0.01, "poisson"): 10_000}, 1e-5) == pytest.approx(1.03549006604, rel=1e-9)


class TestNumbersOfDpAccountingsOwnTests:
    """From its rdp_privacy_accountant_test.py, so that our accountant meets them without the library, too."""

    @pytest.mark.parametrize(("order", "value"), [(5, 2.18075656e-3), (50, 2.38460375e-2), (100, 1.67416308e2)])
    def test_renyi_divergence_of_a_sampled_gaussian(self, order, value):
        assert 50 * rdp(Release(2.5, 0.01, "poisson"), order) == pytest.approx(value, rel=1e-8)

    def test_epsilon_of_a_constant_divergence(self):
        """Of 1.1 at all orders, which is what 1.1-private in the pure sense implies."""
        found = min(_converted(order, 1.1, 1e-5) for order in range(2, 33))
        assert found == pytest.approx(1.32783806176, abs=1e-11)

    def test_epsilon_of_a_gaussian(self):
        """Noise that was chosen for epsilon 1 at delta 1e-6, with orders a thousandth apart; ours are integers."""
        assert rdp_epsilon({Release(4.530877117): 1}, 1e-6) == pytest.approx(1, abs=5e-7)


class TestAgainstDpAccounting:
    """Google's dp-accounting, where it is installed."""

    @pytest.fixture(autouse=True)
    def _installed(self):
        pytest.importorskip("dp_accounting", reason="dp-accounting (extra `privacy`) is not installed")

    @pytest.mark.parametrize(
        ("epsilon", "delta"), [(0.1, 1e-10), (1, 1e-6), (5, 1e-3), (20, 1e-5), (100, 1e-5), (0.5, 0.1)]
    )
    def test_analytic_noise(self, epsilon, delta):
        from dp_accounting import gaussian_mechanism

        assert analytic_sigma(epsilon, delta) == pytest.approx(
            gaussian_mechanism.get_sigma_gaussian(epsilon, delta, tol=1e-15), rel=1e-9
        )

    @pytest.mark.parametrize(
        ("noise", "rate", "steps"), [(1.0, 0.01, 1000), (2.0, 0.1, 100), (0.8, 0.05, 10), (4.0, 0.5, 30)]
    )
    def test_poisson_sampling(self, noise, rate, steps):
        from dp_accounting import dp_event
        from dp_accounting.rdp import RdpAccountant

        from fedlens.privacy.accounting import ORDERS

        event = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(noise))
        theirs = RdpAccountant(list(ORDERS)).compose(event, steps).get_epsilon(1e-5)
        ours = {Release(noise, rate, "poisson"): steps}
        assert rdp_epsilon(ours, 1e-5) == pytest.approx(theirs, rel=1e-9)
        tighter = total_epsilon(ours, 1e-5, "dp_accounting")  # by privacy loss distributions
        assert 0.75 * theirs < tighter <= theirs

    @pytest.mark.parametrize(("noise", "rate"), [(1.0, 0.01), (2.0, 0.1), (4.0, 0.5)])
    def test_samples_of_a_fixed_size(self, noise, rate):
        """Its theorem 27 equals our theorem 9 at order 2 and is tighter beyond, but can exceed no sampling at all."""
        from dp_accounting.rdp.rdp_privacy_accountant import _compute_rdp_sample_wor_gaussian as theirs

        assert rdp(Release(noise, rate), 2) == pytest.approx(float(theirs(rate, noise, [2])[0]), rel=1e-9)
        for order in (3, 8, 32):
            least = min(float(theirs(rate, noise, [order])[0]), order / (2 * noise**2))
            assert rdp(Release(noise, rate), order) >= least * (1 - 1e-9)
        ours = total_epsilon({Release(noise, rate): 100}, 1e-5)
        assert 0.7 * ours < total_epsilon({Release(noise, rate): 100}, 1e-5, "dp_accounting") <= ours

    def test_compositions_without_sampling(self):
        from dp_accounting import dp_event
        from dp_accounting.pld import PLDAccountant

        theirs = PLDAccountant().compose(dp_event.GaussianDpEvent(5.0), 12).get_epsilon(1e-5)
        assert total_epsilon({Release(5.0): 12}, 1e-5) == pytest.approx(theirs, rel=1e-3)


def test_two_meanings_of_neighbour_do_not_add_up():
    pytest.importorskip("dp_accounting", reason="dp-accounting (extra `privacy`) is not installed")
    with pytest.raises(BadInput, match="two meanings of neighbour"):
        total_epsilon({Release(1.0, 0.1): 1, Release(1.0, 0.1, "poisson"): 1}, 1e-5, "dp_accounting")


# ---- client-level privacy ----
def upload_of(transform, update, key=1):
    class Someone:
        pass

    client = Someone()
    client.key = key
    sent, _ = transform.encode(client, Tree(delta=Tree(params=update, buffers=Tree()), weight=torch.tensor(3.0)))
    return sent.delta.params


def test_clip_and_noise():
    update = Tree(a=torch.full((400, 400), 0.02, dtype=torch.float64), b=torch.ones(5, dtype=torch.float64))
    quiet = upload_of(ClientPrivacy(norm=2.0, multiplier=1e-12), update)
    assert float(dot(quiet, quiet).sqrt()) == pytest.approx(2.0)
    short = Tree(a=torch.full((2,), 0.1, dtype=torch.float64))
    assert upload_of(ClientPrivacy(norm=2.0, multiplier=1e-12), short).a.tolist() == pytest.approx([0.1, 0.1])
    noise = upload_of(ClientPrivacy(norm=2.0, multiplier=1.5), update).a - quiet.a
    assert float(noise.std()) == pytest.approx(3.0, rel=0.01) and abs(float(noise.mean())) < 0.03
    again, other = (upload_of(ClientPrivacy(norm=2.0, multiplier=1.5), update, key).a - quiet.a for key in (1, 2))
    assert torch.equal(noise, again) and abs(float((noise * other).mean())) < 0.1


def test_a_diverged_client_sends_noise_alone():
    bad = Tree(a=torch.tensor([1.0, torch.nan]), b=torch.ones(1000))
    sent = upload_of(ClientPrivacy(norm=1.0, multiplier=0.5), bad)
    zero = upload_of(ClientPrivacy(norm=1.0, multiplier=0.5), bad.zeros())
    assert torch.equal(sent.a, zero.a) and torch.equal(sent.b, zero.b)


@pytest.mark.parametrize(
    ("algorithm", "net", "what"),
    [(Scaffold(), network(norm=False), "control"), (FedAvg(), network(), "running statistics")],
)
def test_what_it_does_not_cover_is_refused(algorithm, net, what):
    plan = Stage(**{**PLAN.__dict__, "uplink": (ClientPrivacy(),)})
    with pytest.raises(BadInput, match=what):
        run(algorithm, net, Sequential(net, federation()), plan)


def rounds_of(dp, cohorts, weighting=uniformly):
    stage = Stage(FedAvg(), 1, Uniform(2), weighting=weighting, uplink=(dp,))
    return [(stage, cohort) for cohort in cohorts]


def test_the_busiest_client_decides():
    """Replacing a client's data moves its upload by 2 C; it answered three times."""
    dp = ClientPrivacy(norm=3.0, multiplier=4.0)
    cohorts = [[0, 1], [1, 2], [1, 3]]
    assert dp.epsilon(rounds_of(dp, cohorts), 4) == pytest.approx(gaussian_epsilon(4.0 * 3.0, 1e-5, 2 * 3.0 * 3**0.5))
    assert dp.epsilon([], 4) == 0


def test_the_noise_of_a_cohort_adds_up():
    dp = ClientPrivacy(multiplier=1.0, trust="aggregator")
    everyone = rounds_of(dp, [[0, 1, 2, 3]] * 5)
    assert dp.epsilon(everyone, 4) == pytest.approx(gaussian_epsilon(2.0, 1e-5, 2 * 5**0.5))
    some = rounds_of(dp, [[0, 1, 2, 3]] * 5)
    assert dp.epsilon(some, 400) == pytest.approx(rdp_epsilon({Release(1.0, 0.01): 5}, 1e-5))
    with pytest.raises(BadInput, match="weighting=uniform"):
        dp.epsilon(rounds_of(dp, [[0, 1]], by_examples), 4)


# ---- in a run ----
def experiment(tmp_path, name, checkpoint=1, **settings):
    small = dict(model=Mlp(), clients=6, cohort=Uniform(3), rounds=5, local=LocalTraining(steps=1))
    where = fedlens.Execution(engine="sequential", picture=False, checkpoint=checkpoint, out=str(tmp_path / name))
    return fedlens.Experiment(**{**small, "execution": where, **settings})


def stated(tmp_path, name):
    return json.loads((tmp_path / name / "privacy.json").read_text())


def test_a_spent_budget_stops_cleanly_and_a_higher_one_goes_on(tmp_path):
    dp = ClientPrivacy(norm=0.5, multiplier=4.0)
    simulate.run(experiment(tmp_path, "free", uplink=(dp,)))
    spent = stated(tmp_path, "free")["statements"][0]["epsilon"]
    limited = ClientPrivacy(norm=0.5, multiplier=4.0, budget=0.8 * spent)
    with pytest.raises(RunFailed, match=r"budget is spent after (\d) of 5 rounds: epsilon is .* enough"):
        simulate.run(experiment(tmp_path, "limited", uplink=(limited,), checkpoint=0))
    before = stated(tmp_path, "limited")
    done = before["rounds"]
    assert 0 < done < 5 and before["statements"][0]["epsilon"] <= 0.8 * spent
    assert sorted(p.stem for p in (tmp_path / "limited/checkpoints").glob("*.json")) == [f"{done:06d}"]
    with pytest.raises(RunFailed, match=f"after {done} of 5 rounds"):
        resume(tmp_path / "limited")
    with pytest.raises(BadInput, match="cannot change when a run is resumed"):
        resume(tmp_path / "limited", ["uplink.dp.multiplier=1"])
    resume(tmp_path / "limited", [f"uplink.dp.budget={2 * spent}"])
    assert stated(tmp_path, "limited")["statements"][0]["epsilon"] == spent
    assert list(differences(tmp_path / "free", tmp_path / "limited")) == []


def test_a_budget_too_small_for_one_round(tmp_path):
    with pytest.raises(RunFailed, match=r"spent after 0 of 5 rounds: epsilon is 0, and one more"):
        simulate.run(experiment(tmp_path, "none", uplink=(ClientPrivacy(budget=0.1),)))


def test_a_budget_for_a_run_without_privacy(tmp_path):
    simulate.run(experiment(tmp_path, "plain", rounds=1))
    with pytest.raises(BadInput, match="runs without uplink=dp"):
        (tmp_path / "plain/result.json").unlink()
        resume(tmp_path / "plain", ["rounds=2", "uplink.dp.budget=3"])
    assert not (tmp_path / "plain/privacy.json").exists()  # nothing but updates leaves


def test_noise_that_nobody_accounts_for_is_said(tmp_path):
    simulate.run(experiment(tmp_path, "noise", rounds=1, uplink=(Clip(2.0), GaussianNoise(0.1))))
    (one,) = stated(tmp_path, "noise")["statements"]
    assert one["epsilon"] is None and not one["holds"] and "clipped to norm 2" in one["mechanism"]


def test_answers_of_errands_are_named(tmp_path):
    simulate.run(experiment(tmp_path, "fedsls", rounds=1, algorithm=FedSLS(pretrain_epochs=0, tap="relu")))
    said = stated(tmp_path, "fedsls")
    assert said["answers_as_they_are"] == {"MeasureSaliency": ["saliency"], "Evaluate": ["correct", "examples", "loss"]}
    assert said["updates_as_they_are"] == ["SaliencyWeighted"]


@pytest.mark.parametrize("recipe", [FineTuned(epochs=1), KNNPer()])
def test_a_last_stage_that_sends_nothing_is_no_unprotected_update(recipe, tmp_path):
    simulate.run(experiment(tmp_path, "last", rounds=1, algorithm=recipe, uplink=(ClientPrivacy(),)))
    assert stated(tmp_path, "last")["updates_as_they_are"] == []


@pytest.mark.parametrize("personal", ["both", "none"])
def test_what_leaves_beside_protected_updates_is_not_covered(personal, tmp_path):
    """An exchange of images, and numbers about personal models, are outside of uplink=dp."""
    sharing = FedXDS(warmup_rounds=1, warmup_epochs=None, attribution="random")
    looks = dict(evaluate=Evaluation(personal=personal), uplink=(ClientPrivacy(),), rounds=1)
    simulate.run(experiment(tmp_path, "images", algorithm=sharing, **looks))
    exchange, updates = stated(tmp_path, "images")["statements"]
    assert updates["release"] == "every model update, all rounds together"
    assert f"what the same clients let out besides: {exchange['release']}" in updates["not_covered"]
    simulate.run(experiment(tmp_path, "updates alone", **looks))
    (alone,) = stated(tmp_path, "updates alone")["statements"]
    for said in (updates, alone):
        assert any("personal models" in each for each in said["not_covered"]) == (personal == "both")
    assert not any("let out besides" in each for each in alone["not_covered"])


def test_words_and_ranges():
    read = config.read(None, ["uplink=clip,dp", "uplink.dp.norm=2", "uplink.dp.budget=8"]).uplink
    assert read == (Clip(), ClientPrivacy(norm=2.0)) and read[1].budget == 8
    for word, said in (("delta=1", "uplink.dp.delta is 1"), ("budget=0", "uplink.dp.budget is 0")):
        with pytest.raises(BadInput, match=said):
            config.read(None, ["uplink=dp", f"uplink.dp.{word}"])
