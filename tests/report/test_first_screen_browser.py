"""The first screen of a report in a real Chromium: its numbers are those of the chart, and a phone has all answers."""

from pathlib import Path

import pytest

from browser import Chromium, needs_chromium
from fedlens.report.page import write
from test_report import embedded, run, with_accuracies

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def browser():
    with Chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    """Three methods, the first two of them too near to be told apart."""
    root = tmp_path_factory.mktemp("runs")
    names = [(method, seed) for method in ("fedavg", "scaffold", "fedprox") for seed in range(3)]
    runs = [
        run(root / f"{name}-{seed}", f"algorithm={name}", f"seed={seed}", "evaluate.last=2") for name, seed in names
    ]
    return write(with_accuracies(runs, 0.80, 0.84, 0.82, 0.81, 0.83, 0.825, 0.50, 0.53, 0.51), root / "report.html")


def opened(browser: Chromium, report: Path, *size: int, phone: bool = False):
    page = browser.open(report.as_uri(), *size, phone=phone)
    page.until("document.querySelectorAll('#curves svg polyline').length > 0")
    return page


@pytest.mark.parametrize("size", [(390, 844), (360, 740)], ids=str)
def test_a_phone_has_verdict_safety_and_cost_on_its_first_screen(browser, report, size):
    with opened(browser, report, *size, phone=True) as page:
        for part in ("h1", "#result", "#safety", "#cost"):
            assert page.evaluate(f"document.querySelector('{part}').getBoundingClientRect().bottom") < size[1], part
        said = "[...document.querySelectorAll('.cell .big')].map((e) => e.textContent)"
        assert page.evaluate(said) == [
            embedded(report.read_text())["tiles"][name] for name in ("result", "privacy", "cost")
        ]
        assert page.evaluate("[...document.querySelectorAll('.cell details')].every((e) => !e.open)")
        assert page.evaluate("document.querySelectorAll('.cell li').length") > 4  # one touch away
        page.resize(1280, 800)
        page.until("document.querySelectorAll('#result > ul > li').length === 3")
        assert page.errors == []


def test_the_headlines_numbers_stand_at_the_end_of_the_first_chart(browser, report):
    shown = embedded(report.read_text())
    with opened(browser, report, 1400, 900) as page:
        ends = page.evaluate("[...document.querySelectorAll('#curves .chart text.name.end')].map((e) => e.textContent)")
        assert sorted(ends) == sorted(f"{g['label']} mean {100 * g['rank']['mean']:.1f} %" for g in shown["groups"])
        best = max(group["rank"]["mean"] for group in shown["groups"])
        assert f"{100 * best:.1f}" in shown["headline"] and "(mean of rounds 3 and 4)" in shown["headline"]
        chart = "[...document.querySelectorAll('#curves .chart text')].map((e) => e.textContent)"
        assert "└┘ ranked by mean of rounds 3 and 4" in page.evaluate(chart)
        assert "those that rank: mean of rounds 3 and 4." in page.evaluate(
            "document.querySelector('#curves').textContent"
        )


def test_the_table_marks_alike_what_the_headline_cannot_tell_apart(browser, report):
    assert embedded(report.read_text())["headline"].startswith("scaffold and fedavg cannot be told apart")
    with opened(browser, report, 1400, 900) as page:
        heads = page.evaluate("[...document.querySelectorAll('#comparison thead th')].map((e) => e.textContent)")
        at = heads.index("global model (mean of rounds 3 and 4), %")
        rows = "[...document.querySelectorAll('#comparison tbody tr')]"
        marked = (
            f"{rows}.filter((e) => e.children[{at}].className.includes('best')).map((e) => e.children[0].textContent)"
        )
        assert page.evaluate(marked) == ["scaffold", "fedavg"]
        assert "*" not in page.evaluate("document.querySelector('#comparison').textContent")


def test_who_was_not_attacked_is_not_called_safe(browser, report):
    with opened(browser, report, 1400, 900) as page:
        said = page.evaluate("document.querySelector('#safety').textContent")
        assert "none attacked" in said and "audited" not in said
