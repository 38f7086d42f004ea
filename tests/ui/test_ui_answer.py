"""The answer on the live page: the report's and the command line's, about the runs that are in question."""

import json
import re
import shutil
from pathlib import Path
from urllib.parse import urlencode

import pytest

from browser import needs_chromium
from fedlens.compare.run import compare_existing
from fedlens.report import collect as collected
from fedlens.report.page import gather
from fedlens.ui import answer
from fedlens.ui.answer import LiveAnswers
from live_page import SIZES, calm, opened, quiet, serving
from test_report import run, with_accuracies
from test_ui import got

CLOSE = 0.80, 0.84, 0.82, 0.81, 0.83, 0.825, 0.50, 0.53, 0.51
CLEAR = 0.60, 0.61, 0.62, 0.81, 0.83, 0.825, 0.50, 0.53, 0.51
SAID = "document.querySelector('#answer > h2').textContent"


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("one") / "run", "rounds=2")


@pytest.fixture
def runs(one, tmp_path) -> list[Path]:
    """Three methods, three seeds with a split of their own each; a test sets their accuracies."""
    made = []
    for method in ("fedavg", "scaffold", "fedprox"):
        for seed in range(3):
            path = Path(shutil.copytree(one, tmp_path / "runs" / f"{method}-{seed}"))
            text = (path / "config.yaml").read_text().replace("is: fedavg", f"is: {method}", 1)
            (path / "config.yaml").write_text(re.sub(r"\nseed: \d", f"\nseed: {seed}", text))
            passport = json.loads((path / "passport.json").read_text())
            (path / "passport.json").write_text(json.dumps(passport | {"split_hash": f"split {seed}"}))
            made.append(path)
    return made


def named(paths: list[Path]) -> dict[str, Path]:
    return {path.name: path for path in paths}


@pytest.mark.parametrize("values", [CLOSE, CLEAR], ids=["close", "clear"])
def test_it_is_the_reports_and_the_command_lines(runs, values):
    with_accuracies(runs, *values)
    said, shown = LiveAnswers().about(named(runs)), gather(runs)
    parts = ("headline", "sentences", "costs", "privacy", "tiles", "warnings", "listed")
    assert {part: said[part] for part in parts} == {part: shown[part] for part in parts}
    rows = compare_existing(runs).rows("")
    best = {row["method"] for row in rows if row["is_close"] or row is rows[0]}
    assert {name.partition("-")[0] for name in said["marks"]} == best
    assert set(said["marks"].values()) == {"among the best" if len(best) > 1 else "best"}


def test_seeds_that_not_all_have_finished_are_left_out_and_counted(runs):
    with_accuracies(runs, *CLEAR)
    whole, part = LiveAnswers().about(named(runs[:2] + runs[3:5])), LiveAnswers().about(named(runs[:3] + runs[3:5]))
    assert part["headline"] == whole["headline"] and not part["listed"] and not part["warnings"]
    assert part["sentences"][0] == "1 run is left out: not all methods have finished the same seeds."
    apart = LiveAnswers().about(named(runs[:2] + runs[5:6]))  # none in common: told one by one
    assert apart["listed"] and len(apart["brief"]) == 2 and apart["warnings"]


def test_what_ranks_is_told_where_it_is_not_the_global_model(tmp_path):
    paths = [run(tmp_path / name, f"algorithm={name}", "rounds=2") for name in ("fedavg", "local")]
    said, rows = LiveAnswers().about(named(paths)), compare_existing(paths).rows("")
    assert said["scored"] == "personal models after local training" and "(personal models)" in said["headline"]
    assert said["scores"] == {row["method"]: row["mean"] for row in rows}
    assert LiveAnswers().about(named(paths[:1]))["scores"] == {}


def test_a_run_is_read_again_when_its_files_change(runs, monkeypatch):
    read, answers = [], LiveAnswers()
    monkeypatch.setattr(answer, "collect", lambda path, *rest: read.append(path.name) or collected.collect(path, *rest))
    answers.about(named(runs[:2]))
    assert "not tested" in answers.about(named(runs[:2]))["tiles"]["privacy"] and len(read) == 2
    (runs[0] / "audit.json").write_text(json.dumps({"verdicts": []}))
    assert "not tested" not in answers.about(named(runs[:2]))["tiles"]["privacy"]
    assert read == ["fedavg-0", "fedavg-1", "fedavg-0"]
    monkeypatch.setattr(answer, "_MOST", 1)
    answers.about(named(runs[:2]))
    assert len(answers._read) == 1


def test_of_many_runs_it_says_how_far_it_is_and_gets_on(runs, monkeypatch):
    monkeypatch.setattr(answer, "_PATIENCE", -1.0)
    answers = LiveAnswers()
    assert answers.about(named(runs)) == {"read": 1}
    monkeypatch.setattr(answer, "_PATIENCE", 60.0)
    assert "headline" in answers.about(named(runs))


def test_a_damaged_run_costs_itself_alone(runs):
    next((runs[8] / "metrics.parquet").iterdir()).write_bytes(b"PAR1")
    said = LiveAnswers().about(named(runs))
    assert said["headline"] and any("corrupt and left out: fedprox-2" in words for words in said["warnings"])


def test_the_server_answers_by_names_alone(runs):
    with serving(runs[0].parent) as server:
        words = urlencode([("run", path.name) for path in runs])
        assert got(server, f"/answer?{words}")["headline"] == LiveAnswers().about(named(sorted(runs)))["headline"]


# ---- in a browser ----------------------------------------------------------------------------------------------------
@needs_chromium
@pytest.mark.browser
@pytest.mark.parametrize("size", SIZES)
def test_who_won_is_it_safe_and_what_did_it_cost_on_the_first_screen(browser, runs, size):
    with_accuracies(runs, *CLEAR)
    bottom = "document.querySelector('{}').getBoundingClientRect().bottom"
    with serving(runs[0].parent) as server, opened(browser, server, size) as page:
        assert page.evaluate(SAID).startswith("scaffold was best with 82.2")
        assert "not a ranking" in page.evaluate("document.querySelector('#order').textContent")
        for part in ("#result", "#safety", "#cost"):
            assert page.evaluate(bottom.format(f"{part} .big")) < SIZES[size][1], part
        assert page.evaluate("document.querySelectorAll('.runs .mark:not([hidden])').length") == 0
        page.click("[data-value=method]")
        marks = "[...document.querySelectorAll('.runs .mark:not([hidden])')].map((e) => e.textContent)"
        assert page.evaluate(marks) == ["best"]
        page.click("[data-sort=accuracy]")
        assert page.evaluate("document.querySelector('#order').hidden") and quiet(page, server)


@needs_chromium
@pytest.mark.browser
def test_the_answer_is_about_what_is_found_or_ticked_and_follows_what_changes(browser, runs):
    with_accuracies(runs, *CLEAR)
    with serving(runs[0].parent) as server, opened(browser, server) as page:
        page.evaluate("(() => { const s = document.querySelector('.search'); s.value = '-scaffold';"
                      "s.dispatchEvent(new Event('input')); })()")  # fmt: skip
        page.until(f"{SAID}.startsWith('Of the runs shown: fedavg was best')")
        for name in ("fedavg-1", "fedprox-1"):
            calm(page)
            page.click(f"input[aria-label='Compare {name}']")
        page.until(f"{SAID}.startsWith('Of the ticked runs: fedavg is ahead')")
        privacy = "document.querySelector('#safety .big').textContent"
        assert page.evaluate(privacy) == "fedavg, fedprox: unprotected updates; none attacked"
        (runs[1] / "audit.json").write_text(json.dumps({"verdicts": []}))
        page.until(f"{privacy} === 'fedavg, fedprox: unprotected updates; fedprox not attacked'")
        page.click("#clear")
        page.until(f"{SAID}.startsWith('Of the runs shown: fedavg was best')")
        for path in runs[6:]:
            shutil.rmtree(path)
        page.until(f"{SAID}.startsWith('Of the runs shown: fedavg reached')")
        assert quiet(page, server)


@needs_chromium
@pytest.mark.browser
def test_on_a_phone_the_numbers_that_rank_are_whole(browser, tmp_path):
    """Without scrolling: the mean that ranks and the last accuracy."""
    assert_whole(browser, tmp_path, "closing")


@needs_chromium
@pytest.mark.browser
def test_on_a_phone_the_personal_accuracy_that_ranks_is_whole(browser, tmp_path):
    run(tmp_path / "local/seed-0", "algorithm=local")
    assert_whole(browser, tmp_path, "ranked")


def assert_whole(browser, tmp_path, ranking: str) -> None:
    for seed in (0, 1):
        run(tmp_path / f"a-longer-name/seed-{seed}", "rounds=8", f"seed={seed}")
    with serving(tmp_path) as server, opened(browser, server, "phone") as page:
        page.until(f"document.querySelector('[data-sort={ranking}]') !== null")
        for group in ("", "method"):
            page.click(f"[data-value='{group}']")
            for column in (ranking, "accuracy"):
                right = f"document.querySelector('[data-sort={column}]').closest('th').getBoundingClientRect().right"
                assert page.evaluate(right) <= SIZES["phone"][0], (group, column)
