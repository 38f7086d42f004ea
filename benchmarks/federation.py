"""A federation of real processes on this machine against the simulator: TLS, node authentication, three SuperNodes.

    python benchmarks/federation.py FOLDER [bits] [kill] [strangers] [overhead] [trace]
    python benchmarks/federation.py FOLDER bits --small                # FedAvg alone: a look

Needs fedlens[flower]; `trace` also strace. Without words: all of them, about twenty minutes on two cores.

bits       six methods over Flower: the server's state against engine=sequential, bit by bit; Flower's bytes, the report
kill       kill -9 of the ServerApp, of the SuperLink and of a SuperNode in the middle of a round, then on to the end
strangers  a node without a registered key, one that trusts another authority, one whose owner forbids the method
overhead   seconds a round for models of 1 MB and 45 MB, and where they go
trace      which addresses the processes of a whole trial talk to, and whether what they write is TLS
"""

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

import needed
from fedlens import config
from fedlens.core.memories import Memories
from fedlens.core.run import run as run_rounds
from fedlens.core.tree import Tree
from fedlens.engines.sequential import Sequential
from fedlens.flower import launch
from fedlens.flower.defaults import added
from fedlens.runs.folder import RunFolder

NODES = 3
COMMON = f"data=mnist5k clients={NODES} cohort={NODES} local.steps=5 local.lr=0.05"
COMMON += " evaluate.personal=none picture=false device=cpu"
METHODS = {
    "fedavg": "algorithm=fedavg model=cnn2",
    "scaffold": "algorithm=scaffold model=cnn2",
    "fedsls": "algorithm=fedsls algorithm.pretrain_epochs=1 model=cnn2",
    "fedxds": "algorithm=fedxds algorithm.warmup_rounds=1 algorithm.warmup_epochs=1 model=cnn2",
    "pse": "algorithm=pse model=pse_net",
    "spatl": "algorithm=spatl algorithm.episodes=4 algorithm.later_episodes=2 model=cnn2",
}


def fedlens(*words: str) -> str:
    ended = subprocess.run([sys.executable, "-m", "fedlens", *words], capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"fedlens {' '.join(words)}\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}")
    return ended.stdout


def say(text: str) -> None:
    print(text, flush=True)


def until(condition: Callable[[], object], seconds: float = 300.0, pause: float = 0.2) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            sys.exit("waited in vain")
        time.sleep(pause)


# ---- a federation ----------------------------------------------------------------------------------------------------
@contextmanager
def federation(folder: Path, port: int) -> Iterator[Path]:
    """The SuperLink and its nodes, started by `fedlens deploy`; owners who let more than updates out."""
    if not folder.exists():
        fedlens("deploy", "init", str(folder), *COMMON.split(), "model=cnn2", "--port", str(port))
        fedlens("deploy", "certs", str(folder), "--trial")
        for policy in folder.glob("nodes/*/node.yaml"):
            policy.write_text(policy.read_text().replace("raw_derived: false", "raw_derived: true"))
    try:
        fedlens("deploy", "server", str(folder), "--start")
        for place in launch.node_folders(folder):
            fedlens("deploy", "node", str(place), "--start")
        yield folder
    finally:
        fedlens("deploy", "stop", str(folder))


def submit(folder: Path, words: str, out: Path, *more: str) -> str:
    settings = json.dumps(f"{words} out={out}")
    return fedlens("deploy", "run", str(folder), "--run-config", f"settings={settings} patience=60.0", *more)


def deploy(folder: Path, words: str, out: Path) -> RunFolder:
    submit(folder, words, out, "--stream")
    run = RunFolder(out)
    if run.result() is None:
        sys.exit(f"{out} has no result; the end of the SuperLink's log:\n" + log_of(folder))
    return run


def log_of(folder: Path) -> str:
    return (folder / "server" / "superlink.log").read_text()[-3000:]


def simulate(words: str, out: Path) -> RunFolder:
    fedlens("run", *words.split(), "engine=sequential", f"out={out}")
    return RunFolder(out)


def state(run: RunFolder) -> Tree:
    checkpoint, _ = run.load()
    assert checkpoint is not None
    return checkpoint.state


def verdict(mine: Tree, theirs: Tree) -> str:
    one, other = dict(mine.paths()), dict(theirs.paths())
    assert one.keys() == other.keys() and one
    if all(torch.equal(leaf, other[path]) for path, leaf in one.items()):
        return "the same bits"
    gap = max(float((leaf.double() - other[path].double()).abs().max()) for path, leaf in one.items())
    return f"NOT the same: up to {gap:g} apart"


def last_round(run: Path) -> int:
    return max(RunFolder(run).rounds(), default=0)


# ---- the same bits ---------------------------------------------------------------------------------------------------
def bits(folder: Path, port: int, methods: tuple[str, ...] = tuple(METHODS)) -> None:
    say("method     server's state  simulated  deployed   ledger down, up / MB   Flower out, in / MB")
    with federation(folder / "federation", port) as there:
        for method in methods:
            words, began = METHODS[method], time.monotonic()
            expected = simulate(f"{COMMON} rounds=3 {words}", folder / "simulated" / method)
            between = time.monotonic()
            run = deploy(there, f"{COMMON} rounds=3 {words}", folder / "deployed" / method)
            took = between - began, time.monotonic() - between
            result, moved = run.result(), flower_bytes(run)
            assert result is not None
            say(
                f"{method:9}  {verdict(state(expected), state(run)):14} {took[0]:8.0f} s {took[1]:8.0f} s"
                f"{result['bytes_down'] / 1e6:14.3f} {result['bytes_up'] / 1e6:8.3f}"
                f"{moved[0] / 1e6:14.3f} {moved[1] / 1e6:8.3f}"
            )
    page = folder / "report.html"
    fedlens("report", *(str(folder / "deployed" / method) for method in methods), "--out", str(page))
    say(f"fedlens report of these {len(methods)}: {page.stat().st_size / 1e6:.1f} MB")


def megabytes(run: RunFolder) -> str:
    result = run.result() or {}
    return f"{result['bytes_down'] / 1e6:.3f} MB down, {result['bytes_up'] / 1e6:.3f} MB up"


def flower_bytes(run: RunFolder) -> tuple[int, int]:
    """(out, in) of Flower's server, all of its runs that ours was."""
    rows = [row["network-traffic"] for row in json.loads((run.path / "flower.json").read_text())["flower"]]
    return sum(row["outbound-bytes"] for row in rows), sum(row["inbound-bytes"] for row in rows)


# ---- kill -9 ---------------------------------------------------------------------------------------------------------
def kill(folder: Path, port: int) -> None:
    words = f"{COMMON} rounds=5 {METHODS['scaffold']}"
    expected = simulate(words, folder / "simulated" / "kill")
    with federation(folder / "federation", port) as there:
        for victim in ("ServerApp", "SuperLink"):
            out = folder / "deployed" / f"killed-{victim.lower()}"
            submit(there, words, out)
            answered = strike(there, out, victim)
            began, before = time.monotonic(), last_round(out)
            if victim == "SuperLink":
                fedlens("deploy", "server", str(there), "--start")
            submit(there, words, out)
            until(lambda out=out: is_done(out))
            took, run = time.monotonic() - began, RunFolder(out)
            down, up = (count / 1e6 for count in flower_bytes(run))
            say(f"{victim} killed in round {before + 1} of 5, {answered} of {NODES} answers in the journal")
            say(f"    started again, done after {took:.0f} s: server's state {verdict(state(expected), state(run))},")
            say(f"    memories {memories(there, out, expected.client_memories(5), 5)};")
            say(f"    ledger {megabytes(run)}, Flower's two runs {down:.3f} MB out, {up:.3f} MB in")
        lose_a_node(folder, there)


def strike(there: Path, out: Path, victim: str) -> int:
    """kill -9 in the middle of a round after the second: some have answered, others have not."""
    journal = out / "journal"

    def amid() -> bool:
        return last_round(out) >= 2 and 0 < len(list(journal.glob("*.sealed"))) < NODES

    until(amid, pause=0.005)
    for pid in serverapps(there) if victim == "ServerApp" else [launch.running(there / "server", "superlink") or 0]:
        os.kill(pid, signal.SIGKILL)
    answered = len(list(journal.glob("*.sealed")))
    until(lambda: free_lock(out), 120)  # the ServerApp ends with its SuperLink, but not at once
    return answered


def is_done(out: Path) -> bool:
    return RunFolder(out).result() is not None and free_lock(out)


def free_lock(out: Path) -> bool:
    """Whether no process holds the run."""
    import fcntl

    with open(out / "lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def serverapps(there: Path) -> list[int]:
    """Processes that run the ServerApp under this federation's SuperLink."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    family = {launch.running(there / "server", "superlink")}
    for _ in range(5):
        family |= {int(pid) for pid, parent, _ in rows if int(parent) in family}
    found = [int(pid) for pid, _, line in rows if int(pid) in family and "flwr-serverapp" in line]
    assert found, "no ServerApp runs"
    return found


def memories(there: Path, out: Path, expected: dict[int, Tree], rounds: int) -> str:
    name = json.loads((out / "federation.json").read_text())["run"]
    kept = {
        client: Memories(there / "nodes" / str(client) / "storage" / name / "clients", round=rounds).get(client)
        for client in expected
    }
    return verdict(Tree({str(i): kept[i] for i in expected}), Tree({str(i): expected[i] for i in expected}))


def lose_a_node(folder: Path, there: Path) -> None:
    """Client 1 is killed in a round and started again when that round has ended."""
    words, out, victim = f"{COMMON} rounds=6 {METHODS['scaffold']}", folder / "deployed" / "killed-node", 1
    place = there / "nodes" / str(victim)
    submit(there, words, out)
    until(lambda: last_round(out) >= 2, pause=0.02)
    for name in ("supernode", "guard"):
        os.kill(launch.running(place, name) or 0, signal.SIGKILL)
    until(lambda: last_round(out) >= 3)
    launch.start_node(place)
    until(lambda: is_done(out))
    rows = RunFolder(out).metrics().to_pylist()
    missed = {row["round"] - 1 for row in rows if row["metric"] == "missing" and row["client"] == victim}
    longest = max(row["value"] for row in rows if row["metric"] == "seconds")
    experiment = config.read(None, words.split()).resolved()
    images = experiment.data.load()

    class Without(Sequential):
        def run(self, job, cohort):
            return super().run(job, [i for i in cohort if (i, job.round in missed) != (victim, True)])

    torch.set_num_threads(1)
    engine = Without(experiment.network(images), experiment.federation(images)[0])
    expected = run_rounds(experiment.algorithm, engine.net, engine, experiment.plan, seed=experiment.seed)
    mine = memories(there, out, {i: engine.memories.get(i) for i in range(NODES)}, 6)
    say(f"SuperNode {victim} killed in round 3 of 6: it missed rounds {sorted(r + 1 for r in missed)} and no other,")
    say(f"    the longest round took {longest:.0f} s; against a simulation in which it misses the same rounds:")
    say(f"    server's state {verdict(expected.state, state(RunFolder(out)))}, memories {mine}")


# ---- strangers -------------------------------------------------------------------------------------------------------
def strangers(folder: Path, port: int) -> None:
    from fedlens.flower.certificates import Authority, node_key  # needs cryptography, which Flower brings

    with federation(folder / "federation", port) as there:
        stranger, deceived = folder / "stranger", folder / "deceived"
        for place, client in ((stranger, 0), (deceived, 1)):
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(there / "nodes" / str(client), place, ignore=shutil.ignore_patterns("*.pid", "*.log"))
        node_key(stranger / "key", folder / "stranger.pub")
        shutil.copy(Authority(folder / "another").certificate_file, deceived / "ca.crt")
        for place, what in ((stranger, "unregistered key"), (deceived, "another authority")):
            launch.start(place, "supernode", alone(launch.supernode(place), port + 20), launch.ENVIRONMENT)
            until(lambda place=place: launch.running(place, "supernode") is None, 90)
            lines = [line for line in (place / "supernode.log").read_text().splitlines() if line.strip()]
            reason = next((each for each in lines if re.search("CERTIFICATE_VERIFY|Failed to activate", each)), "?")
            say(f"{what}: the SuperNode ends with: {reason.strip()[:160]}")
        policy = there / "nodes" / "2" / "node.yaml"
        before = policy.read_text()
        fedlens("deploy", "stop", str(policy.parent))
        policy.write_text(before.replace("algorithms: []", "algorithms: [fedavg]"))
        fedlens("deploy", "node", str(policy.parent), "--start")
        out = folder / "deployed" / "forbidden"
        told = submit(there, f"{COMMON} rounds=3 {METHODS['scaffold']}", out, "--stream")
        policy.write_text(before)
        said = next((line for line in told.splitlines()[::-1] if "refuses this run: its" in line), "NOT refused")
        say(f"forbidden method: the run ends with: {said.strip()[:160]}; {last_round(out)} rounds were done")


def alone(command: list[str], port: int) -> list[str]:
    """On a port of its own: the node whose folder was copied runs, too."""
    at = command.index("--port") + 1
    return [*command[:at], str(port), *command[at + 1 :]]


# ---- overhead --------------------------------------------------------------------------------------------------------
def overhead(folder: Path, port: int) -> None:
    words = f"{COMMON} rounds=6 local.steps=1 local.batch_size=8 evaluate.every=0".replace(" local.steps=5", "")
    words = " ".join([words, *added(words.split())[0]])  # as it is deployed
    say("seconds a round, median of rounds 2 to 5       simulated  deployed")
    with federation(folder / "federation", port) as there:
        for model, size in (("resnet20", "1.1 MB"), ("resnet18", "45 MB")):
            one = simulate(f"{words} model={model}", folder / "simulated" / model)
            other = deploy(there, f"{words} model={model}", folder / "deployed" / model)
            say(f"{model}, {size:34} {seconds(one):11.2f} {seconds(other):9.2f}")
            row = json.loads((other.path / "flower.json").read_text())["flower"][0]
            spent = row["compute-time"]["clientapp-seconds"] / (6 * NODES + NODES)
            say(f"    Flower's count of a ClientApp task, mean of all: {spent:.2f} s")


def seconds(run: RunFolder) -> float:
    rows = [row for row in run.metrics().to_pylist() if row["metric"] == "seconds"]
    return statistics.median(row["value"] for row in rows if 2 <= row["round"] <= 5)


# ---- trace -----------------------------------------------------------------------------------------------------------
TLS = re.compile(r'^"\\x(14|15|16|17)\\x03\\x0[1-4]')  # type and version of a TLS record


def traced(folder: Path, port: int) -> None:
    with federation(folder / "federation", port) as there:
        deploy(there, f"{COMMON} rounds=2 {METHODS['fedavg']}", folder / "deployed" / "traced")


def trace(folder: Path, port: int) -> None:
    """Every connect and every write to a TCP socket, of all processes of a trial of two rounds."""
    record = folder / "trace"
    shutil.rmtree(record, ignore_errors=True)
    record.mkdir()
    calls = "trace=socket,connect,sendto,sendmsg,write,writev,close,accept,accept4,bind"
    line = ["strace", "-ff", "-yy", "-xx", "-s", "8", "-e", calls, "-o", str(record / "t")]
    trial = [sys.executable, __file__, str(folder), "traced", "--port", str(port)]
    subprocess.run([*line, *trial], check=True, stderr=subprocess.DEVNULL)
    connects, writes, odd = Counter[str](), Counter[str](), Counter[str]()
    for path in record.iterdir():
        read_trace(path, connects, writes, odd)
    say(f"{len(list(record.iterdir()))} processes and threads; connections asked for:")
    for where, count in connects.most_common():
        say(f"    {count:6} {where}")
    say("writes to TCP sockets: " + ", ".join(f"{count} {kind}" for kind, count in writes.most_common()))
    for begin, count in odd.most_common(8):
        say(f"    {count:6} begin with {begin}")


def read_trace(path: Path, connects: Counter, writes: Counter, odd: Counter) -> None:
    """One thread's calls. With -yy a descriptor is shown with the ends of its connection."""
    for line in path.read_text(errors="replace").splitlines():
        if line.startswith("connect("):
            connects[_address(line)] += 1
        elif (found := re.match(r'(?:write|sendto)\(\d+<TCP(?:v6)?:\[[^\]]*\]>, ("[^"]*")', line)) or (
            found := re.match(r'(?:sendmsg|writev)\(\d+<TCP(?:v6)?:.*?iov_base=("[^"]*")', line)
        ):
            kind = "a TLS record" if TLS.match(found[1]) else "something else"
            writes[kind] += 1
            if kind != "a TLS record":
                odd[found[1]] += 1


def _address(line: str) -> str:
    if "AF_UNIX" in line:
        return "a Unix socket"
    host = re.search(r'inet_addr\("([^"]*)"\)|inet_pton\(AF_INET6, "([^"]*)"', line)
    port = re.search(r"htons\((\d+)\)", line)
    plain = bytes.fromhex((host[1] or host[2]).replace("\\x", "")).decode() if host else line[:80]
    return f"{plain} port {port[1] if port else '?'}"


TRIALS = {"bits": bits, "kill": kill, "strangers": strangers, "overhead": overhead, "trace": trace}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("trials", nargs="*")
    parser.add_argument("--port", type=int, default=9292)
    parser.add_argument("--small", action="store_true", help="bits: FedAvg alone")
    asked = parser.parse_args()
    needed.package("flwr", "'fedlens[flower]'")
    trials = TRIALS | ({"bits": partial(bits, methods=("fedavg",))} if asked.small else {})
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name in asked.trials or trials:
        say(f"\n# {name}")
        (traced if name == "traced" else trials[name])(folder, asked.port)  # traced: what `trace` looks at


if __name__ == "__main__":
    main()
