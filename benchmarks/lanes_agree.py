"""Recorded lanes against the sequential engine on a GPU, in float64, for every method: run on a machine with CUDA.

    python benchmarks/lanes_agree.py
    python benchmarks/lanes_agree.py --device cpu --methods fedavg scaffold
    python benchmarks/lanes_agree.py --part 1/3        # the first third, beside two other processes

Kernels of the two paths may sum in another order, so that results agree to rounding, not to the bit; a wrong method is
off by many orders of magnitude more. The distance to the CPU is shown, not judged: fused kernels read the learning rate
as float32 on CUDA, which moves it by up to 6e-8, and some methods amplify that on these tiny clients.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import needed
from fedlens.core.run import run
from fedlens.engines.lanes import Lanes
from fedlens.engines.sequential import Sequential
from recipes import CASES
from small import federation, network

TOLERANCE = 1e-9  # between engines on the GPU


def gap(a, b) -> float:
    other = dict(b.paths())
    gaps = [(leaf.cpu().double() - other[path].cpu().double()).abs() for path, leaf in a.paths() if leaf.numel()]
    return max((float(g.max()) for g in gaps), default=0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--methods", nargs="*", choices=CASES, metavar="METHOD", help="without it all, and uplinks")
    parser.add_argument("--part", default="1/1", help="such as 1/3: every third case, from the first on")
    asked = parser.parse_args()
    needed.gpu(asked.device)
    torch.backends.cudnn.deterministic = True
    cases = {name: case for name, case in CASES.items() if asked.methods is None or name in asked.methods}
    first, parts = map(int, asked.part.split("/"))
    cases = dict([*cases.items()][first - 1 :: parts])
    wrong = 0
    for name, (recipe, plan) in cases.items():
        began = time.perf_counter()
        try:
            to_sequential, to_cpu = gaps(recipe, plan, asked.device)
        except RuntimeError as error:  # of torch: the others are worth knowing, too
            wrong += 1
            print(f"{name:28s} FAILED: {str(error).splitlines()[0]}", flush=True)
            continue
        wrong += (differs := to_sequential >= TOLERANCE)
        verdict = f"{'DIFFERS' if differs else 'ok'}  {time.perf_counter() - began:.1f} s"
        print(f"{name:28s} lanes to sequential {to_sequential:.1e}, to the CPU {to_cpu:.1e}  {verdict}", flush=True)
    print(f"{len(cases) - wrong} of {len(cases)} agree")
    return int(wrong > 0)


def gaps(recipe, plan, device: str) -> tuple[float, float]:
    """How far recorded lanes are from the sequential engine on the same device, and from the CPU."""
    found = {}
    for kind, make in {
        "cpu": lambda: Sequential(network(), federation()),
        "sequential": lambda: Sequential(network().to(device), federation().to(device)),
        "lanes": lambda: Lanes(network().to(device), federation().to(device), lanes=2),
    }.items():
        engine = make()
        state = run(recipe, engine.net, engine, plan).state
        found[kind] = state, {i: engine.memories.get(i) for i in engine.memories}
        engine.close()
    model, memories = found["lanes"]
    return tuple(
        max([gap(model, state), *(gap(memories[i], memory) for i, memory in kept.items())])
        for state, kept in (found["sequential"], found["cpu"])
    )  # type: ignore[return-value]


if __name__ == "__main__":
    sys.exit(main())
