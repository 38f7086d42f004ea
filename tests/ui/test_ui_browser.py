"""The live page in a real Chromium: runs appear, curves grow, runs are compared, inspected and stopped."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from browser import needs_chromium
from live_page import NAMES, SIZES, address, opened, quiet, serving
from test_report import SMALL, hostile, run

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    from PIL import Image

    root = tmp_path_factory.mktemp("runs")
    for method, seed in (("fedavg", 0), ("fedavg", 1), ("scaffold", 0)):
        run(root / f"{method}-{seed}", f"algorithm={method}", f"seed={seed}")
    (root / "fedavg-0" / "figures").mkdir(exist_ok=True)
    Image.effect_noise((60, 20), 60).save(root / "fedavg-0" / "figures" / "explain-clients.png")
    broken = Path(shutil.copytree(root / "scaffold-0", root / "broken"))
    (broken / "config.yaml").write_text("{")
    return root


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_the_list_on_every_screen(browser, served, size, dark):
    with opened(browser, served, size, dark=dark) as page:
        assert page.evaluate("document.querySelector('h1').textContent") == "3 runs done, 1 corrupt"
        sizes = "['h1', '#answer h2'].map((e) => parseFloat(getComputedStyle(document.querySelector(e)).fontSize))"
        page.until("document.querySelector('#answer h2') !== null")
        count, headline = page.evaluate(sizes)
        assert count < headline  # the answer comes first, how many runs there are second
        assert sorted(page.evaluate(NAMES)) == ["broken", "fedavg-0", "fedavg-1", "scaffold-0"]
        assert page.evaluate("document.querySelectorAll('.runs .curve polyline').length") == 4
        assert "config.yaml is damaged" in page.evaluate("document.querySelector('.runs .trouble').textContent")
        assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0], "it can be scrolled sideways"
        ticks = "[...document.querySelectorAll('.runs .tick')].map((e) => e.getBoundingClientRect())"
        assert page.evaluate(f"{ticks}.every((b) => b.width >= 32 && b.height >= 32 && b.left >= 0)")  # for fingers
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(21, 24, 28)" if dark else "rgb(255, 255, 255)")
        assert quiet(page, served)


@pytest.mark.parametrize("size", SIZES)
def test_safety_is_on_the_first_screen_of_the_list_and_of_a_run(browser, tmp_path, size):
    run(tmp_path / "one", "algorithm=fedavg")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    config = tmp_path / "two" / "config.yaml"
    config.write_text(config.read_text().replace("is: fedavg", "is: fedfed", 1))
    bottom = "document.querySelector('{}').getBoundingClientRect().bottom"
    with serving(tmp_path) as server, opened(browser, server, size) as page:
        said = page.evaluate("document.querySelector('#safety .big').textContent")
        assert said == "fedfed shares data; fedavg: unprotected updates; none attacked"
        assert page.evaluate(bottom.format("#safety .big")) < SIZES[size][1]
        assert "privacy" not in page.evaluate("document.querySelector('#within').textContent")  # once is enough
        cells = page.evaluate(
            "[...document.querySelectorAll('td.privacy')].map((e) => `${e.className}: ${e.textContent}`)"
        )
        assert sorted(cell.partition(",")[0] for cell in cells) == [
            "privacy alarmed: Shares data",
            "privacy: Unprotected updates",
        ]
    with serving(tmp_path) as server, opened(browser, server, size, "#run=one") as page:
        assert page.evaluate("document.querySelector('#safety').textContent").startswith(
            "Privacy: Unprotected updates, not"
        )
        assert page.evaluate(bottom.format("#safety")) < SIZES[size][1]
        page.until("document.querySelectorAll('#privacy li').length === 2")
        assert quiet(page, server)


def test_each_number_says_whose_it_is(browser, tmp_path):
    for method in ("fedavg", "local", "fedavg+ft"):
        run(tmp_path / method, f"algorithm={method}")
    tuned = json.loads((tmp_path / "fedavg+ft" / "result.json").read_text())["personal"]["fine-tuned"]["mean"]
    shown = (
        "Object.fromEntries([...document.querySelectorAll('.runs tbody tr')].map((e) => ["
        "e.querySelector('.name').textContent, e.querySelector('small').textContent]))"
    )
    with serving(tmp_path) as server, opened(browser, server) as page:
        assert page.evaluate(shown) == {"fedavg": "global", "local": "personal", "fedavg+ft": "personal"} and quiet(
            page, server
        )
        number = "document.querySelector(\".runs tbody tr:has([title='fedavg+ft']) td\").textContent"
        assert f"{100 * tuned:.1f}" in page.evaluate(number)


def test_the_headline_does_not_speak_before_the_server_has(browser, tmp_path):
    said = "document.querySelector('main').innerText.trim()"
    silent = "window.EventSource = class { constructor() { window.source = this; } };"
    with serving(tmp_path) as server, browser.open(address(server), 1280, 800) as page:
        page.call("Page.addScriptToEvaluateOnNewDocument", source=silent)
        page.call("Page.reload")
        page.until("window.source && document.querySelector('main h1') !== null")
        assert page.evaluate("document.querySelector('h1').textContent") == "Reading runs …"
        assert "no run" not in page.evaluate(said).lower()
        page.evaluate("source.onmessage({ data: JSON.stringify({ runs: [], gone: [], all: true }) })")
        assert page.evaluate(said).startswith("No runs") and "There is no run" in page.evaluate(said)


def test_runs_are_found_and_filtered(browser, served):
    with opened(browser, served) as page:
        page.evaluate("document.querySelector('.search').focus()")
        page.call("Input.insertText", text="SCAFF")
        page.until(f"{NAMES}.join() === 'scaffold-0'")
        page.evaluate("(() => { const s = document.querySelector('[role=search] select'); s.value = 'failed';"
                      "s.dispatchEvent(new Event('change')); })()")  # fmt: skip
        page.until(f"{NAMES}.length === 0")
        assert "No run is like that" in page.evaluate("document.querySelector('main').innerText")


@pytest.mark.parametrize("size", SIZES)
def test_ticked_runs_are_drawn_together_and_reported(browser, served, size):
    lines = "document.querySelectorAll('#comparison .two > :first-child polyline').length"
    with opened(browser, served, size) as page:
        assert page.evaluate("document.querySelector('#comparison').hidden")
        for number, name in enumerate(("fedavg-0", "scaffold-0", "fedavg-1"), 1):
            page.click(f"input[aria-label='Compare {name}']")
            page.until(f"{lines} === {number}")
        assert page.evaluate("document.querySelectorAll('#comparison .two > :last-child polyline').length") == 3
        about = page.evaluate("document.querySelector('#comparison .chart svg').ariaLabel")
        assert about.startswith("Accuracy over rounds") and "scaffold-0" in about
        dashes = page.evaluate("[...document.querySelectorAll('#comparison .two > :first-child polyline')]"
                               ".map((e) => e.getAttribute('class') + e.getAttribute('stroke-dasharray'))")  # fmt: skip
        assert len(set(dashes)) == 3, "two runs look alike"
        page.click("#comparison button[data-value=seconds]")
        page.until("document.querySelector('#comparison .chart svg')?.ariaLabel?.startsWith('Accuracy over seconds')")
        page.hover("#comparison .chart svg polyline", 0.9, 0.5)
        assert "seconds of running" in page.evaluate("document.querySelector('#comparison .tip').innerText")
        assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
        report = page.evaluate("document.querySelector('#comparison a').href")
        page.click("#clear")
        page.until("document.querySelector('#comparison').hidden")
        assert not page.evaluate("[...document.querySelectorAll('.runs tbody input')].some((e) => e.checked)")
        assert quiet(page, served)
    with browser.open(report) as page:
        page.until("document.querySelectorAll('#curves svg polyline').length === 2")  # two methods
        assert "scaffold" in page.evaluate("document.querySelector('h1').textContent") and page.errors == []


@pytest.mark.parametrize("size", SIZES)
def test_a_run_and_one_of_its_clients(browser, served, folder, size):
    with opened(browser, served, size) as page:
        page.click(".runs a[title='fedavg-0']")
        page.until("document.querySelector('h1').textContent === 'fedavg-0'")
        page.until("document.querySelectorAll('.two polyline').length === 2")
        page.until("document.querySelectorAll('#clients tbody tr').length === 6")
        page.click("#clients [data-client='3']")
        page.until("document.querySelector('#client h3')?.textContent === 'Client 3'")
        page.until("document.querySelectorAll('#client .mix rect').length === 10")
        page.until("document.querySelectorAll('#client polyline').length === 2")  # before and after local training
        page.until("document.querySelector('#client img').naturalWidth === 60")
        assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
        page.evaluate("document.querySelector('#which').focus()")
        page.call("Input.insertText", text="77")
        page.press("Enter")
        page.until("document.querySelector('#client .warning') !== null")
        assert "there are 6, counted from 0" in page.evaluate("document.querySelector('#client .warning').textContent")
        assert "partition" in page.evaluate("document.querySelector('main details:last-child').textContent")
        page.click(".back")
        page.until("document.querySelectorAll('.runs tbody tr').length === 4")
        errors = [error for error in page.errors if "400" not in error]  # Chromium notes the client that is not there
        assert errors == []


def start(out: Path, *words: str) -> subprocess.Popen:
    """A run in a process of its own, as people start them."""
    command = [sys.executable, "-m", "fedlens", "run", *SMALL, f"out={out}", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ})


def test_a_run_appears_grows_and_is_stopped(browser, tmp_path):
    root = tmp_path / "runs"
    root.mkdir()
    with serving(root) as server, browser.open(address(server), 1280, 800) as page:
        page.until("document.querySelector('main').innerText.includes('no run in this folder yet')")
        process = start(root / "live", "rounds=2000", "algorithm=fedprox", "local.steps=20")
        page.until(f"{NAMES}.join() === 'live'", 60)
        page.until("document.querySelector('.state').textContent === 'running'")
        page.click(".runs .name")
        points = "(document.querySelector('.two polyline')?.points.length || 0)"
        page.until(f"{points} >= 2", 30)
        before = page.evaluate(points)
        page.until(f"{points} >= {before} + 3", 30)
        page.click("#stop")
        page.click("#sure")
        page.until("document.querySelector('.state').textContent === 'stopped'", 30)
        _, said = process.communicate(timeout=30)
        assert process.returncode == 1 and "stopped after round" in said and "fedlens resume" in said
        done = page.evaluate("document.querySelector('.warning:not(.lost)').textContent")
        assert page.evaluate("document.querySelector('#stop')") is None
        assert f"round {done.split()[2]}/2000" in (root / "live" / "log.txt").read_text().splitlines()[-2]
        assert not (root / "live" / "stop").exists() and quiet(page, server)


def test_it_says_when_the_server_is_gone_and_goes_on_when_it_is_back(browser, folder):
    with serving(folder) as server:
        port, page = server.server_address[1], opened(browser, server)
        assert page.evaluate("document.querySelector('.lost').hidden")
    with page:
        page.until("!document.querySelector('.lost').hidden", 15)
        with serving(folder, port=port):
            page.until("document.querySelector('.lost').hidden", 20)
            assert page.evaluate("document.querySelectorAll('.runs tbody tr').length") == 4


def test_markup_in_a_run_stays_text(browser, folder, tmp_path):
    copy = hostile(Path(shutil.copytree(folder / "fedavg-1", tmp_path / "runs" / "<img src=x onerror=hacked=1>")))
    (copy / "log.txt").open("a").write("note: <img src=x onerror=window.hacked=1>\n")
    with serving(tmp_path / "runs") as server, opened(browser, server) as page:
        page.click(".runs .name")
        page.until("document.querySelector('main li')?.textContent.includes('onerror')")
        assert page.evaluate("window.hacked") is None and page.evaluate("document.images.length") == 0
        assert quiet(page, server)


def test_a_token_opens_the_page_and_leaves_its_address(browser, folder):
    with serving(folder, token="a-long-secret-word") as server:
        with browser.open(f"{address(server)}?token=a-long-secret-word") as page:
            page.until("document.querySelectorAll('.runs tbody tr').length === 4")
            assert page.evaluate("location.href") == address(server) and page.errors == []
        with browser.open(f"{address(server)}") as page:  # the cookie is there
            page.until("document.querySelectorAll('.runs tbody tr').length === 4")
            assert page.evaluate("document.cookie") == ""


def test_another_origin_can_neither_read_nor_stop(browser, served, folder):
    """A page of another port on the same machine: same site, other origin."""
    with serving(folder) as other, browser.open(address(other)) as page:
        script = "fetch('{}', {{method: '{}', mode: '{}'}}).then((r) => r.status, () => 'refused')"
        for mode in ("cors", "no-cors"):
            assert page.evaluate(script.format(f"{address(served)}stop?run=fedavg-0", "POST", mode)) in ("refused", 0)
        assert page.evaluate(script.format(f"{address(served)}run?run=fedavg-0", "GET", "cors")) == "refused"
        assert not (folder / "fedavg-0" / "stop").exists()


def test_everything_can_be_reached_by_keys(browser, served):
    with opened(browser, served) as page:
        told = "(e.ariaLabel || e.textContent || e.labels?.[0]?.textContent || '').trim()"
        seen = "[...document.querySelectorAll('button, select, input, a')].filter((e) => e.offsetParent)"
        assert page.evaluate(f"{seen}.every((e) => {told})")
        page.evaluate("document.querySelector('.runs tbody input').focus()")
        page.press("Tab")
        assert page.evaluate("document.activeElement.className") == "name"
        page.press("Enter")
        page.until("document.querySelector('.bar svg') !== null")
        time.sleep(0.1)
        assert quiet(page, served)
