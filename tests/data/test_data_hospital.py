"""From a hospital's files to a data set: tables, patients, kinds that are counted, statistics, many processes."""

import csv
import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dicoms import SECRET, write_dicom
from fedlens import config
from fedlens.core.errors import BadInput
from fedlens.data import cache, pictures
from fedlens.data.groups import by_first_appearance, held_out_groups
from fedlens.data.partition.base import ByUser, Iid
from fedlens.data.sources.folders import ClientsFolder, Folder
from fedlens.data.sources.table import Table

RANDOM = np.random.default_rng(3)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDLENS_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def save(path, array=None, **options):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    array = RANDOM.integers(0, 256, (8, 8, 3), np.uint8) if array is None else array
    Image.fromarray(array).save(path, **options)
    return path


def table(rows, path="all.csv", delimiter=","):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*rows[0]], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def rows_of(count, **columns):
    """Files a0.png, ... that are there, with columns made from their number."""
    found = []
    for n in range(count):
        save(f"images/a{n}.png")
        found.append({"path": f"images/a{n}.png", **{name: make(n) for name, make in columns.items()}})
    return found


# ---- tables ----------------------------------------------------------------------------------------------------------
def test_a_table_with_everything():
    rows = rows_of(
        12,
        label=lambda n: ["10", "2"][n % 2],
        client=lambda n: ["north", "south"][n % 3 == 0],
        group=lambda n: f"p{n // 2}",
        split=lambda n: "Test" if n >= 8 else "train",
    )
    images = Table(table(rows), size=8).load()
    assert images.classes == ("2", "10")  # numbers in their order
    assert [images.classes[y] for y in images.y] == [row["label"] for row in rows]
    assert images.train.tolist() == [*range(8)] and images.test.tolist() == [*range(8, 12)]
    assert [images.owner_names[user] for user in images.users] == [row["client"] for row in rows]
    assert images.groups.tolist() == [n // 2 for n in range(12)]
    for n, row in enumerate(rows):
        assert (images.x[n].numpy() == np.asarray(Image.open(row["path"])).transpose(2, 0, 1)).all()


@pytest.mark.parametrize("kind", ["semicolons", "tabs", "byte order mark", "parquet"])
def test_tables_as_programs_write_them(kind):
    rows = rows_of(6, label=lambda n: ["cat", "dög"][n % 2])
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), "all.parquet")
        path = "all.parquet"
    else:
        path = table(rows, delimiter={"semicolons": ";", "tabs": "\t"}.get(kind, ","))
        if kind == "byte order mark":
            Path(path).write_bytes(b"\xef\xbb\xbf" + Path(path).read_bytes())
    images = config.read(None, [f"data={path}", "data.size=8"]).data.load()
    assert images.classes == ("cat", "dög") and images.y.tolist() == [0, 1] * 3
    assert images.users is None and len(images.test) == 1


def test_columns_under_other_names_and_whole_paths(tmp_path):
    rows = [
        {"file": str(tmp_path / row["path"]), "diagnosis": row["label"], "site": "a"}
        for row in rows_of(4, label=lambda n: n % 2)
    ]
    source = Table(table(rows), size=8, image="file", label="diagnosis", client="site")
    assert source.owners() == 1 and source.load().owner_names == ("a",)


def test_clients_of_a_table_stay_apart_by_themselves():
    path = table(rows_of(12, label=lambda n: n % 2, client=lambda n: "abc"[n % 3]))
    experiment = config.read(None, [f"data={path}", "data.size=8"])
    assert isinstance(experiment.partition, ByUser) and experiment.clients == 3


# ---- patients --------------------------------------------------------------------------------------------------------
def test_groups_are_held_out_whole_and_in_proportion():
    groups, strata = RANDOM.integers(0, 200, 2000), RANDOM.integers(0, 6, 2000)
    rest, held = held_out_groups(strata, groups, 0.25, 5)
    assert sorted([*rest, *held]) == [*range(2000)] and not set(groups[rest]) & set(groups[held])
    for stratum in range(6):
        share = (strata[held] == stratum).mean() and (strata[held] == stratum).sum() / (strata == stratum).sum()
        assert abs(share - 0.25) < 0.03
    assert (held_out_groups(strata, groups, 0.25, 5)[1] == held).all()
    alone = held_out_groups(np.array([0, 0, 1, 1]), np.array([7, 7, 7, 7]), 0.5, 0)
    assert [len(part) for part in alone] == [4, 0]  # a single patient trains


def test_names_are_numbered_and_nobody_is_alone():
    assert by_first_appearance(["b", "", "a", "b", ""]).tolist() == [0, 1, 2, 0, 3]


def test_images_without_a_patient_are_not_counted_as_patients():
    path = table(rows_of(60, label=lambda n: n % 2, group=lambda n: f"p{n % 13}" if n < 26 else ""))
    images = Table(path, size=8).load()
    assert images.notes == ("13 patients or groups (34 images have none): none is both in training and in test",)


def test_no_patient_of_a_table_is_in_both_parts():
    path = table(rows_of(60, label=lambda n: n % 2, group=lambda n: f"p{n % 13}"))
    images = Table(path, size=8).load()
    assert len(images.test) and not set(images.groups[images.train].tolist()) & set(images.groups[images.test].tolist())
    assert images.notes == ("13 patients or groups: none is both in training and in test",)
    free = Table(path, size=8, group="none").load()
    assert free.groups is None and free.notes == ()


def test_parts_of_ones_own_that_share_a_patient_are_refused():
    rows = rows_of(8, label=lambda n: n % 2, group=lambda n: f"p{n % 5}", split=lambda n: "test" if n > 4 else "train")
    with pytest.raises(BadInput, match=r"^3 patients or groups are both in the training and in the test part.*a0.png"):
        Table(table(rows), size=8).load()


@pytest.mark.parametrize("words", [["partition=iid", "partition.test=pooled"], ["partition=iid"]])
def test_a_split_never_parts_a_patient_between_training_and_test(words):
    path = table(rows_of(40, label=lambda n: n % 2, group=lambda n: f"p{n % 9}"))
    experiment = config.read(None, [f"data={path}", "data.size=8", "clients=2", *words])
    images = experiment.data.load()
    _, split = experiment.federation(images)
    groups = images.groups.numpy()
    train, test = (set(groups[np.concatenate(shards)]) for shards in (split.train, split.test))
    assert test and not train & test


def test_a_saved_split_that_parts_a_patient_is_refused():
    path = table(rows_of(12, label=lambda n: n % 2, group=lambda n: f"p{n % 4}"))
    images = Table(path, size=8, group="none").load()
    replace(Iid().split(images, 2, 0), notes=()).save("split.json", images)
    experiment = config.read(None, [f"data={path}", "data.size=8", "partition=split.json", "clients=2"])
    with pytest.raises(BadInput, match=r"this split has \d of 4 patients or groups both in training and in test"):
        experiment.federation(experiment.data.load())


def test_folders_of_patients():
    for n in range(24):
        save(f"set/{['cat', 'dog'][n % 2]}/p{n % 6}/{n}.png")
    images = Folder("set", size=8, group="folder").load()
    assert len(set(images.groups.tolist())) == 6 and len(images.test)
    assert not set(images.groups[images.train].tolist()) & set(images.groups[images.test].tolist())


def test_dicom_patients_are_kept_together_and_no_tag_goes_further(tmp_path):
    pytest.importorskip("pydicom")
    for n in range(24):
        values = RANDOM.integers(0, 4096, (8, 8)).astype(np.uint16)
        # Some scanners give their files no ending.
        name = f"sites/{['east', 'west'][n % 2]}/{['ill', 'well'][n // 2 % 2]}/{'IM' if n % 3 else 'a.dcm'}{n:03}"
        name += ".dcm" if n % 3 == 0 else ""
        write_dicom(tmp_path / name, values, f"SECRET-{n // 4}", BitsStored=12, InstitutionName="Charite")
    words = [
        "data=clients_folder",
        "data.path=sites",
        "data.size=16",
        "model=cnn_small",
        "rounds=1",
        "local.batch_size=4",
    ]
    experiment = config.read(None, [*words, "engine=sequential", "picture=false", "device=cpu", "out=run"])
    images = experiment.data.load()
    assert len(images) == 24
    assert len(set(images.groups.tolist())) == 6 and "among the images: 24 DICOM" in images.notes
    assert not set(images.groups[images.train].tolist()) & set(images.groups[images.test].tolist())
    from fedlens.report.page import write
    from fedlens.simulate.run import run

    run(experiment)
    write([Path("run")], Path("run/report.html"))
    written = [path for root in ("cache", "run") for path in (tmp_path / root).rglob("*") if path.is_file()]
    for path in written:
        content = path.read_bytes()
        assert not any(word in content for word in (SECRET.encode(), b"SECRET-", b"Charite")), path
    assert len(written) > 10


# ---- what is counted -------------------------------------------------------------------------------------------------
def test_what_is_skipped_is_counted_by_kind(tmp_path):
    for part in ("train", "val", "test"):
        for label in ("cat", "dog"):
            save(f"set/{part}/{label}/a.png")
            save(f"set/{part}/{label}/b.png")
    save("set/cover.png")
    for name in ("train/cat/notes.TXT", "train/dog/more.txt", "test/dog/Thumbs.db", "train/cat/.hidden.png"):
        (tmp_path / "set" / name).write_text("no image")
    (tmp_path / "set/train/fox").mkdir()
    (tmp_path / "set/train/cat/README").write_text("no DICOM")
    images = Folder("set", size=8).load()
    assert images.notes == (
        "skipped: 1 .db, 2 .txt, 1 empty class folder (fox), 1 hidden, 4 images in val, as there is test, "
        "1 images outside of class folders, 1 without an ending",
    )
    assert Folder("set", size=8).load().notes == images.notes and images.classes == ("cat", "dog")


def test_kinds_of_images_are_counted(tmp_path):
    deep = RANDOM.integers(0, 4096, (8, 8)).astype(np.uint16)
    deep[0, 0] = 4095
    for n in range(3):
        save(f"set/cat/deep{n}.png", deep)
        save(f"set/dog/{n}.png")
    save("set/dog/gray.png", deep.astype(np.uint8))
    save("set/dog/clear.png", RANDOM.integers(0, 255, (8, 8, 4), np.uint8))
    images = Folder("set", size=8).load()
    assert images.notes == (
        "among the images: 3 of 16 bits (12 used); 1 with transparent parts, which become black; 4 gray; 4 colour",
    )
    assert Folder("set", size=8).load().notes == images.notes  # also from the copy
    save("set/dog/other.png", deep * 16)
    assert any("different numbers" in note for note in Folder("set", size=8).load().notes)
    assert not any("different numbers" in note for note in Folder("set", size=8, bits=16).load().notes)


def test_dicom_that_nothing_unpacks_is_left_out_and_counted(tmp_path, monkeypatch):
    pydicom = pytest.importorskip("pydicom")
    from pydicom.uid import RLELossless

    for n in range(12):
        packed = {"syntax": RLELossless} if n == 3 else {}
        write_dicom(tmp_path / f"set/{'ab'[n % 2]}/{n}.dcm", np.full((8, 8), 20 * n, np.uint8), f"{n}", **packed)
    save("set/a/plain.png", np.full((8, 8), 255, np.uint8))

    known = pydicom.pixels.get_decoder

    def some(syntax):
        if syntax == RLELossless:
            raise NotImplementedError
        return known(syntax)

    monkeypatch.setattr(pydicom.pixels, "get_decoder", some)
    images = Folder("set", size=8, colour=False).load()
    assert len(images) == 12 and any("skipped: 1 DICOM compressed as RLE Lossless" in note for note in images.notes)
    shown = {int(x[0, 0, 0]): images.classes[y] for x, y in zip(images.x, images.y, strict=True)}
    assert shown == {20 * n: "ab"[n % 2] for n in range(12) if n != 3} | {255: "a"}


# ---- copies and statistics -------------------------------------------------------------------------------------------
def test_keys_of_copies_are_those_of_before():
    """Settings that came later do not change where a decoded copy lies; these digests are of the version before."""
    known = {"path": "'set'", "size": "8", "colour": "True", "holdout": "0.2"}
    assert Folder("set", size=8).settings() == known | {"domains": "False"}
    assert ClientsFolder("set", size=8, normalise="imagenet", mean=(0.5,), std=(1.0,)).settings() == known
    assert Folder("set", size=8, resize="pad").settings() == known | {"domains": "False", "resize": "'pad'"}


def test_a_copy_of_an_earlier_decoder_is_made_anew(tmp_path):
    for n in range(4):
        save(f"set/{'ab'[n % 2]}/{n}.png")
    first = Folder("set", size=8).load()
    (copy,) = (tmp_path / "cache").iterdir()
    header = json.loads((copy / "header.json").read_text())
    del header["decoder"], header["notes"]
    (copy / "header.json").write_text(json.dumps(header | {"classes": ["x", "y"]}))
    assert Folder("set", size=8).load().classes == first.classes == ("a", "b")
    assert [each.name for each in (tmp_path / "cache").iterdir()] == [copy.name]
    assert cache.opened(copy, 2) is not None and cache.opened(copy, 3) is None


@pytest.mark.parametrize(("colour", "channels"), [(True, 3), (False, 1)])
def test_statistics(colour, channels):
    for n in range(6):
        save(f"set/{'ab'[n % 2]}/{n}.png")
    source = Folder("set", size=8, colour=colour)
    images = source.load()
    pixels = images.x[images.train].double() / 255
    assert images.mean == pytest.approx(pixels.mean((0, 2, 3)).tolist(), abs=1e-12)
    assert replace(source, normalise="none").load().mean == (0.0,) * channels
    imagenet = replace(source, normalise="imagenet").load()
    assert imagenet.mean == ((0.485, 0.456, 0.406) if colour else pytest.approx((0.449,), abs=1e-9))
    declared = replace(source, mean=(0.5,) * channels, std=(0.25,) * channels).load()
    assert declared.mean == (0.5,) * channels and declared.std == (0.25,) * channels
    assert declared.checksum == images.checksum
    words = ["data=folder", "data.path=set", "data.mean=" + ",".join(["0.5"] * channels), "data.std=0.25"]
    assert config.read(None, words).data.mean == (0.5,) * channels


# ---- many ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def many(monkeypatch):
    monkeypatch.setattr(pictures, "MANY_FILES", 10)
    monkeypatch.setattr(pictures, "_AT_ONCE", 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)


@pytest.mark.skipif(os.name != "posix", reason="files are handed on as descriptors")
def test_processes_side_by_side_read_the_same(tmp_path, many, monkeypatch):
    for n in range(40):
        save(f"set/{'ab'[n % 2]}/{n}.png", RANDOM.integers(0, 4096, (9, 12)).astype(np.uint16))
    beside = Folder("set", size=8).load()
    monkeypatch.setattr(pictures, "MANY_FILES", 1000)
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path / "other"))
    alone = Folder("set", size=8).load()
    assert beside.checksum == alone.checksum and beside.notes == alone.notes and beside.scaled == alone.scaled
    assert beside.test.tolist() == alone.test.tolist()


def test_a_damaged_file_among_many_is_named(tmp_path, many):
    for n in range(40):
        save(f"set/{'ab'[n % 2]}/{n:02}.png")
    (tmp_path / "set/a/20.png").write_bytes(b"no image")
    with pytest.raises(BadInput, match=r"a/20.png is not an image; replace or remove it"):
        Folder("set", size=8).load()
    save("set/a/20.png", np.zeros((5, 5), np.uint8))
    with pytest.raises(BadInput, match=r"a/20.png is of another size than"):
        Folder("set", size=0).load()
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_file()]


def test_progress_in_a_log_and_in_a_terminal(monkeypatch):
    class Stream:
        def __init__(self, tty):
            self.text, self.tty = "", tty

        def isatty(self):
            return self.tty

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    clock = iter(np.arange(0, 1000, 5.0))
    monkeypatch.setattr(pictures.time, "monotonic", lambda: float(next(clock)))
    for tty in (True, False):
        stream = Stream(tty)
        with pictures._Progress(8, stream) as progress:
            for _ in range(8):
                progress.done(1)
        said = stream.text.replace("\r", "\n").splitlines()
        assert any("2 of 8 images, about" in line for line in said) and ("[" in stream.text) == tty
    assert Counter(pictures.skipped_note(Counter())) == Counter()
