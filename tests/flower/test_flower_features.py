"""Round policies, defences, privacy and reports of deployed runs: as in a simulation, or refused in a sentence."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from fedlens import config
from fedlens.core.errors import BadInput
from fedlens.core.policy import RoundPolicy
from fedlens.core.run import run as run_rounds
from fedlens.core.tree import Tree
from fedlens.engines.sequential import Sequential
from fedlens.privacy.statement import SEEDED
from fedlens.report.page import gather
from fedlens.runs.folder import RunFolder

if importlib.util.find_spec("flwr") is None:
    pytest.skip("flwr is not installed: pip install 'fedlens[flower]'", allow_module_level=True)

import test_flower as flower
from fedlens.flower import server_app
from fedlens.flower.messages import Leaf, Payload, to_records

AGGREGATOR = ("uplink=dp", "uplink.trust=aggregator", "weighting=uniform", "evaluate.personal=none")


# ---- what means something in a simulation alone ----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["faults.dropout=0.1"], "faults are injected into simulations"),
        (["attack=sign_flip"], "attack makes clients of a simulation hostile"),
        (["devices=phone"], "devices are for the clock of a simulation"),
        (["checkpoint=2"], "checkpoint is 2, but a deployed run keeps every round"),
        ([*AGGREGATOR], "and a node can be silent: set policy.min_replies=2"),
        (["defences=krum", "clients=4", "cohort=4"], "promises nothing for fewer than 3 replies"),
        (["defences=median", "algorithm=fedgen"], "defences: fedgen also uploads"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_refused_before_anything_is_asked(more, sentence, tmp_path):
    grid = flower.Grid(flower.nodes(tmp_path))
    with pytest.raises(BadInput, match=sentence):
        flower.deployed(tmp_path / "real", flower.words(tmp_path, "fedavg", *more), grid)
    assert not grid.tasks and not (tmp_path / "real").exists()


# ---- what works as in a simulation -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "more",
    [
        ["defences=median"],
        ["defences=krum", "cohort=3", "policy.min_replies=3"],
        ["policy.max_weight_share=0.4"],
        ["policy.oversample=0.5"],
    ],
    ids=lambda more: more[0],
)
def test_same_bits_as_sequential(more, tmp_path):
    settings = flower.words(tmp_path, "scaffold", *more)
    flower.simulated(tmp_path / "simulated", settings)
    flower.deployed(tmp_path / "real", settings, flower.Grid(flower.nodes(tmp_path)))
    assert flower.unlike(tmp_path / "simulated", tmp_path / "real", tmp_path) == []


def by_hand(settings: list[str], silent: set[tuple[int, int]], policy: RoundPolicy) -> Tree:
    """The round loop over the sequential engine, in which some (client, round, first attempt) do not answer."""
    experiment = config.read(None, settings)
    images = experiment.data.load()

    class Without(Sequential):
        def run(self, job, cohort):
            away = {client for client, round in silent if round == job.round and not job.attempt}
            return super().run(job, [client for client in cohort if client not in away])

    engine = Without(experiment.network(images), experiment.federation(images)[0])
    return run_rounds(experiment.algorithm, engine.net, engine, experiment.plan, policy=policy).state


def test_silent_nodes_are_asked_again_and_rest(tmp_path):
    settings = flower.words(tmp_path, "scaffold", "cohort=3", "evaluate.personal=none", "rounds=4")
    full = by_hand(settings, set(), RoundPolicy())
    again = [*settings, "policy.min_replies=3", "policy.retries=1"]
    grid = flower.Grid(flower.nodes(tmp_path), lost=[(1, 1)])
    result = flower.deployed(tmp_path / "again", again, grid)
    assert flower.same(flower.state(tmp_path / "again"), full) and not result.setbacks
    asked = [node - 100 for node, payload in grid.tasks if payload.notes["order"]["round"] == 1]
    assert sorted(asked) == [0, 1, 1, 2]  # those who had answered are not asked again

    void = [*settings, "policy.min_replies=3"]
    place = tmp_path / "place"
    place.mkdir()
    flower.digits(place / "data16.npz")
    result = flower.deployed(tmp_path / "void", void, flower.Grid(flower.nodes(place), lost=[(1, 1)]))
    assert result.setbacks == {"missing": 1, "void": 1}
    assert flower.same(flower.state(tmp_path / "void"), by_hand(settings, {(1, 1)}, RoundPolicy(min_replies=3)))

    resting = [*settings, "policy.max_failures=1", "policy.cooldown=1"]
    place = tmp_path / "other"
    place.mkdir()
    flower.digits(place / "data16.npz")
    grid = flower.Grid(flower.nodes(place), lost=[(1, 1)])
    flower.deployed(tmp_path / "rest", resting, grid)
    rounds = [payload.notes["order"]["round"] for node, payload in grid.tasks if node == 101]
    assert rounds == [0, 1, 3]


def test_a_giant_answer_is_not_built_and_costs_the_others_nothing(tmp_path):
    """Node 2 sends 2 MiB where 1 MiB is allowed: refused by its size, before a tensor is made of it."""

    class Giant(flower.Grid):
        def pull_messages(self, names):
            found = super().pull_messages(names)
            for reply in found:
                if reply.metadata.src_node_id == 102 and "tree/upload" in reply.content:
                    junk = {"delta/x": Leaf("uint8", (2 << 20,), bytes(2 << 20))}
                    reply.content = to_records(Payload({"client": 2}, {"upload": junk}))
            return found

    settings = flower.words(tmp_path, "scaffold", "cohort=3", "evaluate.personal=none", "model=cnn2")
    asked = [*settings, "policy.max_reply_mib=1"]
    result = flower.deployed(tmp_path / "real", asked, Giant(flower.nodes(tmp_path)))
    assert "a message is too large: it has" in (tmp_path / "real" / "log.txt").read_text()
    silent = {(2, round) for round in range(3)}
    assert flower.same(flower.state(tmp_path / "real"), by_hand(settings, silent, RoundPolicy()))
    assert sum(result.setbacks.values()) == 3


def test_a_round_with_a_deadline_waits_for_somebody_to_come(tmp_path):
    """Three rounds without any node would else pass in no time."""

    class Gone(flower.Grid):
        """After the first round there is nobody, the first five times that somebody looks."""

        looks = 0

        def get_node_ids(self):
            self.looks += len(self.tasks) == 3
            return [] if 0 < self.looks <= 5 else list(self.contexts)

    settings = flower.words(tmp_path, "scaffold", "cohort=3", "evaluate.personal=none")
    result = flower.deployed(tmp_path / "real", [*settings, "policy.deadline=20"], grid := Gone(flower.nodes(tmp_path)))
    assert not result.setbacks and len(grid.tasks) == 9
    assert flower.same(flower.state(tmp_path / "real"), by_hand(settings, set(), RoundPolicy()))


# ---- privacy ---------------------------------------------------------------------------------------------------------
def test_without_everyones_noise_a_round_does_not_count(tmp_path):
    settings = flower.words(tmp_path, "fedavg", *AGGREGATOR, "cohort=3", "policy.min_replies=3", "rounds=2")
    grid = flower.Grid(flower.nodes(tmp_path), lost=[(1, 1)])
    result = flower.deployed(tmp_path / "real", [*settings, "keep=1"], grid)
    run = RunFolder.open(tmp_path / "real")
    assert result.setbacks == {"missing": 1, "void": 1}
    assert flower.same(run.at(1).state, run.at(2).state)


@pytest.mark.parametrize("own", [(), (1,), (0, 1, 2)], ids=["none", "one", "all"])
def test_privacy_json_says_whose_noise_it_is(own, tmp_path):
    settings = flower.words(tmp_path, "fedavg", *flower.DP, "rounds=1", "cohort=3")
    data = {"is": "npz", "path": str(tmp_path / "data16.npz")}
    everyone = [{"node": str(flower.node_file(tmp_path, i, **({"data": data} if i in own else {})))} for i in range(3)]
    flower.simulated(tmp_path / "simulated", settings)
    flower.deployed(tmp_path / "real", settings, flower.Grid(everyone))
    said, before = (
        json.loads((tmp_path / name / "privacy.json").read_text())["statements"][0] for name in ("real", "simulated")
    )
    randomness = said.pop("randomness")
    assert before.pop("randomness") == SEEDED and said == before  # epsilon and all the rest are the simulator's
    assert (SEEDED in randomness) == (len(own) < 3)
    assert ("drawn by the nodes themselves" in randomness) == bool(own)
    assert ("of clients 1: " in randomness) == (own == (1,))
    same = flower.same(flower.state(tmp_path / "real"), flower.state(tmp_path / "simulated"))
    assert same == (not own)  # what it says is true


# ---- the report ------------------------------------------------------------------------------------------------------
def test_flowers_own_count_is_kept_with_the_run(tmp_path, monkeypatch):
    """After a crash ours was two of Flower's runs; others of the same SuperLink do not count."""
    counted = [
        {"run-id": str(run), "network-traffic": {"inbound-bytes": 10 * run, "outbound-bytes": 100 * run}}
        for run in (1, 2, 5)
    ]
    monkeypatch.setattr(server_app, "flower_runs", lambda environment: counted)
    settings = " ".join([*flower.words(tmp_path, "fedavg"), f"out={tmp_path / 'real'}"])
    asked = {"settings": settings, "wait": 1, "patience": 0.3}
    with pytest.raises(KeyboardInterrupt):
        server_app.federate(flower.Grid(flower.nodes(tmp_path), dies_at=3), asked, flower_run=2)  # pyright: ignore
    server_app.federate(flower.Grid(flower.nodes(tmp_path)), asked, flower_run=5)  # pyright: ignore
    assert gather([tmp_path / "real"])["runs"][0]["flower"]["moved"] == {"in": 70, "out": 700}

    monkeypatch.setattr(server_app, "flower_runs", lambda environment: [])  # the SuperLink says nothing
    asked["settings"] = settings.replace("/real", "/other")
    server_app.federate(flower.Grid(flower.nodes(tmp_path)), asked, flower_run=7)  # pyright: ignore
    assert gather([tmp_path / "other"])["runs"][0]["flower"]["moved"] is None
    assert "did not report how many bytes" in Path(tmp_path / "other" / "log.txt").read_text()


def test_one_node_with_data_of_its_own_is_enough_for_nobody_to_know_the_split(tmp_path):
    own = {"is": "npz", "path": str(flower.digits(tmp_path / "own.npz", seed=5))}
    everyone = [{"node": str(flower.node_file(tmp_path, i, **({"data": own} if i == 0 else {})))} for i in range(3)]
    flower.deployed(tmp_path / "real", flower.words(tmp_path, "fedavg", "rounds=1"), flower.Grid(everyone))
    card = RunFolder.open(tmp_path / "real").passport()
    assert card["nodes_own_data"] and card["split_hash"] is None
