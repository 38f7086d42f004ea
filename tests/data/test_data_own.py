"""What users bring: right work or one clear sentence, and nothing lost."""

import importlib.util
import json
import os
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from fedlens import config
from fedlens.core.errors import BadInput
from fedlens.data import DATASETS
from fedlens.data.formats import stratified
from fedlens.data.partition.base import ByUser, Domains, parted_users
from fedlens.data.sources.folders import ClientsFolder, Folder, Npz
from fedlens.data.sources.hub import Hub
from fedlens.data.sources.small import Mnist
from fedlens.data.split import Split
from fedlens.simulate.recorder import Nobody
from fedlens.simulate.run import run

RANDOM = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDLENS_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def pixels(*shape):
    return RANDOM.integers(0, 256, shape, dtype=np.uint8)


def save(path, image, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path, **options)


def refused(source, *words):
    with pytest.raises(BadInput) as problem:
        source.load()
    said = str(problem.value)
    assert all(word in said for word in words), said
    assert "\n" not in said


# ---- npz ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(30, 5, 6), (30, 5, 6, 1), (30, 5, 6, 3), (30, 3, 5, 6)])
def test_npz_of_every_shape(shape, tmp_path):
    x, y = pixels(*shape), np.arange(30) % 4
    np.savez(tmp_path / "a.npz", x_train=x[:20], y_train=y[:20], x_test=x[20:], y_test=y[20:, None])
    images = Npz("a.npz").load()
    first = x if x.ndim == 4 and shape[1] == 3 else x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
    assert (images.x.numpy() == first).all() and (images.y.numpy() == y).all()
    assert images.train.tolist() == list(range(20)) and images.classes == ("0", "1", "2", "3")


def test_npz_of_floats_is_the_nearest_bytes(tmp_path):
    x = pixels(20, 4, 4, 3)
    np.savez("a.npz", x=x / 255, y=np.arange(20) % 2, classes=np.array(["cat", "dog"]))
    images = Npz("a.npz").load()
    assert (images.x.numpy() == x.transpose(0, 3, 1, 2)).all() and images.classes == ("cat", "dog")


def test_npz_without_a_test_part_holds_out_a_share_of_every_class():
    y = np.repeat([0, 1, 2], [50, 30, 1])
    np.savez("a.npz", x=pixels(81, 4, 4), y=y)
    images = Npz("a.npz", holdout=0.1).load()
    assert sorted([*images.train.tolist(), *images.test.tolist()]) == list(range(81))
    assert np.bincount(images.y[images.test].numpy()).tolist() == [5, 3]  # the only example of its class stays
    again = Npz("a.npz", holdout=0.1).load()
    assert images.test.tolist() == again.test.tolist()


def test_npz_is_found_in_data_folders(tmp_path, monkeypatch):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    np.savez(tmp_path / "two" / "b.npz", x=pixels(9, 4, 4), y=np.arange(9) % 3)
    monkeypatch.setenv("FEDLENS_DATA", os.pathsep.join([str(tmp_path / "one"), str(tmp_path / "two")]))
    assert len(Npz("b.npz").load()) == 9


ONE = np.arange(6) % 2
BAD = {
    "keys": (dict(a=ONE), ["holds a; it must hold x_train"]),
    "one class": (dict(x=pixels(6, 4, 4), y=np.zeros(6, int)), ["one class only"]),
    "negative label": (dict(x=pixels(6, 4, 4), y=ONE - 1), ["has the label -1, but labels must lie in 0 to 0"]),
    "label too large": (dict(x=pixels(6, 4, 4), y=ONE * 7, classes=np.array(["a", "b"])), ["has the label 7"]),
    "labels of words": (dict(x=pixels(6, 4, 4), y=np.array(list("ababab"))), ["labels must be one whole number"]),
    "fewer labels": (dict(x=pixels(6, 4, 4), y=ONE[:5]), ["a label for each"]),
    "flat": (dict(x=pixels(6, 16), y=ONE), ["images of shape (6, 16)"]),
    "two channels": (dict(x=pixels(6, 4, 4, 2), y=ONE), ["images of shape (6, 4, 4, 2)"]),
    "integers": (dict(x=np.ones((6, 4, 4), int), y=ONE), ["must be bytes (uint8) or floats in [0, 1]"]),
    "large floats": (dict(x=np.full((6, 4, 4), 3.0), y=ONE), ["floats in [0, 1]; these go from 3 to 3"]),
    "not a number": (
        dict(x=np.stack([np.full((4, 4), np.nan), *np.ones((5, 4, 4))]), y=ONE),
        ["floats in [0, 1]; in 1 of 6 some are not numbers (NaN) or infinite"],
    ),
    "pickled": (dict(x=np.array([None] * 6), y=ONE), ["not a readable .npz file of plain arrays"]),
    "no images, as numbers": (dict(x=np.zeros((0, 4, 4)), y=ONE[:0]), ["npz has no training images"]),
    "no images": (dict(x=pixels(0, 4, 4), y=ONE[:0]), ["npz has no training images"]),
    "sizes": (
        dict(x_train=pixels(6, 4, 4), y_train=ONE, x_test=pixels(6, 5, 5), y_test=ONE),
        ["training images are (1, 4, 4), but test images (1, 5, 5)"],
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_npz(kind):
    content, words = BAD[kind]
    np.savez("bad.npz", **content)
    refused(Npz("bad.npz"), *words)


def test_bad_paths(tmp_path):
    refused(Npz(), "data.path is empty")
    refused(Npz("none.npz"), "data.path is 'none.npz', but there is no such file or folder")
    (tmp_path / "a.npz").write_bytes(b"not a zip")
    refused(Npz("a.npz"), "a.npz is not a readable .npz file")
    np.savez(tmp_path / "whole.npz", x=pixels(600, 4, 4), y=np.arange(600) % 2)
    (tmp_path / "half.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:900])
    refused(Npz("half.npz"), "half.npz is not a readable .npz file")
    refused(Folder("a.npz"), "data.path is 'a.npz', which is a file; folder needs a folder")


# ---- folders --------------------------------------------------------------------------------------------------------


def fill(folder, labels=("cat", "dog"), count=5, size=8):
    """Lossless images; returns them by file name."""
    made = {}
    for label in labels:
        for number in range(count):
            name = f"{folder.name}_{label}_{number}.png"
            made[name] = pixels(size, size, 3)
            save(folder / label / name, made[name])
    return made


def stored(images, index):
    return {images.x[i].numpy().tobytes(): images.classes[images.y[i]] for i in index.tolist()}


@pytest.mark.parametrize("test_name", ["test", "val", "valid"])
def test_folder_with_parts(tmp_path, test_name):
    made = {"train": fill(tmp_path / "set" / "train"), test_name: fill(tmp_path / "set" / test_name, count=2)}
    images = Folder("set", size=8).load()
    for part, index in (("train", images.train), (test_name, images.test)):
        expected = {image.transpose(2, 0, 1).tobytes(): name.split("_")[1] for name, image in made[part].items()}
        assert stored(images, index) == expected
    assert images.classes == ("cat", "dog") and images.users is None and images.domains is None


def test_folder_without_parts_and_deeper_files(tmp_path):
    fill(tmp_path / "set", count=10)
    save(tmp_path / "set" / "cat" / "more" / "deep.png", pixels(8, 8, 3))
    images = Folder("set", size=0).load()
    assert (len(images), len(images.test)) == (21, 4)


def test_grey_palette_and_transparent_images_become_colour(tmp_path):
    grey = pixels(8, 8)
    fill(tmp_path / "set")
    save(tmp_path / "set" / "cat" / "grey.png", grey)
    save(tmp_path / "set" / "cat" / "clear.png", pixels(8, 8, 4))
    Image.fromarray(grey).convert("P").save(tmp_path / "set" / "cat" / "palette.gif")
    images = Folder("set", size=8).load()
    assert images.x.shape == (13, 3, 8, 8)
    assert np.repeat(grey[None], 3, axis=0).tobytes() in stored(images, images.train) | stored(images, images.test)
    assert Folder("set", size=8, colour=False).load().x.shape == (13, 1, 8, 8)


def test_images_of_any_size_are_cut_and_scaled_or_refused(tmp_path):
    fill(tmp_path / "set")
    tall = pixels(24, 16, 3)
    save(tmp_path / "set" / "dog" / "tall.png", tall)
    images = Folder("set", size=8).load()
    middle = tall[4:20].reshape(8, 2, 8, 2, 3).astype(float).mean((1, 3))
    found = [np.abs(images.x[i].numpy().transpose(1, 2, 0) - middle).max() for i in range(len(images))]
    assert min(found) <= 0.5
    refused(Folder("set", size=0), "tall.png is of another size than", "data.size")


def test_a_corrupt_image_is_named(tmp_path):
    fill(tmp_path / "set")
    save(tmp_path / "set" / "dog" / "whole.jpg", pixels(64, 64, 3))
    raw = (tmp_path / "set" / "dog" / "whole.jpg").read_bytes()
    (tmp_path / "set" / "dog" / "whole.jpg").write_bytes(raw[: len(raw) // 2])
    refused(Folder("set", size=8), "dog/whole.jpg cannot be decoded", "replace or remove it")
    (tmp_path / "set" / "dog" / "whole.jpg").write_text("no image at all")
    refused(Folder("set", size=8), "dog/whole.jpg is not an image; replace or remove it")
    (tmp_path / "set" / "dog" / "whole.jpg").write_bytes(b"")
    refused(Folder("set", size=8), "dog/whole.jpg is not an image")


def test_other_files_are_passed_over(tmp_path):
    fill(tmp_path / "set")
    for name in ("notes.txt", "cat/Thumbs.db", "cat/.hidden.png", ".git/x.png"):
        (tmp_path / "set" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "set" / name).write_text("not an image")
    assert len(Folder("set", size=8).load()) == 10


def test_folders_without_what_is_needed(tmp_path):
    (tmp_path / "empty").mkdir()
    refused(Folder("empty"), "data.path is 'empty', but no folders named after a class with images are in it")
    fill(tmp_path / "one", labels=("cat",))
    refused(Folder("one", size=8), "one class only (cat)")


@pytest.mark.parametrize("parts", [True, False])
def test_a_folder_per_client(tmp_path, parts):
    made = {}
    for client, labels in (("anna", ("cat", "dog")), ("bert", ("dog",)), ("carl", ("cat", "fox"))):
        for part, count in (("train", 6), ("test", 2)) if parts else (("", 8),):
            made |= {(client, name): part for name in fill(tmp_path / "set" / client / part, labels, count)}
    images = ClientsFolder("set", size=8, holdout=0.25).load()
    assert len(images) == len(made) and images.classes == ("cat", "dog", "fox")
    split = ByUser().split(images, 3, 0)
    assert [len(shard) for shard in split.train] == [12, 6, 12] and [len(shard) for shard in split.test] == [4, 2, 4]
    held = [sorted({images.classes[images.y[i]] for i in shard}) for shard in split.train]
    assert held == [["cat", "dog"], ["dog"], ["cat", "fox"]]
    assert not split.notes


def test_an_empty_client_folder_is_named(tmp_path):
    fill(tmp_path / "set" / "anna")
    (tmp_path / "set" / "bert" / "cat").mkdir(parents=True)
    refused(ClientsFolder("set", size=8), "bert holds no training images")
    fill(tmp_path / "set" / "bert" / "train")
    fill(tmp_path / "set" / "bert" / "test")
    refused(ClientsFolder("set", size=8), "anna has no test folder, but others have one")


def test_domains_as_folders(tmp_path):
    for domain in ("photo", "sketch"):
        fill(tmp_path / "set" / domain, count=20)
    images = Folder("set", size=8, domains=True).load()
    split = Domains().split(images, 4, 0)
    assert [set(images.domains[shard].tolist()) for shard in split.train] == [{0}, {0}, {1}, {1}]
    assert [set(images.domains[shard].tolist()) for shard in split.test] == [{0}, {0}, {1}, {1}]


def test_a_moved_file_is_another_data_set(tmp_path):
    fill(tmp_path / "set")
    before = Folder("set", size=8).load()
    file = next((tmp_path / "set" / "cat").iterdir())
    file.rename(tmp_path / "set" / "dog" / file.name)
    assert Folder("set", size=8).load().checksum != before.checksum


def test_stratified_against_a_loop():
    groups = RANDOM.integers(0, 7, 500)
    rest, held = stratified(groups, 0.3, 1)
    assert sorted([*rest, *held]) == list(range(500)) and len(held) == 150
    for group in range(7):
        size = (groups == group).sum()
        assert abs((groups[held] == group).sum() - 0.3 * size) < 1
    assert 0 in stratified(np.array([7, 8, 8, 8, 8]), 0.9, 0)[0]  # the last one of a group stays
    assert (stratified(groups, 0.3, 1)[1] == held).all() and (stratified(groups, 0.3, 2)[1] != held).any()


# ---- the hub --------------------------------------------------------------------------------------------------------


class Part:
    """A split as the library gives it: columns by name, rows as dictionaries, images as bytes when not decoded."""

    def __init__(self, columns, names=None):
        self.columns, self.column_names, self.names = columns, list(columns), names
        self.features = {name: types.SimpleNamespace(names=names if name == "label" else None) for name in columns}

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name):
        return self.columns[name]

    def __iter__(self):
        return ({name: self.columns[name][row] for name in self.columns} for row in range(len(self)))

    def select_columns(self, names):
        return Part({name: self.columns[name] for name in names})

    def cast_column(self, name, kind):
        assert kind == "not decoded"
        return self


def encoded(array):
    import io

    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the datasets library; `hub.parts` is what it has."""
    library = types.ModuleType("datasets")
    library.asked = []
    library.parts = {}

    def load_dataset(name, config, revision):
        library.asked.append((name, config, revision))
        if not library.parts:
            raise ConnectionError(f"Couldn't reach {name}\nand a long explanation")
        return library.parts

    library.load_dataset, library.Image = load_dataset, lambda decode: "not decoded"
    library.__spec__ = importlib.util.spec_from_loader("datasets", None)
    monkeypatch.setitem(sys.modules, "datasets", library)
    return library


def test_a_data_set_of_the_hub(hub):
    x, x_test = pixels(6, 5, 5, 3), pixels(3, 5, 5, 3)
    for name, some, label, who in (("train", x, [0, 1, 1, 0, 1, 0], "aabbcc"), ("test", x_test, [1, 0, 1], "abc")):
        hub.parts[name] = Part({"img": [encoded(one) for one in some], "label": label, "who": list(who)}, ["no", "yes"])
    source = Hub("some/set", image="img", user="who", config="big", revision="abc")
    images = source.load()
    assert (images.x.numpy() == np.concatenate([x, x_test]).transpose(0, 3, 1, 2)).all()
    assert images.y.tolist() == [0, 1, 1, 0, 1, 0, 1, 0, 1] and images.classes == ("no", "yes")
    assert images.users.tolist() == [0, 0, 1, 1, 2, 2, 0, 1, 2] and images.test.tolist() == [6, 7, 8]
    assert images.origin == "hub some/set@abc" and hub.asked == [("some/set", "big", "abc")]
    assert source.load().checksum == images.checksum and len(hub.asked) == 1  # the second time from the copy
    by_domain = replace(source, user="", domain="who").load()
    assert images.owner_names == by_domain.owner_names == ("a", "b", "c") and by_domain.users is None


def test_a_data_set_of_the_hub_without_test_part_and_names(hub):
    hub.parts["train"] = Part({"image": [encoded(one) for one in pixels(20, 5, 5)], "label": list("xy" * 10)})
    images = Hub("some/set", holdout=0.3).load()
    assert images.x.shape == (20, 1, 5, 5) and images.classes == ("x", "y") and len(images.test) == 6


def test_what_the_hub_does_not_have(hub):
    refused(Hub(), "data.id is empty")
    refused(Hub("some/set"), "some/set cannot be had from the hub (Couldn't reach some/set)")
    hub.parts["train"] = Part({"image": [encoded(one) for one in pixels(4, 5, 5)], "label": [0, 1, 0, 1]})
    refused(Hub("some/set", label="labels"), "has no column 'labels'; did you mean 'label'?")
    refused(Hub("some/set", train="training"), "data.train is 'training'", "did you mean 'train'?")
    hub.parts["train"].columns["image"][2] = {"bytes": b"not an image", "path": None}
    refused(Hub("some/set"), "some/set, image 2")


def test_a_named_set_comes_from_the_hub_when_no_folder_has_it(hub):
    refused(Mnist(), "mnist was not found: put a folder mnist")  # offline: what to fetch by hand
    for name, count in (("train", 20), ("test", 10)):
        hub.parts[name] = Part(
            {"image": [encoded(one) for one in pixels(count, 28, 28)], "label": [*range(10)] * (count // 10)}
        )
    images = Mnist().load()
    assert images.name == "mnist" and images.origin == "hub ylecun/mnist@main" and images.mean == Mnist.mean
    assert hub.asked[-1] == ("ylecun/mnist", None, "main")


def test_without_the_library_the_sentence_names_it(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "datasets" else find_spec(name))
    refused(Hub("some/set"), "reading some/set from the hub needs: pip install 'fedlens[hub]'")


@pytest.mark.parametrize("name", DATASETS)
def test_every_data_set_can_be_made_without_arguments(name):
    assert DATASETS[name]().name == name


# ---- nothing is misread in silence ----------------------------------------------------------------------------------


def sites(root, counts=(("east", 6), ("north", 9), ("west", 12)), size=40, part=""):
    """A folder per hospital with the same two classes."""
    for site, count in counts:
        fill(root / site / part, ("circle", "square"), count, size)


class Listening(Nobody):
    def begin(self, experiment, folder, notes, round, rounds):
        self.experiment, self.notes = experiment, notes


def ran(*words):
    heard = Listening()
    run(config.read(None, [*words, *QUICK]), watcher=heard)
    return heard


QUICK = ["model=cnn_small", "rounds=1", "engine=sequential", "picture=false", "device=cpu", "out=run"]
READ = "54 images, 2 classes (circle, square), 40 x 40 made 32 x 32 (data.size)"


def owner_of_each_image(root):
    """The files in the order in which they are stored: by site, by class, by name."""
    return [file.parent.parent.name for file in sorted(root.rglob("*.png"), key=lambda file: file.parts)]


def test_sites_stay_clients_where_nothing_else_is_said(tmp_path):
    sites(tmp_path / "sites")
    heard = ran("data=clients_folder", "data.path=sites")
    assert heard.notes == [READ]
    whose = owner_of_each_image(tmp_path / "sites")
    dealt = json.loads((tmp_path / "run" / "split.json").read_text())
    held = [{whose[i] for part in ("train", "test") for i in dealt[part][client]} for client in range(3)]
    assert held == [{"east"}, {"north"}, {"west"}]
    used = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (used["partition"]["is"], used["clients"], used["cohort"]["is"]) == ("by_user", 3, "everyone")
    assert config.read(tmp_path / "run" / "config.yaml") == heard.experiment
    from_copy = config.read(None, ["data=clients_folder", "data.path=sites"])
    assert from_copy.federation(from_copy.data.load())[1].notes == (READ,)  # the second time, nothing is decoded


def test_another_partition_of_sites_says_what_is_lost(tmp_path):
    sites(tmp_path / "sites")
    words = ["data=clients_folder", "data.path=sites", "clients=3", "cohort=2"]
    heard = ran(*words, "partition=iid")
    lost = "the examples of 3 of 3 users were dealt to several clients; partition=by_user keeps each user's together"
    assert heard.notes == [READ, lost]
    assert json.loads((tmp_path / "run" / "passport.json").read_text())["split_notes"] == heard.notes
    again = config.read(None, [*words, "partition=run/split.json"])
    assert list(again.federation(again.data.load())[1].notes) == heard.notes  # each of them once
    merged = config.read(None, [*words, "clients=2", "partition.more=merge"])
    assert merged.federation(merged.data.load())[1].notes == (READ,)  # two sites in one client are whole sites


def test_users_that_are_parted_are_counted():
    np.savez("a.npz", x=pixels(40, 8, 8), y=np.arange(40) % 2)
    whole = Npz("a.npz", holdout=0).load()
    images = replace(whole, users=torch.arange(40) // 10)
    shards = [np.arange(0, 15), np.arange(15, 30), np.arange(30, 40)]  # the second of four is in two shards
    said = parted_users(images, Split(shards, [shard[:0] for shard in shards]))
    assert said[0].startswith("the examples of 1 of 4 users were dealt to several clients;")
    assert not parted_users(whole, Split(shards, []))


def test_too_many_clients_of_sites(tmp_path):
    sites(tmp_path / "sites", size=8)
    images = ClientsFolder("sites").load()
    for partition, sentence in (
        (ByUser(), "clients is 20, but clients_folder has 3 users: set clients=3"),
        (
            ByUser(min_size=11),
            "clients is 20, but clients_folder has 2 users with at least 11 training examples: set clients=2, or lower "
            "partition.min_size",
        ),
    ):
        with pytest.raises(BadInput) as problem:
            partition.split(images, 20, 0)
        assert str(problem.value) == sentence


@pytest.mark.parametrize("part", ["", "train"])
def test_sites_are_not_taken_for_classes(tmp_path, part):
    sites(tmp_path / "sites", size=8, part=part)
    below = "in east/circle and north/circle: this looks like a folder for each client, so use data=clients_folder"
    refused(Folder("sites"), "data.path is 'sites', but its images lie two levels down", below, "partition=by_user")
    sites(tmp_path / "parts" / "train", size=8)
    sites(tmp_path / "parts" / "test", size=8)
    refused(Folder("parts"), below)
    assert ClientsFolder("sites").load().classes == ("circle", "square")
    assert Folder("sites", domains=True).load().classes == ("circle", "square")


def test_folders_inside_a_class_are_read(tmp_path):
    for label, patients in (("healthy", ("p1", "p2")), ("ill", ("p3",))):
        for patient in patients:
            save(tmp_path / "set" / label / patient / "scan.png", pixels(8, 8, 3))
    assert Folder("set").load().classes == ("healthy", "ill")
    for label in ("healthy", "ill"):
        save(tmp_path / "set" / label / "2024" / "scan.png", pixels(8, 8, 3))
        save(tmp_path / "set" / label / "scan.png", pixels(8, 8, 3))
    assert Folder("set").load().classes == ("healthy", "ill")  # as some lie right in their class


def test_what_was_read_is_said_in_a_line(tmp_path):
    fill(tmp_path / "set", count=3, size=40)
    start = "6 images, 2 classes (cat, dog), "
    assert Folder("set").load().summary == f"{start}40 x 40 made 32 x 32 (data.size)"
    assert Folder("set", size=40).load().summary == Folder("set", size=0).load().summary == f"{start}40 x 40"
    save(tmp_path / "set" / "dog" / "tall.png", pixels(24, 16, 3))
    cut = "24 x 16 to 40 x 40 cut to their middle square and made 32 x 32 (data.size)"
    assert Folder("set").load().summary == f"7 images, 2 classes (cat, dog), {cut}"
    np.savez("many.npz", x=pixels(40, 5, 6), y=np.arange(40) % 12)
    names = "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ..."
    assert Npz("many.npz").load().summary == f"40 images, 12 classes ({names}), 5 x 6"


def test_only_data_of_ones_own_is_told():
    np.savez("a.npz", x=pixels(60, 8, 8), y=np.arange(60) % 2)
    own, known = (config.read(None, [*words, "clients=2", "partition=iid"]) for words in (["data=a.npz"], []))
    images = own.data.load()
    assert own.federation(images)[1].notes == ("60 images, 2 classes (0, 1), 8 x 8",)
    assert known.federation(images)[1].notes == ()
    told = {name for name, source in DATASETS.items() if not source.known}
    assert told == {"npz", "folder", "clients_folder", "table", "pfllib", "hub"}


def test_a_copy_from_before_sizes_were_kept_is_still_read(tmp_path):
    fill(tmp_path / "set", size=40)
    Folder("set").load()
    (header,) = (tmp_path / "cache").glob("folder-*/header.json")
    stored = json.loads(header.read_text())
    assert stored.pop("scaled") == "40 x 40 made 32 x 32 (data.size)"
    header.write_text(json.dumps(stored))
    before = header.stat().st_mtime_ns
    assert Folder("set").load().summary == "10 images, 2 classes (cat, dog), 32 x 32"
    assert header.stat().st_mtime_ns == before


def test_classes_that_differ_in_case_alone_are_named():
    from fedlens.data.images import alike

    assert alike(["cat", "dog"]) == ()
    assert alike(["Big cat", "bigcat", "dog"]) == (
        "classes 'Big cat' and 'bigcat' differ in case or spaces alone: rename one if they are the same",
    )
