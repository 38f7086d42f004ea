"""A split as a picture: classes by client, sizes, and images of some clients."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import BadInput
from ..core.files import open_regular
from ..data import Images, Names, Split, class_counts, skew
from ..data.client_names import short
from ..plots import paper, style
from ..plots.style import COLOURS, name_ticks

_MARK = "FedLens, data show"  # in the files themselves
_MARKS = {
    ".png": {"Software": _MARK},
    ".svg": {"Creator": _MARK, "Date": None},
    ".pdf": {"Creator": _MARK, "CreationDate": None},
}
_PANELS = ("classes", "sizes", "images")  # files of their own in a paper's style
_ENDS = 2**16  # bytes at both ends of a file, where its mark stands
DRAWN = 100  # clients at most; more bubbles than that tell nothing


def draw_split(images: Images, split: Split, path: str | Path) -> list[Path]:
    """The split as PNG, SVG and PDF: classes by client as bubbles, a histogram of sizes, and images of some clients."""
    from matplotlib.figure import Figure

    domains = domain_of_clients(images, split)
    firsts = np.unique(domains, return_index=True)[1]
    clients = firsts if len(firsts) > 1 else np.arange(min(len(split), 5))
    counts = class_counts(split, images)
    names = Names.of(images, split)
    shown = "images of some clients" if len(firsts) == 1 else "images of a client of each domain"

    def samples(grid: Any) -> None:
        _draw_samples(grid, clients, domains, images, split, names)

    figure = Figure(figsize=(12, 5.3 + 0.95 * len(clients)), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(4.9, 0.4 + 0.95 * len(clients)), hspace=0.03)
    bubbles, histogram = parts[0].subplots(1, 2, gridspec_kw={"width_ratios": (3, 1)})
    _draw_bubbles(bubbles, counts, domains, names)
    _draw_sizes(histogram, counts.sum(1))
    parts[1].suptitle(shown, fontsize=11)
    samples(parts[1].subplots(len(clients), 14, squeeze=False))
    measured = skew(split, images)
    figure.suptitle(
        f"{images.name}, {len(split):,} client{'s' * (len(split) > 1)}: {measured.classes:.1f} classes each, "
        f"label entropy {measured.label_entropy:.2f} bits, distance to the whole {measured.distance:.2f}, "
        f"Gini of sizes {measured.size_gini:.2f}"
    )
    path = Path(path).with_suffix(".png")
    with paper.screen():
        written = [style.save(figure, path, metadata=_MARKS).with_suffix(ending) for ending in (".png", ".svg")]
    if paper.page():
        one, two = (Figure(figsize=(6, 4)) for _ in range(2))
        _draw_bubbles(one.subplots(), counts, domains, names)
        _draw_sizes(two.subplots(), counts.sum(1))
        few = Figure(figsize=(6, 0.95 * len(clients)))
        samples(few.subplots(len(clients), 6, squeeze=False))
        for name, panel in zip(_PANELS, (one, two, few), strict=True):
            style.save(panel, path.with_name(f"{path.stem}-{name}.png"), whole=panel is few, metadata=_MARKS)
    return written


def check_place(path: str | Path, panels: bool = False) -> None:
    """Refuses a place where something else lies than an earlier picture of a split; `panels`: each a file, too."""
    path = Path(path).with_suffix("")
    names = [path.name, *(f"{path.name}-{panel}" for panel in _PANELS if panels)]
    for file in (path.with_name(f"{name}{ending}") for name in names for ending in _MARKS):
        if os.path.lexists(file) and not _is_ours(file):
            raise BadInput(f"{file} is there already, and is no picture of a split; name another place by --out")


def _is_ours(file: Path) -> bool:
    try:
        with open_regular(file) as opened:
            first, size = opened.read(_ENDS), os.fstat(opened.fileno()).st_size
            opened.seek(max(size - _ENDS, 0))
            return _MARK.encode() in first + opened.read(_ENDS)
    except (OSError, ValueError):
        return False


def domain_of_clients(images: Images, split: Split) -> np.ndarray:
    """The commonest domain of each client's examples; zero where there are none."""
    if images.domains is None:
        return np.zeros(len(split), int)
    domains = images.domains.numpy()
    return np.array([np.bincount(domains[shard]).argmax() for shard in split.train])


def _draw_bubbles(axes: Any, counts: np.ndarray, domains: np.ndarray, names: Names) -> None:
    clients = np.arange(0, len(counts), -(-len(counts) // DRAWN))
    column, label = np.nonzero(counts[clients])
    drawn, largest = counts[clients][column, label], counts[clients].max()
    # The axes are about 560 x 270 points; the largest bubble fills its cell, but stays large enough to be seen.
    widest = float(np.clip(min(560 / len(clients), 270 / len(names.classes)), 9, 30))
    colours = np.array(COLOURS)[domains[clients][column] % len(COLOURS)]
    axes.scatter(column, label, s=np.maximum(drawn / largest * widest**2, 0.6), c=colours, alpha=0.8, linewidths=0)
    for share in (1, 0.1):
        examples = max(1, round(largest * share))
        axes.scatter([], [], s=share * widest**2, c="0.45", linewidths=0, label=f"{examples:,} examples")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=9, borderaxespad=0.2)
    some = "" if len(clients) == len(counts) else f" ({len(clients)} of {len(counts):,} drawn)"
    axes.set_title("examples per class and client", loc="left")
    axes.set(xlabel=f"client{some}", xlim=(-0.8, len(clients) - 0.2), ylim=(len(names.classes) - 0.3, -0.7))
    ticks = np.arange(0, len(clients), -(-len(clients) // 20))
    name_ticks(axes, [names.tick(client) for client in clients[ticks]], 10, ticks.tolist())
    every = -(-len(names.classes) // 25)
    shown = range(0, len(names.classes), every)
    axes.set_yticks(shown, [short(names.label(number), 18) for number in shown], fontsize=9 if every == 1 else 7)
    axes.grid(True, color="0.92", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_sizes(axes: Any, sizes: np.ndarray) -> None:
    axes.hist(sizes, bins=np.linspace(0, sizes.max() * 1.2, 25), color=COLOURS[0])
    axes.axvline(sizes.mean(), color=COLOURS[1], linewidth=1.5)
    axes.set_title(f"clients by size, mean {sizes.mean():,.0f}", loc="left")
    axes.set(xlabel="training examples", ylabel="clients", xlim=(0, sizes.max() * 1.2))
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.xaxis.get_major_locator().set_params(nbins=4)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_samples(
    grid: Any, clients: np.ndarray, domains: np.ndarray, images: Images, split: Split, names: Names
) -> None:
    """A row of images for each of these clients, spread over the classes that it holds."""
    y = images.y.numpy()
    for client, row in zip(clients, grid, strict=True):
        shard = split.train[client]
        shard = shard[np.argsort(y[shard], kind="stable")]
        chosen = shard[np.unique(np.linspace(0, len(shard) - 1, min(len(row), len(shard))).astype(int))]
        for axes in row:
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        for axes, index in zip(row, chosen, strict=False):
            pixels = (images.pictures(int(index)) * 255).round().byte().numpy().transpose(1, 2, 0)
            axes.imshow(pixels if pixels.shape[2] == 3 else pixels[:, :, 0], cmap="gray", vmin=0, vmax=255)
            axes.set_xlabel(short(images.classes[y[index]], 14), fontsize=7, labelpad=2)
        level = {"rotation": 0, "ha": "right", "va": "center"}  # a name is longer than an image is high
        row[0].set_ylabel(names.title(client), fontsize=9, color=COLOURS[domains[client] % len(COLOURS)], **level)
