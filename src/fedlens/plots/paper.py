"""Figures at the width of a column: one panel a file, no text below 7 points, captions beside the picture."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import BadInput

STYLES = ("screen", "paper")
LEAST, USUAL = 7.0, 8.0  # points of the smallest text, and of titles
_UNITS = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72.27}  # TeX's points, as \\the\\columnwidth says them
CAPTION, STAMP = "caption", "stamp"  # marks of texts that are no part of a panel


@dataclass
class Page:
    """The width that figures have now, and what was written at it."""

    width: float  # inches
    written: list[Path] = field(default_factory=list)


_PAGE: ContextVar[Page | None] = ContextVar("page", default=None)


def inches(text: str) -> float:
    """3.3in, 84mm, 8.4cm or 240pt; refuses what is no width of a page."""
    found = re.fullmatch(r"\s*(\d+\.?\d*)\s*(in|cm|mm|pt)\s*", text)
    width = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 1 <= width <= 20:
        raise BadInput(f"--width is {text!r}, but it should be from 1in to 20in, such as 3.3in, 84mm or 240pt")
    return width


@contextmanager
def printed(width: float) -> Iterator[list[Path]]:
    """Every figure that is saved meanwhile is also written at this width, a panel a file; the list fills with them."""
    page = Page(width)
    before = _PAGE.set(page)
    try:
        yield page.written
    finally:
        _PAGE.reset(before)


@contextmanager
def screen() -> Iterator[None]:
    """Figures that are saved meanwhile are for the screen alone."""
    before = _PAGE.set(None)
    try:
        yield
    finally:
        _PAGE.reset(before)


def page() -> Page | None:
    return _PAGE.get()


def write(figure: Any, path: Path, page: Page, whole: bool, kinds: Mapping[str, Any]) -> None:
    """NAME-PANEL for each panel of several, else NAME; what was said below the figure goes to NAME.txt."""
    axes = [axis for axis in figure.axes if axis.get_visible()]
    said = [text.get_text() for text in figure.texts if text.get_gid() == CAPTION]
    title = figure.get_suptitle()
    for text in figure.texts:
        text.set_visible(False)
    stamps = [text.get_text() for text in figure.texts if text.get_gid() == STAMP]
    figure.suptitle("\n".join(stamps), fontsize=LEAST, color="#c00000") if stamps else figure.suptitle("")
    shapes, labels = {axis: _shape(axis) for axis in axes}, {axis: _labels(axis, axes) for axis in axes}
    scales = {axis: min(1.0, page.width / (axis.get_window_extent().width / figure.dpi + 0.6)) for axis in axes}
    common = [_entries(legend) for legend in figure.legends]
    for legend in list(figure.legends):
        legend.remove()
    for number, panel in enumerate([axes] if whole else [[axis] for axis in axes], 1):
        called = re.sub(r"[^\w.-]+", "-", str(panel[0].get_label())).strip("-") or number
        name = path.name if whole or len(axes) == 1 else f"{path.name}-{called}"
        for axis in axes:
            axis.set_visible(axis in panel)
            axis.set_in_layout(axis in panel)
        if not whole:
            _alone(figure, panel[0], labels[panel[0]])
        was, high = figure.get_size_inches(), page.width * shapes[panel[0]]
        is_grid = whole and any(axis.images for axis in panel)
        if is_grid:  # squares leave room over, which is cut off
            high = 1.6 * page.width * was[1] / was[0] + 1
        elif whole:
            high = was[1] * 0.8
        # What is in a grid moves together.
        figure.set_layout_engine("compressed" if is_grid else "constrained", w_pad=0.02, h_pad=0.02, wspace=0, hspace=0)
        _fit(figure, panel, (page.width, high), scales[panel[0]], common)
        frame = _frame(figure, page.width)
        figure.set_layout_engine("none")
        for kind, metadata in kinds.items():
            figure.savefig(path.with_name(f"{name}{kind}"), metadata=metadata, bbox_inches=frame)
        page.written.append(path.with_name(f"{name}{next(iter(kinds))}"))
    if told := " ".join([*([title] if title else []), *said]).split():
        path.with_name(f"{path.name}.txt").write_text(" ".join(told) + "\n", "utf-8")


def _shape(axis: Any) -> float:
    """Height over width, between that of a strip and a square."""
    box = axis.get_window_extent()
    return min(max(box.height / max(box.width, 1) + 0.05, 0.6), 1.1)


def _alone(figure: Any, axis: Any, labels: tuple[str, str]) -> None:
    """This panel in the whole of the figure, with the labels that it shared with its neighbours."""
    axis.set_subplotspec(figure.add_gridspec(1, 1)[0])
    axis.set(xlabel=labels[0], ylabel=labels[1])
    axis.tick_params(labelbottom=True, labelleft=True)


def _labels(axis: Any, axes: Sequence[Any]) -> tuple[str, str]:
    """Below and beside a panel: its own, or those of a panel that is drawn over the same range in line with it."""
    found = []
    for way in "xy":
        read = [getattr(one, f"get_{way}label")() for one in (axis, *(o for o in axes if _alike(axis, o, way)))]
        found.append(next((text for text in read if text), ""))
    return found[0], found[1]


def _alike(axis: Any, other: Any, direction: str) -> bool:
    """Whether one of two panels may have the labels of both: below or beside each other, over the same range."""
    a, b = axis.get_position(original=True), other.get_position(original=True)
    same_place = abs(a.x0 - b.x0) < 0.01 if direction == "x" else abs(a.y0 - b.y0) < 0.01
    return same_place and getattr(axis, f"get_{direction}lim")() == getattr(other, f"get_{direction}lim")()


def _fit(
    figure: Any, panel: Sequence[Any], size: tuple[float, float], scale: float, common: Sequence[dict[str, Any]]
) -> None:
    """Text, lines, bubbles, ticks and legend for this size; bubbles by `scale`."""
    from matplotlib.text import Text

    figure.set_size_inches(*size)
    entries = [_entries(axis.get_legend()) for axis in panel if axis.get_legend()] or [_drawn(panel, common)]
    for axis in panel:
        if axis.get_legend():
            axis.get_legend().remove()
        axis.tick_params(labelsize=LEAST)
        for line in axis.lines:
            line.set(linewidth=min(line.get_linewidth(), 1.3), markersize=min(line.get_markersize(), 4))
        for dots in (*axis.collections, *entries[0].values()):
            if hasattr(dots, "set_sizes"):
                dots.set_sizes(dots.get_sizes() * scale**2)
    for text in figure.findobj(Text):
        text.set_fontsize(min(max(text.get_fontsize(), LEAST), USUAL))
    _legend(figure, entries[0], size[0])
    figure.draw_without_rendering()
    for axis in panel:
        box, edge = axis.get_window_extent(), figure.bbox.width
        room = box.width if len(panel) > 1 else edge
        _wrap(axis._left_title, room if len(panel) > 1 else edge - box.x0)
        for text in (axis.title, axis.xaxis.label):
            _wrap(text, room)
        _wrap(axis.yaxis.label, box.height if axis.yaxis.label.get_rotation() else room)
        _thin(axis)
    _wrap(figure._suptitle, figure.bbox.width)
    figure.draw_without_rendering()
    if any(axis.title.get_window_extent().width > axis.get_window_extent().width * 1.05 for axis in panel[1:]):
        for axis in panel:  # a word is wider than its column
            axis.title.set_rotation(90)


def _entries(legend: Any) -> dict[str, Any]:
    return {t.get_text(): h for t, h in zip(legend.get_texts(), legend.legend_handles, strict=True)}


def _drawn(panel: Sequence[Any], common: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of a legend of the whole figure, what is drawn in this panel."""
    known = {name for axis in panel for name in axis.get_legend_handles_labels()[1]}
    entries = common[0] if common else {}
    return {name: handle for name, handle in entries.items() if name in known} or entries


def _legend(figure: Any, entries: dict[str, Any], width: float) -> None:
    """Above the panel, in as few rows as there is room for, and these as equal as they can be."""
    for legend in list(figure.legends):
        legend.remove()
    if not entries:
        return
    from matplotlib.lines import Line2D

    for handle in entries.values():
        if isinstance(handle, Line2D):
            handle.set_linewidth(min(handle.get_linewidth(), 1.3))
    wide = 0.07 * max(map(len, entries)) + 0.45  # inches of an entry, by letters of this size
    rows = math.ceil(len(entries) / max(1, min(len(entries), int(width / wide))))
    figure.legend(
        entries.values(),
        entries.keys(),
        loc="outside upper center",
        ncols=math.ceil(len(entries) / rows),
        fontsize=LEAST,
        handlelength=3.2,
        columnspacing=1.0,
        borderpad=0.1 + _tallest(entries.values()) / 2 / LEAST,
        labelspacing=0.3,
    )


def _tallest(handles: Iterable[Any]) -> float:
    """Points of the largest bubble of a legend."""
    return max((float(max(h.get_sizes())) ** 0.5 for h in handles if hasattr(h, "get_sizes")), default=0.0)


def _wrap(text: Any, room: float) -> None:
    """In as many lines as its room asks for; words stay whole."""
    if text is None or not (said := text.get_text()):
        return
    box = text.get_window_extent()
    if (long := max(box.width, box.height)) > room:
        letters = max(6, int(max(map(len, said.split("\n"))) * room / long))
        joined = said.replace(" %", "\u00a0%")  # a number keeps its unit
        lines = [textwrap.fill(line, letters, break_long_words=False) for line in joined.split("\n")]
        text.set_text("\n".join(lines))


def _thin(axis: Any) -> None:
    """Names of ticks that would cover each other: every second, third ... stays."""
    from matplotlib.ticker import FixedLocator

    labels = axis.get_xticklabels()
    if len(labels) < 2 or not isinstance(axis.xaxis.get_major_locator(), FixedLocator):
        return
    high = axis.figure.dpi * LEAST / 72
    each = max(1.3 * high if label.get_rotation() else label.get_window_extent().width + high / 2 for label in labels)
    every = max(1, math.ceil(each * len(labels) / axis.get_window_extent().width))
    axis.set_xticklabels([label.get_text() if at % every == 0 else "" for at, label in enumerate(labels)])


def _frame(figure: Any, width: float) -> Any:
    """A page of exactly this width; what reaches over the edge of the figure gets room from the panel."""
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()
    box = figure.get_tightbbox()
    for _ in range(2):
        over = max(box.x1, figure.get_figwidth()) - min(box.x0, 0) - width
        if over <= 0.01:
            break
        figure.set_figwidth(max(figure.get_figwidth() - over, width / 3))
        figure.draw_without_rendering()
        box = figure.get_tightbbox()
    low = min(box.x0, 0) if box.x1 - min(box.x0, 0) >= width else (box.x0 + box.x1 - width) / 2
    return Bbox.from_extents(low, box.y0 - 0.02, low + width, box.y1 + 0.02)
