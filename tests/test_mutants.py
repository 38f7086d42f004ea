"""Code that many share, with one mistake each: what tests ask of it must notice.

A mutant is a change of one line of a function, in place, for everyone who calls it.
"""

from __future__ import annotations

import inspect
import tempfile
import textwrap
from functools import cache
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from fedlens import config
from fedlens.algorithms import FedProx, FedSLS, FineTuned, Scaffold
from fedlens.core import replies, run
from fedlens.core.algorithm import chain
from fedlens.core.dry_run import blank_clients, dry_run
from fedlens.core.policy import RoundPolicy
from fedlens.core.tree import Tree
from fedlens.engines.sequential import Sequential
from fedlens.runs import grid, read, rounds
from fedlens.runs.diff import differences
from fedlens.runs.folder import config_hash
from fedlens.simulate import recorder
from fedlens.simulate import run as simulate
from fedlens.simulate.resume import resume
from recipes import CASES
from small import federation, network, same
from test_reductions import gap
from textbook import TOLERANCE, TWO_OF_THREE, World, fedprox
from traces import trace

FEW = ["algorithm=scaffold", "clients=4", "cohort=2", "model=mlp", "model.hidden=8", "local.steps=1", "picture=false"]
FEW += ["engine=sequential", "evaluate.every=2", "evaluate.personal_every=2"]


# ---- what is asked: each of these passes, and fails with its mutants ----
def a_run_is_the_same_again(name="fedavg"):
    assert same(trace(name).again(Sequential(network(), federation())).state, trace(name).state)


def server_randomness_is_the_rounds():
    a_run_is_the_same_again("fedgen")


def memories_of_another_run_do_not_count():
    engine = Sequential(network(), federation())
    for name in ("scaffold", "scaffold, slow server"):
        assert same(trace(name).again(engine).state, trace(name).state)


class Twice(Sequential):
    """Its clients send everything twice."""

    def run(self, job, cohort):
        return [reply for reply in super().run(job, cohort) for _ in range(2)]


def who_answers_twice_counts_once():
    refused = []
    server = trace("fedavg").again(
        Twice(network(), federation()),
        observe=lambda server, job, answers: refused.append([why for _, why in answers.refused]),
    )
    assert refused == [["it has answered already"] * 3] * 3 and same(server.state, trace("fedavg").state)


class Hesitant(Sequential):
    """The first client of a cohort answers when it is asked again."""

    def run(self, job, cohort):
        return super().run(job, cohort if job.attempt else sorted(cohort)[1:])


def who_answers_late_is_added_in_its_place():
    policy = RoundPolicy(min_replies=3, retries=1)
    found = trace("fedavg").again(Hesitant(network(), federation()), policy=policy)
    assert same(found.state, trace("fedavg").state)


def no_claim_is_above_its_share():
    assert replies.capped([1.0, 1.0, 8.0], 0.5) == pytest.approx([1, 1, 2])


def a_chain_reaches_the_innermost():
    found = [type(one) for one in chain(FineTuned(FedSLS(Scaffold())))]
    assert found == [FineTuned, FedSLS, Scaffold]


def a_pull_is_added_to_the_gradient():
    world = World(TWO_OF_THREE)
    assert gap(world.run(FedProx(mu=0.3)).values, fedprox(world, 0.3)) <= TOLERANCE


def what_has_no_pull_stays():
    one, two = torch.ones(1), torch.full((1,), 2.0)
    assert same(Tree(a=one, b=one).plus(Tree(a=one, c=one)), Tree(a=two, b=one))


def a_rehearsal_sends_what_the_run_sends():
    recipe, plan = CASES["fedxds, scaffold"]
    turns, done = run.timetable(recipe, plan), trace("fedxds, scaffold")
    engine = Sequential(network(), blank_clients(federation().data, 8, 3))
    rounds = [at for at, turn in enumerate(turns) if turn.at == 0]
    tried = list(dry_run(turns, network(), (1, 6, 6), engine))
    assert len(tried) == len(rounds) > 2
    for real, each in zip((done.jobs[at] for at in rounds), tried, strict=True):
        assert {path for path, _ in real.download.paths()} == {path for path, _ in each.job.download.paths()}
        assert bool(real.shared) == bool(each.job.shared)


def table(**columns):
    return pa.table(columns)


def a_warm_ups_model_is_thrown_away():
    words = ["algorithm=fedxds", "algorithm.warmup_rounds=3", "algorithm.warmup_epochs=1", "rounds=3"]
    rows = table(
        round=list(range(1, 8)), model=["global"] * 7, metric=["accuracy"] * 7, value=[0.1 * n for n in range(7)]
    )
    seen = read.evaluations(rows, "accuracy", rounds.Rounds.of(config.read(None, words).timetable()))
    assert {trained: round for trained, (round, _) in seen.items()} == {1: 5, 2: 6, 3: 7}


def the_worst_tenth_of_twenty_is_two():
    assert read.summary_statistics([0.05 * n for n in range(20)])["worst_decile"] == pytest.approx(0.025)


def evaluations_are_not_the_methods_bytes():
    sent = table(
        round=[1, 1, 2], kind=["upload", "evaluation download", "download"], payload=[5, 7, 3], header=[1, 1, 1]
    )
    assert read.bytes_per_round(sent) == {1: 6, 2: 4}


def fine_tuned_models_are_the_headline():
    assert read.measure_of({"global", "fine-tuned", "personal after"}) == "fine-tuned"


def the_hash_is_of_what_affects_results():
    def hashed(*words):
        return config_hash(config.read(None, words))

    assert hashed("precision=fp64") != hashed("precision=fp32") != hashed("precision=fp32", "rounds=3")
    assert hashed("engine=sequential", "workers=3", "keep=2", "out=x") == hashed("engine=lanes", "picture=false")


def another_part_has_its_own_settings():
    words = ("model=resnet18", "model.norm=group", "rounds=3", "model=cnn")
    assert sorted(grid.merged_words(words).values()) == ["model=cnn", "rounds=3"]


def cells_are_the_tables_but_for_what_is_asked():
    row, column = grid.Row(words=("algorithm=scaffold",)), grid.Column(words=("clients=6",))
    table = grid.Grid(name="t", about="", rows={"a": row}, columns={"b": column}, words=("rounds=9", "cohort=2"))
    (whole,), (other,) = table.cells(), table.cells(words=["rounds=3", "engine=sequential"])
    assert (whole.experiment.rounds, whole.changes, whole.home) == (9, (), "t/a-b")
    assert (other.experiment.rounds, other.changes, other.home) == (3, ("rounds=3",), "t/a-b~rounds=3")


@cache
def whole_run() -> Path:
    simulate.run(config.read(None, [*FEW, "rounds=4", f"out={(place := Path(tempfile.mkdtemp()) / 'whole')}"]))
    return place


def a_resumed_run_is_the_whole():
    place, whole = Path(tempfile.mkdtemp()) / "resumed", whole_run()
    simulate.run(config.read(None, [*FEW, "rounds=2", f"out={place}"]))
    resume(place, ["rounds=4"])
    assert not list(differences(whole, place))


# ---- mutants ---------------------------------------------------------------------------------------------------------
MUTANTS = {
    "the next round's job": (run.job_of, "server.round, turn.at", "server.round + 1, turn.at", a_run_is_the_same_again),
    "memories since ever": (run.job_of, "turn.since", "0", memories_of_another_run_do_not_count),
    "one key for all rounds": (
        run.open_round,
        '"server", server.round',
        '"server", 0',
        server_randomness_is_the_rounds,
    ),
    "the last reply counts": (replies.accepted, "waiting.discard(reply.client)", "pass", who_answers_twice_counts_once),
    "in order of arrival": (
        replies.ask,
        "answers.sort(key=lambda reply: reply.client)",
        "pass",
        who_answers_late_is_added_in_its_place,
    ),
    "lowered too far": (replies.capped, "(1 - share * lowered)", "1", no_claim_is_above_its_share),
    "the outermost alone": (chain, 'getattr(recipe, "base", None)', "None", a_chain_reaches_the_innermost),
    "pushed away": (
        Tree.plus,
        "self.within(other) + other",
        "self.within(other) - other",
        a_pull_is_added_to_the_gradient,
    ),
    "without the rest": (Tree.plus, "self | (", "(", what_has_no_pull_stays),
    "every stage its own state": (
        dry_run,
        "state=initial_state(stage, server)",
        "state=stage.algorithm.setup(server)",
        a_rehearsal_sends_what_the_run_sends,
    ),
    "the warm-up's last evaluation": (
        rounds.Rounds.counted,
        "if trained := self.trained(round):",
        "if (trained := self.trained(round)) >= 0:",
        a_warm_ups_model_is_thrown_away,
    ),
    "one client more": (
        read.summary_statistics,
        "len(values) // 10)",
        "len(values) // 10 + 1)",
        the_worst_tenth_of_twenty_is_two,
    ),
    "all bytes": (
        read.bytes_per_round,
        'startswith("evaluation")',
        'startswith("look")',
        evaluations_are_not_the_methods_bytes,
    ),
    "global first": (
        read.measure_of,
        '"fine-tuned", "global"',
        '"global", "fine-tuned"',
        fine_tuned_models_are_the_headline,
    ),
    "precision does not matter": (
        config.affects_results,
        "or name in Execution.AFFECTS_RESULTS",
        "",
        the_hash_is_of_what_affects_results,
    ),
    "everything matters": (
        config.affects_results,
        "name not in _types(Execution)",
        "True",
        the_hash_is_of_what_affects_results,
    ),
    "settings of another part": (
        grid.merged_words,
        'if not name.startswith(f"{key}.")',
        "",
        another_part_has_its_own_settings,
    ),
    "engines are other protocols": (
        grid.Grid._cell,
        "if config.affects_results(key)",
        "",
        cells_are_the_tables_but_for_what_is_asked,
    ),
    "another seed": (simulate.session, "seed=experiment.seed", "seed=experiment.seed + 1", a_resumed_run_is_the_whole),
    "evaluated a round early": (
        recorder.Evaluations.of_global,
        "_due(server.round, asked.every)",
        "_due(server.round + 1, asked.every)",
        a_resumed_run_is_the_whole,
    ),
    "evaluations are the method's": (
        recorder.Bytes.book_evaluation,
        ', purpose="evaluation"',
        "",
        a_resumed_run_is_the_whole,
    ),
}


def mutated(function, right: str, wrong: str):
    """The code of the function with the one place changed."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(right) == 1, f"{function.__qualname__} has not one {right!r}"
    found: dict = {}
    exec("from __future__ import annotations\n" + source.replace(right, wrong), {**function.__globals__}, found)
    return found[function.__name__].__code__


@pytest.mark.parametrize(("function", "right", "wrong", "asked"), MUTANTS.values(), ids=MUTANTS)
def test_mutants_are_noticed(function, right, wrong, asked, monkeypatch):
    asked()
    monkeypatch.setattr(function, "__code__", mutated(function, right, wrong))
    with pytest.raises(AssertionError):
        asked()
