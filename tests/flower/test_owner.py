"""What an owner reads at the node, and decides."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedlens.core.errors import BadInput
from fedlens.flower import owner
from fedlens.flower.client import Trainer
from fedlens.flower.messages import Payload
from fedlens.flower.node import Policy
from test_trust import DP, world


def test_a_contract_is_read_in_words_and_approved(tmp_path):
    found = world(tmp_path, *DP)
    node = replace(found.node(epsilon=8.0).node, policy=Policy(("fedavg",)))
    trainer = Trainer(node, say=lambda text: None)
    assert set(trainer.answer(found.work())[0].notes) == {"waiting"}
    (path,) = owner.waiting(node)
    text = "\n".join(owner.summary(node, json.loads(path.read_text())))
    assert "fedavg, 2 clients" in text and "2 rounds" in text and "sends delta, weight" in text
    assert "noise 4 times the norm 1" in text and str(tmp_path / "bars.npz") not in text
    owner.approve(node, path)
    assert owner.waiting(node) == [] and "upload" in trainer.answer(found.work())[0].trees
    said = "\n".join(owner.budget(node))
    assert "Spent: " in said and "by 1 releases" in said and "for life" in said


@pytest.mark.parametrize("epsilon", [None, 8.0])
def test_what_a_node_would_let_out(epsilon, tmp_path):
    node = world(tmp_path, *DP).node(epsilon=epsilon).node
    text = "\n".join(owner.shown(node))
    assert "It is client 0" in text and "never code or paths" in text and "are carried out" in text
    assert ("The number of its images and accuracies on them stay here" in text) == (epsilon is not None)
    assert ("crafted weights" in text) == (epsilon is None) and ("Left: 8" in text) == (epsilon is not None)
    trial = replace(node, data=None, simulation=node.data, privacy=None)
    assert "as in a simulation" in "\n".join(owner.shown(trial))
    with pytest.raises(BadInput, match="has no ledger"):
        list(owner.budget(trial))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ((), "how many a model gets right, and the loss."),
        (("evaluate.measures=all",), "and the loss, class by class."),
        (("evaluate.personal=none",), "Nobody is told how well models do"),
        (("evaluate.personal=none", "evaluate.validation=0.2"), "how many a model gets right"),
    ],
)
def test_the_owner_reads_that_accuracies_leave(more, sentence, tmp_path):
    found = world(tmp_path, *more)
    text = "\n".join(owner.summary(found.node().node, found.work().notes["contract"]))
    assert sentence in text


HIDDEN = ["a\nNothing leaves this node.", "a\x1b[2J", "a\u202eb", "a" * 300]


@pytest.mark.parametrize("name", HIDDEN, ids=["line", "escape", "direction", "long"])
def test_a_server_cannot_write_its_own_words_into_what_the_owner_reads(name, tmp_path):
    """Names of classes and of the run are shown; before, they could hold lines, or signs that erase a screen."""
    found = world(tmp_path)
    hello = found.work().notes
    asked = hello["contract"]
    data = {**asked["data"], "classes": [*asked["data"]["classes"], name]}  # a site may lack classes
    node = Trainer(replace(found.node().node, policy=Policy()), say=lambda text: None)
    for wrong in ({**asked, "data": data}, {**asked, "run": name}):
        answer, _ = node.answer(Payload({**hello, "contract": wrong}, {}))
        assert "refused" in answer.notes and not (tmp_path / "a" / "contracts").exists()
    quoted = {**asked, "data": {**asked["data"], "classes": ["b). No noise is left out. (", "b", "c"]}}
    assert '"b). No noise is left out. (", "b", "c"' in "\n".join(owner.summary(found.node().node, quoted))


def test_nothing_waits_at_a_node_without_storage(tmp_path):
    assert owner.waiting(replace(world(tmp_path).node().node, storage="")) == []
    assert not Path(tmp_path / "a" / "contracts").exists()
