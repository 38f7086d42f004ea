"""What users install: the wheel has what the checkout has, and works where there is no checkout."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import fedlens

ROOT = Path(__file__).parents[1]


def call(*command, cwd, **options):
    ended = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=600, **options)
    assert ended.returncode == 0, f"{' '.join(map(str, command))}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(wheel, sdist), made from a copy of the files that are not ignored."""
    pytest.importorskip("hatchling", reason="hatchling, of the extra dev, is not installed")
    place = tmp_path_factory.mktemp("built")
    ignored = shutil.ignore_patterns("__pycache__", ".git", ".venv*", "build", "dist", "*.egg-info", ".*_cache")
    for name in ("src", "docs", "tests"):
        shutil.copytree(ROOT / name, place / "copy" / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "start.py"):
        shutil.copy(ROOT / name, place / "copy" / name)
    call(sys.executable, "-m", "hatchling", "build", "-d", place / "dist", cwd=place / "copy")
    (wheel,), (sdist,) = (place / "dist").glob("*.whl"), (place / "dist").glob("*.tar.gz")
    return wheel, sdist


def test_the_version_is_in_one_place():
    """Nowhere else than in the package itself: whoever raises it there has raised it."""
    found = re.compile(rf'version\s*[=:]\s*"?{re.escape(fedlens.__version__)}"?')
    files = [*ROOT.glob("*.toml"), *ROOT.glob("*.py"), *(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.py")]
    assert [path.name for path in files if found.search(path.read_text("utf-8").replace("__", ""))] == ["__init__.py"]


def test_wheel_and_sdist_hold_what_is_needed(built):
    wheel, sdist = built
    assert f"-{fedlens.__version__}-" in wheel.name
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    source = ROOT / "src"
    wanted = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    wanted = {name for name in wanted if "__pycache__" not in name and ".egg-info" not in name}
    assert wanted <= names, sorted(wanted - names)
    assert {"fedlens/py.typed", "fedlens/recommend/evidence.json"} <= names
    strangers = [
        name for name in names if not name.startswith(("fedlens/", f"fedlens-{fedlens.__version__}.dist-info/"))
    ]
    assert not strangers
    with tarfile.open(sdist) as opened:
        inside = {name.partition("/")[2] for name in opened.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "src/fedlens/py.typed", "tests/test_packaging.py"} <= inside
    assert wheel.stat().st_size < 3e6


@pytest.mark.slow
def test_the_wheel_works_where_there_is_no_checkout(built, tmp_path):
    """The default job, and the page's own algorithm; what the wheel depends on is borrowed from this environment."""
    wheel, _ = built
    home = tmp_path / "environment"
    venv.create(home, with_pip=True)
    there = home / ("Scripts" if os.name == "nt" else "bin")
    call(there / "python", "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    (packages / "borrowed.pth").write_text(f"{sysconfig.get_path('purelib')}\n")  # editable installs are not followed
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    work = tmp_path / "work"
    work.mkdir()

    where = call(there / "python", "-c", "import fedlens; print(fedlens.__file__)", cwd=work, env=clean).strip()
    assert Path(where).is_relative_to(home)
    assert "accuracy" in call(there / "fedlens", "run", cwd=work, env=clean)
    assert (work / "runs/mnist5k-fedavg-001/figures/run.png").stat().st_size > 10_000
    text = (ROOT / "docs/extend.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(# agreement\.py\n.*?)```", text, re.DOTALL)
    (work / "agreement.py").write_text(code)
    words = ["algorithm=agreement:Agreement", "rounds=2", "clients=4", "cohort=2", "model=cnn2", "out=runs/mine"]
    call(there / "fedlens", "run", *words, cwd=work, env=clean)
    assert call(there / "fedlens", "report", "runs/mine", cwd=work, env=clean).strip() == "runs/mine/report.html"
    assert "try" in call(there / "fedlens", "recommend", "partition.alpha=0.1", "clients=100", cwd=work, env=clean)
