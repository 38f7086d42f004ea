"""`fedlens list --methods`, and families in help."""

from __future__ import annotations

import json

from fedlens.algorithms import ALGORITHMS, FAMILIES, family_of
from fedlens.cli.main import app
from fedlens.cli.methods import families, help_text, method_rows


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


def test_the_command(capsys):
    app(["list", "--methods", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["methods"] == method_rows()
    app(["list", "--methods"], standalone_mode=False)
    assert "server optimizers" in " ".join(capsys.readouterr().out.split())
