"""Set up FedLens in a virtual environment of its own, then do one thing. Needs Python 3.11 or newer, and pip.

python3 start.py run [words]     train a federated model on 4,000 real digits (words go to `fedlens run`)
python3 start.py test [words]    run the tests that are not slow (words go to pytest instead)
python3 start.py test --fast     those of the core, of the methods and of three lanes: about a minute
python3 start.py check           lint, prose of the pages, types
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
HOME = Path(os.environ.get("FEDLENS_VENV", ROOT / ".venv"))
TOOLS = HOME / ("Scripts" if os.name == "nt" else "bin")
# One thread a process: two of them on two cores wait for each other. No tool may phone home.
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
# Some CPUs advertise matrix instructions that crash.
QUIET["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
# Bytecode is kept, whatever the caller likes: else each of many processes compiles all of the package.
QUIET["PYTHONDONTWRITEBYTECODE"] = ""

FAST = ["tests/core", "tests/algorithms", "tests/engines/test_engines_agree.py::test_lanes_equal_sequential"]
FAST += ["-m", "not slow and not thorough"]


def call(*command: str | Path, **options) -> None:
    code = subprocess.call([str(part) for part in command], env={**os.environ, **QUIET}, **options)
    if code:
        sys.exit(code)


def set_up(extra: str) -> None:
    """Install what the constraints say, once; again only when the project's own files changed."""
    wanted = extra + "".join((ROOT / name).read_text() for name in ("pyproject.toml", "constraints.txt"))
    done = HOME / f"installed{extra or '-plain'}"
    if done.exists() and done.read_text() == wanted:
        return
    if not (HOME / "pyvenv.cfg").exists():
        print(f"setting up {HOME}", flush=True)
        venv.create(HOME, with_pip=True)
    constraints = ROOT / "constraints.txt"
    os.environ["PIP_CONSTRAINT"] = str(constraints)
    call(TOOLS / "python", "-m", "pip", "install", "-q", "-e", f"{ROOT}{extra}", "-c", constraints)
    done.write_text(wanted)


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036  people start this with whatever python3 they have
        sys.exit("FedLens needs Python 3.11 or newer")
    task, *words = sys.argv[1:] or [""]
    if task == "run":
        set_up("")
        call(TOOLS / "fedlens", "run", *words)
    elif task == "test":
        set_up("[dev]")
        usual = ["-n", "auto", "--dist", "worksteal", "-m", "not slow"]  # a file's tests mostly share what they make
        fast = [*usual, *FAST, *words[1:]] if words[:1] == ["--fast"] else []
        call(TOOLS / "python", "-m", "pytest", *(fast or words or usual), cwd=ROOT)
    elif task == "check":
        set_up("[dev]")
        places = ["src", "tests", "benchmarks", "docs", "start.py"]
        call(TOOLS / "ruff", "check", *places, cwd=ROOT)
        call(TOOLS / "ruff", "format", "--check", *places, cwd=ROOT)
        call(TOOLS / "python", "docs/check.py", "--fail", cwd=ROOT)
        call(TOOLS / "pyright", "--pythonpath", TOOLS / "python", "src", cwd=ROOT)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
