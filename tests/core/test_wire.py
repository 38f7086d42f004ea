"""Every message survives encoding, and the ledger books exactly its length."""

import hashlib
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load

from fedlens.algorithms import FedAvg
from fedlens.core import wire
from fedlens.core.ledger import Ledger
from fedlens.core.run import run
from fedlens.core.tree import Tree
from fedlens.core.wire import decode, digest, encode, header
from fedlens.engines.sequential import Sequential
from recipes import CASES, STRUCTURES
from small import PLAN, federation, network, same
from traces import trace


@pytest.mark.parametrize(("name", "norm"), [*((name, True) for name in CASES), *((name, False) for name in STRUCTURES)])
def test_booked_bytes_are_the_length_of_what_is_sent(name, norm):
    ledger, up, down, holders = Ledger(), 0, 0, set()
    done = trace(name, norm)
    for job, replies in zip(done.jobs, done.replies, strict=True):
        entries = ledger.book(job, [r.client for r in replies], replies, round=job.round + 1)
        for reply in replies:
            message = encode(reply.upload)
            assert same(decode(message), reply.upload) and decode(message).keys() == reply.upload.keys()
            up += len(message)
            down += len(encode(job.download))
            if job.shared and (reply.client, encode(job.shared)) not in holders:  # a common payload travels once
                holders.add((reply.client, encode(job.shared)))
                down += len(encode(job.shared))
        booked = sum(e.total for e in entries if e.kind == "upload")
        assert booked == sum(len(encode(r.upload)) for r in replies)
    assert (ledger.up, ledger.down) == (up, down) and up > 0


def test_all_types_survive_and_others_can_read_them():
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32]
    dtypes += [torch.int16, torch.int8, torch.uint8, torch.bool]
    tree = Tree({str(d)[6:]: (torch.arange(6).view(2, 3) % 2).to(d) for d in dtypes})
    tree = tree.replace(deep=Tree(a=Tree(b=torch.tensor(3.5)), none=Tree()), nothing=torch.empty(0, 4))
    data = encode(tree)
    assert same(decode(data), tree) and decode(data).deep.none == Tree()
    assert len(data) == len(header(tree)) + tree.nbytes
    assert torch.equal(load(data)["bfloat16"], tree.bfloat16)
    assert json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["deep/a/b"]["shape"] == []


def test_equal_trees_give_equal_bytes():
    a, b = Tree(x=torch.ones(2), y=torch.zeros(1)), Tree(y=torch.zeros(1), x=torch.ones(2))
    assert encode(a) == encode(b)
    assert encode(Tree(x=torch.ones(4, 4).t()[1:])) == encode(Tree(x=torch.ones(3, 4)))


def test_leaves_come_back_in_one_order():
    tree = Tree(model=Tree({f"layer{at}": torch.zeros(at + 1) for at in range(20)}), counts=torch.zeros(2))
    orders = {tuple(path for path, _ in decode(encode(tree)).paths()) for _ in range(10)}
    assert orders == {tuple(sorted(path for path, _ in tree.paths()))}


def test_common_payload_is_booked_once_per_client_and_version():
    ledger = Ledger()
    jobs = []

    def observe(server, job, replies):
        shared = Tree(x=torch.zeros(10)) if server.round < 3 else Tree(x=torch.ones(10))
        job = replace(job, shared=shared)
        jobs.append(ledger.book(job, [1, 2] if server.round < 2 else [2, 3], replies, round=server.round))

    run(FedAvg(), network(), Sequential(network(), federation()), PLAN, observe=observe)
    who = [[e.client for e in entries if e.kind == "shared"] for entries in jobs]
    assert who == [[1, 2], [3], [2, 3]]


def test_the_same_leaves_are_hashed_once_and_changed_ones_again(monkeypatch):
    made, sha256 = [], hashlib.sha256
    monkeypatch.setattr(wire, "hashlib", SimpleNamespace(sha256=lambda: made.append(1) or sha256()))
    tree = Tree(x=torch.zeros(10), y=torch.ones(3))
    first = digest(tree)
    assert digest(Tree(tree)) == first == hashlib.sha256(encode(tree)).hexdigest() and len(made) == 1
    tree.x.add_(1)
    assert digest(tree) == hashlib.sha256(encode(tree)).hexdigest() != first
    assert digest(Tree(x=tree.y, y=tree.x)) != digest(tree)
    assert len(made) == 4
    odd = Tree(x=torch.ones(4, 3).t(), none=torch.empty(0), empty=Tree(), one=torch.tensor(2.0))
    assert b"".join(wire.parts(odd)) == encode(odd) and digest(odd, wire.parts(odd)) == sha256(encode(odd)).hexdigest()


def test_what_nobody_encoded_is_refused():
    whole = encode(Tree(a=torch.ones(2)))
    strange = [b"", b"\xff" * 20, whole[:-3], whole.replace(b"empty", b"full_"), whole.replace(b'"[]"', b'"[["')]
    for data in strange:
        with pytest.raises(ValueError):
            decode(data)


@pytest.mark.parametrize("shape", [(), (2,), (2, 2)])
def test_a_value_in_the_way_of_others_is_refused(shape):
    with pytest.raises(TypeError, match="x is a value and a branch"):
        wire.nested({"x": torch.zeros(shape), "x/y": torch.zeros(1)})
