"""A run folder of the version before run folders had a format number: 2 rounds of scaffold, with flat settings."""

import shutil
from pathlib import Path

import pytest

import fedlens
from fedlens import config
from fedlens.core.errors import BadInput
from fedlens.core.evaluate import total
from fedlens.core.memories import Memories
from fedlens.core.run import run
from fedlens.core.wire import decode
from fedlens.engines.sequential import Sequential
from fedlens.experiment import build
from fedlens.runs.folder import FORMAT, RunFolder
from fedlens.ui.follow import Followed
from small import same

OLD = Path(__file__).parent / "run-format1"


@pytest.fixture
def old(tmp_path):
    return Path(shutil.copytree(OLD, tmp_path / "format1"))


def test_settings_are_read_under_their_names_of_today(old):
    experiment = config.read(old / "config.yaml")
    where = experiment.execution
    assert (where.device, where.out, experiment.policy.min_replies) == ("cpu", "format1", 2)
    assert "format" not in RunFolder(old).passport()


def test_it_is_shown_and_explained(old, nursery):
    for words in (["report"], ["explain", "--images", "2", "--methods", "gradient"], ["diff", str(OLD)]):
        ended = nursery(words[0], str(old), *words[1:], cwd=old.parent)
        assert ended.code == 0, ended.err
    seen = Followed(old, "format1")
    seen.refresh()
    assert seen.row["state"] == "done"


def gap(one, other) -> float:
    """The largest difference between two trees of the same names and shapes."""
    theirs = dict(other.paths())
    assert {path: (leaf.shape, leaf.dtype) for path, leaf in one.paths()} == {
        path: (leaf.shape, leaf.dtype) for path, leaf in theirs.items()
    }
    return max(float((leaf - theirs[path]).abs().max()) for path, leaf in one.paths())


def test_from_its_state_on_it_goes_on_to_the_bits_of_today(old, tmp_path):
    """The stored state and memories, through the core of today: no machine but this one takes part."""
    result, experiment = fedlens.resume(old, ["rounds=3"]), config.read(old / "config.yaml")
    net, data = build(experiment)
    memories = Memories(Path(shutil.copytree(OLD / "clients", tmp_path / "clients")), round=2)
    state = decode((OLD / "checkpoints" / "000002.safetensors").read_bytes()).state
    engine = Sequential(net, data, memories=memories)
    plan = experiment.plan
    state = run(experiment.algorithm, net, engine, plan, seed=experiment.seed, state=state, round=2).state
    folder = RunFolder(old)
    assert result.rounds == 3 and same(folder.load()[0].state, state)
    kept = folder.client_memories(3)
    assert list(kept) == list(engine.memories) and all(same(kept[i], engine.memories.get(i)) for i in kept)
    score = total(engine.measure(state.model))
    examples = int(score.examples)
    assert (result.accuracy, result.loss) == (int(score.correct) / examples, float(score.loss) / examples)


def test_its_rounds_are_those_of_a_new_run(old, tmp_path):
    """Another machine computed the first ones, and its kernels may round otherwise; ten times that is a fault."""
    result, experiment = fedlens.resume(old, ["rounds=3"]), config.read(old / "config.yaml")
    new = fedlens.run(experiment.with_execution(out=str(tmp_path / "new")))
    theirs, ours = RunFolder(old), RunFolder(tmp_path / "new")
    assert ours.passport()["format"] == FORMAT
    assert gap(theirs.load()[0].state, ours.load()[0].state) < 1e-6
    kept, fresh = theirs.client_memories(3), ours.client_memories(3)
    assert list(kept) == list(fresh) and all(gap(kept[i], fresh[i]) < 1e-6 for i in kept)
    assert result.loss == pytest.approx(new.loss, abs=1e-6)
    assert theirs.bytes() == ours.bytes()
    assert theirs.metrics().drop_columns("value") == ours.metrics().drop_columns("value")


def test_a_run_of_a_later_version_is_refused_by_its_number(old):
    folder = RunFolder(old)
    folder.write_json("passport.json", {**folder.passport(), "format": FORMAT + 1})
    with pytest.raises(BadInput, match=f"has format {FORMAT + 1}"):
        fedlens.resume(old, ["rounds=3"])
