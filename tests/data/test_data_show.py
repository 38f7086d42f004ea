"""What `fedlens data` shows."""

import numpy as np
import pytest
from PIL import Image

from fedlens.core.errors import BadInput
from fedlens.data import DATASETS, PARTITIONS
from fedlens.data.partition.base import Domains, Iid
from fedlens.data.partition.label_skew import Dirichlet, Shards
from fedlens.data.show import check_rows, get, list_rows, options
from fedlens.data.sources.modalities import Modalities
from fedlens.data.sources.small import Mnist5k
from fedlens.report.split_figure import draw_split


def test_a_row_for_every_data_set_and_partition(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDLENS_DATA", str(tmp_path))
    rows = {(row["kind"], row["name"]): row for row in list_rows()}
    assert rows.keys() == {("data", name) for name in DATASETS} | {("partition", name) for name in PARTITIONS}
    assert all(row["about"] and row.keys() == list_rows()[0].keys() for row in rows.values())
    assert rows["data", "mnist5k"]["state"] == "here" and rows["data", "npz"]["state"] == "yours"
    assert (
        rows["data", "npz"]["where"] == "name it by data.path" and rows["data", "hub"]["where"] == "name it by data.id"
    )
    assert rows["data", "cifar10"]["state"] in ("missing", "hub")
    assert "alpha=0.5 min_size=10 dialect=class" in rows["partition", "dirichlet"]["options"]
    assert "base=iid" in options(Domains) and "base=fashion_mnist" in options(Modalities)


def test_get_says_what_was_got():
    row = get("mnist5k")
    assert (row["train"], row["test"], row["classes"], row["size"]) == (4000, 1000, 10, "1x28x28")
    with pytest.raises(BadInput, match=r"there is no data set 'cifar11'; did you mean 'cifar10'\?"):
        get("cifar11")


def test_check_reads_every_byte(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDLENS_DATA", str(tmp_path / "nowhere"))
    rows = {row["name"]: row for row in check_rows()}
    assert rows[str(tmp_path / "nowhere")]["state"] == "missing"
    assert rows["mnist5k"]["state"] == "ok" and rows["mnist5k"]["checksum"] == Mnist5k().load().checksum
    # Two bytes changed so that their sum is the same: the quick look of every load misses it, this one does not.
    (pixels,) = (tmp_path / "cache").glob("mnist5k-*/x.npy")
    raw = bytearray(pixels.read_bytes())
    lit = [place for place in range(1000, 5000) if raw[place] > 9]
    first, second = next((a, b) for a in lit for b in lit if a != b and (a - b) % 8 == 0)
    raw[first], raw[second] = raw[first] - 1, raw[second] + 1
    pixels.write_bytes(raw)
    assert {row["name"]: row for row in check_rows(["mnist5k"])}["mnist5k"]["state"] == "damaged"


@pytest.mark.parametrize(("partition", "clients"), [(Iid(), 1), (Dirichlet(0.1, 1), 300)])
def test_a_split_as_a_picture(tmp_path, partition, clients):
    images = Mnist5k().load()
    split = partition.split(images, clients, 0)
    written = draw_split(images, split, tmp_path / "figures" / "split.png")
    assert [path.suffix for path in written] == [".png", ".svg"]
    with Image.open(written[0]) as picture:
        shown = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    assert (shown == [0, 114, 178]).all(1).sum() > 500  # bars in Okabe and Ito's blue
    assert written[1].read_text().lstrip().startswith("<?xml")


def test_modalities_as_a_picture(tmp_path):
    images = Modalities(Mnist5k(), ("gray", "inverted")).load()
    draw_split(images, Domains(Shards(2)).split(images, 10, 0), tmp_path / "split")
    with Image.open(tmp_path / "split.png") as picture:
        shown = np.asarray(picture.convert("RGB")).astype(int).reshape(-1, 3)
    orange = np.array([213, 94, 0]) * 0.8 + 255 * 0.2  # the second domain's bubbles
    assert (np.abs(shown - orange).max(1) <= 2).sum() > 500
