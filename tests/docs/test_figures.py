"""Every picture of the project is listed with the script or command that draws it, and shown on the page it names."""

import re

import pytest
import typer

from fedlens.cli.main import app
from fedlens.papers.registry import reproducible
from test_docs import ROOT

ROW = re.compile(r"\| \[.*?\]\((?P<picture>.*?)\) \| \[.*?\]\((?P<page>.*?)\) \| (?P<kind>\w* ?)`(?P<by>[^`]+)`.* \|")
LIST = ROOT / "results" / "figures.md"
ROWS = [row.groupdict() for line in LIST.read_text("utf-8").splitlines() if (row := ROW.match(line))]


def test_all_pictures_are_listed_once():
    kinds = (".png", ".svg", ".pdf", ".jpg", ".gif", ".webp")
    there = [path for name in ("docs", "results") for path in (ROOT / name).rglob("*") if path.suffix in kinds]
    listed = [(LIST.parent / row["picture"]).resolve() for row in ROWS]
    assert {*listed} <= {*there} and len({*listed}) == len(listed)
    assert {path.with_suffix("") for path in there} == {
        path.with_suffix("") for path in listed
    }  # one may be of two kinds


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["picture"])
def test_each_has_what_draws_it_and_a_page(row):
    if row["kind"] == "reproduction ":
        assert row["by"] in reproducible()
    elif row["kind"] == "command ":
        assert row["by"] in typer.main.get_command(app).commands
    else:
        assert re.search(r"save\(|grid_of\(|savefig\(|screenshot\(|\.svg", (ROOT / row["by"]).read_text("utf-8"))
    page = (LIST.parent / row["page"]).resolve()
    target = (LIST.parent / row["picture"]).resolve()
    shown = [(page.parent / found).resolve() for found in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8"))]
    assert target in shown
