"""Checkpoints that stay, and pictures of several rounds and clients: the same models as a run that stopped there."""

import os
import shutil

import pytest
import torch

import fedlens
from fedlens import config
from fedlens.core.errors import BadInput
from fedlens.core.memories import Memories, name, prune, versions
from fedlens.core.tree import Tree
from fedlens.experiment import Experiment
from fedlens.explain.run import explain_run
from fedlens.runs.folder import RunFolder
from fedlens.runs.opened import OpenedRun
from fedlens.simulate.resume import resume
from small import same

WORDS = (
    *("clients=4", "cohort=3", "model=cnn2", "algorithm=ditto", "local.steps=1", "local.batch_size=8"),
    *("evaluate.every=0", "evaluate.personal=none", "engine=sequential", "picture=false"),
)


def settings(out, *words) -> Experiment:
    return config.read(None, [*WORDS, *words]).with_execution(out=str(out))


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    out = tmp_path_factory.mktemp("kept") / "run"
    fedlens.run(settings(out, "rounds=7", "keep=2"))
    return out


def shown(path, **which):
    return OpenedRun.open(path).models(**which)


def test_every_second_round_stays_and_two_more(kept):
    assert RunFolder(kept).rounds() == [2, 4, 6, 7]


def test_kept_rounds_are_those_of_runs_that_ended_there(kept, tmp_path):
    """Global models and clients' own, which need memories of that round."""
    everyone = range(4)
    for stop in (2, 4):
        fedlens.run(settings(tmp_path / str(stop), f"rounds={stop}"))
        ended = shown(tmp_path / str(stop), clients=everyone)
        found = shown(kept, clients=everyone, rounds=[stop])
        assert list(found) == [f"client {client}, round {stop}" for client in everyone]
        assert all(same(a, b) for a, b in zip(found.values(), ended.values(), strict=True))
        assert same(shown(kept, rounds=[stop])[f"round {stop}"], shown(tmp_path / str(stop))[""])
    first, last = shown(kept, rounds=[2, 7]).values()
    assert not same(first, last)


def test_a_run_can_go_on_from_a_kept_round(kept, tmp_path):
    """The last two checkpoints are lost; rounds 5 to 7 are made again, to the same bits."""
    again = tmp_path / "again"
    shutil.copytree(kept, again)
    for round in (6, 7):
        (again / "checkpoints" / f"{round:06d}.safetensors").write_bytes(b"damaged")
    (again / "result.json").unlink()
    resume(again)
    assert same(RunFolder(again).load()[0].state, RunFolder(kept).load()[0].state)


def test_without_keep_only_two_stay(tmp_path):
    fedlens.run(settings(tmp_path / "run", "rounds=4"))
    assert RunFolder(tmp_path / "run").rounds() == [3, 4]


def test_pictures_of_rounds_and_clients(kept, tmp_path):
    few = dict(count=2, methods=["gradient"])
    assert explain_run(kept, rounds=[2, 7], **few) == kept / "figures" / "explain-rounds.png"
    assert explain_run(kept, clients=[1], rounds=[2, 4], **few) == kept / "figures" / "explain-clients-rounds.png"
    sizes = [os.path.getsize(explain_run(kept, tmp_path / f"{n}.svg", rounds=[2, 4, 6, 7][:n], **few)) for n in (1, 4)]
    assert sizes[1] > 1.5 * sizes[0]


def test_rounds_that_are_not_there_are_refused(kept):
    with pytest.raises(BadInput, match=r"no checkpoint of round 3, only 2, 4, 6, 7; keep=N keeps every Nth"):
        explain_run(kept, rounds=[2, 3])
    with pytest.raises(BadInput, match="client 4 does not exist"):
        shown(kept, clients=[4], rounds=[2])


def test_memories_of_kept_rounds_against_a_loop(tmp_path):
    """Every version that some kept checkpoint reads stays, and no other."""
    writes = {0: (0, 1, 4, 7), 1: (2, 3), 2: (6,), 3: ()}
    for checkpoints in ([3, 8], [2, 5, 8], [8], [1, 2, 3, 8]):
        folder = tmp_path / "-".join(map(str, checkpoints))
        store = Memories(folder)
        for client, rounds in writes.items():
            for round in rounds:
                store.put(client, Tree(seen=torch.tensor(round)), round)
                store.save()
        *keep, before = checkpoints
        prune(folder, before=before, after=9, keep=keep)
        needed = {
            (client, max(round for round in rounds if round < checkpoint))
            for checkpoint in checkpoints
            for client, rounds in writes.items()
            if any(round < checkpoint for round in rounds)
        }
        assert set(versions(folder)) == needed
        assert all((folder / name(*version)).exists() for version in needed)


def test_weights_for_other_classes_are_asked_what_they_predict(tmp_path, monkeypatch):
    """Not about a last layer that nobody trained: of a file for 4 classes on digits, its own layer is explained."""
    from safetensors.torch import save_file

    from fedlens.explain import run as explain

    experiment = settings("unused")
    module = experiment.model.build(4, 1, 28)
    save_file(module.state_dict(), tmp_path / "four.safetensors")
    seen = []
    monkeypatch.setattr(explain, "explain", lambda net, weights, x, y, out, **how: seen.append((net, how["target"])))
    explain.explain_model(experiment, str(tmp_path / "four.safetensors"), tmp_path / "a.png", count=2)
    explain.explain_model(experiment, "", tmp_path / "a.png", count=2)
    (net, target), (_, usual) = seen
    assert target == "predicted" and usual == "true"
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in net.module.state_dict().items())


def test_columns_of_one_method_share_their_colours(tmp_path, monkeypatch):
    """A column without negative values beside one with some is drawn in the same colours; other methods are not."""
    from fedlens.attribution import figures as gallery

    how = {}
    paint = gallery.coloured
    monkeypatch.setattr(
        gallery, "coloured", lambda maps, signed: how.update({float(maps.sum()): signed}) or paint(maps, signed=signed)
    )
    both, one = torch.tensor([[[1.0, -1.0], [0.0, 3.0]]]), torch.tensor([[[1.0, 1.0], [0.0, 3.0]]])
    columns = {"round 1\nLRP": both, "round 2\nLRP": one, "round 1\ngrad-CAM": 2 * one}
    gallery.draw_grid(torch.zeros(1, 1, 2, 2), columns, tmp_path / "a.png")
    assert how == {3.0: True, 5.0: True, 10.0: False}
