"""What explain says beside its picture: predictions, and maps that are too coarse to read."""

from __future__ import annotations

import pytest
import torch
from matplotlib.figure import Figure

from fedlens.attribution.figures import WRONG, predicted, write_below
from fedlens.core.network import Network
from fedlens.explain.run import coarse
from fedlens.models.resnet import ResNet18


@pytest.mark.parametrize(
    ("stem", "said"), [("stock", "grad-CAM is too coarse to read: the network tells 2 x 2"), ("cifar", "")]
)
def test_a_map_of_a_few_places_is_called_coarse(stem, said):
    net = Network(ResNet18(stem=stem).build(10, 3, 32), "fp32")
    weights, x = net.initial_weights(), torch.rand(2, 3, 32, 32)
    assert coarse("grad_cam", net, weights, x)[: len(said) or None] == said
    assert coarse("lrp", net, weights, x) == ""  # as fine as the image
    (found, first), (_, second) = predicted(net, weights, x, torch.tensor([int(net(weights, x)[0].argmax()), -1]))
    assert 0 <= found < 10 and first and not second


def test_a_wrong_prediction_has_a_cross_and_no_colour_of_the_maps():
    right, wrong = Figure().subplots(1, 2)
    for axis, is_right in ((right, True), (wrong, False)):
        write_below(axis, "taken for 3", is_right, fontsize=6)
    said, crossed = right.xaxis.label, wrong.xaxis.label
    assert said.get_text() == "taken for 3" and crossed.get_text() == "✗ taken for 3" and WRONG.startswith("✗ in bold")
    assert crossed.get_fontweight() == "bold" != said.get_fontweight() and crossed.get_color() == said.get_color()
