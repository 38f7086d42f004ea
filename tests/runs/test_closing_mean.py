"""The mean that ranks: over the end of a curve, and everywhere the same."""

import shutil

import pytest

from fedlens import config
from fedlens.compare.run import compare_existing
from fedlens.report.page import gather
from fedlens.runs.folder import RunFolder
from fedlens.runs.measures import closing_mean, window
from fedlens.simulate import run as simulate


def rising(count: int, every: int = 1) -> dict[int, tuple[int, float]]:
    """{round of training: (round of the run, accuracy)}."""
    return {every * n: (every * n + 3, n / 100) for n in range(1, count + 1)}


@pytest.mark.parametrize(
    ("count", "asked", "rounds"),
    [
        (8, 0, [7, 8]),  # never the whole of a short run
        (1, 0, [1]),
        (7, 0, [7]),
        (15, 0, [13, 14, 15]),
        (100, 0, [*range(91, 101)]),
        (500, 0, [*range(491, 501)]),
        (8, 10, [*range(1, 9)]),  # who asks for a number gets it
        (8, 3, [6, 7, 8]),
        (0, 0, []),
    ],
)
def test_a_mean_is_over_the_last_quarter_and_ten_evaluations_at_most(count, asked, rounds):
    mean, found = closing_mean(rising(count), asked)
    assert found == rounds
    assert mean == (pytest.approx(sum(rounds) / len(rounds) / 100) if rounds else None)


@pytest.mark.parametrize(
    ("rounds", "said"),
    [
        ([8], "after the last round"),
        ([7, 8], "mean of rounds 7 and 8"),
        ([91, 92, 93], "mean of rounds 91 to 93"),
        ([60, 80, 100], "mean of 3 evaluations, rounds 60 to 100"),
    ],
)
def test_it_is_said_which_rounds_these_are(rounds, said):
    assert window(len(rounds), rounds) == said


def test_of_rounds_that_differ_their_number_is_said():
    assert window(5, []) == "mean of the last 5 evaluations"


@pytest.fixture(scope="module")
def eight_rounds(tmp_path_factory):
    root = tmp_path_factory.mktemp("eight")
    small = ["data=mnist5k", "model=mlp", "clients=6", "cohort=3", "rounds=8", "local.steps=2", "engine=sequential"]
    small.append("picture=false")
    for method in ("fedavg", "scaffold"):
        simulate.run(config.read(None, [*small, f"algorithm={method}", f"out={root / method}"]))
    return [root / "fedavg", root / "scaffold"]


def test_command_line_report_and_files_have_one_mean(eight_rounds):
    table, shown = compare_existing(eight_rounds), gather(eight_rounds)
    rows = {row["method"]: row for row in table.rows("")}
    for path, group in zip(eight_rounds, shown["groups"], strict=True):
        accuracies = group["curves"]["global"]["accuracy"]
        end, result = pytest.approx(sum(accuracies[-2:]) / 2), RunFolder(path).result()
        assert result["accuracy_last"] == end and result["last_rounds"] == [7, 8]
        assert rows[path.name]["mean"] == end and rows[path.name]["last_rounds"] == [7, 8]
        assert group["rank"]["mean"] == end and min(accuracies[-2:]) <= group["rank"]["mean"] <= max(accuracies[-2:])
    assert "(global model, mean of rounds 7 and 8)" in table.verdict()[0]
    assert "mean of rounds 7 and 8" in table.said()[0] and "global (mean of rounds 7 and 8)" in table.tables()[0][1][0]
    best = max(rows.values(), key=lambda row: row["mean"])
    assert (
        f"{best['method']} is ahead with {100 * best['mean']:.1f}\u00a0% (mean of rounds 7 and 8), "
        in shown["headline"]
    )
    assert shown["averaged"] == "mean of rounds 7 and 8" and shown["sentences"][0].endswith(", mean of rounds 7 and 8.")
    assert "mean of rounds 7 and 8" in table.latex()


def test_a_run_that_asked_for_ten_still_means_ten(eight_rounds, tmp_path):
    """As runs of earlier versions did, where ten was the usual number."""
    old = shutil.copytree(eight_rounds[0], tmp_path / "old")
    text = (old / "config.yaml").read_text()
    (old / "config.yaml").write_text(text.replace("\n  last: 0\n", "\n  last: 10\n"))
    assert "last: 10" in (old / "config.yaml").read_text()
    table = compare_existing([old, eight_rounds[1]])
    assert {row["method"]: row["last_rounds"] for row in table.rows("")} == {
        "fedavg": [*range(1, 9)],
        "scaffold": [7, 8],
    }
    assert "Not only the methods differ: evaluate of" in " ".join(table.said())
