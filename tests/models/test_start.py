"""A pretrained start: files of every kind, runs of one's own, and what does not fit."""

import importlib.util
import os
import subprocess
import sys
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from torch import nn

from fedlens import config
from fedlens.core.errors import BadInput
from fedlens.models import MODELS, load_weights
from fedlens.runs.opened import OpenedRun
from fedlens.simulate.recorder import Nobody
from fedlens.simulate.run import run


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def built(name="resnet20", classes=4, channels=3, seed=0, **settings):
    torch.random.default_generator.manual_seed(seed)
    return MODELS[name](**settings).build(classes, channels, 32)


@pytest.mark.parametrize("wrapped", ["plain", "state_dict", "module.", "_orig_mod."])
def test_files_of_torch_save(wrapped):
    source, target = built(seed=1), built(seed=2)
    state = source.state_dict()
    if wrapped.endswith("."):
        state = {f"{wrapped}{name}": value for name, value in state.items()}
    torch.save({"state_dict": state, "epoch": 3} if wrapped == "state_dict" else state, "net.pth")
    assert load_weights(target, "net.pth") == []
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in target.state_dict().items())


def test_code_in_a_file_is_never_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "touched"), "w"))

    torch.save({"fc.weight": Evil()}, "evil.pt")
    with pytest.raises(BadInput, match=r"it holds more than tensors, which could be code; save model.state_dict"):
        load_weights(built(), "evil.pt")
    assert not (tmp_path / "touched").exists()


def test_a_state_dict_as_torchvision_and_timm_name_it():
    """Names and shapes are those of the published files: He et al., 2016, in torchvision's spelling."""
    module = built("resnet18", classes=3)
    stored = {name: torch.randn_like(value.float()) for name, value in module.state_dict().items()}
    stored |= {"fc.weight": torch.zeros(1000, 512), "fc.bias": torch.zeros(1000)}
    stored["layer1.0.bn1.num_batches_tracked"] = torch.tensor(5)
    torch.save(stored, "resnet18-f37072fd.pth")
    fresh = module.fc.weight.clone()
    (note,) = load_weights(module, "resnet18-f37072fd.pth")
    assert "1000 classes" in note and torch.equal(module.fc.weight, fresh)
    assert torch.equal(module.layer4[1].conv2.weight, stored["layer4.1.conv2.weight"])


PUBLISHERS = """
import sys
import torch
try:
    import torchvision
except RuntimeError:  # its operators are built for another torch; networks need none of them
    for name in [name for name in sys.modules if name.startswith("torchvision")]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision
import timm
torch.save(torchvision.models.resnet18().state_dict(), "torchvision.pt")
network = timm.create_model("resnet18")
network.attention = torch.nn.Linear(4, 4)
torch.save(network.state_dict(), "timm.pt")
"""


def test_torchvision_and_timm_themselves():
    for name in ("timm", "torchvision"):
        if not importlib.util.find_spec(name):
            pytest.skip(f"{name} is not installed")
    subprocess.run([sys.executable, "-c", PUBLISHERS], check=True, timeout=600)
    for name, left_out in (("torchvision", []), ("timm", ["attention.weight, attention.bias"])):
        module = built("resnet18", classes=3)
        head, *rest = load_weights(module, f"{name}.pt")
        assert "1000 classes" in head and [note.partition("no such layers: ")[2] for note in rest] == left_out
        stored, own = torch.load(f"{name}.pt"), module.state_dict()
        assert all(torch.equal(own[key], stored[key]) for key in own if not key.startswith("fc."))


class Shelf(BaseHTTPRequestHandler):
    """As much of the hub as a download asks for: one file of one model."""

    files: ClassVar[dict[str, bytes]] = {}

    def do_HEAD(self):
        found = self.files.get(self.path)
        self.send_response(404 if found is None else 200)
        self.send_header("Content-Length", str(len(found or b"")))
        for name, value in {"ETag": '"0123"', "X-Repo-Commit": "a" * 40}.items() if found else ():
            self.send_header(name, value)
        self.end_headers()
        return found

    def do_GET(self):
        self.wfile.write(self.do_HEAD() or b"")

    def log_message(self, *words):
        pass


def test_an_id_of_the_hub(tmp_path):
    """Against a stand-in, in a process of its own: the library reads its address when it is imported."""
    pytest.importorskip("huggingface_hub")
    source = built("resnet18", classes=7, seed=1)
    Shelf.files = {"/timm/net/resolve/main/model.safetensors": safetensors.torch.save(source.state_dict())}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Shelf)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0"}
    environment |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
    program = "import sys; from fedlens.models.weights import find_weights; print(find_weights(sys.argv[1]))"

    def fetched(name: str) -> subprocess.CompletedProcess:
        line = [sys.executable, "-c", program, name]
        return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300)

    try:
        done, other = fetched("timm/net"), fetched("timm/gone")
    finally:
        server.shutdown()
    assert done.returncode == 0, done.stderr
    module = built("resnet18", classes=3)
    (note,) = load_weights(module, done.stdout.strip())
    assert "its last layer is for 7 classes and was left out; the one for 3 starts anew" in note
    assert torch.equal(module.layer4[1].conv2.weight, source.layer4[1].conv2.weight)
    assert "weights=timm/gone could not be fetched from the hub" in other.stderr


def test_what_the_model_has_no_layers_for_is_listed():
    source = built(seed=1)
    extra = {"aux.0.weight": torch.zeros(2), "aux.0.bias": torch.zeros(2), "neck.weight": torch.zeros(2)}
    torch.save(source.state_dict() | extra, "net.pt")
    (note,) = load_weights(built(), "net.pt")
    assert note.endswith("left out, as this model has no such layers: aux.0.weight, aux.0.bias, neck.weight")


def test_a_head_under_another_name_starts_anew():
    state = built(seed=1).state_dict()
    state["classifier.weight"] = state.pop("fc.weight")
    state["classifier.bias"] = state.pop("fc.bias")
    torch.save(state, "net.pt")
    notes = load_weights(built(), "net.pt")
    assert "has no last layer fc; the one for 4 starts anew" in notes[0] and "classifier.weight" in notes[1]


def test_a_deeper_network_does_not_fit_a_shallower_one():
    torch.save(built("resnet32").state_dict(), "deep.pt")
    with pytest.raises(BadInput, match=r"has what this model lacks: layer1\.3\.conv1\.weight"):
        load_weights(built("resnet20"), "deep.pt")


@pytest.mark.parametrize(("have", "want", "hint"), [(3, 1, "colour=true"), (1, 3, "colour=false")])
def test_channels(have, want, hint):
    torch.save(built(channels=have).state_dict(), "net.pt")
    with pytest.raises(BadInput, match=f"are for images of {have} channels, and the data have {want}: set data.{hint}"):
        load_weights(built(channels=want), "net.pt")


def test_a_module_of_ones_own_by_its_own_names(monkeypatch):
    class Net(nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.flat, self.first, self.head = nn.Flatten(), nn.Linear(3 * 32 * 32, 5), nn.Linear(5, classes)

        def forward(self, x):
            return self.head(self.first(self.flat(x)))

    module = types.ModuleType("my_net")
    module.Net = Net
    monkeypatch.setitem(__import__("sys").modules, "my_net", module)
    torch.save(Net(4).state_dict(), "own.pt")
    made = MODELS["custom"](path="my_net:Net", weights="own.pt").build(7, 3, 32)
    assert torch.equal(made.body.first.weight, torch.load("own.pt")["first.weight"]) and "4 classes" in made.notes[0]


# ---- runs of one's own -----------------------------------------------------------------------------------------------
class Listening(Nobody):
    def begin(self, experiment, folder, notes, round, rounds):
        self.notes = notes


def trained(out, *words, classes=3):
    if not __import__("os").path.exists(f"d{classes}.npz"):
        draw = np.random.default_rng(0)
        np.savez(f"d{classes}.npz", x=draw.integers(0, 256, (60, 16, 16), np.uint8), y=np.arange(60) % classes)
    usual = [f"data=d{classes}.npz", "model=cnn_small", "partition=iid", "clients=2", "cohort=2", "rounds=1"]
    usual += ["picture=false", "engine=sequential", "device=cpu", f"out={out}"]
    heard = Listening()
    run(config.read(None, [*usual, *words]), watcher=heard)
    return heard


@pytest.mark.parametrize("method", ["fedavg", "feddyn", "fedper"])
def test_a_run_begins_where_another_ended(method, tmp_path):
    trained("runs/a", f"algorithm={method}")
    heard = trained("runs/b", "model.weights=runs/a", "local.lr=1e-30", "local.momentum=0")
    before = OpenedRun.open("runs/a").experiment.timetable()[0].stage.algorithm
    state = OpenedRun.open("runs/a").newest().state
    kept = before.global_model(state).params
    after = OpenedRun.open("runs/b").global_model().params
    assert kept and all(torch.equal(after[name], value) for name, value in kept.items())
    assert any("starts anew" in note for note in heard.notes) == (method == "fedper")  # clients keep the last layer
    assert {*load_file("runs/b/initial.safetensors")} >= {*kept}


def test_another_number_of_classes_and_workers():
    trained("runs/a")
    heard = trained("runs/b", "model.weights=runs/a", "engine=workers", "workers=2", classes=4)
    assert any("its last layer is for 3 classes and was left out; the one for 4 starts anew" in n for n in heard.notes)
    again = trained("runs/c", "model.weights=runs/a", classes=4)
    one, other = (OpenedRun.open(f"runs/{name}").global_model().params for name in "bc")
    assert all(torch.equal(one[name], other[name]) for name in one) and again.notes == heard.notes


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("runs/nothing", "no such file or run"),
        ("runs", "is a folder without a run"),
        ("runs/half", "has no checkpoint yet"),
    ],
)
def test_runs_that_are_none(weights, said, tmp_path):
    trained("runs/a")
    (tmp_path / "runs/half").mkdir()
    (tmp_path / "runs/half/config.yaml").write_bytes((tmp_path / "runs/a/config.yaml").read_bytes())
    with pytest.raises(BadInput, match=said) as problem:
        trained("runs/b", f"model.weights={weights}")
    assert "\n" not in str(problem.value) and not (tmp_path / "runs/b").exists()
