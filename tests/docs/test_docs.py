"""What the documents show is run: their commands (with few rounds), their files, their Python, their notebooks."""

import contextlib
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from fedlens.cli.main import app
from fedlens.models import MODELS
from scripts import script

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))]
CARDS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs/methods").glob("*.md"))
FEW = ("rounds=1", "clients=4", "cohort=2", "local.steps=1", "picture=false", "engine=sequential")
FEW += ("model=cnn2", "model.predictor=linear")  # some methods want a head of one layer
HEAVY = {  # methods whose preparations or servers take long: cut short
    "fedxds": ("algorithm.warmup_rounds=1", "algorithm.warmup_epochs=1"),
    "fedfed": ("algorithm.distil_rounds=1", "algorithm.latent=16", "algorithm.width=4"),
    "fedftg": ("algorithm.iterations=0",),
    "fedsls": ("algorithm.pretrain_epochs=0",),
    "spatl": ("algorithm.episodes=1", "algorithm.adapt_epochs=0"),
    "fedaux": ("algorithm.pretrain_steps=1", "algorithm.steps=1"),
    "feddf": ("algorithm.steps=1",),
    **dict.fromkeys(("fedrep", "fedpac"), ("local.steps=none", "local.epochs=2")),
    "finetune": ("algorithm.epochs=1",),
}
LOOKS = ("bench", "describe", "recommend", "reproduce", "data")  # they leave nothing behind: once is enough
# Of `fedlens deploy`, as its page tells them; from the first node on processes must run.
DEPLOYING = ("init", "certs", "server", "join", "admit", "admit", "admit", "node", "node", "run", "approve")


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of every block of a page, in order."""
    return re.findall(r"^ {0,3}```(\w*)\n(.*?)^ {0,3}```", (ROOT / page).read_text("utf-8"), re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[list[str]]:
    joined = text.replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in joined.splitlines() if line.split("#")[0].strip()]


# ---- stand-ins that take seconds -------------------------------------------------------------------------------------
def lighter(method: str) -> list[str]:
    return [part for part in HEAVY.get(method, ()) if part.startswith("algorithm.")]


def fewer(words: list[str]) -> list[str]:
    """Where a method wants everyone, it has them; sites keep their number and their network, not their images' size.

    A run of sites has the very settings of a comparison of them, which reads it in place of training it again.
    """
    sites = "data=clients_folder" in words
    own = ("clients=", "cohort=", "model") if sites else ()
    own += ("cohort=",) if "cohort=everyone" in words else ()
    return [
        *(word for word in FEW if not word.startswith(own or ("-",))),
        *(["data.size=32", "evaluate.last=1"] if sites else []),
    ]


def downloaded(word: str) -> str:
    """Published weights that a page names, as a file that is here: names and shapes are the same."""
    if not word.startswith("model.weights=timm/"):
        return word
    if os.environ.get("FEDLENS_DATA"):
        return "model.weights=stand-in"
    torch.save(MODELS["resnet18"]().build(1000, 3, 32).state_dict(), "resnet18.pth")
    return "model.weights=resnet18.pth"


def smaller(words: list[str]) -> list[str]:
    """The words of a fedlens command with less to do."""
    verb, *rest = map(downloaded, words)
    if verb == "run":
        chosen = {re.split("[.=]", word)[0] for word in rest} & {"model", "engine"}
        few = [word for word in fewer(rest) if re.split("[.=]", word)[0] not in chosen]
        named = [word.split("=", 1)[1] for word in rest if word.startswith("algorithm=")]
        robust = ("clients=8", "cohort=6") if any(word.startswith("defences=") for word in rest) else ()
        return [verb, *rest, *few, *(HEAVY.get(named[0], ()) if named else ()), *robust]
    if verb == "describe":
        return [verb, *rest, *lighter(rest[0])]
    if verb == "bench":
        return [verb, *rest, "--repeats", "1"]
    if verb == "compare" and "--runs" not in rest:
        # As if it had no more words.
        place = [] if any("=" in word for word in rest) else ["--out", "runs/compare-mnist5k"]
        heavy = [part.replace("algorithm.", f"{name}.") for name in rest for part in lighter(name)]
        whole = [part for name in rest for part in HEAVY.get(name, ()) if part.startswith("local.")]
        # The last one counts.
        few = [*fewer(rest), *whole, "evaluate.last=1"]
        return [verb, *rest, *heavy, *few, "--processes", "1", "--seeds", "1", *place]
    if verb == "reproduce" and rest and "--dry-run" not in rest:
        return [verb, *rest, "--dry-run"]
    if verb == "explain":
        return [verb, *rest, "--methods", "gradient"] if "--methods" not in rest else words
    return words


def needs(words: list[str]) -> str:
    """Why a command cannot be run here; empty where it can."""
    if any(name in word for word in words for name in ("fashion_mnist", "cifar")) and words[0] != "reproduce":
        return "" if os.environ.get("FEDLENS_DATA") else "its data are found through FEDLENS_DATA, which is not set"
    return "ray is not installed" if "engine=ray" in words and not importlib.util.find_spec("ray") else ""


seen: set[tuple[str, ...]] = set()


def fedlens(words: list[str]) -> None:
    """In this process: importing torch for each command would take longer than all of them."""
    if words[0] in LOOKS and tuple(words) in seen:
        return
    seen.add(tuple(words))
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = app(list(words), prog_name="fedlens", standalone_mode=False)
        except Exception as error:
            code = f"{type(error).__name__}: {error}"
    assert not code, f"fedlens {' '.join(words)}: {code}\n{said.getvalue()}"


def python(nursery, *words: str, cwd: Path) -> None:
    """A program of a page, whose runs take one step a client."""
    ended = nursery.program(*words, cwd=cwd, few=True)
    assert ended.code == 0, f"{' '.join(words)}\n{ended.err}"


def serves(nursery, words: list[str], place: Path) -> None:
    """A page that somebody has to end."""
    nursery.begin(*words, "--port", "0", cwd=place)
    nursery.wait_for("http")
    with urllib.request.urlopen(nursery.out.read_text().split()[0], timeout=30) as page:
        assert b"<html" in page.read()
    nursery.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A place in which the names that documents take for granted exist."""
    place = tmp_path_factory.mktemp("documents")
    before = os.getcwd()
    os.chdir(place)
    (place / "experiment.yaml").write_text("partition: {is: dirichlet, alpha: 0.3}\n")
    for name in ("a", "b", "mnist5k-scaffold-001"):
        extra = ("transcript=50",) if name == "a" else ()
        fedlens(["run", *FEW, *extra, f"out=runs/{name}"])
    yield place
    os.chdir(before)


# ---- commands, files and programs of every page ----------------------------------------------------------------------
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(kind in ("bash", "python") for kind, _ in blocks(page))]
)
def test_pages_do_what_they_say(page, folder, tmp_path, monkeypatch, nursery):
    """In order: a block that begins with a file's name is that file; bash is run; other Python is a program."""
    place = folder if page == "README.md" else tmp_path
    if place is tmp_path:
        (place / "runs").symlink_to(folder / "runs")
        (place / "experiment.yaml").symlink_to(folder / "experiment.yaml")
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", [*sys.path])
    ran, left = 0, []
    for kind, text in blocks(page):
        if name := re.match(r"# ([\w-]+\.(py|yaml))\n", text):
            (place / name[1]).unlink(missing_ok=True)
            (place / name[1]).write_text(text)
        elif kind == "python" and "import " in text:
            (place / "program.py").write_text(text)
            python(nursery, "program.py", cwd=place)
            ran += 1
        elif kind == "bash":
            for words in commands(text):
                if words[0] in ("python", "python3"):
                    if (ROOT / words[1]).exists():
                        continue  # a program of the checkout: test_docs_commands.py
                    python(nursery, *words[1:], cwd=place)
                    ran += 1
                    continue
                assert Path(words[0]).name == "fedlens", f"{page}: nothing knows how to run {' '.join(words)}"
                if reason := needs(words[1:]):
                    left.append(f"{' '.join(words)}: {reason}")
                elif words[1] == "ui":
                    serves(nursery, words[1:], place)
                    ran += 1
                else:
                    fedlens(smaller(words[1:]))
                    ran += 1
    if not ran and left:
        pytest.skip("; ".join(left))


@pytest.mark.parametrize("card", CARDS, ids=lambda card: Path(card).stem)
def test_commands_of_the_cards(card, folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for kind, text in blocks(card):
        for words in commands(text) if kind == "bash" else ():
            if reason := needs(words[1:]):
                pytest.skip(reason)
            fedlens(smaller(words[1:]))


def test_commands_of_a_deployment(tmp_path, monkeypatch):
    """Up to the point where processes would be started: `--start` is left out, and lines are printed instead."""
    pytest.importorskip("flwr", reason="flwr, of the extra flower, is not installed")
    monkeypatch.chdir(tmp_path)
    lines = [
        words for _, text in blocks("docs/deploy.md") for words in commands(text) if words[:2] == ["fedlens", "deploy"]
    ]
    assert [words[2] for words in lines] == [*DEPLOYING, "status", "stop", "export", "stop", "run"]
    bars(tmp_path / "test", ("covid", "normal", "pneumonia"))
    shown = next(text for kind, text in blocks("docs/deploy.md") if kind == "yaml")
    for words in lines[: DEPLOYING.index("run")]:
        if words[2] == "join":
            shutil.copy("federation/invitation.json", "invitation.json")  # in place of scp
        fedlens([word.replace("/data", str(tmp_path)) for word in words[1:] if word != "--start"])
        if words[2] == "join":
            decide(tmp_path / "node", shown.replace("/data/scans", str(tmp_path / "test")))
            for client, owner in enumerate(("alice", "bob", "carol")):
                if client:
                    fedlens(["deploy", "join", f"node-{client}", "invitation.json", "--client", str(client)])
                shutil.copy(f"node-{client}/node.pub" if client else "node/node.pub", f"{owner}.pub")


def bars(folder: Path, classes: Sequence[str], count: int = 12, seed: int = 0) -> None:
    """A folder of small pictures for each class, with a bar at the class's place."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(seed)
    for name in classes:
        (folder / name).mkdir(parents=True)
        at = 4 + 8 * sorted({"covid", "normal", "pneumonia"}).index(name)
        for number in range(count):
            pixels = draw.integers(0, 120, (32, 32, 3), dtype=np.uint8)
            pixels[:, at : at + 5] += 100
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


def decide(node: Path, shown: str) -> None:
    """What the page shows of node.yaml, in the place of the lines that it has."""
    kept = [line for line in (node / "node.yaml").read_text().splitlines() if not line.startswith("data:")]
    (node / "node.yaml").write_text("\n".join([*kept, shown]))


# ---- the README ------------------------------------------------------------------------------------------------------
def test_fedprox_is_shown_as_it_is():
    (shown,) = [text for kind, text in blocks("README.md") if kind == "python" and "class FedProx" in text]
    code = (ROOT / "src/fedlens/algorithms/fedprox.py").read_text()
    for line in shown.strip().splitlines():
        assert line.split("#")[0].strip() in code


def test_first_screen():
    """What it is, two commands and a picture, before anything else; every claim has a command beside it."""
    text = (ROOT / "README.md").read_text()
    lines = text.splitlines()
    top = "\n".join(lines[:20])
    assert len(lines) <= 90
    assert "python3 start.py run" in top and "fedlens compare" in top and "](docs/images/" in top
    rows = claims(text.partition("## Five claims")[2])
    assert len(rows) == 5


def test_every_claim_has_its_command():
    text = (ROOT / "docs/evidence.md").read_text()
    assert len(claims(text)) > 25
    for path in re.findall(r"(?:tests|benchmarks)/[\w/]+\.py", text):
        assert (ROOT / path).exists(), path


def claims(text: str) -> list[str]:
    rows = [line for line in text.splitlines() if line.startswith("|")]
    rows = [row for row in rows if not row.startswith(("| claim", "| ---"))]
    assert all(re.search(r"\| `(python3? |fedlens )[^`]+` \|$", row) for row in rows)
    return rows


# ---- the site --------------------------------------------------------------------------------------------------------
def site():
    return script("docs/site.py")


def test_the_site_is_built_without_a_complaint(tmp_path):
    """Every link of every page, by a way of its own: hrefs in the HTML are files, and their anchors ids in them."""
    assert site().build(tmp_path) == []
    pages = {path: path.read_text("utf-8") for path in tmp_path.rglob("*.html")}
    assert len(pages) > 40
    for path, text in pages.items():
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            if re.match(r"[a-z]+:", link):
                assert link.startswith("https://"), f"{path.name}: {link}"
                continue
            file, _, name = link.partition("#")
            there = (path.parent / file).resolve() if file else path
            assert there.is_file(), f"{path.relative_to(tmp_path)}: {link}"
            assert not name or f'id="{name}"' in pages[there], f"{path.relative_to(tmp_path)}: {link}"


def test_the_site_says_what_is_amiss(tmp_path):
    module = site()
    markdown = module.MarkdownIt("commonmark").enable("table")
    text = "# A\n\n[x](gone.md) [y](#nowhere) ![](docs/images/concepts.png) [z](docs/site.css)"
    page = module.Page("README.md", markdown.parse(text))
    page.links = ["gone.md", "#nowhere", "docs/images/concepts.png", "docs/site.css"]
    found = [one for one in module.troubles({"README.md": page}) if one.startswith("README.md:")]
    assert [one.split(": ")[1] for one in found] == [
        "gone.md leads nowhere",
        "#nowhere names no heading of README.md",
        "the picture docs/images/concepts.png has no description",
    ]


def test_nothing_is_fetched_from_elsewhere(tmp_path):
    site().build(tmp_path)
    for path in (*tmp_path.rglob("*.html"), *tmp_path.rglob("*.css")):
        assert not re.search(r'(src|<link[^>]*href)="https?:|url\(http|@import', path.read_text("utf-8")), path


# ---- notebooks -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["quickstart", "own_algorithm", "own_module"])
def test_notebooks_run_from_top_to_bottom(name, tmp_path, nursery):
    """Code cells one after another in one process, as a kernel would; no output is stored with them."""
    notebook = json.loads((ROOT / f"docs/notebooks/{name}.ipynb").read_text("utf-8"))
    assert notebook["nbformat"] == 4 and len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 4 and not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    program = "\n\n".join("".join(cell["source"]) for cell in cells)
    (tmp_path / "notebook.py").write_text(program)
    python(nursery, "notebook.py", cwd=tmp_path)
    assert (tmp_path / "runs").is_dir()
