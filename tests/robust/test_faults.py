"""Injected faults: drawn as asked for, the same on every engine and after a kill; and faults of clocks and disks."""

import errno
import math
import os
import random
import time
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from fedlens import config
from fedlens.algorithms import FedAvg, Scaffold
from fedlens.core.check import Check
from fedlens.core.cohort import Everyone
from fedlens.core.dry_run import Rehearsal
from fedlens.core.engine import Job, Reply
from fedlens.core.errors import BadInput
from fedlens.core.policy import RoundPolicy
from fedlens.core.run import run
from fedlens.core.tree import Tree
from fedlens.engines.lanes import Lanes
from fedlens.engines.sequential import Sequential
from fedlens.engines.workers import Workers
from fedlens.robust.faults import Faults, Faulty, corrupted
from fedlens.runs.diff import differences
from fedlens.runs.folder import RunFolder
from fedlens.simulate import recorder
from fedlens.simulate import run as simulate
from fedlens.simulate.resume import resume
from small import PLAN, SIZES, build, federation, network, same

ALL = Faults(dropout=0.2, straggler=0.2, duplicate=0.2, stale=0.1, corrupt=0.2, oversized=0.1)
POLICY = RoundPolicy(deadline=30, oversample=0.5, max_failures=2, cooldown=2, retries=1)
LONG = replace(PLAN, rounds=8)


def played(engine, faults=ALL, recipe=Scaffold(), plan=LONG):  # noqa: B008  all are constants
    net, data, seen = network(), federation(), []
    check = Check(Rehearsal(Sequential, net, data.data), 100)
    server = run(
        recipe,
        net,
        Faulty(engine, faults),
        plan,
        policy=POLICY,
        check=check,
        observe=lambda server, job, answers: seen.append(answers),
    )
    return server.state, [setback for answers in seen for setback in recorder.setbacks(0, answers)], seen


# ---- the schedule ----------------------------------------------------------------------------------------------------
def test_every_engine_sees_the_same_faults():
    state, setbacks, _ = played(Sequential(*build()))
    assert {row[5] for row in setbacks} >= {"missing", "late", "refused"}
    workers = Workers(partial(build), SIZES, 2)
    try:
        for engine in (workers, Lanes(*build(), lanes=2)):
            other, rows, _ = played(engine)
            assert same(state, other) and rows == setbacks
    finally:
        workers.close()


def test_shares_are_those_asked_for():
    """Over 4000 (round, client): within four deviations of a coin, each kind by itself."""
    kinds = {"dropout": 0.3, "straggler": 0.1, "corrupt": 0.05, "duplicate": 0.5, "stale": 1.0, "oversized": 0.0}
    faults, count = Faults(**kinds), Counter()
    both = 0
    for round in range(40):
        job = Job(PLAN, Tree(), Tree(), round, 0, 0, 7)
        for client in range(100):
            hit = {kind for kind in kinds if faults.befalls(kind, job, client)}
            count.update(hit)
            both += {"dropout", "straggler"} <= hit
    for kind, share in kinds.items():
        assert abs(count[kind] - 4000 * share) <= 4 * math.sqrt(4000 * share * (1 - share))
    assert abs(both - 4000 * 0.03) <= 4 * math.sqrt(4000 * 0.03 * 0.97)


def test_the_draw_depends_on_seed_round_attempt_and_client():
    faults = Faults(dropout=0.5)

    def drawn(**changes):
        job = replace(Job(PLAN, Tree(), Tree(), 0, 0, 0, 1), **changes)
        return [faults.befalls("dropout", job, client) for client in range(64)]

    assert drawn() == drawn()
    assert len({tuple(drawn(**change)) for change in ({}, {"seed": 2}, {"round": 1}, {"attempt": 1})}) == 4


def test_nothing_injected_is_nothing_changed():
    assert not Faults() and not Faults(delay=5.0) and Faults(stale=0.1)
    engine, plain = Sequential(*build()), Sequential(*build())
    state, setbacks, _ = played(engine, Faults(delay=9.0))
    net = network()
    assert setbacks == [] and same(state, run(Scaffold(), net, plain, LONG, policy=POLICY).state)


def test_who_remembers_what():
    """A dropout has not begun; a straggler, and one whose reply is damaged, have trained."""
    plan = replace(PLAN, rounds=1, cohort=Everyone())
    whole = Sequential(*build())
    run(Scaffold(), network(), whole, plan)
    for kind, trained in (("dropout", False), ("straggler", True), ("corrupt", True), ("stale", True)):
        engine = Sequential(*build())
        state, _, seen = played(engine, Faults(**{kind: 1.0}), plan=plan)
        assert not seen[0] and seen[0].void and not float(state.control["conv.weight"].abs().max())
        for client in range(6):
            memory = engine.memories.get(client)
            assert same(memory, whole.memories.get(client)) if trained else memory == {}


def test_each_kind_of_damage():
    """One draw of each: what is wrong differs, and only bits can pass for values."""
    net, data = network(), federation()
    jobs = []

    class Watch(Sequential):
        def run(self, job, cohort):
            jobs.append(job)
            return super().run(job, cohort)

    server = run(FedAvg(), net, engine := Watch(net, data), replace(PLAN, rounds=1))
    upload = engine.run(jobs[0], [0])[0].upload
    check, why = Check(Rehearsal(Sequential, net, data.data), 1), Counter()
    for seed in range(300):
        damaged = corrupted(upload, torch.Generator().manual_seed(seed))
        said = check.check_structure(server, jobs[0], damaged) or check.check_values(jobs[0], [damaged])[0][0]
        words = ("missing", "no tensor", "and should be float64", "and should be [", "not finite", "negative")
        why[next((word for word in words if word in said), said)] += 1
        assert said or (not same(damaged, upload) and all(leaf.isfinite().all() for leaf in damaged.leaves()))
    assert set(why) >= {"missing", "no tensor", "and should be float64", "and should be [", "not finite", ""}
    assert why[""] < 75  # bits are a sixth of all
    assert same(
        corrupted(upload, torch.Generator().manual_seed(3)), corrupted(upload, torch.Generator().manual_seed(3))
    )
    assert corrupted(Tree(), torch.Generator()) == {}
    sent = list(Faults(oversized=1.0, duplicate=1.0).sent(jobs[0], Reply(0, upload)))
    assert len(sent) == 2 and sent[0].upload.nbytes > upload.nbytes


# ---- whole runs ------------------------------------------------------------------------------------------------------
def data_file(folder):
    draw = np.random.default_rng(0)
    y = np.arange(150) % 3
    x = draw.integers(0, 120, (150, 8, 8), dtype=np.uint8)
    for image, label in zip(x, y, strict=True):
        image[:, 2 * label : 2 * label + 2] += 100
    np.savez(folder / "data.npz", x_train=x[:120], y_train=y[:120], x_test=x[120:], y_test=y[120:])
    return folder / "data.npz"


def words(folder, name, *more):
    usual = ["clients=8", "cohort=5", "rounds=8", "model=mlp", "local.batch_size=8", "algorithm=scaffold"]
    usual += [
        "partition=iid",
        f"data={data_file(folder)}",
        "picture=false",
        "engine=sequential",
        f"out={folder / name}",
    ]
    return [*usual, *more]


FAULTS = ["faults.dropout=0.3", "faults.straggler=0.2", "faults.corrupt=0.2", "faults.duplicate=0.1"]
RULES = [
    "policy.deadline=30",
    "policy.oversample=0.4",
    "policy.max_failures=2",
    "policy.cooldown=2",
    "policy.min_replies=2",
]


def test_a_run_counts_what_went_wrong_and_goes_on_after_a_kill(tmp_path):
    def told(name, *more):
        notes = []

        class Watch(recorder.Nobody):
            def note(self, text):
                notes.append(text)

        return simulate.run(config.read(None, words(tmp_path, name, *FAULTS, *RULES, *more)), watcher=Watch()), notes

    whole, notes = told("whole")
    rows = RunFolder.open(tmp_path / "whole").metrics().to_pylist()
    assert whole.setbacks == Counter(row["metric"] for row in rows if row["metric"] in whole.setbacks)
    assert {"missing", "late", "refused"} <= whole.setbacks.keys()
    assert RunFolder.open(tmp_path / "whole").result()["setbacks"] == whole.setbacks
    named = {(row["round"], row["client"]) for row in rows if row["metric"] == "refused"}
    assert all(any(f"round {r} goes on without " in n and f"client {c}: " in n for n in notes) for r, c in named)
    assert all(note in (tmp_path / "whole" / "log.txt").read_text() for note in notes)
    # Stopped after four rounds, and taken up by another process's worth of objects.
    told("half", "rounds=4")
    resume(tmp_path / "half", ["rounds=8"])
    state = [RunFolder.open(tmp_path / name).load()[0] for name in ("whole", "half")]
    assert same(state[0].state, state[1].state) and "standing" in state[0].state
    pairs = [RunFolder.open(tmp_path / name).metrics().to_pylist() for name in ("whole", "half")]
    kept = [[row for row in rows if row["metric"] in ("missing", "late", "refused", "void")] for rows in pairs]
    assert kept[0] == kept[1]


def test_faults_are_for_simulations(tmp_path):
    pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedlens[flower]'")
    from fedlens.flower.server_app import federate

    with pytest.raises(BadInput, match="faults are injected into simulations"):
        federate(None, {"settings": " ".join(words(tmp_path, "run", "faults.dropout=0.1"))})


# ---- clocks and disks ------------------------------------------------------------------------------------------------
def test_a_clock_that_jumps(tmp_path, monkeypatch):
    """The wall clock goes back by an hour at every look; durations do not use it."""
    jumps = iter(range(10**6))
    monkeypatch.setattr(time, "time", lambda: 1e9 - 3600.0 * next(jumps))
    result = simulate.run(config.read(None, words(tmp_path, "run", "rounds=3")))
    seconds = [r["value"] for r in RunFolder.open(tmp_path / "run").metrics().to_pylist() if r["metric"] == "seconds"]
    assert len(seconds) == 3 and all(0 <= each < 600 for each in seconds) and 0 <= result.seconds < 600


@pytest.mark.parametrize("fails_at", random.Random(1).sample(range(2, 50), 6))
@pytest.mark.parametrize("how", ["full", "torn"])
def test_a_write_that_fails(tmp_path, monkeypatch, fails_at, how):
    """The disk is full at the nth file, or the machine dies while it is half written: resumed to the same bits."""
    simulate.run(config.read(None, words(tmp_path, "whole", "rounds=5")))
    replace_file, count = os.replace, Counter()

    def fails(source, target):
        count["files"] += 1
        if count["files"] != fails_at:
            return replace_file(source, target)
        if how == "full":
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        with open(source, "rb") as whole, open(f"{source}.left", "wb") as half:
            half.write(whole.read()[:-3])  # what a dying machine leaves beside the file it was to become
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fails)
        with pytest.raises((OSError, KeyboardInterrupt)):
            simulate.run(config.read(None, words(tmp_path, "hurt", "rounds=5")))
    if not (tmp_path / "hurt" / "config.yaml").exists():
        pytest.skip("nothing had begun")
    resume(tmp_path / "hurt")
    assert list(differences(tmp_path / "whole", tmp_path / "hurt")) == []
