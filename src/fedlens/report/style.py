"""One look for all figures: colours that colour-blind readers can tell apart, the same method in the same colour."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Okabe and Ito's palette, without its yellow (too pale on white).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_SETTINGS: dict[Any, Any] = {
    "figure.dpi": 110,
    "savefig.dpi": 160,
    "savefig.bbox": "tight",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "fedlens",  # the same picture gives the same file
}


def pyplot() -> Any:
    """matplotlib without a screen, in our style."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(_SETTINGS)
    return plt


def save(figure: Any, path: Path) -> Path:
    """As PNG and SVG beside each other; returns the PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for kind in (".png", ".svg"):
        figure.savefig(path.with_suffix(kind), metadata={"Date": None} if kind == ".svg" else None)
    pyplot().close(figure)
    return path.with_suffix(".png")
