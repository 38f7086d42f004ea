"""Seconds a round of FedLens, a tight two-process loop and pfl on CPU jobs, in turn, several times.

python benchmarks/peers/compare.py FOLDER [--jobs cnn resnet20] [--repeats 5] [--pfl PYTHON] [--small]
`--pfl` is the interpreter of an environment with pfl 0.6, whose pins clash with ours. Run it on a quiet machine: each
line says how many cores others used meanwhile. Where it is not quiet, compare the processor's seconds.
"""

import argparse
import contextlib
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


def measure(command, log, last):
    """One start: seconds to the first round, seconds a round after it, the processor's, memory of the process tree."""
    log.unlink(missing_ok=True)
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if "torch.distributed.run" in command else {}
    kept = {"PYTHONDONTWRITEBYTECODE": ""}  # modules are compiled once, as they are for users
    environment = {**os.environ, **threads, **kept, "PEERS_LOG": str(log), "PEERS_ROOT": str(os.getpid())}
    began, before = time.time(), _all_cores()
    with open(log.with_suffix(".txt"), "w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
        peak, ours = _watch(process, log, last)
        busy = (_all_cores() - before - ours) / (time.time() - began)
    events = _events(log)
    rounds = {event["round"]: event for event in events if event["event"] == "round"}
    if process.returncode or last not in rounds:
        sys.exit(f"{' '.join(command)} failed:\n{log.with_suffix('.txt').read_text()[-3000:]}")
    looks = [event["accuracy"] for event in events if event["event"] == "look"]
    return {
        "first": rounds[1]["time"] - began,
        "round": (rounds[last]["time"] - rounds[1]["time"]) / (last - 1),
        "cpu": (rounds[last]["cpu"] - rounds[1]["cpu"]) / (last - 1),
        "pss": peak / 2**20,
        "accuracy": looks[-1] if looks else None,
        "others": busy,
    }


def _watch(process, log, last):
    """(most memory, processor's seconds) of the process tree until it ends.

    Adding up pages takes ten milliseconds a process: it happens before and after the rounds that are timed.
    """
    root, peak, ours = psutil.Process(process.pid), 0, {}
    while process.poll() is None:
        rounds = [event["round"] for event in _events(log) if event["event"] == "round"]
        timed, total = bool(rounds) and max(rounds) < last, 0
        for one in _tree(root):
            with contextlib.suppress(psutil.Error):
                times = one.cpu_times()
                ours[one.pid] = times.user + times.system
                total += 0 if timed else one.memory_full_info().pss
        peak = max(peak, total)
        time.sleep(0.25)
    return peak, sum(ours.values())


def _events(log):
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


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
    parser.add_argument("--jobs", nargs="+", choices=[*job.JOBS], default=["cnn"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pfl", help="python of an environment with pfl")
    parser.add_argument("--small", action="store_true", help="a look at the embedded digits, in a folder of its own")
    options = parser.parse_args()
    if psutil is None:
        print("this needs psutil, which is not installed: pip install psutil", file=sys.stderr)
        sys.exit(2)
    more, found = job.SMALL if options.small else [], {}
    for name in options.jobs:
        if not (options.folder / name / "job.npz").exists():
            job.write(options.folder / name, more)
        found[name] = {who: [] for who in commands(options.folder / name, options.pfl, more)}
    for repeat in range(options.repeats):
        for name, those in found.items():
            folder = options.folder / name
            starts = [*commands(folder, options.pfl, more).items()]
            for at in range(len(starts)):
                who, command = starts[(at - repeat) % len(starts)]
                one = measure([str(word) for word in command], folder / f"{who}.log", job.JOBS[name].last)
                those[who].append(one)
                said = " ".join(f"{key} {value:.3f}" for key, value in one.items() if value is not None)
                print(f"{name:8} {who:8} {said}", flush=True)
                # Cut off, it has what was measured.
                (options.folder / "compare.json").write_text(json.dumps(found, indent=1))
    for name, those in found.items():
        print(f"\n{name}: medians\n\n{table(those)}")


def commands(folder, pfl, more):
    """name -> how it is started"""
    found = {
        "fedlens": [sys.executable, HERE / "fedlens_job.py", folder, *more],
        "tight": [sys.executable, HERE / "tight.py", folder],
    }
    if pfl:
        launcher = [pfl, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        found["pfl"] = [*launcher, HERE / "pfl_job.py", folder]
    return found


def table(found):
    middle = {}
    for who, ones in found.items():
        middle[who] = {key: statistics.median(one[key] or 0 for one in ones) for key in ones[0]}
    times = "seconds a round | FedLens / it | processor's seconds a round | FedLens / it"
    head = f"| | {times} | first round done after | PSS |"
    rows = [head, "| --- " * 7 + "|"]
    for who, its in middle.items():
        wall, cpu = (middle["fedlens"][key] / its[key] for key in ("round", "cpu"))
        seconds = f"{its['round']:.2f} | {wall:.2f} | {its['cpu']:.2f} | {cpu:.2f}"
        rows.append(f"| {who} | {seconds} | {its['first']:.1f} s | {its['pss']:.0f} MiB |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
