"""Quick mode: a table or a figure on a few real images, to see what it looks like and that it works here.

No number of it says anything about a paper, and none of a paper's stands beside one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import config
from ..core.errors import BadInput
from ..data import DATASETS
from ..data.sources.modalities import find_photographs
from ..runs.grid import Grid, merged_words

DIGITS = "mnist5k"  # in place of data that are not here
TRAIN, TEST = 240, 120  # images
CLASSES = 20  # the first ones, where there are more
SIDE = 32  # pixels at most; half of it where a network is deep
CELLS = 26  # of a table, at most
_COSTLY = "algorithm.cam=scorecam"  # a pass for each channel of every image
ROUNDS = 3
TARGET = 0.12  # accuracy
SAID = (
    f"Quick mode: {TRAIN} training images ({DIGITS} in place of data that are not here), a few clients, {ROUNDS} "
    "rounds. It shows what this looks like, not what is true."
)
_PLACED = ("engine=sequential", "picture=false", "checkpoint=0")
_SMALL_NETWORKS = {"resnet20": "resnet20", "resnet32": "resnet32", "resnet56": "resnet32", "pse_net": "pse_net"}
_EPOCHS = {"cnn2": 3, "pse_net": 2}  # one of the others; FedRep's head wants one of its own
# Preparations and searches cut short, method by method; of a key that a row varies, the row's own value made smaller.
_METHODS: dict[str, dict[str, str]] = {
    "fedxds": {"warmup_rounds": "1", "warmup_epochs": "1"},
    "fedsls": {"pretrain_epochs": "1"},
    "fedfed": {"distil_rounds": "1", "width": "8", "latent": "64", "mosaics": "4"},
    "fedftg": {"iterations": "1", "student_steps": "1", "batch": "16", "width": "16"},
    "fedgen": {"steps": "2", "batch": "16"},
    "feddf": {"steps": "4", "batch": "16", "validation": "50", "check_every": "2"},
    "fedaux": {"pretrain_steps": "4", "pretrain_batch": "16", "steps": "4", "batch": "16"},
    "spatl": {"episodes": "4", "later_episodes": "4", "adapt_epochs": "1"},
}
_VARIED: dict[str, Callable[[Any], Any]] = {
    "warmup_rounds": lambda rounds: 1 + rounds // 5,
    "recompute_every": lambda rounds: min(rounds, 1),
    "pretrain_epochs": lambda epochs: min(epochs, 1),
}


def reduced(grid: Grid, out: Path, *, write: bool = True) -> Grid:
    """The same table in quick mode: smaller runs, without the paper's numbers; `write`: their images, too."""
    titles = {}
    for name, column in grid.columns.items():
        now = _settings((*grid.words, *column.words))
        titles[name] = titled(name, now.get("data.base") or now.get("data", DIGITS), _source(now))
        if name.partition("-")[0] == now.get("model") != _small(now):  # columns that are named after their network
            titles[name] = titles[name].replace("(here ", f"(here {_small(now)}, ")
    about, notes = f"{grid.about} (quick mode)", (SAID, *grid.notes)
    to_targets = grid.measured.startswith("rounds to ")
    measured = f"rounds to {100 * TARGET:g} %" if to_targets else grid.measured
    said = {"about": about, "notes": notes, "titles": titles, "measured": measured}
    return replace(grid, paper={}, smaller=partial(shrunk, out=out, write=write), **said)


@contextmanager
def taken_back(out: Path, quick: bool) -> Iterator[None]:
    """In quick mode, images that were written for what is then refused go again, where nothing was made of them."""
    folder, before = out / "data", {*out.rglob("*")} if quick else set()
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        yield
    except BadInput:
        made = {path for path in out.rglob("*") if path not in before and path.is_file()} if quick else set()
        if all(path.parent == folder for path in made):
            for path in made:
                path.unlink()
            for each in missing if quick else ():
                with suppress(OSError):  # not empty, or never made
                    each.rmdir()
        raise


def titled(text: str, data: str, taken: str = "") -> str:
    """The same text, with the data that are taken in place of these, where others are."""
    taken = taken if taken and _is_here(taken) else data if data not in DATASETS or _is_here(data) else DIGITS
    return text if taken == data else f"{text} (here {taken})"


def _is_here(data: str) -> bool:
    try:
        return bool(DATASETS[data]().find())
    except BadInput:
        return False


def _settings(words: Sequence[str]) -> dict[str, Any]:
    return {key: config.setting(word)[1] for key, word in merged_words(words).items()}


def some_columns(grid: Grid, rows: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Those that were asked for; else one of each family, as long as there is time."""
    if columns:
        return list(columns)
    firsts = {name.partition("/")[0]: name for name in reversed([*grid.columns])}
    several = [name for name in grid.columns if name in firsts.values()]
    if len(several) == 1:
        several = list(grid.columns)
    now = _settings((*grid.words, *grid.columns[several[0]].words))
    most = CELLS if _small(now) == "cnn2" else CELLS // 2  # the others take twice as long
    if any(_COSTLY in row.words for row in grid.rows.values()):
        most //= 2
    return several[: max(1, most // len(rows or grid.rows))]


def shrunk(words: Sequence[str], out: Path, *, write: bool = True) -> tuple[str, ...]:
    """What to put over the words of a protocol, so that a run of it takes about a second."""
    now = _settings(words)
    found = [*_PLACED, *_data(now, partial(few, out=out, write=write)), *_federation(now)]
    found.append(f"model={_small(now)}")
    if "keep" in now:
        found.append("keep=1")
    return (*found, *_method(now, "algorithm"))


def _small(now: Mapping[str, Any]) -> str:
    return _SMALL_NETWORKS.get(now.get("model", ""), "cnn2")


def _source(now: Mapping[str, Any]) -> str:
    """Whose images are taken: the digits where everyone trains in every round, since these rounds are longer."""
    return DIGITS if now.get("cohort") == "everyone" else now.get("data.base") or now.get("data", DIGITS)


def _data(now: Mapping[str, Any], file: Callable[..., Path]) -> list[str]:
    found, side = [], SIDE // 2 if _small(now).startswith("resnet") else SIDE
    if now.get("data") == "modalities":
        found.append(f"data.base={file(now['data.base'], side=side)}")
        found += [] if _has_photographs() else ["data.views=gray,edge"]
    elif now.get("data", DIGITS) in DATASETS:
        found.append(f"data={file(_source(now), side=side)}")
    if "auxiliary" in now:
        found.append(f"auxiliary={file(now['auxiliary'], side=side)}")
    if now.get("partition") == "by_user":
        found += ["partition=dirichlet", "partition.alpha=0.5"]
    return found


def _federation(now: Mapping[str, Any]) -> list[str]:
    clients = now.get("clients", 10)
    found = [f"clients={4 if clients <= 10 else 5 if clients <= 50 else 6}", f"rounds={ROUNDS}", "evaluate.every=1"]
    found += [] if now.get("cohort") == "everyone" else ["cohort=2"]
    epochs = _EPOCHS.get(_small(now), 1)
    found += ["local.steps=12"] if now.get("local.steps") else [f"local.epochs={epochs}"]
    found += ["local.batch_size=10", "local.lr=0.05"]  # so few rounds should show something
    if now.get("algorithm.cam") == "scorecam":  # a pass for each channel of every image
        found += ["local.steps=1", "local.batch_size=4"]
    return found + ([f"evaluate.targets={TARGET}"] if "evaluate.targets" in now else [])


def _method(now: Mapping[str, Any], key: str) -> list[str]:
    """Of the method at this key, and of those that it is made over."""
    name = str(now.get(key, "")).partition("/")[0].removesuffix("+ft")
    if not name:
        return []
    own = {field: now[f"{key}.{field}"] for field in _VARIED if now.get(f"{key}.{field}")}
    settings = _METHODS.get(name, {}) | {field: str(_VARIED[field](value)) for field, value in own.items()}
    return [*(f"{key}.{field}={value}" for field, value in settings.items()), *_method(now, f"{key}.base")]


def _has_photographs() -> bool:
    try:
        return bool(find_photographs())
    except BadInput:
        return False


def few(name: str, out: Path, side: int = SIDE, *, write: bool = True) -> Path:
    """A file with a few images of a data set, evenly taken; of the digits where it is not here.

    Without `write` the file may be missing: a dry run names it alone.
    """
    name = name if _is_here(name) else DIGITS
    path = out / "data" / f"{name}-{side}.npz"
    if path.exists() or not write:
        return path
    images = DATASETS[name]().load()
    parts = {}
    for part, index, count in (("train", images.train, TRAIN), ("test", images.test, TEST)):
        index = index[images.y[index] < CLASSES]
        some = index[:: max(1, len(index) // count)][:count]
        x = images.x[some].numpy()
        step = -(-x.shape[2] // side)
        parts |= {f"x_{part}": x[:, :, ::step, ::step], f"y_{part}": images.y[some].numpy()}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, classes=np.array(images.classes[:CLASSES]), **parts)
    return path
