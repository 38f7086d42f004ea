"""Every command that a page names is run: those in sentences and tables, `start.py`, and the scripts of benchmarks/.

Blocks of `fedlens` commands are run by test_docs.py.
"""

import importlib.util
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path

import click
import pytest
import torch
import typer

from fedlens.cli.main import app
from fedlens.compare.run import asked
from fedlens.core.errors import BadInput
from fedlens.flower import launch
from fedlens.runs.grid import seeds_of
from fedlens.simulate.finish import check_start
from scripts import script
from test_docs import CARDS, FEW, PAGES, ROOT, bars, blocks, decide, fedlens, needs, smaller

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
    **{f"fedlens league{word}": "fedlens league --help" for word in ("", " my.module:Method", " --page")},
    "fedlens data get NAME": "fedlens data get mnist5k",
    "fedlens deploy server": "fedlens deploy --help",
    "fedlens describe NAME": "fedlens describe scaffold",
    "fedlens diff A B": "fedlens diff runs/a runs/b",
    "fedlens ui runs": "fedlens ui --help",
    "fedlens resume RUN": "fedlens resume runs/a",
    "fedlens rm RUN": "fedlens rm --help",
    "fedlens show RUN": "fedlens show runs/a",
    "fedlens --install-completion": "fedlens --help",
    "fedlens explain RUN data.path=PLACE": "fedlens explain --help",
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
    """By the command line's own parser; carried out in test_three_hospitals_as_the_page_tells_it."""
    parsed(words[1:])


def parsed(words: list[str]) -> dict:
    """What the command line's own parser makes of them."""
    command: click.Command = typer.main.get_command(app)
    while isinstance(command, click.Group):
        command, words = command.commands[words[0]], words[1:]
    return command.make_context(command.name, [*words]).params


def comparable(words: list[str]) -> str:
    """Up to the first run: each of its methods may begin. Blocks of pages are compared to the end, by test_docs.py."""
    if reason := needs(words[1:]):
        return reason
    asked_for = parsed(smaller(words[1:]))
    what = asked(asked_for["words"])
    for cell in what.cells:
        check_start(what.task(cell, seeds_of(asked_for["seeds"])[0], Path("compared")).experiment)
    return ""


def writes_cards(words: list[str]) -> None:
    """Whatever it makes of the methods, which is test_cards.py's matter."""
    writer, place = script(words[1]), Path("cards").resolve()
    (place / "methods").mkdir(parents=True, exist_ok=True)
    (place / "methods/gone.md").write_text("of a method that is no more")
    texts = {place / "methods.md": "all", place / "methods/one.md": "one"}
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()):
        patch.setattr(sys, "argv", words[1:])
        patch.setattr(writer, "DOCS", place)
        patch.setattr(writer, "cards", lambda: texts)
        writer.main()
    assert {path: path.read_text() for path in place.rglob("*.md")} == texts


def draws_releases(words: list[str]) -> str | None:
    """With fewer images and steps: how well its network knows them is not the matter here."""
    if not os.environ.get("FEDLENS_DATA"):
        return "its data are found through FEDLENS_DATA, which is not set"
    drawer = script(words[1])
    drawer.TRAINED, drawer.EPOCHS, drawer.STEPS, drawer.IMAGES = 60, 1, 4, Path("released").resolve()
    drawer.IMAGES.mkdir()
    with redirect_stdout(io.StringIO()):
        drawer.main()
    assert {path.name for path in drawer.IMAGES.iterdir()} == {"released.png", "sensitivity.png"}
    return None


def as_a_federation(words: list[str]) -> None:
    """A folder that `deploy init` has made, simulated."""
    if not Path(words[2]).exists():
        launch.init(Path(words[2]), FEW, "127.0.0.1", 9092)
    fedlens(words[1:])


def started(words: list[str]) -> None:
    """Up to the programs that it calls; those are CI's, and a new environment is made below."""
    start, called = script("start.py"), []
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
    """The extras that it names exist, and so do the constraints; test_packaging.py installs the wheel."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    what, *constraints = words[2 + (words[2] == "-e") :]
    assert words[:2] == ["pip", "install"] and constraints in ([], ["-c", "constraints.txt"])
    assert not constraints or (ROOT / constraints[1]).is_file()
    named = re.fullmatch(r"(?:fedlens|\.)\[([\w,]+)\]", what)
    assert what in (".", "dist/*.whl") or {*named[1].split(",")} <= {*known}


def not_ours(words: list[str]) -> None:
    assert not (ROOT / words[1]).exists()


def run_with_its_block(words: list[str]) -> None:
    """A file that the page itself shows, which test_docs.py writes and runs."""
    assert any(f"```python\n# {words[1]}\n" in (ROOT / page).read_text() for page in PAGES)


RULES: dict[str, Callable[[list[str]], str | None]] = {  # the longest beginning counts; what none fits fails
    "fedlens": ran,
    "fedlens compare ": comparable,
    "fedlens compare --help": ran,
    "fedlens deploy ": understood,
    "fedlens export federation/": understood,
    "fedlens run federation": as_a_federation,
    "fedlens deploy --help": ran,
    "pip install ": installable,
    "python3 start.py ": started,
    "python benchmarks/": measurable,
    "python docs/": in_a_copy,
    "python docs/cards.py": writes_cards,
    "python docs/releases.py": draws_releases,
    "python -m hatchling build": in_a_copy,
    "python occlusion.py": run_with_its_block,
    "python make_hospitals.py": run_with_its_block,
    "python exported/predict.py": not_ours,  # which test_docs.py runs where it is made
    "python main.py": not_ours,  # PFLlib's, FL-bench's
    "python generate_data.py": not_ours,
}
done: set[str] = set()


def carry_out(command: str) -> str:
    """Why it could not be run here; empty where it was."""
    command = INSTEAD.get(command, command)
    if re.match(r"fedlens (deploy )?export [A-Z]", command):  # a form; tests of the export run it
        command = "fedlens export --help"
    fitting = [beginning for beginning in RULES if command.startswith(beginning)]
    assert fitting, f"no rule says how to run `{command}`"
    rule, words = RULES[max(fitting, key=len)], shlex.split(command)
    if rule in (ran, comparable):
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
    "command",
    [
        "fedlens describe METHOD",
        "fedlens audit ...",
        "python3 stop.py",
        "fedlens fly",
        "python docs/none.py",
        "fedlens compare fedavg fedavgg",
    ],
)
def test_a_command_without_a_rule_fails(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((AssertionError, BadInput)):
        carry_out(command)


# ---- benchmarks ------------------------------------------------------------------------------------------------------
QUICK = {  # a look instead of a measurement
    "all_methods.py": "rounds=1 clients=4 cohort=2 --json all.json --worlds digits --seeds 0 --methods fedavg",
    "attribution.py": "--device cpu --batch 2 --repeats 1 --models vgg11 --epoch 20",
    "audit.py": "--small --device cpu --steps 2",
    "checkpoint_cost.py": f"--before {ROOT} --repeat 1",
    "compile_rule.py": "--device cpu --quick",
    "distillation.py": "rounds=1 clients=4 cohort.count=2 algorithm.steps=2 local.steps=1",
    "evidence.py": "--papers fedxds --list",
    "faults.py": "rounds=10 clients=20 cohort=4 local.steps=1",
    "federation.py": "bits --small",
    "fuzz.py": "--tries 200 --seed 0",
    "grid.py": "--device cpu --quick",
    "kill.py": "--kills 2",
    "lanes_agree.py": "--device cpu --methods fedavg scaffold",
    "league_again.py": "--help",
    "league_splits.py": "--help",
    "lanes_speed.py": "--small --device cpu",
    "many_images.py": "--count 60",
    "memory.py": "data=mnist5k clients=20 cohort=4 model=mlp rounds=20 local.steps=1 --every 0.1",
    "peers/compare.py": "--repeats 1 --small --jobs cnn resnet20",
    "peers/gpu.py": "--device cpu --quick",
    "pse_cost.py": "--device cpu --clients 2 --steps 2 --rounds 1",
    "pse_excited.py": "--clients 1 --steps 2 --presets default",
    "pse_looks.py": "--help",
    "quick.py": "--only fedsls/cost",
    "ray_cluster.py": "clients=4 cohort=4 rounds=5 model=cnn2",
    "residency.py": "--device cpu --images 400 --side 16 --rounds 2 --model cnn2",
    "robust.py": "--small",
    "scaffold_sizes.py": "--runs out --json out.json --on digits --seeds 0 --list",
    "sitting_speed.py": "--device cpu --quick --parts auto",
    "soak.py": "rounds=40",
    "spatl.py": "--device cpu --models cnn2 --repeats 1 --images 60",
    "startup.py": "--repeats 1 rounds=1 model=mlp",
    "steps.py": "--device cpu --quick",
    "submodels.py": "--data mnist5k --model cnn2 --images 80 --epochs 1 1 --episodes 2 1 --updates 1",
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
    unwanted = "--pfl", "PYTHON", "WHEEL", "--page", "results/durability.md"  # another's pins, and a page of ours
    words = [word for word in words if word not in unwanted and word[0] != "["]
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
    made = {"runs", "data", "fuzz"}  # what commands leave in a checkout
    ignore = lambda at, names: usual(at, names) | (made if Path(at) == ROOT else set())  # noqa: E731
    shutil.copytree(ROOT, place, symlinks=True, ignore=ignore)


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


OWNERS = {"alice": ("covid", "normal", "pneumonia"), "bob": ("normal", "pneumonia"), "carol": ("covid", "normal")}


@pytest.mark.slow
@pytest.mark.flower
def test_three_hospitals_as_the_page_tells_it(tmp_path):
    """Minutes: this machine is fl.example.org, alice, bob and carol, of whom two lack a class; scp copies a file."""
    pytest.importorskip("flwr", reason="flwr, of the extra flower, is not installed")
    few, port = ["rounds=2", "local.steps=2", "local.batch_size=4", "model=cnn2", "picture=false"], free_port()
    server = tmp_path / "server"
    server.mkdir()
    bars(server / "data" / "test", OWNERS["alice"])
    for seed, (owner, classes) in enumerate(OWNERS.items()):
        bars(tmp_path / owner / "data" / "scans", classes, seed=seed + 1)
    shown = next(text for kind, text in blocks("docs/deploy.md") if kind == "yaml")
    steps = [text for kind, text in blocks("docs/deploy.md") if not kind and "pip install" not in text]
    lines = [line.partition(" #")[0].strip() for text in steps for line in text.splitlines()]
    try:
        for line in lines:
            words = shlex.split(line.replace("fl.example.org", "127.0.0.1" if "init" in line else "server"))
            if words[0] == "scp" and words[1].startswith("federation/"):
                shutil.copy(server / words[1], tmp_path / words[2].rstrip(":"))
            elif words[0] == "scp":
                for owner in OWNERS:
                    shutil.copy(tmp_path / owner / words[1], server / f"{owner}.pub")
            elif words[2] in ("join", "node", "export") or words[2:] == ["stop", "node"]:
                for client, owner in enumerate(OWNERS):
                    mine = [str(client) if word == "0" else word for word in words]
                    said = called(*mine[1:], cwd=tmp_path / owner)
                    if words[2] == "join":
                        decide(tmp_path / owner / "node", shown.replace("/data", str(tmp_path / owner / "data")))
                    print(owner, said)
            elif words[2] == "run":
                running = subprocess.Popen([sys.executable, "-m", "fedlens", *words[1:]], cwd=server)
            elif words[2] == "approve":
                for owner in OWNERS:
                    while "approved" not in (said := called(*words[1:], "--yes", cwd=tmp_path / owner)):
                        assert running.poll() is None
                        time.sleep(1)
                    print(owner, said)
                assert running.wait(900) == 0
            else:
                more = [*few, "--port", str(port)] if words[2] == "init" else []
                print(called(*[w.replace("/data", str(server / "data")) for w in words[1:]], *more, cwd=server))
        result = json.loads((server / "federation/server/run/result.json").read_text())
        assert result["rounds"] == 2 and not result["setbacks"]
        for place in (server / "model", *(tmp_path / owner / "mine" for owner in OWNERS)):
            assert predicts(place, server / "data" / "test")
    finally:
        for place in (server / "federation", *(tmp_path / owner / "node" for owner in OWNERS)):
            called("deploy", "stop", str(place), cwd=tmp_path)


def predicts(place: Path, images: Path) -> bool:
    """Whether an exported model says something of images, without this package."""
    line = [sys.executable, str(place / "predict.py"), str(images), "--json"]
    ended = subprocess.run(line, cwd=place, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return "accuracy" in json.loads(ended.stdout.splitlines()[-1])


def called(*words: str, cwd: Path) -> str:
    line = [sys.executable, "-m", "fedlens", *words]
    ended = subprocess.run(line, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, f"{' '.join(words)}\n{ended.stdout}{ended.stderr}"
    return ended.stdout[-2000:]
