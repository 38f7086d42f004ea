"""How many images are taken at a time, and in which precision channels are summed."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from fedlens.attribution import ChannelTaps, attribute, inputs
from fedlens.core.network import Network
from fedlens.core.rng import seeded
from fedlens.core.tree import Tree
from fedlens.models import MODELS
from test_attribution import LABELS, images, residual


@pytest.mark.parametrize("rows", [4, 1])
def test_fewer_images_at_a_time_where_memory_is_short(rows, monkeypatch):
    """A budget for so many images takes so many at a time, and gives the same maps."""
    net, weights = residual()
    x, y = images(7), LABELS[:7]
    whole = attribute("lrp", net, weights, x, y)
    seen, _ = inputs._probe(net, weights, x, True)
    monkeypatch.setattr(inputs, "CPU_BUDGET", rows * inputs.COPIES * seen.bytes)
    asked = inputs.prepare(net, weights, x, y, "true", "logit")
    assert [len(part) for _, part, _ in asked.pieces()] == ([4, 3] if rows == 4 else [1] * 7)
    torch.testing.assert_close(attribute("lrp", net, weights, x, y), whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("gigabytes", "rows"), [(16, 256), (1, 16), (0.001, 1), (999, 2048)])
def test_on_a_gpu_a_sixteenth_of_its_memory_is_taken(gigabytes, rows, monkeypatch):
    """For images that need four MiB each. Of the whole memory: the free one, and so the bits, depend on neighbours."""
    there = Tree(params=Tree(weight=SimpleNamespace(device=torch.device("cuda"))))
    card = SimpleNamespace(total_memory=int(gigabytes * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert inputs._rows(1 << 20, torch.empty(0), there) == rows


def test_megapixel_images_run_one_at_a_time(monkeypatch):
    """Two photographs of a megapixel under a budget for less than one: each alone, as if it were the only one."""
    net, weights = residual()
    x = images(2, 1000).float()
    net, weights = net.with_precision("fp32"), weights.map(Tensor.float)
    monkeypatch.setattr(inputs, "CPU_BUDGET", 1 << 20)
    passes = []
    seen = inputs.Inputs.logits
    monkeypatch.setattr(inputs.Inputs, "logits", lambda self, x: passes.append(len(x)) or seen(self, x))
    maps = attribute("gradient", net, weights, x, LABELS[:2])
    assert passes == [1, 1] and torch.equal(maps[1:], attribute("gradient", net, weights, x[1:], LABELS[1:2]))


MANY = """
import sys, torch
torch.set_num_threads(1)
from torch import nn
from fedlens.attribution import attribute, layer_saliency
from fedlens.attribution.inputs import Inputs
from fedlens.core.network import Network
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten())
        self.head = nn.Linear(16 * (SIDE // 4) ** 2, 4)
    def features(self, x): return self.body(x)
SIDE = int(sys.argv[2])
net = Network(Net())
x = torch.rand(30_000, 3, SIDE, SIDE)
used, logits = [], Inputs.logits
def look(self, images):
    used.append(next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("RssAnon")))
    return logits(self, images)
Inputs.logits = look
asked = net, net.initial_weights(), x, torch.arange(30_000) % 4
layer_saliency(*asked) if sys.argv[1] == "saliency" else attribute("lrp", *asked)
early, late = used[2:7], used[-5:]
print(len(used), sum(late) / 5 - sum(early) / 5)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is read as Linux tells it")
@pytest.mark.parametrize(("method", "side", "most"), [("saliency", 16, 10), ("lrp", 8, 18)])
def test_thirty_thousand_images_take_no_more_memory_at_the_end(method, side, most):
    """Mean of the last five pieces against an early five, in MiB.

    Saliency's results, kept piece by piece, made it 200. LRP's maps are what was asked for: 22 in all, half in between.
    What is freed is given back at once: what the allocator keeps would be counted as used, 10 to 40 MiB by chance.
    """
    line, back = [sys.executable, "-c", MANY, method, str(side)], str(1 << 16)
    honest = os.environ | {"MALLOC_MMAP_THRESHOLD_": back, "MALLOC_TRIM_THRESHOLD_": back}
    pieces, more = subprocess.run(line, capture_output=True, text=True, check=True, env=honest).stdout.split()
    assert pieces == "15" and float(more) < most


@pytest.mark.parametrize("cam", ["gradcam", "gradcam++"])
def test_sums_of_half_precision_maps_are_full(cam):
    """Against the maps that autocast makes, kept whole and summed in double precision; sums in bf16 err by 4e-3."""
    with seeded(2):
        net = Network(MODELS["pse_net"]().build(4, 3, 32), precision="bf16")
    weights = net.initial_weights()
    weights = weights.replace(params=weights.params.map(lambda leaf: leaf.requires_grad_()))
    x = images(4, 32).float()
    kept: list[Tensor] = []

    def keep(name: str, module: nn.Module, given: Tensor, out: Tensor) -> None:
        kept.append(out)
        out.retain_grad()

    with torch.enable_grad(), ChannelTaps(net, weights, cam=cam) as taps:
        found = taps.gradients(net(weights, x)[:, 0].sum())
    with torch.enable_grad(), net.replacing_outputs(keep, (nn.ReLU,)):
        net(weights, x)[:, 0].sum().backward()
    assert len(found) == 3
    for value, out in zip(found.values(), kept, strict=False):
        assert out.dtype == torch.bfloat16 and value.dtype == torch.float32 and out.grad is not None
        g, a = out.grad.double(), out.detach().double()
        if cam == "gradcam++":
            alpha = g**2 / (2 * g**2 + a.sum((2, 3), keepdim=True) * g**3)
            g = torch.where(g > 0, alpha * g, 0)
        expected = g.sum((0, 2, 3))
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
