"""What a paper says of its protocol, and what it leaves open, stands beside every table and figure of it."""

import json

import pytest

from fedlens.cli.main import app
from fedlens.papers.catalogue import PRINTED
from fedlens.papers.figure_runs import Figure, Wanted, note
from fedlens.papers.registry import reproducible
from fedlens.papers.spatl.shown import listed

NAMES = [name for one in PRINTED for name in one.by]


@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_begins_with_it(name, tmp_path, capsys):
    protocol = reproducible()[name].protocol
    assert [*protocol] == ["The paper says", "It leaves open"]
    app(["reproduce", name, "--dry-run", "--out", str(tmp_path)], standalone_mode=False)
    expected = [f"# {heading}: {line}" for heading, lines in protocol.items() for line in lines]
    assert capsys.readouterr().out.splitlines()[: len(expected)] == expected


def test_a_figures_numbers_have_it_beside_them(tmp_path):
    protocol = {"The paper says": ("Ten clients.",), "It leaves open": ("The rate: 0.1.",)}
    wanted = Wanted((), 0, tmp_path / "spatl" / "bytes", protocol=protocol)
    noted = json.loads(note(wanted, {"rounds": 3}).read_text())
    assert noted == {
        "changed": [],
        "The paper says": ["Ten clients."],
        "It leaves open": ["The rate: 0.1."],
        "rounds": 3,
    }
    text = listed(wanted, "bytes", ["", "rounds"], [["fedavg", "3"]], []).read_text()
    assert text.endswith("## The paper says\n\n- Ten clients.\n\n## It leaves open\n\n- The rate: 0.1.\n")


def test_a_figure_hands_its_protocol_on(tmp_path):
    asked = []
    figure = Figure("paper/figure9", "nothing", 0, lambda wanted: asked.append(wanted) or [], says=("Ten clients.",))
    figure.draw((), 0, tmp_path / "paper" / "figure9")
    assert asked[0].protocol == {"The paper says": ("Ten clients.",)}


def test_data_by_user_are_not_said_to_be_skewed_by_a_draw():
    """FedXDS, section 5.3: CelebA by FedGen's implementation, FEMNIST by pFL-Bench's, 10 and 100 clients."""
    known = reproducible()
    by_user = " ".join(known["fedxds/table3"].says + known["fedxds/table3"].leaves_open)
    assert "FedGen" in by_user and "pFL-Bench" in by_user and "Dirichlet" not in by_user
    assert "Dirichlet" in known["fedxds/table1"].says[0]
