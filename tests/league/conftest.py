"""A league that is played in seconds."""

from __future__ import annotations

import numpy as np
import pytest

WORDS = ["model=mlp", "model.hidden=8", "clients=4", "cohort=2", "rounds=4", "local.epochs=2", "local.batch_size=8"]
PLAIN = [
    "engine=sequential",
    "device=cpu",
    "durable=false",
    "checkpoint=0",
    "evaluate.last=2",
    "evaluate.targets=[0.1]",
]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Three classes in two worlds: FedAvg under two names, with a private head, and alone."""
    folder = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    y = np.arange(140) % 3
    x = (draw.random((140, 8, 8)) * 90 + 55 * y[:, None, None]).astype(np.uint8)
    np.savez(folder / "tiny.npz", x_train=x[:100], y_train=y[:100], x_test=x[100:], y_test=y[100:])
    data = [*WORDS, *PLAIN, "data=npz", f"data.path={folder / 'tiny.npz'}"]
    return {
        "title": "A small league",
        "words": data,
        "worlds": {
            "skewed": {"kind": "skew", "words": ["partition.alpha=0.3", "partition.min_size=2"]},
            "even": {"kind": "even", "words": ["partition=iid"]},
        },
        "methods": {"fedavg": None, "twin": {"method": "fedavg"}, "fedprox": {"main": {"algorithm.mu": [0.1, 0.01]}}},
        "others": {"worlds": ["even"], "methods": {"local": None}},
        "rates": [0.03, 0.1],
        "seeds": [0, 1],
        "search": {"seed": 7, "share": 0.5},
    }
