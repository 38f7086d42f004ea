"""Damaged and foolish input: configurations, data files, run folders and messages, changed at random.

    python benchmarks/fuzz.py --minutes 20 [--seed S] [--out fuzz]

Each try runs in a fork of its own, under a limit of time and memory. A try has failed when it ends in a traceback or a
crash, hangs, or takes too much memory; a sentence and an exit code are as they should be. Try N of seed S is always
the same: `--seed S --only N` does it again, and what a failed one was given stays in OUT/S-N. Exit code 1 when any
failed.
"""

import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # Arrow's own reserves much before it needs any

import numpy as np
import torch
from PIL import Image

from fedlens import config
from fedlens.cli import main as cli
from fedlens.core.errors import BadInput, RunFailed
from fedlens.core.run import run as run_rounds
from fedlens.core.wire import decode, encode
from fedlens.core.yaml_dialect import parse_yaml
from fedlens.flower import messages
from fedlens.flower.client import Trainer
from fedlens.flower.contract import contract, experiment_of, order_of
from fedlens.flower.node import Node
from fedlens.plots.style import pyplot
from fedlens.simulate import run as simulate
from fedlens.ui import server
from fedlens.ui.watch import Watch

CPU, WALL = 30, 120  # seconds of a try
MEMORY = 4 << 30  # bytes that a try may reserve beyond what a fork has at first
LIGHT = ["fedavg", "fedprox", "scaffold", "fedavgm", "fednova", "feddyn", "fedper", "ditto", "fedavg+ft", "moon"]
LIGHT += ["fedadam", "fedbn", "local", "apfl", "fedau"]
SMALL = ["rounds=1", "local.steps=1", "clients=3", "cohort=2", "model=mlp", "model.hidden=4", "engine=sequential"]
SMALL += ["picture=false"]
# fmt: off
ODD = [
    "''", "null", "~", "true", "-1", "0", "1", "2", "0.5", "3.7", "1e308", "1e-320", "-0.0", ".nan", ".inf", "-.inf",
    "1000000000", "9" * 35, "9" * 5000, "0x10", "1_000", "1:2", '"1"', "!!int ''", "!!int x", "!!binary x", "*a",
    "&a [*a]", "[]", "{}", "[[1]]", "[1, a]", "[" * 200, "- " * 100, "{is: x}", "{is: [1]}", "{is: null, a: 1}",
    "{is: finetune, base: {is: finetune}}", "none", "everyone", "mnist5k", "mlp", "dirichlet", "+ft", "fedavg+ft+ft",
    "fedavg/", "x/y", "a.b.c", "a,b,,c", "=", "=1", ":", "a" * 3000, '"\\0"', '"\\uD800"', "ü", "../..", '"a/b"',
    "os:system", "json:JSONDecoder", "math:pi", '\'{"a":1}\'',
]
# fmt: on
WARM = ["audit.run", "compare.board", "compare.run", "explain.run", "explain.runs", "papers.explain", "recommend.rank"]
WARM += [
    "report.client_figures",
    "report.page",
    "runs.diff",
    "simulate.describe",
    "simulate.progress",
    "simulate.resume",
]
WARM += ["simulate.timing"]  # what every fork would import anew
Rng = random.Random


# ---- how things are changed ------------------------------------------------------------------------------------------
def flipped(raw: bytes, rng: Rng) -> bytes:
    """Bytes with some of them changed, cut, doubled or moved."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        at, length = rng.randrange(len(data) + 1), rng.choice((1, 2, 4, 8, 64))
        change = rng.randrange(7)
        if change == 0:
            del data[at:]
        elif change == 1:
            del data[at : at + length]
        elif change == 2:
            data[at:at] = rng.randbytes(length)
        elif change == 3:
            data[at:at] = data[at : at + length] * rng.choice((1, 2, 500))
        elif change == 4:
            data[at : at + length] = rng.choice((b"\0", b"\xff", b"\x7f", b"9", b"[")) * length
        elif data and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
    return bytes(data)


def rewritten(value, rng: Rng):
    """Plain data with one place changed, whatever is in it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice([*value])
        change = rng.randrange(8)
        if change == 0:
            return {key: inner for key, inner in value.items() if key != name}
        if change == 1:
            return {**value, rng.choice(("", "is", "x", "é", "0", name * 50)): value[name]}
        return {**value, name: rewritten(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], rewritten(value[at], rng), *value[at + rng.choice((0, 1, 1, 1)) :]]
    with contextlib.suppress(Exception):
        return parse_yaml(rng.choice(ODD))
    return rng.choice((None, -1, 2**63, 2**200, 1e308, "", [], {}, [[]], {"": {}}, "x" * 1000, True, [value] * 1000))


def damaged(file: Path, rng: Rng) -> None:
    """A file changed, emptied, removed, or something else in its place."""
    change = rng.randrange(12)
    if change < 5 and file.suffix == ".json":
        with contextlib.suppress(ValueError, RecursionError):
            file.write_text(json.dumps(rewritten(json.loads(file.read_text()), rng)))
            return
    if change < 8:
        file.write_bytes(flipped(file.read_bytes(), rng))
        return
    content = file.read_bytes()
    file.unlink()
    if change == 8:
        os.mkfifo(file)
    elif change == 9:
        file.mkdir()
    elif change == 10:
        file.symlink_to(rng.choice((file.name, "/dev/zero", "nowhere", "..")))
    elif rng.random() < 0.5:
        file.write_bytes(
            rng.choice((b"", content[: len(content) // 2], b"[" * 100_000, b"[]", b"{}", b"null", b"\xff"))
        )


def config_text(rng: Rng, bases: list[str]) -> str:
    text = rng.choice(bases)
    change = rng.randrange(4)
    if change == 0:
        return flipped(text.encode(), rng).decode("utf-8", "replace")
    if change == 1:
        with contextlib.suppress(Exception):
            return json.dumps(rewritten(parse_yaml(text), rng))
    lines = text.splitlines()
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(lines))
        lines[at] = f"{lines[at].partition(':')[0]}: {rng.choice((*ODD, *LIGHT))}"
    return "\n".join(lines)


# ---- what they are changed from --------------------------------------------------------------------------------------
@dataclass
class Corpus:
    """One sound example of everything, in a folder that no try writes to."""

    folder: Path
    configs: list[str]
    words: list[str]
    letter: messages.Payload
    upload: bytes

    @classmethod
    def make(cls, folder: Path) -> "Corpus":
        run = config.read(None, [*SMALL, "algorithm=scaffold", f"out={folder}/run", "transcript=1", "keep=1"])
        simulate.run(run)
        settings = [config.read(None, [*SMALL, f"algorithm={name}"]) for name in LIGHT]
        more = (
            "uplink=topk,clip defences=krum attack=sign_flip faults.dropout=0.5 policy.deadline=9 local.schedule=cosine"
        )
        settings += [config.read(None, [*SMALL, word]) for word in more.split()]
        configs = [config.to_yaml(each).replace("out: ''\n", "") for each in settings]
        words = [f"{key}={value}" for text in configs for key, value in parse_yaml(text).items()]
        words += [f"{key}.{name}={inner}" for text in configs for key, value in parse_yaml(text).items()
                  if isinstance(value, dict) for name, inner in value.items()]  # fmt: skip
        ready = simulate.checked(run)
        agreed = contract(run, ready.images, "abc")
        jobs: list = []

        class Sending:
            population = 3

            def run(self, job, cohort):
                jobs.append(job)
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            run_rounds(run.algorithm, ready.net, Sending(), run.plan, seed=0)
        notes = {"ask": "work", "contract": agreed, "order": order_of(run.timetable(), jobs[0])}
        letter = messages.Payload(notes, {"download": messages.leaves_of(jobs[0].download)})
        cls._data(folder / "data")
        return cls(folder, configs, sorted(set(words)), letter, encode(jobs[0].download))

    @staticmethod
    def _data(folder: Path) -> None:
        x = np.arange(60 * 64, dtype=np.uint8).reshape(60, 8, 8)
        y = np.arange(60) % 3
        folder.mkdir()
        np.savez(folder / "plain.npz", x=x, y=y, classes=np.array(["a", "b", "c"]))
        np.savez_compressed(folder / "parts.npz", x_train=x, y_train=y, x_test=x / 255.0, y_test=y)
        for number, (image, label) in enumerate(zip(x[:36], y, strict=False)):
            kind = ("png", "jpg", "bmp", "gif", "tiff", "webp")[number % 6]
            for place in (f"folder/{label}", f"clients/c{number % 2}/{label}"):
                (folder / place).mkdir(parents=True, exist_ok=True)
                Image.fromarray(image).save(folder / place / f"{number}.{kind}")
        for part in ("train", "test"):
            (folder / "theirs" / part).mkdir(parents=True)
            for client in range(2):
                np.savez(folder / "theirs" / part / f"{client}.npz", data={"x": x[:20], "y": y[:20]})
        (folder / "mnist").mkdir()
        for name, array in {"images-idx3": x, "labels-idx1": y.astype(np.uint8)}.items():
            sizes = b"".join(side.to_bytes(4, "big") for side in array.shape)
            for part in ("train", "t10k"):
                raw = b"\0\0\x08" + bytes([array.ndim]) + sizes + array.tobytes()
                (folder / "mnist" / f"{part}-{name}-ubyte").write_bytes(raw)
        bench = {"data_indices": [{"train": np.arange(c, 40, 3), "test": np.arange(40 + c, 60, 3)} for c in range(3)]}
        (folder / "partition.pkl").write_bytes(pickle.dumps(bench))


# ---- tries: each changes something and runs what reads it ------------------------------------------------------------
def command(*words: str) -> Callable[[], None]:
    def run() -> None:
        sys.argv = ["fedlens", *words]
        Path("command").write_text(repr(words), "utf-8", "backslashreplace")
        cli.main()

    return run


def a_config(rng: Rng, corpus: Corpus) -> Callable[[], None]:
    Path("a.yaml").write_text(config_text(rng, corpus.configs), "utf-8", "surrogatepass")
    words = ["a.yaml", *SMALL] if rng.random() < 0.6 else ["a.yaml", "--keys"]
    return command("run", *words, *(["data=mnist5k", "out=o"] if "--keys" not in words else []))


def some_words(rng: Rng, corpus: Corpus) -> Callable[[], None]:
    def changed(word: str) -> str:
        key, _, value = word.partition("=")
        if rng.random() < 0.2:
            key = flipped(key.encode(), rng).decode("utf-8", "replace").replace("\0", "")
        return f"{key}={rng.choice((*ODD, *LIGHT, value)).strip(chr(34))}"

    some = [changed(rng.choice(corpus.words)) for _ in range(rng.choice((1, 1, 2, 3)))]
    what = rng.choice(("run", "run", "run", "describe", "compare", "recommend"))
    if what == "describe":
        return command(what, rng.choice((*LIGHT, *ODD)), *some)
    if what == "compare":
        return command(what, "fedavg", rng.choice(LIGHT), *some, *SMALL, "evaluate.personal=none", "--processes", "1")
    end = ["out=o"] if what == "run" else []
    return command(what, *some, *SMALL, *end)


def an_array_file(rng: Rng, corpus: Corpus) -> Callable[[], None]:
    file = Path("a.npz")
    shutil.copy(corpus.folder / "data" / rng.choice(("plain.npz", "parts.npz")), file)
    if rng.random() < 0.5:
        damaged(file, rng)
        return command("run", "data=a.npz", *SMALL, "partition=iid", "out=o")
    with np.load(file) as stored:
        arrays = dict(stored)
    name = rng.choice([*arrays])
    kinds = (np.float16, np.int8, np.uint64, np.complex64, bool, "U4", "S3", object, "M8[s]", np.longdouble)
    shape = rng.choice(((), (0,), (60,), (60, 1), (60, 0, 0), (60, 8, 9), (60, 8, 8, 4), (60, 3, 8, 8), (1,) * 32))
    with contextlib.suppress(ValueError, TypeError, OverflowError):  # no such change of this array
        arrays[name] = rng.choice(
            (
                lambda: arrays[name].astype(rng.choice(kinds)),
                lambda: np.zeros(shape, arrays[name].dtype),
                lambda: np.full(arrays[name].shape, rng.choice((-1, 1e30, np.nan, 2**62, 7))),
                lambda: arrays[name][: rng.randrange(4)],
            )
        )()
    np.savez(file, **arrays)
    return command("run", "data=a.npz", *SMALL, "partition=iid", "out=o")


def image_files(rng: Rng, corpus: Corpus) -> Callable[[], None]:
    kind = rng.choice(("folder", "clients", "theirs", "mnist", "split", "partition.pkl"))
    if kind == "split":
        shutil.copy(corpus.folder / "run" / "split.json", "s.json")
        damaged(Path("s.json"), rng)
        return command("run", "data=mnist5k", "partition=s.json", *SMALL, "out=o")
    if kind == "partition.pkl":
        shutil.copy(corpus.folder / "data" / kind, kind)
        damaged(Path(kind), rng)
        words = [
            "data=npz",
            f"data.path={corpus.folder}/data/parts.npz",
            "partition=fl_bench",
            f"partition.path={kind}",
        ]
        return command("run", *words, *SMALL, "out=o")
    shutil.copytree(corpus.folder / "data" / kind, kind)
    for _ in range(rng.choice((1, 1, 3))):
        damaged(rng.choice(sorted(path for path in Path(kind).rglob("*") if path.is_file())), rng)
    if kind == "mnist":
        os.environ["FEDLENS_DATA"] = os.getcwd()
        return command("run", "data=mnist", *SMALL, "partition=iid", "out=o")
    source = {"folder": "folder", "clients": "clients_folder", "theirs": "pfllib"}[kind]
    words = [f"data={source}", f"data.path={kind}", "rounds=1", "local.steps=1", "model=mlp", "picture=false", "out=o"]
    words += ["engine=sequential", *(["data.size=8"] if source != "pfllib" else []), "cohort=everyone"]
    return command("run", *words, *(["clients=3", "partition=iid"] if kind == "folder" else []))


def a_run_folder(rng: Rng, corpus: Corpus) -> Callable[[], None]:
    shutil.copytree(corpus.folder / "run", "runs/run")
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        files = sorted(path for path in Path("runs/run").rglob("*") if path.is_file() and not path.is_symlink())
        damaged(rng.choice(files), rng)
    if rng.random() < 0.1:
        place = Path("runs/run") / rng.choice(("", "checkpoints", "metrics.parquet", "clients"))
        name = rng.choice(("abcdef-ghijkl.parquet", "abcdef.json", "999999.json", "x", "000001-abcdef.safetensors"))
        with contextlib.suppress(OSError):
            (place / name).write_bytes(b"?")
    whole = str(corpus.folder / "run")
    return rng.choice(
        (
            the_live_page,
            the_live_page,
            command("resume", "runs/run", "rounds=2"),
            command("resume", "runs/run"),
            command("report", "runs/run"),
            command("diff", "runs/run", whole),
            command("clients", "runs/run", "--json"),
            command("time", "runs/run"),
            command("compare", "--runs", "runs/run", whole),
            command("explain", "runs/run", "--images", "1", "--methods", "gradient"),
            command("audit", "runs/run", "--attacks", "labels", "--candidates", "10"),
        )
    )


def the_live_page() -> None:
    """Everything that the page asks for, without the network; a refusal is an answer, too."""

    class Page:
        watch, folder = Watch(Path("runs")), Path("runs")
        reporting = contextlib.nullcontext()

    for _ in range(2):
        server._json(Page.watch.since(0))
        for answer in server._GET.values():
            words = {"run": ["run"], "client": ["1"], "name": ["run.png"]}
            with contextlib.suppress(BadInput, server.Refused):
                server._patiently(lambda answer=answer, words=words: answer(Page, words))


def a_message(rng: Rng, corpus: Corpus) -> Callable[[], None]:
    kind, raw, letter = rng.randrange(4), corpus.upload, corpus.letter
    if kind == 0:
        data = flipped(raw, rng)
        Path("message").write_bytes(data)
        return expecting(lambda: decode(data), ValueError)
    packed = flipped(messages.to_bytes(letter), rng)
    if kind == 1:
        Path("message").write_bytes(packed)
        return expecting(lambda: [messages.tree_of(t) for t in messages.from_bytes(packed).trees.values()], RunFailed)
    notes = rewritten(letter.notes, rng) if kind == 2 else letter.notes
    trees = letter.trees if kind == 2 else {"download": dict(letter.trees["download"])}
    if kind == 3:
        name = rng.choice([*trees["download"]])
        leaf = trees["download"].pop(name)
        shape = rng.choice((leaf.shape, leaf.shape[::-1], (), (-1,), (2**40, 2**40), (0,) * 20, (*leaf.shape, 1)))
        name = rng.choice((name, name, "", "/", name + "/x", name.partition("/")[0], "x" * 600))
        trees["download"][name] = messages.Leaf(rng.choice((leaf.dtype, "float64", "bool", "x")), shape, leaf.data)
    return answered(rng, messages.Payload(notes, trees))


def answered(rng: Rng, payload: messages.Payload) -> Callable[[], None]:
    """A node answers it, whatever it is; what its log calls a failure is a traceback."""
    Path("message").write_text(repr(payload)[:100_000], "utf-8", "backslashreplace")
    node = Node(client=0, storage=rng.choice(("", "storage")))

    def run() -> None:
        print("answered", Reading(node, say=complaint).answer(payload)[0].notes, file=sys.stderr)

    return run


class Reading(Trainer):
    """A node as far as it reads: what a method makes of a tree that is whole and not its own is no matter here."""

    def _work(self, *words):
        try:
            return super()._work(*words)
        except Exception as error:
            raise BadInput(f"the method fails: {type(error).__name__}") from None


def complaint(text: str) -> None:
    print(text, file=sys.stderr)


def a_contract(rng: Rng, corpus: Corpus) -> Callable[[], None]:
    """What a server tells a node to do, and what the node's owner has written."""
    if rng.random() < 0.3:
        owner = {"client": 0, "data": {"is": "folder", "path": str(corpus.folder / "data" / "folder"), "size": 8}}
        owner |= {"storage": "storage", "policy": {"algorithms": ["fedavg"], "contracts": "any", "raw_derived": False}}
        owner |= {"privacy": {"epsilon": 3, "delta": 1e-5, "label": "a", "ledger": "ledgers"}}
        text = json.dumps(rewritten(owner, rng)).encode()
        Path("node.yaml").write_bytes(flipped(text, rng) if rng.random() < 0.5 else text)
        return expecting(lambda: Node.read(Path("node.yaml")), BadInput)
    told = corpus.letter.notes["contract"]
    for _ in range(rng.choice((1, 1, 2, 4))):
        told = rewritten(told, rng) if isinstance(told, dict) else told
    if rng.random() < 0.5:
        Path("message").write_text(repr(told)[:100_000], "utf-8", "backslashreplace")
        return expecting(lambda: experiment_of(told if isinstance(told, dict) else {}), BadInput)
    ask = rng.choice(("hello", "work", "work"))
    return answered(rng, messages.Payload({**corpus.letter.notes, "contract": told, "ask": ask}, corpus.letter.trees))


def some_records(rng: Rng, corpus: Corpus) -> Callable[[], None]:
    """Flower's own records and bytes, signed or not, read by Flower, then by the server or by a node's guard."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
    from flwr.supercore.task_identity import TaskIdentity

    from fedlens.flower.engine import Nodes, _Pulled, _Sent, _upload
    from fedlens.flower.guard import replied
    from fedlens.flower.identity import Coordinator, Member

    at_the_node, signed = rng.random() < 0.5, rng.random() < 0.5
    member = keys(Path("keys"))
    coordinator = Coordinator(Path("keys"))
    payload = upload = corpus.letter._replace(trees={"upload": corpus.letter.trees["download"]})
    question, asked = coordinator.signed({"ask": "work"}, {}, 0, 60.0)
    if at_the_node and rng.random() < 0.8:
        payload = corpus.letter
    if signed and at_the_node:
        digests = {name: messages.tree_digest(tree) for name, tree in payload.trees.items()}
        payload = payload._replace(notes=coordinator.signed(payload.notes, digests, 0, 60.0)[0])
    elif signed:
        payload = Member(member, 0, lambda _: (upload, None)).answer(messages.Payload(question, {}))[0]
    content = messages.to_records(payload)
    if rng.random() < 0.6:
        name = rng.choice([*content])
        record = content[name]
        if isinstance(record, ConfigRecord):
            text = rng.choice((flipped(str(record["json"]).encode(), rng).decode("utf-8", "replace"), "[]", "{}", "1"))
            content[name] = ConfigRecord(rng.choice(({"json": text}, {}, {"json": 1.5}, {"json": [1]}, {"x": text})))
        elif rng.random() < 0.2:
            content[name] = MetricRecord({"x": 1.0})
        else:
            path, array = rng.choice([*record.items()])
            shape = rng.choice((array.shape, (), (-1,), (2**40, 2**40), (0,) * 20, (*array.shape, 1)))
            kind = rng.choice((array.dtype, "float64", "object", "", "x" * 99)), rng.choice((array.stype, "numpy", ""))
            path = rng.choice((path, path, "", "/", "a/" * 99, "x" * 600, "small leaves"))
            data = rng.choice((array.data, b"", flipped(array.data, rng)))
            content[name] = ArrayRecord({**record, path: Array(kind[0], shape, kind[1], data)})
        if rng.random() < 0.2:
            content[rng.choice(("tree/", "tree/x", "x", "notes"))] = content.pop(name)
    whole = {each.object_id: each.deflate() for each in get_all_nested_objects(content).values()}
    if rng.random() < 0.5:
        victim = rng.choice(sorted(whole))
        whole[victim] = flipped(whole[victim], rng)
    Path("message").write_text(repr(whole)[:100_000])
    top = content.object_id

    def run() -> None:
        try:
            found = inflate_object_from_contents(top, whole)
        except Exception as error:  # Flower's own, which the server and the guard expect
            found = error
        if at_the_node:
            if not isinstance(found, Exception):
                TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
                answer = Reading(Node(client=0), say=complaint).answer
                replied(Message(found, 1, "train"), Member(member, 0, answer).answer if signed else answer)
            return
        nodes = Nodes(None, {}, 3, print, 1 << 26, coordinator)
        reply = _Pulled(damage=str(found)) if isinstance(found, Exception) else _Pulled(found)
        with contextlib.suppress(RunFailed):
            _upload(nodes._opened(reply, _Sent(1, asked if signed else None)))

    return run


def keys(folder: Path) -> Path:
    """Those of a coordinator and of client 0, which know each other; the folder of that client."""
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    from fedlens.flower.identity import COORDINATOR, MINE, public_text

    (folder / "keys").mkdir(parents=True)
    (folder / "node").mkdir()
    theirs, mine = ed25519.Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP256R1())
    for key, file in ((theirs, folder / f"{COORDINATOR}.key"), (mine, folder / "node" / MINE)):
        file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    (folder / "node" / f"{COORDINATOR}.pub").write_text(public_text(theirs.public_key()))
    (folder / "keys" / "0.pub").write_text(public_text(mine.public_key()))
    return folder / "node"


def expecting(work: Callable[[], object], *refusals: type[Exception]) -> Callable[[], None]:
    def run() -> None:
        with contextlib.suppress(*refusals):
            work()

    return run


TRIES = {
    "config": (a_config, 3),
    "words": (some_words, 3),
    "arrays": (an_array_file, 2),
    "images": (image_files, 2),
    "run": (a_run_folder, 4),
    "message": (a_message, 2),
    "contract": (a_contract, 2),
    "records": (some_records, 2),
}


# ---- the loop --------------------------------------------------------------------------------------------------------
def child(make: Callable, rng: Rng, corpus: Corpus, place: Path) -> int:
    """In the fork: what a process of the shell would see, with limits."""
    os.setsid()
    os.chdir(place)
    for number, name in ((0, os.devnull), (1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), "utf-8", line_buffering=True)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False), "utf-8", line_buffering=True)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU, CPU + 5))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        make(rng, corpus)()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except MemoryError:
        print("fedlens: there is not enough memory", file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 70
    return 0


def one(kind: str, seed: int, number: int, corpus: Corpus, place: Path, wall: float) -> tuple[str, int]:
    """What was wrong with a try, nothing where all is as it should be; and its exit code."""
    rng = Rng(f"{seed}/{number}")
    sys.stdout.flush()
    if not (pid := os.fork()):
        with contextlib.suppress(BaseException):
            os._exit(child(TRIES[kind][0], rng, corpus, place))
        os._exit(71)
    until = time.monotonic() + wall
    while not (found := os.wait4(pid, os.WNOHANG))[0]:
        if time.monotonic() > until:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "hang", -1
        time.sleep(0.005)
    code = os.waitstatus_to_exitcode(found[1])
    said = (place / "stderr").read_text("utf-8", "replace") if (place / "stderr").exists() else ""
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return "hang", code
    if "not enough memory" in said or "MemoryError" in said:
        return "memory", code
    wrong = code < 0 or code >= 70 or "Traceback (most recent call last)" in said
    return "traceback" if wrong else "", code


def kind_of(seed: int, number: int) -> str:
    weights = [weight for _, weight in TRIES.values()]
    return Rng(f"kind {seed}/{number}").choices([*TRIES], weights)[0]


def main() -> int:
    about = argparse.ArgumentParser(usage="python benchmarks/fuzz.py [--minutes N | --tries N] [--seed S] [--out OUT]")
    about.add_argument("--minutes", type=float, default=0.0)
    about.add_argument("--tries", type=int, default=0, help="a number of tries in place of minutes")
    about.add_argument("--seed", type=int, default=0)
    about.add_argument("--only", type=int, default=None, help="one try again, by its number; its folder stays")
    about.add_argument("--kinds", default=",".join(TRIES), help="such as config,run")
    about.add_argument("--say", action="store_true", help="print how every try ended")
    about.add_argument("--wall", type=float, default=WALL, help="seconds by the clock of a try; more on a busy machine")
    about.add_argument("--out", default="fuzz", help="where what failed stays")
    asked = about.parse_args()
    torch.set_num_threads(1)
    counts, failed, codes, began = Counter(), Counter(), Counter(), time.monotonic()
    with tempfile.TemporaryDirectory() as top:
        os.environ["FEDLENS_CACHE"] = f"{top}/cache"
        corpus = Corpus.make(Path(top))
        for module in WARM:
            importlib.import_module(f"fedlens.{module}")
        pyplot()
        number, kinds = asked.only or 0, asked.kinds.split(",")
        if importlib.util.find_spec("flwr") is None:
            print("flwr is not installed: its records are not tried")
            kinds = [kind for kind in kinds if kind != "records"]
        while asked.only is not None or not asked.tries or sum(counts.values()) < asked.tries:
            if not asked.tries and asked.only is None and time.monotonic() - began > 60 * (asked.minutes or 1):
                break
            kind = kind_of(asked.seed, number)
            if kind in kinds:
                place = Path(top) / f"{asked.seed}-{number}"
                place.mkdir()
                wrong, code = one(kind, asked.seed, number, corpus, place, asked.wall)
                counts[kind] += 1
                failed[wrong] += 1
                codes[code] += 1
                if asked.say:
                    print(f"{place.name} {kind} {code} {last_line(place / 'stderr')}", flush=True)
                if wrong:
                    print(f"{place.name} {kind}: {wrong}: {last_line(place / 'stderr')}", flush=True)
                if wrong or asked.only is not None:
                    keep(place, Path(asked.out) / place.name)
                shutil.rmtree(place, ignore_errors=True)
            number += 1
            if asked.only is not None:
                break
    bad = {name: failed[name] for name in ("traceback", "hang", "memory")}
    each = ", ".join(f"{kind} {counts[kind]}" for kind in TRIES if counts[kind])
    print(f"seed {asked.seed}: {sum(counts.values())} tries in {(time.monotonic() - began) / 60:.1f} minutes ({each})")
    print(f"ended well {codes[0]}, refused {codes[2]}, failed in words {codes[1]}")
    print(f"tracebacks {bad['traceback']}, hangs {bad['hang']}, memory over {MEMORY >> 30} GiB {bad['memory']}")
    return int(any(bad.values()))


def last_line(file: Path) -> str:
    lines = file.read_text("utf-8", "replace").strip().splitlines() if file.exists() else []
    return lines[-1][:200] if lines else ""


def keep(place: Path, where: Path) -> None:
    shutil.rmtree(where, ignore_errors=True)
    where.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(shutil.Error):  # a pipe cannot be copied
        shutil.copytree(place, where, symlinks=True, ignore=lambda at, names: [n for n in names if odd(Path(at) / n)])


def odd(path: Path) -> bool:
    return not (path.is_symlink() or path.is_dir() or path.is_file())


if __name__ == "__main__":
    sys.exit(main())
