"""Every partitioner: nothing owned twice, nothing lost unsaid, same seed same split, tests in the client's own mix."""

import json
import time
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlens.core.errors import BadInput
from fedlens.data import PARTITIONS, Images, Split, federate, skew
from fedlens.data.partition.base import ByUser, Domains, File, Iid, Quantity
from fedlens.data.partition.label_skew import Dirichlet, Shards


def labelled(y_train, y_test, users=None, domains=None) -> Images:
    """A data set of empty pictures; the parts are mixed up, so that an index is not a place inside a part."""
    y = np.concatenate([y_train, y_test]).astype(np.int64)
    order = np.random.default_rng(len(y)).permutation(len(y))
    place = np.argsort(order)
    return Images(
        x=torch.zeros(len(y), 1, 2, 2, dtype=torch.uint8),
        y=torch.from_numpy(y[order]),
        train=torch.from_numpy(np.sort(place[: len(y_train)])),
        test=torch.from_numpy(np.sort(place[len(y_train) :])),
        classes=tuple(map(str, range(int(y.max()) + 1))),
        mean=(0.5,),
        std=(0.5,),
        users=None if users is None else torch.from_numpy(np.asarray(users)[order]),
        domains=None if domains is None else torch.from_numpy(np.asarray(domains)[order]),
        checksum="c",
        origin="made up",
        name="made_up",
    )


def balanced(classes=10, train=100, test=20) -> Images:
    return labelled(np.repeat(np.arange(classes), train), np.repeat(np.arange(classes), test))


@st.composite
def data(draw, users=False):
    classes = draw(st.integers(2, 8))
    of_class = draw(st.lists(st.integers(6, 60), min_size=classes, max_size=classes))
    of_test = draw(st.lists(st.integers(0, 20), min_size=classes, max_size=classes))
    y_train, y_test = np.repeat(np.arange(classes), of_class), np.repeat(np.arange(classes), of_test)
    who = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 12, len(y_train) + len(y_test)) if users else None
    return labelled(y_train, y_test, who)


ALPHAS = st.sampled_from([0.001, 0.01, 0.1, 0.5, 1.0, 10.0, 1000.0])
PARTITION = st.one_of(
    st.builds(Iid),
    st.builds(Quantity, alpha=ALPHAS, min_size=st.integers(0, 3)),
    st.builds(
        Dirichlet,
        alpha=ALPHAS,
        min_size=st.integers(0, 3),
        dialect=st.sampled_from(["class", "balanced", "client", "equal"]),
    ),
    st.builds(Shards, classes=st.integers(1, 8)),
)


def counts(images: Images, shards) -> np.ndarray:
    y = images.y.numpy()
    return np.stack([np.bincount(y[shard], minlength=len(images.classes)) for shard in shards])


def feasible(partition, images, clients) -> bool:
    """Whether there are examples enough for all."""
    y = images.y if partition.test == "pooled" else images.y[images.train]
    if isinstance(partition, Shards):
        fewest = np.bincount(y.numpy(), minlength=len(images.classes)).min()
        enough = fewest * len(images.classes) >= clients * partition.classes
        return partition.classes <= len(images.classes) and bool(enough)
    return clients <= len(y) and clients * getattr(partition, "min_size", 0) <= len(y)


def unused_by_notes(split: Split) -> int:
    """The number that the notes admit to."""
    words = [note.split() for note in split.notes if "training examples are unused" in note]
    return sum(int(some[some.index("training") - 1]) for some in words)


@settings(max_examples=120, deadline=None)
@given(data(), PARTITION, st.integers(1, 12), st.integers(0, 5), st.sampled_from(["matched", "holdout", "pooled"]))
def test_every_example_has_one_owner_or_is_said_to_have_none(images, partition, clients, seed, test):
    partition = replace(partition, test=test)
    try:
        split = partition.split(images, clients, seed)
    except BadInput:
        assert not feasible(partition, images, clients)
        return
    assert feasible(partition, images, clients)
    assert len(split.train) == len(split.test) == clients
    owned = np.concatenate([*split.train, *split.test])
    assert len(np.unique(owned)) == len(owned)
    assert all(len(shard) for shard in split.train)
    assert all((np.diff(shard) > 0).all() for shard in (*split.train, *split.test))
    train, whole = set(images.train.tolist()), set(range(len(images)))
    pool = {"matched": train, "holdout": train, "pooled": whole}[test]
    dealt = {index for shard in split.train for index in shard.tolist()}
    if test == "matched":
        assert dealt <= train and set(np.concatenate(split.test).tolist()) <= set(images.test.tolist())
    else:
        dealt |= {index for shard in split.test for index in shard.tolist()}
    assert dealt <= pool and len(pool) - len(dealt) == unused_by_notes(split)


@settings(max_examples=60, deadline=None)
@given(data(), PARTITION, st.integers(1, 12), st.integers(0, 5))
def test_same_seed_same_split_and_the_partitions_own_seed_wins(images, partition, clients, seed):
    try:
        first, again = (partition.split(images, clients, seed) for _ in range(2))
    except BadInput:
        return
    assert first.hash == again.hash and first.notes == again.notes
    assert replace(partition, seed=seed).split(images, clients, seed + 1).hash == first.hash


@pytest.mark.parametrize("partition", [Iid(), Quantity(), Dirichlet(), Dirichlet(dialect="client"), Shards()])
def test_another_seed_is_another_split(partition):
    images = balanced()
    assert len({partition.split(images, 10, seed).hash for seed in range(5)}) == 5


@settings(max_examples=80, deadline=None)
@given(data(), PARTITION, st.integers(1, 12), st.integers(0, 3))
def test_test_shards_follow_the_training_mix(images, partition, clients, seed):
    """Against exact fractions: every count is the share rounded up or down, but for clients that would get nothing."""
    try:
        split = partition.split(images, clients, seed)
    except BadInput:
        return
    train, test = counts(images, split.train), counts(images, split.test)
    available = np.bincount(images.y[images.test].numpy(), minlength=len(images.classes))
    held = train.sum(0)
    assert (test.sum(0) == np.where(held > 0, available, 0)).all()  # every test image of a class that is held is dealt
    wrong, needy = 0, 0
    for client in range(clients):
        shares = [
            Fraction(int(available[label]) * int(train[client, label]), int(held[label]))
            if held[label]
            else Fraction(0)
            for label in range(len(held))
        ]
        needy += all(share < 1 for share in shares)  # may have got nothing by rounding
        wrong += sum(abs(int(test[client, label]) - share) >= 1 for label, share in enumerate(shares))
    assert wrong <= 2 * needy  # an image moved changes the giver and the taker
    without = [client for client in range(clients) if not len(split.test[client])]
    if without:
        assert any("have no test images" in note for note in split.notes)
        # Nobody who could give has a second image of a class that such a client holds.
        rich = test.sum(1) > 1
        assert not any(test[rich][:, train[client] > 0].any() for client in without)
    assert ((test == 0) | (train > 0)).all()  # nobody is tested on a class it never saw


@settings(max_examples=60, deadline=None)
@given(data(), PARTITION, st.integers(1, 10), st.floats(0.05, 0.9))
def test_holdout_is_a_share_of_every_class(images, partition, clients, share):
    partition = replace(partition, test="holdout", holdout=share)
    try:
        split = partition.split(images, clients, 0)
    except BadInput:
        return
    train, test = counts(images, split.train), counts(images, split.test)
    for kept, held in zip(train, test, strict=True):
        total = int((kept + held).sum())
        assert held.sum() == min(max(round(share * total), 1), total - 1)
        exact = (kept + held) * held.sum() / total
        assert (np.abs(held - exact) < 1).all()


@settings(max_examples=60, deadline=None)
@given(data(), ALPHAS, st.integers(1, 12), st.integers(0, 3), st.sampled_from(["class", "balanced"]))
def test_min_size_holds_and_topping_up_is_said(images, alpha, clients, least, dialect):
    for partition in (Dirichlet(alpha, least, dialect), Quantity(alpha, least)):
        if not feasible(partition, images, clients):
            continue
        split = partition.split(images, clients, 1)
        assert min(map(len, split.train)) >= max(least, 1)


@pytest.mark.parametrize(
    ("dialect", "clients", "alpha"),
    [
        *((dialect, 2000, 0.001) for dialect in ("class", "balanced", "client", "equal")),
        *(("class", 1, 0.5), ("balanced", 1000, 0.01), ("client", 2000, 100.0)),
    ],
)
def test_done_in_seconds_whatever_is_asked(dialect, clients, alpha):
    images = balanced(classes=100, train=500, test=100)
    start = time.process_time()  # of the processor: other programs do not count
    split = Dirichlet(alpha, 10, dialect).split(images, clients, 0)
    assert time.process_time() - start < 5
    sizes = np.array([len(shard) for shard in split.train])
    assert sizes.min() >= 10 and sizes.sum() == 50_000
    if dialect in ("client", "equal"):
        assert sizes.max() - sizes.min() <= 1
    elif alpha < 0.1:
        assert any("were moved to them from the largest clients" in note for note in split.notes)


def test_two_thousand_clients_on_few_test_images_leave_some_without_and_say_so():
    images = balanced(classes=10, train=400, test=100)
    split = Dirichlet(0.1, 1).split(images, 2000, 0)
    without = sum(not len(shard) for shard in split.test)
    assert without == 1000 and "1000 of 2000 clients have no test images: there are too few for all" in split.notes


@pytest.mark.parametrize(
    ("partition", "clients", "words"),
    [
        (Iid(), 1001, "clients is 1001, but made_up has only 1000 training images"),
        (Iid(), 0, "needs at least one"),
        (Iid(test="holdout", holdout=1.0), 5, "partition.holdout is 1.0"),
        (Dirichlet(0.1, 10), 101, "partition.min_size 10 for 101 clients needs 1010 training images"),
        (Quantity(0.1, 11), 100, "needs 1100 training images"),
        (Shards(11), 5, "partition.classes is 11, but made_up has only 10 classes"),
        (Shards(11, distinct=True), 5, "partition.classes is 11, but made_up has only 10 classes"),
        (Dirichlet(dialect="client", min_size=0), 10**6, "clients is 1000000, but made_up has"),
        (Dirichlet(dialect="equal", min_size=0), 10**6, "clients is 1000000, but made_up has"),
        (Shards(10), 500, "need 500 shards of every class, but class '0' of made_up has 100"),
        (ByUser(), 5, "does not say who made an example"),
        (Domains(), 5, "has no domains"),
        (File("nowhere.json"), 5, "partition.path is 'nowhere.json'"),
        (File("nowhere.json", test="holdout"), 5, "partition=file brings its own test shards"),
    ],
)
def test_what_cannot_be_is_named_before_any_work(partition, clients, words):
    with pytest.raises(BadInput) as problem:
        partition.split(balanced(), clients, 0)
    assert words in str(problem.value)


# ---- shards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clients", "classes"), [(20, 2), (20, 4), (50, 3), (10, 10)])
def test_shards_deal_everything_when_it_divides(clients, classes):
    images = balanced()
    split = Shards(classes).split(images, clients, 0)
    held = counts(images, split.train)
    assert held.sum() == 1000 and not split.notes
    assert ((held > 0).sum(1) <= classes).all()
    shard = 100 * 10 / (clients * classes)
    assert (np.abs(held - np.round(held / shard) * shard) < classes).all()  # whole shards, to one example each


def test_shards_that_are_left_over_are_counted():
    """62 classes, 50 clients of 3: 3 shards a class, 36 of 186 left over."""
    images = balanced(classes=62, train=30, test=6)
    split = Shards(3).split(images, 50, 0)
    assert split.notes == ("36 of 186 shards are left over: 360 training examples are unused",)
    assert sum(map(len, split.train)) == 62 * 30 - 360


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 40), st.integers(0, 3), st.data())
def test_distinct_classes_are_dealt_whatever_the_numbers(classes, clients, seed, data):
    size = data.draw(st.integers(1, classes))
    images = balanced(classes=classes, train=clients + 5, test=2)
    split = Shards(size, distinct=True).split(images, clients, seed)
    held = counts(images, split.train)
    assert ((held > 0).sum(1) == size).all()
    shards = -(-clients * size // classes)
    assert ((held > 0).sum(0) <= shards).all() and (held[held > 0] >= (clients + 5) // shards).all()
    if clients * size % classes == 0:
        assert held.sum() == classes * (clients + 5) and not any("left over" in note for note in split.notes)


@pytest.mark.parametrize(("clients", "classes"), [(20, 2), (20, 4), (100, 3)])
def test_as_dealt_before_some_clients_have_fewer_classes(clients, classes):
    images = balanced(train=300)
    dealt = {
        d: (counts(images, Shards(classes, distinct=d).split(images, clients, 0).train) > 0) for d in (False, True)
    }
    assert (dealt[False].sum(1) < classes).any() and (dealt[True].sum(1) == classes).all()
    assert len({tuple(row) for row in dealt[True].tolist()}) > clients // 4  # not the same few hands again and again


# ---- by user --------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(data(users=True), st.sampled_from(["sample", "merge"]), st.integers(0, 3))
def test_clients_are_users(images, more, seed):
    users, train = images.users.numpy(), images.train.numpy()
    there = np.unique(users[train])
    split = ByUser(more=more).split(images, len(there), seed)
    if more == "sample":
        for user, shard, test in zip(there, split.train, split.test, strict=True):
            own = images.test.numpy()[users[images.test.numpy()] == user]
            if len(own):
                assert (shard == train[users[train] == user]).all() and (np.sort(own) == test).all()
            else:
                assert set(shard) | set(test) == set(train[users[train] == user])
    fewer = max(1, len(there) // 2)
    split = ByUser(more=more).split(images, fewer, seed)
    owners = [set(users[np.concatenate(pair)].tolist()) for pair in zip(split.train, split.test, strict=True)]
    assert sum(map(len, owners)) == len(set.union(*owners))  # nobody's examples are at two clients
    if more == "merge":
        assert set.union(*owners) == set(there.tolist())
        for owner, test in zip(owners, split.test, strict=True):
            own = images.test.numpy()[np.isin(users[images.test.numpy()], list(owner))]
            assert not len(own) or set(own.tolist()) == set(test.tolist())  # all that is theirs
    elif fewer < len(there):
        assert all(len(owner) == 1 for owner in owners) and unused_by_notes(split) > 0


def test_small_users_are_left_out_and_too_many_clients_refused():
    images = labelled(np.tile([0, 1], 20), [0, 1], users=[0] * 30 + [1] * 8 + [2] * 2 + [0, 1])
    assert len(ByUser(min_size=5).split(images, 2, 0).train) == 2
    with pytest.raises(BadInput, match="has 2 users with at least 5 training examples"):
        ByUser(min_size=5).split(images, 3, 0)


# ---- domains --------------------------------------------------------------------------------------------------------


def test_each_domain_is_dealt_on_its_own():
    y = np.tile(np.repeat(np.arange(5), 40), 2)
    images = labelled(y, y[:100], domains=np.repeat([0, 1, 0], [200, 200, 100]))
    split = Domains(Shards(2)).split(images, 10, 0)
    domains = images.domains.numpy()
    for client in range(10):
        assert set(domains[split.train[client]].tolist()) == {int(client >= 5)}
    # The second half has no test images of its own domain.
    assert all(len(shard) for shard in split.test[:5]) and not any(len(shard) for shard in split.test[5:])
    assert any(note.startswith("domain 1: 5 of 5 clients have no test images") for note in split.notes)
    alone = replace(images, train=images.train[images.domains[images.train] == 1])
    assert set(np.concatenate(split.train[5:]).tolist()) <= set(alone.train.tolist())
    split_holdout = Domains(Shards(2), test="holdout", holdout=0.25).split(images, 10, 0)
    assert [len(shard) for shard in split_holdout.test] == [10] * 10
    with pytest.raises(BadInput, match=r"partition\.base\.classes is 9, but domain 0 of .* has only"):
        Domains(base=Shards(classes=9)).split(images, 10, 0)
    with pytest.raises(BadInput, match="has 2 domains; each needs a client"):
        Domains().split(images, 1, 0)


# ---- files ----------------------------------------------------------------------------------------------------------


def test_a_saved_split_is_the_same_split(tmp_path):
    images = balanced()
    split = Dirichlet(0.1, 1).split(images, 30, 3)
    split.save(tmp_path / "split.json", images)
    again = File(str(tmp_path / "split.json")).split(images, 30, 99)
    assert again.hash == split.hash and again.notes == split.notes
    assert [shard.tolist() for shard in again.test] == [shard.tolist() for shard in split.test]
    assert list(tmp_path.iterdir()) == [tmp_path / "split.json"]


def test_the_hash_tells_apart_what_differs():
    one, two = np.array([1, 2]), np.array([3])
    splits = [
        Split([one, two], [two, one]),
        Split([one], [two, one]),
        Split([two, one], [two, one]),
        Split([np.array([1]), np.array([2, 3])], [two, one]),
        Split([one, two], [one, two]),
    ]
    assert len({split.hash for split in splits}) == len(splits)
    assert Split([one, two], [two, one], ("a note",)).hash == splits[0].hash


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": [[0, 1], [2]]}, "was changed after it was saved"),
        ({"train": "../../etc/passwd"}, "must hold lists of indices"),
        ({"train": [["../../etc/passwd"]]}, "must hold lists of indices"),
        ({"train": [[0.5]]}, "must hold lists of indices"),
        ({"train": [[True]]}, "must hold lists of indices"),
        ({"train": [[10**30]]}, "must hold lists of indices"),
        ({"version": 99}, "is not a split file of this version"),
        ({"notes": 3}, "has 3 as notes, which should be a list of sentences"),
        ({"checksum": "other"}, "was made for other data (made_up) than made_up"),
    ],
)
def test_a_changed_split_file_is_refused(tmp_path, changes, words):
    images = balanced()
    Iid().split(images, 4, 0).save(tmp_path / "split.json", images)
    edit(tmp_path / "split.json", **changes)
    with pytest.raises(BadInput) as problem:
        Split.load(tmp_path / "split.json", images)
    assert words in str(problem.value)


@pytest.mark.parametrize(
    ("train", "test", "words"),
    [
        ([[0, 1], [1, 2]], [[3], [4]], "gives one example to two owners"),
        ([[0, 1], [2]], [[3], [1]], "gives one example to two owners"),
        ([[0, -1], [2]], [[3], [4]], "names example -1"),
        ([[0, 1200], [2]], [[3], [4]], "names example 1200, but the data has only 0 to 1199"),
        ([[0], []], [[3], [4]], "leaves client 1 without training examples"),
        ([[0], [1]], [[3]], "2 training shards but 1 test shards"),
        ([], [], "has no clients"),
    ],
)
def test_a_split_file_that_does_not_fit_the_data_is_refused(tmp_path, train, test, words):
    arrays = [[np.array(shard, np.int64) for shard in shards] for shards in (train, test)]
    Split(*arrays).save(tmp_path / "split.json")
    with pytest.raises(BadInput) as problem:
        Split.load(tmp_path / "split.json", balanced())
    assert words in str(problem.value)


def test_not_json_and_wrong_number_of_clients(tmp_path):
    (tmp_path / "no.json").write_text("{")
    with pytest.raises(BadInput, match="is not JSON"):
        Split.load(tmp_path / "no.json")
    images = balanced()
    Iid().split(images, 4, 0).save(tmp_path / "split.json", images)
    with pytest.raises(BadInput, match=r"clients is 5, but the split file .* has 4: set clients=4"):
        File(str(tmp_path / "split.json")).split(images, 5, 0)


# ---- federation and skew --------------------------------------------------------------------------------------------


def test_federation_holds_the_split_and_the_pooled_test_part():
    images = balanced()
    federation, split = federate(images, Dirichlet(0.3), 7, 0)
    for client in range(7):
        assert (federation.train[client].numpy() == split.train[client]).all()
        assert (federation.test[client].numpy() == split.test[client]).all()
    assert torch.equal(federation.pool, images.test) and federation.data.x is images.x


def test_the_pool_is_never_trained_on():
    images = balanced()
    federation, split = federate(images, Dirichlet(0.3, test="pooled"), 7, 0)
    assert not set(federation.pool.tolist()) & set(np.concatenate(split.train).tolist())
    assert set(federation.pool.tolist()) == set(np.concatenate(split.test).tolist())
    assert len(federation.pool) + sum(map(len, split.train)) == len(images)


def test_skew_against_textbook_loops():
    images = balanced(classes=4, train=50)
    split = Dirichlet(0.4, 1).split(images, 6, 2)
    measured, y = skew(split, images), images.y.tolist()
    entropies, distances, sizes = [], [], []
    for shard in split.train:
        labels = [y[index] for index in shard]
        shares = [labels.count(label) / len(labels) for label in range(4)]
        entropies.append(-sum(share * np.log2(share) for share in shares if share))
        distances.append(sum(abs(share - 0.25) for share in shares))
        sizes.append(len(labels))
    pairs = sum(abs(one - two) for one in sizes for two in sizes)
    assert measured.label_entropy == pytest.approx(np.mean(entropies), abs=1e-12)
    assert measured.distance == pytest.approx(np.mean(distances), abs=1e-12)
    assert measured.size_gini == pytest.approx(pairs / (2 * 36 * np.mean(sizes)), abs=1e-12)
    assert (measured.smallest, measured.largest) == (min(sizes), max(sizes))


def test_every_partition_is_registered_under_its_own_name():
    assert all(kind.name == name for name, kind in PARTITIONS.items())
