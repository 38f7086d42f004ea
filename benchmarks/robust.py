"""A fifth of the clients is hostile: every robust rule against the plain mean, on Fashion-MNIST.

    python benchmarks/robust.py OUT [--seconds 280]
    python benchmarks/robust.py OUT --small               # the embedded digits and one round: a look, no measurement

A run a cell, 30 rounds each; after so many seconds it stops between two runs, and the same command goes on. At the end
the table is printed, and OUT/robust.png drawn. A run takes about half a minute on a free core.
FEDLENS_DATA names the folder of the data.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from fedlens.config import read
from fedlens.plots.style import COLOURS, pyplot, save
from fedlens.runs.folder import RunFolder
from fedlens.simulate.resume import resume
from fedlens.simulate.run import run

COMMON = (
    "data=fashion_mnist clients=50 cohort=10 rounds=30 model=cnn2 local.steps=20 local.lr=0.05 local.momentum=0.5 "
    "evaluate.every=3 evaluate.last=3 evaluate.personal=none picture=false engine=sequential device=cpu checkpoint=10"
)
SMALL = "data=mnist5k clients=10 rounds=1 local.steps=1 evaluate.every=1"
RULES = {
    "mean": "",
    "clip": "defences=clip",
    "median": "defences=median",
    "trimmed mean": "defences=trimmed_mean defences.trim=0.3",
    "Krum": "defences=krum defences.hostile=0.3",
    "multi-Krum": "defences=multikrum defences.hostile=0.3",
    "geometric median": "defences=geometric_median",
}
MIXED = "partition=dirichlet partition.alpha=0.5"
SITUATIONS = {
    "no attack": MIXED,
    "sign flip": f"{MIXED} attack=signflip",
    "backdoor": f"{MIXED} attack=backdoor attack.strength=3",
    "no attack, iid": "partition=iid",
}
CELLS = [
    (situation, rule)
    for situation in SITUATIONS
    for rule in RULES
    if situation != "no attack, iid" or rule in ("mean", "Krum", "multi-Krum")
]


def name(situation: str, rule: str) -> str:
    return f"{situation}-{rule}".replace(",", "").replace(" ", "_")


def carried_out(out: Path, situation: str, rule: str, more: str) -> None:
    folder = out / name(situation, rule)
    if (folder / "config.yaml").exists():
        resume(folder)
    else:
        words = f"{COMMON} {SITUATIONS[situation]} {RULES[rule]} {more}".split()
        run(read(words=words).with_execution(out=str(folder)))


def curve(out: Path, situation: str, rule: str, metric: str) -> list[tuple[int, float]]:
    rows = RunFolder.open(out / name(situation, rule)).metrics().to_pylist()
    return [(row["round"], row["value"]) for row in rows if row["model"] == "global" and row["metric"] == metric]


def closing(out: Path, situation: str, rule: str, metric: str = "accuracy") -> float:
    """In per cent, mean of the last three evaluations."""
    last = [value for _, value in curve(out, situation, rule, metric)][-3:]
    return 100 * sum(last) / len(last)


def table(out: Path) -> str:
    lines = [
        "| rule | no attack, iid | no attack | sign flip | backdoor: accuracy | backdoor: success |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for rule in RULES:
        shown = [(s, "accuracy") for s in ("no attack, iid", "no attack", "sign flip", "backdoor")]
        shown.append(("backdoor", "backdoor"))
        found = [f"{closing(out, s, rule, metric):.1f}" if (s, rule) in CELLS else "" for s, metric in shown]
        lines.append(f"| {rule} | {' | '.join(found)} |")
    return "\n".join(lines)


def picture(out: Path) -> Path:
    plt = pyplot()
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.6), sharex=True, sharey=True)
    panels = [(s, "accuracy") for s in ("no attack", "sign flip", "backdoor")] + [("backdoor", "backdoor")]
    for axis, (situation, metric) in zip(axes, panels, strict=True):
        for rule, colour in zip(RULES, COLOURS, strict=True):
            rounds, values = zip(*curve(out, situation, rule, metric), strict=True)
            dashes = "--" if rule == "mean" else "-"
            axis.plot(rounds, values, dashes, color=colour, label=rule, linewidth=1.6, marker="o", markersize=2.5)
        what = "accuracy" if metric == "accuracy" else "patched images taken for the target"
        axis.set(title=f"{situation}: {what}", xlabel="rounds", ylim=(0, 1))
        axis.title.set_fontsize(9.5)
    axes[0].set_ylabel("share of test images")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="lower center", ncol=len(RULES), bbox_to_anchor=(0.5, -0.09)
    )
    figure.tight_layout()
    return save(figure, out / "robust")


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("out", type=Path)
    words.add_argument("--seconds", type=float, default=280)
    words.add_argument("--small", action="store_true")
    asked = words.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    waiting = [cell for cell in CELLS if not (asked.out / name(*cell) / "result.json").exists()]
    for number, cell in enumerate(waiting):
        if time.monotonic() - began > asked.seconds:
            print(f"{len(waiting) - number} of {len(CELLS)} runs are left: the same command goes on")
            return 1
        carried_out(asked.out, *cell, SMALL if asked.small else "")
        print(f"{name(*cell)}: accuracy {closing(asked.out, *cell):.1f}", flush=True)
    print(table(asked.out))
    print(picture(asked.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
