"""The hub through the library itself, on data sets that lie on this disk in the hub's own layouts."""

import sys
import types

import numpy as np
import pytest
from PIL import Image

from fedlens.core.errors import BadInput
from fedlens.data.sources import hub
from fedlens.data.sources.hub import Hub


@pytest.fixture
def library(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    datasets = pytest.importorskip("datasets", reason="the library is an extra: pip install 'fedlens[hub]'")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "home" / "datasets")
    datasets.disable_progress_bars()
    return datasets


def test_parquet_files_as_the_hub_stores_them(library, tmp_path):
    kinds = library.Features(
        img=library.Image(), label=library.ClassLabel(names=["cat", "dog"]), who=library.Value("string")
    )
    draw, pixels, place = np.random.Generator(np.random.Philox(0)), [], tmp_path / "set" / "data"
    place.mkdir(parents=True)
    for split, count in (("train", 20), ("test", 8)):
        x = draw.integers(0, 256, (count, 12, 12, 3), np.uint8)
        columns = dict(
            img=[Image.fromarray(one) for one in x],
            label=[n % 2 for n in range(count)],
            who=[f"w{n % 3}" for n in range(count)],
        )
        library.Dataset.from_dict(columns, features=kinds).to_parquet(place / f"{split}-00000-of-00001.parquet")
        pixels.append(x)
    images = Hub(str(tmp_path / "set"), image="img", user="who").load()
    assert (images.x.numpy() == np.concatenate(pixels).transpose(0, 3, 1, 2)).all()
    assert images.classes == ("cat", "dog") and images.test.tolist() == list(range(20, 28))
    assert images.users.tolist() == [n % 3 for n in (*range(20), *range(8))]
    assert images.owner_names == ("w0", "w1", "w2")
    with pytest.raises(BadInput, match="has no column 'lable'; did you mean 'label'"):
        Hub(str(tmp_path / "set"), image="img", label="lable").load()
    with pytest.raises(BadInput, match="has no such split; did you mean 'train'"):
        Hub(str(tmp_path / "set"), train="trian").load()


def test_folders_of_grey_images(library, tmp_path):
    for n in range(12):
        folder = tmp_path / "set" / "train" / "ab"[n % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((9, 9), 20 * n, np.uint8)).save(folder / f"{n:02d}.png")
    images = Hub(str(tmp_path / "set"), holdout=0.25).load()
    assert images.x.shape == (12, 1, 9, 9) and images.classes == ("a", "b") and len(images.test) == 3
    assert sorted(images.x[:, 0, 0, 0].tolist()) == [20 * n for n in range(12)]


def test_offline_is_one_sentence_at_once(library, monkeypatch, capfd):
    import time

    monkeypatch.setattr(hub, "_known_host", lambda address: False)
    monkeypatch.setattr(hub.urllib.request, "getproxies", dict)
    began = time.perf_counter()
    with pytest.raises(BadInput, match=r"^ylecun/mnist cannot be had from the hub \(Couldn't reach .*\)$"):
        Hub("ylecun/mnist").load()
    assert time.perf_counter() - began < 5 and capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("proxies", "known", "offline"), [({}, False, True), ({}, True, False), ({"https": "p"}, False, False)]
)
def test_the_library_waits_only_where_the_hub_may_answer(proxies, known, offline, monkeypatch):
    """Without the library: its switch is set inside, and back again outside, whatever happens."""
    switch = types.ModuleType("datasets.config")
    switch.HF_HUB_OFFLINE = False
    monkeypatch.setitem(sys.modules, "datasets.config", switch)
    monkeypatch.setattr(hub, "_known_host", lambda address: known)
    monkeypatch.setattr(hub.urllib.request, "getproxies", lambda: proxies)
    with pytest.raises(ZeroDivisionError), hub._at_once():
        assert offline == switch.HF_HUB_OFFLINE
        raise ZeroDivisionError
    assert switch.HF_HUB_OFFLINE is False


def test_hosts_are_looked_up():
    assert hub._known_host("https://localhost:8000/x") and not hub._known_host("https://no-such-host.invalid")
