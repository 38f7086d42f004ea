"""`fedlens list --methods`, and families in help."""

from __future__ import annotations

import json
import re

import pytest

from fedlens import config
from fedlens.algorithms import ALGORITHMS, FAMILIES, family_of
from fedlens.cli.main import app
from fedlens.cli.methods import families, help_text, method_rows
from fedlens.core.algorithm import Algorithm
from fedlens.simulate.describe import describe


def test_every_method_has_one_family():
    named = [name for known in FAMILIES.values() for name in known]
    assert sorted(named) == sorted(ALGORITHMS)
    assert {about for known in FAMILIES.values() for about in known.values()} == {"global", "personal", "both"}
    assert families() == FAMILIES and all(f"{family}: " in help_text() for family in FAMILIES)
    told = [family_of(name) for name in ("fedavg", "fedrep+ft", "fedxds/paper", "mine:Own")]
    assert told == ["global", "personal", "sharing", ""]


def test_rows_say_what_is_shared():
    rows = {row["method"]: row for row in method_rows()}
    scaffold = {"method": "scaffold", "family": "global", "models": "global", "shared": "delta, control, weight"}
    assert rows["scaffold"] == scaffold and rows["fedlc"]["shared"] == "as its base"


@pytest.mark.parametrize("name", [name for name, part in ALGORITHMS.items() if not issubclass(part, Algorithm)])
def test_what_is_made_over_a_base_sends_what_its_row_says(name):
    """The base is FedAvg, whose updates are not named again."""
    rows = {row["method"]: row["shared"] for row in method_rows()}
    experiment = config.read(None, [f"algorithm={name}", "model=cnn2", "model.predictor=linear"])
    sent = {leaf.name.partition("/")[0] for leaf in describe(experiment, 10, 1, 28) if leaf.where == "up"}
    named = set(re.findall(r"\w+", rows[name])) | {"delta", "weight"}
    more = sent - {"delta", "weight", "(header)"} - named
    assert more <= {"examples"} and (sent <= {"delta", "weight", "(header)"}) == (rows[name] == "as its base")


def test_the_command(capsys):
    app(["list", "--methods", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["methods"] == method_rows()
    app(["list", "--methods"], standalone_mode=False)
    assert "server optimizers" in " ".join(capsys.readouterr().out.split())
