"""Checkpoints: every state that a power cut can leave is taken up to the same bits, and nothing promised is lost."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from fedlens import config
from fedlens.core import files
from fedlens.core.errors import BadInput
from fedlens.core.ledger import Ledger
from fedlens.core.tree import Tree
from fedlens.runs import folder as run_folder
from fedlens.runs import tables
from fedlens.runs.checkpoints import Checkpoint, CheckpointStore
from fedlens.runs.diff import differences
from fedlens.runs.folder import RunFolder
from fedlens.runs.transcript import Recording
from fedlens.simulate import resume as resuming
from fedlens.simulate import run as simulate
from fedlens.simulate.recorder import Nobody
from power_cuts import RecordedDisk, Step, lay_out, power_cuts

FEW = ["algorithm=scaffold", "clients=3", "cohort=2", "model=mlp", "model.hidden=2", "local.steps=1", "picture=false"]
FEW += ["engine=sequential", "evaluate.personal=none", "rounds=7"]
# Memories leave RAM at once; messages are kept; some checkpoints stay; the last rounds before a checkpoint can be lost.
ALL = [*FEW, "memory=1e-9", "transcript=1", "checkpoint=2", "keep=4"]


class PowerFails(Nobody):
    """Interrupts a run after a round."""

    def __init__(self, last: int):
        self.last = last

    def round(self, progress):
        if progress.round == self.last:
            raise KeyboardInterrupt


def experiment(out: Path, words: list[str]):
    return config.read(None, words).with_execution(out=str(out))


def interrupted(out: Path, words: list[str], last: int) -> Path:
    with pytest.raises(KeyboardInterrupt):
        simulate.run(experiment(out, words), watcher=PowerFails(last))
    return out


@pytest.fixture(scope="module", autouse=True)
def read_once():
    """Whether a text is YAML takes longer to find out than all the rest."""
    known, readable = {}, run_folder._readable

    def remembered(path: Path) -> bool:
        data = (path.name, path.read_bytes()) if path.is_file() else path
        if data not in known:
            known[data] = readable(path)
        return known[data]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "_readable", remembered)
        yield


@pytest.fixture(scope="module")
def few_parts():
    """Tables are merged after every third checkpoint, not after every 64th."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "_PARTS", 2)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory, few_parts) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    simulate.run(experiment(out, [*ALL, "durable=false"]))
    return out


@pytest.fixture(scope="module")
def steps(tmp_path_factory, few_parts) -> list[Step]:
    """What a run does to the disk that is interrupted in round 6, and resumed."""
    root = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "disk", RecordedDisk(root))
        save = CheckpointStore.save

        def promised(self, checkpoint, *more):
            save(self, checkpoint, *more)
            files.disk.promise(checkpoint.round)

        patch.setattr(CheckpointStore, "save", promised)
        interrupted(root / "run", ALL, 5)
        resuming.resume(root / "run")
        steps = files.disk.steps
    *_, (_, _, last) = power_cuts([*steps, Step("sync"), *everything_synced(root)], most=1)
    left = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.name != "lock"}
    assert left.keys() == last.keys()  # nothing was written past core/files.py
    assert all(last[name] is None or path.read_bytes() == last[name] for name, path in left.items())
    return steps


def everything_synced(root: Path) -> list[Step]:
    return [Step("sync", path.relative_to(root).as_posix()) for path in root.rglob("*")]


def taken_up(run: Path) -> int:
    """What `resume` does to the folder before the first round; returns after which round it goes on."""
    folder = RunFolder(run)
    folder.mend()
    folder = RunFolder.open(run)
    folder.unsynced.durable = False
    start = folder.load()[0] or Checkpoint(0, Tree(), Ledger(), 0.0)
    assert not start.lost
    folder.tidy(start)
    for table in folder.tables():
        table.cut(start.round)
    Recording(run / "transcript", 1, start.round, folder.unsynced, start.transcript)
    return start.round


def fingerprint(run: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(run.rglob("*")):
        if path.is_file() and path.name not in ("log.txt", "lock", "result.json"):
            digest.update(f"{path.relative_to(run)} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


class Power:
    """Takes up states, and carries each kind on to the end."""

    def __init__(self, whole: Path, place: Path):
        self.whole, self.place, self.states = whole, place, 0
        self.carried_on: set[str] = set()  # folders as they were before the first round

    def cut(self, promised: int, state: dict, finish: bool = True) -> None:
        """Fails unless the run ends with the same bits, from the newest checkpoint that was promised or a later one."""
        self.states += 1
        run = self.place / "run"
        lay_out(state, self.place)
        if not (run / "config.yaml").exists():  # it never began
            assert not promised
            kind = "nothing"
        else:
            assert taken_up(run) >= promised
            kind = fingerprint(run)
        if kind in self.carried_on or not finish:
            return
        self.carried_on.add(kind)
        lay_out(state, self.place)  # as the power cut left it
        if kind == "nothing":
            simulate.run(experiment(run, [*ALL, "durable=false"]))
        else:
            resuming.resume(run, ["durable=false"])
        assert list(differences(self.whole, run)) == []
        for folder in (self.whole, run):
            assert not [path for path in folder.rglob(".*")]
        for message in (self.whole / "transcript").iterdir():
            assert (run / "transcript" / message.name).read_bytes() == message.read_bytes()


@pytest.fixture
def power(whole, tmp_path) -> Power:
    return Power(whole, tmp_path / "cut")


def test_some_power_cuts(steps, power):
    """After every sixth step, the extremes and what is a step from them."""
    for _, promised, state in power_cuts(steps, most=6, every=6):
        power.cut(promised, state)
    print(f"{power.states} states, {len(power.carried_on)} folders carried on")
    assert power.states > 100 and len(power.carried_on) > 5


@pytest.mark.slow
def test_many_power_cuts(steps, power):
    """After every step: all states where there are no more than 256, else 256 of them, as `Model.states` says."""
    for _, promised, state in power_cuts(steps, most=256):
        power.cut(promised, state)
    print(f"{len(steps)} steps, {power.states} states, {len(power.carried_on)} folders carried on")
    assert power.states > 10_000


def without(kinds: str, steps: list[Step]) -> list[Step]:
    """The same run with some syncs taken out."""
    folders = {step.path for step in steps if step.kind == "mkdir"} | {""}
    return [
        step
        for step in steps
        if not (
            step.kind == "sync"
            and {
                "all syncs": True,
                "syncs of memories": step.path.startswith("run/clients/"),
                "syncs of tables": ".parquet/" in step.path,
                "syncs of messages": step.path.startswith("run/transcript/"),
                "syncs of states": step.path.startswith("run/checkpoints/0"),
                "syncs of manifests": step.path.startswith("run/checkpoints/."),
                "syncs of folders": step.path in folders,
            }[kinds]
        )
    ]


def violated(steps: list[Step], power: Power) -> bool:
    """Whether some power cut after the first checkpoint loses it, or one after it."""
    try:
        for _, promised, state in power_cuts(steps, most=24, since=steps.index(Step("promise", round=2))):
            power.cut(promised, state, finish=False)
    except (AssertionError, BadInput):
        return True
    return False


KINDS = "memories", "tables", "messages", "states", "manifests", "folders"


@pytest.mark.parametrize("kinds", ["all syncs", *(f"syncs of {kind}" for kind in KINDS)])
def test_without_syncs_a_run_is_lost(steps, power, kinds):
    assert violated(without(kinds, steps), power)


def test_a_manifest_before_its_files_is_noticed(steps, power):
    """Memories are synced after the manifest: the promise comes too early."""
    late, moved = [], []
    for step in steps:
        if step.kind == "sync" and step.path.startswith("run/clients/"):
            moved.append(step)
            continue
        late.append(step)
        if step.kind == "promise":
            late, moved = [*late, *moved], []
    assert violated(late, power)


def test_unverified_files_give_wrong_results(steps, power, monkeypatch):
    """What checksums are for: without them, a run goes on from memories that a power cut has torn."""
    monkeypatch.setattr(CheckpointStore, "_check", lambda *_: None)
    monkeypatch.setattr(CheckpointStore, "_rows_are", lambda *_: True)
    first = steps.index(Step("promise", round=2))
    (_, promised, state), *_ = power_cuts(steps[: first + 1], most=1, since=first)
    memory = next(name for name in state if name.startswith("run/clients/"))
    torn = state | {memory: state[memory][:-64] + bytes(64)}
    with pytest.raises(AssertionError, match="differ"):
        power.cut(promised, torn)
