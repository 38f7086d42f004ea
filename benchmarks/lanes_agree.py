"""Recorded lanes against the sequential engine on a GPU, in float64, for every method: run on a machine with CUDA.

    python benchmarks/lanes_agree.py
    python benchmarks/lanes_agree.py --device cpu --methods fedavg scaffold
    python benchmarks/lanes_agree.py --part 1/3        # the first third, beside two other processes
    python benchmarks/lanes_agree.py --compile         # compiled lanes against the plain sequential engine, too
    python benchmarks/lanes_agree.py --json FILE --minutes 8    # the same command goes on where it stopped

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
from fedlens.core.files import write_atomic
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
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no case after these")
    asked = parser.parse_args()
    until = time.monotonic() + 60 * asked.minutes
    needed.gpu(asked.device)
    torch.backends.cudnn.deterministic = True
    cases = {name: case for name, case in CASES.items() if asked.methods is None or name in asked.methods}
    first, parts = map(int, asked.part.split("/"))
    cases = dict([*cases.items()][first - 1 :: parts])
    found = json.loads(asked.json.read_text()) if asked.json and asked.json.is_file() else {}
    wanted = ("lanes", "compiled") if asked.compile else ("lanes",)
    known = {name for name in found if all(how in found[name] for how in wanted)}
    for name, (recipe, plan) in cases.items():
        if name in known or time.monotonic() > until:
            continue
        began = time.perf_counter()
        try:
            found[name] = gaps(recipe, plan, asked.device, asked.compile)
        except Exception as error:  # of torch or its compiler: the others are worth knowing, too
            found[name] = {"failed": (str(error).splitlines() or [type(error).__name__])[0]}
        verdict = f"{'ok' if agrees(found[name]) else 'DIFFERS'}  {time.perf_counter() - began:.1f} s"
        said = ", ".join(f"{how} {gap if how == 'failed' else f'{gap:.1e}'}" for how, gap in found[name].items())
        print(f"{name:28s} to sequential: {said}  {verdict}", flush=True)
        if asked.json:
            write_atomic(asked.json, json.dumps(found, indent=1).encode())
    mine = {name: found[name] for name in cases if name in found}
    left = f", {len(cases) - len(mine)} not looked at" if len(mine) < len(cases) else ""
    print(f"{sum(map(agrees, mine.values()))} of {len(cases)} agree{left}")
    return int(not all(map(agrees, mine.values())))


def agrees(gaps: dict) -> bool:
    """NaN is no agreement."""
    return "failed" not in gaps and all(gaps[how] < TOLERANCE for how in ("lanes", "compiled") if how in gaps)


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
