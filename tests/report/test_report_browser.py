"""The report in a real Chromium: what people see, point at, sort, copy and print."""

import csv
import io
import json
import shutil
import time
from itertools import pairwise
from pathlib import Path

import pytest

from browser import Chromium, axe, needs_axe, needs_chromium
from fedlens.audit.attack import LEGEND
from fedlens.report.page import write
from test_report import embedded, hostile, run

pytestmark = needs_chromium
SIZES = {"desktop": (1280, 800, False), "phone": (360, 740, True)}


@pytest.fixture(scope="module")
def browser():
    with Chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    words = [("fedavg", 0), ("fedavg", 1), ("scaffold", 0), ("fedprox", 0)]
    return [run(root / f"{method}-{seed}", f"algorithm={method}", f"seed={seed}") for method, seed in words]


@pytest.fixture(scope="module")
def report(runs) -> Path:
    """With a privacy statement that has details, an audit and a picture in one run."""
    from PIL import Image

    measured = {name: {"AUC": {"value": v, "low": v - 0.1, "high": v + 0.1}} for name, v in
                (("found", 0.6), ("chance", 0.5), ("undefended", 0.8))}  # fmt: skip
    verdict = {"attack": "loss", "threat": "sees models", "verdict": "Leaks in part.", "decisive": "AUC", "notes": []}
    (runs[0] / "audit.json").write_text(json.dumps({"verdicts": [verdict | measured], "skipped": {"lira": "no time"}}))
    statement = {"release": "uploads", "mechanism": "Gaussian", "unit": "client", "adjacency": "replace", "delta": 1e-5}
    statement |= {"sensitivity": "2", "epsilon": 3.5, "holds": True, "because": "", "randomness": "seed"}
    statement |= {"not_covered": ["weights"]}
    statement |= {"details": {"several_images": {"10": 2.5, "100": None}, "budget": None, "spent": [1, 2]}}
    said = {"statements": [statement], "updates_as_they_are": [], "answers_as_they_are": {}}
    (runs[0] / "privacy.json").write_text(json.dumps(said))
    (runs[0] / "figures").mkdir(exist_ok=True)
    Image.effect_noise((600, 200), 60).save(runs[0] / "figures" / "explain.png")
    return write(runs, runs[0].parent / "report.html")


def opened(browser: Chromium, report: Path, size: str = "desktop", dark: bool = False):
    width, height, phone = SIZES[size]
    page = browser.open(report.as_uri(), width, height, dark=dark, phone=phone)
    page.until("document.querySelectorAll('#curves svg polyline').length > 0")
    return page


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_the_page_is_whole_on_every_screen(browser, report, size, dark):
    with opened(browser, report, size, dark) as page:
        assert page.evaluate("document.querySelectorAll('#curves svg polyline').length") == 3
        for section in ("clients", "bytes", "split", "audits"):
            page.until(f"document.querySelector('#{section} .chart svg') !== null")
        titles = page.evaluate("[...document.querySelectorAll('section h2')].map((e) => e.textContent)")
        assert titles == ["Comparison", "Clients", "Bytes", "Who owns what", "Privacy", "Audits",
                          "What models look at", "Runs", "Configuration", "Environment"]  # fmt: skip
        assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0], "it can be scrolled sideways"
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(21, 24, 28)" if dark else "rgb(255, 255, 255)")
        assert page.evaluate("document.querySelector('h1').getBoundingClientRect().bottom < innerHeight")
        assert page.errors == [] and [a for a in page.requests if not a.startswith(("file:", "data:"))] == []


def test_the_first_screen_has_the_answer_and_the_chart(browser, report):
    with opened(browser, report) as page:
        assert (
            page.evaluate("document.querySelector('h1').textContent") == embedded(report.read_text())["headline"] + "."
        )
        box = page.evaluate("document.querySelector('#curves .chart svg').getBoundingClientRect().toJSON()")
        assert box["top"] + box["height"] / 2 < 800
        cells = page.evaluate("[...document.querySelectorAll('#answer .cell h2')].map((e) => e.textContent)")
        assert cells == ["Result", "Privacy", "Cost"]
        tiles = page.evaluate("[...document.querySelectorAll('#answer .big')].map((e) => e.textContent)")
        assert tiles == [embedded(report.read_text())["tiles"][name] for name in ("result", "privacy", "cost")]


def test_the_button_changes_light_and_dark(browser, report):
    with opened(browser, report) as page:
        page.click("#theme")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 28)"
        page.click("#theme")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_pointing_and_arrow_keys_tell_values(browser, report):
    shown = embedded(report.read_text())
    last = {g["label"]: f"{100 * g['accuracy']['global']['mean']:.1f} %" for g in shown["groups"]}
    with opened(browser, report) as page:
        tip = "(document.querySelector('#curves .tip') || {}).innerText"
        assert page.evaluate(tip) is None
        page.hover("#curves .chart svg polyline", 1.0, 0.5)
        said = page.evaluate(tip)
        assert "rounds: 4" in said and all(value in said for value in last.values())
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
        page.until("document.querySelector('#curves .tip') === null")
        page.evaluate("document.querySelector('#curves .chart svg').focus()")
        page.press("ArrowRight")
        assert "rounds: 1" in page.evaluate(tip)
        page.press("End")
        assert "rounds: 4" in page.evaluate(tip)
        page.press("Escape")
        assert page.evaluate(tip) is None
        page.hover("#clients .chart circle.client")
        assert page.evaluate("document.querySelectorAll('#clients circle.chosen').length") == 4  # one client, four runs
        assert page.errors == []


def test_curves_go_over_bytes_and_seconds_and_methods_can_be_hidden(browser, report):
    with opened(browser, report) as page:
        for axis, words in (("bytes", "MB"), ("seconds", " s")):
            page.click(f"#curves button[data-value={axis}]")
            page.until(f"[...document.querySelectorAll('#curves text')].some((e) => e.textContent.endsWith('{words}'))")
            assert page.evaluate(f"document.querySelector('#curves button[data-value={axis}]').ariaPressed") == "true"
        page.click("#curves .chip")
        page.until("document.querySelectorAll('#curves .chart polyline').length === 2")
        page.evaluate("(() => { const s = document.querySelector('#curves select'); s.value = 'personal after';"
                      "s.dispatchEvent(new Event('change')); })()")  # fmt: skip
        page.until("document.querySelector('#curves .chart svg')?.ariaLabel.includes('after local training')")
        assert page.errors == []


def test_tables_sort_by_value(browser, report):
    shown = embedded(report.read_text())
    accuracy = {group["label"]: group["rank"]["mean"] for group in shown["groups"]}
    rows = "[...document.querySelectorAll('#comparison tbody th')].map((e) => e.textContent)"
    header = "#comparison thead th:nth-child(3)"
    with opened(browser, report) as page:
        downwards = sorted(accuracy, key=lambda label: -accuracy[label])
        assert page.evaluate(rows) == downwards  # as the headline ranks
        page.click("#comparison thead th:nth-child(1) button")
        assert page.evaluate(rows) == sorted(accuracy)
        page.click(f"{header} button")
        assert page.evaluate(rows) == downwards
        assert page.evaluate(f"document.querySelector('{header}').ariaSort") == "descending"
        page.click(f"{header} button")
        assert page.evaluate(rows) == downwards[::-1]
        assert page.evaluate(f"document.querySelector('{header}').ariaSort") == "ascending"


def test_tables_are_copied_as_latex_markdown_and_csv(browser, report):
    shown = embedded(report.read_text())
    with opened(browser, report) as page:
        browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])

        def copied(kind: str) -> str:
            page.click(f"#comparison button[data-copy={kind}]")
            page.until(f"document.querySelector('#comparison [role=status]').textContent === 'Copied as {kind}.'")
            return page.evaluate("navigator.clipboard.readText()")

        rows, column = [*csv.DictReader(io.StringIO(copied("CSV")))], "global model, %"
        for row in rows:
            group = next(group for group in shown["groups"] if group["label"] == row["method"])
            assert float(row[column]) == group["rank"]["mean"]
            assert int(float(row["traffic"])) == group["bytes"]["mean"] and int(row["runs"]) == len(group["runs"])
            deviation = group["accuracy"]["global"]["std"]
            assert row[f"{column}, std"] == "" if deviation is None else float(row[f"{column}, std"]) == deviation
        markdown = copied("Markdown").splitlines()
        assert len(markdown) == 5 and markdown[0].startswith("| method | runs |") and set(markdown[1]) == set("| -:")
        best = max(group["rank"]["mean"] for group in shown["groups"])
        latex = copied("LaTeX")
        assert f"\\textbf{{{100 * best:.1f}" in latex and "global model, \\%" in latex and "\\begin{tabular}" in latex
        assert latex.count("\\\\\n") == 4 and page.errors == []


def test_keys_reach_everything_and_headings_are_in_order(browser, report):
    with opened(browser, report) as page:
        levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map((e) => +e.tagName[1])")
        assert levels[0] == 1 and levels.count(1) == 1
        assert all(after <= before + 1 for before, after in pairwise(levels))
        assert page.evaluate("[...document.images].every((e) => e.alt.length > 10)") and page.evaluate(
            "document.images.length"
        )
        assert page.evaluate(
            "[...document.querySelectorAll('.chart svg')].every((e) => e.getAttribute('aria-label').length > 20)"
        )
        assert page.evaluate(
            "[...document.querySelectorAll('button, select')].every((e) => (e.ariaLabel || e.textContent).trim())"
        )
        page.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        for _ in range(4):
            page.press("Tab")
            assert page.evaluate("getComputedStyle(document.activeElement).outlineWidth") == "3px"
        page.evaluate("document.querySelector('#pictures button').focus()")
        page.press("Enter")
        page.until("document.querySelector('dialog[open] img') !== null")
        page.press("Escape")
        page.until("document.querySelector('dialog') === null")


def test_the_first_chart_begins_at_zero_and_marks_every_evaluation(browser, report):
    with opened(browser, report) as page:
        assert page.evaluate("document.querySelector('#curves .x-tick').textContent") == "0"
        assert page.evaluate("document.querySelectorAll('#curves .marks circle').length") == 3 * 4
        shown = "document.querySelectorAll('#curves .band.shown').length"
        assert page.evaluate(shown) == 0 and page.evaluate("document.querySelectorAll('#curves .whisker').length") == 4
        page.hover("#curves .chart svg polyline.line", 1.0, 0.05)
        page.until(f"{shown} <= 1 && document.querySelectorAll('#curves .line.chosen').length === 1")
        ends = page.evaluate("[...document.querySelectorAll('#curves .chart text.name')].map((e) => e.textContent)")
        ends = [words.split()[0] for words in ends]
        assert sorted(ends) == ["fedavg", "fedprox", "scaffold"] and page.errors == []


def test_names_stay_at_their_lines(browser, report):
    """As near to their ends as rows of text allow: three lines that end within a row are two rows apart at most."""
    with opened(browser, report) as page:
        gaps = page.evaluate("""(() => { const marks = [...document.querySelectorAll('#curves .marks circle')];
            const at = {}; for (const dot of marks) at[dot.getAttribute('class')] = dot.cy.baseVal.value;
            const ends = Object.values(at).sort((a, b) => a - b);
            const texts = [...document.querySelectorAll('#curves .chart text.name')];
            const names = texts.map((e) => e.y.baseVal[0].value - 4);
            return names.sort((a, b) => a - b).map((y, n) => Math.abs(y - ends[n])); })()""")
        assert len(gaps) == 3 and max(gaps) <= 31


def test_one_evaluation_is_bars_and_clients_and_no_lone_dot(browser, tmp_path):
    alone = run(tmp_path / "alone", "evaluate.every=0", "evaluate.personal_every=0")
    with browser.open(write([alone], tmp_path / "alone.html").as_uri(), 1280, 800) as page:
        page.until("document.querySelectorAll('#curves .level').length === 1")
        assert page.evaluate("document.querySelectorAll('#curves circle.client').length") == 6
        assert page.evaluate("document.querySelectorAll('#curves .marks circle').length") == 0 and page.errors == []
        assert page.evaluate("document.querySelector('#curves .choice').offsetHeight") == 0  # of axes, which bars lack
        assert "The global model was evaluated once." in page.evaluate("document.querySelector('#curves').textContent")


def test_the_headlines_measure_is_drawn_first_and_training_beside_it(browser, tmp_path):
    """Personal models are ranked, but evaluated once: bars of them, then curves of the global model."""
    for method in ("fedavg", "fedper"):
        run(tmp_path / "runs" / method, f"algorithm={method}", "evaluate.personal_every=0")
    out = write([tmp_path / "runs"], tmp_path / "report.html")
    with browser.open(out.as_uri(), 1280, 800) as page:
        page.until("document.querySelectorAll('#levels .level').length === 2")
        page.until("document.querySelectorAll('#curves .line').length > 0")
        assert "personal models after local training" in page.evaluate(
            "document.querySelector('#levels h2').textContent"
        )
        said = page.evaluate("document.querySelector('#levels figcaption').textContent")
        assert said == "Personal models after local training were evaluated once."
        assert embedded(out.read_text())["measure"] == "personal after"
        said = page.evaluate("document.querySelector('#curves figcaption').textContent")
        assert "fedper lacks this model and is drawn with what it has: personal, after training." in said
        assert page.evaluate("document.querySelectorAll('#curves circle.hollow').length") == 1 and page.errors == []


def test_nothing_is_shown_unformatted_or_before_it_is_asked_for(browser, report):
    with opened(browser, report) as page:
        text = page.evaluate("document.body.textContent")
        assert "[object" not in text.partition('"version"')[0] + page.evaluate(
            "document.querySelector('main').textContent"
        )
        facts = page.evaluate("[...document.querySelectorAll('#privacy dt')].map((e) => e.textContent)")
        assert "several images" in facts and "budget" not in facts  # which nobody set
        assert page.evaluate("[...document.querySelectorAll('#privacy dd')].map((e) => e.textContent)").count("–") == 0
        assert page.evaluate("document.querySelectorAll('#configuration details[open]').length") == 0
        assert page.evaluate("document.querySelectorAll('#configuration > dl').length") == 0
        cells = (
            "[...document.querySelectorAll('{} tbody tr')].map((r) => [...r.cells].slice(1).map((c) => c.textContent))"
        )
        rows = page.evaluate(cells.format("#configuration"))
        assert rows and all(len(set(row)) > 1 for row in rows)
        assert all(set(row) - {"–", ""} for row in page.evaluate(cells.format("section")))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@needs_axe
def test_axe_finds_nothing(browser, report, size, dark):
    with opened(browser, report, size, dark) as page:
        page.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
        passed, found = axe(page)
        assert passed > 15 and found == []


@pytest.mark.parametrize("chosen", [False, True], ids=["by the system", "by the button"])
def test_a_downloaded_chart_is_dark_on_white_though_the_page_is_not(browser, report, chosen):
    """Colours of the kept picture: those that a light page gives, letter by letter."""
    kept = "standalone(document.querySelector('#curves .chart svg'), 'about').text"
    theme = "[document.documentElement.dataset.theme ?? '', getComputedStyle(document.body).backgroundColor]"
    with opened(browser, report) as page:
        light = page.evaluate(kept)
        assert "<rect width" in light and 'fill="#ffffff"' in light
    with opened(browser, report, dark=not chosen) as page:
        if chosen:
            page.click("#theme")
        before = page.evaluate(theme)
        assert before == ["dark" if chosen else "", "rgb(21, 24, 28)"]
        assert page.evaluate(kept) == light and page.evaluate(theme) == before and page.errors == []


def test_charts_and_tables_are_downloaded(browser, report, tmp_path):
    from xml.etree import ElementTree

    from PIL import Image

    with opened(browser, report) as page:
        browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))

        def kept(selector: str, name: str) -> Path:
            page.click(selector)
            place, end = tmp_path / name, time.monotonic() + 10
            while not place.exists():
                assert time.monotonic() < end, f"{selector} gave {[*tmp_path.iterdir()]}"
                time.sleep(0.05)
            return place

        root = ElementTree.parse(kept("#curves [data-save=SVG]", "accuracy-over-rounds.svg")).getroot()
        tags = [node.tag.rpartition("}")[2] for node in root.iter()]
        assert tags.count("circle") == 12 and tags.count("polygon") == 0  # no band was shown
        assert not any("class" in node.attrib for node in root.iter())
        line = next(node for node in root.iter() if node.tag.endswith("polyline"))
        assert line.attrib["stroke"].startswith("rgb(") and line.attrib["fill"] == "none"
        with Image.open(kept("#curves [data-save=PNG]", "accuracy-over-rounds.png")) as picture:
            wide = page.evaluate("document.querySelector('#curves .chart svg').viewBox.baseVal.width")
            assert picture.width == 3 * wide and len(picture.convert("RGB").getcolors(1 << 24)) > 50
        rows = [*csv.DictReader(kept("#comparison [data-save=CSV]", "comparison-of-methods.csv").open())]
        assert {row["method"] for row in rows} == {"fedavg", "fedprox", "scaffold"} and page.errors == []


def test_a_leak_and_what_it_recovered_are_in_the_answer(browser, runs, tmp_path):
    from PIL import Image

    leaky = Path(shutil.copytree(runs[3], tmp_path / "leaky"))
    one = {name: {"SSIM": {"value": v, "low": v - 0.01, "high": v + 0.01}} for name, v in
           (("found", 0.7), ("chance", 0.1), ("undefended", 0.9))}  # fmt: skip
    verdict = {
        "attack": "gradients",
        "threat": "",
        "verdict": "Leaks: SSIM 0.7.",
        "decisive": "SSIM",
        "notes": [],
        **one,
    }
    (leaky / "audit.json").write_text(json.dumps({"verdicts": [verdict], "skipped": {}}))
    (leaky / "figures").mkdir(exist_ok=True)
    Image.effect_noise((1200, 300), 60).save(leaky / "figures" / "audit-gradients.png")
    with opened(browser, write([leaky], tmp_path / "report.html")) as page:
        assert "Leaks in an audit" in page.evaluate("document.querySelector('#safety .big').textContent")
        said = page.evaluate("document.querySelector('#safety .alarmed').textContent")
        assert said.endswith("SSIM 0.70 (guessing: 0.10); without defence 0.90.")
        wide = page.evaluate("document.querySelector('#answer .recovered img').clientWidth")
        assert wide > 900 and page.errors == []


def choose(page, selector: str, number: int, value: str) -> None:
    """Another option of the number-th selection there."""
    found = f"document.querySelectorAll('{selector} select')[{number}]"
    page.evaluate(f"{found}.value = '{value}'; {found}.dispatchEvent(new Event('change'))")


def test_all_measures_are_shown_by_class_and_client(browser, tmp_path):
    out = write([run(tmp_path / "all", "evaluate.measures=all")], tmp_path / "report.html")
    with opened(browser, out) as page:
        heads = page.evaluate("[...document.querySelectorAll('#measure-table th button')].map((e) => e.textContent)")
        assert heads[2:] == ["accuracy, %", "balanced accuracy, %", "AUROC, %", "ECE, %", "loss"]
        page.until("document.querySelectorAll('#measures .confusion .cell').length === 100")
        first = "document.querySelectorAll('#measures .table')[1]"
        assert page.evaluate(f"{first}.querySelectorAll('tbody tr').length") == 10  # classes
        choose(page, "#measures", 1, "1")  # personal models
        page.evaluate("document.querySelector('#measures details').open = true")
        page.until("document.querySelectorAll('#measures details .cell').length > 6")
        choose(page, "#clients", 1, "auroc")
        words = "[...document.querySelectorAll('#clients text')].map((e) => e.textContent)"
        page.until(f"{words}.includes('AUROC of each client, %')")
        assert page.errors == []


def test_wide_tables_say_that_they_go_on(browser, report):
    with opened(browser, report, "phone") as page:
        cue = "getComputedStyle(document.querySelector('#comparison .cue')).display"
        page.until(f"{cue} !== 'none'")
        assert page.evaluate("document.querySelector('#comparison .wrap').className") == "wrap more-right"
        page.evaluate("document.querySelector('#comparison .scroll').scrollTo(9999, 0)")
        page.until("document.querySelector('#comparison .wrap').className === 'wrap more-left'")


def test_it_prints(browser, report):
    with opened(browser, report, dark=True) as page:
        pdf = page.pdf()
        assert pdf.startswith(b"%PDF") and 2 <= pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page ") <= 20
        page.call("Emulation.setEmulatedMedia", media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
        assert page.errors == []


def test_the_columns_of_audits_are_explained(browser, report):
    with opened(browser, report) as page:
        heads = page.evaluate("[...document.querySelectorAll('#audits thead th')].map((e) => e.textContent.trim())")
        said = page.evaluate("[...document.querySelectorAll('#audits > ul > li')].map((e) => e.textContent)")
        assert said == [f"{name}: {meaning}." for name, meaning in LEGEND.items()]
        assert [head for head in heads if any(head.startswith(name) for name in LEGEND)] == heads[3:6]


def test_own_models_of_any_name_stand_in_one_table(browser, tmp_path):
    for method in ("fedavg+ft", "local", "fedavg"):
        run(tmp_path / "runs" / method, f"algorithm={method}")
    out = write([tmp_path / "runs"], tmp_path / "report.html")
    groups = {group["label"]: group for group in embedded(out.read_text())["groups"]}
    cells = "[...document.querySelectorAll('{} tbody tr')].map((r) => [...r.cells].map((c) => c.innerText.trim()))"
    with browser.open(out.as_uri(), 1280, 800) as page:
        page.until("document.querySelectorAll('#curves svg').length > 0")
        rows = page.evaluate(cells.format("#clients"))
        assert {row[0]: row[1] for row in rows} == {label: group["personal"] for label, group in groups.items()}
        for row in rows:
            fair = groups[row[0]]["fairness"][groups[row[0]]["personal"]]
            assert row[2:5] == [f"{100 * fair[name]['mean']:.1f}" for name in ("mean", "std", "worst_decile")]
        names = page.evaluate("[...document.querySelectorAll('#clients .chart svg .name')].map((e) => e.textContent)")
        assert sorted(names) == sorted(groups)
        heads = page.evaluate("[...document.querySelectorAll('#comparison thead th')].map((e) => e.textContent.trim())")
        own, tenth = (
            next(n for n, head in enumerate(heads) if head.startswith(w)) for w in ("personal model, %", "worst")
        )
        means = []
        for row in page.evaluate(cells.format("#comparison")):
            group = groups[row[0]]
            means.append(group["accuracy"][group["personal"]]["mean"])
            assert row[own] == f"{100 * means[-1]:.1f}"
            assert row[tenth] == f"{100 * group['fairness'][group['personal']]['worst_decile']['mean']:.1f}"
        assert len(means) == 3 and means == sorted(means, reverse=True)  # ordered as the headline says
        assert page.errors == []


def test_methods_without_a_measure_in_common_are_a_list(browser, tmp_path):
    run(tmp_path / "runs" / "local", "algorithm=local")
    run(tmp_path / "runs" / "fedavg", "algorithm=fedavg", "evaluate.personal=none")
    with opened(browser, write([tmp_path / "runs"], tmp_path / "report.html")) as page:
        said = page.evaluate("[...document.querySelectorAll('#answer li')].map((e) => e.textContent)")
        assert [sentence.split(" reached")[0] for sentence in said[:2]] == ["fedavg", "local"] and page.errors == []


def test_markup_in_a_run_stays_text(browser, runs, tmp_path):
    copy = hostile(Path(shutil.copytree(runs[1], tmp_path / "run")))
    with opened(browser, write([copy], tmp_path / "report.html")) as page:
        assert page.evaluate("window.hacked") is None and page.evaluate("document.images.length") == 0
        assert "</script><script>" in page.evaluate("document.querySelector('h1').textContent")
        assert page.errors == []


def test_broken_runs_are_shown(browser, runs, tmp_path):
    half, broken = (Path(shutil.copytree(runs[n], tmp_path / name)) for n, name in ((0, "half"), (2, "broken")))
    (half / "result.json").unlink()
    (broken / "config.yaml").write_text("{")
    with opened(browser, write([tmp_path], tmp_path / "report.html")) as page:
        assert page.evaluate("[...document.querySelectorAll('.warning')].map((e) => e.textContent)") == [
            "Attention:1 of 2 runs is corrupt and left out: broken.",
            "Attention:1 of 2 runs is not finished and not ranked: half.",
        ]
        assert "config.yaml is damaged" in page.evaluate("document.querySelector('#runs').textContent")
        assert page.errors == []


def test_a_file_that_is_not_what_it_should_be_costs_its_section_alone(browser, runs, tmp_path):
    copy = Path(shutil.copytree(runs[2], tmp_path / "run"))
    (copy / "audit.json").write_text('{"found": 3}')
    with opened(browser, write([copy], tmp_path / "report.html")) as page:
        assert "this cannot be shown" in page.evaluate("document.querySelector('#audits .warning').textContent")
        assert page.evaluate("document.querySelector('#runs table') !== null") and page.errors == []


def test_thirty_runs_open_within_two_seconds(browser, runs, tmp_path):
    for number in range(30):
        copy = Path(shutil.copytree(runs[number % 4], tmp_path / f"run-{number:02d}"))
        text = (copy / "config.yaml").read_text()
        (copy / "config.yaml").write_text(text.replace("\nseed: ", f"\nseed: {number}"))
    out = write([tmp_path], tmp_path / "report.html")
    with opened(browser, out) as page:
        assert page.seconds < 2 and out.stat().st_size < 5_000_000
        assert page.evaluate("document.querySelectorAll('#every-run tbody tr').length") == 30 and page.errors == []
