"""Audits: what is recorded, how guesses are measured, and attacks that succeed without defence and fail on noise."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from fedlens.algorithms import ALGORITHMS, SPATL, FedAvg, FedFed, FedMTL, FedNova, FedPer, FedXDS, Local, Scaffold
from fedlens.audit import measures
from fedlens.audit.attack import (
    LEGEND,
    Answers,
    Gallery,
    Inapplicable,
    Knowledge,
    LabelledImages,
    Prior,
    Verdict,
    trained,
)
from fedlens.audit.figures import grid_of, over_epsilon, side_by_side
from fedlens.audit.gradients import GradientInversion, LabelLeakage, read_labels
from fedlens.audit.image_similarity import likeness, matched
from fedlens.audit.inversion import FeatureInversion
from fedlens.audit.measures import Measure
from fedlens.audit.membership import LikelihoodRatio, LossAttack, SharedMembership
from fedlens.audit.released_images import exchanged
from fedlens.audit.run import ATTACKS, audit
from fedlens.audit.uploads import after_training, single_step
from fedlens.cli import main as cli
from fedlens.core.algorithm import Stage
from fedlens.core.batches import Dataset, Federation
from fedlens.core.cohort import Everyone, Uniform
from fedlens.core.errors import BadInput
from fedlens.core.network import Network
from fedlens.core.optimizer import Sgd
from fedlens.core.rng import generator, seeded
from fedlens.core.run import run, timetable
from fedlens.core.transform import Clip, GaussianNoise, TopK
from fedlens.core.tree import Tree
from fedlens.core.wire import decode
from fedlens.engines.sequential import Sequential
from fedlens.experiment import Execution, Experiment, LocalTraining
from fedlens.models import MODELS
from fedlens.privacy.client_level import ClientPrivacy
from fedlens.runs.transcript import Recording, Transcript, recorded
from fedlens.simulate import run as simulate
from fedlens.simulate.resume import resume

CLASSES, SIDE = 4, 12


class Smooth(nn.Module):
    """Twice differentiable, so that inversion has a slope everywhere."""

    def __init__(self):
        super().__init__()
        self.conv1, self.act1 = nn.Conv2d(1, 8, 5, padding=2), nn.Tanh()
        self.conv2, self.act2 = nn.Conv2d(8, 8, 5, padding=2, stride=2), nn.Tanh()
        self.flat, self.head = nn.Flatten(), nn.Linear(8 * (SIDE // 2) ** 2, CLASSES)

    def features(self, x):
        return self.flat(self.act2(self.conv2(self.act1(self.conv1(x)))))

    def forward(self, x):
        return self.head(self.features(x))


class Plain(nn.Module):
    """With a convolution, a norm and ReLUs, small."""

    def __init__(self):
        super().__init__()
        self.conv1, self.relu1 = nn.Conv2d(1, 6, 3, padding=1), nn.ReLU()
        self.conv2, self.relu2 = nn.Conv2d(6, 6, 3, stride=2), nn.ReLU()
        self.flat = nn.Flatten()
        self.fc, self.relu3 = nn.Linear(6 * 25, 48), nn.ReLU()
        self.head = nn.Linear(48, CLASSES)

    def features(self, x):
        return self.relu3(self.fc(self.flat(self.relu2(self.conv2(self.relu1(self.conv1(x)))))))

    def forward(self, x):
        return self.head(self.features(x))


def network(module=Plain, precision="fp64"):
    with seeded(5):
        return Network(module(), precision)


def pictures(count, seed=0, dtype=torch.float64):
    """Smooth blobs whose places say the class, and noise of their own: pixels of mean 0, spread about 1."""
    draw = generator(seed)
    y = torch.randint(0, CLASSES, (count,), generator=draw)
    coarse = torch.randn(count, 1, 4, 4, generator=draw, dtype=dtype)
    x = F.interpolate(coarse, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
    for label in range(CLASSES):
        x[y == label, :, 3 * label : 3 * label + 3] += 0.7
    return x.clamp(-2, 2), y


MEAN, STD = (0.5,), (0.25,)  # so that -2 to 2 are all pixels


def federation(sizes=(30, 20, 24), pool=240, dtype=torch.float64):
    x, y = pictures(sum(sizes) + pool, dtype=dtype)
    ends = np.cumsum(sizes)
    train = {i: torch.arange(end - size, end) for i, (end, size) in enumerate(zip(ends, sizes, strict=True))}
    outside = torch.arange(sum(sizes), sum(sizes) + pool)
    return Federation(Dataset(x, y), train, {i: outside[:4] for i in train}, outside)


def recording(folder, recipe, plan, net=None, owned=None, seed=3, limit=100.0):
    """Run it in the sequential engine; the transcript and what its adversary knows."""
    net, owned = net or network(), owned or federation()
    taken = Recording(folder / "transcript", limit, 0)
    server = run(
        recipe,
        net,
        Sequential(net, owned),
        plan,
        seed=seed,
        auxiliary=Dataset(owned.data.x[owned.pool[-40:]], owned.data.y[owned.pool[-40:]]),
        observe=lambda server, job, replies: taken.add(job, replies),
    )
    stages = [stage for stage, _, _ in timetable(recipe, plan)]
    transcript = Transcript(folder / "transcript", stages, server.state)
    prior, members = known(net, owned)
    return transcript, Knowledge(prior, Answers(owned, stages, seed, members), (), 1)


def known(net, owned):
    """Half of each client's candidates are its own; the other half and the auxiliary images are test images."""
    at, candidates, members = 0, {}, {}
    for client, mine in owned.train.items():
        index = torch.cat([mine, owned.pool[at : at + len(mine)]])
        at += len(mine)
        candidates[client] = LabelledImages(owned.data.x[index], owned.data.y[index])
        members[client] = torch.arange(len(index)) < len(mine)
    rest = owned.pool[at:]
    return Prior(net, candidates, LabelledImages(owned.data.x[rest], owned.data.y[rest]), MEAN, STD), members


PLAN = Stage(None, 2, Everyone(), Sgd(0.1, momentum=0.9), epochs=1, size=8)
STEP = Stage(None, 2, Everyone(), Sgd(0.1, momentum=0.9, weight_decay=1e-3), steps=1, size=2)


# ---- the transcript -------------------------------------------------------------------------------------------------
def test_a_transcript_holds_what_crossed_to_the_bit(tmp_path):
    seen, net, owned = [], network(), federation()
    recipe = FedXDS(Scaffold(), warmup_rounds=1, warmup_epochs=1)
    taken = Recording(tmp_path / "transcript", 100, 0)

    def observe(server, job, replies):
        seen.append((job, replies))
        assert taken.add(job, replies) == ""

    server = run(recipe, net, Sequential(net, owned), PLAN, observe=observe)
    stages = [stage for stage, _, _ in timetable(recipe, PLAN)]
    transcript = Transcript(tmp_path / "transcript", stages, server.state)
    assert len(transcript) == len(seen) == 4
    for crossing, (job, replies) in zip(transcript, seen, strict=True):
        assert crossing.at == job.at and crossing.stage == job.stage
        for mine, theirs in [(crossing.download, job.download), (crossing.shared, job.shared)]:
            assert dict(mine.paths()).keys() == dict(theirs.paths()).keys()
            assert all(torch.equal(a, b) for a, b in zip(mine.leaves(), theirs.leaves(mine), strict=True))
        for reply in replies:
            sent = crossing.replies[reply.client]
            assert all(torch.equal(a, b) for a, b in zip(sent.leaves(), reply.upload.leaves(sent), strict=True))
    files = recorded(tmp_path / "transcript")
    assert decode(files[2].read_bytes()).shared and not decode(files[3].read_bytes()).shared  # it is stored once


def test_a_transcript_is_bounded_and_says_so(tmp_path):
    taken, net, notes = Recording(tmp_path / "t", 0.02, 0), network(), []
    run(
        FedAvg(),
        net,
        Sequential(net, federation()),
        replace(PLAN, rounds=5),
        observe=lambda server, job, replies: notes.append(taken.add(job, replies)),
    )
    size = sum(path.stat().st_size for path in recorded(tmp_path / "t"))
    assert size <= 0.02 * 2**20 and sum(map(bool, notes)) == 1  # said once
    full = next(note for note in notes if note)
    assert full.startswith(f"the transcript is full after {len(recorded(tmp_path / 't'))} rounds")


FAST = dict(
    clients=4,
    cohort=Uniform(2),
    model=MODELS["mlp"](hidden=16),
    local=LocalTraining(steps=1, batch_size=4),
    rounds=4,
    execution=Execution(picture=False, engine="sequential", transcript=50.0),
)


def test_a_resumed_run_has_the_same_transcript(tmp_path):
    for name, rounds in (("whole", 4), ("parts", 2)):
        simulate.run(Experiment(**{**FAST, "rounds": rounds}).with_execution(out=str(tmp_path / name)))
    (tmp_path / "parts" / "transcript" / "000003.safetensors").write_bytes(b"half a round that was cut off")
    resume(tmp_path / "parts", ["rounds=4"])
    whole, parts = (recorded(tmp_path / name / "transcript") for name in ("whole", "parts"))
    assert [path.read_bytes() for path in whole] == [path.read_bytes() for path in parts] and len(whole) == 4


# ---- measures -------------------------------------------------------------------------------------------------------
def test_measures_against_scipy_and_scikit_learn():
    stats = pytest.importorskip("scipy.stats")
    metrics = pytest.importorskip("sklearn.metrics")
    draw = generator(1)
    scores = torch.randn(400, generator=draw).mul(3).round().double()  # with ties
    member = torch.rand(400, generator=draw) < 0.4
    scores[member] += 1
    assert measures.auc(scores, member) == pytest.approx(metrics.roc_auc_score(member, scores), abs=1e-12)
    for found, count in ((0, 20), (3, 20), (20, 20), (399, 1000)):
        exact = stats.binomtest(found, count).proportion_ci(0.95, "exact")
        assert measures.clopper_pearson(found, count) == pytest.approx((exact.low, exact.high), abs=1e-9)
    fpr, tpr, _ = metrics.roc_curve(member, scores, drop_intermediate=False)
    for rate in (0.01, 0.05, 0.3):
        assert measures.true_rate(scores, member, rate).value == pytest.approx(tpr[fpr <= rate].max())
    band = measures.bootstrap(measures.auc, scores, member)
    assert band.low < band.value < band.high and band.high - band.low < 0.15


def test_guesses_that_know_nothing_are_at_chance():
    """Fitting a threshold to the very images it is marked on would be above one half, always."""
    values = []
    for seed in range(40):
        scores = torch.randn(60, generator=generator(seed), dtype=torch.float64)
        values.append(measures.balanced_accuracy(scores, torch.arange(60) < 30).value)
    mean = sum(values) / len(values)
    assert abs(mean - 0.5) < 3 * np.std(values) / math.sqrt(len(values))


def test_too_few_samples_for_a_rate_are_refused():
    scores, member = torch.arange(200.0), torch.arange(200) % 2 == 0
    with pytest.raises(
        BadInput, match=r"--fpr 0.001 needs at least 1000 images that nobody trained on, and there are 1"
    ):
        measures.true_rate(scores, member, 0.001)
    with pytest.raises(BadInput, match="between 0 and 1"):
        measures.check_rate(1.5, 100)
    # Of the odd ones 199 may be a false alarm, 197 may not: 198 is the only member above it.
    assert measures.true_rate(scores, member, 0.01).value == pytest.approx(0.01)


def test_verdicts_in_words():
    def verdict(found, chance, undefended):
        return Verdict("a", "", "AUC", {"AUC": found}, {"AUC": chance}, {"AUC": undefended}, 10, 1)

    at_half, perfect = Measure(0.5, 0.45, 0.55), Measure(1.0, 0.99, 1.0)
    assert verdict(Measure(0.52, 0.47, 0.57), at_half, perfect).sentence.startswith("At chance: AUC 0.520")
    assert verdict(Measure(0.62, 0.57, 0.66), at_half, perfect).sentence.startswith("Leaks in part:")
    assert "80 % of the way" in verdict(Measure(0.9, 0.8, 0.95), at_half, perfect).sentence
    assert verdict(Measure(0.9, 0.8, 0.95), at_half, perfect).is_above_chance
    wide, seldom, often = Measure(0.72, 0.62, 0.81), Measure(0.15, 0.03, 0.38), Measure(0.7, 0.46, 0.88)
    by_chance = {"AUC": Measure(0.49, 0.18, 0.82), "most frequent class": seldom}
    found = {"AUC": wide, "most frequent class": often}
    other = Verdict("labels", "", "AUC", found, by_chance, found, 20, 1)
    assert other.is_above_chance and other.sentence.startswith("Leaks: most frequent class 0.700")
    assert other.plain()["decisive"] == "most frequent class"
    assert not replace(other, found={**found, "most frequent class": seldom}).is_above_chance
    guessed = {"AUC": Measure(0.49, 0.45, 0.53), "recall": often}
    keen = Verdict("shared_members", "", "AUC", guessed, {"AUC": guessed["AUC"], "recall": seldom}, guessed, 20, 1)
    assert not keen.is_above_chance and keen.decisive == "AUC"  # who calls everybody a member misses none


# ---- membership -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def random_labels(tmp_path_factory):
    """Labels that only learning by heart can get right; trained on until it does."""
    owned = federation(sizes=(40, 40), pool=320, dtype=torch.float32)
    y = torch.randint(0, CLASSES, owned.data.y.shape, generator=generator(9))
    owned = replace(owned, data=Dataset(owned.data.x, y))
    plan = Stage(None, 10, Everyone(), Sgd(0.1, momentum=0.5), epochs=20, size=8)
    net = network(precision="fp32")
    folder = tmp_path_factory.mktemp("heart")
    transcript, knowledge = recording(folder, FedAvg(), plan, net, owned)
    return transcript, replace(knowledge, fprs=(0.02,))


@pytest.mark.parametrize("name", ["loss", "loss_uploads", "lira"])
def test_membership_of_an_overfitted_model_is_found(random_labels, name):
    transcript, knowledge = random_labels
    attack = LikelihoodRatio("global", shadows=4, epochs=45) if name == "lira" else ATTACKS[name]
    verdict = attack.run(transcript, knowledge, name)
    assert verdict.found["AUC"].value > 0.9, verdict.sentence
    assert verdict.undefended["AUC"].value > 0.9, verdict.sentence
    assert verdict.chance["AUC"].low <= 0.5 <= verdict.chance["AUC"].high, verdict.sentence
    assert verdict.is_above_chance


@pytest.mark.parametrize("name", ["loss", "lira"])
def test_a_model_trained_without_the_members_tells_nothing(random_labels, name):
    _, knowledge = random_labels
    prior, found = knowledge.prior, []
    attack = LikelihoodRatio("global", shadows=4, epochs=30)
    ratios = attack.ratios(prior, 0) if name == "lira" else {}
    member = torch.cat(list(knowledge.answers.members.values()))
    for number in range(3):  # intervals of so few images miss one time in twenty
        elsewhere = prior.auxiliary[50 * number : 50 * number + 50]
        model = dict.fromkeys(prior.candidates, trained(prior.net, elsewhere, number, epochs=40, size=16))
        scores = attack.guess(model, prior, ratios) if name == "lira" else LossAttack().guess(model, prior)
        found.append(measures.membership(torch.cat(list(scores.values())), member, ())["AUC"])
    middle = measures.over_seeds(found)
    assert middle.low <= 0.5 <= middle.high and middle.value < 0.58


def test_the_likelihood_ratio_by_hand(random_labels):
    """Two normal densities of one variance: their log ratio at what the target says."""
    _, knowledge = random_labels
    prior = knowledge.prior
    attack = LikelihoodRatio("global", shadows=4, epochs=2)
    ratios = attack.ratios(prior, 0)
    weights = knowledge.overfitted
    guess = attack.guess({0: weights}, prior, ratios)[0]
    inside, outside, spread = ratios[0]
    with torch.no_grad():
        p = prior.net(weights, prior.candidates[0].x).double().softmax(1)
    right = p.gather(1, prior.candidates[0].y[:, None])[:, 0]
    sure = right.clamp(1e-6, 1 - 1e-6)
    seen = (sure / (1 - sure)).log()
    densities = [torch.distributions.Normal(mean, spread).log_prob(seen) for mean in (inside, outside)]
    usable = (right > 1e-5) & (right < 1 - 1e-5)  # beyond, 1 - p has no digits left
    assert torch.allclose(guess[usable], (densities[0] - densities[1])[usable], rtol=1e-3, atol=1e-3)


# ---- shared images --------------------------------------------------------------------------------------------------
def shared(folder, **how):
    owned = federation(sizes=(60, 60), pool=400, dtype=torch.float32)
    recipe = FedXDS(warmup_rounds=1, warmup_epochs=1, **how)
    return recording(folder, recipe, replace(PLAN, rounds=1), network(precision="fp32"), owned)


def test_released_images_as_they_are_are_recovered_and_noise_is_not(tmp_path):
    attack = FeatureInversion(images=40, copies=1, steps=100, width=8)
    raw = attack.run(*shared(tmp_path / "raw", sparsity=0, clip_norm=None, sigma=0.0), "raw")
    assert raw.found["SSIM"].value > 0.9 and raw.found["recognised"].value > 0.95
    assert raw.is_above_chance
    noise = attack.run(*shared(tmp_path / "noise", sigma=300.0), "noise")
    assert not noise.is_above_chance and noise.found["recognised"].low <= noise.chance["recognised"].high
    assert noise.undefended["SSIM"].value > 0.9


def test_membership_in_shared_images(tmp_path):
    """Random labels: a shadow can only know the raw images by heart; from noise it learns nothing about them."""
    pytest.importorskip("sklearn")
    _, knowledge = shared(tmp_path, sigma=0.0)
    prior, answers = knowledge.prior, knowledge.answers
    draw = generator(2)
    originals = LabelledImages(answers.trained(prior).x, torch.randint(0, CLASSES, (120,), generator=draw))
    others = LabelledImages(prior.auxiliary.x[:120], torch.randint(0, CLASSES, (120,), generator=draw))
    attack = SharedMembership(epochs=100, trees=60)
    raw = attack.marked(originals, originals, others, knowledge, "raw")
    assert raw.found["AUC"].value > 0.9 and raw.found["recall"].value > 0.85, raw.sentence
    assert raw.chance["AUC"].low <= 0.5 <= raw.chance["AUC"].high
    assert raw.is_above_chance and raw.found == raw.undefended


def test_originals_of_residuals(tmp_path):
    """FedFed sends two releases of each image: the first of each is its residual under the smaller noise."""
    owned = federation(sizes=(60, 60), pool=400, dtype=torch.float32)
    recipe = FedFed(distil_rounds=1, latent=8, width=4, sigma1=0.0, sigma2=50.0)
    transcript, knowledge = recording(tmp_path, recipe, replace(PLAN, rounds=1), network(precision="fp32"), owned)
    stored = replace(knowledge.prior, mean=(0.0,), std=(1.0,))  # these images are stored as the network takes them
    given = exchanged(transcript, stored)
    originals = given.originals(knowledge.answers)
    assert torch.equal(given.images.y, originals.y) and given.images.x.abs().max() < 20
    assert torch.allclose(given.release(stored, originals, 0), given.images.x, atol=1e-4)


@pytest.mark.parametrize("how", [{}, {"share_fraction": 0.4, "share_as": "uint8"}, {"sparse": True}])
def test_originals_are_those_of_the_releases(tmp_path, how):
    """Without noise a release is its original wherever it is not zero."""
    transcript, knowledge = shared(tmp_path, sigma=0.0, clip_norm=None, **how)
    given = exchanged(transcript, knowledge.prior)
    released, originals = given.images, given.originals(knowledge.answers)
    assert torch.equal(released.y, originals.y)
    kept = released.x.abs() > 0.05
    assert kept.double().mean() > 0.15
    assert torch.allclose(released.x[kept], originals.x[kept], atol=0.02)


def test_recognising_an_image_is_more_than_knowing_its_class():
    images = LabelledImages(*pictures(200, 4))
    prior = Prior(network(), {}, images[100:], MEAN, STD)
    some = images[:60]
    assert likeness(some.x, some, prior)["recognised"].value == 1.0
    assert likeness(some.x, some, prior)["SSIM"].value == pytest.approx(1.0)
    assert likeness(prior.prototypes(some.y), some, prior)["recognised"].value < 0.2
    shuffled = torch.randperm(60, generator=generator(0))
    assert torch.equal(matched(some.x[shuffled], some.x), some.x)


# ---- gradients ------------------------------------------------------------------------------------------------------
def true_gradient(knowledge, weights, round, client):
    batch, net = knowledge.answers.batch(round, client), knowledge.prior.net
    params = weights.params.map(lambda p: p.detach().requires_grad_())
    loss = F.cross_entropy(net(Tree(params=params, buffers=weights.buffers), batch.x), batch.y)
    return Tree(dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True)))


@pytest.mark.parametrize(
    "recipe, uplink, source",
    [
        (FedAvg(), (), "delta"),
        (FedNova(), (), "delta"),
        (FedPer(), (), "delta"),
        (FedAvg(), (TopK(0.2),), "delta"),
        (Scaffold(), (), "control"),
        (Scaffold(), (TopK(0.2),), "control"),  # a sparse update beside the whole gradient
        (SPATL(selector="uniform", budget=0.5), (), "control"),
        (SPATL(selector="uniform", budget=0.5, control_upload="salient"), (), "delta"),
        (SPATL(selector="uniform", budget=0.5, control_scale=0.0), (), "delta"),
        (SPATL(selector="uniform", budget=0.5, control_upload="salient", private="none"), (), "delta"),
    ],
)
def test_gradients_read_off_uploads(tmp_path, recipe, uplink, source):
    """What the server reads off an upload is the gradient of the client's batch, wherever it crosses."""
    transcript, knowledge = recording(tmp_path, recipe, replace(STEP, uplink=uplink))
    own = (
        getattr(recipe, "private", "none") != "none"
    )  # their private weights are as they began in the first round alone
    for round in range(1 if own or uplink else 2):  # what was left out is added to the next upload
        step = single_step(transcript, round, 1, knowledge.prior.net)
        true = true_gradient(knowledge, step.weights, round, 1)
        assert step.source == source
        for name, leaf in step.gradient.items():
            seen = step.seen[name].bool()
            assert torch.allclose(leaf[seen], true[name][seen], atol=1e-9), name
            assert not leaf[~seen].any()
        crosses = {n: float(leaf.mean()) for n, leaf in step.seen.items()}
        assert crosses.keys() == (true.keys() if not own else {n for n in true if not n.startswith("head")})
        whole = source == "control" or not (uplink or isinstance(recipe, SPATL))
        assert (min(crosses.values()) == 1) == whole


def test_several_steps_are_no_gradient(tmp_path):
    transcript, knowledge = recording(tmp_path, FedAvg(), PLAN)
    with pytest.raises(Inapplicable, match=r"local.steps=1"):
        single_step(transcript, 0, 0, knowledge.prior.net)


@pytest.mark.parametrize("by, size", [("dlg", 1), ("cosine", 1), ("idlg", 2)])
def test_images_come_back_from_a_gradient(tmp_path, by, size):
    transcript, knowledge = recording(tmp_path, FedAvg(), replace(STEP, size=size), network(Smooth))
    steps = 400 if by == "cosine" else 200
    verdict = GradientInversion(by, victims=2, steps=steps, smoothness=1e-5).run(transcript, knowledge, by)
    assert verdict.found["SSIM"].value > 0.9, verdict.sentence
    assert verdict.found["recognised"].value == 1.0
    assert verdict.found == verdict.undefended  # nothing was done to these uploads


def test_a_private_update_gives_no_image_back(tmp_path):
    uplink = (ClientPrivacy(norm=0.1, multiplier=1.0),)
    transcript, knowledge = recording(tmp_path, FedAvg(), replace(STEP, size=1, uplink=uplink), network(Smooth))
    verdict = GradientInversion("cosine", victims=2, steps=200, smoothness=1e-4).run(transcript, knowledge, "cosine")
    assert not verdict.is_above_chance, verdict.sentence
    assert verdict.undefended["SSIM"].value > 0.85 > verdict.found["SSIM"].value


def test_labels_of_a_batch_are_read_off_the_last_layer(tmp_path):
    transcript, knowledge = recording(tmp_path, FedAvg(), replace(STEP, size=6), network(Smooth))
    right = 0
    for client in range(3):
        step = single_step(transcript, 0, client, knowledge.prior.net)
        read = read_labels(step, 6, knowledge.prior)
        true = knowledge.answers.batch(0, client).y
        right += sum(min(int((read == c).sum()), int((true == c).sum())) for c in range(CLASSES))
    assert right >= 16  # of 18: probabilities are taken to be those of other images


@pytest.mark.parametrize("steps", [1, 6])
def test_classes_of_clients_leak(tmp_path, steps):
    owned = federation()
    order = owned.data.y[: sum(map(len, owned.train.values()))].argsort()  # each client has few classes
    parts = order.tensor_split(6)
    owned = replace(owned, train=dict(enumerate(parts)), test={i: owned.pool[:4] for i in range(6)})
    plan = replace(STEP, steps=steps, size=4, rounds=3)
    transcript, knowledge = recording(tmp_path, FedAvg(), plan, owned=owned)
    verdict = LabelLeakage().run(transcript, knowledge, "labels")
    assert verdict.found["AUC"].value > 0.9 and verdict.is_above_chance
    assert verdict.chance["AUC"].low <= 0.5 <= verdict.chance["AUC"].high
    noise = recording(
        tmp_path / "noise", FedAvg(), replace(plan, uplink=(Clip(0.01), GaussianNoise(10.0))), owned=owned
    )
    hidden = LabelLeakage().run(*noise, "labels")
    assert not hidden.is_above_chance and hidden.undefended["AUC"].value > 0.9


# ---- every method ---------------------------------------------------------------------------------------------------
# Small settings for methods whose own are not. PSE has a network of its own.
SMALL = {
    "fedxds": dict(warmup_rounds=1, warmup_epochs=1),
    "fedfed": dict(distil_rounds=1, latent=8, width=4),
    "spatl": dict(selector="uniform"),
    "feddf": dict(steps=2, batch=8),
    "fedaux": dict(pretrain_steps=2, pretrain_batch=8, steps=2, batch=8),
    "fedftg": dict(iterations=1, width=4, batch=4),
    "fedgen": dict(steps=2, batch=4),
}


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"pse"}))
def test_every_method_can_be_audited(tmp_path, name, monkeypatch):
    """Each attack gives a verdict or says in words why there is nothing for it."""
    monkeypatch.setattr(measures, "_DRAWS", 20)  # intervals are tested above
    recipe = ALGORITHMS[name](**SMALL.get(name, {}))
    plan = replace(STEP, rounds=1 if name != "l2gd" else 3)
    if name == "scaffnew":  # refuses momentum
        plan = replace(plan, optimizer=Sgd(plan.optimizer.lr))
    if name in ("fedrep", "fedpac"):  # train their head first and then the body
        plan = replace(plan, steps=None, epochs=2, size=16)
    transcript, knowledge = recording(tmp_path, recipe, plan)
    vars(knowledge)["overfitted"] = knowledge.prior.net.initial_weights()  # the slow reference is not what is tested
    quick = {
        "loss": LossAttack("global"),
        "uploads": LossAttack("uploads"),
        "gradients": GradientInversion("cosine", victims=1, steps=2),
        "labels": LabelLeakage(),
    }
    found, why = {}, {}
    for attack, one in quick.items():
        try:
            found[attack] = one.run(transcript, knowledge, attack)
        except Inapplicable as reason:
            why[attack] = str(reason)
    assert all(math.isfinite(m.value) for verdict in found.values() for m in verdict.found.values())
    if name in ("local", "fedproto", "fedrep", "fedpac"):  # nothing crosses; no weights; the body alone
        assert not found and all(why.values())
    else:
        assert found, why
    if name in ("fedavg", "fedprox", "scaffold", "fednova", "feddyn", "moon"):
        assert found.keys() == quick.keys()


def test_models_behind_uploads(tmp_path):
    """FedNova divides what FedAvg sends as it is: the clients' models are the same."""
    found = []
    for recipe in (FedAvg(), FedNova()):
        transcript, knowledge = recording(tmp_path / type(recipe).__name__, recipe, PLAN)
        found.append(after_training(transcript[0], 0, knowledge.prior.net))
        assert not torch.equal(found[-1].params["head.bias"], transcript[0].download.model.params["head.bias"])
    pairs = zip(found[0].leaves(), found[1].leaves(found[0]), strict=True)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in pairs)
    transcript, knowledge = recording(tmp_path / "mtl", FedMTL(), PLAN)
    assert after_training(transcript[0], 0, knowledge.prior.net) is None


# ---- the command ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A short run on the digits, of single steps."""
    out = tmp_path_factory.mktemp("run") / "digits"
    short = {**FAST, "rounds": 2, "local": LocalTraining(steps=1, batch_size=1)}
    simulate.run(Experiment(**short).with_execution(out=str(out)))
    return out


def test_the_command(real):
    said = CliRunner().invoke(
        cli.app, ["audit", str(real), "--attacks", "loss,labels,idlg", "--seeds", "1", "--candidates", "100", "--json"]
    )
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout.splitlines()[-1])
    assert [verdict["attack"] for verdict in found["verdicts"]] == ["loss", "labels", "idlg"]
    assert found == json.loads((real / "audit.json").read_text())
    for verdict in found["verdicts"]:
        for kind in ("found", "chance", "undefended"):
            assert all(m["low"] <= m["value"] <= m["high"] for m in verdict[kind].values())
    assert "idlg" in (real / "audit.md").read_text()
    assert (real / "figures" / "audit.png").exists() and (real / "figures" / "audit-idlg.png").exists()


def test_the_columns_are_explained_where_they_are_read(real):
    said = CliRunner().invoke(cli.app, ["audit", str(real), "--attacks", "loss,labels", "--candidates", "100"])
    table, *lines = said.stdout.split("found: ", 1)
    for name, meaning in LEGEND.items():
        assert name.split()[-1] in table and f"{name}: {meaning}." in f"found: {lines[0]}"
        assert f"- {name}: {meaning}." in (real / "audit.md").read_text()
    first, head = ((real / "audit.md").read_text().splitlines()[at] for at in (2, 4))
    assert first == json.loads((real / "audit.json").read_text())["verdict"] and "chance" in first
    assert said.stdout.index(first[:20]) < said.stdout.index("measure")  # the verdict stands before the table
    assert [cell.strip() for cell in head.split("|")[3:6]] == list(LEGEND)
    found = json.loads((real / "audit.json").read_text())["verdicts"][0]
    row = (real / "audit.md").read_text().splitlines()[6].split("|")
    for cell, kind in zip(row[3:6], ("found", "chance", "undefended"), strict=True):
        assert cell.strip() == str(Measure(**found[kind]["AUC"]))


def test_bad_input_is_one_sentence(real, tmp_path):
    with pytest.raises(BadInput, match="'lossy' is unknown; did you mean 'loss'"):
        audit(real, ["lossy"])
    with pytest.raises(BadInput, match=r"--fpr 0.001 needs at least 1000 images"):
        audit(real, ["loss"], fprs=[0.001])
    with pytest.raises(BadInput, match=r"--attacks shared_images finds nothing to attack in .*: no images are shared"):
        audit(real, ["shared_images"])
    heard = []
    with pytest.raises(BadInput, match=r"--attacks shared_images finds .*; shared_members finds nothing .*not.* run$"):
        audit(real, ["loss", "shared_images", "shared_members"], say=heard.append)
    assert heard == []  # a long attack before it has not run
    with pytest.raises(BadInput, match="there is no run"):
        audit(tmp_path / "nowhere")
    simulate.run(Experiment(**FAST).with_execution(transcript=0.0, out=str(tmp_path / "plain")))
    with pytest.raises(BadInput, match=r"has no transcript: .* run it again with transcript=1000"):
        audit(tmp_path / "plain")
    simulate.run(Experiment(**FAST, algorithm=Local()).with_execution(out=str(tmp_path / "local")))
    with pytest.raises(BadInput, match=r"sends nothing that can be attacked .*--attacks loss_personal"):
        audit(tmp_path / "local")
    assert audit(tmp_path / "local", ["loss_personal"], candidates=40).verdicts[0].samples > 0
    (tmp_path / "local" / "transcript" / "000001.safetensors").write_bytes(b"nothing")
    with pytest.raises(BadInput, match=r"000001.safetensors is damaged, and an audit begins"):
        audit(tmp_path / "local")


def test_candidates_of_either_kind_have_the_same_labels(real):
    """Or an attack could get by on knowing which classes a client has."""
    from fedlens.audit.run import prepared
    from fedlens.runs.folder import RunFolder

    _, knowledge = prepared(RunFolder.open(real), (), 4000, 1, "cpu")  # more than there are others
    prior, members = knowledge.prior, knowledge.answers.members
    for client, images in prior.candidates.items():
        member = members[client]
        assert torch.equal(images.y[member].bincount(minlength=10), images.y[~member].bincount(minlength=10))
        owned = {tuple(row.tolist()) for row in knowledge.answers.data(client).x.flatten(1)}
        assert [tuple(row.tolist()) in owned for row in images.x.flatten(1)] == member.tolist()
    seen = {tuple(row.tolist()) for images in prior.candidates.values() for row in images.x.flatten(1)}
    assert not seen & {tuple(row.tolist()) for row in prior.auxiliary.x.flatten(1)}


def test_pictures_are_drawn(tmp_path):
    points = {1.0: Measure(0.5, 0.4, 0.6), math.inf: Measure(0.9, 0.8, 1.0)}
    drawn = over_epsilon({"masked": points, "noise": points}, tmp_path / "curve", ylabel="AUC", levels={"chance": 0.5})
    assert drawn.stat().st_size > 5000
    rows = {"a": torch.rand(3, 3, 8, 8), "b": torch.rand(2, 3, 8, 8)}
    assert grid_of(rows, tmp_path / "grid", "title").stat().st_size > 3000


def test_many_recovered_images_go_on_below_and_stay_large(tmp_path):
    x = torch.rand(32, 1, 8, 8)
    wide, high = Image.open(side_by_side(Gallery(x, None, x), tmp_path / "many")).size
    assert wide < 3 * high


def test_a_folder_in_place_of_a_record_is_refused(tmp_path):
    (tmp_path / "000001.safetensors").mkdir()
    with pytest.raises(BadInput, match=r"000001\.safetensors is damaged \(it is not a regular file\)"):
        Recording(tmp_path, 1, 1)
