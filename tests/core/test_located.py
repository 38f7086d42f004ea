"""A path that knows where it was is, to everything else, what was typed."""

import json
import pickle
from pathlib import Path

import pytest

from fedlens import config
from fedlens.core.errors import BadInput
from fedlens.core.located import Located, how_to_point, places_of, portable
from fedlens.data.paths import own_path
from fedlens.models.weights import find_weights
from fedlens.runs.folder import config_hash


def test_it_is_what_was_typed():
    path = Located("my/x.npz", ["/there/x.npz"], "runs/a")
    assert path == "my/x.npz" and hash(path) == hash("my/x.npz") and json.dumps(path) == '"my/x.npz"'
    again = pickle.loads(pickle.dumps(path))  # as workers get it
    assert again == path and places_of(again) == (Path("/there/x.npz"),) and again.run == "runs/a"
    assert places_of("my/x.npz") == () and how_to_point("my/x.npz", "data.path") == ""
    typed = config.read(None, ["data=npz", "data.path=my/x.npz"])
    known = config.check(config.read(None, ["data=npz", "data.path=my/x.npz"]))
    object.__setattr__(known.data, "path", path)
    assert (
        known == typed and config.to_yaml(known) == config.to_yaml(typed) and config_hash(known) == config_hash(typed)
    )
    assert places_of(config.check(known).data.path)  # checking it again does not lose them


def test_where_it_was_comes_first_then_its_name(tmp_path, monkeypatch):
    (tmp_path / "x").write_text("was")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "x").write_text("is")
    monkeypatch.chdir(tmp_path / "here")
    for find in (lambda path: own_path(path, "data.path"), find_weights):
        assert Path(find(Located("x", [tmp_path / "gone", tmp_path / "x"]))).read_text() == "was"
        assert Path(find(Located("x", [tmp_path / "gone"]))).read_text() == "is"
    gone = Located("y.safetensors", ["/gone/y.safetensors"], "runs/a")
    said = "nor is there /gone/y.safetensors; say where it is now: add"
    with pytest.raises(BadInput, match=f"'y.safetensors', but there is no such file or folder, {said} data.path=PLACE"):
        own_path(gone, "data.path")
    with pytest.raises(BadInput, match=f"{said} model.weights=PLACE"):
        find_weights(gone)


def test_a_hash_does_not_depend_on_where_files_lie():
    paths = ("x.npz", "/a/x.npz", "/b/c/x.npz", "~/x.npz", "y.npz", "/a/y.npz")
    hashes = [config_hash(config.read(None, ["data=npz", f"data.path={path}"])) for path in paths]
    assert len(set(hashes[:4])) == len(set(hashes[4:])) == 1 and len(set(hashes)) == 2
    assert portable({"path": "a/x.npz", "inner": [{"weights": "/b/w"}]}) == {
        "path": "a/x.npz",
        "inner": [{"weights": "w"}],
    }
