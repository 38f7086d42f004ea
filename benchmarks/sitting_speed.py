"""All that `results/speed.md` needs of a GPU, in one sitting of nine minutes: the most important part first.

    python benchmarks/sitting_speed.py FOLDER --pfl pfl-0.6.0-py3-none-any.whl
    python benchmarks/sitting_speed.py FOLDER --parts agree --minutes 8     # measures no time: beside other work
    python benchmarks/sitting_speed.py FOLDER --device cpu --quick --parts auto steps

Each part is a script of this folder with a time limit of its own; one that is cut leaves the rows that it has. FOLDER
gets their JSON and what they printed. The same command goes on where it stopped: parts that are done are left out, and
of the others the rows that are there. `docs/speed.py --take FOLDER` puts it on the page.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import needed
from fedlens.core.files import write_atomic

HERE = Path(__file__).parent
MINUTES = 8.8  # in all
AT_ONCE = 6  # processes of lanes_agree, which measures no time


def carried_out(commands: Sequence[Sequence[str]], logs: Sequence[Path], limit: float) -> list[int | None]:
    """Exit codes of commands that run side by side; None where the time was up, and the command was ended."""
    ways = os.environ | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    ends, running = time.monotonic() + limit, []
    for command, log in zip(commands, logs, strict=True):
        out = log.open("a")
        running.append(
            # A group of its own, to be ended whole; in this session, so that it does not outlive a command that is cut.
            subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=ways, process_group=0)
        )
    codes: list[int | None] = []
    for process in running:
        try:
            codes.append(process.wait(max(0.1, ends - time.monotonic())))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            codes.append(None)
    return codes


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path)
    options.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options.add_argument("--pfl", type=Path, help="a folder or a wheel with pfl 0.6")
    options.add_argument("--quick", action="store_true", help="every part in quick mode")
    options.add_argument("--parts", nargs="*", default=["peers", "steps", "grid", "auto"], help="or agree")
    options.add_argument("--minutes", type=float, default=MINUTES, help="in all")
    asked = options.parse_args()
    ends = time.monotonic() + 60 * asked.minutes
    needed.gpu(asked.device)
    out = asked.folder.resolve()
    out.mkdir(parents=True, exist_ok=True)
    quick = ["--quick"] if asked.quick else []
    where = ["--device", asked.device]
    compiled = ["--compile"] if asked.device == "cuda" else []
    pfl = ["--pfl", str(asked.pfl.resolve())] if asked.pfl else []
    python, some = [sys.executable], ["--methods", "fedavg", "scaffold"] if asked.quick else []
    agree = [*python, str(HERE / "lanes_agree.py"), *where, *compiled, *some]
    agrees = [
        [*agree, "--part", f"{n}/{AT_ONCE}", "--json", str(out / f"agree{n}.json")] for n in range(1, AT_ONCE + 1)
    ]
    rest, thirty = [*where, *quick, "--json"], [] if asked.quick else ["--seeds", "10"]  # of three methods
    parts: dict[str, tuple[float, list[list[str]]]] = {
        "peers": (
            210,
            [[*python, str(HERE / "peers" / "gpu.py"), *rest, str(out / "gpu.json"), "--rounds", "3", *compiled, *pfl]],
        ),
        "steps": (130, [[*python, str(HERE / "steps.py"), *rest, str(out / "steps.json"), *compiled]]),
        "grid": (200, [[*python, str(HERE / "grid.py"), *rest, str(out / "grid.json"), *thirty]]),
        "auto": (90, [[*python, str(HERE / "compile_rule.py"), *rest, str(out / "rule.json")]]),
        "agree": (600, agrees if not asked.quick else agrees[:1]),
    }
    told = out / "sitting.json"
    done = json.loads(told.read_text()) if told.is_file() else {}
    for name in asked.parts:
        limit, commands = parts[name]
        left = ends - time.monotonic()
        if name in done and not any(code != 0 for code in done[name]["codes"]):
            print(f"== {name}: done before", flush=True)
            continue
        if left < 10:
            print(f"== {name}: no time left", flush=True)
            continue
        start = time.monotonic()
        logs = [out / f"{name}{n or ''}.txt" for n in range(len(commands))]
        codes = carried_out(commands, logs, min(limit, left))
        done[name] = {"seconds": time.monotonic() - start, "codes": codes}
        write_atomic(told, json.dumps(done, indent=1).encode())
        cut = " (cut)" if None in codes else f" (codes {codes})" if any(codes) else ""
        print(f"== {name}: {done[name]['seconds']:.0f} s{cut}", flush=True)
        for log in logs:
            print("\n".join(log.read_text(errors="replace").splitlines()[-24 if len(logs) == 1 else -3 :]), flush=True)


if __name__ == "__main__":
    main()
