"""Every table and figure of the four papers is listed, and can be asked for by the paper's own name."""

import pytest

from fedlens.core.errors import BadInput
from fedlens.papers.catalogue import DRAWING, PRINTED, listed, resolved
from fedlens.papers.registry import reproducible

# Counted in the papers: FedSLS, ACM MM 2024; PSE, ICCV 2023; FedXDS, 2025; SPATL, 2022.
TABLES = {"FedSLS": 1, "PSE": 3, "FedXDS": 6, "SPATL": 2}
FIGURES = {"FedSLS": "1 2 3 4 5", "PSE": "1 2 3 4", "FedXDS": "1 2a 2b 2c 2d", "SPATL": "1 2 3 4 5 6 7"}


def test_none_is_missing():
    items = [(one.paper, one.item) for one in PRINTED]
    assert len(set(items)) == len(items)
    for paper, count in TABLES.items():
        assert {item for of, item in items if of == paper and item.startswith("table")} == {
            f"table {number}" for number in range(1, count + 1)
        }
        figures = {item.removeprefix("figure ") for of, item in items if of == paper and item.startswith("figure")}
        assert figures == {*FIGURES[paper].split()}


def test_all_but_drawings_can_be_reproduced():
    known = reproducible()
    drawings = {(one.paper, one.item) for one in PRINTED if not one.by}
    assert drawings == {("FedSLS", "figure 2"), *(("SPATL", f"figure {number}") for number in (1, 2, 3))}
    assert all(name in known for one in PRINTED for name in one.by)
    rows = listed(known)
    assert {row["name"] for row in rows} == {*known, ""} and all(row["about"] for row in rows)


def test_the_papers_own_names_are_understood():
    known = reproducible()
    assert resolved("spatl/table2", known) == "spatl/submodels" and resolved("pse/table2", known) == "pse/table2"
    with pytest.raises(BadInput, match=f"spatl/figure2 is {DRAWING}"):
        resolved("spatl/figure2", known)
    with pytest.raises(BadInput, match="did you mean 'spatl/table2'"):
        resolved("spatl/tabel2", known)
