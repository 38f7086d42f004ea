"""Where images lie changes no bit; what is larger than memory is read where it is mapped."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fedlens
from fedlens import experiment
from fedlens.core.batches import OnHost
from fedlens.core.check import Check
from fedlens.core.cohort import Uniform
from fedlens.core.dry_run import Rehearsal
from fedlens.core.run import run
from fedlens.data import cache, pictures
from fedlens.data.sources.folders import Folder
from fedlens.engines import lanes
from fedlens.engines.lanes import Lanes
from fedlens.engines.prefetch import Window
from fedlens.engines.sequential import Sequential
from fedlens.runs.folder import RunFolder
from recipes import RECIPES
from small import PLAN, federation, network, same
from traces import trace

# ---- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_images_on_the_host_change_no_bit(name, monkeypatch):
    """Client 4 takes 6 steps a round: more than a window holds. Replies are checked, and all of them pass."""
    monkeypatch.setattr(lanes, "_BURST", 4)
    several = ["cpu", "cpu"] if name in ("scaffold", "fedsls") else None
    engine, expected, refused = Lanes(network(), federation().on_host(), lanes=2, devices=several), trace(name), []
    server = expected.again(
        engine,
        check=Check(Rehearsal(Sequential, network(), federation().data), 100.0),
        observe=lambda server, job, answers: refused.extend(answers.refused),
    )
    expected.agrees(server.state, engine.memories)
    assert not refused


def test_sequential_training_and_evaluation_on_the_host():
    resident, hosted = (Sequential(network(), some) for some in (federation(), federation().on_host()))
    states = [run(RECIPES["fedsls"], network(), engine, PLAN).state for engine in (resident, hosted)]
    assert same(*states)
    weights = network().initial_weights()
    assert all(same(a, b) for a, b in zip(resident.measure(weights), hosted.measure(weights), strict=True))


def test_a_window_holds_the_rows_it_was_told():
    data = federation().on_host().to("cpu").data
    window = Window(data, steps=3, size=4)
    rows = torch.randint(0, len(data), (10, 4), generator=torch.Generator().manual_seed(0))
    places = window.rows(10)
    for start in range(0, 10, 3):
        window.fetch(rows[start : start + 3])
        for t in range(start, min(start + 3, 10)):
            assert torch.equal(window.data.x[places[t]], data.x.stored[rows[t]])
            assert torch.equal(window.data.y[places[t]], data.y.stored[rows[t]])


def small(tmp_path, name, **changes):
    words = dict(clients=4, cohort=Uniform(3), rounds=2)
    local = experiment.LocalTraining(steps=10, batch_size=8)
    where = fedlens.Execution(**{"picture": False, "engine": "sequential", "out": str(tmp_path / name), **changes})
    return fedlens.Experiment(**words, local=local, model=experiment.MODELS["cnn2"](), execution=where)


def state_of(settings):
    fedlens.run(settings)
    folder = RunFolder(settings.execution.out)
    return folder.load()[0].state, folder.passport()["config_hash"]


def test_runs_do_not_depend_on_where_images_lie(tmp_path, monkeypatch):
    expected, settings_hash = state_of(small(tmp_path, "device", residency="device"))
    for name, changes in {
        "host": {},
        "lanes": {"engine": "lanes"},
        "workers": {"engine": "workers", "workers": 2},
    }.items():
        state, its_hash = state_of(small(tmp_path, name, residency="host", **changes))
        assert same(expected, state) and its_hash == settings_hash
    # What fits is decided by what is free: here a device with room for half of the images.
    seen = []
    settle = Sequential.__init__
    monkeypatch.setattr(
        Sequential, "__init__", lambda self, net, data, **more: seen.append(data) or settle(self, net, data, **more)
    )
    for share, hosted in ((0.5, True), (2.0, False)):
        monkeypatch.setattr(experiment, "room_for_images", lambda device, share=share: share * 5000 * 28 * 28)
        state, _ = state_of(small(tmp_path, f"auto {share}"))
        assert same(expected, state) and isinstance(seen[-1].data.x, OnHost) == hosted


# ---- larger than memory ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not cache._NO_RESERVE, reason="this system's way of mapping is numpy's own")
def test_a_file_twice_as_large_as_memory_is_mapped(tmp_path):
    total = 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    shape = (total // 3072, 3, 32, 32)
    with open(tmp_path / "x.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
        begin = file.tell()
        try:
            file.truncate(begin + total)  # holes: nothing is stored
            file.seek(begin + 3072 * (shape[0] - 1))
            file.write(b"\7" * 3072)
        except OSError:
            pytest.skip("files on this disk have no holes")
    x = torch.from_numpy(cache._mapped(tmp_path / "x.npy"))
    assert x.shape == shape and x[-1].eq(7).all() and x[shape[0] // 2].eq(0).all()
    x[0] = 9  # goes to memory of this process alone
    assert cache._mapped(tmp_path / "x.npy")[0].max() == 0


def test_images_decoded_into_a_file_are_the_same(tmp_path, monkeypatch):
    from PIL import Image

    pixels = np.random.Generator(np.random.Philox(1)).integers(0, 256, (6, 9, 9, 3), np.uint8)
    files = [tmp_path / f"{n}.png" for n in range(6)]
    for file, picture in zip(files, pixels, strict=True):
        Image.fromarray(picture).save(file)
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path / "cache"))
    in_memory = pictures.pictures(files)
    monkeypatch.setattr(pictures, "IN_MEMORY", 6 * 9 * 9 * 3 - 1)
    in_a_file = pictures.pictures(files)
    assert isinstance(in_a_file, np.memmap) and not isinstance(in_memory, np.memmap)
    assert (in_a_file == in_memory).all() and (in_memory == pixels.transpose(0, 3, 1, 2)).all()
    assert not list((tmp_path / "cache").iterdir())  # nothing is left when the array goes


SCRIPT = """
import resource, sys
import torch
torch.set_num_threads(1)
import fedlens
from fedlens import config
from fedlens.data import pictures

def allow(megabytes):
    used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + (megabytes << 20),) * 2)

pictures.IN_MEMORY = 1 << 20
what, cap, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
words = ["data=folder", "data.path=photos", "data.size=0", "partition=iid", "clients=4", "cohort=2", "rounds=1",
         "model=large_net:Net", "local.batch_size=4", "engine=" + sys.argv[4], "residency=" + sys.argv[5], "lanes=1",
         "out=run-" + sys.argv[4], "picture=false", "evaluate.personal=before", "device=cpu"]
settings = config.read(None, words)
import PIL.Image, fedlens.simulate, pyarrow.parquet  # what they need is no part of the measurement
allow(cap if what == "decode" else cap + size)  # a mapped file counts as a whole, whatever of it is in memory
if what == "decode":
    print(settings.data.load().x.nbytes >> 20)
else:
    print(fedlens.run(settings).accuracy)
try:
    torch.zeros((cap + size if what == "run" else cap) << 20, dtype=torch.uint8)
    print("no limit")
except RuntimeError:
    print("limited")
"""


NET = """
from torch import nn
class Net(nn.Module):
    def __init__(self, classes, channels):
        super().__init__()
        self.pool, self.flat = nn.AvgPool2d(64), nn.Flatten()
        self.head = nn.Linear(channels * 16, classes)
    def features(self, x):
        return self.flat(self.pool(x))
    def forward(self, x):
        return self.head(self.features(x))
"""
CAP, SIZE = 100, 300  # MiB that a process may allocate, and that all images have


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """1,600 photographs of 256 x 256 pixels: red ones and green ones."""
    from PIL import Image

    place = tmp_path_factory.mktemp("large")
    for n in range(1600):
        folder = place / "photos" / ("test" if n < 32 else "train") / "ab"[n % 2]
        folder.mkdir(parents=True, exist_ok=True)
        picture = np.zeros((256, 256, 3), np.uint8)
        picture[..., n % 2] = 100 + n % 100
        Image.fromarray(picture).save(folder / f"{n}.png", compress_level=1)
    (place / "large_net.py").write_text(NET)
    return place


def limited(nursery, place, *arguments):
    (place / "limited.py").write_text(SCRIPT)
    environment = {"FEDLENS_CACHE": str(place / "cache")}
    done = nursery(*map(str, arguments), cwd=place, program="limited.py", environment=environment)
    assert done.code == 0, done.err[-2000:]
    said, limit = done.out.splitlines()
    if limit != "limited":
        pytest.skip("this system does not enforce the limit")
    return float(said)


@pytest.mark.skipif(sys.platform != "linux", reason="limits on memory are those of Linux")
def test_more_images_than_memory(nursery, photos):
    """Under a hard limit on what a process may allocate, a third of the images: decode, split, train, evaluate."""
    assert limited(nursery, photos, "decode", CAP, SIZE, "sequential", "auto") == SIZE
    for engine, residency in (("sequential", "auto"), ("lanes", "host")):
        assert limited(nursery, photos, "run", CAP, SIZE, engine, residency) > 0.9


def test_the_copy_on_disk_is_what_was_decoded(tmp_path, monkeypatch):
    from PIL import Image

    for n in range(8):
        folder = tmp_path / "photos" / "ab"[n % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), 20 * n, np.uint8)).save(folder / f"{n}.png")
    sums = []
    for cap in (1 << 30, 1):
        monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path / str(cap)))
        monkeypatch.setattr(pictures, "IN_MEMORY", cap)
        images = Folder(str(tmp_path / "photos"), size=8).load()
        sums.append((images.checksum, images.mean, images.std))
        assert [path.name for path in Path(tmp_path / str(cap)).iterdir() if path.name[0] == "."] == []
    assert sums[0] == sums[1]
