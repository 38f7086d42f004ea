"""The verdict of a comparison, and its table for LaTeX."""

from __future__ import annotations

import re

import pytest

from fedlens.compare.latex import escaped
from fedlens.compare.table import Comparison
from fedlens.compare.verdict import mark_close, p_words
from test_compare import compared


def over_seeds(**accuracies):
    return [compared(name, seed, a, last=5) for name, of in accuracies.items() for seed, a in enumerate(of)]


def test_one_seed_may_be_luck():
    found = Comparison([compared("fedavg", accuracy=0.5), compared("fedprox", accuracy=0.52, last=5)], "global")
    said = "fedprox is ahead with 52.00 % (global model, mean of the last 5 evaluations), 2.00 points from fedavg; "
    assert found.verdict() == [said + "1 seed cannot show that this is more than luck."]


def test_who_cannot_be_told_from_the_best():
    runs = over_seeds(a=(0.70, 0.72, 0.71), b=(0.69, 0.73, 0.70), c=(0.50, 0.53, 0.51))
    (said,) = Comparison(runs, "global").verdict()
    assert said.startswith("a has the highest mean, 71.00 %") and "; b cannot be told from it over 3 seeds" in said
    (said,) = Comparison([run for run in runs if run.method != "b"], "global").verdict()
    assert said.endswith("all others are worse over 3 seeds (p < 0.05).")


@pytest.mark.parametrize(
    ("p", "said"),
    [(None, "–"), (0.0004, "<0.001"), (0.0012, "0.001"), (0.25, "0.250"), (0.0504, "0.0504"), (0.04996, "0.04996")],
)
def test_p_is_never_rounded_to_the_level_that_it_is_compared_with(p, said):
    assert p_words(p) == said


def test_the_table_marks_what_the_verdict_cannot_tell_apart_and_nothing_else():
    """c is worse over seeds; b is not, whatever a test over clients says of it."""
    runs = over_seeds(a=(0.70, 0.72, 0.71), b=(0.69, 0.73, 0.70), c=(0.50, 0.53, 0.51))
    found = Comparison(runs, "global")
    [(_, accuracies, _)] = found.tables()
    assert {row["method"]: row["rank"] for row in accuracies} == {"a": "1*", "b": "2*", "c": "3"}
    assert all("*" not in cell for row in accuracies for title, cell in row.items() if title != "rank")
    assert "*: the best, and what cannot be told from it (p ≥ 0.05)." in " ".join(found.said())
    alone = Comparison([run for run in runs if run.method != "b"], "global")
    assert "*" not in str(alone.tables()) and "*" not in " ".join(alone.said())


def test_a_lead_within_the_deviation_of_two_seeds_is_told_as_in_the_report():
    found = Comparison(over_seeds(a=(0.50, 0.70), b=(0.52, 0.72), c=(0.10, 0.11)), "global")
    said = "; a cannot be told from it over 2 seeds (a lead within the deviation over seeds, or p ≥ 0.05 over clients)."
    assert found.verdict()[0].startswith("b has the highest mean, 62.00 %") and found.verdict()[0].endswith(said)
    assert [row["is_close"] for row in found.rows("")] == [False, True, False]


def test_of_two_seeds_all_are_close_that_no_test_tells_from_the_best():
    """One is within the deviation over seeds; another is not, but clients do not tell it from the best either."""

    def row(method: str, mean: float, rank: int, p: float | None) -> dict:
        return {"method": method, "mean": mean, "std": 0.01, "rank": rank, "p_seeds": None, "p_clients": p}

    def close(*rows: dict) -> set[str]:
        mark_close(rows)
        return {each["method"] for each in rows if each["is_close"]}

    best, near = row("a", 0.937, 1, None), row("b", 0.93, 2, 0.5)
    assert close(best, near, row("c", 0.92, 3, 0.597)) == {"b", "c"}
    assert close(best, near, row("c", 0.92, 3, 0.01)) == {"b"}
    assert close(best, near, row("c", 0.92, 3, None)) == {"b"}
    assert close(best, row("c", 0.92, 2, 0.597)) == set()  # it is ahead, and luck is said
    tested = row("c", 0.92, 3, 0.597) | {"p_seeds": 0.01}
    assert close(best, near | {"p_seeds": 0.4}, tested) == {"b"}


@pytest.mark.parametrize(("methods", "said"), [(("a",), "a has 50.00 %"), (("a", "b"), "a and b are equal: 50.00 %")])
def test_nobody_to_beat(methods, said):
    assert Comparison([compared(name) for name in methods], "global").verdict()[0].startswith(said)


def test_two_at_the_top():
    three = (0.70, 0.72, 0.71)
    (said,) = Comparison(over_seeds(a=three, b=three, c=(0.69, 0.73, 0.70)), "global").verdict()
    assert said.startswith("a and b have the highest mean, 71.00 %") and "c cannot be told from them" in said


def test_latex(tmp_path):
    runs = over_seeds(a_1=(0.70, 0.72, 0.71), b=(0.69, 0.73, 0.70), c=(0.50, 0.53, 0.51))
    found = Comparison(runs, "global")
    found.write(tmp_path)
    text = (tmp_path / "compare.tex").read_text()
    assert text == found.latex() and all(f"\\{rule}rule" in text for rule in ("top", "mid", "bottom"))
    rows = dict(re.findall(r"^([a-z\\_1]+) & (.*) \\\\$", text, re.M))
    assert rows["a\\_1"].startswith(r"$\mathbf{71.0} \pm 1.0$")
    assert rows["b"].startswith(r"$\mathbf{70.7} \pm 2.1$") and rows["c"].startswith(r"$51.3 \pm 1.5$ &")
    assert text.count("{") == text.count("}") and r"cannot be told from it (paired t-test, $p \geq$ 0.05)" in text
    assert "told" not in Comparison([compared("a"), compared("b", accuracy=0.4)], "global").latex()


def test_several_settings_are_columns():
    from dataclasses import replace

    runs = [replace(run, setting=s) for s in ("alpha=0.1", "alpha=1") for run in over_seeds(a=(0.5,), b=(0.4,))]
    assert r"method & alpha=0.1 & alpha=1 \\" in Comparison(runs, "global").latex()


def test_signs_of_latex():
    assert escaped("a_b & 5 % {x} \\") == r"a\_b \& 5 \% \{x\} \textbackslash{}"
