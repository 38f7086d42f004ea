"""Every command that a page names is run: those in sentences and tables, `start.py`, and the scripts of benchmarks/.

Blocks of `fedlens` commands are run by test_docs.py.
"""

import importlib.util
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path

import pytest
import torch
import typer

from fedlens.cli.main import app
from test_docs import CARDS, FEW, PAGES, ROOT, blocks, fedlens, needs, smaller

RESULTS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "results").glob("*.md"))
COMMAND = re.compile(r"(fedlens|python3?|pytest|pip)( |$)")


def commands(page: str) -> list[str]:
    """All that a page shows as commands, but for the `fedlens` lines of its bash blocks."""
    text = (ROOT / page).read_text("utf-8")
    prose = re.sub(r"^ {0,3}```.*?^ {0,3}```", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for kind, block in blocks(page) if kind in ("", "bash") for line in block.splitlines()]
    indented = [line.strip() for line in prose.splitlines() if line.startswith("    ")]
    run_there = {line for kind, block in blocks(page) if kind == "bash" for line in block.splitlines()}
    lines = [line for line in lines if not (line in run_there and line.startswith("fedlens "))]
    found = [*lines, *indented, *re.findall(r"`([^`]+)`", prose)]
    return list(dict.fromkeys(each.partition(" #")[0].strip() for each in found if COMMAND.match(each)))


# ---- what is done with a command -------------------------------------------------------------------------------------
INSTEAD = {  # what a page leaves open, only mentions, or cannot have here: what is run in its place
    "fedlens": "fedlens --help",
    **{f"fedlens {verb}": f"fedlens {verb} --help" for verb in ("audit", "compare", "deploy", "diff", "explain")},
    **{f"fedlens {verb}": f"fedlens {verb} --help" for verb in ("report", "resume", "ui")},
    "fedlens compare ... --seeds 5": "fedlens compare fedavg --seeds 5",
    "fedlens data get NAME": "fedlens data get mnist5k",
    "fedlens describe NAME": "fedlens describe scaffold",
    "fedlens diff A B": "fedlens diff runs/a runs/b",
    "fedlens resume RUN": "fedlens resume runs/a",
    "fedlens resume RUN data.path=PLACE": "fedlens resume --help",
    "fedlens resume RUN rounds=200": "fedlens resume runs/longer rounds=2",
    "fedlens resume RUN uplink.dp.budget=12": "fedlens resume runs/private uplink.dp.budget=12",
    "fedlens run data=mnist model=cnn algorithm=fedavg rounds=2000 device=cuda:0": (
        "fedlens run data=mnist5k model=cnn algorithm=fedavg rounds=2000 device=cpu"
    ),
}


def ran(words: list[str]) -> str:
    if reason := needs(words[1:]):
        return reason
    fedlens(words[1:] if "--help" in words else smaller(words[1:]))
    return ""


def understood(words: list[str]) -> None:
    """By the command line's own parser; carried out in test_a_deployment_as_its_page_tells_it."""
    group = typer.main.get_command(app)
    command = group.commands["deploy"].commands[words[2]]  # pyright: ignore[reportAttributeAccessIssue]
    command.make_context(words[2], words[3:])


def started(words: list[str]) -> None:
    """Up to the programs that it calls; those are CI's, and a new environment is made below."""
    spec = importlib.util.spec_from_file_location("start", ROOT / "start.py")
    start, called = importlib.util.module_from_spec(spec), []
    spec.loader.exec_module(start)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words[1:])
        patch.setattr(start, "set_up", lambda extra: None)
        patch.setattr(start, "call", lambda *command, **options: called.append(command))
        start.main()
    assert called
    for place in (word for word in words if word.startswith("tests/")):
        files = [ROOT / place] if place.endswith(".py") else [*(ROOT / place).glob("test_*.py")]
        text = "".join(file.read_text() for file in files)
        assert "slow" not in words or "mark.slow" in text, f"{place} has no slow test"
        assert "def test_" in text


def measurable(words: list[str]) -> None:
    """There is such a script with such options; it is run below."""
    script = words[1].removeprefix("benchmarks/")
    assert script in QUICK, f"{script}: how is it run quickly?"
    for option in (word for word in words if word.startswith("--")):
        assert re.search(rf"{option}\b", said_by(script, "--help")[1]), f"{script} has no {option}"


def in_a_copy(words: list[str]) -> None:
    place = Path("checkout")
    if not place.exists():
        copied(place)
    environment = {**os.environ, "PYTHONPATH": str((place / "src").resolve())}
    options = {"capture_output": True, "text": True, "timeout": 120}
    ended = subprocess.run([sys.executable, *words[1:]], cwd=place, env=environment, **options)
    assert ended.returncode == 0, f"{' '.join(words)}\n{ended.stdout}{ended.stderr}"


def installable(words: list[str]) -> None:
    """The extras that it names exist; test_packaging.py installs the wheel."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert words[:2] == ["pip", "install"] and len(words) == 3
    assert words[2] in (".", "dist/*.whl") or re.fullmatch(r"fedlens\[(\w+)\]", words[2])[1] in known


def not_ours(words: list[str]) -> None:
    assert not (ROOT / words[1]).exists()


def run_with_its_block(words: list[str]) -> None:
    """A file that the page itself shows, which test_docs.py writes and runs."""
    assert any(f"```python\n# {words[1]}\n" in (ROOT / page).read_text() for page in PAGES)


RULES: dict[str, Callable[[list[str]], str | None]] = {  # the longest beginning counts; what none fits fails
    "fedlens": ran,
    "fedlens deploy ": understood,
    "fedlens deploy --help": ran,
    "pip install ": installable,
    "python3 start.py ": started,
    "python benchmarks/": measurable,
    "python docs/": in_a_copy,
    "python -m hatchling build": in_a_copy,
    "python occlusion.py": run_with_its_block,
    "python main.py": not_ours,  # PFLlib's, FL-bench's
    "python generate_data.py": not_ours,
}
done: set[str] = set()


def carry_out(command: str) -> str:
    """Why it could not be run here; empty where it was."""
    command = INSTEAD.get(command, command)
    fitting = [beginning for beginning in RULES if command.startswith(beginning)]
    assert fitting, f"no rule says how to run `{command}`"
    rule, words = RULES[max(fitting, key=len)], shlex.split(command)
    if rule is ran:
        left_open = [word for word in words if word == "..." or re.fullmatch("[A-Z]+", word)]
        assert not left_open, f"INSTEAD does not say what {left_open} of `{command}` are"
    if command in done:
        return ""
    done.add(command)
    return rule(words) or ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A place in which the runs exist that pages take for granted."""
    place = tmp_path_factory.mktemp("named")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for name in ("a", "b", "longer"):
            fedlens(["run", *FEW, f"out=runs/{name}"])
        private = ("uplink=dp", "uplink.norm=1", "uplink.multiplier=4", "uplink.budget=8", "weighting=uniform")
        fedlens(["run", *FEW, *private, "out=runs/private"])
    return place


@pytest.mark.parametrize("page", [page for page in (*PAGES, *CARDS) if commands(page)])
def test_commands_that_a_page_names(page, folder, monkeypatch):
    monkeypatch.chdir(folder)
    left = {command: carry_out(command) for command in commands(page)}
    if all(left.values()):
        pytest.skip("; ".join(f"{command}: {reason}" for command, reason in left.items()))


@pytest.mark.parametrize(
    "command", ["fedlens describe METHOD", "fedlens audit ...", "python3 stop.py", "fedlens fly", "python docs/none.py"]
)
def test_a_command_without_a_rule_fails(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError):
        carry_out(command)


# ---- benchmarks ------------------------------------------------------------------------------------------------------
QUICK = {  # a look instead of a measurement
    "attribution.py": "--device cpu --batch 2 --repeats 1 --models vgg11 --epoch 20",
    "audit.py": "--small --device cpu --steps 2",
    "checkpoint_cost.py": f"--before {ROOT} --repeat 1",
    "distillation.py": "feddf rounds=1 clients=4 cohort=2 algorithm.steps=2 local.steps=1",
    "evidence.py": "--papers fedxds --list",
    "faults.py": "rounds=10 clients=20 cohort=4 local.steps=1",
    "federation.py": "bits --small",
    "fuzz.py": "--tries 200 --seed 0",
    "kill.py": "--kills 2",
    "lanes_agree.py": "--device cpu --methods fedavg scaffold",
    "lanes_speed.py": "--small --device cpu",
    "memory.py": "data=mnist5k clients=20 cohort=4 model=mlp rounds=20 local.steps=1 --every 0.1",
    "peers/compare.py": "--repeats 1 --small",
    "pse_cost.py": "--device cpu --clients 2 --steps 2 --rounds 1",
    "ray_cluster.py": "clients=4 cohort=4 rounds=5 model=cnn2",
    "residency.py": "--device cpu --images 400 --side 16 --rounds 2 --model cnn2",
    "robust.py": "--small",
    "scaffold_sizes.py": "--runs out --json out.json --on digits --seeds 0 --list",
    "soak.py": "rounds=40",
    "spatl.py": "--device cpu --models cnn2 --repeats 1 --images 60",
    "submodels.py": "--data mnist5k --model cnn2 --images 80 --epochs 1 1 --episodes 2 1",
    "time_to_accuracy.py": "rounds=2 clients=4 local.steps=1",
}
OF_COMPARE = {"fedlens_job.py", "job.py", "pfl_job.py", "tight.py"}  # it starts them
LACKING = {"flwr": "federation.py", "ray": "ray_cluster.py", "psutil": "peers/compare.py"}


@cache
def said_by(script: str, *words: str) -> tuple[object, str, str]:
    """(exit code, output, complaints) of a script in this process: importing torch for each would take longer."""
    path, out, complaints, code = ROOT / "benchmarks" / script, io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(complaints):
        patch.setattr(sys, "argv", [str(path), *words])
        patch.setattr(sys, "path", [str(path.parent), *sys.path])
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            code = end.code
    return code or 0, out.getvalue(), complaints.getvalue()


def test_every_script_is_known():
    scripts = {path.relative_to(ROOT / "benchmarks").as_posix() for path in (ROOT / "benchmarks").rglob("*.py")}
    assert scripts - {f"peers/{name}" for name in OF_COMPARE} - {"needed.py"} == QUICK.keys()
    for page in (*PAGES, *CARDS, *RESULTS):
        named = re.findall(r"python3? benchmarks/([\w/.]+)", (ROOT / page).read_text("utf-8"))
        assert {*named} <= QUICK.keys(), page
    for page in RESULTS:
        for words in map(shlex.split, commands(page)):
            if words[1].startswith("benchmarks/"):
                measurable(words)


@pytest.mark.parametrize("script", QUICK)
def test_every_script_has_help(script):
    code, said, complaints = said_by(script, "--help")
    assert (code, complaints) == (0, "") and said.startswith("usage: ") and f"benchmarks/{script}" in said


@pytest.mark.parametrize("script", ["lanes_agree.py", "lanes_speed.py", "residency.py"])
def test_without_a_gpu_one_sentence(script, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, said, complaints = said_by.__wrapped__(script)
    assert (code, said, complaints.count("\n")) == (2, "", 1) and "needs a GPU" in complaints


@pytest.mark.parametrize("package", LACKING)
def test_without_a_package_one_sentence(package, monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    monkeypatch.setitem(sys.modules, package, None)
    code, said, complaints = said_by.__wrapped__(LACKING[package], str(tmp_path / "out"))
    assert (code, said, complaints.count("\n")) == (2, "", 1) and f"needs {package}" in complaints
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("script", QUICK)
def test_scripts_run(script, tmp_path):
    """A minute at most each: what the pages ask most of it, made quick."""
    pages = [command for page in (*PAGES, *RESULTS) for command in commands(page)]
    asked = [shlex.split(each)[2:] for each in pages if each.startswith(f"python benchmarks/{script}")]
    words = max(asked, key=len, default=[])
    words = [word for word in words if word not in ("--pfl", "PYTHON") and not word.startswith("[")]  # another's pins
    words = ["out" if word in ("OUT", "FOLDER") else word for word in words]
    line = [sys.executable, str(ROOT / "benchmarks" / script), *words, *QUICK[script].split()]
    if script == "federation.py":
        line += ["--port", str(free_port())]
    ended = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    missing = [name for name, of in LACKING.items() if of == script and not importlib.util.find_spec(name)]
    if missing:
        assert ended.returncode == 2 and ended.stderr.count("\n") == 1 and f"needs {missing[0]}" in ended.stderr
        pytest.skip(ended.stderr.strip())
    assert ended.returncode == 0 and ended.stdout.strip(), f"{' '.join(line)}\n{ended.stdout}{ended.stderr}"
    assert "DIFFER" not in ended.stdout and "NOT the same" not in ended.stdout and "| NO |" not in ended.stdout


# ---- a new environment, a deployment ---------------------------------------------------------------------------------
def copied(place: Path) -> None:
    usual = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "venv")
    shutil.copytree(ROOT, place, ignore=lambda at, names: usual(at, names) | ({"runs"} if Path(at) == ROOT else set()))


@pytest.mark.slow
def test_start_in_a_copy(tmp_path):
    """Minutes: sets up an environment, then the first screen of the README and some tests."""
    copied(place := tmp_path / "copy")
    words = shlex.join(smaller(["compare", "fedavg", "feddyn", "fedper"]))
    environment = {name: value for name, value in os.environ.items() if name != "FEDLENS_VENV"}
    for line in (
        f"python3 start.py run {shlex.join(FEW)}",
        f".venv/bin/fedlens {words}",
        "python3 start.py test tests/core/test_tree.py",
    ):
        command = [sys.executable if word == "python3" else word for word in shlex.split(line)]
        ended = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=900)
        if re.search(r"from versions: none|NewConnectionError|NameResolutionError|timed out", ended.stderr):
            pytest.skip("pip cannot reach the packages of a new environment")
        assert ended.returncode == 0, f"{line}\n{ended.stdout}{ended.stderr}"
    assert (place / "runs/compare-mnist5k/report.html").exists()


def free_port() -> int:
    from test_flower import free_port

    return free_port(8)


@pytest.mark.slow
def test_a_deployment_as_its_page_tells_it(tmp_path):
    """Two minutes: this machine is fl.example.org, alice and bob; scp copies a folder."""
    pytest.importorskip("flwr", reason="flwr, of the extra flower, is not installed")
    few = "rounds=1 local.steps=1 model=cnn2 picture=false"
    said, port, nodes = [], free_port(), [tmp_path / name / "node" for name in ("alice", "bob")]
    (other,) = (command for command in commands("docs/deploy.md") if "--run-config" in command)
    block_lines = [line for kind, text in blocks("docs/deploy.md") if not kind for line in text.splitlines()]
    lines = [line.partition(" #")[0].strip() for line in block_lines]
    verbs = [line.split()[2] for line in lines if line.startswith("fedlens deploy")]
    assert verbs == ["init", "certs", "server", "node", "run", "status", "stop"]
    lines.insert(-2, f"{other} --stream".replace("...", few).replace("/data", str(tmp_path)))
    try:
        for line in lines:
            words = shlex.split(line.replace("fl.example.org", "127.0.0.1"))
            if words[0] == "scp":
                machine, _, name = words[3].partition(":")
                shutil.copytree(tmp_path / words[2], tmp_path / machine / name)
            elif words[0] == "fedlens":
                more = [*few.split(), "--port", str(port)] if words[2] == "init" else []
                for place in [node.parent for node in nodes] if words[2] == "node" else [tmp_path]:
                    said.append(called(*words[1:], *more, cwd=place))
        for run in ("federation/server/run", "run2"):
            assert (tmp_path / run / "result.json").exists(), said
    finally:
        for place in ("federation", *map(str, nodes)):
            called("deploy", "stop", place, cwd=tmp_path)


def called(*words: str, cwd: Path) -> str:
    line = [sys.executable, "-m", "fedlens", *words]
    ended = subprocess.run(line, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, f"{' '.join(words)}\n{ended.stdout}{ended.stderr}"
    return ended.stdout[-2000:]
