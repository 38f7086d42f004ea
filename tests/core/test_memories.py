import torch

from fedlens.core.memories import Memories, name, prune, versions
from fedlens.core.tree import Tree
from small import same


def memory(value: float) -> Tree:
    return Tree(control=torch.full((100,), value), seen=torch.tensor(int(value)))


def test_hot_memories_are_bounded_and_the_rest_is_on_disk(tmp_path):
    store = Memories(tmp_path, limit=3 * memory(0).nbytes)
    for client in range(50):
        store.put(client, memory(client), round=1)
    assert len(store._hot) == 3 and len(list(tmp_path.iterdir())) == 47
    assert all(same(store.get(client), memory(client)) for client in range(50))
    assert store._size <= store.limit and list(store) == list(range(50))


def test_any_checkpoint_that_is_kept_can_be_taken_up_again(tmp_path):
    store = Memories(tmp_path, limit=0)
    for round in range(6):
        for client in range(3):
            if (round + client) % 2:
                store.put(client, memory(10 * round + client), round)
        store.save()
        if round:
            prune(tmp_path, before=round, after=round + 1)  # checkpoints of `round` and `round + 1` rounds are kept
        for taken in {max(round, 1), round + 1}:
            again = Memories(tmp_path, round=taken)
            for client in range(3):
                last = max((r for r in range(taken) if (r + client) % 2), default=None)
                expected = Tree() if last is None else memory(10 * last + client)
                assert same(again.get(client), expected), (round, taken, client)
    assert len(versions(tmp_path)) <= 6


def test_what_was_written_after_the_checkpoint_is_dropped(tmp_path):
    store = Memories(tmp_path, limit=0)
    for round in range(4):
        store.put(7, memory(round), round)
        store.save()
    prune(tmp_path, before=0, after=2)
    assert versions(tmp_path) == [(7, 0), (7, 1)] or sorted(versions(tmp_path)) == [(7, 0), (7, 1)]
    assert same(Memories(tmp_path, round=2).get(7), memory(1))
    assert Memories(tmp_path).get(7) == Tree()  # a new run begins without memories


def test_without_a_folder_everything_stays_in_memory():
    store = Memories(limit=0)
    for client in range(5):
        store.put(client, memory(client), 0)
    store.save()
    assert same(store.get(3), memory(3))


def test_save_says_which_files_are_new_and_a_version_that_no_checkpoint_has_goes(tmp_path):
    store = Memories(tmp_path, limit=0)
    for client, round in ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2)):
        store.put(client, memory(round), round)
    written = store.save()
    assert written.keys() == {(0, 2), (1, 1)} == {*versions(tmp_path)}
    assert all((tmp_path / name(*version)).stat().st_size == length for version, (length, _) in written.items())
    assert store.save() == {}
    store.put(0, memory(3), 3)
    assert store.save().keys() == {(0, 3)} and (0, 2) in versions(tmp_path)  # a checkpoint may need it


def test_a_client_that_is_asked_twice_in_a_round_is_written_as_it_is_last(tmp_path):
    store = Memories(tmp_path, limit=0)
    for value in (1, 2):
        store.put(0, memory(value), 0)
        store.put(1, memory(value), 0)  # client 0 leaves RAM
    store.save()
    assert same(Memories(tmp_path, versions={0: 0}).get(0), memory(2))


def test_what_is_taken_up_is_what_the_checkpoint_lists(tmp_path):
    store = Memories(tmp_path)
    for round in (0, 1):
        store.put(0, memory(round), round)
        store.save()
    assert same(Memories(tmp_path, versions={0: 0}).get(0), memory(0))
    (tmp_path / "abcdef-ghijkl.safetensors").touch()
    assert {*versions(tmp_path)} == {(0, 0), (0, 1)}
