"""docs/trust.md lists every attack with its test: each is there, and said to run where it runs."""

from __future__ import annotations

import ast
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "trust.md"


def rows() -> list[tuple[str, str, bool]]:
    """(attack, test, whether it runs over a real SuperLink) of the page's table."""
    text = PAGE.read_text().partition("## Attacks covered by tests")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    assert all(len(row) == 5 for row in cells) and cells[0][-1].startswith("test")
    return [(row[0].strip("| "), row[-1].strip("`*| "), "*" in row[-1]) for row in cells[2:]]


def tests() -> dict[str, bool]:
    """Every test of this folder, and whether it is one for real processes."""
    found = {}
    for path in HERE.glob("test_*.py"):
        for each in ast.parse(path.read_text()).body:
            if isinstance(each, ast.FunctionDef) and each.name.startswith("test_"):
                slow = any("slow" in ast.unparse(mark) for mark in each.decorator_list)
                found[each.name.removeprefix("test_")] = slow or path.stem.endswith("_live")
    return found


def test_every_attack_has_the_test_that_the_page_names():
    known, listed = tests(), rows()
    assert len(listed) >= 30 and len({attack for attack, _, _ in listed}) == len(listed)
    assert {test: live for _, test, live in listed} == {test: known.get(test) for _, test, _ in listed}
