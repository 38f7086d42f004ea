"""Recorded lanes against the sequential engine on a GPU, in float64, for every method: run on a machine with CUDA.

    python benchmarks/lanes_agree.py
    python benchmarks/lanes_agree.py --device cpu --methods fedavg scaffold

Kernels of the two paths may sum in another order, so that results agree to rounding, not to the bit; a wrong method is
off by many orders of magnitude more. The distance to the CPU is shown, not judged: fused kernels read the learning rate
as float32 on CUDA, which moves it by up to 6e-8, and some methods amplify that on these tiny clients.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import needed
from fedlens.algorithms import Scaffold
from fedlens.core.run import run
from fedlens.engines.lanes import Lanes
from fedlens.engines.sequential import Sequential
from recipes import RECIPES, UPLINKS
from small import PLAN, federation, network

TOLERANCE = 1e-9  # between engines on the GPU


def gap(a, b) -> float:
    other = dict(b.paths())
    gaps = [(leaf.cpu().double() - other[path].cpu().double()).abs() for path, leaf in a.paths() if leaf.numel()]
    return max((float(g.max()) for g in gaps), default=0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--methods", nargs="*", choices=RECIPES, metavar="METHOD", help="without it all, and uplinks")
    asked = parser.parse_args()
    needed.gpu(device := asked.device)
    torch.backends.cudnn.deterministic = True
    cases = {name: (recipe, PLAN) for name, recipe in RECIPES.items()}
    cases |= {f"scaffold, {name}": (Scaffold(), replace(PLAN, uplink=uplink)) for name, uplink in UPLINKS.items()}
    cases = {name: case for name, case in cases.items() if asked.methods is None or name in asked.methods}
    wrong = 0
    for name, (recipe, plan) in cases.items():
        found = {}
        began = time.perf_counter()
        for kind, make in {
            "cpu": lambda: Sequential(network(), federation()),
            "sequential": lambda: Sequential(network().to(device), federation().to(device)),
            "lanes": lambda: Lanes(network().to(device), federation().to(device), lanes=2),
        }.items():
            engine = make()
            net = engine.net
            state = run(recipe, net, engine, plan).state
            found[kind] = state, {i: engine.memories.get(i) for i in engine.memories}
            engine.close()
        gaps = {}
        for kind in ("cpu", "sequential"):
            pairs = [(found["lanes"][0], found[kind][0])]
            pairs += [(found["lanes"][1][i], memory) for i, memory in found[kind][1].items()]
            gaps[kind] = max(gap(a, b) for a, b in pairs)
        fine = gaps["sequential"] < TOLERANCE
        wrong += not fine
        verdict = "ok" if fine else "DIFFERS"
        print(
            f"{name:28s} lanes to sequential {gaps['sequential']:.1e}, to the CPU {gaps['cpu']:.1e}  {verdict}"
            f"  {time.perf_counter() - began:.1f} s",
            flush=True,
        )
    print(f"{len(cases) - wrong} of {len(cases)} agree")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
