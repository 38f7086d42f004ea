"""Mistakes around data and models that people make: one sentence each, before anything is trained or written."""

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from dicoms import write_dicom
from fedlens import config
from fedlens.cli.main import main
from fedlens.models import MODELS
from fedlens.simulate.run import checked

RANDOM = np.random.default_rng(11)
QUICK = ["model=cnn_small", "rounds=1", "local.batch_size=2", "engine=sequential", "device=cpu", "cohort=everyone"]
TABLE = "data=all.csv"


def save(path, array=None, **options):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(RANDOM.integers(0, 256, (16, 16, 3), np.uint8) if array is None else array).save(path, **options)


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    """Three sites with two classes each, and a table of all images."""
    root = tmp_path_factory.mktemp("mistakes")
    rows = ["path,label,client"]
    for site in ("east", "north", "west"):
        for label in ("ill", "well"):
            for n in range(4):
                save(root / "sites" / site / label / f"{n}.png")
                rows.append(f"sites/{site}/{label}/{n}.png,{label},{site}")
    (root / "all.csv").write_text("\n".join(rows) + "\n")
    return root


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, sites):
    shutil.copytree(sites, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDLENS_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)


def lines(change):
    """The table with its lines changed."""
    path = Path("all.csv")
    path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")


def dicom(name="sites/east/ill/x.dcm", values=None, **tags):
    pytest.importorskip("pydicom")
    write_dicom(Path(name), np.zeros((16, 16), np.uint16) if values is None else values, **tags)


def resnet(channels=3, classes=5, name="resnet20"):
    torch.save(MODELS[name]().build(classes, channels, 16).state_dict(), "net.pt")
    return f"model={name}", "model.weights=net.pt"


def module(name, body):
    Path(f"{name}.py").write_text(f"from torch import nn\nclass Net(nn.Module):\n{body}\n")


NET = """    def __init__(self, classes, channels, size):
        super().__init__()
        self.flat = nn.Flatten()
        self.head = nn.Linear(channels * size * size, {out})
    def forward(self, x):
        return {end}"""

SITES = ("data=clients_folder", "data.path=sites", "data.size=16")
FOLDER = ("data=folder", "data.path=sites/east", "data.size=16", "partition=iid", "clients=2")

# {name: (what happens before, words, what the sentence says)}
MISTAKES = {
    # files
    "truncated dicom": (lambda: dicom(keep=900), SITES, "DICOM file"),
    "dicom of several frames": (lambda: dicom(values=np.zeros((3, 8, 8), np.uint8)), SITES, "of 3 frames"),
    "a text called .dcm": (lambda: Path("sites/east/ill/a.dcm").write_text("no"), SITES, "a.dcm is not an image"),
    "truncated jpeg": (
        lambda: (save("sites/east/ill/a.jpg"), os.truncate("sites/east/ill/a.jpg", 400)),
        SITES,
        "a.jpg cannot be decoded",
    ),
    "an empty file": (lambda: Path("sites/east/ill/a.png").touch(), SITES, "a.png is not an image"),
    "a folder called .png": (lambda: Path("sites/east/ill/b.png").symlink_to("."), SITES, None),
    "a link that leads nowhere": (
        lambda: Path("sites/east/ill/b.png").symlink_to("gone.png"),
        SITES,
        "b.png cannot be read (No such file or directory)",
    ),
    "decimals beyond one": (
        lambda: save("sites/east/ill/a.tif", np.full((16, 16), 7.5, np.float32)),
        SITES,
        "decimal numbers from 7.5 to 7.5",
    ),
    "negative pixels": (
        lambda: save("sites/east/ill/a.tif", np.full((16, 16), -5, np.int32)),
        SITES,
        "numbers from -5 to -5",
    ),
    "too few bits declared": (
        lambda: save("sites/east/ill/a.png", np.full((16, 16), 5000, np.uint16)),
        (*SITES, "data.bits=12"),
        "raise data.bits",
    ),
    "bits that do not exist": (None, (*SITES, "data.bits=9"), "data.bits is 9"),
    "other sizes": (lambda: save("sites/east/ill/a.png", np.zeros((9, 9), np.uint8)), (*SITES, "data.size=0"), "size"),
    # folders
    "no such folder": (None, ("data=folder", "data.path=site"), "data.path is 'site', but there is no such"),
    "a file for a folder": (None, ("data=folder", "data.path=all.csv"), "data=table data.path=all.csv"),
    "sites taken for classes": (None, ("data=folder", "data.path=sites"), "use data=clients_folder"),
    "a site without images": (
        lambda: Path("sites/south/ill").mkdir(parents=True),
        SITES,
        "sites/south holds no training images",
    ),
    "one class alone": (
        lambda: [shutil.rmtree(f"sites/{site}/ill") for site in ("east", "north", "west")],
        SITES,
        "has one class only (well)",
    ),
    "a test folder at one site": (
        lambda: [shutil.copytree("sites/east/ill", f"sites/east/{part}/ill") for part in ("train", "test")],
        SITES,
        "has no test folder, but others have one",
    ),
    "images right in the folder": (
        lambda: save("loose/a.png"),
        ("data=folder", "data.path=loose"),
        "no folders named after a class with images are in it (skipped: 1 images outside of class folders)",
    ),
    "patients' folders that are not there": (
        None,
        (*SITES, "data.group=folder"),
        "no image lies in a patient's folder",
    ),
    "all images for validation": (None, (*SITES, "evaluate.validation=1"), "leaves no client an image to train on"),
    "more clients than images": (None, (*FOLDER, "clients=50"), "clients is 50"),
    # tables
    "a table with missing files": (
        lambda: [os.remove(f"sites/east/ill/{n}.png") for n in (1, 2)],
        (TABLE,),
        "names 2 files that are not there, the first in line 3: 1.png",
    ),
    "a table without labels": (
        lambda: lines(lambda rows: [rows[0].replace("label", "diagnosis"), *rows[1:]]),
        (TABLE,),
        "has no column 'label'",
    ),
    "an empty label": (
        lambda: lines(lambda rows: [*rows[:4], rows[4].replace(",ill,", ",,"), *rows[5:]]),
        (TABLE,),
        "line 5: label is empty",
    ),
    "a file twice": (lambda: lines(lambda rows: [*rows, rows[1]]), (TABLE,), "twice, in lines 2 and 26"),
    "a cell too many": (lambda: lines(lambda rows: [*rows, rows[1] + ",x"]), (TABLE,), "line 26 has 4 cells"),
    "an unknown split": (
        lambda: lines(lambda rows: [f"{rows[0]},split", *(f"{row},trian" for row in rows[1:])]),
        (TABLE,),
        "split is 'trian', but it should be train or test",
    ),
    "no training rows": (
        lambda: lines(lambda rows: [f"{rows[0]},split", *(f"{row},test" for row in rows[1:])]),
        (TABLE,),
        "has no row whose split is train",
    ),
    "a patient in both parts": (
        lambda: lines(
            lambda rows: [
                f"{rows[0]},group,split",
                *(f"{row},p{n % 3},{'test' if n > 12 else 'train'}" for n, row in enumerate(rows[1:])),
            ]
        ),
        (TABLE, "data.size=16"),
        "3 patients or groups are both in the training and in the test part",
    ),
    "a column that is not there": (None, (TABLE, "data.client=hospital"), "data.client is 'hospital'"),
    "a table in another encoding": (
        lambda: Path("all.csv").write_bytes("path,label\na.png,Größe\n".encode("latin-1")),
        (TABLE,),
        "is not UTF-8 text",
    ),
    "an empty table": (lambda: Path("all.csv").write_text(""), (TABLE,), "has no column 'path'"),
    "a table with a head alone": (lambda: lines(lambda rows: rows[:1]), (TABLE,), "has columns and no rows"),
    "a damaged parquet": (lambda: Path("a.parquet").write_bytes(b"PAR1"), ("data=a.parquet",), "a.parquet cannot be"),
    "a parquet without paths": (
        lambda: pq.write_table(pa.table({"label": ["a"]}), "a.parquet"),
        ("data=a.parquet",),
        "has no column 'path'",
    ),
    "labels as text": (
        lambda: np.savez("t.npz", x=np.zeros((8, 16, 16), np.uint8), y=np.array(["ill", "well"] * 4)),
        ("data=t.npz", "partition=iid", "clients=2"),
        "labels must be one whole number per image",
    ),
    # statistics
    "too few means": (None, (*SITES, "data.mean=0.5", "data.std=0.2"), "data.mean has 1 numbers"),
    "a mean without a deviation": (None, (*SITES, "data.mean=0.5,0.5,0.5"), "data.std has 0 numbers"),
    "a deviation of nothing": (None, (*SITES, "data.mean=0.5,0.5,0.5", "data.std=1,0,1"), "must be above 0"),
    "two statistics": (
        None,
        (*SITES, "data.normalise=imagenet", "data.mean=0,0,0", "data.std=1,1,1"),
        "data.mean and data.normalise=imagenet contradict each other",
    ),
    "an unknown way to a square": (None, (*SITES, "data.resize=squash"), "data.resize is 'squash'"),
    # models and weights
    "weights for other channels": (lambda: resnet(1), (*SITES, "model=resnet20", "model.weights=net.pt"), "colour"),
    "weights of another network": (
        lambda: resnet(name="resnet32"),
        (*SITES, "model=resnet20", "model.weights=net.pt"),
        "does not fit this model",
    ),
    "weights that are not there": (None, (*SITES, "model.weights=nets/a.pt"), "no such file or run"),
    "a run that is not there": (
        lambda: Path("runs").mkdir(),
        (*SITES, "model.weights=runs/a"),
        "weights=runs/a: no such file or run",
    ),
    "a whole module saved": (
        lambda: torch.save(torch.nn.Linear(2, 2), "net.pt"),
        (*SITES, "model.weights=net.pt"),
        "save model.state_dict() alone",
    ),
    "a text called .pt": (
        lambda: Path("net.pt").write_text("path,label"),
        (*SITES, "model.weights=net.pt"),
        "weights=net.pt is no file of torch.save",
    ),
    "weights that diverged": (
        lambda: torch.save(
            {
                name: value / 0 if value.is_floating_point() else value
                for name, value in MODELS["resnet20"]().build(2, 3, 16).state_dict().items()
            },
            "net.pt",
        ),
        (*SITES, "model=resnet20", "model.weights=net.pt"),
        "has numbers that are NaN or infinite in conv1.weight",
    ),
    "numbers for weights": (lambda: torch.save([1, 2], "net.pt"), (*SITES, "model.weights=net.pt"), "no state_dict"),
    "weights from the hub without it": (None, (*SITES, "model.weights=timm/resnet18"), "fedlens[hub]"),
    "a module with another last layer": (
        lambda: module("seven", NET.format(out=7, end="self.head(self.flat(x))")),
        (*SITES, "model=seven:Net"),
        "gives 7 numbers for each image, but the data have 2 classes",
    ),
    "a module that returns two things": (
        lambda: module("two", NET.format(out="classes", end="self.head(self.flat(x)), x")),
        (*SITES, "model=two:Net"),
        "returns a tuple, not the logits",
    ),
    "a module without weights": (
        lambda: module("still", "    def forward(self, x):\n        return x.flatten(1)[:, :2]"),
        (*SITES, "model=still:Net"),
        "model=still:Net has nothing to train",
    ),
    "a network for larger images": (None, (*SITES, "data.size=8"), "needs images of at least 16 x 16 pixels"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_sentence_and_exit_code_2(mistake, monkeypatch, capsys):
    before, words, said = MISTAKES[mistake]
    if before is not None:
        before()
    there = {path for path in Path().rglob("*") if "cache" not in path.parts}
    if said is None:  # no mistake after all
        checked(config.read(None, [*QUICK, *words]).resolved())
        return
    monkeypatch.setattr(sys, "argv", ["fedlens", "run", *QUICK, *words])
    with pytest.raises(SystemExit) as end:
        main()
    shown, sentence = capsys.readouterr()
    assert end.value.code == 2 and not shown, shown
    assert sentence.startswith("fedlens: ") and sentence.count("\n") == 1 and len(sentence) < 430, sentence
    assert said in sentence, sentence
    left = {path for path in Path().rglob("*") if "cache" not in path.parts and "__pycache__" not in path.parts}
    assert left == there


@pytest.mark.parametrize(
    ("before", "note"),
    [
        (lambda: [os.remove(path) for path in Path("sites/north/ill").iterdir()], "1 empty class folder (north/ill)"),
        (lambda: [save(f"sites/north/Ill /{n}.png") for n in range(3)], "classes 'Ill ' and 'ill' differ in case or"),
        (lambda: Path("sites/east/ill/notes.docx").touch(), "skipped: 1 .docx"),
        (lambda: save("sites/east/ill/clear.png", np.zeros((16, 16, 4), np.uint8)), "1 with transparent parts"),
        (lambda: save("sites/east/ill/x.png", np.full((16, 16), 60000, np.uint16)), "1 of 16 bits (16 used)"),
    ],
)
def test_what_is_odd_is_said(before, note):
    before()
    ready = checked(config.read(None, [*QUICK, *SITES]).resolved())
    assert any(note in said for said in ready.split.notes), ready.split.notes
