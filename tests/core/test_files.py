import os

import pytest

from fedlens.core import files
from fedlens.core.files import Unsynced, make_durable, remove_orphans, sealed, unsealed, write_atomic
from power_cuts import RecordedDisk


@pytest.fixture
def disk(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "disk", RecordedDisk(tmp_path))
    return files.disk


def kinds(disk):
    return [(step.kind, (step.to or step.path).replace(f".{os.getpid()}.part", ".part")) for step in disk.steps]


def test_a_durable_file_is_synced_before_it_gets_its_name(disk, tmp_path):
    write_atomic(tmp_path / "a", b"1", durable=True)
    assert kinds(disk) == [("write", ".a.part"), ("sync", ".a.part"), ("rename", "a"), ("sync", "")]


def test_a_group_is_files_first_then_folders(disk, tmp_path):
    group = Unsynced()
    group.mkdir(tmp_path / "x" / "y")
    for name in ("x/a", "x/y/b", "x/y/c"):
        group.write(tmp_path / name, b"1")
    group.remove(tmp_path / "x/y/c")
    disk.steps.clear()
    group.sync()
    found = [path for kind, path in kinds(disk) if kind == "sync"]
    assert sorted(found[:2]) == ["x/a", "x/y/b"] and sorted(found[2:]) == ["", "x", "x/y"]
    group.sync()
    assert len(disk.steps) == 5  # all is done
    make_durable([tmp_path / "x/a"])
    assert kinds(disk)[5:] == [("sync", "x/a"), ("sync", "x")]


def test_without_durability_nothing_is_synced(disk, tmp_path):
    group = Unsynced(durable=False)
    group.write(tmp_path / "a", b"1")
    group.sync()
    assert kinds(disk) == [("write", ".a.part"), ("rename", "a")]


def test_orphans_of_processes_that_are_gone(tmp_path):
    gone = os.fork()
    if not gone:
        os._exit(0)
    os.waitpid(gone, 0)
    for name in (f".a.{gone}.part", f".a.{gone}", f".a.{os.getpid()}.part"):
        (tmp_path / name).write_bytes(b"half")
    stay = {f".a.{os.getppid()}.part", "a.1.part", ".hidden"}
    for name in stay:
        (tmp_path / name).write_bytes(b"")
    remove_orphans(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == stay
    remove_orphans(tmp_path / "nowhere")


def test_a_sealed_file_is_whole_or_refused():
    data = sealed(b"some bytes")
    assert unsealed(data) == b"some bytes"
    for damaged in (b"", data[:-1], bytes(len(data)), data[:-1] + b"?"):
        with pytest.raises(ValueError):
            unsealed(damaged)
