"""Draws docs/images/concepts.png: one round, who owns what, and what watches."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

SERVER, CLIENT, WATCH, ENGINE = "#dbe9f6", "#e4f2e0", "#fdf0d5", "#eeeeee"


def box(axes, x, y, width, height, colour, title, lines=()):
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.12", fc=colour, ec="#56606e")
    )
    axes.text(x + width / 2, y + height - 0.24, title, ha="center", va="center", fontsize=11, weight="bold")
    for at, line in enumerate(lines):
        axes.text(x + width / 2, y + height - 0.58 - 0.3 * at, line, ha="center", va="center", fontsize=9.5)


def arrow(axes, start, end, text="", at=(0, 0), align="center"):
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=15, lw=1.6, color="#2f3b4a"))
    middle = ((start[0] + end[0]) / 2 + at[0], (start[1] + end[1]) / 2 + at[1])
    axes.text(*middle, text, ha=align, va="center", fontsize=9.5, color="#2f3b4a")


def main() -> None:
    figure, axes = plt.subplots(figsize=(11, 6.6))
    axes.set(xlim=(0, 11), ylim=(0, 6.6))
    axes.axis("off")
    box(axes, 0.3, 4.75, 6.9, 1.6, SERVER, "server", ["state: the model, and what the method keeps (a Tree)"])
    axes.text(1.65, 5.05, "broadcast(server)", ha="center", family="monospace", fontsize=10)
    axes.text(5.55, 5.05, "aggregate(server, uploads)", ha="center", family="monospace", fontsize=10)
    for at, (x, title) in enumerate(((0.3, "client 0"), (2.65, "client 1"), (5.0, "client k"))):
        box(axes, x, 1.55, 2.2, 1.95, CLIENT, title, ["own images and tests", "memory (a Tree)"])
        axes.text(x + 1.1, 2.1, "begin · step* · finish", ha="center", family="monospace", fontsize=8)
        axes.text(x + 1.1, 1.78, "loss ⊂ gradient ⊂ step", ha="center", fontsize=8.5, color="#56606e")
        if at < 2:
            arrow(axes, (x + 0.55, 4.7), (x + 0.55, 3.55), "download" if not at else "", (0.08, 0), "left")
            arrow(axes, (x + 1.75, 3.55), (x + 1.75, 4.7))
        else:
            arrow(axes, (x + 0.45, 4.7), (x + 0.45, 3.55))
            arrow(
                axes,
                (x + 0.95, 3.55),
                (x + 0.95, 4.7),
                "upload, through\nuplink, policy\nand defences",
                (0.1, 0),
                "left",
            )
    box(axes, 0.3, 0.3, 6.9, 0.95, ENGINE, "engine: runs the clients' hooks, wherever they are")
    axes.text(3.75, 0.62, "sequential · workers · lanes (GPU) · ray · Flower nodes", ha="center", fontsize=9.5)
    watched = ("evaluation: global, personal", "ledger: bytes that cross", "checkpoints: exact resume")
    box(axes, 7.75, 3.75, 2.95, 2.6, WATCH, "observers", [*watched, "privacy account", "trackers: TensorBoard, ..."])
    files = ("config, split, passport", "metrics, bytes (Parquet)", "")
    uses = ("report · compare · diff", "explain · audit · resume", "clients · time · ui")
    box(axes, 7.75, 0.3, 2.95, 2.55, WATCH, "the run's folder", [*files, *uses])
    arrow(axes, (7.22, 5.5), (7.72, 5.5))
    arrow(axes, (9.2, 3.7), (9.2, 2.9))
    figure.savefig(Path(__file__).parent / "images" / "concepts.png", dpi=130, bbox_inches="tight", facecolor="white")


if __name__ == "__main__":
    main()
