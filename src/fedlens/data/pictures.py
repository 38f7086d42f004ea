"""Many image files into one array: side by side where that pays, with what there is to say of them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np

from ..core.errors import BadInput, RunFailed
from ..core.format import duration
from ..core.phases import phase
from . import decode
from .cache import cache_folder
from .decode import Decoding, PassedOver, Unreadable

IN_MEMORY = 1 << 30  # bytes of decoded images; more are decoded into a file
MANY_FILES, MANY_BYTES = 2000, 64 << 20  # from which on several processes decode
_AT_ONCE = 32  # files that a process is told at a time
_PATIENCE = 10  # seconds between two lines in a log
_PLAIN = ("gray", "colour")  # said where there are both


@dataclass
class Read:
    """Images in the order of their files; `kept` are the numbers of those that were not passed over."""

    x: np.ndarray
    kept: np.ndarray
    sizes: set[tuple[int, int]] = field(default_factory=set)  # height and width before
    kinds: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    patients: list[str] = field(default_factory=list)  # hashes, of those that were kept

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know, by kind and with numbers."""
        several = sum(self.kinds[kind] > 0 for kind in _PLAIN) > 1
        special = [kind for kind in self.kinds if kind not in _PLAIN]
        said = [f"{self.kinds[kind]} {kind}" for kind in [*special, *(_PLAIN if several else ())]]
        found = (f"among the images: {'; '.join(said)}",) if said else ()
        if len([kind for kind in special if kind.startswith("of 16 bits")]) > 1:
            found += ("images of 16 bits use different numbers of them: data.bits=16 or so reads all alike",)
        return (*found, *skipped_note(self.skipped))


def skipped_note(kinds: Counter[str]) -> tuple[str, ...]:
    said = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return (f"skipped: {said}",) if said else ()


def picture(file: Any, path: Path, mode: str = "RGB", size: int | None = None) -> np.ndarray:
    """One picture as bytes [H, W, C], converted to `mode`; with `size`, cut to a square in the middle and scaled."""
    try:
        return decode.decode(file, Decoding(mode, size or 0))[0]
    except (Unreadable, PassedOver) as problem:
        raise BadInput(f"{path} {problem}") from None


def pictures(
    files: Sequence[Path], mode: str = "RGB", size: int | None = None, content: Callable[[int], Any] | None = None
) -> np.ndarray:
    """All of them as [N, C, H, W]; `content(i)` where the bytes are not in the file of that name."""
    return read_pictures(files, Decoding(mode, size or 0), content).x


def read_pictures(files: Sequence[Path], wanted: Decoding, content: Callable[[int], Any] | None = None) -> Read:
    """All of them, decoded; a file that is none, or of another size, is refused by its name."""
    if not files:
        return Read(np.empty((0, len(wanted.mode), 1, 1), np.uint8), np.empty(0, np.int64))
    abouts: list[dict[str, Any]] = [{}] * len(files)
    processes = _processes(files) if content is None else 1
    x, first, held = None, 0, None
    with _Progress(len(files)) as progress, contextlib.ExitStack() as stack:
        for index, file in enumerate(files):
            pixels, abouts[index] = decode.try_one(file if content is None else content(index), wanted)
            _refuse(file, abouts[index])
            progress.done(1)
            if pixels is None:
                continue
            if x is None:
                shape, first = (len(files), *pixels.shape), index
                large = processes > 1 or math.prod(shape) > IN_MEMORY
                held = stack.enter_context(_file(shape)) if large else None
                x = np.empty(shape, np.uint8) if held is None else np.memmap(held, np.uint8, "w+", shape=shape)
            _same_size(file, files[first], pixels.shape == x.shape[1:])
            x[index] = pixels
            if processes > 1 and held is not None:
                told = {"wanted": asdict(wanted), "shape": x.shape}
                _side_by_side(files, index + 1, abouts, partial(_decoder, held.fileno(), told), processes, progress)
                break
    if x is None:
        kinds = Counter(about["skipped"] for about in abouts)
        raise BadInput(f"none of the images can be read; {skipped_note(kinds)[0]}")
    for index, about in enumerate(abouts):  # the first in their order, however many processes there were
        _refuse(files[index], about)
        _same_size(files[index], files[first], "other_size" not in about)
    return _gathered(x, abouts)


def _gathered(x: np.ndarray, abouts: list[dict[str, Any]]) -> Read:
    kept = np.array([index for index, about in enumerate(abouts) if "skipped" not in about], np.int64)
    for place, index in enumerate(kept.tolist()) if len(kept) < len(abouts) else ():
        x[place] = x[index]
    read = Read(x[: len(kept)], kept)
    read.skipped.update(about["skipped"] for about in abouts if "skipped" in about)
    for about in (abouts[index] for index in kept.tolist()):
        read.sizes.add((about["height"], about["width"]))
        read.kinds.update(about["kinds"])
        read.patients.append(about["patient"])
    return read


def _refuse(file: Path, about: dict[str, Any]) -> None:
    if "problem" in about:
        raise BadInput(f"{file} {about['problem']}")


def _same_size(file: Path, first: Path, same: bool) -> None:
    if not same:
        raise BadInput(f"{file} is of another size than {first}: make all of one size or set data.size")


@contextlib.contextmanager
def _file(shape: tuple[int, ...]) -> Iterator[BinaryIO]:
    """One that nobody else sees, with room for images while they are decoded."""
    folder, size = cache_folder(), math.prod(shape)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  closed below
        if hasattr(os, "posix_fallocate"):  # a disk that is full later would kill the process
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        raise BadInput(f"{folder} has no room for {size >> 20} MiB of decoded images ({error})") from None
    with file:
        yield file  # pyright: ignore[reportReturnType]


# ---- side by side ----------------------------------------------------------------------------------------------------
def _processes(files: Sequence[Path]) -> int:
    """As many as there are cores, where there is enough to do for them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if os.name != "posix" or cores == 1:
        return 1
    if len(files) < MANY_FILES:
        with contextlib.suppress(OSError):
            return cores if sum(os.stat(file).st_size for file in files) > MANY_BYTES else 1
    return cores


def _side_by_side(
    files: Sequence[Path],
    start: int,
    abouts: list[dict[str, Any]],
    decoder: Callable[[], contextlib.AbstractContextManager[subprocess.Popen[str]]],
    processes: int,
    progress: _Progress,
) -> None:
    """Each process is told some files at a time, and writes their pixels where they belong."""
    chunks = iter(range(start, len(files), _AT_ONCE))
    lock, failed = threading.Lock(), []

    def feed() -> None:
        try:
            with decoder() as process:
                while not failed:
                    with lock:
                        begin = next(chunks, None)
                    if begin is None:
                        return
                    some = range(begin, min(begin + _AT_ONCE, len(files)))
                    _ask(process, files, some, abouts)
                    if any("problem" in abouts[index] for index in some):
                        failed.append(None)
                    with lock:
                        progress.done(len(some))
        except Exception as error:  # is raised where everybody sees it
            failed.append(error)

    threads = [threading.Thread(target=feed, daemon=True) for _ in range(processes)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:  # such as Ctrl-C
        failed.append(None)
        raise
    if errors := [error for error in failed if error is not None]:
        raise errors[0]


@contextlib.contextmanager
def _decoder(room: int, told: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """A process that knows where pixels go; it ends when nobody tells it anything more."""
    command = [sys.executable, "-P", str(Path(decode.__file__)), str(room)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "encoding": "utf-8"}
    process = subprocess.Popen(command, pass_fds=[room], env=environment, process_group=0, **pipes)
    assert process.stdin and process.stdout
    try:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(told), file=process.stdin, flush=True)
        yield process
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        process.wait()


def _ask(process: subprocess.Popen[str], files: Sequence[Path], some: range, abouts: list[dict[str, Any]]) -> None:
    assert process.stdin and process.stdout
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps([(index, str(files[index])) for index in some]), file=process.stdin, flush=True)
    if not (answer := process.stdout.readline()):
        raise RunFailed(f"decoding broke off between {files[some[0]]} and {files[some[-1]]}: is memory short?")
    abouts[some.start : some.stop] = [_same(json.dumps(about)) for about in json.loads(answer)]


@lru_cache(maxsize=1024)
def _same(about: str) -> dict[str, Any]:
    """One object for all files of which there is the same to say: there may be millions."""
    return json.loads(about)


class _Progress:
    """How far decoding is, on the standard error: a line that renews itself in a terminal, else one now and then."""

    def __init__(self, total: int, stream: TextIO | None = None):
        self.total, self.stream, self.count = total, stream or sys.stderr, 0
        # Beside a live panel of rich, which passes on whole lines alone, it is a line now and then, too.
        self.live = self.stream.isatty() and not hasattr(self.stream, "rich_proxied_file")
        self.began = self.said = time.monotonic()
        self.shown = False

    def done(self, more: int) -> None:
        self.count += more
        now, live = time.monotonic(), self.live
        if now - self.began < 1 or phase("decoding images", self.count, self.total):  # few images are not worth a word
            return
        if now - self.said < (0.2 if live and self.shown else 2 if live else _PATIENCE):
            return
        left = (now - self.began) * (self.total - self.count) / self.count
        share, self.said, self.shown = self.count / self.total, now, True
        bar = f"[{'#' * round(20 * share):20}] " if live else ""
        text = f"decoding {bar}{self.count:,} of {self.total:,} images, about {duration(left)} left"
        print(f"\r{text}\x1b[K" if live else text, end="" if live else "\n", file=self.stream, flush=True)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self.shown and self.live:
            print("\r\x1b[K", end="", file=self.stream, flush=True)
