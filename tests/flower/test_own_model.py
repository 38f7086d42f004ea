"""Models of a deployed run: the global one from the server's folder, a client's own at its node."""

import json
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from PIL import Image

from fedlens.cli.main import app
from fedlens.core.errors import BadInput
from fedlens.export import folder
from fedlens.export.model import TrainedModel, load, trained
from fedlens.flower.node import Node
from fedlens.flower.own_model import own_model
from fedlens.runs.folder import RunFolder
from fedlens.runs.read import client_evaluation
from test_flower import Grid, deployed, digits, node_file, words


def pictures(images, index, into: Path) -> Path:
    for number in index.tolist():
        (into / images.classes[images.y[number]]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(images.x[number, 0].numpy()).save(into / images.classes[images.y[number]] / f"{number}.png")
    return into


def predicted(nursery, model: TrainedModel, place: Path, images: Path) -> float:
    folder.write(model, place)
    ended = nursery.program(str(place / "predict.py"), str(images), "--json", cwd=place)
    assert ended.code == 0, ended.err
    return json.loads(ended.out.splitlines()[-1])["accuracy"]


def test_models_of_a_deployed_run(nursery, tmp_path):
    """Exactly the accuracies that the server was told, and its own."""
    files = [digits(tmp_path / f"own{i}.npz", seed=i + 1, train=30 + 9 * i) for i in range(3)]
    yaml = [node_file(tmp_path, i, data={"is": "npz", "path": str(file)}) for i, file in enumerate(files)]
    grid = [{"node": str(path)} for path in yaml]
    settings = [
        word for word in words(tmp_path, "fedper", "cohort=3", "local.steps=4") if not word.startswith("uplink")
    ]
    deployed(tmp_path / "fedper", [*settings, "model=cnn2", "model.predictor=linear"], Grid(grid))
    _, accuracies = client_evaluation(RunFolder.open(tmp_path / "fedper"))
    assert any(0.4 < accuracy < 1 for accuracy in accuracies.values())  # an error would show
    for client in range(3):
        node = Node.read(yaml[client])
        mine = own_model(node)
        model = trained(mine.net, mine.weights, mine.experiment.model, mine.images, node.data, mine.facts)
        images = pictures(mine.images, mine.images.test, tmp_path / f"images {client}")
        found = predicted(nursery, model, tmp_path / f"client {client}", images)
        assert found == accuracies[client] == mine.facts["accuracy"]
    with pytest.raises(BadInput, match="never leaves its node"):
        load(tmp_path / "fedper", 0)
    # What the server has could not be parted by three.
    few = [*settings, "algorithm=fedavg", "model=cnn2", "partition=dirichlet", "partition.min_size=25"]
    deployed(tmp_path / "fedavg", few, Grid(grid))
    images = load_images(tmp_path / "data16.npz", tmp_path / "server images")
    model = load(tmp_path / "fedavg")
    accuracy = RunFolder.open(tmp_path / "fedavg").result()["accuracy"]
    assert predicted(nursery, model, tmp_path / "global", images) == accuracy == model.facts["accuracy"]
    newest = json.loads((tmp_path / "fedavg/federation.json").read_text())["run"]
    assert own_model(Node.read(yaml[0])).facts["run"] == newest
    with pytest.raises(BadInput, match=f"no run 'other' has trained here; there are .*{newest}"):
        own_model(Node.read(yaml[0]), "other")


def load_images(file: Path, into: Path) -> Path:
    from fedlens import config

    images = config.read(None, [f"data={file}"]).data.load()
    return pictures(images, images.test, into)


def test_the_command(tmp_path, capsys):
    """At the node's folder; before any run it says so."""
    words(tmp_path)
    place = tmp_path / "node"
    place.mkdir()
    node_file(tmp_path, 0).rename(place / "node.yaml")
    with pytest.raises(BadInput, match="no run has trained here"):
        app(["deploy", "export", str(place)], standalone_mode=False)
    settings = [word for word in words(tmp_path, "fedper", "clients=1", "cohort=1") if not word.startswith("uplink")]
    deployed(tmp_path / "run", [*settings, "model=cnn2"], Grid([{"node": str(place / "node.yaml")}]))
    app(["deploy", "export", str(place), "--json"], standalone_mode=False)
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["accuracy"] == client_evaluation(RunFolder.open(tmp_path / "run"))[1][0]
    assert "client 0" in (place / "export/README.md").read_text()
