"""Whatever clients send: nothing crashes, what is wrong is refused and counted, and the model does not notice."""

import importlib.util
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fedlens.algorithms import FedAvg, FedFTG, Scaffold
from fedlens.core.algorithm import Server
from fedlens.core.check import Check
from fedlens.core.cohort import Everyone
from fedlens.core.dry_run import Rehearsal
from fedlens.core.errors import RunFailed
from fedlens.core.evaluate import Evaluate
from fedlens.core.policy import EVERY_REPLY
from fedlens.core.replies import ask
from fedlens.core.run import initial_state, run, timetable
from fedlens.core.tree import Tree
from fedlens.engines.sequential import Sequential
from fedlens.flower.messages import Leaf, Payload, from_bytes, leaves_of, to_bytes, tree_of
from fedlens.robust.faults import _longer
from recipes import CASES, RECIPES, STRUCTURES, UPLINKS
from small import PLAN, federation, network, same
from traces import trace

try:
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as some
except ImportError:
    some = None
needs_hypothesis = pytest.mark.skipif(some is None, reason="hypothesis is not installed: pip install hypothesis")
needs_flower = pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="flwr is not installed")

EVERYONE = replace(PLAN, cohort=Everyone(), epochs=0, steps=1)


def check(net, data, largest: float = 100.0) -> Check:
    return Check(Rehearsal(Sequential, net, data.data), largest)


class Scripted(Sequential):
    """Honest clients, and those whose reply `forge(job, reply)` puts in the place of theirs."""

    def __init__(self, forge, liars, **more):
        super().__init__(network(), federation(), **more)
        self.forge, self.liars = forge, liars

    def run(self, job, cohort):
        replies = super().run(job, cohort)
        return [self.forge(job, r) if r.client in self.liars else r for r in replies]


class Without(Sequential):
    def __init__(self, liars, **more):
        super().__init__(network(), federation(), **more)
        self.liars = liars

    def run(self, job, cohort):
        return super().run(job, [i for i in cohort if i not in self.liars])


def opened(recipe, plan=EVERYONE, at: int = 0):
    """(engine, server, job) of a round of a run."""
    found = []

    class Stop(Sequential):
        def run(self, job, cohort):
            found.append(job)
            return super().run(job, cohort)

    net, states = network(), []
    engine = Stop(net, federation())
    run(recipe, net, engine, plan, observe=lambda server, job, _: states.append(server))
    before = states[at - 1] if at else Server(net, Tree(), engine.population)
    stage, first, _ = timetable(recipe, plan)[at]
    server = replace(before, state=initial_state(stage, before) if first == 0 else before.state)
    return engine, server, found[at]


# ---- honest replies --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [*STRUCTURES, *(name for name in CASES if name not in RECIPES)])
def test_honest_replies_pass_and_bits_stay(name):
    """Of the recipes, some; of all in test_residency.py."""
    net, data, refused, expected = network(), federation(), [], trace(name)
    server = expected.again(
        Sequential(net, data),
        check=check(net, data),
        observe=lambda server, job, answers: refused.extend(answers.refused),
    )
    assert not refused and same(server.state, expected.state)


# ---- a thousand forged ones ------------------------------------------------------------------------------------------
def leaf_changed(change):
    """Another value in the place of a drawn leaf."""

    def forged(upload: Tree, draw: np.random.Generator) -> Tree:
        paths = sorted(path for path, _ in upload.paths())
        chosen = paths[draw.integers(len(paths))].split("/")

        def put(tree: Tree, path: list[str]) -> Tree:
            new = put(tree[path[0]], path[1:]) if path[1:] else change(tree[path[0]], draw)
            return Tree({k: new if k == path[0] else v for k, v in tree.items() if k != path[0] or new is not None})

        return put(upload, chosen)

    return forged


def one_entry(value: float):
    def change(leaf: Tensor, draw) -> Tensor:
        flat = leaf.clone().flatten()
        flat[int(draw.integers(len(flat)))] = value
        return flat.view_as(leaf)

    return change


FORGERIES = {
    "nan": leaf_changed(one_entry(torch.nan)),
    "inf": leaf_changed(one_entry(-torch.inf)),
    "huge": leaf_changed(one_entry(3e38)),
    "shape": leaf_changed(lambda leaf, draw: leaf.unsqueeze(0)),
    "flat": leaf_changed(lambda leaf, draw: torch.cat([leaf.flatten(), leaf.flatten()])),
    "empty": leaf_changed(lambda leaf, draw: leaf.flatten()[:0]),
    "type": leaf_changed(
        lambda leaf, draw: leaf.to([torch.float16, torch.float32, torch.int64, torch.bool][draw.integers(4)])
    ),
    "complex": leaf_changed(lambda leaf, draw: leaf.to(torch.complex64)),
    "sparse": leaf_changed(lambda leaf, draw: leaf.unsqueeze(0).to_sparse()),
    "no tensor": leaf_changed(lambda leaf, draw: leaf.tolist()),
    "branch": leaf_changed(lambda leaf, draw: Tree(weight=leaf)),
    "gone": leaf_changed(lambda leaf, draw: None),
    "more": lambda upload, draw: upload.replace(**{"x" * int(draw.integers(1, 99)): torch.zeros(3)}),
    "more inside": lambda upload, draw: upload.replace(delta=upload.delta.replace(optimizer=Tree())),
    "nothing": lambda upload, draw: Tree(),
    "no tree": lambda upload, draw: torch.zeros(3),
    "negative": lambda upload, draw: upload.replace(weight=-upload.weight - draw.random()),
    "boundless": lambda upload, draw: upload.replace(weight=upload.weight * 0 + 1e300),
    "oversized": leaf_changed(_longer),
    "deep": lambda upload, draw: upload.replace(delta=deep(2000)),
}


def deep(levels: int) -> Tree:
    tree = Tree()
    for _ in range(levels):
        tree = Tree(a=tree)
    return tree


def test_600_mutated_replies_leave_no_trace():
    """Half of the clients send them round after round, in every way there is."""
    liars, rounds, sent = (1, 2, 4), 200, Counter()

    def forge(job, reply):
        draw = np.random.Generator(np.random.Philox(key=job.round * 10 + reply.client))
        kind = list(FORGERIES)[(job.round * len(liars) + liars.index(reply.client)) % len(FORGERIES)]
        sent[kind] += 1
        return replace(reply, upload=FORGERIES[kind](reply.upload, draw))

    plan, refused = replace(EVERYONE, rounds=rounds), Counter()
    engine = Scripted(forge, liars)
    hurt = run(
        Scaffold(),
        engine.net,
        engine,
        plan,
        check=check(engine.net, engine.federation),
        observe=lambda server, job, answers: refused.update(reply.client for reply, _ in answers.refused),
    )
    calm = Without(liars)
    assert same(hurt.state, run(Scaffold(), calm.net, calm, plan).state)
    assert refused == dict.fromkeys(liars, rounds) and sum(sent.values()) == 600 and set(sent) == set(FORGERIES)


@pytest.fixture(scope="module")
def round_of_scaffold():
    engine, server, job = opened(Scaffold())
    return engine, server, job, engine.run(job, [0, 1]), check(engine.net, engine.federation)


class Given:
    def __init__(self, replies):
        self.replies = replies

    def run(self, job, cohort):
        return self.replies


def outcome(round_of_scaffold, upload):
    _, server, job, (honest, other), guard = round_of_scaffold
    return ask(Given([honest, replace(other, upload=upload)]), server, job, [0, 1], EVERY_REPLY, guard)


if some is not None:

    def raw_tree(entries: dict) -> Tree:
        tree = Tree()
        for name, value in entries.items():
            dict.__setitem__(tree, name, value)  # as a decoder would: no look at names
        return tree

    NAMES = some.sampled_from(["delta", "control", "weight", "params", "buffers", "conv.weight", "head.bias", "items"])
    DTYPES = some.sampled_from([torch.float64, torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool])
    SHAPES = some.lists(some.integers(0, 5), max_size=5)
    NUMBERS = some.sampled_from([0.0, 1.0, -1.0, 1e30, torch.inf, torch.nan])
    TENSORS = some.builds(lambda s, d, n: torch.full(s, n, dtype=torch.float64).to(d), SHAPES, DTYPES, NUMBERS)
    LEAVES = some.one_of(TENSORS, some.none(), some.integers(), some.text(max_size=5), some.binary(max_size=5))
    TREES = some.recursive(
        LEAVES,
        lambda inner: some.dictionaries(some.one_of(NAMES, some.text(max_size=8)), inner, max_size=4).map(raw_tree),
        max_leaves=12,
    )


@needs_hypothesis
def test_400_invented_replies_are_refused(round_of_scaffold):
    honest, count = round_of_scaffold[3][0].upload, Counter()

    @settings(max_examples=400, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(TREES)
    def each(upload):
        answers, uploads = outcome(round_of_scaffold, upload)
        ((reply, why),) = answers.refused
        assert reply.client == 1 and why and [r.client for r in answers] == [0] and same(uploads[0], honest)
        assert len(why) < 300
        count[why] += 1

    each()
    assert sum(count.values()) >= 400 and len(count) > 3


# ---- single lies -----------------------------------------------------------------------------------------------------
def refusal(recipe, change, plan=EVERYONE, at: int = 0) -> str:
    engine, server, job = opened(recipe, plan, at)
    honest, other = engine.run(job, [0, 1])
    replies = Given([honest, replace(other, upload=change(other.upload))])
    answers, uploads = ask(replies, server, job, [0, 1], EVERY_REPLY, check(engine.net, engine.federation))
    assert len(uploads) == len(answers) == 2 - len(answers.refused)
    return answers.refused[0][1] if answers.refused else ""


def test_sparse_rows():
    def more_kept(upload):
        return upload.replace(kept=upload.kept ^ 1)

    def row_too_many(upload):
        params = upload.delta.params
        row = Tree({"conv.weight": torch.cat([params["conv.weight"]] * 2)})
        return upload.replace(delta=upload.delta.replace(params=params | row))

    for name in ("spatl, salient", "spatl, norms", "fedsls, spatl+ft"):
        at = 1 if name.startswith("fedsls") else 0
        assert refusal(RECIPES[name], lambda upload: upload, at=at) == ""
    for name in ("spatl, salient", "spatl, norms"):
        assert "and should be [" in refusal(RECIPES[name], more_kept)
        assert "conv.weight is float64 [" in refusal(RECIPES[name], row_too_many)
        assert "kept is [2]" in refusal(RECIPES[name], lambda u: u.replace(kept=torch.cat([u.kept, u.kept])))
    for wrong in (-1, 10**9, None):

        def elsewhere(upload, wrong=wrong):
            packed = upload.delta.params["head.weight"]
            index = packed.index.clone()
            index[1] = index[0] if wrong is None else wrong
            params = upload.delta.params.replace(**{"head.weight": packed.replace(index=index)})
            return upload.replace(delta=upload.delta.replace(params=params))

        plan = replace(EVERYONE, uplink=UPLINKS["topk"])
        assert refusal(FedAvg(), elsewhere, plan) == "its indices are out of range or come twice"
    wrapped = torch.tensor([5, -(2**31)], dtype=torch.int32)  # the difference overflows to something positive

    def overflowing(upload):
        packed = upload.delta.params["conv.bias"]
        params = upload.delta.params.replace(**{"conv.bias": packed.replace(index=wrapped[1:])})
        return upload.replace(delta=upload.delta.replace(params=params))

    assert "out of range" in refusal(FedAvg(), overflowing, replace(EVERYONE, uplink=UPLINKS["topk"]))


def test_numbers_that_a_method_acts_on():
    assert "images have the shape [1, 6, 9999]" in refusal(
        FedFTG(iterations=0), lambda u: u.replace(shape=torch.tensor([1, 6, 9999], dtype=torch.int32))
    )
    assert "negative" in refusal(FedFTG(iterations=0), lambda u: u.replace(counts=-1 - u.counts))
    assert "under its ticket" in refusal(RECIPES["fedaux"], lambda u: u.replace(ticket=u.ticket + 1), at=1)
    fedxds = RECIPES["fedxds"]
    assert "labels go from 0 to 99" in refusal(
        fedxds, lambda u: u.replace(y=torch.cat([u.y[:-1] * 0, u.y[-1:] * 0 + 99])), at=2
    )
    assert "x is [" in refusal(fedxds, lambda u: u.replace(x=u.x[1:]), at=2)
    assert "MiB" in refusal(fedxds, lambda u: u.map(lambda leaf: leaf[:1].expand(10**7, *leaf.shape[1:])), at=2)
    quantised = replace(EVERYONE, uplink=UPLINKS["quantise"])

    def overflows(upload):
        packed = upload.delta.params["head.bias"]
        new = packed.replace(scale=packed.scale * 0 + 1e300, low=packed.low * 0 + 1.79e308)
        params = upload.delta.params.replace(**{"head.bias": new})
        return upload.replace(delta=upload.delta.replace(params=params))

    assert "not finite" in refusal(FedAvg(), overflows, quantised)


def test_claims_that_are_no_numbers_are_left_to_fedsls():
    change = dict(at=1)
    assert refusal(RECIPES["fedsls"], lambda u: u.replace(weight=u.weight * torch.nan), **change) == ""
    assert "not finite" in refusal(RECIPES["fedsls"], lambda u: u.replace(examples=u.examples * torch.nan), **change)


def test_answers_about_personal_models():
    engine, server, job = opened(FedAvg())
    look = replace(job, stage=job.stage.errand(Evaluate(base=job.stage.algorithm)))
    honest, other = engine.run(look, [0, 1])
    for upload, why in (
        (other.upload.replace(correct=other.upload.examples + 1), "more correct answers than examples"),
        (other.upload.replace(examples=torch.tensor(2.5)), "examples is float32"),
        (other.upload.replace(loss=other.upload.loss * torch.nan), ""),
    ):
        guard = check(engine.net, engine.federation)
        answers, _ = ask(Given([honest, replace(other, upload=upload)]), server, look, [0, 1], EVERY_REPLY, guard)
        assert [why] * bool(why) == [said for _, said in answers.refused] or why in answers.refused[0][1]


def test_strangers_repetitions_and_old_answers(round_of_scaffold):
    _, server, job, (honest, other), guard = round_of_scaffold
    more = [honest, replace(other, client=9), honest, replace(other, round=job.round - 1), other]
    answers, uploads = ask(Given(more), server, job, [0, 1], EVERY_REPLY, guard)
    assert [r.client for r in answers] == [0, 1] and len(uploads) == 2
    said = [(reply.client, why) for reply, why in answers.refused]
    assert said == [(0, "it has answered already"), (1, "it answers round 0"), (9, "nobody asked it")]


def test_a_round_in_which_nobody_weighs_anything_is_void(round_of_scaffold):
    _, server, job, replies, guard = round_of_scaffold
    nothing = [replace(r, upload=r.upload.replace(weight=r.upload.weight * 0)) for r in replies]
    answers, uploads = ask(Given(nothing), server, job, [0, 1], EVERY_REPLY, guard)
    assert uploads == [] and answers.void == "its replies count for nothing" and not answers.refused


# ---- payloads --------------------------------------------------------------------------------------------------------
def test_1000_damaged_payloads(round_of_scaffold):
    """Bytes of a real upload: bits of what describes the values, lengths, ends; and of the values themselves."""
    honest = round_of_scaffold[3][1].upload
    whole = to_bytes(Payload({"client": 1}, {"upload": leaves_of(honest)}))
    head = 8 + int.from_bytes(whole[:8], "little")
    draw, ended = np.random.Generator(np.random.Philox(key=5)), Counter()
    for number in range(1000):
        data = bytearray(whole)
        if number % 4 == 0:
            data = data[: draw.integers(len(data))]
        else:
            for _ in range(draw.integers(1, 4)):
                at = draw.integers(head) if number % 4 < 3 else draw.integers(head, len(data))
                data[at] ^= 1 << int(draw.integers(8))
        try:
            tree = tree_of(from_bytes(bytes(data)).trees.get("upload", {}))
        except RunFailed as error:
            assert len(str(error)) < 600
            ended["damaged"] += 1
            continue
        answers, uploads = outcome(round_of_scaffold, tree)
        if answers.refused:
            ended["refused"] += 1
            assert len(uploads) == 1
        else:  # only values can have changed, to others that no one can tell from honest ones, or notes
            assert number % 4 == 3 or same(tree, honest)
            assert all(leaf.isfinite().all() and leaf.abs().max() <= 1e12 for leaf in uploads[1].leaves())
            ended["plausible"] += 1
    assert ended["damaged"] > 500 and ended["refused"] > 50 and sum(ended.values()) == 1000


@pytest.mark.parametrize(
    "layout",
    [
        [],
        {},
        [1, 2, 3],
        [{}, []],
        [{}, {"upload": []}],
        [{}, {"upload": {"x": 5}}],
        [{}, {"upload": {"x": ["float32", [1], -4]}}],
        [{}, {"upload": {"x": ["float32", [1], 10**12]}}],
        [{}, {"upload": {"x": ["float32", [1], 4.0]}}],
        [{}, {"upload": {"x": [["float32"], [1], 4]}}],
        [{}, {"upload": {"x": ["float32", ["1"], 4]}}],
        [{}, {"upload": {"x": ["float32", [1.0], 4]}}],
        [{}, {"upload": {"x": ["float32", [10**30, 0], 0]}}],
        [{}, {"upload": {"x": ["float32", [2**62, 2], 4]}}],
        [{}, {"upload": {"/".join("x" * 5000): ["float32", [1], 4]}}],
        [{}, {"upload": {"a//b": ["float32", [1], 4]}}],
        [{}, {"upload": {"x" * 1000: ["float32", [1], 4]}}],
    ],
    ids=str,
)
def test_payloads_that_nobody_wrote(layout):
    text = json.dumps(layout).encode()
    with pytest.raises(RunFailed, match="message is damaged"):
        tree_of(from_bytes(len(text).to_bytes(8, "little") + text + b"1234").trees["upload"])


def test_payloads_too_deep_for_json():
    text = b"[" * 200_000
    with pytest.raises(RunFailed, match="message is damaged"):
        from_bytes(len(text).to_bytes(8, "little") + text)


# ---- through Flower --------------------------------------------------------------------------------------------------
@needs_flower
def test_hostile_nodes_through_flower(tmp_path):
    """Two of three nodes send something else in every task; the model is the third one's alone."""
    from flwr.app import ArrayRecord, ConfigRecord

    import test_flower as flower

    settings = flower.words(tmp_path, "scaffold", "cohort=3", "rounds=12", "evaluate.personal_every=4")
    sent = Counter()

    def forge(number: int, client: int, reply) -> None:
        payload = flower.from_records(reply.content)
        upload, kinds = tree_of(payload.trees["upload"]), list(FORGERIES)
        draw = np.random.Generator(np.random.Philox(key=number))
        kind = [k for k in kinds if k not in ("sparse", "no tensor", "complex", "no tree", "deep")][number % 15]
        if "delta" not in upload:
            kind = "type"
        payload = Payload({"client": client}, {"upload": leaves_of(FORGERIES[kind](upload, draw))})
        reply.content = flower.recorddict_from_proto(flower.recorddict_to_proto(flower.to_records(payload)))
        if number % 5 == 4:
            reply.content["notes"] = ConfigRecord({"json": ["[]", "{", "5", "[" * 99_999][number % 4]})
        if number % 7 == 6:
            reply.content["tree/upload"] = ArrayRecord({})
        sent[client] += 1

    class Hostile(flower.Grid):
        def pull_messages(self, names):
            found = super().pull_messages(names)
            for reply in found:
                if reply.metadata.src_node_id != 100 and "tree/upload" in reply.content:
                    forge(sum(sent.values()), reply.metadata.src_node_id - 100, reply)
            return found

    result = flower.deployed(tmp_path / "hostile", settings, Hostile(flower.nodes(tmp_path)))
    lone = tmp_path / "lone"
    lone.mkdir()
    lost = [(client, task) for client in (1, 2) for task in range(99)]
    quiet = [word for word in settings if "personal_every" not in word]
    flower.deployed(lone / "run", [*quiet, "evaluate.personal=none"], flower.Grid(flower.nodes(lone), lost=lost))
    assert same(flower.state(tmp_path / "hostile"), flower.state(lone / "run"))
    trained = 12 * 2
    assert result.setbacks == {"refused": trained} and sum(sent.values()) > trained
    assert set(result.personal["before"])


@needs_flower
def test_what_a_node_says_of_itself(tmp_path):
    """Numbers that are none, lists, and names of others are no client."""
    import test_flower as flower

    class Liar(flower.Grid):
        said = iter([[0], "0", -1, 3, True, 10**9, None])

        def pull_messages(self, names):
            found = super().pull_messages(names)
            for reply in found:
                if reply.metadata.src_node_id >= 103:
                    payload = Payload({"client": next(self.said), "refused": " \n "}, {})
                    reply.content = flower.recorddict_from_proto(flower.recorddict_to_proto(flower.to_records(payload)))
            return found

    settings = flower.words(tmp_path, "fedavg", "rounds=1", "evaluate.personal=none")
    everyone = [*flower.nodes(tmp_path), *({"partition-id": 0} for _ in range(6))]
    result = flower.deployed(tmp_path / "real", settings, Liar(everyone))
    assert result.rounds == 1 and not result.setbacks


@needs_flower
def test_sizes_are_looked_at_before_anything_is_built(tmp_path):
    import test_flower as flower

    payload = flower.to_records(Payload({}, {"upload": {"x": Leaf("uint8", (1 << 20,), bytes(1 << 20))}}))
    flower.from_records(payload, 2 << 20)
    with pytest.raises(RunFailed, match=r"too large: it has 10\d+ bytes, and 1000 are allowed"):
        flower.from_records(payload, 1000)


class Objects:
    """A Grid whose replies travel as Flower's objects, named byte strings, and are put together as HttpGrid does.

    Node 100 answers honestly. Of node 101's objects `mutate` makes others, those that a SuperLink would store.
    """

    def __init__(self, uploads, mutate):
        import test_flower as flower  # says to Flower which process this is

        self.uploads, self.mutate, self.sent, self.to_records = uploads, mutate, {}, flower.to_records

    def get_node_ids(self):
        return [100, 101]

    def push_messages(self, messages):
        self.sent = {f"{index:064x}": message for index, message in enumerate(messages)}
        return list(self.sent)

    def pull_messages(self, names):
        from flwr.app import Message
        from flwr.supercore.inflatable import inflatable_object as objects
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

        (name,) = names
        asked = self.sent[name]
        client = asked.metadata.dst_node_id - 100
        asked.metadata.__dict__["_message_id"] = name
        if asked.metadata.message_type == "query":
            return [Message(self.to_records(Payload({"client": client}, {})), reply_to=asked)]
        reply = Message(self.to_records(Payload({}, {"upload": leaves_of(self.uploads[client])})), reply_to=asked)
        contents = {key: each.deflate() for key, each in objects.get_all_nested_objects(reply).items()}
        if client == 1:
            contents = self.mutate(contents, list(self.sent))
        return [inflate_object_from_contents(reply.object_id, contents)]


def stored(content: bytes) -> bool:
    """Whether a SuperLink takes such an object."""
    from flwr.supercore.inflatable.inflatable_object import UnexpectedObjectContentError
    from flwr.supercore.inflatable.inflatable_utils import validate_object_content

    try:
        validate_object_content(content)
    except (UnexpectedObjectContentError, UnicodeDecodeError):
        return False
    return True


def body_changed(content: bytes, change) -> bytes:
    """The same object with another body, whose length its head tells."""
    head, _, body = content.partition(b"\x00")
    new = change(bytearray(body))
    return b" ".join([*head.split(b" ")[:-1], str(len(new)).encode()]) + b"\x00" + bytes(new)


@needs_flower
def test_1000_mutated_messages_through_flowers_decoder(round_of_scaffold, tmp_path):
    """Of one node any object that a message is made of: bits, lengths, one in another's place; or a forged upload."""
    from flwr.supercore.inflatable.inflatable_object import get_object_type_from_object_content as type_of

    from fedlens.flower.engine import Flower, Nodes

    small, server, job, (honest, other), guard = round_of_scaffold
    draw, ended, kinds = np.random.Generator(np.random.Philox(key=7)), Counter(), Counter()
    forgeries = [k for k in FORGERIES if k not in ("sparse", "no tensor", "complex", "no tree", "deep")]
    sent = []

    def flipped(body: bytearray) -> bytearray:
        for _ in range(int(draw.integers(1, 4))):
            if body:
                body[draw.integers(len(body))] ^= 1 << int(draw.integers(8))
        return body

    def mutate(contents: dict[str, bytes], messages: list[str]) -> dict[str, bytes]:
        while True:
            key = list(contents)[draw.integers(len(contents))]
            way = ("bits", "short", "head", "swapped", "another's")[draw.integers(5)]
            new = contents[key]
            if way == "bits":
                new = body_changed(new, flipped)
            elif way == "short":
                new = body_changed(new, lambda body: body[: draw.integers(len(body) + 1)])
            elif way == "head":
                new = bytes(flipped(bytearray(new[:120]))) + new[120:]
            elif way == "swapped":
                new = list(contents.values())[draw.integers(len(contents))]
            else:  # a reply to the honest node's message
                new = new.replace(messages[1].encode(), messages[0].encode())
            if new != contents[key] and stored(new):
                kinds[way, type_of(contents[key])] += 1
                return {**contents, key: new}

    grid = Objects({0: honest.upload, 1: other.upload}, mutate)
    nodes = Nodes(grid, {}, 2, lambda text: sent.append(len(text)), 1 << 20)  # pyright: ignore[reportArgumentType]
    engine = Flower(nodes, small, lambda job: {"shared": ""}, journal=tmp_path, holders={}, patience=5.0)
    for number in range(1000):
        grid.uploads[1], grid.mutate = other.upload, mutate
        if number % 4 == 0:  # whole messages with something else in them
            grid.uploads[1] = FORGERIES[forgeries[number // 4 % len(forgeries)]](other.upload, draw)
            grid.mutate = lambda contents, messages: contents
        answers, uploads = ask(engine, server, job, [0, 1], EVERY_REPLY, guard)
        engine.save(0)
        assert answers[0].client == 0 and same(uploads[0], honest.upload)
        if answers.refused:
            ((reply, why),) = answers.refused
            assert reply.client == 1 and len(uploads) == 1 and why and len(why) < 600
            ended["beyond Flower" if "Flower cannot read it" in why else "refused"] += 1
        elif answers.missing:
            assert answers.missing == [1] and len(uploads) == 1
            ended["no answer"] += 1
        else:  # values that no one can tell from honest ones, or what nobody reads
            leaves = uploads[1].leaves()
            assert number % 4 and all(leaf.isfinite().all() and leaf.abs().max() <= 1e12 for leaf in leaves)
            ended["plausible"] += 1
    assert min(ended["refused"], ended["beyond Flower"]) > 300 and max(sent, default=0) < 600
    assert {"Message", "RecordDict", "ConfigRecord", "ArrayRecord", "Array"} <= {type for _, type in kinds}
    assert {way for way, _ in kinds} == {"bits", "short", "head", "swapped", "another's"}
