"""The table at the top of results/speed.md, from results/data/speed.json.

    python docs/speed.py                          # writes the table again
    python docs/speed.py --take FOLDER            # first takes over what a sitting or peers/compare.py left in FOLDER

`--check` says whether the page is as the data have it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA, PAGE = ROOT / "results" / "data" / "speed.json", ROOT / "results" / "speed.md"
BEGIN, END = "<!-- table: docs/speed.py -->\n", "<!-- end -->\n"
PEERS = ("pfl", "plain loop")


def taken(known: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What is known with what a sitting on a GPU, or five starts on a CPU, left in this folder."""
    for name in ("gpu", "steps", "grid", "rule"):
        if (file := folder / f"{name}.json").exists():
            known[name] = json.loads(file.read_text())
    agree = [json.loads(file.read_text()) for file in sorted(folder.glob("agree*.json"))]
    if agree:
        known["agree"] = {method: found for part in agree for method, found in part.items()}
    if (file := folder / "compare.json").exists():
        known["cpu"] = json.loads(file.read_text())
    return known


def rows(data: dict[str, Any]) -> list[list[str]]:
    """Job, FedLens, the best peer, their ratio, the ceiling."""
    found, jobs = [], {}
    for row in data.get("gpu", {}).get("rows", ()):
        jobs.setdefault(row["job"], {})[row["who"]] = row["images_per_second"]
    for job, speeds in jobs.items():
        ours = max(speeds.get(name, 0.0) for name in ("fedlens", "fedlens, compiled"))
        peers = {name: speeds[name] for name in PEERS if name in speeds}
        ceiling = f"{speeds['ceiling']:,.0f}" if "ceiling" in speeds else ""
        if ours and peers:
            name = max(peers, key=peers.__getitem__)
            peer, ratio = f"{name} {peers[name]:,.0f}", f"{ours / peers[name]:.1f} x"
            found.append([f"{job}, images/s on a GPU", f"{ours:,.0f}", peer, ratio, ceiling])
    if "cpu" in data:
        middle = {who: statistics.median(one["round"] for one in starts) for who, starts in data["cpu"].items()}
        peers = {who: seconds for who, seconds in middle.items() if who not in ("fedlens", "tight")}
        name = min(peers, key=peers.__getitem__, default="")
        peer = f"{name} {peers[name]:.2f} s" if name else ""
        ratio = f"{peers[name] / middle['fedlens']:.2f} x" if name else ""
        job = "J1: a round on two CPU cores"
        found.append([job, f"{middle['fedlens']:.2f} s", peer, ratio, f"hand-optimised loop {middle['tight']:.2f} s"])
    return found


def table(data: dict[str, Any]) -> str:
    lines = ["| job | FedLens | best peer | ratio | ceiling |", "| --- | ---: | ---: | ---: | ---: |"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows(data))]) + "\n"


def written(page: str, data: dict[str, Any]) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table(data)}{END}{after}"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--take", type=Path, metavar="FOLDER")
    options.add_argument("--check", action="store_true")
    asked = options.parse_args()
    data = json.loads(DATA.read_text()) if DATA.exists() else {}
    if asked.take:
        data = taken(data, asked.take)
        DATA.write_text(json.dumps(data, indent=1) + "\n")
    page = PAGE.read_text()
    new = written(page, data)
    if asked.check:
        print("results/speed.md is as its data have it" if new == page else "results/speed.md is stale: docs/speed.py")
        return int(new != page)
    PAGE.write_text(new)
    print(f"{len(rows(data))} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
