"""What the documents show is run: README's commands (with few rounds) and its Python."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = ["rounds=1", "clients=4", "cohort=2", "local.steps=1", "evaluate.personal=none", "picture=false"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)


def run(*words: str, cwd: Path) -> None:
    ended = subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, f"{' '.join(words)}\n{ended.stderr}"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder in which README's names exist."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "experiment.yaml").write_text("partition: {is: dirichlet, alpha: 0.3}\n")
    for name in ("a", "b", "mnist5k-scaffold-001"):
        run("-m", "fedlens", "run", *SMALL, "model=cnn2", f"out=runs/{name}", "engine=sequential", cwd=folder)
    return folder


COMMANDS = [
    shlex.split(line, comments=True)[1:]
    for b in blocks("bash")
    for line in b.splitlines()
    if line.startswith("fedlens")
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_of_the_readme(words, place):
    if any(word.startswith("data=fashion") for word in words) and not os.environ.get("FEDLENS_DATA"):
        pytest.skip("Fashion-MNIST is found through FEDLENS_DATA, which is not set")
    few = {"run": [*SMALL, "engine=sequential"], "reproduce": ["--dry-run"]}.get(words[0], [])
    run("-m", "fedlens", *words, *few, cwd=place)


def test_python_of_the_readme(tmp_path):
    (program,) = [block for block in blocks("python") if "fedlens.run" in block]
    (tmp_path / "program.py").write_text(program)
    run("program.py", cwd=tmp_path)


def test_fedprox_is_shown_as_it_is():
    (shown,) = [block for block in blocks("python") if "class FedProx" in block]
    code = (ROOT / "src/fedlens/algorithms/fedprox.py").read_text()
    for line in shown.strip().splitlines():
        assert line.split("#")[0].strip() in code


def test_two_commands_and_files_that_exist():
    text = (ROOT / "README.md").read_text()
    assert "python3 start.py run" in text and "python3 start.py test" in text
    for path in re.findall(r"\]\(([^)#]+)\)", text) + re.findall(r"(?:tests|benchmarks)/\w+\.py", text):
        assert (ROOT / path).exists(), path
