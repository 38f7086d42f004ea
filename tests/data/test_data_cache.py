"""The decoded copy: made once, by one or by many, refused when damaged, made again when the source changes."""

import json
import multiprocessing
import os
import time

import numpy as np
import pytest
import torch

from fedlens.data.cache import VERSION, byte_sum, cache_folder, checksum, moments
from fedlens.data.sources.folders import Npz


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path / "cache"))
    return tmp_path


def write(path, seed=0, count=40):
    draw = np.random.default_rng(seed)
    x, y = draw.integers(0, 256, (count, 6, 6, 3), dtype=np.uint8), np.arange(count) % 3
    np.savez(path, x=x, y=y)
    return x.transpose(0, 3, 1, 2), y


def copies(folder):
    return sorted(path for path in (folder / "cache").iterdir() if not path.name.startswith("."))


def leftovers(folder):
    return [path for path in (folder / "cache").iterdir() if path.name.startswith(".")]


def test_decoded_once_then_mapped(folder, monkeypatch):
    x, y = write(folder / "a.npz")
    first = Npz(str(folder / "a.npz")).load()
    monkeypatch.setattr(Npz, "_read", lambda *_: pytest.fail("decoded again"))
    second = Npz(str(folder / "a.npz")).load()
    for images in (first, second):
        assert (images.x.numpy() == x).all() and (images.y.numpy() == y).all()
        assert images.x.dtype == torch.uint8 and images.y.dtype == images.train.dtype == torch.int64
    assert first.checksum == second.checksum == checksum(x, y) and first.mean == second.mean
    assert len(copies(folder)) == 1 and not leftovers(folder)
    if os.path.exists("/proc/self/maps"):
        with open("/proc/self/maps") as maps:
            assert f"{copies(folder)[0]}/x.npy" in maps.read()


def test_writing_to_the_images_does_not_reach_the_copy(folder):
    x, _ = write(folder / "a.npz")
    Npz(str(folder / "a.npz")).load().x.fill_(7)
    assert (Npz(str(folder / "a.npz")).load().x.numpy() == x).all()


def test_other_files_other_settings_and_other_versions_are_other_copies(folder, monkeypatch):
    write(folder / "a.npz")
    write(folder / "b.npz", seed=1)
    sums = {Npz(str(folder / name)).load().checksum for name in ("a.npz", "b.npz")}
    assert len(sums) == len(copies(folder)) == 2
    assert len(Npz(str(folder / "a.npz"), holdout=0.5).load().test) == 20
    assert len(copies(folder)) == 3
    monkeypatch.setattr("fedlens.data.cache.VERSION", VERSION + 1)
    decoded, read = [], Npz._read
    monkeypatch.setattr(Npz, "_read", lambda self, path: decoded.append(path) or read(self, path))
    Npz(str(folder / "a.npz")).load()
    assert len(decoded) == 1


def test_a_changed_source_is_decoded_again_and_its_old_copy_goes(folder):
    write(folder / "a.npz")
    old = Npz(str(folder / "a.npz")).load()
    before = old.x.clone()
    x, _ = write(folder / "a.npz", seed=5)
    os.utime(folder / "a.npz", ns=(1, 1))
    assert (Npz(str(folder / "a.npz")).load().x.numpy() == x).all()
    assert len(copies(folder)) == 1
    assert torch.equal(old.x, before)  # whoever still maps the old copy keeps it


@pytest.mark.parametrize(
    "damage",
    [
        "truncate",
        "flip",
        "flip and hide",
        "header",
        "header gone",
        "array gone",
        "empty",
        "shorter header",
        "not a copy",
    ],
)
def test_a_damaged_copy_is_refused_and_made_again(folder, damage):
    x, y = write(folder / "a.npz")
    Npz(str(folder / "a.npz")).load()
    (copy,) = copies(folder)
    pixels, header = copy / "x.npy", copy / "header.json"
    raw = bytearray(pixels.read_bytes())
    if damage == "truncate":
        pixels.write_bytes(raw[:-100])
    elif damage.startswith("flip"):
        date = pixels.stat().st_mtime_ns
        raw[200] ^= 4
        pixels.write_bytes(raw)
        if damage == "flip and hide":
            os.utime(pixels, ns=(date, date))
    elif damage == "header":
        header.write_text(header.read_text()[:-5])
    elif damage == "header gone":
        header.unlink()
    elif damage == "array gone":
        pixels.unlink()
    elif damage == "empty":
        pixels.write_bytes(b"")
    elif damage == "shorter header":
        stored = json.loads(header.read_text())
        header.write_text(json.dumps(stored | {"sums": {"y": stored["sums"]["y"]}}))
    else:
        header.write_text("[]")
    images = Npz(str(folder / "a.npz")).load()
    assert (images.x.numpy() == x).all() and (images.y.numpy() == y).all()
    assert len(copies(folder)) == 1 and not leftovers(folder)
    assert (np.load(copies(folder)[0] / "x.npy") == x).all()


def test_a_cache_that_cannot_be_written_is_done_without(folder, monkeypatch):
    x, _ = write(folder / "a.npz")
    (folder / "file").write_text("in the way")
    monkeypatch.setenv("FEDLENS_CACHE", str(folder / "file"))
    images = Npz(str(folder / "a.npz")).load()
    assert (images.x.numpy() == x).all() and "not cached, as" in images.origin


def test_what_interrupted_processes_left_goes_after_a_day(folder):
    write(folder / "a.npz")
    Npz(str(folder / "a.npz")).load()
    (copy,) = copies(folder)
    source = copy.name.rsplit("-", 1)[0]
    fresh, stale = folder / "cache" / f".{source}-fresh", folder / "cache" / f".{source}-stale"
    for aside in (fresh, stale):
        aside.mkdir()
    long_ago = time.time() - 90_000
    os.utime(stale, (long_ago, long_ago))
    write(folder / "a.npz", seed=9)
    Npz(str(folder / "a.npz")).load()
    assert leftovers(folder) == [fresh]


def load_at_once(path, cache, gate, answers):
    os.environ["FEDLENS_CACHE"] = cache
    torch.set_num_threads(1)
    gate.wait()
    images = Npz(path).load()
    answers.put((images.checksum, checksum(images.x.numpy(), images.y.numpy())))


def test_processes_that_build_one_cache_at_once_all_get_the_whole(folder):
    x, y = write(folder / "a.npz", count=4000)
    start = multiprocessing.get_context("fork")
    gate, answers = start.Barrier(3), start.Queue()
    workers = [
        start.Process(target=load_at_once, args=(str(folder / "a.npz"), str(folder / "cache"), gate, answers))
        for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    got = [answers.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(timeout=60)
        assert worker.exitcode == 0
    assert set(got) == {(checksum(x, y), checksum(x, y))}
    assert len(copies(folder)) == 1 and not leftovers(folder)


def test_the_sum_sees_any_changed_byte():
    array = np.random.default_rng(0).integers(0, 256, 1003, dtype=np.uint8)
    for place in range(1003):
        changed = array.copy()
        changed[place] ^= 1 << place % 8
        assert byte_sum(changed) != byte_sum(array)
    assert (
        byte_sum(array) == sum(int.from_bytes(array[i : i + 8].tobytes(), "little") for i in range(0, 1003, 8)) % 2**64
    )


def test_moments_against_the_textbook():
    x = np.random.default_rng(1).integers(0, 256, (9000, 2, 3, 3), dtype=np.uint8)
    x[:, 1] = 80
    index = np.arange(0, 9000, 2)
    mean, std = moments(x, index)
    values = x[index].astype(np.float64).transpose(1, 0, 2, 3).reshape(2, -1) / 255
    assert mean == pytest.approx(values.mean(1), abs=1e-12)
    assert std == pytest.approx([values[0].std(), 1.0], abs=1e-12)  # no contrast: nothing to divide by


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("FEDLENS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "usual"))
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_folder() == tmp_path / "usual" / "fedlens"
