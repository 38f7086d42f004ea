"""Makes the runs of two pages and takes their pictures: `python docs/screenshot.py [FOLDER]`, with Chromium.

images/first-run.png: `figures/run.png` of a run without settings. images/report.png: the report of a comparison with an
audit, as a browser shows it. Runs stay in FOLDER, without one in build/shown; what is done there is not run again.
About four minutes on two cores.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
sys.path.insert(0, str(ROOT / "tests"))

from browser import CHROMIUM, Chromium  # noqa: E402

METHODS = "fedavg", "fedprox", "fedxds", "scaffold"
SETTINGS = "model=mlp", "model.hidden=64", "clients=8", "rounds=8", "local.steps=10", "transcript=200"
SEEDS = 3
AUDITED = "fedxds"
ATTACKS = "shared_images,shared_members"
SIZE = 1400, 900


def fedlens(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "fedlens", *words], check=True)


def first_run(folder: Path) -> Path:
    if not (folder / "first" / "result.json").exists():
        fedlens("run", f"out={folder / 'first'}")
    return Path(shutil.copyfile(folder / "first" / "figures" / "run.png", IMAGES / "first-run.png"))


def report(folder: Path) -> Path:
    compared, audited = folder / "compared", folder / "compared" / AUDITED / "seed0"
    fedlens("compare", *METHODS, *SETTINGS, "--seeds", str(SEEDS), "--out", str(compared))
    if not (audited / "audit.json").exists():
        fedlens("audit", str(audited), "--attacks", ATTACKS)
    page = folder / "report.html"
    fedlens("report", str(compared), "--out", str(page))
    with Chromium() as browser, browser.open(page.as_uri(), *SIZE) as opened:
        opened.until("document.querySelectorAll('#curves svg polyline').length > 0")
        return opened.screenshot(IMAGES / "report.png")


def main() -> None:
    if CHROMIUM is None:
        print("there is no Chromium (Debian package chromium) here, which takes the picture", file=sys.stderr)
        sys.exit(2)
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "shown"
    folder.mkdir(parents=True, exist_ok=True)
    print(first_run(folder))
    print(report(folder))


if __name__ == "__main__":
    main()
