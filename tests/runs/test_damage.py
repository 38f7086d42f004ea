"""Damage to a run that was killed: what is said, from where it goes on, and the same bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fedlens import config
from fedlens.audit.run import audit, prepared
from fedlens.compare.measured import measured
from fedlens.core.errors import BadInput
from fedlens.core.files import read_json
from fedlens.runs import tables
from fedlens.runs.diff import differences
from fedlens.runs.folder import RunFolder
from fedlens.simulate import resume as resuming
from fedlens.simulate import run as simulate
from fedlens.simulate.recorder import Nobody

FEW = ["algorithm=scaffold", "clients=3", "cohort=2", "model=mlp", "model.hidden=2", "local.steps=1", "picture=false"]
FEW += ["engine=sequential", "evaluate.personal=none", "rounds=7", "durable=false"]


class Killed(Nobody):
    def round(self, progress):
        if progress.round == 5:
            raise KeyboardInterrupt


def experiment(out: Path):
    return config.read(None, FEW).with_execution(out=str(out))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    simulate.run(experiment(out))
    return out


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("killed") / "run"
    with pytest.raises(KeyboardInterrupt):
        simulate.run(experiment(out), watcher=Killed())
    return out


def memories(run: Path) -> list[Path]:
    """The newest."""
    return [run / "clients" / path.name for path in (run / "clients").iterdir() if path.stem.endswith("-000004")]


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 64  # a bit of an exponent
    path.write_bytes(data)


def both_missing(run: Path) -> None:
    for path in (STATE, MANIFEST):
        (run / path).unlink()


STATE, MANIFEST = "checkpoints/000005.safetensors", "checkpoints/000005.json"
PART = "metrics.parquet/000005-000005.parquet"
TEXT = '{"round": "five", "shared": null, "seconds": 1, "bytes_up": 1, "bytes_down": 1, "holders": {}, "sha256": "0"}'
RESTORED = "metrics.parquet was damaged and is restored from its copy"
# What is done; what is said; after which round it goes on.
DAMAGE = {
    "newest state zeroed": (lambda run: zero(run / STATE), f"5 is damaged ({STATE}: its checksum differs)", 4),
    "newest manifest zeroed": (lambda run: zero(run / MANIFEST), "5 is damaged (000005.json is not JSON)", 4),
    "both missing": (both_missing, "", 4),
    "newest memories zeroed": (lambda run: [*map(zero, memories(run))], "-000004.safetensors: its checksum differs", 4),
    "newest memories halved": (lambda run: [*map(halve, memories(run))], "-000004.safetensors has ", 4),
    "newest memories missing": (lambda run: [each.unlink() for each in memories(run)], "safetensors is missing", 4),
    "one bit of a memory flipped": (lambda run: flip(memories(run)[0]), "its checksum differs", 4),
    "newest metrics part zeroed": (lambda run: zero(run / PART), RESTORED, 5),
    "newest metrics part missing": (lambda run: (run / PART).unlink(), RESTORED, 5),
    "passport zeroed": (lambda run: zero(run / "passport.json"), "passport.json could not be read and was restored", 5),
    "config zeroed": (lambda run: zero(run / "config.yaml"), "config.yaml could not be read and was restored", 5),
    "a stray abcdef.json": (lambda run: (run / "checkpoints/abcdef.json").write_text("{}"), "", 5),
    "manifest []": (lambda run: (run / MANIFEST).write_text("[]"), "5 is damaged (000005.json is no manifest)", 4),
    "a text as round": (lambda run: (run / MANIFEST).write_text(TEXT), "000005.json is of another round", 4),
}


class Told(Nobody):
    def begin(self, experiment, folder, notes, round, rounds):
        self.notes, self.begun = notes, round


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage(killed, undisturbed, tmp_path, kind):
    damage, said, round = DAMAGE[kind]
    run = Path(shutil.copytree(killed, tmp_path / "run"))
    damage(run)
    told = Told()
    resuming.resume(run, watcher=told)
    assert told.begun == round and list(differences(undisturbed, run)) == []
    assert said in "; ".join(told.notes) if said else not any("damaged" in note for note in told.notes)


# ---- what every kept checkpoint stands on ----------------------------------------------------------------------------
MORE = ["transcript=1", "evaluate.targets=0.1"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> tuple[Path, Path]:
    """A run that was killed and one that was not; both keep messages, and merge their tables at every second part."""
    place = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "_PARTS", 2)
        simulate.run(config.read(None, [*FEW, *MORE, f"out={place / 'whole'}"]))
        with pytest.raises(KeyboardInterrupt):
            simulate.run(config.read(None, [*FEW, *MORE, f"out={place / 'killed'}"]), watcher=Killed())
    return place / "killed", place / "whole"


def merged(run: Path, table: str = "metrics.parquet") -> Path:
    return max((run / table).glob("*.parquet"), key=lambda part: tables.span(part)[1] - tables.span(part)[0])


def first_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)


def copy_of(run: Path, table: str = "metrics.parquet") -> Path:
    return run / "checkpoints" / f"{table}.copy"


OLD = {
    "merged part zeroed": (lambda run: zero(merged(run)), RESTORED),
    "one bit of it flipped": (lambda run: first_byte(merged(run)), RESTORED),
    "bytes gone": (lambda run: shutil.rmtree(run / "bytes.parquet"), RESTORED.replace("metrics", "bytes")),
    "copy zeroed": (lambda run: zero(copy_of(run)), ""),
    "newest message halved": (
        lambda run: halve(run / "transcript/000005.safetensors"),
        "checkpoint 5 lacks the messages from round 5 on",
    ),
}


@pytest.mark.parametrize("kind", OLD)
def test_old_rows_come_back_from_their_copy(recorded, tmp_path, kind):
    (killed, whole), (damage, said), told = recorded, OLD[kind], Told()
    run = Path(shutil.copytree(killed, tmp_path / "run"))
    damage(run)
    resuming.resume(run, watcher=told)
    assert told.begun == (4 if "message" in kind else 5) and list(differences(whole, run)) == []
    assert said in told.notes if said else told.notes == []
    for message in (whole / "transcript").iterdir():
        assert (run / "transcript" / message.name).read_bytes() == message.read_bytes()


def test_lost_rows_leave_the_model_and_no_wrong_sums(recorded, tmp_path):
    killed, whole = recorded
    run, told = Path(shutil.copytree(killed, tmp_path / "run")), Told()
    for path in (merged(run), copy_of(run)):
        zero(path)
    result = resuming.resume(run, ["picture=true"], watcher=told)
    lost = "the rows of rounds 1 to 5 in metrics.parquet"
    assert told.begun == 5 and told.notes == [f"damage has taken {lost}; the model is whole"]
    first, *_ = differences(whole, run)
    assert first.startswith("metrics, row 0")  # weights and memories come before
    before = read_json(whole / "result.json")
    assert result.accuracy == before["accuracy"] and before["targets"] and before["accuracy_best"]
    assert (result.bytes_up, result.targets, result.accuracy_best) == (before["bytes_up"], {}, None)
    with pytest.raises(BadInput, match=f"has lost {lost} to damage"):
        RunFolder(run).metrics()
    assert lost in measured("", "scaffold", 0, run).trouble
    assert [*(run / "metrics.parquet").glob("*.damaged")]
    again = Told()
    assert resuming.resume(run, watcher=again).plain() == result.plain()  # nothing new is found


def test_a_lost_message_ends_the_transcript_before_it(recorded, tmp_path):
    killed, whole = recorded
    run, told = Path(shutil.copytree(killed, tmp_path / "run")), Told()
    flip(run / "transcript/000002.safetensors")
    resuming.resume(run, watcher=told)
    assert told.begun == 5
    assert told.notes == ["damage has taken the messages from round 2 on; the model is whole"]
    assert list(differences(whole, run)) == []
    transcript, _ = prepared(RunFolder(run), (), 20, 1, "cpu")
    assert len(transcript) == 1 and (run / "transcript/000002.safetensors.damaged").exists()
    assert transcript.damage == "the messages from round 2 on"  # still known when the file has been put aside
    for name in ("000001.safetensors", "000003.safetensors"):
        assert (run / "transcript" / name).read_bytes() == (whole / "transcript" / name).read_bytes()


def test_a_complete_run_is_mended_by_resume(recorded, tmp_path):
    run = Path(shutil.copytree(recorded[1], tmp_path / "run"))
    first_byte(merged(run))
    with pytest.raises(BadInput, match=r"is damaged.*; `fedlens resume` restores it from its copy"):
        RunFolder(run).metrics()
    resuming.resume(run)
    assert list(differences(recorded[1], run)) == []


def test_an_audit_looks_at_whole_messages_alone(recorded, tmp_path):
    run = Path(shutil.copytree(recorded[1], tmp_path / "run"))
    flip(run / "transcript/000004.safetensors")
    assert len(prepared(RunFolder(run), (), 20, 1, "cpu")[0]) == 3
    found = audit(run, ["loss_uploads"], candidates=20, seeds=1)
    assert "Damage has taken the messages from round 4 on: only what was sent before is attacked." in found.verdict()
    flip(run / "transcript/000001.safetensors")
    with pytest.raises(BadInput, match=r"000001.safetensors is damaged, and an audit begins with the first round"):
        prepared(RunFolder(run), (), 20, 1, "cpu")


def test_without_any_checkpoint_it_says_how_to_begin_again(killed, tmp_path):
    run = Path(shutil.copytree(killed, tmp_path / "run"))
    for path in (run / "checkpoints").glob("*.safetensors"):
        zero(path)
    with pytest.raises(BadInput, match=r"no intact checkpoint is left.*fedlens run .*/run/config.yaml out=NEW$"):
        resuming.resume(run)
