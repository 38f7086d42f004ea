"""FedFTG's and FedGen's generators against formulas written out from the released code, in float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fedlens.algorithms import FedFTG, FedGen
from fedlens.algorithms.fedftg import disagreement, gradient
from fedlens.algorithms.fedgen import any_labels
from fedlens.core.algorithm import Client, Server
from fedlens.core.network import Network
from fedlens.core.objective import cross_entropy
from fedlens.core.optimizer import Adam, Sgd
from fedlens.core.rng import fold, generator, key, normal, seeded, uniform
from fedlens.core.tree import Tree
from fedlens.models import model_named
from fedlens.models.generators import ImageGenerator, LatentGenerator, first_weights, passed, structure
from small import network

CLASSES, SHAPE, NOISE, WIDTH = 3, (1, 6, 6), 100, 4
LIKE = torch.zeros(1, dtype=torch.float64)


# ---- FedFTG ----------------------------------------------------------------------------------------------------------
def normed(x, weight=None, bias=None):
    """Batch normalisation of a channel by loops over nothing but its own numbers."""
    mean = x.mean((0, 2, 3), keepdim=True)
    x = (x - mean) / (((x - mean) ** 2).mean((0, 2, 3), keepdim=True) + 1e-5) ** 0.5
    return x if weight is None else x * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)


def test_fedftgs_generator_projects_noise_and_label_apart():
    """Half of the first channels are a projection of the noise, the others one of the label."""
    weights = first_weights(ImageGenerator, CLASSES, SHAPE, NOISE, WIDTH, seed=3, like=LIKE)
    z, y = torch.randn(20, NOISE, generator=generator(1)).double(), torch.arange(20) % CLASSES
    w = weights.params
    of_noise = z @ w["of_noise.weight"].T + w["of_noise.bias"]
    of_label = w["of_label.weight"].T[y] + w["of_label.bias"]
    x = torch.cat([of_noise.view(20, WIDTH, 2, 2), of_label.view(20, WIDTH, 2, 2)], 1)
    x = normed(x, w["body.1.weight"], w["body.1.bias"]).repeat_interleave(2, 2).repeat_interleave(2, 3)
    x = F.conv2d(x, w["body.3.weight"], padding=1)
    x = F.leaky_relu(normed(x, w["body.4.weight"], w["body.4.bias"]), 0.2)
    x = F.conv2d(x.repeat_interleave(2, 2).repeat_interleave(2, 3), w["body.7.weight"], padding=1)
    x = F.leaky_relu(normed(x, w["body.8.weight"], w["body.8.bias"]), 0.2)
    x = F.conv2d(x, w["body.10.weight"], w["body.10.bias"], padding=1).tanh()[:, :, :6, :6]
    made = structure(ImageGenerator, CLASSES, SHAPE, NOISE, WIDTH).apply(weights, passed, z, y, train=True)
    assert (made - normed(x)).abs().max() < 1e-12


def by_label(projection: str) -> float:
    """The part of the first layer's variance, after its norm, that knowing the label explains."""
    sizes = CLASSES, SHAPE, NOISE, WIDTH, projection == "apart"
    weights = first_weights(ImageGenerator, *sizes, seed=3, like=LIKE)
    with seeded(0):
        module = ImageGenerator(*sizes).double()
    module.requires_grad_(False)
    module.load_state_dict({**weights.params, **weights.buffers}, strict=False)
    z, y = torch.randn(3000, NOISE, generator=generator(1)).double(), torch.arange(3000) % CLASSES
    first = module.projected(z, y).detach()
    first = first if projection == "apart" else module.body[0](first)
    first = normed(first.view(3000, 2 * WIDTH, 2, 2))
    of_class = torch.stack([first[y == c].mean(0) for c in range(CLASSES)])[y]
    there = first - first.mean(0)  # what is the same for all is nobody's
    return float((of_class - first.mean(0)).square().mean() / there.square().mean())


def test_labels_have_their_part_of_the_first_layers_variance():
    assert by_label("apart") > 0.25 > 0.05 > by_label("joint")


def recognised(projection: str) -> float:
    """The share of images, made after fifty steps against one sure teacher, that the teacher takes for their label."""
    net = network(norm=False)
    teacher = net.initial_weights()
    student = teacher.replace(params=teacher.params.map(lambda leaf: leaf * 0.5))
    teacher = teacher.replace(params=teacher.params.map(lambda leaf: leaf * 2))
    sizes = CLASSES, SHAPE, NOISE, WIDTH, projection == "apart"
    maker = structure(ImageGenerator, *sizes)
    made = first_weights(ImageGenerator, *sizes, seed=3, like=LIKE)
    climb, share = Adam(FedFTG().generator_lr), torch.ones(50).double()
    state = climb.init(made.params)
    for t in range(50):
        seed = torch.tensor(t)
        y, z = torch.arange(50) % CLASSES, normal(fold(seed, "z"), 50, NOISE).double()
        grads = gradient(lambda g: disagreement(net, maker, student, teacher, share, z, y, 1, g), made)  # noqa: B023
        climb.update_(made.params, grads, state)
    y, z = torch.arange(300) % CLASSES, normal(torch.tensor(999), 300, NOISE).double()
    return float((net(teacher, maker.apply(made, passed, z, y, train=True)).argmax(1) == y).double().mean())


def test_fifty_steps_make_images_that_show_their_label():
    assert recognised("apart") > 0.95


def test_the_joint_projection_stays_for_earlier_numbers():
    by = FedFTG(**FedFTG.presets["joint"])
    assert by.projection == "joint" and FedFTG().projection == "apart"
    old = first_weights(ImageGenerator, CLASSES, SHAPE, 4, 2, False, seed=1, like=LIKE)
    assert old.params["body.0.weight"].shape == (2 * 2 * 4, 4 + CLASSES) and "of_noise.weight" not in old.params


# ---- FedGen ----------------------------------------------------------------------------------------------------------
GEN = FedGen(steps=3, noise=5, hidden=6, batch=8, lr=0.01)


def two_clients(by: FedGen, counts=([5, 0, 0], [2, 0, 3])) -> tuple[Server, list[Tree]]:
    net = network()
    server = Server(net, by.setup(Server(net, Tree(), 2, key=3)), 2, key=4)
    deltas = [
        server.state.model.map(lambda leaf, s=s: 0.3 * torch.randn(leaf.shape, generator=generator(s)).to(leaf))
        for s in (1, 2)
    ]
    uploads = [
        Tree(delta=d, counts=torch.tensor(c), weight=torch.tensor(1.0).double())
        for d, c in zip(deltas, counts, strict=True)
    ]
    return server, uploads


def test_fedgen_skips_absent_labels_and_draws_uniform_noise():
    """Label 1 is nobody's: every feature that is made is of label 0 or 2."""
    server, uploads = two_clients(GEN)
    module = LatentGenerator(CLASSES, 64, 5, 6).double()
    first = server.state.generator
    module.load_state_dict({**first.params, **first.buffers}, strict=False)
    heads = [server.state.model + upload.delta for upload in uploads]
    shares = torch.tensor([[5 / 7, 0, 0], [2 / 7, 0, 1]], dtype=torch.float64)
    names = [name for name, _ in module.named_parameters()]
    moments = {name: (0.0, 0.0) for name in names}
    for step in range(3):
        seed = torch.tensor(key(4, "features", step))
        y = torch.tensor([0, 2])[(uniform(fold(seed, "labels"), 8) * 2).long()]
        z = uniform(fold(seed, "noise"), 8, 5).double()
        made = module(z, y)
        pairs = [((z[i] - z[j]).square().mean() * (made[i] - made[j]).abs().mean()) for i in range(8) for j in range(8)]
        loss = torch.exp(-sum(pairs) / 64)
        for head, share in zip(heads, shares, strict=True):
            said = (made @ head.params["head.weight"].T + head.params["head.bias"]).log_softmax(1)
            loss = loss - sum(share[y[i]] * said[i, y[i]] for i in range(8)) / 8
        grads = torch.autograd.grad(loss, [dict(module.named_parameters())[name] for name in names])
        for name, grad in zip(names, grads, strict=True):
            leaf = dict(module.named_parameters())[name].data
            grad = grad + 1e-2 * leaf
            a, b = moments[name]
            moments[name] = a, b = 0.9 * a + 0.1 * grad, 0.999 * b + 0.001 * grad**2
            leaf -= 0.01 * (a / (1 - 0.9 ** (step + 1))) / ((b / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
    found = GEN.taught(server, uploads)
    for name, leaf in module.named_parameters():
        assert (found.params[name] - leaf.detach()).abs().max() < 1e-12, name


def test_labels_among_the_present_are_alike():
    y = any_labels(torch.tensor(3), 30_000, 10, torch.tensor([1, 4, 9]))
    assert y.unique().tolist() == [1, 4, 9] and torch.bincount(y)[4] / 30_000 == pytest.approx(1 / 3, abs=0.01)
    assert any_labels(torch.tensor(3), 1000, 3).unique().tolist() == [0, 1, 2]


def test_fedgens_settings_are_the_released_ones():
    by = FedGen(**FedGen.presets["released"])
    assert (by.alpha, by.beta, by.decay, by.steps, by.batch, by.lr) == (10, 10, 0.98, 50, 32, 3e-4)
    for channels, classes, noise, hidden in ((1, 10, 32, 256), (3, 10, 64, 512), (3, 2, 32, 128), (1, 26, 32, 256)):
        net = Network(model_named("cnn2").build(classes, channels, 32))
        assert FedGen().sizes(net)[2:] == (noise, hidden)
        assert FedGen(noise=7, hidden=9).sizes(net)[2:] == (7, 9)
    earlier = FedGen(**FedGen.presets["earlier"])
    assert (earlier.alpha, earlier.beta, earlier.labels, earlier.noise_is) == (1, 1, "all", "normal")


def test_clients_learn_from_features_of_uniform_noise():
    """own + 10 KL(head on features of own labels || prediction) + 10 cross-entropy of the head on any labels."""
    by, net = replace(GEN, batch=7, **FedGen.presets["released"]), network()
    server, _ = two_clients(by)
    x, y = torch.randn(4, 1, 6, 6, generator=generator(2)).double(), torch.tensor([0, 1, 2, 1])
    seed = torch.tensor(77)
    weights = server.state.model
    batch = Tree(x=x, y=y, weight=torch.tensor([1.0, 1, 1, 0]).double(), key=seed)
    received = Tree(model=weights, generator=server.state.generator, strength=torch.tensor(0.5).double())
    client = Client(net, received, Tree(), Tree(), cross_entropy, Sgd(0.01))
    out = net.forward(weights, x)
    module = LatentGenerator(CLASSES, 64, 5, 6).double().eval()
    first = server.state.generator
    module.load_state_dict({**first.params, **first.buffers}, strict=False)

    def log_head(purpose, labels):
        made = module(uniform(fold(seed, f"noise for {purpose}"), len(labels), 5).double(), labels).detach()
        return (made @ weights.params["head.weight"].T + weights.params["head.bias"]).log_softmax(1)

    log = out.logits.log_softmax(1)
    own = -sum(log[i, y[i]] for i in range(3)) / 3
    p = log_head("own labels", y).exp()
    kl = sum((p[i] * (p[i].log() - log[i])).sum() for i in range(3)) / 3
    any_y = (uniform(fold(seed, "labels"), 7) * 3).long()
    other = -sum(log_head("any labels", any_y)[i, any_y[i]] for i in range(7)) / 7
    assert abs(float(by.loss(client, weights, batch, out) - (own + 5 * kl + 5 * other))) < 1e-12
