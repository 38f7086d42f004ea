"""Recommendations: only from results that exist, for splits like theirs, and honest where there are none."""

import io
import json
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from fedlens import config
from fedlens.cli.main import app
from fedlens.compare.board import Board
from fedlens.compare.run import asked, compare
from fedlens.core.errors import BadInput
from fedlens.recommend.rank import NEAR, add, apart, described, known, read, recommend, results_of, told, typed

ROOT = Path(__file__).parents[2]
SKEWED = config.read(None, ["partition.alpha=0.1", "clients=20", "model=cnn_small"])


def result(mine, **other):
    whole = dict(source="results/x.md", data="mnist5k", clients=20, partition="p", model="m", rounds=5, seeds=3)
    return {
        **whole,
        "skew": mine,
        "global": {"fedavg": 0.7, "scaffold": 0.8, "fedprox": 0.795},
        "personal": {},
        **other,
    }


def test_every_number_of_the_evidence_is_in_the_file_it_names():
    for each in known():
        text = (ROOT / each["source"]).read_text()
        numbers = set(re.findall(r"\d+\.\d+", text))
        for accuracy in [*each["global"].values(), *each["personal"].values()]:
            rounded = {f"{100 * (accuracy + off):.2f}" for off in (-5e-5, 0, 5e-5)}  # the file rounds to four digits
            assert (rounded | {f"{accuracy:.3f}"}) & numbers, (each["source"], accuracy)
        assert f"{each['rounds']}" in text and (re.split("[_ ]", each["data"])[0] in text.lower())


def data_words(name):
    """`cifar10 (10,000 images)` is a sample of cifar10."""
    base, _, part = name.partition(" (")
    count = part.removesuffix(" images)").replace(",", "")
    return ["data=sample", f"data.base={base}", f"data.train={count}"] if part else [f"data={base}"]


@pytest.mark.skipif("FEDLENS_DATA" not in os.environ, reason="the skew of real data needs FEDLENS_DATA")
def test_the_skew_of_the_evidence_is_that_of_its_split():
    found = {}
    for each in known():
        within = each["partition"].removeprefix("domains, base (").removesuffix(")")
        partition, *settings = within.split(", ")
        path = "partition" if within == each["partition"] else "partition.base"
        words = [*data_words(each["data"]), f"{path}={partition}"]
        words += [f"{path}.{key}={value}" for key, value in map(str.split, settings)]
        words += ["partition=domains"] if path != "partition" else []
        words += [f"clients={each['clients']}"]
        if (split := " ".join(words)) not in found:
            found[split], _ = described(config.read(None, words))
        assert found[split] == pytest.approx(each["skew"], abs=1e-4)


def test_the_nearest_result_decides_and_close_methods_are_all_named():
    mine, _ = described(SKEWED)
    far = {**mine, "distance": mine["distance"] - 2 * 0.2}
    found = recommend(SKEWED, [result(far, source="far.md", **{"global": {"moon": 0.9}}), result(mine)], "global")
    assert [(a.method, a.verdict) for a in found.advice] == [
        ("scaffold", "try"),
        ("fedprox", "try"),
        ("fedavg", "behind"),
    ]
    assert found.advice[0].over_fedavg == pytest.approx(0.1) and {a.source for a in found.advice} == {"results/x.md"}
    said = "\n".join(found.notes)
    assert "results/x.md: mnist5k, 20 clients" in said and "Also near: far.md" in said
    assert "No evidence on such a split: " in said and "pse" in said and "no ranking" not in said


def test_clients_whose_images_differ_are_a_question_of_their_own():
    mine, _ = described(SKEWED)
    plain, other = result(mine), result(mine, source="looks.md", partition="domains, base (iid)")
    assert {a.source for a in recommend(SKEWED, [other, plain], "global").advice} == {plain["source"]}
    assert not recommend(SKEWED, [other], "global").advice
    words = (
        "data=modalities data.base=mnist5k data.views=gray,edge partition=domains partition.base.alpha=0.1 clients=20"
    )
    domains = config.read(
        None, words.replace("partition=domains", "partition=domains partition.base=dirichlet").split()
    )
    near = result(described(domains)[0], source="looks.md", partition="domains, base (iid)")
    assert {a.source for a in recommend(domains, [plain, near], "global").advice} == {"looks.md"}


def test_a_partition_within_another_is_told_in_brackets():
    for words, expected in (
        ("partition=domains partition.base=shards partition.base.classes=3", "domains, base (shards, classes 3)"),
        ("partition.alpha=0.3 partition.dialect=equal", "dirichlet, alpha 0.3, dialect equal"),
    ):
        assert told(config.read(None, words.split()).partition) == expected


def test_distances_between_splits():
    a = {"label_entropy": 1.0, "classes": 4.0, "size_gini": 0.1, "distance": 1.0}
    assert apart(a, a) == 0 and apart(a, {**a, "distance": 0.5}) == 0.25 and apart(a, {**a, "size_gini": 0.9}) == 0.8
    assert apart(a, {**a, "label_entropy": 0.0}) == 0.5 and apart(a, {**a, "label_entropy": 2.0, "classes": 16.0}) == 0


def test_without_evidence_it_says_so():
    mine, _ = described(SKEWED)
    even = {**mine, "distance": mine["distance"] - 2 * NEAR - 0.01}
    for evidence, kind in (([result(even)], "global"), ([result(mine)], "personal"), ([], "global")):
        found = recommend(SKEWED, evidence, kind)
        assert not found.advice and any("no evidence" in note for note in found.notes)
        assert "`fedlens compare fedavg " in found.notes[-1]


def test_without_evidence_the_nearest_is_named_with_what_differs():
    mine, _ = described(SKEWED)
    near, far = ({**mine, "distance": mine["distance"] - 2 * NEAR - more} for more in (0.01, 0.2))
    other = result(far, source="far.md", data="cifar10")
    closest = result(near, source="near.md", clients=50, partition="dirichlet, alpha 0.1", model="cnn_small", rounds=20)
    said = recommend(SKEWED, [other, closest], "global").notes
    assert "far.md" not in " ".join(said) and "near.md: mnist5k, 50 clients" in said[2]
    far = f"distance from your split {apart(mine, near):.2f} (above 0.25 we do not compare)"
    assert far in said[2] and "no evidence" in said[2]
    assert said[3] == "There, in %: scaffold 80.0, fedprox 79.5, fedavg 70.0."
    # The data, the partition, the model and the rounds are the same, and are not named.
    assert (
        said[4] == f"It differs in EMD ({near['distance']:.2f}; yours {mine['distance']:.2f}), clients (50; yours 20)."
    )
    assert "`fedlens compare fedavg scaffold fedprox partition=dirichlet partition.alpha=0.1 model=" in said[5]
    alone = recommend(SKEWED, [closest], "global", megabytes=3).notes[-1]  # SCAFFOLD sends 4.66 MB of this model
    assert "compare fedavg fedprox partition=" in alone


WORDS = (
    "data=cifar10 partition=shards partition.classes=3 cohort=0.5 uplink=clip,noise uplink.clip.norm=2",
    "local.lr=1e-5 local.schedule=cosine evaluate.targets=0.5,0.8 devices=phone defences=krum",
    "data=npz data.path=a.npz auxiliary=cifar100 buffers=local local.steps=5 compile=true",
    "partition.alpha=0.3 clients=7",
)


@pytest.mark.parametrize("words", WORDS)
def test_the_proposed_words_give_the_same_experiment(words):
    """Read back by the comparison itself: all but the method is what was asked for."""
    experiment = config.read(None, [*words.split(), "algorithm=moon", "algorithm.mu=2", "seed=3", "out=somewhere"])
    what = asked(["fedavg", *typed(experiment)])
    [compared] = [cell.experiment for cell in what.cells]
    assert replace(experiment.with_execution(out="", picture=False), algorithm=compared.algorithm, seed=0) == compared


def test_constraints_rule_out_by_a_methods_own_messages():
    mine, _ = described(SKEWED)
    four = result(mine, **{"global": {"fedavg": 0.7, "scaffold": 0.8, "fedxds": 0.9, "fedsls": 0.6, "uniform": 0.5}})
    found = {a.method: a for a in recommend(SKEWED, [four], "global", megabytes=3, private=True).advice}
    assert found["fedavg"].verdict == "behind" and found["uniform"].verdict == "behind"
    assert found["scaffold"].why == "a client sends 4.66 MB in a round, more than 3"  # twice 582,026 parameters
    alone = {a.method: a for a in recommend(SKEWED, [four], "global", private=True).advice}
    assert "made of clients' images" in alone["fedxds"].why and alone["scaffold"].verdict != "ruled out"
    assert "more than updates" in alone["fedsls"].why


def test_a_comparison_becomes_evidence(tmp_path):
    words = ("model=cnn2", "clients=6", "cohort=3", "rounds=2", "local.steps=1", "engine=sequential")
    done = compare(asked(["fedavg", "fedper", *words]), [0, 1], tmp_path / "c", Board(io.StringIO()), 1)
    assert add(tmp_path / "c", tmp_path / "e.json", "results/new.md") == 1
    assert add(tmp_path / "c", tmp_path / "e.json", "results/new.md") == 1  # in place of what it said before
    [entry] = read((tmp_path / "e.json").read_text(), "e.json")["results"]
    rows = {row["method"]: row for row in done.rows("")}
    assert entry["global"] == {"fedavg": round(rows["fedavg"]["global_last"], 4)} and entry["seeds"] == 2
    assert entry["personal"] == {name: round(row["personal_after"], 4) for name, row in rows.items()}
    experiment = config.read(tmp_path / "c" / "fedavg" / "seed0" / "config.yaml")
    assert entry["skew"] == pytest.approx(described(experiment)[0], abs=1e-4)
    assert recommend(experiment, [entry], "personal").advice
    assert entry["ranked_by"] == done.by == "personal" and entry["order"] == [row["method"] for row in done.rows("")]


def test_a_comparison_of_your_own_is_ranked_as_it_ranks(tmp_path, monkeypatch, capsys):
    """Before other evidence, the league's too; by its kind of model and its measure; without words, its own split."""
    mine, _ = described(SKEWED)
    own = result(mine, source="mine", ranked_by="global", measure="accuracy", order=["scaffold", "fedprox", "fedavg"])
    other = result(mine, seeds=9, source="theirs", **{"global": {"moon": 0.99, "fedavg": 0.1}})
    found = recommend(SKEWED, [world(mine), other], "global", own=[own])
    assert [one.method for one in found.advice] == own["order"] and found.advice[0].source == "mine"
    by_auroc = {**own, "measure": "auroc", "order": ["fedavg", "scaffold", "fedprox"]}
    found = recommend(SKEWED, [other], "global", own=[by_auroc])
    assert [(one.method, one.verdict) for one in found.advice] == [
        ("fedavg", "try"),
        ("scaffold", "behind"),
        ("fedprox", "behind"),
    ]
    assert found.advice[1].why == "rank 2 by auroc there" and any("ranks by auroc" in note for note in found.notes)
    (tmp_path / "config.yaml").write_text(config.to_yaml(config.read(None, ["partition=iid", "clients=3"])))
    numbers = {"global_last": None, "fine-tuned": None, "personal_after": None, "seeds": [0]}
    rows = [{**numbers, "method": m, "rank": r, "personal_before": 1 - r / 9} for m, r in (("pse", 1), ("fedper", 2))]
    runs = [{"setting": "", "run": str(tmp_path)}]
    said = {"complete": True, "settings": {"": rows}, "runs": runs, "ranked_by": "personal", "measure": "accuracy"}
    (tmp_path / "compare.json").write_text(json.dumps(said))
    app(["recommend", "--runs", str(tmp_path), "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "personal" and [one["method"] for one in found["advice"]] == ["pse", "fedper"]


def test_bad_evidence_is_named(tmp_path):
    with pytest.raises(BadInput, match="holds no comparison"):
        results_of(tmp_path, "x")
    (tmp_path / "compare.json").write_text(json.dumps({"complete": False}))
    with pytest.raises(BadInput, match="is not finished"):
        results_of(tmp_path, "x")
    for text, sentence in (("{", "is not JSON"), ('{"format": 2}', "no evidence of this version")):
        with pytest.raises(BadInput, match=sentence):
            read(text, "e.json")


def test_the_command(capsys):
    app(["recommend", "partition.alpha=0.1", "clients=20", "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "global" and {a["source"] for a in found["advice"]} <= {e["source"] for e in known()}
    app(["recommend", "partition=iid", "--personal"], standalone_mode=False)
    assert "no evidence" in " ".join(capsys.readouterr().out.split())


# ---- by the league ---------------------------------------------------------------------------------------------------
def world(mine, clients=20, near=0.0, **other):
    """A world of the league, so far from a split."""
    skew = {**mine, "size_gini": mine["size_gini"] + near}
    found = result(skew, clients=clients, league=True, seeds=2, source="results/league.md")
    found["global"] = {"fedavg": 0.7, "scaffold": 0.74, "fedprox": 0.70, "fedxds": 0.75, "fedamp": 0.6}
    found["deviation"] = {"global": dict.fromkeys(found["global"], 0.01)}
    found["bytes"] = {"fedavg": 10, "scaffold": 20}
    return {**found, **other}


def test_worlds_count_by_distance_and_what_is_shared_is_said():
    """At 0 and 0.1 a world counts 20 and 6.67: (20 * 0.04 + 6.67 * -0.04) / 26.67 = 0.02."""
    mine, _ = described(SKEWED)
    far = world(mine, near=0.1)
    far["global"] = {**far["global"], "scaffold": 0.66}
    found = recommend(SKEWED, [world(mine), far, result(mine, **{"global": {"moon": 0.99, "fedavg": 0.1}})], "global")
    placed = {one.method: one for one in found.advice}
    assert "moon" not in placed  # other evidence is not mixed with the league's
    one = placed["scaffold"]
    assert (one.over_fedavg, one.worlds, one.cost) == (pytest.approx(0.02), 2, "2.0x bytes")
    assert one.low < 0 < one.high and one.verdict == "try"
    assert placed["fedavg"].over_fedavg == placed["fedavg"].low == 0
    assert found.advice[0].method == "fedxds" and "shares data" in placed["fedxds"].why
    assert placed["fedamp"].verdict == "behind" and "clients' models to other clients" in placed["fedamp"].why
    said = "\n".join(found.notes)
    assert "fedlens compare fedavg fedxds scaffold" in said and "tests it here" in said
    assert "No evidence on such a split: apfl" in said and "2 worlds of the league" in said


def test_a_method_of_one_world_is_no_surer_than_those_of_two():
    """FedCM is far ahead in the one world that has it; others move by 8 points from world to world."""
    mine, _ = described(SKEWED)
    near, far = world(mine), world(mine, near=0.01)
    near["global"] = {"fedavg": 0.7, "scaffold": 0.78, "fedcm": 0.76}
    far["global"] = {"fedavg": 0.7, "scaffold": 0.70}
    for one in (near, far):
        one["deviation"] = {"global": dict.fromkeys(one["global"], 0.001)}
    placed = {one.method: one for one in recommend(SKEWED, [near, far], "global").advice}
    alone = {one.method: one for one in recommend(SKEWED, [near], "global").advice}["fedcm"]
    wide = placed["fedcm"].high - placed["fedcm"].low
    assert wide > placed["scaffold"].high - placed["scaffold"].low > 0.1 > alone.high - alone.low
    assert (placed["fedcm"].verdict, placed["scaffold"].verdict) == ("try", "try")
    near["global"], far["global"] = {"fedavg": 0.7, "moon": 0.73, "fedcm": 0.76}, {"fedavg": 0.7, "moon": 0.71}
    found = {one.method: one for one in recommend(SKEWED, [near, far], "global").advice}
    assert found["fedcm"].over_fedavg - 0.01 > found["moon"].high > found["fedcm"].low  # moon's two worlds agree
    assert found["moon"].verdict == "try"


def test_what_is_printed_of_the_league_names_what_is_shared(monkeypatch, capsys):
    """The first line, too; lines fit 80 columns, and methods that are behind take one sentence."""
    mine, _ = described(SKEWED)
    monkeypatch.setattr("fedlens.recommend.rank.known", lambda: [world(mine), world(mine, clients=90)])
    monkeypatch.setenv("COLUMNS", "80")
    app(["recommend", "partition.alpha=0.1", "clients=20", "model=cnn_small"], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Try fedxds (shares data) or scaffold." and max(map(len, lines)) <= 80
    assert any(line.startswith("scaffold ") and "+4.0 [+2.0, +6.0]" in line for line in lines)
    assert "Behind, in points over fedavg: fedavg +0.0, fedprox +0.0, fedamp -10.0. --json" in " ".join(lines)
    assert "Left out, with another number of clients: 1 world of 90 clients." in lines
    assert not any(line.startswith("fedamp") for line in lines)


def test_a_method_that_broke_down_is_never_proposed():
    """SCAFFOLD is ahead on the average, or its interval reaches the best: one run near chance is enough against it."""
    mine, _ = described(SKEWED)
    wide = {"fedavg": 0.01, "scaffold": 0.4}
    low = world(mine, **{"global": {"fedavg": 0.7, "scaffold": 0.4}, "deviation": {"global": wide}})
    low["least"] = {"global": {"fedavg": 0.69, "scaffold": 0.1}}
    (first, second) = recommend(SKEWED, [low], "global").advice
    assert (first.method, first.verdict, second.method, second.verdict) == ("fedavg", "try", "scaffold", "behind")
    assert second.high > 0 and "a run on mnist5k ended at 10.0 %, fedavg there at 70.0" in second.why
    ahead = world(mine, least={"global": {"scaffold": 0.2}})
    ahead["global"] = {"fedavg": 0.7, "scaffold": 0.8, "fedprox": 0.705}
    found = recommend(SKEWED, [ahead], "global")
    assert [(one.method, one.verdict) for one in found.advice] == [
        ("scaffold", "behind"),
        ("fedprox", "try"),
        ("fedavg", "try"),
    ]
    assert "fedlens compare fedavg fedprox" in "\n".join(found.notes)
    behind = world(
        mine, **{"global": {"fedavg": 0.7, "moon": 0.67}, "deviation": {"global": {"fedavg": 0, "moon": 0.1}}}
    )
    moon = recommend(SKEWED, [behind], "global").advice[1]
    assert moon.high > 0 and moon.verdict == "behind" and moon.why.startswith("3.0 points behind fedavg there")


def test_settings_of_the_league_are_said_and_proposed():
    """A method that the league ran with settings of its own is named with them, and the command has them."""
    mine, _ = described(SKEWED)
    there = world(mine, rates={"fedavg": 0.1, "fedsls": 0.03})
    there["global"] = {"fedavg": 0.7, "fedsls": 0.75}
    there["settings"] = {"fedsls": ["algorithm.pretrain_epochs=2", "algorithm.blend=0.25"]}
    far = world(mine, near=0.1, settings={"fedsls": ["algorithm.blend=0.5"]})
    far["global"] = there["global"]
    found = recommend(SKEWED, [far, there], "global")
    assert "ran with pretrain_epochs=2 blend=0.25" in found.advice[0].why
    assert any("fedavg 0.1, fedsls 0.03. Search yours" in note for note in found.notes)
    (command,) = re.findall("`fedlens compare (.*)` tests it here", "\n".join(found.notes))
    words = shlex.split(command)
    cells = {cell.row: cell.experiment.algorithm for cell in asked(words[: words.index("--seeds")]).cells}
    assert (cells["fedsls"].pretrain_epochs, cells["fedsls"].blend) == (2, 0.25)


def test_a_part_of_a_data_set_is_of_that_set():
    """A world with 10,000 images of CIFAR-10 is evidence for CIFAR-10, before a table of other images."""
    mine, _ = described(SKEWED)
    table = result(mine, data="cifar10", **{"global": {"fedavg": 0.5, "moon": 0.6}})
    part = world(mine, data="mnist5k (1,000 images)")
    found = recommend(SKEWED, [table, part], "global")
    assert "scaffold" in {one.method for one in found.advice}
    assert not any("Not of your data" in note for note in found.notes)
    assert any("Not of the league, and not counted: results/x.md: cifar10" in note for note in found.notes)


def test_worlds_with_other_numbers_of_clients_do_not_rank():
    mine, _ = described(SKEWED)
    other = world(mine, clients=100)
    other |= {"data": "cifar10", "global": {"fedavg": 0.1, "fednova": 0.9}}
    found = recommend(SKEWED, [world(mine, near=0.2), other], "global")
    assert "fednova" not in {one.method for one in found.advice}
    assert any("Left out, with another number of clients" in note for note in found.notes)
    alone = recommend(SKEWED, [other], "global")
    assert {one.method for one in alone.advice} == {"fedavg", "fednova"}
    assert any("They have 100 clients, yours 20" in note for note in alone.notes)
    assert any("Not of your data" in note for note in alone.notes)
    # Nor does a world of the league where another table has as many clients as the user.
    table = result(mine, clients=20, **{"global": {"fedavg": 0.5, "moon": 0.6}})
    assert [one.method for one in recommend(SKEWED, [other, table], "global").advice] == ["moon", "fedavg"]
    # Nor one of other data, where a table is of the user's.
    elsewhere = world(mine, data="cifar10")
    assert [one.method for one in recommend(SKEWED, [elsewhere, table], "global").advice] == ["moon", "fedavg"]


def test_one_world_and_one_seed_have_no_interval():
    mine, _ = described(SKEWED)
    found = recommend(SKEWED, [world(mine, deviation={})], "global")
    assert {one.method: one.low for one in found.advice}["scaffold"] is None
    sure = recommend(SKEWED, [world(mine)], "global")
    one = {one.method: one for one in sure.advice}["scaffold"]
    assert one.high - one.over_fedavg == pytest.approx(1.96 * (2 * 0.01**2 / 2) ** 0.5)


def test_a_method_that_shares_images_is_never_named_without_saying_so():
    mine, _ = described(SKEWED)
    found = recommend(SKEWED, [result(mine, **{"global": {"fedavg": 0.5, "fedxds": 0.9}})], "global")
    assert [one.privacy for one in found.advice] == ["shares data", ""] and "shares data" in found.advice[0].why
    far = {**mine, "size_gini": 1.0, "label_entropy": 0.0, "distance": 2.0}
    none = recommend(SKEWED, [result(far, **{"global": {"fedavg": 0.5, "fedxds": 0.9}})], "global")
    assert not none.advice and "fedxds: shares data." in none.notes
