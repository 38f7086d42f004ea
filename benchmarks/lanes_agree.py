"""Recorded lanes against the sequential engine on a GPU, in float64, for every method: run on a machine with CUDA.

    python benchmarks/lanes_agree.py
    python benchmarks/lanes_agree.py --device cpu --methods fedavg scaffold
    python benchmarks/lanes_agree.py --part 1/3        # the first third, beside two other processes
    python benchmarks/lanes_agree.py --compile         # compiled lanes against the plain sequential engine, too

Kernels of the two paths may sum in another order, so that results agree to rounding, not to the bit; a wrong method is
off by many orders of magnitude more. The distance to the CPU is shown, not judged: fused kernels read the learning rate
as float32 on CUDA, which moves it by up to 6e-8, and some methods amplify that on these tiny clients.
"""

import argparse
import json
import sys
import time
from functools import partial
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
    parser.add_argument("--compile", action="store_true", help="compiled lanes as well")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    needed.gpu(asked.device)
    torch.backends.cudnn.deterministic = True
    cases = {name: case for name, case in CASES.items() if asked.methods is None or name in asked.methods}
    first, parts = map(int, asked.part.split("/"))
    cases = dict([*cases.items()][first - 1 :: parts])
    wrong, found = 0, {}
    for name, (recipe, plan) in cases.items():
        began = time.perf_counter()
        try:
            found[name] = gaps(recipe, plan, asked.device, asked.compile)
        except RuntimeError as error:  # of torch: the others are worth knowing, too
            wrong += 1
            found[name] = {"failed": str(error).splitlines()[0]}
            print(f"{name:28s} FAILED: {found[name]['failed']}", flush=True)
            continue
        wrong += (differs := any(found[name][how] >= TOLERANCE for how in ("lanes", "compiled") if how in found[name]))
        verdict = f"{'DIFFERS' if differs else 'ok'}  {time.perf_counter() - began:.1f} s"
        said = ", ".join(f"{how} {distance:.1e}" for how, distance in found[name].items())
        print(f"{name:28s} to sequential: {said}  {verdict}", flush=True)
        if asked.json:
            asked.json.write_text(json.dumps(found, indent=1))
    print(f"{len(cases) - wrong} of {len(cases)} agree")
    return int(wrong > 0)


def gaps(recipe, plan, device: str, compile: bool) -> dict[str, float]:
    """How far the sequential engine is from recorded lanes on the same device, from compiled ones, and from the CPU."""
    kinds = {"sequential": (Sequential, device), "lanes": (partial(Lanes, lanes=2), device)}
    if compile:
        kinds["compiled"] = kinds["lanes"]
    kinds["CPU"] = Sequential, "cpu"
    found = {}
    for kind, (make, where) in kinds.items():
        net = network().to(where)
        net.compile = kind == "compiled"
        engine = make(net, federation().to(where))
        state = run(recipe, engine.net, engine, plan).state
        found[kind] = state, {i: engine.memories.get(i) for i in engine.memories}
        engine.close()
    model, memories = found.pop("sequential")
    return {
        kind: max([gap(state, model), *(gap(kept[i], memory) for i, memory in memories.items())])
        for kind, (state, kept) in found.items()
    }


if __name__ == "__main__":
    sys.exit(main())
