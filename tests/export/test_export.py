"""A model leaves as it is: exported and used without the package, it has exactly the accuracy that its run has."""

import importlib.util
import json
import linecache
import os
import shutil
import subprocess
import sys
import threading
import types
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import fedlens
from dicoms import write_dicom
from fedlens import config
from fedlens.core.batches import Shard
from fedlens.core.errors import BadInput, RunFailed
from fedlens.core.format import size
from fedlens.core.source_code import NoSource, standalone
from fedlens.data import Prepare
from fedlens.export import folder, predict
from fedlens.export.model import load, preprocessing
from fedlens.models import MODELS
from fedlens.runs.opened import OpenedRun
from fedlens.runs.read import client_evaluation, evaluations, rounds_of
from fedlens.selection.graph import layer_graph
from fedlens.selection.pruning import Costs, masked, sliced
from fedlens.selection.sub_models import kept_filters
from fedlens.simulate.run import run

COMMON = ["data=lines.npz", "clients=3", "cohort=3", "rounds=2", "engine=sequential", "picture=false", "local.steps=15"]
COMMON += ["local.lr=0.05", "keep=1", "evaluate.personal_every=1"]
METHODS = {
    "fedavg": ["model=cnn2"],
    "fedper": ["model=cnn2", "model.predictor=linear"],
    "pse": ["model=pse_net"],
    "spatl": ["model=cnn2", "model.predictor=linear", "algorithm.episodes=2", "algorithm.budget=0.5"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Runs by method, made when they are asked for; images with a bright line whose place is the class."""
    place = tmp_path_factory.mktemp("export")
    draw = np.random.default_rng(0)
    y = np.arange(330) % 3
    x = draw.integers(0, 140, (330, 16, 16)).astype(np.uint8)
    x[np.arange(330), 5 * y + 2, :] += 80
    np.savez(place / "lines.npz", x=x, y=y, classes=np.array(["low", "middle", "high"]))
    return place


def ran(place: Path, method: str) -> Path:
    out = place / method
    if not out.exists():
        before = os.getcwd()
        os.chdir(place)
        try:
            run(config.read(None, [*COMMON, f"algorithm={method}", *METHODS[method], f"out={out}"]))
        finally:
            os.chdir(before)
    return out


def pictures(opened: OpenedRun, index: torch.Tensor, into: Path) -> Path:
    """Test images as files below folders named after their classes."""
    for number in index.tolist():
        of = into / opened.images.classes[opened.images.y[number]]
        of.mkdir(parents=True, exist_ok=True)
        Image.fromarray(opened.images.x[number, 0].numpy()).save(of / f"{number}.png")
    return into


def predicted(nursery, exported: Path, images: Path, *words: str) -> float:
    ended = nursery.program(str(exported / "predict.py"), str(images), "--json", *words, cwd=exported)
    assert ended.code == 0, ended.err
    return json.loads(ended.out.splitlines()[-1])["accuracy"]


# ---- the run's own accuracy ------------------------------------------------------------------------------------------
def test_the_global_model(nursery, place, tmp_path):
    out = ran(place, "fedavg")
    opened = OpenedRun.open(out)
    images = pictures(opened, opened.federation.pool, tmp_path / "images")
    curve = evaluations(opened.folder.metrics(), "accuracy", rounds_of(opened.folder))
    for round in (1, 2):
        model = load(out, round=round)
        exported = tmp_path / str(round)
        folder.write(model, exported)
        accuracy = curve[round][1]
        assert 0.4 < accuracy < 1 or round == 1  # neither chance nor everything: an error would show
        assert predicted(nursery, exported, images) == accuracy == model.facts["accuracy"]
    with pytest.raises(BadInput, match="no checkpoint of round 7"):
        load(out, round=7)


def test_the_best_round_on_validation_images(nursery, place, tmp_path, monkeypatch):
    """Kept by the run itself, and chosen without the test set."""
    words = [*COMMON, "keep=0", "algorithm=fedavg", "model=cnn2", "rounds=7", "evaluate.validation=0.2"]
    monkeypatch.chdir(place)
    run(config.read(None, [*words, "evaluate.watch=accuracy", "out=validated"]))
    out = place / "validated"
    opened = OpenedRun.open(out)
    rows = opened.folder.metrics().filter(pc.field("split") == "validation")
    by_round = dict(zip(rows["round"].to_pylist(), rows["value"].to_pylist(), strict=True))
    best = max(by_round, key=lambda round: (by_round[round], -round))
    assert best < 6 and best in opened.folder.rounds() and len(opened.folder.rounds()) == 3  # it and the last two
    ended = nursery("export", str(out), "--round", "best", "--out", "model", "--json", cwd=tmp_path)
    assert ended.code == 0, ended.err
    accuracy = evaluations(opened.folder.metrics(), "accuracy", rounds_of(opened.folder))[best][1]
    images = pictures(opened, opened.federation.pool, tmp_path / "images")
    assert predicted(nursery, tmp_path / "model", images) == accuracy == json.loads(ended.out)["accuracy"]
    assert "the best on validation images" in (tmp_path / "model/README.md").read_text()
    assert load(out, 1, "best").facts["round"] == best
    for path in (out / "checkpoints").glob(f"*{best:06d}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for where, round, said in (
        (out, "best", f"was best after round {best}, and its checkpoint is not there any more"),
        (ran(place, "fedavg"), "best", "run it with evaluate.validation=0.1"),
        (out, "last", "it should be the number of a kept round, or best"),
    ):
        ended = nursery("export", str(where), "--round", round, "--out", "other", cwd=tmp_path)
        assert ended.code == 2 and said in ended.sentence


@pytest.mark.parametrize("method", ["fedavg", "fedper", "pse", "spatl"])
def test_models_of_clients(nursery, place, tmp_path, method):
    out = ran(place, method)
    opened = OpenedRun.open(out)
    _, accuracies = client_evaluation(opened.folder)
    for client in (0, 2):
        model = load(out, client)
        folder.write(model, tmp_path / str(client))
        images = pictures(opened, opened.federation.test[client], tmp_path / f"images {client}")
        assert predicted(nursery, tmp_path / str(client), images) == accuracies[client] == model.facts["accuracy"]


def test_a_method_without_a_global_model_asks_for_a_client(place):
    with pytest.raises(BadInput, match="name one with --client"):
        load(ran(place, "fedper"))
    with pytest.raises(BadInput, match="client 9 does not exist"):
        load(ran(place, "fedper"), 9)


def test_a_sub_model_predicts_what_masked_weights_predict(nursery, place, tmp_path):
    out, client = ran(place, "spatl"), 1
    opened = OpenedRun.open(out)
    memory = opened.folder.client_memories(2)[client]
    kept = Costs.of(opened.net, torch.zeros(1, 1, 16, 16)).computed(
        kept_filters(opened.experiment.algorithm, opened.net, memory)
    )
    weights = opened.model(client)
    index = opened.federation.test[client]
    shard = Shard(opened.federation.data, index)
    smaller, whole = load(out, client, sub_model=True), load(out, client)
    assert sum(p.numel() for p in smaller.module.parameters()) < sum(p.numel() for p in whole.module.parameters())
    with torch.no_grad():
        by_mask = opened.net(masked(weights, kept, layer_graph(opened.net)), shard.x)
        assert torch.equal(
            predict.logits(smaller.module, shard.x), predict.logits(sliced(opened.net, weights, kept), shard.x)
        )
    assert torch.allclose(smaller.logits(opened.images.x[index]), by_mask, atol=1e-5)
    folder.write(smaller, tmp_path / "smaller")
    images = pictures(opened, index, tmp_path / "images")
    right = (by_mask.argmax(1) == shard.y).sum().item()
    assert predicted(nursery, tmp_path / "smaller", images) == right / len(index)
    with pytest.raises(BadInput, match="name one with --client"):
        load(out, sub_model=True)
    with pytest.raises(BadInput, match="has selected no filters"):
        load(ran(place, "fedper"), 0, sub_model=True)


@pytest.mark.parametrize("method", METHODS)
def test_without_the_package(place, tmp_path, method):
    """A process of its own, in which importing fedlens fails; a client's model where clients keep a part."""
    out = ran(place, method)
    opened = OpenedRun.open(out)
    client = None if method == "fedavg" else 1
    folder.write(load(out, client), tmp_path / "model")
    index = opened.federation.pool if client is None else opened.federation.test[client]
    images = pictures(opened, index, tmp_path / "images")
    (tmp_path / "images/high/broken.png").write_bytes(b"no picture")
    (tmp_path / "block").mkdir()
    (tmp_path / "block/fedlens.py").write_text("raise ImportError('this machine has no fedlens')")
    command = [sys.executable, "predict.py", str(images)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "block")}
    done = subprocess.run(command, cwd=tmp_path / "model", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "left out" in done.stderr and "broken.png" in done.stderr
    own = opened.folder.result()["accuracy"] if client is None else client_evaluation(opened.folder)[1][client]
    right = round(own * len(index))
    assert right / len(index) == own and f"{right} of {len(index)} are right" in done.stdout


# ---- the parts -------------------------------------------------------------------------------------------------------
def test_every_network_as_a_file(tmp_path):
    """Without a word of this package, with the same names and bits; what is user's own comes along."""
    for name, kind in MODELS.items():
        if name in ("custom", "given"):
            continue
        text = kind().source(7, 3, 32)
        assert "fedlens" not in text, name
        assert kind.__name__ in text
    for name in ("cnn2", "resnet20", "vgg11", "pse_net"):
        module = MODELS[name]().build(7, 3, 32).eval()
        (tmp_path / "model.py").write_text(MODELS[name]().source(7, 3, 32))
        save_file(module.state_dict(), tmp_path / "weights.safetensors")
        again = predict.load_model(tmp_path)
        x = torch.randn(3, 3, 32, 32)
        assert torch.equal(predict.logits(again, x), predict.logits(module, x)), name


def test_what_has_no_source():
    def inner():
        return 1

    for made in (inner, lambda: 1):
        with pytest.raises(NoSource):
            standalone(made)


def test_preprocessing_is_the_loaders_own(tmp_path):
    """Files through predict.py and through a data source: the same bytes, the same network input."""
    draw = np.random.default_rng(1)
    for label in ("a", "b"):
        for number, shape in enumerate([(40, 30, 3), (32, 32, 3), (17, 50, 3), (64, 64, 3)]):
            path = tmp_path / "images" / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 256, shape, dtype=np.uint8)).save(path)
    words = ["data=folder", f"data.path={tmp_path / 'images'}", "data.size=16", "data.holdout=0.5", "partition=iid"]
    words += ["clients=1", "cohort=1", "rounds=1", "model=cnn2", "picture=false", f"out={tmp_path / 'run'}"]
    run(config.read(None, [*words, "engine=sequential", "local.batch_size=2"]))
    opened, model = OpenedRun.open(tmp_path / "run"), load(tmp_path / "run")
    found = model.preprocess(tmp_path / "images")
    every = Shard(opened.federation.data, torch.arange(8)).x
    assert {tuple(x.flatten().tolist()) for x in found} == {tuple(x.flatten().tolist()) for x in every}
    with Image.open(tmp_path / "images/a/0.png") as picture:
        assert torch.equal(model.preprocess([picture]), model.preprocess(tmp_path / "images/a/0.png"))


@pytest.mark.parametrize("resize", ["crop", "fit", "pad"])
def test_every_kind_of_file_is_read_as_the_loader_reads_it(tmp_path, resize):
    """16 bits, colour, a turned photograph and DICOM among them."""
    draw = np.random.default_rng(2)
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        Image.fromarray(draw.integers(0, 4096, (30, 44), dtype=np.uint16)).save(tmp_path / label / "deep.png")
        turned = Image.fromarray(draw.integers(0, 256, (25, 40, 3), dtype=np.uint8))
        exif = turned.getexif()
        exif[0x0112] = 6
        turned.save(tmp_path / label / "turned.jpg", exif=exif)
        Image.fromarray(draw.integers(0, 256, (20, 20), dtype=np.uint8)).save(tmp_path / label / "gray.tif")
        if importlib.util.find_spec("pydicom"):
            write_dicom(tmp_path / label / "scan.dcm", draw.integers(0, 4096, (33, 21), dtype=np.uint16), BitsStored=12)
    words = ["data=folder", f"data.path={tmp_path}", "data.size=16", f"data.resize={resize}"]
    source = config.read(None, words).data
    images = source.load()
    about = json.loads(json.dumps(preprocessing(images, source, torch.float32)))
    found = torch.stack([predict.opened(path, about) for path in predict.image_files(tmp_path)])
    assert len(found) == len(images) and {x.numpy().tobytes() for x in found} == {x.numpy().tobytes() for x in images.x}
    prepared = Prepare(images.mean, images.std)(images.x, None)
    assert torch.equal(predict.prepared(images.x, about), prepared)


def test_load_in_python(place):
    model = fedlens.load(ran(place, "fedavg"))
    opened = OpenedRun.open(ran(place, "fedavg"))
    index = opened.federation.pool
    assert not model.module.training and isinstance(model.module, torch.nn.Module)
    said = model.predict(opened.images.x[index])
    right = sum(label == opened.images.classes[y] for label, y in zip(said.labels, opened.images.y[index], strict=True))
    assert right / len(index) == opened.folder.result()["accuracy"]
    assert torch.allclose(said.probabilities.sum(1), torch.ones(len(index)))
    assert model.predict(opened.images.x[index[0]]).labels == said.labels[:1]
    with pytest.raises(BadInput, match="this model takes 1 x 16 x 16"):
        model.predict(torch.zeros(2, 3, 8, 8))


def test_the_card(nursery, place, tmp_path):
    out = ran(place, "fedper")
    ended = nursery("export", str(out), "--client", "1", "--out", "mine", cwd=tmp_path)
    assert ended.code == 0, ended.err
    card = (tmp_path / "mine/README.md").read_text()
    for word in (
        "fedper",
        "low, middle, high",
        "client 1",
        "No privacy is promised",
        "partition.alpha",
        "fedlens export",
    ):
        assert word in card, word
    assert str(place) not in card  # nobody's folders
    again = nursery("export", str(out), "--client", "1", "--out", "mine", cwd=tmp_path)
    assert again.code == 2 and "is there already" in again.sentence
    for words, said in (
        (["--to", "tflite"], "it should be one of torch, onnx, exported"),
        (["--push", "nowhere"], "USER/NAME"),
    ):
        ended = nursery("export", str(out), "--client", "1", *words, cwd=tmp_path)
        assert ended.code == 2 and said in ended.sentence


def test_nobody_is_told_where_the_data_lie(place, tmp_path):
    out = place / "whole"
    words = [*COMMON[1:], "rounds=1", "local.steps=1", "model=cnn2", f"data={place / 'lines.npz'}", f"out={out}"]
    run(config.read(None, words))
    folder.write(load(out), tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    assert str(place) not in card and "data.path=lines.npz" in card


def test_a_copy_that_differs_is_not_written(place, tmp_path, monkeypatch):
    model = load(ran(place, "fedavg"))
    right = predict.load_model

    def wrong(*where):
        module = right(*where)
        with torch.no_grad():
            next(module.parameters()).add_(1e-6)
        return module

    monkeypatch.setattr(predict, "load_model", wrong)
    with pytest.raises(RunFailed, match="nothing was written"):
        folder.write(model, tmp_path / "model")
    assert not [*tmp_path.iterdir()]


def test_a_network_without_source_leaves_as_a_program(place, tmp_path):
    """Whose last bits are its own: it is compared as another runtime is."""
    model = replace(load(ran(place, "fedavg")), source=None)
    folder.write(model, tmp_path / "model")
    assert {"model.pt2"} == {path.name for path in (tmp_path / "model").glob("model.*")}


# ---- other forms -----------------------------------------------------------------------------------------------------
def test_as_an_exported_program(place, tmp_path):
    model = load(ran(place, "pse"), 1)
    folder.write(model, tmp_path / "model", "exported")
    x = torch.randn(5, 1, 16, 16)
    with torch.no_grad():
        again = torch.export.load(tmp_path / "model/model.pt2").module()
        assert torch.allclose(again(x), model.module(x), atol=1e-5)
    (tmp_path / "model/model.py").unlink()
    assert torch.allclose(predict.logits(predict.load_model(tmp_path / "model"), x), model.module(x), atol=1e-5)


@pytest.mark.skipif(not importlib.util.find_spec("onnxruntime"), reason="needs the extra onnx")
@pytest.mark.parametrize(
    "method", ["fedavg", *(pytest.param(each, marks=pytest.mark.slow) for each in ("pse", "spatl"))]
)
def test_as_onnx(nursery, place, tmp_path, method):
    out = ran(place, method)
    opened = OpenedRun.open(out)
    folder.write(load(out, 1, sub_model=method == "spatl"), tmp_path / "model", "onnx")
    index = opened.federation.test[1]
    images = pictures(opened, index, tmp_path / "images")
    by_torch = predicted(nursery, tmp_path / "model", images)
    assert predicted(nursery, tmp_path / "model", images, "--use", "onnx") == by_torch
    x = Shard(opened.federation.data, index).x
    by_torch, by_onnx = (
        predict.logits(predict.load_model(tmp_path / "model"), x),
        predict.onnx_logits(x, tmp_path / "model"),
    )
    assert float((by_torch - by_onnx).abs().max()) <= 1e-4


def test_onnx_says_what_is_missing(place, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"pip install 'fedlens\[onnx\]'"):
        folder.check_form("onnx")


# ---- the hub ---------------------------------------------------------------------------------------------------------
class StandIn(BaseHTTPRequestHandler):
    """As much of the hub as an upload asks for; what arrives is kept."""

    got: ClassVar[list[tuple[str, bytes]]] = []

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.got.append((self.path, body))
        address = f"http://127.0.0.1:{self.server.server_port}/me/mine"
        if self.path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            answer = {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
        elif "/commit/" in self.path:
            answer = {"commitUrl": f"{address}/commit/{'0' * 40}", "commitOid": "0" * 40, "success": True}
        else:
            answer = {"url": address, "id": "me/mine", "errors": [], "warnings": []}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words):
        pass


def test_a_push_to_the_hub(place, tmp_path):
    """Against a stand-in, in a process of its own: the library reads its address and token when it is imported."""
    pytest.importorskip("huggingface_hub")
    StandIn.got.clear()
    folder.write(load(ran(place, "fedavg")), tmp_path / "model")
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_TOKEN": "hf_nobodys", "HF_HUB_OFFLINE": "0"}
    environment |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
    program = "import sys; from pathlib import Path; from fedlens.export.hub import upload; "
    program += "print(upload(Path(sys.argv[1]), 'me/mine', True))"
    command = [sys.executable, "-c", program, str(tmp_path / "model")]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    finally:
        server.shutdown()
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(f"{address}/me/mine")
    created, committed = (next(body for path, body in StandIn.got if part in path) for part in ("create", "/commit/"))
    asked = json.loads(created)
    assert asked.get("private") is True or asked.get("visibility") == "private"
    sent = {json.loads(line)["value"].get("path") for line in committed.splitlines()[1:]}
    assert sent == {"README.md", "decode.py", "model.py", "predict.py", "preprocessing.json", "weights.safetensors"}


def test_a_dry_push_says_what_would_be_sent(nursery, place, tmp_path):
    """Nobody is asked, and the library is not needed."""
    words = ["export", str(ran(place, "fedavg")), "--push", "me/mine", "--private", "--dry-run"]
    ended = nursery(*words, "--out", "model", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert "would send to the private model me/mine on the Hugging Face hub:" in ended.out
    weights = (tmp_path / "model/weights.safetensors").stat().st_size
    assert f"weights.safetensors, {size(weights)}" in ended.out
    ended = nursery(*words, "--out", "again", "--json", cwd=tmp_path)
    assert len(json.loads(ended.out)["would_send"]) == 7
    ended = nursery("export", words[1], "--dry-run", cwd=tmp_path)
    assert ended.code == 2 and "name USER/NAME with --push" in ended.sentence


def test_classes_of_a_notebook(monkeypatch):
    """Cells are no files: their classes are found through the lines that the kernel keeps."""
    text = "class Cell(nn.Module):\n    def forward(self, x):\n        return x * FACTOR\n"
    file = "<ipython-input-7-abc>"
    monkeypatch.setitem(linecache.cache, file, (len(text), None, text.splitlines(True), file))
    main = types.ModuleType("__main__")
    main.__dict__.update(nn=torch.nn, FACTOR=3)
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(text, file, "exec"), main.__dict__)
    namespace = {}
    exec(standalone(main.Cell), namespace)
    assert namespace["Cell"]()(2) == 6 and namespace["FACTOR"] == 3
