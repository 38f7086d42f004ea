"""`fedlens report`: the page has the numbers of the tables; broken and foreign runs are shown as what they are."""

import itertools
import json
import math
import re
import shutil
import statistics
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from fedlens import config
from fedlens.algorithms import ALGORITHMS
from fedlens.cli import main as cli
from fedlens.compare.measured import existing
from fedlens.compare.run import compare_existing
from fedlens.compare.table import Comparison
from fedlens.compare.verdict import sentence
from fedlens.core.errors import BadInput
from fedlens.plots import style
from fedlens.privacy.statement import SEEDED
from fedlens.report import groups, safety, summary_text
from fedlens.report import thumbnails as gallery
from fedlens.report.collect import collect
from fedlens.report.page import gather, page, write
from fedlens.runs import figure
from fedlens.runs.folder import RunFolder
from fedlens.runs.read import client_accuracies, flat, thinned
from fedlens.simulate import recorder
from fedlens.simulate import run as simulate

SMALL = ["data=mnist5k", "model=mlp", "clients=6", "cohort=3", "rounds=4", "local.steps=2", "engine=sequential"]
SMALL += ["picture=false", "partition.seed=0", "evaluate.personal_every=2"]


def run(out: Path, *words: str) -> Path:
    simulate.run(config.read(None, [*SMALL, f"out={out}", *words]))
    return out


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> list[Path]:
    """Two methods, two seeds each, on one split."""
    root = tmp_path_factory.mktemp("runs")
    return [
        run(root / f"{method}-{seed}", f"algorithm={method}", f"seed={seed}")
        for method in ("fedavg", "scaffold")
        for seed in (0, 1)
    ]


@pytest.fixture(scope="module")
def personal(tmp_path_factory) -> list[Path]:
    """Three methods with other names for a personal model, and one of them without a global model."""
    root = tmp_path_factory.mktemp("personal")
    return [run(root / method, f"algorithm={method}") for method in ("fedavg+ft", "local", "fedavg")]


@pytest.fixture
def copies(finished, tmp_path) -> list[Path]:
    return [Path(shutil.copytree(path, tmp_path / "runs" / path.name)) for path in finished]


def embedded(text: str) -> dict:
    return json.loads(re.findall(r'<script type="application/json" id="report">(.*?)</script>', text, re.S)[0])


def edit(path: Path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


# ---- numbers ---------------------------------------------------------------------------------------------------------
def test_numbers_are_those_of_the_tables(finished, tmp_path):
    shown = embedded(write(finished, tmp_path / "report.html").read_text())
    assert [run["name"] for run in shown["runs"]] == [path.name for path in finished]
    for path, row in zip(finished, shown["runs"], strict=True):
        metrics = pq.read_table(path / "metrics.parquet").to_pylist()
        sent = pq.read_table(path / "bytes.parquet").to_pylist()
        result = json.loads((path / "result.json").read_text())
        looked = [m for m in metrics if m["model"] == "global" and m["metric"] == "accuracy"]
        curve = row["curves"]["global"]
        assert curve["round"] == [m["round"] for m in looked] == [1, 2, 3, 4]
        assert curve["accuracy"] == [m["value"] for m in looked] and curve["accuracy"][-1] == result["accuracy"]
        assert row["curves"]["personal after"]["round"] == [2, 4]
        assert row["curves"]["personal after"]["accuracy"][-1] == result["personal"]["after"]["mean"]
        for at, round in enumerate(curve["round"]):
            own = [b for b in sent if b["round"] <= round and not b["kind"].startswith("evaluation")]
            assert curve["bytes"][at] == sum(b["payload"] + b["header"] for b in own)
            spent = [m["value"] for m in metrics if m["metric"] == "seconds" and m["round"] <= round]
            assert math.isclose(curve["seconds"][at], sum(spent), rel_tol=1e-12)
        assert curve["bytes"][-1] == result["bytes_up"] + result["bytes_down"]
        for kind, parts in row["bytes"].items():
            for part in ("payload", "header"):
                assert parts[part] == sum(b[part] for b in sent if b["kind"] == kind)
        assert row["bytes"].keys() == {b["kind"] for b in sent}
        for look, found in row["evaluations"].items():
            by = {m["client"]: m["value"] for m in metrics if m["client"] is not None and m["model"] == look}
            x = np.array([by[client] for client in sorted(by)])
            assert found["clients"] == sorted(by) and found["accuracy"] == x.tolist() and found["count"] == 6
            assert math.isclose(found["mean"], x.mean()) and math.isclose(found["std"], x.std())
            assert found["worst_decile"] == x.min()  # a tenth of six clients is one
            assert math.isclose(found["jain"], x.sum() ** 2 / (6 * (x**2).sum()))


def test_groups_are_means_and_deviations_over_seeds(finished):
    shown = gather(finished)
    assert [group["label"] for group in shown["groups"]] == ["fedavg", "scaffold"]
    for group, paths in zip(shown["groups"], (finished[:2], finished[2:]), strict=True):
        results = [json.loads((path / "result.json").read_text()) for path in paths]
        accuracies = [result["accuracy"] for result in results]
        assert group["accuracy"]["global"]["mean"] == statistics.fmean(accuracies)
        assert math.isclose(group["accuracy"]["global"]["std"], np.std(accuracies, ddof=1))
        assert group["bytes"]["mean"] == statistics.fmean(r["bytes_up"] + r["bytes_down"] for r in results)
        worst = [result["personal"]["after"]["worst_decile"] for result in results]
        assert group["fairness"]["personal after"]["worst_decile"]["mean"] == statistics.fmean(worst)
        curve, singles = group["curves"]["global"], [shown["runs"][n]["curves"]["global"] for n in group["runs"]]
        pairs = [*zip(*(single["accuracy"] for single in singles), strict=True)]
        assert curve["accuracy"] == [statistics.fmean(pair) for pair in pairs]
        assert curve["low"] == [min(pair) for pair in pairs] and curve["high"] == [max(pair) for pair in pairs]
        total = sum(group["kinds"][kind]["mean"] for kind in group["kinds"] if not kind.startswith("evaluation"))
        assert math.isclose(total, group["bytes"]["mean"])


def test_the_answer_in_words_names_the_best_by_its_number(finished):
    shown = gather([finished[0], finished[2]])
    rows = compare_existing([finished[0], finished[2]]).rows("")
    best, other = (100 * row["mean"] for row in rows)
    assert [shown["groups"][n]["rank"]["mean"] for n in (0, 1)] == [
        next(row["mean"] for row in rows if row["method"] == group["label"]) for group in shown["groups"]
    ]
    points = round(best, 1) - round(other, 1)
    lead = f"{points:.1f} points above {rows[1]['method']}; 1 seed cannot show that this is more than luck"
    assert shown["headline"] == f"{rows[0]['method']} is ahead with {best:.1f}\u00a0%, {lead}"
    assert shown["sentences"][0].endswith("pooled test images, after the last round.")
    first, second = (row["method"] for row in rows)
    assert best == 100 * next(g for g in shown["groups"] if g["label"] == first)["accuracy"]["global"]["mean"]
    assert "Repeat with other seeds: 3 of them make a test." in shown["sentences"] and not shown["warnings"]
    assert [one["text"] for one in shown["privacy"]] == [
        f"{first} and {second}: model updates leave unprotected.",
        f"{first} and {second}: privacy was not tested by attack; fedlens audit RUN does.",
    ]
    (alone,) = gather([finished[0]])["groups"]
    assert gather([finished[0]])["headline"].startswith(
        f"fedavg reached {100 * alone['accuracy']['global']['mean']:.1f}"
    )


def test_own_models_of_any_name_are_one_measure_as_in_the_terminals_table(personal):
    shown, table = gather(personal), Comparison(existing(personal), "personal").rows("")
    assert [group["personal"] for group in shown["groups"]] == ["fine-tuned", "personal after", "personal after"]
    assert shown["measure"] == "personal" and "personal" in shown["measures"] and not shown["listed"]
    by_name = {group["label"]: group for group in shown["groups"]}
    for row in table:
        group = by_name[row["method"]]
        assert group["personal"] == row["clients_by"]
        assert math.isclose(group["accuracy"][group["personal"]]["mean"], row["mean"])
        fair = group["fairness"][group["personal"]]
        assert math.isclose(fair["worst_decile"]["mean"], row["clients_worst_decile"])
        assert math.isclose(fair["std"]["mean"], row["clients_std"])
    best, second, _ = table
    assert shown["headline"] == (
        f"{best['method']} is ahead with {100 * best['mean']:.1f}\u00a0% (personal models), "
        f"{round(100 * best['mean'], 1) - round(100 * second['mean'], 1):.1f} points above {second['method']}; "
        "1 seed cannot show that this is more than luck"
    )
    assert shown["personal_models"] == "fine-tuned for fedavg+ft, after local training for the others"
    assert shown["sentences"][0] == (
        "Accuracy is that of personal models on each client's test images, after the last round: "
        f"{shown['personal_models']}."
    )


def test_a_headline_names_few_of_very_many():
    rank = {"mean": 0.5, "is_close": True, "last": 1, "last_rounds": []}
    many = [{"label": f"m{n}", "shares": "", "rank": rank | {"is_close": n > 0}} for n in range(20)]
    said = summary_text._winner(many, "global")
    assert said == "m0, m1, m2, m3, m4 and 15 more cannot be told apart: 50.0\u00a0%"
    assert "m0, m1, m2, m3, m4, m5, m6 and m7 cannot" in summary_text._winner(many[:8], "global")


def ranked_group(label: str, mean: float, *, tested: bool = True, close: bool = False, classes: int = 10) -> dict:
    rank = {"mean": mean, "std": None, "is_close": close, "is_best": False, "last": 1, "last_rounds": []}
    return {
        "label": label,
        "shares": "",
        "classes": classes,
        "complete": 3,
        "personal": None,
        "accuracy": {"global": {"mean": mean, "std": None}},
        "rank": rank | {"tested": tested},
    }


def test_a_lead_is_the_difference_of_the_numbers_that_are_shown():
    said = summary_text._winner([ranked_group("a", 0.91649), ranked_group("b", 0.88551)], "global")
    assert said == "a was best with 91.6\u00a0%, 3.0 points above b"  # 3.098 before rounding; b is shown as 88.6


def test_who_is_no_better_than_guessing_did_not_learn():
    two = [ranked_group("a", 0.103), ranked_group("b", 0.10, close=True)]
    said = summary_text._winner(two, "global")
    assert said == "Neither a nor b learned: 10.3\u00a0% at best, guessing gives 10\u00a0%"
    three = summary_text._winner([*two, ranked_group("c", 0.09)], "global")
    assert three.startswith("None of 3 methods learned: 10.3")
    hundred = [ranked_group("a", 0.103, classes=100), ranked_group("b", 0.10, close=True, classes=100)]
    for learned in (hundred, [ranked_group("a", 0.2), ranked_group("b", 0.1)], [g | {"classes": None} for g in two]):
        assert "learned" not in summary_text._winner(learned, "global")
    assert "learned" not in summary_text._winner(two, "personal after")  # guessing is another thing for each client


def test_costs_are_those_of_all_and_of_few_by_name():
    def one(label: str, bytes: float, seconds: float) -> dict:
        return {"label": label, "bytes": {"mean": bytes}, "seconds": {"mean": seconds}}

    few = [one("a", 691e6, 300), one("b", 373e6, 24), one("c", 186e6, 23)]
    assert summary_text._cost_range(few).replace("\u00a0", " ") == "c 186 MB to a 691 MB, 23 s to 5.0 min"
    other = [one("a", 2e6, 20), one("b", 1e6, 40)]
    assert summary_text._cost_range(other).replace("\u00a0", " ") == "b 1 MB to a 2 MB, a 20 s to b 40 s"
    assert summary_text._cost_range(other[:1]).replace("\u00a0", " ") == "2 MB, 20 s"
    alike = [one("a", 1e6, 1.8), one("b", 1e6, 1.85)]
    assert summary_text._cost_range(alike).replace("\u00a0", " ") == "1 MB, 1.8 s to 1.9 s"
    assert summary_text._cost_range([*few, *other]).replace("\u00a0", " ") == "1 MB to 691 MB, 20 s to 5.0 min"


def test_who_sends_no_model_is_not_said_to(personal):
    """`local` sends a number of images at most."""
    alone, both = gather(personal[1:2]), gather(personal[1:])
    assert alone["tiles"]["privacy"] == "No model leaves clients, not tested by attack"
    said = [one["text"] for one in both["privacy"]]
    assert "local: no model leaves its clients." in said and "fedavg: model updates leave unprotected." in said
    same = summary_text._costs(*({"label": n, **costs(1e3)} for n in "ab"))
    assert same == "a cost 1\u00a0kB of traffic (same as b) and 1.0\u00a0s (same as b)."
    assert "16,000 times" in summary_text._costs(*({"label": n, **costs(v)} for n, v in (("a", 16e6), ("b", 1e3))))


def costs(bytes: float) -> dict:
    return {"bytes": {"mean": bytes}, "seconds": {"mean": 1.0}}


def test_who_fine_tunes_is_evaluated_on_that(personal):
    """Its global model is that of its base, and says nothing about what it adds."""
    alone = gather(personal[:1])
    mean = alone["groups"][0]["accuracy"]["fine-tuned"]["mean"]
    assert alone["measure"] == "fine-tuned" and alone["headline"].startswith(f"fedavg+ft reached {100 * mean:.1f}")
    pair = gather([personal[0], personal[2]])
    assert (
        pair["measure"] == "personal"
        and pair["personal_models"] == "fine-tuned for fedavg+ft, after local training for fedavg"
    )
    assert compare_existing([personal[0], personal[2]]).by == "personal"


def test_with_a_global_model_for_all_personal_models_come_second(personal, finished):
    shown = gather(finished)
    assert shown["measure"] == "global" and compare_existing(finished).by == "global"
    (said,) = [sentence for sentence in shown["sentences"] if "on average" in sentence]
    means = [group["fairness"][group["personal"]]["mean"]["mean"] for group in shown["groups"]]
    best = shown["groups"][means.index(max(means))]["label"]
    start = f"Of personal models after local training, {best}'s are best: {100 * max(means):.1f}\u00a0% on average"
    assert said.startswith(start)
    alike = gather(personal[1:])  # one name for all: no need for another
    assert (
        alike["measure"] == "personal after" and "personal" not in alike["measures"] and alike["personal_models"] == ""
    )


def test_methods_without_a_measure_in_common_are_told_one_by_one(personal, tmp_path):
    blind = run(tmp_path / "fedprox", "algorithm=fedprox", "evaluate.personal=none")
    shown = gather([personal[1], blind])
    assert shown["headline"] == "2 methods without a measure in common" and shown["measure"] is None
    first, second, *_ = shown["sentences"]
    assert shown["listed"] and first.startswith("local reached") and second.startswith("fedprox reached")
    assert first.endswith(" (personal models after local training).") and second.endswith(" (the global model).")


def with_accuracies(paths: list[Path], *values: float) -> list[Path]:
    for path, to in zip(paths, values, strict=True):
        rewrite(path, lambda row, to=to: row | {"value": to} if row["metric"] == "accuracy" else row)
    return paths


def test_a_lead_within_the_deviation_is_not_a_win(copies):
    """Seeds far apart, means close together."""
    shown = gather(with_accuracies(copies, 0.5, 0.7, 0.52, 0.72))
    assert shown["headline"].startswith(
        "scaffold and fedavg cannot be told apart: 62.0\u00a0%\u00a0±\u00a014.1 and 60.0"
    )
    assert shown["tiles"]["result"] == "No clear winner"
    sent, took = shown["tiles"]["cost"].split(", ")
    assert len(set(sent.split(" to "))) == len(sent.split(" to ")), "74.5 MB to 74.5 MB"
    assert len(set(took.split(" to "))) == len(took.split(" to "))
    shown = gather(with_accuracies(copies, 0.50, 0.51, 0.71, 0.72))
    assert shown["headline"] == (
        "scaffold is ahead with 71.5\u00a0%, 21.0 points above fedavg; 2 seeds cannot show that this is more than luck"
    )


@pytest.fixture
def three_seeds(finished, tmp_path) -> list[Path]:
    """Three methods, three seeds each: copies whose accuracies a test sets."""
    made = []
    for at, method in enumerate(("fedavg", "scaffold", "fedprox")):
        for seed in range(3):
            path = Path(shutil.copytree(finished[2 * (at == 1)], tmp_path / "three" / f"{method}-{seed}"))
            text = (path / "config.yaml").read_text().replace("is: fedavg", f"is: {method}", 1)
            (path / "config.yaml").write_text(re.sub(r"\nseed: \d", f"\nseed: {seed}", text))
            made.append(path)
    return made


def test_all_that_cannot_be_told_from_the_best_are_named_by_the_command_lines_test(three_seeds):
    shown = gather(with_accuracies(three_seeds, 0.80, 0.84, 0.82, 0.81, 0.83, 0.825, 0.50, 0.53, 0.51))
    rows = {row["method"]: row for row in compare_existing(three_seeds).rows("")}
    for group in shown["groups"]:
        for name in ("rank", "mean", "std", "p_seeds", "p_clients"):
            assert group["rank"][name] == rows[group["label"]][name], (group["label"], name)
    assert shown["headline"].startswith("scaffold and fedavg cannot be told apart: 82.2")
    terminal = compare_existing(three_seeds)
    assert "; fedavg cannot be told from it" in sentence("", terminal.rows(""), terminal.by, "accuracy")
    (said,) = [sentence for sentence in shown["sentences"] if sentence.startswith("Against scaffold")]
    assert "paired t-test over seeds" in said and "fedavg p\u00a0=\u00a0" in said and "fedprox p\u00a0" in said
    assert said.endswith(". Only p below 0.05 tells methods apart.")
    cells = {row["method"]: row["p seeds"] for _, accuracies, _ in terminal.tables() for row in accuracies}
    assert f"fedavg p\u00a0=\u00a0{cells['fedavg']}" in said  # the digits of the terminal's table
    shown_p = {group["label"]: group["rank"]["p_words"]["seeds"] for group in shown["groups"]}
    assert {name: p for name, p in shown_p.items() if name != "scaffold"} == {
        name: p for name, p in cells.items() if p != "best"
    }
    same = gather(with_accuracies(three_seeds, *[0.5] * 9))
    assert "No test was possible: methods differ by the same amount in every seed." in same["sentences"]
    assert not any(words.startswith("Repeat with other seeds") for words in same["sentences"])
    assert same["headline"] == "fedavg, scaffold and fedprox cannot be told apart: 50.0\u00a0%"
    shown = gather(with_accuracies(three_seeds, 0.60, 0.61, 0.62, 0.81, 0.83, 0.825, 0.50, 0.53, 0.51))
    assert shown["headline"] == "scaffold was best with 82.2\u00a0%, 21.2 points above fedavg"
    assert not any("tells methods apart" in sentence for sentence in shown["sentences"])
    assert shown["tiles"]["result"].startswith("scaffold was best: 82.2")


def test_who_shares_data_says_so_in_the_headline_and_leaks_are_in_its_box(copies):
    import pyarrow as pa

    def shared(row):
        return row | {"kind": "shared"} if row["kind"] == "download" and row["round"] == 1 else row

    for path in copies[:2]:
        (file,) = (path / "bytes.parquet").glob("*.parquet")
        table = pq.read_table(file)
        pq.write_table(pa.Table.from_pylist([shared(row) for row in table.to_pylist()], table.schema), file)
    statement = {"release": "one {image}", "mechanism": "", "unit": "one image; or two", "adjacency": "", "delta": 1e-5}
    statement |= {"sensitivity": "", "epsilon": 20.0, "holds": False, "because": "the mask tells", "randomness": ""}
    statement |= {"not_covered": [], "details": {"deep": {"er": 1}}}
    for path in copies[:2]:
        (path / "privacy.json").write_text(json.dumps({"statements": [statement], "answers_as_they_are": {}}))
    one = {name: {"AUC": {"value": v, "low": v - 0.01, "high": v + 0.01}} for name, v in
           (("found", 0.9), ("chance", 0.5), ("undefended", 1.0))}  # fmt: skip
    verdict = {"attack": "loss", "threat": "", "verdict": "Leaks: much.", "decisive": "AUC", "notes": [], **one}
    (copies[0] / "audit.json").write_text(json.dumps({"verdicts": [verdict], "skipped": {}}))
    shown = gather(with_accuracies(copies, 0.81, 0.82, 0.50, 0.51))
    assert shown["headline"].startswith("fedavg, which shares data, is ahead with 81.5")
    assert [one["text"] for one in shown["privacy"] if one["alarm"]] == [
        "fedavg, attack loss: AUC 0.90 (guessing: 0.50); without defence 1.00.",
        "fedavg shares data: one {image}.",
        "fedavg: ε = 20, not proven as stated: the mask tells.",
    ]
    assert shown["tiles"]["privacy"] == (
        "fedavg leaks (1 of 2 runs attacked), shares data, not proven as stated; "
        "scaffold: unprotected updates; scaffold not attacked"
    )
    assert [group["shares"] for group in shown["groups"]] == ["shares data", "updates only"]
    statement |= {"holds": True, "because": "", "epsilon": 900.0, "randomness": SEEDED}
    for path in copies[:2]:
        (path / "privacy.json").write_text(json.dumps({"statements": [statement], "answers_as_they_are": {}}))
    said = [one["text"] for one in gather(copies)["privacy"]]
    once = "fedavg: no protection in this run: the noise can be recomputed from the seed. "
    assert f"{once}With secret noise ε = 900, δ = 1e-05 for one image, which promises little." in said
    assert sum("ε" in text or "seed" in text or "proven" in text for text in said) == 1
    (copies[0] / "audit.json").write_text('{"verdicts": 3}')
    shown = gather(copies)
    assert shown["tiles"]["privacy"].startswith("fedavg shares data, no protection in this run; scaffold: ")
    assert any(one["alarm"] and "damaged" in one["text"] for one in shown["privacy"])


@pytest.mark.parametrize(
    ("leaky", "givers", "said"),
    [
        ("b", "b", "b leaks in an audit, shares data; a: unprotected updates; a not attacked"),
        ("a", "b", "a leaks in an audit; b shares data; b not attacked"),
        ("ab", "ab", "a and b leak in an audit, share data"),
        ("", "ab", "a and b share data; none attacked"),
        ("", "b", "b shares data; a: unprotected updates; none attacked"),
        ("", "", "a, b: unprotected updates; none attacked"),
        ("a", "", "a leaks in an audit; b: unprotected updates; b not attacked"),
    ],
)
def test_of_several_methods_it_is_said_which_one_leaks(monkeypatch, leaky, givers, said):
    monkeypatch.setattr(safety, "leaking", bool)
    monkeypatch.setattr(safety, "shares_data", lambda group: group["label"] in givers)
    runs = [{"audit": {"a": 1} if label in leaky else {}, "privacy": None} for label in "ab"]
    groups = [{"label": label, "method": "fedavg", "runs": [number]} for number, label in enumerate("ab")]
    assert safety.status(groups, runs) == said


def statement(**more) -> dict:
    said = {"release": "every upload", "unit": "a client", "epsilon": 3.0, "delta": None, "holds": True, "because": ""}
    return said | {"randomness": SEEDED} | more


@pytest.mark.parametrize(
    ("more", "cell", "sentence"),
    [
        (
            {},
            "No protection in this run (ε = 3 with secret noise), not tested by attack",
            "a: no protection in this run: the noise can be recomputed from the seed. "
            "With secret noise ε = 3 for a client, proven.",
        ),
        ({"randomness": "own"}, "ε = 3, proven, not tested by attack", "a: ε = 3 for a client: proven."),
        (
            {"randomness": "own", "epsilon": 3759.0},
            "ε = 3,759 promises little, not tested by attack",
            "a: ε = 3,759 for a client: proven, but so large that it promises little.",
        ),
        (
            {"epsilon": 3759.0},
            "No protection in this run, not tested by attack",
            "a: no protection in this run: the noise can be recomputed from the seed. "
            "With secret noise ε = 3,759 for a client, which promises little.",
        ),
    ],
)
def test_noise_that_the_seed_brings_back_protects_nobody(more, cell, sentence):
    runs = [{"audit": None, "privacy": {"statements": [statement(**more)]}}]
    group = {"label": "a", "method": "fedavg", "runs": [0], "shares": ""}
    assert safety.status([group], runs) == cell
    assert [one["text"] for one in safety.told([group], runs)][:1] == [sentence]


def test_shared_images_are_those_of_every_client():
    release = "one image, masked, clipped and with noise, and its label; once"
    runs = [{"audit": None, "privacy": {"statements": [statement(release=release)]}}]
    said = safety.told([{"label": "a", "method": "fedxds", "runs": [0], "shares": safety.DATA}], runs)
    assert said[0]["text"] == (
        "a shares data: images of every client, masked, clipped and with noise, and their labels; once."
    )


def test_what_an_attack_found_is_counted_beside_guessing_and_no_defence():
    def found(value: float, chance: float, undefended: float, measure: str = "recognised", **more) -> str:
        numbers = {"found": value, "chance": chance, "undefended": undefended}
        verdict = {name: {measure: {"value": number}} for name, number in numbers.items()}
        return safety._found(verdict | {"decisive": measure, "verdict": "Leaks.", "samples": 32, "seeds": 1} | more)

    assert found(9 / 32, 0, 9 / 32) == "9 of 32 images recognised (guessing: 0): as bad as no defence."
    assert found(9 / 32, 1 / 32, 0.5) == "9 of 32 images recognised (guessing: 1); without defence 16."
    assert found(0.3, 0.0, 0.3, seeds=3) == "recognised 0.30 (guessing: 0.00): as bad as no defence."
    assert found(0.944, 0.592, 0.99, "AUC") == "AUC 0.94 (guessing: 0.59); without defence 0.99."
    assert safety._found({"decisive": "AUC", "verdict": "Leaks."}) == "Leaks."


def test_a_method_without_the_measure_is_not_ranked_and_told(personal, tmp_path):
    blind = run(tmp_path / "fedprox", "algorithm=fedprox", "evaluate.personal=none")
    shown = gather([*personal, blind])
    assert shown["measure"] == "personal" and "personal" in shown["measures"]
    ranks = {group["label"]: group["rank"] for group in shown["groups"]}
    assert ranks.pop("fedprox") is None and all(ranks.values())
    (said,) = [sentence for sentence in shown["sentences"] if sentence.startswith("fedprox")]
    assert said.startswith("fedprox is not ranked: it lacks personal models. It is drawn with what it has: fedprox")


def test_preparation_is_told_and_does_not_count(tmp_path):
    words = ["algorithm=fedxds", "algorithm.warmup_rounds=2", "rounds=2", "evaluate.personal=none"]
    shown = gather([run(tmp_path / "shared", *words)])
    (group,), (row,) = shown["groups"], shown["runs"]
    assert group["curves"]["global"]["round"] == [1, 2] and group["rounds"]["mean"] == 2
    sent = pq.read_table(tmp_path / "shared" / "bytes.parquet").to_pylist()
    before = [b for b in sent if b["round"] <= 3 and not b["kind"].startswith("evaluation")]
    assert group["preparation"]["rounds"] == 3 and row["preparation"]["bytes"] == sum(
        b["payload"] + b["header"] for b in before
    )
    assert "3 preparatory rounds of fedxds cost traffic and time, but do not count as rounds." in shown["costs"]
    assert shown["headline"].startswith("fedxds, which shares data, reached")


def test_all_measures_are_those_of_the_tables(tmp_path):
    paths = [run(tmp_path / f"{s}", "evaluate.measures=all", f"seed={s}", "rounds=2") for s in (0, 1)]
    (group,), rows = (
        (shown := gather(paths))["groups"],
        [pq.read_table(p / "metrics.parquet").to_pylist() for p in paths],
    )

    def stored(seed: int, **wanted) -> list[float]:
        return [row["value"] for row in rows[seed] if all(row[key] == value for key, value in wanted.items())]

    where = {"round": 2, "client": None, "model": "global"}
    for name in ("balanced_accuracy", "auroc", "ece", "loss"):
        values = [stored(seed, metric=name, **where)[0] for seed in (0, 1)]
        assert group["detailed"]["global"]["pooled"][name]["mean"] == statistics.fmean(values)
    values = [stored(seed, metric="sensitivity/3", **where)[0] for seed in (0, 1)]
    assert group["detailed"]["global"]["classes"]["sensitivity"][3]["mean"] == statistics.fmean(values)
    counts = [sum(stored(seed, metric="confusion/3/3", **where)) for seed in (0, 1)]
    assert group["detailed"]["global"]["confusion"][3][3] == sum(counts)
    look = shown["runs"][0]["evaluations"]["personal after"]
    mine = {"round": 2, "client": 4, "model": "personal after"}
    assert look["more"]["auroc"][4] == stored(0, metric="auroc", **mine)[0]
    own = shown["runs"][0]["detailed"]["personal after"]["sensitivity"][4]
    found = {f"sensitivity/{k}": value for k, value in enumerate(own) if value is not None}
    assert found and found == {r["metric"]: r["value"] for r in rows[0] if r["metric"].startswith("sensitivity/")
                               and all(r[key] == value for key, value in mine.items())}  # fmt: skip
    personal = group["detailed"]["personal after"]["clients"]["auroc"]["mean"]
    assert personal["mean"] == statistics.fmean(
        stored(seed, metric="auroc_mean", model="personal after", round=2)[0] for seed in (0, 1)
    )


def rewrite(path: Path, change) -> None:
    """Other rows in a run's metrics."""
    import pyarrow as pa

    (file,) = (path / "metrics.parquet").glob("*.parquet")
    table = pq.read_table(file)
    pq.write_table(pa.Table.from_pylist([change(row) for row in table.to_pylist()], table.schema), file)


def test_the_embedded_json_is_the_only_source_of_numbers(finished):
    """Two pages about different runs differ in nothing but the JSON and the title."""

    def frame(paths):
        text = page(gather(paths))
        text = re.sub(r'(id="report">).*?(</script>)', r"\1\2", text, flags=re.S)
        return re.sub(r"<title>.*?</title>", "", text)

    assert frame(finished[:1]) == frame(finished[1:])


def test_a_diverged_run_is_written_as_null(copies):
    rewrite(copies[0], lambda row: row | {"value": math.nan} if row["metric"] == "loss" else row)
    shown = embedded(page(gather(copies)))
    assert set(shown["runs"][0]["curves"]["global"]["loss"]) == {None}
    assert groups.spread([0.5, None]) == {"mean": None, "std": None, "count": 2}


def test_long_curves_are_thinned_evenly_with_both_ends():
    assert thinned(range(10), 20) == [*range(10)]
    some = thinned(range(5001), 101)
    assert some == [*range(0, 5001, 50)]


# ---- what may be compared --------------------------------------------------------------------------------------------
def test_different_splits_are_said_loudly_and_not_ranked(finished, tmp_path):
    other = run(tmp_path / "scaffold", "algorithm=scaffold", "partition.seed=1")
    shown = gather([finished[0], other])
    (warning,) = shown["warnings"]
    assert warning.startswith("These runs have different splits (partition.seed differ), and compare only within one.")
    assert "A: fedavg; B: scaffold" in warning and "best" not in shown["headline"]
    assert [sentence[:3] for sentence in shown["sentences"]] == ["A: ", "B: "]
    assert shown["arenas"] == 2 and [group["arena"] for group in shown["groups"]] == ["A", "B"]


def test_seeds_with_splits_of_their_own_are_fair_when_methods_share_them(copies):
    for path in copies:  # the split of a run belongs to its seed
        seed = path.name[-1]
        edit(path / "passport.json", lambda card, seed=seed: card.update(split_hash=f"split of seed {seed}"))
    assert gather(copies)["warnings"] == [] and gather(copies)["arenas"] == 1
    assert "different splits" in gather(copies[:3])["warnings"][0]  # scaffold's second seed is missing


def test_within_a_split_other_differences_are_said_too(finished, copies, tmp_path):
    change(copies[2] / "config.yaml", "lr: 0.01", "lr: 0.02")
    edit(copies[1] / "passport.json", lambda card: card.update(split_hash="another"))
    change(copies[1] / "config.yaml", "is: fedavg", "is: fedprox")
    first, second = gather(copies[:3])["sentences"]
    assert first.startswith("A: ") and first.endswith("Not only the method differs, but also local.lr.")
    assert second.startswith("B: fedprox reached")


def test_different_data_are_said_loudly(copies):
    edit(copies[0] / "passport.json", lambda card: card["data"].update(sha256="other"))
    assert gather([copies[0], copies[2]])["warnings"][0].startswith("These runs have different data")


def test_other_settings_make_other_groups_and_are_named(copies):
    change(copies[1] / "config.yaml", "seed: 1", "seed: 0")
    change(copies[1] / "config.yaml", "lr: 0.01", "lr: 0.02")
    shown = gather(copies[:2])
    assert [group["label"] for group in shown["groups"]] == ["fedavg local.lr=0.01", "fedavg local.lr=0.02"]
    assert shown["settings"]["other"] == ["local.lr"] and shown["settings"]["common"]["rounds"] == 4
    assert shown["sentences"][-1] == "Not only the method differs, but also local.lr."
    assert groups.outermost(["model", "model.width", "rounds"]) == ["model", "rounds"]


def change(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


def test_settings_are_flat_as_they_are_typed():
    nested = {
        "algorithm": {"is": "fedxds", "base": {"is": "fedprox", "mu": 0.1}},
        "uplink": [{"is": "clip", "norm": 1}],
    }
    expected = {"algorithm": "fedxds", "algorithm.base": "fedprox", "algorithm.base.mu": 0.1, "uplink": "clip norm=1"}
    assert flat(nested) == expected


# ---- runs that are not whole -----------------------------------------------------------------------------------------
def test_a_half_finished_run_is_shown_but_not_ranked(finished, tmp_path):
    half = tmp_path / "fedprox"

    class Stop(recorder.Nobody):
        def round(self, progress):
            if progress.round == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate.run(config.read(None, [*SMALL, f"out={half}", "algorithm=fedprox"]), watcher=Stop())
    shown = gather([*finished, half])
    last = shown["runs"][-1]
    assert (last["state"], last["trouble"], last["rounds"]) == ("unfinished", "2 of 4 rounds are done", 2)
    assert shown["groups"][-1]["curves"]["global"]["round"] == [1, 2] and shown["groups"][-1]["complete"] == 0
    assert any("1 of 5 runs is not finished and not ranked" in warning for warning in shown["warnings"])
    assert "fedprox" not in shown["headline"] + " ".join(shown["sentences"])
    assert gather([half])["headline"] == "No run is complete yet"


@pytest.mark.parametrize(
    "name, damage, said",
    [
        ("config.yaml", lambda path: path.write_text("algorithm: {is: ["), "config.yaml is damaged: it is not YAML"),
        ("config.yaml", lambda path: path.write_text("- 1"), "config.yaml is damaged: it names no algorithm"),
        ("config.yaml", lambda path: path.unlink(), "config.yaml is missing"),
        ("passport.json", lambda path: path.unlink(), "passport.json is missing"),
        ("passport.json", lambda path: path.write_text("{"), "passport.json is damaged: it is not JSON"),
        ("passport.json", lambda path: path.write_text("{}"), "KeyError: 'split_hash'"),
        ("result.json", lambda path: path.write_text("[1]"), "damaged"),
        ("label_counts.json", lambda path: path.write_text("[[1, [2]]]"), "label_counts.json is damaged"),
        ("metrics.parquet", lambda path: cut(path), "it is not a whole Parquet file"),
        ("metrics.parquet", lambda path: shutil.rmtree(path), "its tables end after round 0, but result.json says 4"),
        ("bytes.parquet", lambda path: shutil.rmtree(path), "its table of bytes does not reach round 4"),
    ],
)
def test_a_corrupt_run_is_shown_as_such(copies, name, damage, said):
    damage(copies[0] / name)
    shown = embedded(page(gather(copies)))
    assert shown["runs"][0]["state"] == "corrupt" and said in shown["runs"][0]["trouble"]
    assert str(copies[0]) not in shown["runs"][0]["trouble"]
    assert any("1 of 4 runs is corrupt and left out: fedavg-0" in warning for warning in shown["warnings"])
    assert shown["groups"][0]["runs"] == [1]


def cut(folder: Path) -> None:
    for part in folder.glob("*.parquet"):
        part.write_bytes(part.read_bytes()[:-20])


# ---- more than accuracies --------------------------------------------------------------------------------------------
def test_a_run_over_flower_shows_its_bytes_beside_flowers(copies):
    edit(copies[0] / "passport.json", lambda card: card.update(engine="flower", nodes_own_data=True, split_hash=None))
    (copies[0] / "label_counts.json").unlink()
    shown = gather(copies[:1])
    assert shown["runs"][0]["flower"] == {"own_data": True, "moved": None} and shown["splits"] == []
    rows = [{"network-traffic": {"inbound-bytes": n, "outbound-bytes": 2 * n}} for n in (10, 20)]  # resumed once
    (copies[0] / "flower.json").write_text(json.dumps({"flower": rows}))
    assert gather(copies[:1])["runs"][0]["flower"]["moved"] == {"in": 30, "out": 60}
    assert [group["label"] for group in gather(copies[:2])["groups"]] == [
        "fedavg over=Flower",
        "fedavg over=simulation",
    ]


def test_the_split_is_that_of_the_run(finished):
    (split,) = gather(finished)["splits"]
    counts = json.loads((finished[0] / "label_counts.json").read_text())
    assert split["counts"] == counts and split["clients"] == [*range(6)] and len(split["runs"]) == 4
    sizes = np.array(counts).sum(1)
    assert (split["total"]["smallest"], split["total"]["largest"]) == (sizes.min(), sizes.max())
    assert split["total"]["classes"] == (np.array(counts) > 0).sum(1).mean()


def test_spatls_sub_models_are_listed(tmp_path):
    words = ["model=resnet20", "clients=3", "cohort=2", "rounds=1", "local.steps=1", "algorithm.episodes=1"]
    out = run(tmp_path / "spatl", "algorithm=spatl", *words, "evaluate.personal=none")
    (row,) = gather([out])["runs"]
    from fedlens.papers.spatl.tables import sub_models

    shares = ("client", "flops", "parameters", "sent", "bytes")
    expected = [tuple(getattr(one, share) for share in shares) for one in sub_models(out, repeats=0)]
    assert [tuple(one[share] for share in shares) for one in row["sub_models"]] == expected and len(expected) == 2
    assert row["sub_models"][0].keys() == {*shares, "accuracy", "dense", "name"}
    assert all(0 < value < 1 for one in expected for value in one[1:])
    assert page(gather([out])) == page(gather([out]))  # which a measured time would not let it be
    shown = gather([out], latency=True)
    assert all(0 < one["latency"] < 10 for one in shown["runs"][0]["sub_models"])
    assert shown["timed"].endswith("32 images at once, the fastest of 9 passes, on one thread of a CPU.")
    assert not gather([out])["timed"]
    found = CliRunner().invoke(cli.app, ["report", str(out), "--latency"])
    assert found.exit_code == 0 and embedded((out / "report.html").read_text())["timed"] == shown["timed"]


def test_pictures_travel_small_and_the_rest_are_named(copies):
    from PIL import Image

    figures = copies[0] / "figures"
    figures.mkdir(exist_ok=True)
    for name in ("explain", "explain-clients", "audit-gradients", "run"):
        Image.effect_noise((1800, 600), 80).save(figures / f"{name}.png")
    (figures / "explain-weights.png").write_bytes(b"\x89PNG, but not really")
    pictures = gallery.Pictures()
    found = collect(copies[0], "a run", pictures)["pictures"]
    assert [(one["kind"], one["width"]) for one in found] == [("audit", "1100"), ("map", "1100"), ("map", "1100")]
    assert found[0]["about"] == "What an attack recovers, run a run (gradients)"
    assert pictures.left_out == ["a run/figures/explain-weights.png"]
    small = gallery.Pictures(budget=len(found[0]["source"]) + 10)
    assert len(small.of(figures, "a run")) == 1 and len(small.left_out) == 3


# ---- safety ----------------------------------------------------------------------------------------------------------
HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>\u2028&amp;\"'"


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.found.append(tag)


def hostile(path: Path) -> Path:
    """A run that calls everything by markup."""
    edit(path / "passport.json", lambda card: card.update(python=HOSTILE, split_notes=[HOSTILE]))
    edit(path / "passport.json", lambda card: card["data"].update(name=HOSTILE))
    text = (path / "config.yaml").read_text()
    text = text.replace("is: fedavg", f"is: {json.dumps(HOSTILE)}").replace(
        "augment: none", f"augment: {json.dumps(HOSTILE)}"
    )
    (path / "config.yaml").write_text(text)
    (path / "privacy.json").write_text(
        json.dumps({"statements": [], "updates_as_they_are": [HOSTILE], "answers_as_they_are": {HOSTILE: [HOSTILE]}})
    )
    return path.rename(path.with_name("<b>run"))


def test_nothing_that_comes_from_a_run_becomes_markup(copies):
    text = page(gather([hostile(copies[0])]))
    shown = embedded(text)
    assert shown["runs"][0]["method"] == HOSTILE and shown["runs"][0]["name"] == "<b>run"
    tags = Tags()
    tags.feed(text)
    head, body = ["html", "head", *["meta"] * 5, "title", "style"], ["body", "noscript", "script", "script"]
    assert tags.found == [*head, *body]
    assert "hacked=1</script>" not in text and "<img" not in text
    assert "default-src 'none'" in text and "unsafe" not in text


def test_the_page_names_no_address_outside_itself(finished):
    text = page(gather(finished))
    assert set(re.findall(r"(?:https?:)?//[a-z][\w.]+", text)) == {
        "http://www.w3.org"
    }  # the name of SVG, not an address


# ---- the command -----------------------------------------------------------------------------------------------------
def test_the_command_takes_runs_and_folders_of_runs(copies, monkeypatch):
    root = copies[0].parent
    found = CliRunner().invoke(cli.app, ["report", str(root), "--json"])
    assert found.exit_code == 0, found.output
    said = json.loads(found.stdout)
    assert said == {"report": str(root / "report.html"), "bytes": (root / "report.html").stat().st_size}
    assert len(embedded((root / "report.html").read_text())["runs"]) == 4
    monkeypatch.chdir(root.parent)
    found = CliRunner().invoke(cli.app, ["report", "runs/fedavg-0", "runs/fedavg-1", "runs/fedavg-0"])
    assert found.stdout == "report.html\n"
    assert len(embedded(Path("report.html").read_text())["runs"]) == 2  # named twice, shown once
    assert write([root], Path("again/a.html")).read_bytes() == write([root], Path("again/b.html")).read_bytes()


def test_bad_input_is_told_in_a_sentence(tmp_path, finished):
    with pytest.raises(BadInput, match=r"there is no folder .*nowhere; name a run's folder, or one that holds runs"):
        gather([tmp_path / "nowhere"])
    with pytest.raises(BadInput, match=r"holds no run: there is no config\.yaml in it or below it"):
        gather([tmp_path])
    with pytest.raises(BadInput, match=r"--out .* is a folder; name a file such as .*report\.html"):
        write(finished, tmp_path)


def test_thirty_runs_stay_under_five_megabytes(finished, tmp_path):
    paths = [Path(shutil.copytree(finished[n % 4], tmp_path / f"run-{n:02d}")) for n in range(30)]
    for n, path in enumerate(paths):
        text = (path / "config.yaml").read_text()
        (path / "config.yaml").write_text(re.sub(r"\nseed: \d", f"\nseed: {n // 2}", text))
    out = write([tmp_path], tmp_path / "report.html")
    assert out.stat().st_size < 5_000_000
    assert sorted(len(group["runs"]) for group in embedded(out.read_text())["groups"]) == [14, 16]


# ---- style -----------------------------------------------------------------------------------------------------------
# Machado, Oliveira and Fernandes (2009): what people without one kind of cones see, in linear RGB.
SEEN = {
    "all": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(colour: str) -> np.ndarray:
    c = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    from skimage.color import xyz2lab

    to_xyz = [[0.412453, 0.357580, 0.180423], [0.212671, 0.715160, 0.072169], [0.019334, 0.119193, 0.950227]]
    return xyz2lab(np.array(to_xyz) @ np.clip(rgb, 0, 1))


def contrast(a: str, b: str) -> float:
    """WCAG 2.1."""
    low, high = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (a, b))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette, paper", [(style.COLOURS, "#ffffff"), (style.DARK_COLOURS, "#15181c")])
def test_colours_can_be_told_apart_and_seen(palette, paper):
    assert all(contrast(colour, paper) >= 3 for colour in palette)
    for matrix in SEEN.values():
        for a, b in itertools.combinations(palette, 2):
            assert np.linalg.norm(lab(np.array(matrix) @ linear(a)) - lab(np.array(matrix) @ linear(b))) > 10, (a, b)


def test_words_have_contrast_in_light_and_dark():
    css = (Path(groups.__file__).parent / "assets" / "page.css").read_text()
    themes = [
        dict(re.findall(r"--([a-z-]+): (#\w{6})", block))
        for block in re.split("color-scheme: (?:light|dark);", css)[1:4]
    ]
    assert len(themes) == 3 and themes[1] == themes[2]  # dark by preference, dark by choice
    for theme in themes[:2]:
        for ink, paper in [
            ("ink", "paper"),
            ("quiet", "paper"),
            ("quiet", "panel"),
            ("link", "paper"),
            ("alarm", "alarm-paper"),
            ("alarm", "paper"),
        ]:
            assert contrast(theme[ink], theme[paper]) >= 4.5, (ink, paper)
        deepest = mixed(theme["heat"], theme["paper"], 0.66)  # of a heat map, with its number in it
        assert contrast(theme["ink"], deepest) >= 4.5


def mixed(over: str, under: str, share: float) -> str:
    parts = ([int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in (over, under))
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in zip(*parts, strict=True))


def test_every_method_has_its_own_look():
    methods = sorted(ALGORITHMS.keys() - {"finetune"})
    places = {style.place_of(name) for name in methods}
    assert len(places) == len(methods), "give the new method a place in plots/methods.json"
    assert style.place_of("fedavg+ft")[0] == style.place_of("fedavg")[0] and style.place_of(
        "fedavg+ft"
    ) != style.place_of("fedavg")
    assert style.place_of("mine") == style.place_of("mine") and style.dash_of("fedavg") == "-"
    assert style.colour_of("fedsls") == style.COLOURS[1] and style.dash_of("moon") == (0, (7, 3))


def test_fine_tuned_methods_look_like_no_other():
    assert len({style.place_of(name) for name in ("fedavg", "fedavg+ft", "local")}) == 3
    plain = {style.place_of(name) for name in ALGORITHMS.keys() - {"finetune"}}
    assert not plain & {style.place_of(f"{name}+ft") for name in ALGORITHMS}
    assert style.place_of("local")[0] != style.place_of("fedavg")[0]


@pytest.mark.parametrize(
    "method, looks",
    [
        ("fedavg+ft", {"fine-tuned": "fine-tuned"}),
        ("fedavg", {"personal before": "before local training", "personal after": "after local training"}),
    ],
)
def test_the_first_picture_names_clients_and_not_their_ranks(tmp_path, monkeypatch, method, looks):
    folder = RunFolder(run(tmp_path / "run", f"algorithm={method}", "evaluate.personal_every=0"))
    monkeypatch.setattr(figure, "save", lambda figure, path, **_: figure)
    axis = figure.draw_run(folder, tmp_path / "run").axes[2]
    accuracies = client_accuracies(folder.metrics())
    named = [int(label.get_text()) for label in axis.get_xticklabels()]
    assert sorted(named) == [*range(6)] and [text.get_text() for text in axis.get_legend().get_texts()] == [
        *looks.values()
    ]
    for line, look in zip(axis.lines, looks, strict=True):
        assert line.get_ydata().tolist() == [100 * accuracies[look][client] for client in named]
    assert [*axis.lines[0].get_ydata()] == sorted(axis.lines[0].get_ydata())
    style.pyplot().close("all")


def test_figures_are_saved_in_three_kinds_the_same_each_time(tmp_path, every_kind):
    for name in ("a", "b"):
        figure, axis = style.pyplot().subplots()
        axis.plot([0, 1])
        assert style.save(figure, tmp_path / name) == tmp_path / f"{name}.png"
    for kind in (".png", ".svg", ".pdf"):
        assert (tmp_path / f"a{kind}").read_bytes() == (tmp_path / f"b{kind}").read_bytes()
