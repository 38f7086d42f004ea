"""Seconds of every table and figure in quick mode, each in a process and a folder of its own.

    python benchmarks/quick.py DIR --page results/quick.md        # all of them; go on where it was cut
    python benchmarks/quick.py DIR --only pse/table3              # one, anew

DIR keeps what was drawn, and quick.json with seconds by the clock and of the processor. The page is written from it.
Exit code 1 where one failed or took more than --limit seconds of the processor: other work moves the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlens.core.files import write_json
from fedlens.papers.registry import reproducible


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder")
    parser.add_argument("--only", action="append", choices=[*reproducible()], metavar="NAME", help="may be repeated")
    parser.add_argument("--limit", type=float, default=120, help="seconds of the processor that one may take")
    parser.add_argument("--page", type=Path, help="a Markdown file to write")
    parser.add_argument("--page-only", action="store_true", help="run nothing, write the page from what is there")
    asked = parser.parse_args()
    file = asked.out / "quick.json"
    found = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    missing = [] if asked.page_only else [each for each in reproducible() if each not in found]
    for name in asked.only or missing:
        found[name] = timed(name, asked.out / name.replace("/", "-"), asked.limit)
        print(f"{name}: {said(found[name], asked.limit)}", flush=True)
        write_json(file, found)
    rows = {name: found[name] for name in reproducible() if name in found}
    if asked.page:
        asked.page.parent.mkdir(parents=True, exist_ok=True)
        asked.page.write_text(page(rows, asked.limit), "utf-8")
    return int(any(row["code"] or row["cpu"] > asked.limit for row in rows.values()))


def timed(name: str, place: Path, limit: float) -> dict[str, Any]:
    """Seconds by the clock and of the processor, start-up included; cut at twenty times the limit by the clock."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    before, load, start = resource.getrusage(resource.RUSAGE_CHILDREN), os.getloadavg()[0], time.monotonic()
    command = [sys.executable, "-m", "fedlens", "reproduce", name, "--quick", "--out", str(place)]
    with (place / "said.txt").open("w") as log:
        try:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=20 * limit).returncode
        except subprocess.TimeoutExpired:
            code = 124
    clock, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"clock": round(clock, 1), "cpu": round(cpu, 1), "code": code, "load": round(load, 1)}


def said(row: Mapping[str, Any], limit: float) -> str:
    text = f"{row['clock']:.0f} s by the clock, {row['cpu']:.0f} s of the processor"
    return text + (f", EXIT CODE {row['code']}" if row["code"] else ", TOO LONG" if row["cpu"] > limit else "")


def page(rows: Mapping[str, Mapping[str, Any]], limit: float) -> str:
    slowest = max(rows, key=lambda name: rows[name]["cpu"])
    late = [name for name, row in rows.items() if row["code"] or row["cpu"] > limit]
    verdict = f"**{len(late)} failed or took longer: {', '.join(late)}.**" if late else "All ended with exit code 0."
    loads = [row["load"] for row in rows.values()]
    left = [f"`{name}`" for name in reproducible() if name not in rows]
    lines = [
        "# Quick mode: seconds of every table and figure\n",
        f"{len(rows)} of {len(reproducible())} were run. {verdict}",
        f"The slowest is `{slowest}`, {rows[slowest]['cpu']:.0f} s of the processor; {limit:.0f} are allowed.\n",
        "`fedlens reproduce NAME --quick`, each in a process and an empty folder of its own, one thread.",
        "Start-up and reading of data are included. Numbers of quick mode say nothing about a paper.",
        f"A machine of {os.cpu_count()} cores with other work, of load {min(loads)} to {max(loads)} at the starts.",
        "Where the clock shows much more than the processor, the process waited for a core.\n",
        "```\npython benchmarks/quick.py DIR --page results/quick.md\n```\n",
        "| what | clock, s | processor, s |",
        "| --- | ---: | ---: |",
    ]
    if left:
        lines.insert(3, f"Not run: {', '.join(left)}.\n")
    lines += [f"| `{name}` | {row['clock']:.0f} | {row['cpu']:.0f} |" for name, row in rows.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
