"""What a network costs, counted by torch."""

from __future__ import annotations

import copy

import torch
from torch import nn


def describe_model(module: nn.Module, channels: int, size: int) -> dict[str, int]:
    """parameters and buffers (running statistics) in numbers; flops and macs of predicting one image."""
    from torch.utils.flop_counter import FlopCounterMode

    module = copy.deepcopy(module).eval()  # the caller's mode stays
    some = next(module.parameters())
    image = torch.zeros(1, channels, size, size, dtype=some.dtype, device=some.device)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(image)
    flops = counter.get_total_flops()  # of convolutions and matrix products, two for each multiply and add
    return {
        "parameters": sum(p.numel() for p in module.parameters()),
        "buffers": sum(b.numel() for b in module.buffers() if b.is_floating_point()),
        "flops": flops,
        "macs": flops // 2,
    }
