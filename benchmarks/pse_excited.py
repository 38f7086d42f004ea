"""Which share of its channels PSE excites, layer by layer, in the first steps after a download.

    python benchmarks/pse_excited.py                          # six steps of five clients: seconds on a CPU
    python benchmarks/pse_excited.py --steps 300 --clients 3 --presets default means

Fashion-MNIST, 100 clients of three classes, the first round of table 2. In the first step both extractors are equal,
so that nothing is excited. `means` is equation 3 with means in float32, which does not tell small ones from zero.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from typing import ClassVar

import torch

from fedlens import config
from fedlens.algorithms import PSE
from fedlens.core.run import run
from fedlens.core.tree import Tree
from fedlens.engines.sequential import Sequential
from fedlens.experiment import build
from fedlens.papers.pse.tables import WORDS, label_shift
from fedlens.runs.grid import merged_words

PRESETS = ("paper", "default", "means")
SHOWN = (1, 2, 3, 4, 5, 6, 10, 30, 100, 200, 300)  # steps


@dataclass(frozen=True)
class Watched(PSE):
    """PSE that notes what it excites, and how large the evidence is."""

    seen: ClassVar[list[tuple[dict[str, float], float]]] = []

    def excited(self, ours: Tree, theirs: Tree) -> Tree:
        chosen = super().excited(ours, theirs)
        largest = max(float(leaf.abs().max()) for leaf in (*ours.leaves(), *theirs.leaves()))
        self.seen.append(({layer: float(share.mean()) for layer, share in chosen.items()}, largest))
        return chosen


def main(column: str, preset: str, steps: int, clients: int) -> None:
    torch.set_num_threads(1)
    named = "pse" if preset == "default" else f"pse/{preset}"
    own = (f"algorithm={named}", "rounds=1", f"cohort={clients}", f"local.steps={steps}", "device=cpu")
    words = [word for word in (*WORDS, *label_shift()[column].words, *own) if not word.startswith("local.epochs")]
    experiment = config.read(None, [*merged_words(words).values()]).resolved()
    method = experiment.algorithm
    watched = Watched(**{each.name: getattr(method, each.name) for each in fields(method)})
    net, federation = build(experiment)
    Watched.seen.clear()
    run(watched, net, Sequential(net, federation), experiment.plan, seed=experiment.seed)
    print(f"{named}, {column}, {clients} clients; largest |evidence| {max(size for _, size in Watched.seen):.2g}")
    for step in (step for step in SHOWN if step <= steps):
        found = [Watched.seen[client * steps + step - 1][0] for client in range(clients)]
        shares = {layer: 100 * sum(one[layer] for one in found) / clients for layer in found[0]}
        print(f"step {step:3d}  ", "  ".join(f"{layer} {share:4.1f} %" for layer, share in shares.items()), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--column", default="fashion_mnist/3", choices=[*label_shift()])
    parser.add_argument("--presets", nargs="+", default=PRESETS, choices=PRESETS)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--clients", type=int, default=5)
    asked = parser.parse_args()
    for preset in asked.presets:
        main(asked.column, preset, asked.steps, asked.clients)
