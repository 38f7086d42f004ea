"""Verdicts and cells on the pages are what claims.yaml and results/data make of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages():
    return script("docs/pages.py")


def run(value, seed=0, words=("algorithm=fedavg",), over=(), row="fedavg"):
    head = {"table": "fedsls/table1", "row": row, "column": "cifar10/0.05", "over": list(over), "seed": seed}
    more = {
        "rounds": 2000,
        "epochs": 1,
        "accuracy_last": value / 100,
        "accuracy_best": value / 100,
        "machine": "a machine",
        "words": list(words),
    }
    return {**head, **more, "value": value}


def test_pages_are_up_to_date(pages):
    stale = [path.name for path, text in pages.pages().items() if path.read_text("utf-8") != text]
    assert not stale, "run `python docs/pages.py`"


def test_a_new_run_fills_its_cells(pages):
    name = ("fedsls/table1", "fedavg", "cifar10/0.05")
    text = "FedAvg {fedsls/table1|fedavg|cifar10/0.05}, at equal sizes {fedsls/table1|fedavg|cifar10-client/0.05}"
    assert pages.filled(text, {}) == "not run"
    assert pages.filled(text, {name: [run(50.0), run(53.0, 1)]}) == "FedAvg 51.5, at equal sizes not run"
    assert pages.filled("{fedsls/table1|fedavg|cifar10/0.05|rounds=9}", {(*name, "rounds=9"): [run(9.0)]}) == "9.0"


def test_stand_ins_never_stand_beside_a_papers_number(pages):
    name = ("fedsls/table1", "fedavg", "cifar10/0.05")
    theirs = pages.cells("fedsls", {name: [run(50.0), run(53.0, 1)]})
    assert "| fedavg | cifar10/0.05 | 2000 x 1 | 2 | 51.50 ± 2.12 | 51.50 (51.5) | 40.99 |" in theirs
    steps = run(50.0) | {"epochs": None, "steps": 10}
    assert "| fedavg | cifar10/0.05 | 2000 x 10 steps | 1 |" in pages.cells("fedsls", {name: [steps]})
    alone = pages.cells("fedsls", {name: [run(50.0, words=("algorithm=fedavg", pages.STAND_IN))]})
    assert "40.99" not in alone and "| fedavg | cifar10/0.05 | 2000 x 1 | 1 | 50.00 | 50.00 (50.0) |  |" in alone
    assert pages.cells("pse", {name: [run(50.0)]}) == "Nothing was run at the paper's full protocol."


def test_cells_name_the_machines_of_their_own_paper(pages):
    here, there = ("fedsls/table1", "fedavg", "cifar10/0.05"), ("fedsls/table1", "fedavg", "cifar10/0.1")
    other = ("pse/table2", "pse", "fashion_mnist/3")
    known = {here: [run(50.0)], other: [run(90.0) | {"machine": "elsewhere"}]}
    assert " runs them; a machine. Global models" in pages.cells("fedsls", known)
    known[there] = [run(60.0) | {"machine": "CPU, fp32"}]
    assert " with `device=cpu`; CPU, fp32: cifar10/0.1; a machine: cifar10/0.05. " in pages.cells("fedsls", known)
    known[here] = [run(50.0), run(50.0, 1)]
    known[("fedsls/table1", "uniform", "cifar10/0.05")] = [run(60.0) | {"machine": "CPU, fp32"}]
    assert "; CPU, fp32: cifar10/0.05 uniform, cifar10/0.1; a machine: cifar10/0.05. " in pages.cells("fedsls", known)


def test_sub_models_have_a_value_for_each_seed(pages):
    about = {"model": "resnet20", "paper": True, "updates": 40}
    whole = {**about, "choice": "whole", "cut out": 80.0, "after an epoch": 81.0}
    agent = {
        **about,
        "choice": "agent",
        "flops": 0.795,
        "cut out": 70.0,
        "norms anew": 71.0,
        "after an epoch": 9.0,
    }
    rows = [{**agent, "seed": 5, "cut out": 60.0}, {**agent, "seed": 4}, {**whole, "seed": 4}, {**whole, "seed": 5}]
    rows += [{**agent, "seed": 6, "paper": False}, {**agent, "seed": 5, "choice": "by norm"}]
    rows += [{**agent, "model": "resnet18 stand-in", "seed": 0, "cut out": 30.0}]
    assert pages.submodels(rows).splitlines()[2:] == [
        "| ResNet-20 | whole model | 4, 5 | 100 | 80.0 / 80.0 |  | 81.0 / 81.0 |",
        "| ResNet-20 | agent, 40 updates | 4, 5 | 79.5 / 79.5 | 70.0 / 60.0 | 71.0 / 71.0 | 9.0 / 9.0 |",
        "| ResNet-20 | smallest norms | 5 | 79.5 | 70.0 | 71.0 | 9.0 |",
        "| ResNet-18, stand-in weights | agent, 40 updates | 0 | 79.5 | 30.0 | 71.0 | 9.0 |",
    ]


def test_progress_says_what_is_done_and_what_waits(pages):
    wanted = pages.queue().Wanted
    asked = [wanted("fedsls/table1", row, "cifar10/0.05", (), seed) for row in ("fedavg", "uniform") for seed in (0, 1)]
    asked += [wanted("fedsls/table1", "fedavg", "cifar10/0.05", ("rounds=9", "evaluate.last=1"), 0, required=False)]
    ran = {("fedsls/table1", "fedavg", "cifar10/0.05"): [run(50.0, 1) | {"seconds": 12.3}]}
    text = pages.progress(asked, ran)
    assert text.startswith("1 of 4 required, 0 of 1 optional.")
    assert "| `fedsls/table1` | fedavg | cifar10/0.05 | 1 | 2000 x 1 | 50.0 | 12 | a machine |" in text
    assert text.splitlines()[-3:] == [
        "| `fedsls/table1` | cifar10/0.05 | 0 | required | fedavg |",
        "| `fedsls/table1` | cifar10/0.05 | 0, 1 | required | uniform |",
        "| `fedsls/table1` | cifar10/0.05 `rounds=9` | 0 | optional | fedavg |",
    ]


def test_verdicts_are_counted(pages):
    claims = {name: {"claims": [{"verdict": "holds"}, {"verdict": "not tested"}]} for name in "ab"}
    said = "4 claims: holds 2, holds partly 0, not confirmed 0, does not hold 0, not tested 2."
    assert pages.counted(claims) == said


def test_the_text_counts_refuted_claims_as_the_table_does(pages):
    text = (ROOT / "docs" / "papers.md").read_text("utf-8")
    counts = re.search(r"does not hold (\d+)", text)
    said = re.search(r"(\w+) claims do not hold: (\w+) by .*?, (\w+) by .*?, (\w+) by .*?, (\w+) by", text)
    numbers = "none one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
    numbers = f"{numbers} seventeen eighteen nineteen twenty".split()
    whole, *parts = (numbers.index(word.lower()) for word in said.groups())
    assert whole == sum(parts) == int(counts.group(1))


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "docs/papers.md"])
def test_pages_count_verdicts_as_the_table_does(page):
    table = re.search(r"(\d+) claims: holds (\d+), .*tested \d+\.", (ROOT / "docs/papers.md").read_text("utf-8"))
    assert table is not None
    text = " ".join((ROOT / page).read_text("utf-8").split())
    verdicts = r"(\d+) hold partly, (\d+) were not confirmed, (\d+) do not hold, (\d+) were not tested"
    said = re.search(rf"[Oo]f (\d+) claims (?:[^.:]* )?none was fully confirmed: {verdicts}", text)
    assert said is not None and table.group(2) == "0"
    assert [*said.groups()] == re.findall(r"\d+", table.group().replace("holds 0, ", ""))


def test_what_is_no_verdict_is_refused(pages):
    claim = dict.fromkeys(("claim", "share", "paper", "ours", "why"), "x") | {"verdict": "surely"}
    with pytest.raises(AssertionError, match="'surely' is no verdict"):
        pages.verdicts({"name": "X", "page": "x.md", "claims": [claim]}, {})


def test_marks_must_be_there(pages):
    with pytest.raises(SystemExit, match="no <!-- cells"):
        pages.replaced("text", "cells", "body")
