"""A federation of real processes on this machine against the simulator: TLS, node authentication, three SuperNodes.

    python benchmarks/federation.py FOLDER [--methods fedavg,scaffold,fedsls,fedxds,pse,spatl]

Needs fedlens[flower]. Each method runs three rounds on the 5,000 digits, by `engine=sequential` and over Flower; the
server's states are compared bit by bit.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from fedlens.runs import RunFolder

COMMON = "data=mnist5k clients=3 cohort=3 rounds=3 local.steps=5 evaluate.personal=none picture=false device=cpu"
METHODS = {
    "fedavg": "algorithm=fedavg model=cnn2",
    "scaffold": "algorithm=scaffold model=cnn2",
    "fedsls": "algorithm=fedsls algorithm.pretrain_epochs=1 model=cnn2",
    "fedxds": "algorithm=fedxds algorithm.warmup_rounds=1 algorithm.warmup_epochs=1 model=cnn2",
    "pse": "algorithm=pse model=pse_net",
    "spatl": "algorithm=spatl algorithm.episodes=4 algorithm.later_episodes=2 model=cnn2",
}


def fedlens(*words: str) -> str:
    ended = subprocess.run([sys.executable, "-m", "fedlens", *words], capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"fedlens {' '.join(words)}\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}")
    return ended.stdout


def gap(one: RunFolder, other: RunFolder) -> float | None:
    """Largest difference of the server's states; None: the same bits."""
    states = [checkpoint.state for checkpoint in (one.load()[0], other.load()[0]) if checkpoint is not None]
    mine, theirs = (dict(state.paths()) for state in states)
    assert mine.keys() == theirs.keys()
    if all(torch.equal(leaf, theirs[path]) for path, leaf in mine.items()):
        return None
    return max(float((leaf.double() - theirs[path].double()).abs().max()) for path, leaf in mine.items())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--port", type=int, default=9292)
    asked = parser.parse_args()
    folder, wrong = asked.folder.resolve(), 0
    federation = str(folder / "federation")
    fedlens("deploy", "init", federation, *COMMON.split(), "model=cnn2", "--port", str(asked.port))
    fedlens("deploy", "certs", federation)
    try:
        fedlens("deploy", "server", federation, "--start")
        for node in range(3):
            # FedSLS and FedXDS share more than updates, which a node allows or not.
            policy = Path(federation, "nodes", str(node), "node.yaml")
            policy.write_text(policy.read_text().replace("raw_derived: false", "raw_derived: true"))
            fedlens("deploy", "node", f"{federation}/nodes/{node}", "--start")
        for method in asked.methods.split(","):
            words = f"{COMMON} {METHODS[method]}"
            began = time.time()
            fedlens("run", *words.split(), "engine=sequential", f"out={folder / 'simulated' / method}")
            simulated = time.time() - began
            settings = f"{words} out={folder / 'deployed' / method}"
            fedlens("deploy", "run", federation, "--run-config", f"settings={json.dumps(settings)}", "--stream")
            deployed = RunFolder(folder / "deployed" / method)
            found = gap(RunFolder(folder / "simulated" / method), deployed) if deployed.result() else "no result"
            wrong += found is not None
            verdict = "the same bits" if found is None else f"differs: {found}"
            print(
                f"{method:9} {verdict}; simulated {simulated:.0f} s, deployed {time.time() - began - simulated:.0f} s"
            )
            sys.stdout.flush()
    finally:
        print(fedlens("deploy", "stop", federation))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
