"""One look for all figures: colours that colour-blind readers can tell apart, the same method in the same colour."""

from __future__ import annotations

import json
import textwrap
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib import resources
from pathlib import Path
from threading import Lock
from typing import Any

from . import paper

# Seven hues after Okabe and Ito, at least 3:1 against their background, as thin lines and small marks need it.
COLOURS = ("#0072B2", "#D55E00", "#1F6B3A", "#985A80", "#A79331", "#1798C8", "#1C1420")
DARK_COLOURS = ("#5B86DE", "#E06A45", "#4FDB98", "#B080A6", "#F2C022", "#A8CCFF", "#FAF4F6")  # the same, on black
# Each seven in the order of COLOURS share a dash; the empty row is that of methods that are fine-tuned afterwards, each
# in the colour of its base.
_METHODS = json.loads((resources.files("fedlens.plots") / "methods.json").read_text("utf-8"))
DASHES: tuple[tuple[int, ...], ...] = (
    *((), (7, 3), (2, 2), (7, 3, 1, 3, 1, 3), (9, 3, 2, 3), (1, 3)),
    *((14, 3), (4, 5), (5, 2, 2, 2, 2, 2)),
)
_FINE_TUNED = _METHODS.index([])
_PLACES = {name: (colour, dash) for dash, names in enumerate(_METHODS) for colour, name in enumerate(names)}
KINDS: dict[str, Any] = {".png": None, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}  # undated
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
    "pdf.fonttype": 42,  # TrueType: publishers refuse Type 3
    "ps.fonttype": 42,
}


def place_of(method: str) -> tuple[int, int]:
    """(which of COLOURS, which of DASHES) are a method's; fine-tuned ones share a dash of their own."""
    base = method.removesuffix("+ft")
    # One of the user's own has what its name gives: the same today and tomorrow, though maybe that of another.
    colour, dash = _PLACES.get(base) or (zlib.crc32(base.encode()) % len(COLOURS), 1)
    return colour, dash if base == method else _FINE_TUNED


def colour_of(method: str) -> str:
    return COLOURS[place_of(method)[0]]


def dash_of(method: str) -> Any:
    """As matplotlib's `linestyle`."""
    dashes = DASHES[place_of(method)[1]]
    return (0, dashes) if dashes else "-"


_IMPORTING = Lock()  # two threads that import parts of matplotlib could meet halves of modules


def pyplot() -> Any:
    """matplotlib without a screen, in our style."""
    with _IMPORTING:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

    plt.rcParams.update(_SETTINGS)
    return plt


def import_matplotlib() -> None:
    """Most of what drawing needs, ahead of time, in a thread; whoever draws says what is missing.

    Not pyplot: whoever chooses a backend meanwhile must not meet the half of it.
    """
    with _IMPORTING, suppress(ImportError):
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401
        import PIL.PngImagePlugin  # noqa: F401


def name_ticks(axis: Any, names: Sequence[str], fontsize: float, places: Sequence[int] | None = None) -> None:
    """Names below an axis, at `places` or 0, 1, ...; words, which need more room than numbers, slant."""
    turned = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if max(map(len, names), default=0) > 4 else {}
    axis.set_xticks(range(len(names)) if places is None else places, names, fontsize=fontsize, **turned)


def caption(figure: Any, text: str) -> None:
    """How to read a figure, below it, in as many lines as its width asks for."""
    wide, high = figure.get_size_inches()
    below = figure.get_tightbbox().y0 - 0.08
    lines = textwrap.fill(text, int(13 * wide))  # letters of this size to an inch
    figure.text(0.5, below / high, lines, ha="center", va="top", fontsize=8.5, color="#444444", gid=paper.CAPTION)


_STAMP: ContextVar[str] = ContextVar("stamp", default="")


@contextmanager
def stamped(text: str) -> Iterator[None]:
    """Every figure that is saved meanwhile says this above itself."""
    before = _STAMP.set(text)
    try:
        yield
    finally:
        _STAMP.reset(before)


def _stamp(figure: Any, text: str) -> None:
    figure.draw_without_rendering()  # what lays itself out has no place before
    figure.set_layout_engine("none")
    wide, high = figure.get_size_inches()
    above = figure.get_tightbbox().y1 + 0.08
    lines = textwrap.fill(text, int(13 * wide))
    figure.text(0.5, above / high, lines, ha="center", va="bottom", fontsize=8.5, color="#c00000", gid=paper.STAMP)


def write(figure: Any, path: Path) -> None:
    """One file, of the kind that its name says; at the width of a page where there is one."""
    import matplotlib

    with matplotlib.rc_context({name: value for name, value in _SETTINGS.items() if "fonttype" in name}):
        if page := paper.page():
            paper.write(figure, path.with_suffix(""), page, whole=True, kinds={path.suffix: None})
        else:
            figure.savefig(path)


def save(figure: Any, path: Path, *, whole: bool = False, metadata: Mapping[str, Any] = KINDS) -> Path:
    """As PNG, SVG and PDF beside each other; returns the PNG. In a paper's style, its panels too, or the `whole`."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    if text := _STAMP.get():
        _stamp(figure, text)
    figure.draw_without_rendering()
    # Laid out and measured once: doing it for each kind takes longer than drawing. "none" would leave an engine that
    # does nothing, for which matplotlib draws everything twice.
    figure.set_layout_engine(None)
    room = figure.get_tightbbox().padded(0.1)
    with matplotlib.rc_context(_SETTINGS):
        for kind, about in metadata.items():
            figure.savefig(path.with_suffix(kind), metadata=about, bbox_inches=room)
        if page := paper.page():
            paper.write(figure, path.with_suffix(""), page, whole, metadata)
    pyplot().close(figure)
    return path.with_suffix(".png")
