"""Makes the runs that two pages show, and their pictures: `python docs/screenshot.py [NAME ...]`, without a name both.

report: images/report.png, the report of a comparison as Chromium shows it. first-run: images/first-run.png, the
`figures/run.png` of a run without settings. Runs stay in build/shown; what is done there is not run again. About three
minutes on two cores.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES, RUNS = ROOT / "docs" / "images", ROOT / "build" / "shown"
sys.path.insert(0, str(ROOT / "tests"))

from browser import CHROMIUM, Chromium  # noqa: E402

METHODS = "fedavg", "fedprox", "fedxds", "scaffold"
SETTINGS = "model=mlp", "clients=8", "rounds=8", "local.steps=10", "picture=false"
SEEDS = 3
SIZE = 1400, 900


def fedlens(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "fedlens", *words], check=True)


def first_run() -> Path:
    if not (RUNS / "first" / "result.json").exists():
        fedlens("run", f"out={RUNS / 'first'}")
    return Path(shutil.copyfile(RUNS / "first" / "figures" / "run.png", IMAGES / "first-run.png"))


def report() -> Path:
    fedlens("compare", *METHODS, *SETTINGS, "--seeds", str(SEEDS), "--out", str(RUNS / "compared"))
    page = RUNS / "compared" / "report.html"
    with Chromium() as browser, browser.open(page.as_uri(), *SIZE) as opened:
        opened.until("document.querySelectorAll('#curves svg polyline').length > 0")
        return opened.screenshot(IMAGES / "report.png")


PICTURES = {"report": report, "first-run": first_run}


def main() -> None:
    wanted = sys.argv[1:] or list(PICTURES)
    trouble = [f"there is no picture {name}; those of this script: {', '.join(PICTURES)}" for name in wanted
               if name not in PICTURES]  # fmt: skip
    if CHROMIUM is None and "report" in wanted:
        trouble.append("there is no Chromium (Debian package chromium) here, which takes the picture of the report")
    if trouble:
        print(trouble[0], file=sys.stderr)
        sys.exit(2)
    RUNS.mkdir(parents=True, exist_ok=True)
    for name in wanted:
        print(PICTURES[name]())


if __name__ == "__main__":
    main()
