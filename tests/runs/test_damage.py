"""Fourteen kinds of damage to a run that was killed: what is said, from where it goes on, and the same bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fedlens import config
from fedlens.runs.diff import differences
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
# What is done; what is said; after which round it goes on.
DAMAGE = {
    "newest state zeroed": (lambda run: zero(run / STATE), f"5 is damaged ({STATE}: its checksum differs)", 4),
    "newest manifest zeroed": (lambda run: zero(run / MANIFEST), "5 is damaged (000005.json is not JSON)", 4),
    "both missing": (both_missing, "", 4),
    "newest memories zeroed": (lambda run: [*map(zero, memories(run))], "-000004.safetensors: its checksum differs", 4),
    "newest memories halved": (lambda run: [*map(halve, memories(run))], "-000004.safetensors has ", 4),
    "newest memories missing": (lambda run: [each.unlink() for each in memories(run)], "safetensors is missing", 4),
    "one bit of a memory flipped": (lambda run: flip(memories(run)[0]), "its checksum differs", 4),
    "newest metrics part zeroed": (lambda run: zero(run / PART), "is damaged: it is not a whole Parquet file", 4),
    "newest metrics part missing": (lambda run: (run / PART).unlink(), "5 is damaged (metrics.parquet has ", 4),
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
