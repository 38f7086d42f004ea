"""Where compile=auto is decided: stored with the run, the same for all seeds, off on a CPU."""

from dataclasses import replace
from pathlib import Path

import pytest

from fedlens import config
from fedlens.engines import compiling
from fedlens.experiment import Experiment
from fedlens.runs.folder import RunFolder, config_hash
from fedlens.simulate import run as simulate
from fedlens.simulate.settle import settled, settled_alike, steps_ahead, with_decision

TINY = ["data=mnist5k", "clients=4", "cohort=2", "model=cnn_small", "rounds=2", "device=cpu", "picture=false"]


def tiny(*words: str) -> Experiment:
    return config.read(None, [*TINY, *words])


@pytest.fixture
def as_on_a_gpu(monkeypatch, tmp_path):
    """Lanes on this CPU leave compile open, as on a GPU; steps take what `ruler` says."""
    usual, asked, ruler = Experiment.resolved, [], {False: 10.0, True: 5.0}

    def resolved(self):
        found = usual(self)
        return found.with_execution(engine="lanes", workers=1, compile=self.execution.compile)

    def measured(net, federation, plan, device, compiled):
        asked.append(compiled)
        return ruler[compiled], 3.0

    monkeypatch.setattr(Experiment, "resolved", resolved)
    monkeypatch.setattr(compiling, "measured", measured)
    monkeypatch.setattr(compiling, "_MOST", 1.0)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    return ruler, asked


def test_steps_ahead_are_those_of_all_stages():
    sizes = [10, 40]
    assert steps_ahead(tiny("rounds=3", "local.batch_size=10"), sizes) == 3 * 2 * 2.5
    assert steps_ahead(tiny("rounds=3", "local.steps=7"), sizes) == 3 * 2 * 7
    shared = tiny("algorithm=fedxds", "algorithm.warmup_rounds=1", "algorithm.warmup_epochs=2", "local.batch_size=10")
    assert steps_ahead(shared, sizes) == 4 * 5 + 2 * 2 * 2.5  # everyone twice; the exchange trains nobody


def test_off_on_a_cpu_and_in_the_hash_when_on(tmp_path):
    assert tiny("compile=auto").resolved().execution.compile is False
    assert tiny("compile=auto", "engine=lanes").resolved().execution.compile is False
    assert tiny("compile=true").resolved().execution.compile is True
    off, auto, on = (config_hash(tiny(word)) for word in ("compile=false", "rounds=2", "compile=true"))
    assert off == auto != on


def test_a_run_stores_what_was_decided_and_keeps_it(as_on_a_gpu, tmp_path, monkeypatch):
    ruler, asked = as_on_a_gpu
    ruler[True] = 20.0  # slower: compiled once, to see that
    heard = []

    class Ear(simulate.Nobody):
        def begin(self, experiment, folder, notes, round, rounds):
            heard.extend(notes)

    simulate.run(tiny("rounds=4", "local.steps=3", f"out={tmp_path / 'run'}"), watcher=Ear())
    assert asked == [False, True] and heard[0].startswith("compile is off: ")
    folder = RunFolder.open(tmp_path / "run")
    assert config.read(folder.config).execution.compile is False
    assert folder.passport()["compile"] is False


def test_what_was_decided_is_the_networks(as_on_a_gpu):
    experiment = tiny("local.steps=3", "rounds=9").resolved()
    images = experiment.data.load()
    net, (federation, _) = experiment.network(images), experiment.federation(images)
    assert net.compile is False
    found, said = settled(experiment, net, federation)
    assert net.compile is found.execution.compile is True and said[0].startswith("compile is on: ")
    assert settled(found, net, federation) == (found, [])


def test_all_seeds_of_a_comparison_have_one_answer(as_on_a_gpu, tmp_path):
    _, asked = as_on_a_gpu
    one = tiny("local.steps=3")
    runs = [replace(one, seed=seed).with_execution(out=str(tmp_path / str(seed))) for seed in range(3)]
    found = settled_alike(runs)
    assert found == dict.fromkeys((tmp_path / str(seed) for seed in range(3)), True)
    assert [with_decision(each, found).execution.compile for each in runs] == [True] * 3
    assert asked == [False, True]
    # One that has begun decides for those to come, whatever this machine would say now.
    RunFolder.create(runs[1].resolved().with_execution(compile=False))
    assert set(settled_alike(runs).values()) == {False}


def test_nothing_is_decided_on_a_cpu_or_where_it_was_said(tmp_path):
    assert settled_alike([tiny(f"out={tmp_path}"), tiny("compile=true", f"out={tmp_path}")]) == {}
    assert with_decision(tiny("out=a"), {Path("b"): True}) == tiny("out=a")
