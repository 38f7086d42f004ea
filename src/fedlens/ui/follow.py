"""One run as a page follows it: what is new in its folder is read, and nothing twice."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ..algorithms import family_of
from ..core.errors import BadInput
from ..core.files import finite, open_regular, read_json
from ..experiment import Evaluation
from ..plots.style import place_of
from ..report import safety
from ..report.groups import compared
from ..runs import labels, read, tables
from ..runs.folder import RunFolder
from ..runs.measures import closing_mean, window
from ..runs.read import DAMAGE, columns, flat, measure_of, method_of, rounds_of, settings_of, thinned
from ..runs.rounds import Rounds
from ..simulate.recorder import STOP
from .curves import POINTS, Series, drawn

SPARK = 40  # points of the small curve in a list
NOTES = 50
PRIVACY = ("privacy.json", "audit.json")  # what a run promises, and what attacks found
SETBACKS = ("missing", "late", "refused", "void")
_BARS = 120  # of setbacks by round
_TAIL = 1 << 16  # bytes at the end of a log that are shown
_ROUND = re.compile(
    r"round (?P<round>\d{1,9})/(?P<rounds>\d{1,9})(?:  accuracy (?P<accuracy>\S+)(?P<percent> %)?  loss (?P<loss>\S+))?"
    r"  up (?P<up>\S+) MB  down (?P<down>\S+) MB  (?P<seconds>\S+) s"
)
_SETTLED = 2_000_000_000  # nanoseconds after which a folder's time of change tells all changes apart
Point = list[float | None]  # accuracy, loss
Window = tuple[int, int] | None  # first and last round of training


class Followed:
    """A run as far as it was read; `refresh` reads on. `generation` changes when what was read no longer holds."""

    def __init__(self, path: Path, name: str):
        self.path, self.name = path, name
        self.row: dict[str, Any] = {}  # of a list of runs
        self.notes: list[str] = []  # the newest
        self._noted = 0
        self.read = 0  # rounds that were read from the tables, preparation among them
        self.counts = Rounds((), 0)  # which of them are rounds of training
        self.generation = 0
        self._curves: dict[str, dict[int, Point]] = {}  # model -> round -> point, as the tables have it
        self._taken: dict[int, float] = {}  # round -> seconds of the run until then
        self._live: dict[int, tuple[Point, float, float]] = {}  # rounds after those, as the log has them
        self._lost: dict[int, dict[str, int]] = {}  # round -> replies missing, late, refused; void rounds
        self._spent: dict[int, int] = {}  # round -> bytes, read when somebody asks for them
        self._spent_read = 0
        self.labels: dict[str, list[Any]] = {"tags": [], "notes": []}
        self._flower = False
        self._privacy: dict[str, Any] = {}
        self._logged: dict[str, float] = {}  # its last round
        self._last_words = ""
        self._log_file = self._log_end = 0
        self._settings: dict[str, Any] = {}
        self._about: dict[str, Any] = {}
        self._result: int | None = None  # rounds of a complete run
        self._total = 0.0  # its bytes; the log rounds them
        self._stamps: dict[str, tuple[int, int, int] | None] = {}
        self._wrong: dict[str, str] = {}  # file -> what is wrong with it
        self._measured: dict[str, Any] = {}

    def refresh(self) -> bool:
        """Read what is new; whether anything is."""
        before, stamps = self.row, dict(self._stamps)
        self._on_change("config.yaml", self._read_settings)
        self._on_change("passport.json", self._read_counts)
        self._on_change("result.json", self._read_result)
        self._on_change("log.txt", self._read_log)
        self._on_change("metrics.parquet", self._read_metrics)
        self._on_change(labels.FILE, self._read_labels)
        for name in PRIVACY:
            self._on_change(name, self._read_privacy)
        state, trouble = self._state()
        stopping = state == "running" and (self.path / STOP).exists()
        if stamps != self._stamps or not self._measured:
            self._measured = self._measure()
        said = {"tags": self.labels["tags"][:20], "remark": (self._remarks() or [""])[-1][:120]}
        self.row = {**self._about, **self._measured, **said, "state": state, "trouble": trouble, "stopping": stopping}
        return self.row != before

    # ---- files ----
    def _on_change(self, name: str, take: Callable[[], Any]) -> None:
        try:
            found = os.stat(self.path / name)
            stamp = found.st_mtime_ns, found.st_size, found.st_ino
        except OSError:
            stamp = None
        if name in self._stamps and self._stamps[name] == stamp:
            return
        self._stamps[name] = stamp
        self._wrong.pop(name, None)
        if stamp is None and name not in ("config.yaml", labels.FILE, *PRIVACY):  # a run without settings is none
            return
        try:
            take()
        except (BadInput, *DAMAGE) as error:
            self._wrong[name] = (
                str(error).replace(f"{self.path}/", "") if isinstance(error, BadInput) else f"{name} is damaged"
            )

    def _read_settings(self) -> None:
        unread = {"method": "?", "colour": 0, "dash": 0, "began": 0, "rounds": 0}
        self._about = {"name": self.name, "path": str(self.path), **unread}
        self._settings = settings = settings_of(self.path)
        method = method_of(settings["algorithm"])
        colour, dash = place_of(method)
        self._about |= {
            **{"method": method, "family": family_of(method), "colour": colour, "dash": dash},
            **{part: _called(settings[part]) for part in ("data", "partition", "model")},
            **{name: int(settings[name]) for name in ("clients", "seed", "rounds")},
            "began": (self._stamps["config.yaml"] or (0,))[0] // 1_000_000,  # milliseconds
        }
        self._set_group()
        if not (self.path / "passport.json").exists():
            self._read_counts()

    def _set_group(self) -> None:
        """What its repetitions with other seeds share."""
        known = compared({"settings": flat(self._settings), "flower": self._flower})
        self._about["group"] = hashlib.sha256(repr(sorted(known.items())).encode()).hexdigest()[:12]

    def _read_counts(self) -> None:
        folder = RunFolder(self.path)
        self.counts = rounds_of(folder)
        self._flower = (self.path / "passport.json").exists() and folder.passport().get("engine") == "flower"
        if self._settings:
            self._set_group()

    def _read_labels(self) -> None:
        """Damaged ones are not shown: they are beside the run, which they leave whole."""
        self.labels = {"tags": [], "notes": []}
        with contextlib.suppress(BadInput):
            self.labels = labels.labels(self.path)

    def _read_privacy(self) -> None:
        self._privacy = {}
        self._privacy = {name: read_json(self.path / name) for name in PRIVACY if (self.path / name).exists()}

    def _told(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """A group and its run, as far as `safety` asks for them."""
        said, audit = (self._privacy.get(name) for name in PRIVACY)
        method = self._about["method"]
        group = {"label": method, "method": method, "runs": [0], "shares": safety.sharing(method, {}, said)}
        return [group], [{"privacy": said, "audit": audit}]

    def _safe(self) -> dict[str, Any]:
        """Of a list of runs: what leaves clients and whether attacks were tried, in the words of the report."""
        if not self._settings:
            return {"privacy": "", "alarm": False, "shares": False, "tested": False}
        try:
            (group,), (run,) = self._told()
            known = {"shares": safety.shares_data(group), "tested": bool(run["audit"])}
            alarm = any(one["alarm"] for one in self.safety())
            return {"privacy": safety.status([group], [run]), "alarm": alarm, **known}
        except DAMAGE:
            said = "Unknown: a file about privacy is damaged"
            return {"privacy": said, "alarm": True, "shares": False, "tested": False}

    def safety(self) -> list[dict[str, Any]]:
        """Sentences of the report about privacy."""
        try:
            return safety.told(*self._told()) if self._settings else []
        except DAMAGE:
            return []

    def _remarks(self) -> list[str]:
        return [note["text"] for note in self.labels["notes"]]

    def _read_result(self) -> None:
        found = read_json(self.path / "result.json")
        self._result = int(found["rounds"])
        self._total = float(found.get("bytes_up", 0) + found.get("bytes_down", 0))

    def _read_log(self) -> None:
        stamp = self._stamps["log.txt"]
        assert stamp
        if stamp[2] != self._log_file or stamp[1] < self._log_end:  # another run is in its place
            self._forget(0)
            self._logged, self._last_words, self.notes, self._log_file, self._log_end = {}, "", [], stamp[2], 0
        with open_regular(self.path / "log.txt") as file:
            file.seek(self._log_end)
            whole, end, _ = file.read().rpartition(b"\n")  # the last line may be half-written
        self._log_end += len(whole) + len(end)
        for line in whole.decode("utf-8", "replace").splitlines():
            self._hear(line)

    def _hear(self, line: str) -> None:
        self._last_words = line if line == "stopped" or line.startswith("failed: ") else ""
        if line.startswith("note: "):
            self.notes = [*self.notes, line.removeprefix("note: ")][-NOTES:]
            self._noted += 1
        if not (found := _ROUND.fullmatch(line)):
            return
        said = found.groupdict()
        unit = 100 if said.pop("percent") else 1  # logs of earlier versions have shares
        before, self._logged = self._logged, {n: float(v) for n, v in said.items() if v is not None}
        if "accuracy" in self._logged:
            self._logged["accuracy"] = round(self._logged["accuracy"] / unit, 6)
        number = int(self._logged["round"])
        if number <= before.get("round", 0):
            self._forget(number - 1)  # it went on from an earlier checkpoint
        if number > self.read:
            every = self._settings.get("evaluate", {}).get("every", 1)
            # A line repeats the newest accuracy, also in rounds without an evaluation.
            evaluated = bool(every) and (self.counts.trained(number) or number) % every == 0
            point: Point = [self._logged.get(name) if evaluated else None for name in ("accuracy", "loss")]
            self._live[number] = point, self._logged["seconds"], self._sent()

    def _forget(self, after: int) -> None:
        """What was read about later rounds."""
        self.generation += 1
        self.read, self._spent_read = min(self.read, after), min(self._spent_read, after)
        self._stamps.pop("metrics.parquet", None)
        for points in (*self._curves.values(), self._taken, self._live, self._lost, self._spent):
            for round in [round for round in points if round > after]:
                del points[round]

    def _read_metrics(self) -> None:
        stamp = self._stamps["metrics.parquet"]
        if stamp and time.time_ns() - stamp[0] < _SETTLED:
            self._stamps.pop("metrics.parquet")
        for part in tables.parts(self.path / "metrics.parquet", after=self.read):
            try:
                self._take(tables.read_part(part, tables.METRICS))
            except FileNotFoundError:  # merged since it was listed; the next refresh finds it
                self._stamps.pop("metrics.parquet", None)
                return
            self.read = tables.span(part)[1]
        self._live = {round: point for round, point in self._live.items() if round > self.read}

    def _take(self, table: pa.Table) -> None:
        table = table.filter(pc.field("round") > self.read)
        for round, kind in columns(table.filter(pc.field("metric").isin(SETBACKS)), "round", "metric"):
            counts = self._lost.setdefault(round, dict.fromkeys(SETBACKS, 0))
            counts[kind] += 1
        table = table.filter(pc.field("client").is_null())
        for model, by_round in read.points(table).items():
            self._curves.setdefault(model, {}).update(by_round)
        for round, metric, value in columns(table, "round", "metric", "value"):
            if metric == "seconds":
                self._taken[round] = self._taken.get(round - 1, 0.0) + value

    # ---- what is known ----
    @property
    def _done(self) -> int:
        return max(self.read, int(self._logged.get("round", 0)))

    @property
    def _rounds(self) -> int:
        """The log knows better: a method with stages of its own has more than were asked for."""
        return int(self._logged["rounds"] if self._logged else self._about["rounds"])

    @property
    def _trained(self) -> int:
        return self.counts.trained(self._done)

    def _state(self) -> tuple[str, str]:
        ready = self._trained or not self.counts.preparation
        where = f"after round {self._trained} of {self.counts.total}" if ready else "in its preparation"
        if self._wrong:
            return "corrupt", next(iter(self._wrong.values()))
        if is_locked(self.path / "lock"):
            return "running", ""
        if self._result and self._result > self._done:
            return "corrupt", f"its tables end after round {self._done}, but result.json says {self._result}"
        if self._result == self._done:
            return "done", ""
        if self._last_words.startswith("failed"):
            return "failed", self._last_words.removeprefix("failed: ")
        if self._last_words:
            return "stopped", where
        return "failed", f"it ended without a word {where}: killed, or the machine went down"

    def _measure(self) -> dict[str, Any]:
        points = self._points()
        accuracies = {
            model: [point[0] for _, point in by.values() if point[0] is not None] for model, by in points.items()
        }
        model = measure_of(points) or "global"
        own = accuracies.get(model, [])
        ended = {r: (at, value) for r, (at, (value, _)) in points.get("global", {}).items() if value is not None}
        asked = self._settings.get("evaluate", {}).get("last", Evaluation.last)
        mean, rounds = closing_mean(ended, asked if isinstance(asked, int) else 0)
        drawn = accuracies.get("global", own)  # fine-tuning ends in one point, which is no curve
        return finite(
            {
                **self._safe(),
                "generation": self.generation,
                "read": self.read,
                "notes": self._noted,
                "round": self._trained,
                "rounds": self.counts.total,
                "preparation": self.counts.preparation,
                "done": self._done,  # preparation and fine-tuning included
                "all": self._rounds,
                "evaluated_on": model,
                "accuracy": own[-1] if own else None,
                "best": max(own, default=None),
                "closing": mean,  # that comparisons rank by
                "closing_over": window(len(rounds), rounds),
                "spark": [round(value, 4) for value in thinned(drawn, SPARK)],
                "seconds": self._logged.get("seconds"),
                "bytes": (self._result == self._done and self._total) or (self._sent() if self._logged else None),
                "lost": sum(counts[kind] for counts in self._lost.values() for kind in SETBACKS[:3]),  # replies
            }
        )

    def _sent(self) -> float:
        return 1e6 * (self._logged["up"] + self._logged["down"])

    def _points(self) -> dict[str, dict[int, tuple[int, Point]]]:
        """Model -> round of training -> (round of the run, point)."""
        live = {round: point for round, (point, *_) in self._live.items() if point[0] is not None}
        all = {**self._curves, "global": {**self._curves.get("global", {}), **live}} if live else self._curves
        counted = {model: self.counts.counted(points) for model, points in all.items()}
        return {model: points for model, points in counted.items() if points}

    def series(self, spent: bool = False) -> dict[str, Series]:
        """Model -> round of training -> accuracy, loss, seconds and, where asked for, bytes until then."""
        taken = {**self._taken, **{round: seconds for round, (_, seconds, _) in self._live.items()}}
        sent = self._bytes_until() if spent else {}
        return {
            model: {trained: (*point, taken.get(round), sent.get(round)) for trained, (round, point) in points.items()}
            for model, points in self._points().items()
        }

    def curves(
        self, after: int, generation: int, *, most: int = POINTS, window: Window = None, spent: bool = False
    ) -> dict[str, Any]:
        """Points after a round of the run; all of them for who has none, or those of another generation."""
        after = self.counts.trained(after) if generation == self.generation and after <= self.read else 0
        series = self.series(spent)
        new = {model: {r: point for r, point in each.items() if r > after} for model, each in series.items()}
        found = drawn(new if after else series, most, window)
        return finite({"after": after, "read": self.read, "generation": self.generation, "curves": found})

    def _bytes_until(self) -> dict[int, float]:
        """Of the method itself, until each round; as far as its table can be read."""
        with contextlib.suppress(BadInput, *DAMAGE):
            for part in tables.parts(self.path / "bytes.parquet", after=self._spent_read):
                table = tables.read_part(part, tables.BYTES).filter(pc.field("round") > self._spent_read)
                self._spent |= read.bytes_per_round(table)
                self._spent_read = tables.span(part)[1]
        rounds = sorted(round for round in self._spent if round <= self.read)
        until = dict(zip(rounds, accumulate(self._spent[round] for round in rounds), strict=True))
        return {**until, **{round: sent for round, (_, _, sent) in self._live.items()}}

    # ---- more of one run ----
    def setbacks(self) -> dict[str, list[int]]:
        """Whose replies were missing, late or refused, by stretches of equally many rounds from `first` to `last`."""
        wide = -(-max(self._lost, default=0) // _BARS)
        found: dict[int, dict[str, int]] = {}
        for round, counts in self._lost.items():
            sums = found.setdefault((round - 1) // wide, dict.fromkeys(SETBACKS, 0))
            for kind, count in counts.items():
                sums[kind] += count
        bars = sorted(found)
        spans = {"first": [bar * wide + 1 for bar in bars], "last": [(bar + 1) * wide for bar in bars]}
        return spans | {kind: [found[bar][kind] for bar in bars] for kind in SETBACKS}

    def log_tail(self) -> list[str]:
        """The last lines of its log, the newest last."""
        with open_regular(self.path / "log.txt") as file:
            start = max(0, os.fstat(file.fileno()).st_size - _TAIL)
            file.seek(start)
            lines = file.read(_TAIL).decode("utf-8", "replace").splitlines()
        return lines[1:] if start else lines

    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in flat(self._settings).items() if name != "out"}


def _called(part: Any) -> str:
    return str(part["is"]).rpartition(":")[2]


def is_locked(lock: Path) -> bool:
    """Whether a process is at work on the run: it holds this lock as long as it lives."""
    try:
        import fcntl
    except ImportError:  # no locks on this system: a run that has written lately is taken for running
        log = lock.with_name("log.txt")
        return log.exists() and time.time() - log.stat().st_mtime < 60
    try:
        with open_regular(lock) as file:
            # Let go at once: a run that begins in these microseconds would take us for another process at work on it.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, ValueError):
        return False
    return False
