"""A table whose runs go side by side is the table whose runs go one after another."""

import io
from contextlib import nullcontext

import pytest

from fedlens import config
from fedlens.compare.board import Board
from fedlens.papers.table import reproduce
from fedlens.runs.diff import differences
from fedlens.runs.grid import Column, Grid, Row
from fedlens.simulate import recorder
from fedlens.simulate import run as simulate

SMALL = (
    "data=mnist5k",
    "model=cnn2",
    "clients=4",
    "cohort=2",
    "rounds=2",
    "local.steps=1",
    "evaluate.personal=none",
    "picture=false",
)
ROWS = {
    "fedavg": Row(("algorithm=fedavg",)),
    "fedprox": Row(("algorithm=fedprox",)),
    "local": Row(("algorithm=local",)),
}


@pytest.mark.thorough
def test_side_by_side_gives_the_same_bits_and_says_what_failed(tmp_path):
    grid = Grid("tiny/table", "a small one", ROWS, {"0.1": Column(("partition.alpha=0.1",))}, SMALL)
    stream, said = io.StringIO(), []
    taken, *ran = grid.cells()  # of one run somebody else's experiment is in the way
    for name in ("turn", "once"):
        simulate.run(config.read(None, [*taken.words, "local.lr=0.5", f"out={taken.folder(tmp_path / name, 0)}"]))
    whole, parts = (
        reproduce(
            grid,
            tmp_path / name,
            watch=lambda: nullcontext(recorder.Nobody()),
            say=said.append,
            board=lambda: Board(stream),
            processes=count,
        )
        for name, count in (("turn", 1), ("once", 2))
    )
    assert whole.done.keys() == parts.done.keys()
    for cell in ran:
        assert not [*differences(*(cell.folder(tmp_path / name, 0) for name in ("turn", "once")))]
    assert [*whole.failures] == [*parts.failures] == [("fedavg", "0.1", 0)]
    assert all("another experiment" in why for table in (whole, parts) for why in table.failures.values())
    assert len(said) == 6
    assert "[3 of 3]" in stream.getvalue() and "fedprox 0.1 seed 0: done" in stream.getvalue()
