"""Cards of methods are what the code says today, and say it as a reader would find it there."""

import dataclasses
import inspect
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

import numpy as np
import pytest

from fedlens import config
from fedlens.algorithms import ALGORITHMS
from fedlens.core.algorithm import Algorithm
from fedlens.core.fields import Positive, Share
from fedlens.core.rng import numpy_generator
from fedlens.core.wire import decode
from fedlens.recommend.rank import known
from fedlens.simulate import run as simulate
from fedlens.simulate.describe import described_with, usual_model
from scripts import script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cards():
    return script("docs/cards.py")


@pytest.fixture(scope="module")
def made(cards):
    return cards.cards()


def test_no_card_is_stale(made):
    stale = [path.name for path, text in made.items() if not path.exists() or path.read_text("utf-8") != text]
    assert not stale, "run `python docs/cards.py`"
    assert {path.stem for path in (ROOT / "docs/methods").glob("*.md")} == set(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_setting_is_on_its_card_as_a_user_types_it(name, made):
    text = made[ROOT / f"docs/methods/{name}.md"]
    rows = dict(re.findall(r"^\| `algorithm\.(\w+)` \| (.*?) \|", text, re.MULTILINE))
    fields = {field.name: field.default for field in dataclasses.fields(ALGORITHMS[name])}
    assert rows.keys() == fields.keys()
    for key, shown in rows.items():
        if not dataclasses.is_dataclass(fields[key]):
            value = shown.strip("`")
            value = json.dumps(value) if isinstance(fields[key], str) else value  # a bare `true` is no text in YAML
            typed = config.read(None, [f"algorithm={name}", f"algorithm.{key}={value}"]).algorithm
            assert getattr(typed, key) == fields[key], key


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedper", "fedsls", "fedgen", "moon"])
def test_messages_are_those_that_the_docstring_promises(name, made):
    """Docstrings are written by hand, messages found by running hooks: two ways to the same names."""
    text = made[ROOT / f"docs/methods/{name}.md"]
    kinds = {"fedsls": ["MeasureSaliency", "SaliencyWeighted"]}.get(name, [ALGORITHMS[name].__name__])
    module = sys.modules[ALGORITHMS[name].__module__]
    for kind in kinds:
        says = re.search(r"down: (.*?); up: (.*?)(?:; memory: (.*?))?(?:\n|$)", getattr(module, kind).__doc__)
        (row,) = re.findall(rf"^\| {kind} \| (.*?) \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
        for promised, shown in zip(says.groups(), row, strict=True):
            names = set(re.findall(r"(\w+) \(", shown)) or {"nothing"}
            own = re.split(", (?:with )?", promised)
            if "as its base" in own or "what its base remembers" in own:
                assert {word for word in own if "base" not in word} <= names
            else:
                assert set(own) == names


def leaving(made) -> dict[str, tuple[set[str], set[str]]]:
    """Method -> (parts sent in each round, parts sent once), as the table of privacy.md has it."""
    found = {}
    text = made[ROOT / "docs/privacy.md"]
    for names, *when in re.findall(r"^\| (\[.*?) \| (.*?) \| (.*?) \| .* \|$", text, re.MULTILINE):
        parts = tuple({part.removeprefix("part of ") for part in cell.split(", ")} - {"nothing"} for cell in when)
        for name in re.findall(r"methods/(\w+)\.md", names):
            assert name not in found, "a method has one row"
            found[name] = parts
    return found


def promised(algorithm) -> set[str]:
    """What an algorithm's docstring says that clients send: written by hand, while the table is found by running."""
    said = re.search(r"\bup: ([^;\n]*)", inspect.getdoc(type(algorithm)))[1]
    words = re.split(", (?:and )?", said)
    own = {word for word in words if word not in ("nothing", "as its base", "how they are packed")}
    return own | (promised(algorithm.base) if "as its base" in words else set())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_leaves_is_what_docstrings_promise(name, made):
    experiment = config.read(None, [f"algorithm={name}", f"model={usual_model(name)}", *described_with(name)])
    stages = [stage.algorithm for stage, at, _ in experiment.timetable() if at == 0]
    each_round, once = leaving(made)[name]
    assert each_round | once == set().union(*map(promised, stages))


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedper", "fedsls", "fedxds", "fedfed", "fedgen", "finetune"])
def test_what_leaves_is_what_crossed_in_a_run(name, made, tmp_path):
    """Every upload of a small run as it was sent, and in how many rounds a part was."""
    x = numpy_generator(1).integers(0, 256, (60, 16, 16), np.uint8)
    np.savez(tmp_path / "few.npz", x=x, y=np.arange(60) % 3)
    words = [f"data={tmp_path / 'few.npz'}", "partition=iid", "clients=2", "cohort=2", "rounds=2", "local.steps=1"]
    words += {"fedxds": ["algorithm.warmup_rounds=2"], "fedfed": ["algorithm.distil_rounds=2"]}.get(name, [])
    words += ["model=cnn2", "evaluate.personal=none", "picture=false", "engine=sequential", "transcript=500"]
    simulate.run(config.read(None, [*words, f"algorithm={name}", f"out={tmp_path / 'run'}"]))
    crossed = Counter(
        part
        for path in sorted((tmp_path / "run" / "transcript").glob("*.safetensors"))
        for part in {part for upload in decode(path.read_bytes()).replies.values() for part in upload}
    )
    each_round, once = leaving(made)[name]
    assert {part for part, rounds in crossed.items() if rounds > 1} == each_round
    assert {part for part, rounds in crossed.items() if rounds == 1} == once


def test_part_of_delta_is_where_weights_stay(cards):
    part = {name for name in ALGORITHMS if cards.PART in cards.parts_sent(name)[0]}
    assert part == {"fedas", "fedbabu", "fedpac", "fedper", "fedrep", "lgfedavg", "pse", "spatl"}


def test_a_part_that_nobody_explained_is_named(cards, monkeypatch):
    monkeypatch.delitem(cards.REVEALS, "reach")
    monkeypatch.setattr(cards, "parts_sent", lambda name: (("delta", "reach") if name == "fednova" else ("delta",), ()))
    with pytest.raises(SystemExit, match=r"disagree about .*reach"):
        cards.what_leaves()


def test_results_are_those_of_the_evidence(made):
    lines = [line for text in made.values() for line in text.splitlines()]
    shown = [line for line in lines if line.startswith("|") and "](../../results/" in line]
    numbers = [(r["source"], 100 * value) for r in known() if not r.get("league") for kind in ("global", "personal")
               for name, value in r[kind].items() if name.partition("/")[0] in ALGORITHMS]  # fmt: skip
    league: dict[tuple[str, str], list[float]] = {}  # worlds of the league are a mean, for each kind of model
    for world in (r for r in known() if r.get("league")):
        for kind in ("global", "personal"):
            for name in (name for name in world[kind] if name in ALGORITHMS and "fedavg" in world[kind]):
                league.setdefault((name, kind), []).append(world[kind][name])
    assert league and len(shown) == len(numbers) + len(league)
    for source, value in numbers:
        assert any(f"| {value:.1f} |" in line and source in line for line in shown)
    for (name, kind), values in league.items():
        row = f"| the league: mean of {len(values)} world"
        mine = [line for line in made[ROOT / f"docs/methods/{name}.md"].splitlines() if line.startswith(row)]
        [told] = [float(line.split("|")[3]) for line in mine if f"| {kind} |" in line]
        assert abs(told - 100 * fmean(values)) <= 0.05 + 1e-9  # a half is rounded either way
    measured = json.loads((ROOT / "docs/measured.json").read_text())
    for method, _, preset in (row["method"].partition("/") for row in measured["rows"]):
        assert method in ALGORITHMS and (not preset or preset in ALGORITHMS[method].presets)


def test_a_setting_in_words(cards):
    @dataclass(frozen=True)
    class Made(Algorithm):
        share: Share = 0.5  # of what
        way: Literal["up", "down"] = "up"
        most: Positive | None = None

    assert cards.knobs(Made).splitlines()[2:] == [
        "| `algorithm.share` | `0.5` | number ≥ 0 and ≤ 1 | of what |",
        "| `algorithm.way` | `up` | `up`, `down` |  |",
        "| `algorithm.most` | none | number > 0 or none |  |",
        "| `algorithm.server_lr` | `1.0` | number > 0 | learning rate of the server, times the mean update |",
    ]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_card_says_how_it_stands_beside_public_code(name, cards, made):
    told = made[ROOT / f"docs/methods/{name}.md"].partition("## Beside public code\n\n")[2].partition("\n\n## ")[0]
    said = cards.yaml.safe_load((cards.DOCS / "methods.yaml").read_text("utf-8"))[name]
    assert told == said.get("public", "Not compared with public code.") and len(told.split()) > 3
