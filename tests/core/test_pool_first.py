"""A max pool before the ReLU in front of it: the same bits, and nothing that anyone who watches could see."""

import copy

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fedlens.core.network import Network
from fedlens.core.pool_first import PoolFirst, pool_first
from fedlens.core.tree import Tree, grad

IMAGES = torch.randn(6, 3, 13, 11, generator=torch.Generator().manual_seed(0))


class Watching(TorchFunctionMode):
    """Notes which functions run on maps of which size."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append((func.__name__, tuple(args[0].shape)))
        return func(*args, **(kwargs or {}))


class _Leafless(nn.Module):
    """Whose parts a tracer goes through one by one."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body.forward(x)


def layers(pool, inplace=False):
    torch.manual_seed(1)
    parts = nn.Conv2d(3, 4, 3), nn.ReLU(inplace), pool, nn.Conv2d(4, 5, 2), nn.ReLU(inplace), nn.MaxPool2d(2), nn.ReLU()
    return nn.Sequential(*parts, nn.Flatten(), nn.LazyLinear(2)).double()


def sizes_of_relus(module, x=IMAGES):
    """Sides of the maps that ReLUs get, seen without the module's or torch's hooks: by who calls clamp."""
    seen, relu = [], torch.nn.functional.relu
    try:
        torch.nn.functional.relu = lambda x, inplace=False: (seen.append(x.shape[2]), relu(x, inplace))[1]
        module(x.double())
    finally:
        torch.nn.functional.relu = relu
    return seen


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "pool",
    [nn.MaxPool2d(2), nn.MaxPool2d(3, stride=2, padding=1), nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d(1)],
    ids=str,
)
def test_values_and_gradients_are_the_same_to_the_bit(pool, inplace):
    plain = layers(pool, inplace)
    plain(IMAGES.double())  # the lazy layer finds its width
    first = copy.deepcopy(plain)
    pool_first(first)
    assert type(first) is PoolFirst and [*first.state_dict()] == [*plain.state_dict()]
    outcomes = []
    for module in (plain, first):
        x = IMAGES.double().requires_grad_()
        out = module(x)
        outcomes.append([out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    assert (sizes_of_relus(plain)[0] == 11 and sizes_of_relus(first)[0] < 11) or pool.kernel_size == 1


def test_what_is_no_number_stays_none():
    module = layers(nn.MaxPool2d(2))
    x = IMAGES.double()
    module(x)
    x[0, 0, 5, 5] = torch.nan
    wanted = module(x)
    pool_first(module)
    assert torch.equal(module(x).isnan(), wanted.isnan()) and wanted.isnan().any()


def test_whoever_watches_sees_the_model_s_own_order():
    module = layers(nn.MaxPool2d(2))
    module(IMAGES.double())
    pool_first(module)
    with Watching() as watching:
        module(IMAGES.double())
    assert [shape[2] for name, shape in watching.seen if name == "relu"] == [11, 4, 2]
    traced = torch.fx.Tracer(autowrap_functions=()).trace(_Leafless(module))
    assert [node.target for node in traced.nodes][1:4] == ["body.0", "body.1", "body.2"]


def test_a_watcher_that_does_not_mind_lets_pools_run_first():
    module = layers(nn.MaxPool2d(2))
    module(IMAGES.double())
    pool_first(module)
    with Watching() as careless:
        careless.any_order = True
        module(IMAGES.double())
        with Watching() as careful:
            module(IMAGES.double())
    sides = [[shape[2] for name, shape in watching.seen if name == "relu"] for watching in (careless, careful)]
    assert sides == [[5, 2, 2, 11, 4, 2], [11, 4, 2]]


@pytest.mark.parametrize("hooked", [1, 2])
def test_a_part_with_a_hook_keeps_its_place(hooked):
    module = layers(nn.MaxPool2d(2))
    module(IMAGES.double())
    pool_first(module)
    assert sizes_of_relus(module) == [5, 2, 2]
    outputs = []
    handle = module[hooked].register_forward_hook(lambda part, args, out: outputs.append(out))
    assert sizes_of_relus(module) == [11, 2, 2]
    assert outputs[0].min() >= 0  # what a ReLU lets through, also after the pool
    handle.remove()
    assert sizes_of_relus(module) == [5, 2, 2]


def test_others_are_left_alone():
    class Own(nn.Sequential):
        pass

    indices = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2, return_indices=True))
    apart = nn.Sequential(nn.ReLU(), nn.Conv2d(3, 3, 1), nn.MaxPool2d(2))
    others = [Own(nn.ReLU(), nn.MaxPool2d(2)), indices, apart, nn.Sequential(nn.MaxPool2d(2), nn.ReLU())]
    for module in others:
        kind = type(module)
        pool_first(module)
        assert type(module) is kind


def test_a_network_pools_first_and_leaves_the_module_it_was_given_as_it_was():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = (
                nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
                nn.Linear(80, 2),
            )

        def features(self, x):
            return self.body(x)

    given = Model()
    net = Network(given)
    assert type(given.body) is nn.Sequential and type(net.module.body) is type(net.copy().module.body) is PoolFirst
    weights = net.initial_weights()
    params = weights.params.map(lambda p: p.requires_grad_())
    out = net.forward(Tree(params=params, buffers=Tree()), IMAGES, train=True).logits
    plain = given.head(given.features(IMAGES.contiguous(memory_format=torch.channels_last)))
    assert torch.equal(out, plain)
    expected = torch.autograd.grad(plain.sum(), [*given.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(grad(out.sum(), params).leaves(), expected, strict=True))
