"""Go on where a run stopped, to the same bits; refused where it would be another run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from .. import config
from ..core.errors import BadInput
from ..core.phases import heard_by
from ..experiment import Execution, Experiment
from ..privacy.report import Disclosure
from ..runs.folder import RunFolder, code_hash, config_hash
from ..runs.places import check_origin, opened, point, pointers
from ..runs.read import Result
from ..runs.reuse import steps
from .recorder import Nobody, Watcher
from .run import carry_on, checked


def resume(path: str | Path, words: Sequence[str] = (), *, watcher: Watcher | None = None) -> Result:
    """Go on after a crash, to the same bits; `words` may change where it runs and how many rounds.

    Words such as data.path=PLACE say where its files are now, which the run remembers.
    """
    with heard_by(watcher.phase if watcher else None):
        return _resumed(path, words, watcher or Nobody())


def _resumed(path: str | Path, words: Sequence[str], watcher: Watcher) -> Result:
    mended = RunFolder(path).mend()
    folder = RunFolder.open(path)
    pointed, others = pointers(config.read(folder.config), words)
    for word in others:
        if not changeable(word):
            can = ", ".join(("rounds", *_MOVABLE, "uplink.dp.budget"))
            raise BadInput(f"{word.partition('=')[0]} cannot change when a run is resumed; {can} can")
    began, experiment = (opened(folder, w).with_execution(out=str(folder.path)) for w in ((), words))
    experiment = experiment.resolved()
    with folder.locked():
        _same_settings(folder, began)
        checkpoint, notes = folder.load()
        done = checkpoint.round if checkpoint else 0
        if experiment.uplink != began.uplink:
            raise BadInput(f"uplink.dp.budget cannot change: {folder.path} runs without uplink=dp")
        _same_path(began, experiment, done, folder.path)
        if (before := folder.result()) and done == len(experiment.timetable()):
            if pointed:
                check_origin(folder, experiment, experiment.images())
                point(folder, pointed)
            if checkpoint:
                folder.mend_tables(checkpoint)
            for note in [*mended, *notes]:
                watcher.note(note)
            return Result.stored({**before, "run": str(folder.path)})  # it may have been moved
        # All that can be refused is, before anything is written.
        ready = checked(experiment)
        check_origin(folder, experiment, ready.images, ready.public, ready.split.hash)
        spent = folder.path / "privacy.json", experiment.timetable(), experiment.clients, experiment.seed
        Disclosure(*spent).refuse(done)
        point(folder, pointed)
        return carry_on(folder, experiment, ready, checkpoint, [*mended, *notes], watcher)


_MOVABLE = [each.name for each in fields(Execution) if each.name not in Execution.FIXED]


def changeable(word: str) -> bool:
    """Whether a word may change a run that has begun."""
    key = config.setting(word)[0]
    return key in ("rounds", "uplink.dp.budget") or key.partition(".")[0] in _MOVABLE


def _same_settings(folder: RunFolder, began: Experiment) -> None:
    """A config.yaml changed by hand would silently be another experiment; another version may read it differently."""
    card = folder.full_passport() if (folder.path / "passport.json").exists() else None
    known = {card["config_hash"], *card.get("earlier_hashes", ())} if card else set()
    if card and card["code"]["sha256"] == code_hash() and config_hash(began) not in known:
        raise BadInput(f"{folder.config} has changed since the run began; start a new run with these settings")


def _same_path(began: Experiment, now: Experiment, done: int, path: Path) -> None:
    """With another number of rounds, the rounds that are done must have been the same."""
    if len(now.timetable()) < done:
        raise BadInput(f"rounds is {now.rounds}, but {path} has done {done} already")
    if steps(began)[:done] != steps(now)[:done]:
        why = "the rounds already done would have been others (a last stage, or a rate that depends on their number)"
        raise BadInput(f"rounds cannot change any more: {why}")
