"""What PSE's second network and its channel gradients cost: a step of PSE against one of FedRep, in lanes.

    python benchmarks/pse_cost.py                       # on the GPU where there is one: under 40 s
    python benchmarks/pse_cost.py --device cpu --clients 2 --steps 4

The paper's network, 32 x 32 colour images, batch 10. FedRep is timed with PSE's split (`private=classifier`), half of
its epochs for the head and half for the body, so that its step is the mean of both kinds. The fastest of three series
of rounds; the first round, which records the steps, is told apart. The last column is the ratio to FedRep: at most 3.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from typing import Any

import torch

from fedlens.algorithms import PSE, FedRep
from fedlens.cli.bench import Work, parts
from fedlens.core.algorithm import Algorithm, Stage
from fedlens.core.cohort import Everyone
from fedlens.core.optimizer import Sgd
from fedlens.core.run import run
from fedlens.engines.lanes import Lanes
from fedlens.engines.process import matmuls, threads
from fedlens.models.pse_net import PseNet

METHODS = {
    "fedrep": FedRep(private="classifier", head_epochs=1),
    "pse": PSE(),
    "pse, no excitation (v1)": PSE(excite="none"),
    "pse, no exchange (v2)": PSE(attention="self"),
    "pse, gradcam++": PSE(cam="gradcam++"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50, help="of each client in an epoch; a round has two epochs")
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2, help="in each of three series")
    asked = parser.parse_args()
    gpu = asked.device.startswith("cuda")
    precision = "bf16" if gpu else "fp32"
    name = torch.cuda.get_device_name() if gpu else "CPU, 1 thread"
    print(json.dumps({"machine": name, "torch": torch.__version__, "precision": precision, **vars(asked)}), flush=True)
    work, base = Work("pse_net", PseNet(), asked.clients, asked.steps, asked.batch), 0.0
    with threads(1), matmuls(precision):
        for method, algorithm in METHODS.items():
            row = timed(work, algorithm, precision, asked.device, asked.rounds)
            base = base or row["images_per_second"]
            print(json.dumps({"method": method, **row, "over_fedrep": base / row["images_per_second"]}), flush=True)


def timed(work: Work, algorithm: Algorithm, precision: Any, device: str, repeats: int) -> dict[str, float]:
    """Of two epochs a round: FedRep needs one for the head and one for the body."""
    net, federation = parts(work, precision, device)
    engine, laps, began = Lanes(net, federation), [], time.perf_counter()

    def lap(server: Any, *_: Any) -> None:
        if (server.round - 1) % repeats == 0:
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            laps.append(time.perf_counter())

    plan = Stage(None, 1 + 3 * repeats, Everyone(), Sgd(0.01, momentum=0.5), epochs=2, size=work.batch)
    try:
        run(algorithm, net, engine, plan, observe=lap)
    finally:
        engine.close()
    best = min(after - before for before, after in pairwise(laps)) / repeats
    return {
        "images_per_second": 2 * work.images / best,
        "step_ms": 1000 * best / (2 * work.steps),  # all clients' steps side by side
        "first_round_seconds": laps[0] - began,
    }


if __name__ == "__main__":
    main()
