"""What compile=auto decides for short and long runs, how long it looks, and what compiling takes the second time.

    python benchmarks/compile_rule.py --json rule.json
    python benchmarks/compile_rule.py --device cpu --quick      # decisions without a compiler

Each process decides once for every number of rounds, the shortest run first; a second process finds the measurements
and the compiler's cache, and trains a few compiled rounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import needed
from fedlens import config, run
from fedlens.core.files import write_atomic
from fedlens.engines import compiling
from fedlens.simulate.run import checked
from fedlens.simulate.settle import settled

ROUNDS = (20, 2_000, 200_000)
WORDS = ("data=mnist5k", "cohort=10", "picture=false", "evaluate.every=0", "evaluate.personal=none")


def decisions(model: str, device: str) -> list[dict[str, object]]:
    found = []
    for rounds in ROUNDS:
        experiment = config.read(None, [*WORDS, f"model={model}", f"rounds={rounds}", f"device={device}"]).resolved()
        ready = checked(experiment)
        open_still = experiment.with_execution(compile="auto")
        began = time.perf_counter()
        if device == "cpu":  # the rule, with numbers of the H200 in place of a device's
            pace = {False: (0.55e-3, 1.0), True: (0.4e-3, 19.0)}
            with tempfile.TemporaryDirectory() as folder:
                on, said = compiling.decide(Path(folder) / "net.json", 40.0 * rounds, pace.__getitem__)
        else:
            decided, (said,) = settled(open_still, ready.net, ready.federation)
            on = decided.execution.compile is True
        row = {"model": model, "rounds": rounds, "on": on, "said": said, "seconds": time.perf_counter() - began}
        if device == "cuda":  # seconds of a step, plain and compiled, and of compiling without and with the cache
            size = experiment.local.batch_size
            row |= asdict(compiling.read(compiling.store(ready.net, ready.federation, size, device)))
        print(f"{model}, {rounds:,} rounds: {said} ({row['seconds']:.1f} s)", flush=True)
        found.append(row)
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options.add_argument("--models", nargs="*", default=["resnet18", "cnn", "resnet8"])
    options.add_argument("--quick", action="store_true", help="one small network")
    options.add_argument("--again", action="store_true", help="as the second process does")
    options.add_argument("--json", type=Path)
    asked = options.parse_args()
    needed.gpu(asked.device)
    rows = []
    for model in ["cnn_small"] if asked.quick else asked.models:
        rows += decisions(model, asked.device)
        if asked.json:
            write_atomic(asked.json, json.dumps(rows, indent=1).encode())
    if asked.again:
        with tempfile.TemporaryDirectory() as out:
            began = time.perf_counter()
            words = [*WORDS, f"model={asked.models[0]}", "rounds=3", "compile=true", f"device={asked.device}"]
            run(config.read(None, [*words, f"out={out}/run"]))
            print(f"three compiled rounds of {asked.models[0]}: {time.perf_counter() - began:.1f} s", flush=True)
    elif asked.device == "cuda":
        second = asked.json.with_suffix(".again.json") if asked.json else None
        more = ["--json", str(second)] if second else []
        subprocess.run([sys.executable, __file__, "--again", "--models", *asked.models, *more], check=True)


if __name__ == "__main__":
    main()
