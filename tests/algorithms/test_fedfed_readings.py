"""FedFed's first stage and its release, against formulas written out from the released code, in float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from fedlens.algorithms import FedFed
from fedlens.algorithms.fedfed import Distil, ResidualExchange, mosaics
from fedlens.core.algorithm import Client, Stage
from fedlens.core.batches import Dataset, Federation, Shard, plan
from fedlens.core.cohort import Everyone
from fedlens.core.objective import cross_entropy
from fedlens.core.optimizer import AdamW, Sgd
from fedlens.core.rng import fold, generator, key, normal, uniform
from fedlens.core.run import run, timetable
from fedlens.core.tree import Tree
from fedlens.data.prepare import Prepare
from fedlens.engines.sequential import Sequential
from fedlens.models.generators import ResidualVae, first_weights, structure
from small import Net, network

MEAN, STD = 0.4, 0.3
SIZES = (9, 8)
BY = FedFed(distil_rounds=2, latent=4, width=4, mosaics=5)
PLAN = Stage(None, 1, Everyone(), Sgd(0.1), size=4)


def federation(sizes=SIZES, labels=3) -> Federation:
    total = sum(sizes)
    x = torch.randint(0, 256, (total, 1, 6, 6), generator=generator(3)).to(torch.uint8)
    y = torch.arange(total) % labels
    ends = torch.tensor(sizes).cumsum(0).tolist()
    train = {i: torch.arange(end - size, end) for i, (end, size) in enumerate(zip(ends, sizes, strict=True))}
    data = Dataset(x, y, Prepare((MEAN,), (STD,), dtype=torch.float64))
    return Federation(data, train, {i: index[:1] for i, index in train.items()}, torch.arange(2))


# ---- the network -----------------------------------------------------------------------------------------------------
def normed(x, w, name):
    mean = x.mean((0, 2, 3), keepdim=True)
    x = (x - mean) / (((x - mean) ** 2).mean((0, 2, 3), keepdim=True) + 1e-5).sqrt()
    return x * w[f"{name}.weight"].view(1, -1, 1, 1) + w[f"{name}.bias"].view(1, -1, 1, 1)


def block(x, w, name):
    inner = F.conv2d(F.leaky_relu(x, 0.01), w[f"{name}.body.1.weight"], w[f"{name}.body.1.bias"], padding=1)
    inner = F.leaky_relu(normed(inner, w, f"{name}.body.2"), 0.01)
    return x + F.conv2d(inner, w[f"{name}.body.4.weight"], w[f"{name}.body.4.bias"])


def coded(w, x, noise):
    """(q(x), mean, log-variance) in training, as the released network computes them."""
    x = F.pad(x, (0, 2, 0, 2))  # to 8 x 8
    h = F.relu(normed(F.conv2d(x, w["encode.0.weight"], stride=2, padding=1), w, "encode.1"))
    h = F.relu(normed(F.conv2d(h, w["encode.3.weight"], stride=2, padding=1), w, "encode.4"))
    h = block(normed(block(h, w, "encode.6"), w, "encode.7"), w, "encode.8").flatten(1)
    mu, log_variance = (h @ w[f"{n}.weight"].T + w[f"{n}.bias"] for n in ("mean", "log_variance"))
    z = mu + torch.exp(0.5 * log_variance) * noise
    h = (z @ w["decode.0.weight"].T + w["decode.0.bias"]).view(len(x), 4, 2, 2)
    h = normed(block(h, w, "decode.2"), w, "decode.3")
    h = normed(block(h, w, "decode.4"), w, "decode.5")
    h = F.leaky_relu(normed(F.conv_transpose2d(h, w["decode.6.weight"], stride=2, padding=1), w, "decode.7"), 0.01)
    h = F.conv_transpose2d(torch.tanh(h), w["decode.10.weight"], stride=2, padding=1)
    return torch.sigmoid(normed(h, w, "decode.11"))[:, :, :6, :6], mu, log_variance


def test_the_autoencoder_has_residual_blocks_norms_and_a_sigmoid():
    vae = first_weights(ResidualVae, (1, 6, 6), 4, 4, seed=1, like=torch.zeros(1).double())
    x, noise = (
        torch.rand(7, 1, 6, 6, generator=generator(1)).double(),
        torch.randn(7, 4, generator=generator(2)).double(),
    )
    expected = coded(vae.params, x, noise)
    found = BY.again(vae, x, noise, train=True)
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(found, expected, strict=True))
    assert float(found[0].min()) > 0 and float(found[0].max()) < 1


# ---- noise -----------------------------------------------------------------------------------------------------------
def test_noise_goes_on_pixels_between_zero_and_one():
    fed = federation((200,))
    shard = Shard(fed.data, fed.train[0])
    vae = first_weights(ResidualVae, (1, 6, 6), 4, 4, seed=1, like=torch.zeros(1).double())
    unit = BY.unit(shard)
    assert float(unit[0]) == pytest.approx(-MEAN / STD, abs=1e-12) and float(unit[1]) == pytest.approx(
        1 / STD, abs=1e-12
    )
    seed = torch.tensor(5)
    given = BY.released(vae, shard.x, shard.y, seed, unit)
    plain = fed.data.x.double() / 255
    again = structure(ResidualVae, (1, 6, 6), 4, 4).apply(
        vae, ResidualVae.forward, plain, torch.zeros(200, 4).double()
    )[0]
    for at, (name, sigma) in enumerate((("first noise", 0.15), ("second noise", 0.25))):
        noise = sigma * normal(fold(seed, name), 200, 1, 6, 6).double()
        expected = ((plain - again + noise) - MEAN) / STD  # shared images are normalised as own ones are
        assert (given.x[200 * at : 200 * at + 200] - expected).abs().max() < 1e-6  # they travel as float32
        assert float(noise.std() / STD) == pytest.approx(sigma / STD, rel=0.03)
    sent = ResidualExchange(by=BY).notes([])[0]
    assert "0.15 and 0.25 on pixels in [0, 1]" in sent and "pixels in [0, 1]" in BY.statement().mechanism


def test_earlier_noise_was_on_normalised_images():
    shard = Shard(federation((5,)).data, torch.arange(5))
    black, span = FedFed(**FedFed.presets["earlier"]).unit(shard)
    assert float(black) == 0 and float(span) == 1


# ---- the pull --------------------------------------------------------------------------------------------------------
def test_the_pull_is_fifty_in_every_round():
    """By the local epoch, which begins at one: 50 up to the ninth, 25 up to the nineteenth, then 5."""
    by = Distil(by=replace(BY, distil_rounds=15))
    stage = next(by.by.stages(PLAN))
    assert stage.epochs == 3 and stage.rounds == 15
    assert [by.phase(e) for e in range(3)] == ["mixtures", "mosaics 10", "images 10"]
    whole = [by.phase(3 * e + 2) for e in range(25)]  # local epochs 1 to 25
    assert whole == ["images 10"] * 9 + ["images 5"] * 10 + ["images 1"] * 6
    assert {by.phase(3 * e + 1) for e in range(25)} == {"mosaics 10"} and by.phase(3 * 99 + 1) == "mosaics 5"
    net = network()
    for turns in (0, 9, 14):
        state = Tree(model=net.initial_weights(), turns=torch.tensor(turns), seed=torch.tensor(1))
        state = state.replace(counted=Tree(examples=torch.tensor(30), clients=torch.tensor(3)))
        down = by.broadcast(type("S", (), {"state": state}))
        assert float(down.pull) == 5 and float(down.typical) == 10
    old = Distil(by=FedFed(**FedFed.presets["earlier"]))
    assert old.phase(0) == "images 1"
    assert float(old.broadcast(type("S", (), {"state": state})).pull) == 25


# ---- all three passes ------------------------------------------------------------------------------------------------
class Adam:
    """Decoupled decay, moments that stay."""

    def __init__(self):
        self.moments, self.counts = {}, {}

    def step(self, weights, grads):
        for name, g in grads.items():
            a, b = self.moments.get(name, (torch.zeros_like(g), torch.zeros_like(g)))
            self.counts[name] = t = self.counts.get(name, 0) + 1
            a, b = 0.9 * a + 0.1 * g, 0.999 * b + 0.001 * g * g
            self.moments[name] = a, b
            p = weights[name] * (1 - 1e-3 * 1e-6)
            weights[name] = p - 1e-3 * (a / (1 - 0.9**t)) / ((b / (1 - 0.999**t)).sqrt() + 1e-8)


def tiles(x, weight, count, seed):
    """Mosaics, pixel by pixel."""
    order = (uniform(fold(seed, "images"), count, len(x)) + (weight == 0)).argsort(1)
    drawn = uniform(fold(seed, "places"), count, 4)
    made = torch.zeros(count, *x.shape[1:]).to(x)
    for m in range(count):
        down, right = int(drawn[m, 0] * 4), int(drawn[m, 1] * 4)  # 0 to 3: a half is three pixels
        row, column = int(drawn[m, 2] * 6), int(drawn[m, 3] * 6)
        for i in range(6):
            for j in range(6):
                which = order[m, (2 if i >= 3 else 0) + (1 if j >= 3 else 0)]
                if not (row - 1 <= i < row + 1 and column - 1 <= j < column + 1):
                    made[m, :, i, j] = x[which, :, down + i % 3, right + j % 3]
    return made


def test_mosaics_pixel_by_pixel():
    x, weight = torch.rand(6, 2, 6, 6, generator=generator(1)).double() + 1, torch.tensor([1.0, 1, 1, 1, 0, 0])
    made = mosaics(x, weight, 30, torch.tensor(4))
    assert torch.equal(made, tiles(x, weight, 30, torch.tensor(4)))
    assert {float(v) for v in made.flatten()} <= {0.0, *map(float, x[:4].flatten())}
    assert mosaics(x[:2, :, :5], weight[:2], 3, torch.tensor(4)).shape == (3, 2, 5, 6)


def test_parts_of_mixtures_are_of_the_beta_distribution():
    """The median of three uniform numbers: mean 1/2, variance 1/20, as Beta(2, 2) has."""
    parts = torch.stack([uniform(torch.tensor(s), 3).median() for s in range(4000)]).double()
    assert float(parts.mean()) == pytest.approx(0.5, abs=0.01) and float(parts.var()) == pytest.approx(0.05, abs=0.004)


def kl(mu, log_variance):
    return -0.5 * (1 + log_variance - mu**2 - log_variance.exp()).sum(1)


def local_epoch(by, net, vae, adams, fed, client, round, factors=(1, 1, 1, 1), with_mosaics=True):
    """A client's three passes; moves both networks, and all that AdamW knows."""
    module, mine = Net().double(), fed.train[client]
    rows, weights, epochs = plan(len(mine), 4, key(0, "batches", round, client), epochs=3)
    names = [name for name, _ in module.named_parameters()]
    coder = [name for name in vae if "running" not in name]

    def said(weights_, x):
        moved = {name: leaf.clone() if "running" in name else leaf for name, leaf in weights_.items()}
        module.train()
        out = functional_call(module, moved, (x,))
        return out, {name: leaf for name, leaf in moved.items() if "running" in name}

    for t, (row, weight, epoch) in enumerate(zip(rows, weights, epochs, strict=True)):
        seed = torch.tensor(key(0, "step", round, client, t))
        plain, y = fed.data.x[mine[row]].double() / 255, fed.data.y[mine[row]]
        x, share = (plain - MEAN) / STD, weight / weight.sum()
        free = {n: net[n].detach().requires_grad_() for n in names}
        free_vae = {n: vae[n].detach().requires_grad_() for n in coder}
        if epoch == 0:
            part = uniform(fold(seed, "part"), 3).median().double()
            other = uniform(fold(seed, "partners"), 4).argsort()
            out, running = said(net | free, part * x + (1 - part) * x[other])
            log = out.log_softmax(1)
            loss = -sum(share[i] * (part * log[i, y[i]] + (1 - part) * log[i, y[other[i]]]) for i in range(4))
            adams[0].step(net, dict(zip(names, torch.autograd.grad(loss, list(free.values())), strict=True)))
            net.update(running)
        elif epoch == 1:
            if not with_mosaics:
                continue
            made = tiles(plain, weight, by.mosaics, fold(seed, "mosaics"))
            again, mu, log_variance = coded(free_vae, made, normal(fold(seed, "code"), by.mosaics, 4).double())
            loss = 50 * ((again - made) ** 2).mean() + 0.005 * kl(mu, log_variance).sum() / (by.mosaics * 1 * 4)
            adams[1].step(vae, dict(zip(coder, torch.autograd.grad(loss, list(free_vae.values())), strict=True)))
        else:
            again, mu, log_variance = coded(free_vae, plain, normal(fold(seed, "code"), 4, 4).double())
            rest = plain - again
            noisy = [
                rest + s * normal(fold(seed, name), *plain.shape).double()
                for name, s in (("first noise", 0.15), ("second noise", 0.25))
            ]
            out, running = said(net | free, (torch.cat([*noisy, plain]) - MEAN) / STD)
            each = F.cross_entropy(out, y.repeat(3), reduction="none").view(3, 4)
            a, b, c, d = factors
            loss = (
                a * 50 * (share * (rest**2).flatten(1).mean(1)).sum()
                + b * 2 * (share * (each[0] + each[1]) / 2).sum()
                + c * 0.005 * (share * kl(mu, log_variance)).sum() / (1 * 4)
                + d * 0.4 * (share * each[2]).sum()
            )
            both = [*free.values(), *free_vae.values()]
            grads = torch.autograd.grad(loss, both)
            adams[0].step(net, dict(zip(names, grads[: len(names)], strict=True)))
            adams[1].step(vae, dict(zip(coder, grads[len(names) :], strict=True)))
            net.update(running)
    return net, vae


def test_the_loss_on_images_term_by_term():
    """Squared error of pixels in [0, 1] times 50, and the other three by their factors."""
    fed, net = federation(), network()
    coder = first_weights(ResidualVae, (1, 6, 6), 4, 4, seed=3, like=torch.zeros(1).double())
    received = Tree(model=net.initial_weights(), pull=torch.tensor(5.0).double())
    client = Client(net, received, Tree(), Tree(), cross_entropy, AdamW(1e-3), phase="images 10")
    seed, weight = torch.tensor(11), torch.tensor([1.0, 1, 1, 0]).double()
    plain, y = fed.data.x[:4].double() / 255, fed.data.y[:4]
    again, mu, log_variance = coded(coder.params, plain, normal(fold(seed, "code"), 4, 4).double())
    rest = plain - again
    noises = [
        s * normal(fold(seed, n), 4, 1, 6, 6).double() for n, s in (("first noise", 0.15), ("second noise", 0.25))
    ]
    seen = (torch.cat([rest + noises[0], rest + noises[1], plain]) - MEAN) / STD
    log = functional_call(Net().double().train(), dict(received.model.params), (seen,)).log_softmax(1)
    right = torch.stack([log[i, y[i % 4]] for i in range(12)]).view(3, 4)[:, :3]
    expected = (
        5 * 50 * sum(rest[i].square().mean() for i in range(3)) / 3
        - 0.7 * 2 * right[:2].mean()
        + 0.5 * 0.005 * kl(mu, log_variance)[:3].mean() / 4
        - 0.3 * 0.4 * right[2].mean()
    )
    batch = Tree(x=(plain - MEAN) / STD, y=y, weight=weight, key=seed)
    local = received.model.clone().replace(
        vae=coder,
        black=torch.tensor(-MEAN / STD, dtype=torch.float64),
        span=torch.tensor(1 / STD, dtype=torch.float64),
        factors=torch.tensor([5, 0.7, 0.5, 0.3], dtype=torch.float64),
    )
    assert abs(float(Distil(by=BY).distillation(client, local, batch, 10) - expected)) < 1e-12


def mean_of(ones, shares):
    return {name: sum(s * one[name] for s, one in zip(shares, ones, strict=True)) for name in ones[0]}


@pytest.mark.parametrize("kept", [True, False])
def test_two_rounds_of_the_first_stage_by_hand(kept):
    by, fed, net = replace(BY, kept=kept), federation(), network()
    stages = list(by.stages(PLAN))
    recipe = type("Only", (), {"stages": lambda self, plan: iter(stages[:1])})()
    state = run(recipe, net, Sequential(network(), fed, checked=True), PLAN).state
    first = net.initial_weights()
    model = dict(first.params) | dict(first.buffers)
    coder = first_weights(ResidualVae, (1, 6, 6), 4, 4, seed=key(0, "server", 0), like=torch.zeros(1).double())
    vae, shares = dict(coder.params), [s / sum(SIZES) for s in SIZES]
    adams = [[Adam(), Adam()] for _ in SIZES]
    for round in range(2):
        adams = adams if kept else [[Adam(), Adam()] for _ in SIZES]
        ends = [local_epoch(by, dict(model), dict(vae), adams[k], fed, k, round) for k in range(len(SIZES))]
        model, vae = (mean_of(part, shares) for part in zip(*ends, strict=True))
    ours = dict(state.model.params) | dict(state.model.buffers)
    assert max(float((ours[n] - leaf.detach()).abs().max()) for n, leaf in model.items()) < 1e-9
    assert max(float((state.vae.params[n] - leaf.detach()).abs().max()) for n, leaf in vae.items()) < 1e-9
    assert float(state.counted.examples) == 2 * sum(SIZES)


# ---- small and skewed clients ----------------------------------------------------------------------------------------
def viewed(labels, typical):
    fed = federation((len(labels),))
    data = Dataset(fed.data.x, torch.tensor(labels), fed.data.prepare)
    received = Tree(typical=torch.tensor(float(typical)))
    return Client(
        network(),
        received,
        Tree(),
        Tree(),
        cross_entropy,
        AdamW(1e-3),
        examples=len(labels),
        data=Shard(data, fed.train[0]),
    )


@pytest.mark.parametrize(
    ("labels", "typical", "expected"),
    [
        ([0, 1, 2, 0, 1, 2], 31, ((5, 1, 0.5, 1), True)),  # fewer than a fifth of what is typical
        ([0, 0, 0, 0, 0, 1], 29, ((1, 5, 5, 5), False)),  # five sixths are of one class
        ([0, 0, 0, 0, 0, 1], 30, ((1, 1, 1, 1), True)),  # exactly a fifth is neither
        ([0, 1, 2, 0, 1, 2], 10, ((1, 1, 1, 1), True)),
        ([0, 0, 0, 0, 0, 1], 0, ((1, 5, 5, 5), False)),  # before anybody told how many there are
    ],
)
def test_small_and_skewed_clients_weigh_otherwise(labels, typical, expected):
    client = viewed(labels, typical)
    assert Distil(by=BY).adapted(client) == expected
    assert Distil(by=replace(BY, adaptive=False)).adapted(client) == ((1, 1, 1, 1), True)


def test_a_skewed_client_makes_no_mosaics():
    """Its autoencoder, with all that AdamW knows of it, is as if there had been no such pass."""
    fed, net = federation((8,), labels=1), network()
    stages = list(replace(BY, distil_rounds=1).stages(PLAN))
    recipe = type("Only", (), {"stages": lambda self, plan: iter(stages[:1])})()
    state = run(recipe, net, Sequential(network(), fed, checked=True), PLAN).state
    first = net.initial_weights()
    coder = first_weights(ResidualVae, (1, 6, 6), 4, 4, seed=key(0, "server", 0), like=torch.zeros(1).double())
    model, vae = local_epoch(
        BY,
        dict(first.params) | dict(first.buffers),
        dict(coder.params),
        [Adam(), Adam()],
        fed,
        0,
        0,
        (1, 5, 5, 5),
        False,
    )
    ours = dict(state.model.params) | dict(state.model.buffers)
    assert max(float((ours[n] - leaf.detach()).abs().max()) for n, leaf in model.items()) < 1e-9
    assert max(float((state.vae.params[n] - leaf.detach()).abs().max()) for n, leaf in vae.items()) < 1e-9


def test_the_whole_recipe_has_its_rounds():
    rounds = timetable(FedFed(distil_rounds=2, latent=4, width=4), replace(PLAN, rounds=3))
    names = [type(turn.stage.algorithm).__name__ for turn in rounds]
    assert names == ["Distil"] * 2 + ["ResidualExchange"] + ["FedAvg"] * 3


def test_clients_forget_adamw_when_they_gave_their_residuals():
    engine = Sequential(network(), federation(), checked=True)
    run(replace(BY, distil_rounds=1), network(), engine, PLAN)
    assert all(not engine.memories.get(client).get("adam", Tree()).leaves() for client in range(len(SIZES)))


def test_settings_are_the_released_ones():
    by = FedFed()
    assert (by.sigma1, by.sigma2, by.images, by.pull_by, by.reconstruction) == (0.15, 0.25, "unit", "epochs", 5)
    assert (by.passes, by.adaptive, by.kept, by.network) == ("three", True, True, "residual")
