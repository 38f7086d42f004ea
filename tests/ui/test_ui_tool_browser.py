"""The live page as a tool, in a real Chromium: sort, group, find, address, zoom, scales, 200 runs, access."""

import fcntl
import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from browser import Page, axe, needs_axe, needs_chromium
from fedlens.compare.measured import measured
from fedlens.runs.labels import label
from fedlens.runs.read import runs_in
from live_page import NAMES, SIZES, address, calm, opened, quiet, serving
from test_report import run
from test_ui import grow, synthetic

pytestmark = needs_chromium
LINES = "document.querySelectorAll('#comparison .two > :first-child .line:not(.raw)').length"
ACCURACY = "#comparison .two > :first-child .plot"
ABOUT = "document.querySelector('#comparison .plot')?.ariaLabel"
ALL = "thead input"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two methods, two seeds each, another rate, and one that loses replies; all in one folder of their own."""
    root = tmp_path_factory.mktemp("served") / "runs"
    for method in ("fedavg", "scaffold"):
        for seed in (0, 1):
            run(root / "table-1" / f"{method}-{seed}", f"algorithm={method}", f"seed={seed}")
    run(root / "table-1" / "fedavg-slow", "local.lr=0.001", "rounds=3")
    faults = "faults.dropout=0.3", "faults.straggler=0.3", "policy.deadline=30", "policy.min_replies=2"
    run(root / "table-1" / "faults", *faults, "algorithm=fedper")
    label(root / "table-1" / "scaffold-1", tags=["paper"], note="checked by hand")
    return root


def find(page: Page, words: str) -> list[str]:
    page.evaluate(f"(() => {{ const s = document.querySelector('.search'); s.value = {json.dumps(words)};"
                  "s.dispatchEvent(new Event('input')); })()")  # fmt: skip
    calm(page)
    return sorted(page.evaluate(NAMES))


def drag(page: Page, selector: str, start: float, end: float) -> None:
    places = [page.place(selector, start), page.place(selector, (start + end) / 2), page.place(selector, end)]
    kinds = "mousePressed", "mouseMoved", "mouseReleased"
    for kind, (x, y) in zip(kinds, places, strict=True):
        page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)


def settled(page: Page) -> None:
    """Until settings are known, and columns with them."""
    page.until("document.querySelector('[data-sort=\"set.local.lr\"]') !== null")


# ---- the table -------------------------------------------------------------------------------------------------------
def read(server, folder: Path) -> dict[str, dict]:
    """Rows of all runs; `since` tells of very slow ones later."""
    names = [path.relative_to(folder).as_posix() for path in runs_in([folder])]
    return {name.removeprefix("table-1/"): server.watch.run(name).row for name in names}


def test_any_column_sorts(browser, served, folder):
    rows = read(served, folder)
    values = {**{name: name for name in ("accuracy", "best", "round", "seed", "bytes", "seconds", "method", "family")},
              "name": "name", "state": "state"}  # fmt: skip
    with opened(browser, served) as page:
        settled(page)
        for column, key in values.items():
            numeric = isinstance(rows["fedavg-0"][key], int | float)
            for sort in ("descending", "ascending") if numeric else ("ascending", "descending"):
                page.click(f"[data-sort='{column}']")
                sorted_by = page.evaluate(f"document.querySelector(\"[data-sort='{column}']\").closest('th').ariaSort")
                assert sorted_by == sort
                shown = [rows[name][key] for name in page.evaluate(NAMES)]
                assert shown == sorted(shown, reverse=sort == "descending"), column
                assert page.evaluate("document.querySelectorAll('[aria-sort=none]').length") > 8
        page.click("[data-sort='set.local.lr']")  # a setting that differs has a column
        assert page.evaluate(NAMES)[0] == "fedavg-slow"
        assert "sort=set.local.lr" in page.evaluate("location.hash") and quiet(page, served)


def test_what_is_not_known_comes_last(browser, served):
    with opened(browser, served) as page:
        for direction in (1, 2):
            page.click("[data-sort=lost]")
            assert page.evaluate(NAMES)[0] == "faults", direction


def test_short_names_and_what_all_share(browser, served):
    with opened(browser, served) as page:
        assert "fedavg-0" in page.evaluate(NAMES)
        said = page.evaluate("document.querySelector('#within').textContent")
        assert said.startswith("All names begin with table-1/ · all on mnist5k · 6 clients each"), said
        assert page.evaluate("document.querySelector('[data-sort=data]')") is None
        assert page.evaluate("document.querySelector('.runs .name').title.startsWith('table-1/')")


def test_a_name_goes_on_in_the_next_line_after_a_sign_alone(browser, tmp_path):
    names = ["table-1/scaffold/seed-2", "table-1/fedavg_lr=0.01/seed-2", "other"]
    for name in names:
        synthetic(tmp_path / "runs" / name, 4)
    lines = ("[...document.querySelectorAll('.runs .name')].map((e) => [...e.childNodes].filter((n) => n.data)"
             ".map((n) => { const r = document.createRange(); r.selectNode(n);"
             "return r.getClientRects().length; }))")  # fmt: skip
    with serving(tmp_path / "runs") as server, opened(browser, server, "phone") as page:
        page.until("document.querySelectorAll('.runs tbody tr').length === 3")
        assert sorted(page.evaluate(NAMES)) == sorted(names)
        assert all(count == 1 for parts in page.evaluate(lines) for count in parts)
        tall = "[...document.querySelectorAll('.runs .name')].map((e) => e.getBoundingClientRect().height)"
        assert max(page.evaluate(tall)) > 1.5 * min(page.evaluate(tall))  # there was something to fold


def test_search_covers_settings_tags_and_notes(browser, served):
    four = ["fedavg-0", "fedavg-1", "scaffold-0", "scaffold-1"]
    with opened(browser, served) as page:
        settled(page)
        assert find(page, "lr=0.001") == ["fedavg-slow"] and find(page, "seed=1") == ["fedavg-1", "scaffold-1"]
        assert find(page, "rounds=4 -fedper") == four and find(page, "rounds>3 faults.dropout<0.1") == four
        assert find(page, "tag=paper") == ["scaffold-1"] == find(page, "by hand")
        assert find(page, "model=mlp FAULTS") == ["faults"] and find(page, "model=cnn") == []
        assert "find=model%3Dcnn" in page.evaluate("location.hash") and quiet(page, served)


def test_methods_have_means_and_bands_over_seeds(browser, served, folder):
    rows = read(served, folder)
    pair = [rows[f"scaffold-{seed}"]["accuracy"] for seed in (0, 1)]
    with opened(browser, served) as page:
        settled(page)
        page.click("[data-value=method]")
        page.until("document.querySelectorAll('.runs tbody tr').length === 4")
        assert sorted(page.evaluate(NAMES)) == ["fedavg", "fedavg lr=0.001 rounds=3", "fedper", "scaffold"]
        at = "document.querySelector('[data-sort=accuracy]').closest('th').cellIndex"
        line = "document.querySelector(\".runs tr:has([aria-label='Compare scaffold'])\")"
        mean = page.evaluate(f"{line}.children[{at}].textContent")
        deviation = abs(pair[0] - pair[1]) / 2**0.5
        assert mean == f"{100 * sum(pair) / 2:.1f} ± {100 * deviation:.1f}"
        page.click("input[aria-label='Compare scaffold']")
        page.until(f"{LINES} === 1 && document.querySelectorAll('#comparison .band').length === 2")
        assert page.evaluate("[...document.querySelectorAll('#comparison .band')].map((e) => getComputedStyle(e))"
                             ".every((s) => s.visibility === 'visible' && s.fill !== 'none')")  # fmt: skip
        page.until(f"{ABOUT}.includes('scaffold (2 runs)')")
        page.click(".runs tr:has([aria-label='Compare scaffold']) .fold")
        page.until("document.querySelectorAll('.runs tr.member').length === 2")
        assert "group=method" in page.evaluate("location.hash") and quiet(page, served)


def test_the_mean_that_ranks_has_a_column_that_names_its_rounds(browser, tmp_path):
    """Its number is the report's, beside the last accuracy, where curves end."""
    paths = [run(tmp_path / f"seed-{seed}", "rounds=8", f"seed={seed}") for seed in (0, 1)]
    means = [measured("", "x", 0, path).global_last for path in paths]
    with serving(tmp_path) as server, opened(browser, server) as page:
        page.until("document.querySelector('[data-sort=closing]') !== null")
        heads = "[...document.querySelectorAll('.runs thead th')]"
        at = f"{heads}.indexOf(document.querySelector('[data-sort=closing]').closest('th'))"
        head = "document.querySelector('[data-sort=closing]').textContent"
        assert page.evaluate(head).startswith("mean of rounds 7 and 8, %")
        assert page.evaluate("document.querySelector('[data-sort=accuracy]').textContent").startswith("last accuracy")
        cells = page.evaluate(
            f"[...document.querySelectorAll('.runs tbody tr')].map((e) => e.children[{at}].textContent)"
        )
        assert sorted(cells) == sorted(f"{100 * mean:.1f}" for mean in means) and quiet(page, server)


def test_settings_that_differ_between_ticked_runs(browser, served):
    with opened(browser, served) as page:
        settled(page)
        for count, name in enumerate(("fedavg-0", "fedavg-slow"), 1):
            page.click(f"input[aria-label='Compare table-1/{name}']")
            page.until(f"{LINES} === {count}")  # the chart above the table moves its rows
        page.click("#apart summary")
        page.until("document.querySelector('#apart tbody tr') !== null")
        said = page.evaluate("[...document.querySelectorAll('#apart tbody tr')].map((e) => e.innerText.split('\\t'))")
        assert sorted(map(tuple, said)) == [("local.lr", "0.01", "0.001"), ("rounds", "4", "3")] and quiet(page, served)


# ---- the address -----------------------------------------------------------------------------------------------------
def test_the_address_keeps_selection_and_view(browser, served):
    state = ("[document.querySelector('.search').value, document.querySelector('[role=search] select').value,"
             "document.querySelector('[aria-sort=ascending], [aria-sort=descending]')?.textContent,"
             "[...document.querySelectorAll('.runs tbody input:checked')].length,"
             "document.querySelector('#comparison [aria-pressed=true]').textContent,"
             "...['logx', 'logy'].map((name) => document.querySelector(`[data-set=${name}]`).checked)]")  # fmt: skip
    with opened(browser, served) as page:
        find(page, "-fedper")
        page.click("[data-sort=seconds]")
        for count, name in enumerate(("fedavg-0", "scaffold-1"), 1):
            page.click(f"input[aria-label='Compare table-1/{name}']")
            page.until(f"{LINES} === {count}")
            calm(page)
        page.click("#comparison [data-value=bytes]")
        page.click("[data-set=logy]")
        page.until(f"{ABOUT}?.startsWith('Accuracy over bytes') && {LINES} === 2")
        before, names, kept = page.evaluate(state), page.evaluate(NAMES), page.evaluate("location.href")
        assert before[0] == "-fedper" and before[2:] == ["time", 2, "Bytes", False, True]
        page.click(".runs a.name")  # to a run, and back by the link and by the browser
        page.until("document.querySelector('.bar svg') !== null")
        page.click(".back")
        page.until(f"{LINES} === 2")
        assert page.evaluate(state) == before and page.evaluate("location.href") == kept
        page.evaluate("history.back()")
        page.until("document.querySelector('.bar svg') !== null")
        page.evaluate("history.back()")
        page.until(f"{LINES} === 2")
        with browser.open(kept) as other:  # whoever is sent it sees the same
            other.until(f"{LINES} === 2 && {ABOUT}.startsWith('Accuracy over bytes')")
            assert other.evaluate(state) == before and other.evaluate(NAMES) == names
        assert quiet(page, served)


def test_an_address_of_a_run_opens_it_though_it_is_read_late(browser, served, monkeypatch):
    monkeypatch.setattr("fedlens.ui.watch._PATIENCE", 1e-9)  # news come run by run
    with browser.open(f"{address(served)}#run=table-1%2Ffaults", 1280, 800) as page:
        page.until("document.querySelector('h1')?.textContent === 'table-1/faults'")
    with browser.open(f"{address(served)}#run=nothing", 1280, 800) as page:
        page.until("document.querySelectorAll('.runs tbody tr').length === 6")
        assert quiet(page, served)


# ---- charts ----------------------------------------------------------------------------------------------------------
def test_zoom_by_hand_and_by_keys(browser, tmp_path):
    synthetic(tmp_path / "runs" / "long", 1000)
    window = "['from', 'to'].map((n) => Number(new URLSearchParams(location.hash.slice(1)).get(n) ?? NaN))"
    points = "document.querySelector('#comparison .two > :first-child .line').points.length"
    with serving(tmp_path / "runs") as server, opened(browser, server) as page:
        page.click("input[aria-label='Compare long']")
        page.until(f"{LINES} === 1")
        coarse = page.evaluate(points)
        drag(page, ACCURACY, 0.5, 0.55)
        page.until(f"{window}.every((value) => value > 300 && value < 700)")
        low, high = page.evaluate(window)
        page.until(f"Math.abs({points} - {high - low}) < 5")  # all rounds of the window, of which there were fewer
        assert coarse <= 400 and 20 < high - low < 80
        page.evaluate(f"document.querySelector({json.dumps(ACCURACY)}).focus()")
        page.press("0")
        page.until(f"{window}.every(Number.isNaN) && {points} === {coarse}")
        page.click("#zoom-in")
        page.until(f"{window}[1] - {window}[0] > 400 && {window}[1] - {window}[0] < 600")
        page.click("#zoom-out")
        page.until(f"{window}.every(Number.isNaN)")
        assert page.evaluate("document.querySelector('#zoom-out').disabled") and quiet(page, server)


@pytest.mark.parametrize("size", SIZES)
def test_an_axis_has_numbers_to_read_by_and_they_do_not_touch(browser, served, size):
    places = ("[...document.querySelectorAll('#comparison .two > :first-child .plot text[text-anchor=middle]')]"
              ".map((e) => e.getBoundingClientRect()).map((b) => [b.left, b.right])")  # fmt: skip
    for axis in ("round", "bytes", "seconds"):
        with opened(
            browser, served, size, more=f"#tick=table-1%2Ffedavg-0&tick=table-1%2Fscaffold-1&axis={axis}"
        ) as page:
            page.until(f"{LINES} === 2")
            found = sorted(page.evaluate(places))
            assert len(found) >= 3 and all(a[1] < b[0] for a, b in pairwise(found)), axis
            assert quiet(page, served)


@pytest.mark.parametrize("axis", ["round", "bytes", "seconds"])
def test_every_axis_also_as_logarithm_and_smoothed(browser, served, axis):
    sound = ("[...document.querySelectorAll('#comparison .line')].every((e) => "
             "!/NaN|Infinity/.test(e.getAttribute('points')))")  # fmt: skip
    with opened(browser, served, more=f"#axis={axis}&logx=1&logy=1&smooth=0.6") as page:
        page.click(ALL)
        page.until(f"{LINES} === 5")  # fedper has no global model
        assert page.evaluate(sound)
        page.until("document.querySelector('#comparison').innerText.includes('Not evaluated on the global model')")
        labels = "[...document.querySelectorAll('#comparison .plot text')].map((e) => e.textContent)"
        assert page.evaluate(f"{labels}.filter((e) => e.endsWith(', log')).length") == 3
        page.hover(ACCURACY, 0.6, 0.5)
        assert page.evaluate("document.querySelector('#comparison .tip').innerText").endswith(" %")
        drag(page, ACCURACY, 0.4, 0.8)
        page.until("location.hash.includes('from=')")
        page.until(f"{LINES} === 5")
        assert page.evaluate(sound) and quiet(page, served)


# ---- one run ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", SIZES)
def test_lost_replies_notes_and_the_log(browser, served, size):
    with browser.open(f"{address(served)}#run=table-1%2Ffaults", *SIZES[size][:2], phone=SIZES[size][2]) as page:
        page.until("document.querySelectorAll('#setbacks .part').length > 2")
        assert "no reply" in page.evaluate("document.querySelector('#setbacks').innerText")
        assert "family: personal" in page.evaluate("document.querySelector('.lead').textContent")
        page.click("#log summary")
        page.until("document.querySelector('#log pre').textContent.includes('round 4/4')")
        assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0] and quiet(page, served)
    with browser.open(f"{address(served)}#run=table-1%2Fscaffold-1") as page:
        page.until("document.querySelector('#remarks')?.textContent.includes('checked by hand')")
        assert "paper" in page.evaluate("document.querySelector('main').innerText")


def test_the_tab_says_how_long_it_takes(browser, tmp_path):
    path = synthetic(tmp_path / "runs" / "a", 4, done=False)
    text = (path / "config.yaml").read_text()
    (path / "config.yaml").write_text(text.replace("rounds: 4\n", "rounds: 400\n"))
    (path / "passport.json").unlink()
    grow(path, 4, 40, 400)  # half a second each
    with open(path / "lock", "a") as lock, serving(path.parent) as server:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with opened(browser, server) as page:
            page.until("document.title === '3.0 min left · 1 running · FedLens'")
            page.click(".runs a.name")
            page.until("document.title === '3.0 min left · 40/400 · a · FedLens'")
            grow(path, 40, 200, 400)
            page.until("document.title === '100 s left · 200/400 · a · FedLens'")
        assert quiet(page, server)


# ---- size and access -------------------------------------------------------------------------------------------------
def test_two_hundred_runs_of_a_thousand_rounds_stay_smooth(browser, tmp_path):
    """What is sent, and how long a click keeps the page busy."""
    original, root = synthetic(tmp_path / "run", 1000), tmp_path / "runs"
    text = (original / "config.yaml").read_text()
    for number in range(200):
        copy = Path(shutil.copytree(original, root / f"run-{number:03d}"))
        method = ("fedavg", "fedprox", "scaffold", "fednova")[number % 4]
        other = text.replace("seed: 0\n", f"seed: {number // 20}\n").replace("is: fedavg\n", f"is: {method}\n")
        (copy / "config.yaml").write_text(other.replace("lr: 0.01\n", f"lr: {0.01 * (1 + number // 4 % 5):.2f}\n"))

    def sent(page: Page) -> int:
        """Bytes before they are packed: copies of one run pack better than real ones."""
        return sum(e["dataLength"] for e in browser.events(page.session, "Network.dataReceived"))

    def busy(page: Page, script: str) -> float:
        """Milliseconds until the page has done it and drawn."""
        drawn = "requestAnimationFrame(() => setTimeout(() => done(performance.now() - t)))"
        return page.evaluate(f"new Promise((done) => {{ const t = performance.now(); {script}; {drawn}; }})")

    with serving(root) as server, opened(browser, server) as page:
        page.until("document.querySelectorAll('.runs tbody tr').length === 200", 60)
        page.until("document.querySelector('[data-sort=\"set.local.lr\"]') !== null")
        calm(page)
        assert "cannot be told apart" in page.evaluate("document.querySelector('#answer > h2').textContent")
        told = {"list": sent(page)}
        took = {"tick": busy(page, f"document.querySelector('{ALL}').click()")}
        page.until(f"{LINES} === 200", 30)
        told["curves"] = sent(page) - told["list"]
        took["sort"] = busy(page, "document.querySelector('[data-sort=accuracy]').click()")
        took["group"] = busy(page, "document.querySelector('[data-value=method]').click()")
        page.until("document.querySelectorAll('#comparison .two > :first-child .band').length === 20", 30)
        took["find"] = busy(page, "(() => { const s = document.querySelector('.search'); s.value = 'lr=0.03 seed=1';"
                            "s.dispatchEvent(new Event('input')); })()")  # fmt: skip
        print(f"bytes {told}, milliseconds { ({name: round(value) for name, value in took.items()}) }")
        assert told["list"] < 500_000 and told["curves"] < 1_500_000
        assert max(took.values()) < 2000 and quiet(page, server)


def test_damaged_runs_cost_themselves_alone(browser, folder, tmp_path):
    root = Path(shutil.copytree(folder, tmp_path / "runs")) / "table-1"
    (root / "fedavg-0" / "config.yaml").write_text("algorithm: {is: [1]}\nrounds: 1\n")
    (root / "fedavg-1" / "labels.json").write_text('{"tags": [{}], "notes": 3}')
    next((root / "scaffold-0" / "bytes.parquet").iterdir()).write_bytes(b"PAR1")
    next((root / "scaffold-1" / "metrics.parquet").iterdir()).write_bytes(b"PAR1")
    shutil.rmtree(root / "faults" / "metrics.parquet")
    with serving(root.parent) as server, opened(browser, server, more="#axis=bytes") as page:
        page.until("document.querySelectorAll('.runs tbody tr').length === 6")
        page.click(ALL)
        page.until(f"{LINES} >= 2")
        page.click("[data-value=method]")
        page.until("document.querySelectorAll('.runs .fold').length >= 4")
        page.until(f"{ABOUT}?.includes('runs)')")
        assert quiet(page, server)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@needs_axe
def test_axe_finds_nothing(browser, served, size, dark):
    width, height, phone = SIZES[size]
    views = {
        "": "document.querySelectorAll('.runs tbody tr').length === 6",
        "#tick=table-1%2Ffedavg-0&tick=table-1%2Fscaffold-1&group=method": f"{LINES} === 2",
        "#run=table-1%2Ffaults": "document.querySelectorAll('#setbacks .plot, #setbacks svg, #clients td').length > 9",
    }
    for view, ready in views.items():
        with browser.open(address(served) + view, width, height, phone=phone, dark=dark) as page:
            page.until(ready)
            page.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
            passed, found = axe(page)
            assert passed > 15 and found == []


def test_rows_and_controls_by_keyboard(browser, served):
    focus = "document.activeElement"
    with opened(browser, served) as page:
        settled(page)
        page.evaluate(f"{focus}.blur()")
        page.press("Tab")
        assert page.evaluate(f"{focus}.className") == "skip"
        page.press("Enter")
        assert page.evaluate(f"{focus}.id") == "main"
        page.evaluate("document.querySelector('.runs tbody input').focus()")
        second = page.evaluate("document.querySelectorAll('.runs tbody input')[1].ariaLabel")
        page.press("ArrowDown", 40)
        assert page.evaluate(f"{focus}.ariaLabel") == second
        page.press("ArrowUp", 38)
        page.evaluate("document.querySelector('[data-sort=accuracy]').focus()")
        page.press("Enter")
        assert page.evaluate(f"{focus}.dataset.sort") == "accuracy", "sorting takes the focus away"
        page.click(ALL)
        page.until(f"{LINES} === 5")
        page.evaluate("document.querySelector('#comparison [data-value=seconds]').focus()")
        page.press("Enter")
        page.until(f"{ABOUT}.startsWith('Accuracy over seconds')")
        assert page.evaluate(f"{focus}.dataset.value") == "seconds", "another axis takes the focus away"
        ring = f"getComputedStyle({focus}).outlineStyle"
        assert page.evaluate(ring) == "solid" and quiet(page, served)
