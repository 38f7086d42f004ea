"""Seconds a round of FedLens, a tight two-process loop and pfl on one CPU job, in turn, several times.

python benchmarks/peers/compare.py FOLDER [--repeats 5] [--pfl PYTHON] [--small]
`--pfl` is the interpreter of an environment with pfl 0.6, whose pins clash with ours. Run it on a quiet machine: each
line says how many cores others used meanwhile.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import job

try:
    import psutil
except ImportError:
    psutil = None

HERE = Path(__file__).parent


def measure(command, log):
    """One start: seconds to the first round, seconds a round after it, peak memory of the process tree."""
    log.unlink(missing_ok=True)
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if "torch.distributed.run" in command else {}
    kept = {"PYTHONDONTWRITEBYTECODE": ""}  # modules are compiled once, as they are for users
    environment = {**os.environ, **threads, **kept, "J1_LOG": str(log)}
    began, busy = time.time(), []
    with open(log.with_suffix(".txt"), "w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
        root, peak, ours, before = psutil.Process(process.pid), 0, {}, _all_cores()
        while process.poll() is None:
            total = 0
            for one in _tree(root):
                try:
                    total += one.memory_full_info().pss
                    times = one.cpu_times()
                    ours[one.pid] = times.user + times.system
                except psutil.Error:
                    pass
            peak = max(peak, total)
            time.sleep(0.5)
        busy = (_all_cores() - before - sum(ours.values())) / (time.time() - began)
    events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    rounds = {event["round"]: event["time"] for event in events if event["event"] == "round"}
    if process.returncode or job.LAST_TIMED not in rounds:
        sys.exit(f"{' '.join(command)} failed:\n{log.with_suffix('.txt').read_text()[-3000:]}")
    looks = [event["accuracy"] for event in events if event["event"] == "look"]
    return {
        "first": rounds[1] - began,
        "round": (rounds[job.LAST_TIMED] - rounds[1]) / (job.LAST_TIMED - 1),
        "pss": peak / 2**20,
        "accuracy": looks[-1] if looks else None,
        "others": busy,
    }


def _tree(root):
    try:
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def _all_cores():
    times = psutil.cpu_times()
    return times.user + times.system + times.nice


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pfl", help="python of an environment with pfl")
    parser.add_argument("--small", action="store_true", help="a look at the embedded digits, in a folder of its own")
    options = parser.parse_args()
    if psutil is None:
        print("this needs psutil, which is not installed: pip install psutil", file=sys.stderr)
        sys.exit(2)
    more = job.SMALL if options.small else []
    if not (options.folder / "j1.npz").exists():
        job.write(options.folder, more)
    folder = str(options.folder)
    commands = {
        "fedlens": [sys.executable, HERE / "fedlens_job.py", folder, *more],
        "tight": [sys.executable, HERE / "tight.py", folder],
    }
    if options.pfl:
        launcher = [options.pfl, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        commands["pfl"] = [*launcher, HERE / "pfl_job.py", folder]
    found = {name: [] for name in commands}
    for repeat in range(options.repeats):
        for name in sorted(commands, key=lambda name: (list(commands).index(name) + repeat) % len(commands)):
            one = measure([str(word) for word in commands[name]], options.folder / f"{name}.log")
            found[name].append(one)
            print(f"{name:8}", " ".join(f"{key} {value:.3f}" for key, value in one.items() if value is not None))
            sys.stdout.flush()
            (options.folder / "compare.json").write_text(
                json.dumps(found, indent=1)
            )  # cut off, it has what was measured
    middle = {name: {key: statistics.median(o[key] for o in ones) for key in ones[0]} for name, ones in found.items()}
    print("\n| | seconds a round | FedLens / it | first round done after | peak PSS |\n| --- | --- | --- | --- | --- |")
    for name, values in middle.items():
        ratio = middle["fedlens"]["round"] / values["round"]
        print(f"| {name} | {values['round']:.2f} | {ratio:.2f} | {values['first']:.1f} s | {values['pss']:.0f} MiB |")


if __name__ == "__main__":
    main()
