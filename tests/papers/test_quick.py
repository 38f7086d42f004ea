"""Quick mode: smaller runs of everything, apart from the paper's protocol, without its numbers."""

import json
import re
import time
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from fedlens.cli.main import app
from fedlens.core.errors import BadInput
from fedlens.papers.fedsls import figures, gain
from fedlens.papers.figure_runs import Figure
from fedlens.papers.quick import CELLS, CLASSES, DIGITS, ROUNDS, SAID, TEST, TRAIN, few, reduced, some_columns
from fedlens.papers.registry import reproducible
from fedlens.papers.table import gather


def find_no_hub(name):
    return None if name == "datasets" else find_spec(name)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("reproduced")


@pytest.fixture
def fedlens(capsys):
    def fedlens(*words, code=0):
        assert app(["reproduce", *map(str, words)], standalone_mode=False) in (None, code)
        return capsys.readouterr()

    return fedlens


@pytest.fixture
def nothing_here(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLENS_DATA", str(tmp_path / "nothing"))
    monkeypatch.setattr("fedlens.data.sources.base.importlib.util.find_spec", find_no_hub)


def test_few_images(tmp_path, nothing_here):
    path = few("celeba", tmp_path)  # which is not here
    assert path.name == f"{DIGITS}-32.npz" and few("celeba", tmp_path) == path
    stored = np.load(path)
    assert stored["x_train"].shape == (TRAIN, 1, 28, 28) and stored["x_test"].shape == (TEST, 1, 28, 28)
    assert {*stored["y_train"]} == {*range(10)} == {*stored["y_test"]}
    assert (
        few(DIGITS, tmp_path, 16).name == f"{DIGITS}-16.npz"
        and np.load(few(DIGITS, tmp_path, 16))["x_test"].shape[2] == 14
    )
    assert CLASSES >= 15  # as many as a client of PSE's figure 4 has


def test_every_cell_is_small_and_said_to_be_another_protocol(out, nothing_here):
    for name, grid in reproducible().items():
        if isinstance(grid, Figure):
            continue
        columns = some_columns(grid, [], [])
        small = reduced(grid, out / "quick")
        assert not small.paper and SAID in small.notes and len(columns) * len(grid.rows) <= max(CELLS, len(grid.rows))
        for cell in small.cells([], columns[:1]):
            e = cell.experiment
            assert (e.rounds, e.execution.engine) == (ROUNDS, "sequential") and e.clients <= 6, name
            assert f"rounds={ROUNDS}" in cell.changes and len(e.timetable()) <= 4 * ROUNDS, (name, cell.row)
        assert some_columns(grid, [], ["x"]) == ["x"]
    real = reproducible()["fedxds/table3"]
    assert reduced(real, out / "quick").titles == {name: f"{name} (here {DIGITS})" for name in real.columns}
    networks = reduced(reproducible()["spatl/accuracy"], out / "quick").titles
    assert networks["resnet20"] == f"resnet20 (here {DIGITS})" and networks["vgg11"] == f"vgg11 (here cnn2, {DIGITS})"


def test_a_table_and_its_words(out, fedlens, nothing_here):
    said = fedlens("fedsls/dynamic", "--quick", "--columns", "cifar10/0.05", "--out", out)
    text = (out / "quick" / "fedsls" / "dynamic.md").read_text()
    assert SAID in said.err and "2 runs: " in said.err and "on this machine" in said.err
    assert SAID in text and "(quick mode)" in text and "paper |" not in text and "changed from the paper's by" in text
    assert re.search(rf"\| dynamic \| \d+\.\d+ \(1 x {ROUNDS}\) \|", text)
    assert (out / "quick" / "fedsls" / "dynamic.png").stat().st_size > 5_000
    said = fedlens("fedsls/dynamic", "--quick", "--columns", "cifar10/0.05", "--dry-run", "--out", out).out
    assert not [line for line in said.splitlines() if not line.startswith("# ")]


@pytest.mark.slow
def test_a_figure_of_runs(out, fedlens, monkeypatch, nothing_here):
    """FedSLS's figure 1, by the split that the paper cites; by unequal sizes where these are asked for."""
    monkeypatch.setattr(gain, "ALPHAS", ("0.1",))
    said = fedlens("fedsls/figure1", "--quick", "--out", out, "--json", "rounds=1")
    assert [path.rpartition("/")[2] for path in json.loads(said.out)["files"]] == ["figure1.png", "figure1.json"]
    noted = json.loads((out / "quick" / "fedsls" / "figure1.json").read_text())
    assert noted["paper"] == {} and noted["gain"].keys() == {"cifar10-client", "cinic10-client"}
    assert noted["gain"]["cinic10-client"].keys() == {"fedavg", "fedau"}
    which = ("--rows", "fedsls,fedau", "--columns", "cifar10-client/0.1", "--out", out, "--json", "rounds=1")
    cells = json.loads(fedlens("fedsls/table1", "--quick", *which).out)
    ours = {cell["row"]: cell["mean"] for cell in cells if cell["column"] == "cifar10-client/0.1"}
    assert noted["gain"]["cifar10-client"]["fedau"]["0.1"] == pytest.approx(ours["fedsls"] - ours["fedau"])
    fedlens("fedsls/figure1", "--quick", "--columns", "cifar10", "--out", out, "rounds=1")
    assert json.loads((out / "quick" / "fedsls" / "figure1.json").read_text())["gain"].keys() == {"cifar10"}


def test_figure_4_of_fedsls_deals_as_the_paper_cites(out, fedlens, monkeypatch, nothing_here):
    dealt = []

    def mix(axis, counts):
        dealt.append([sum(row) for row in counts])
        axis.scatter([0], [0])

    monkeypatch.setattr(figures, "label_mix", mix)
    fedlens("fedsls/figure4", "--quick", "--out", out)
    assert len(dealt) == 6 and all(max(sizes) - min(sizes) <= 1 for sizes in dealt)
    fedlens("fedsls/figure4", "--quick", "--columns", "cifar10", "--out", out)
    assert len(dealt) == 9 and all(max(sizes) - min(sizes) > 10 for sizes in dealt[6:])
    with pytest.raises(BadInput, match="'mnist5k' is not in this figure"):
        fedlens("fedsls/figure4", "--quick", "--columns", "mnist5k", "--out", out)


def test_a_dry_run_writes_nothing(tmp_path, fedlens):
    for name in reproducible():
        said = fedlens(name, "--quick", "--dry-run", "--out", tmp_path / "dry").out.splitlines()
        assert all(line.startswith(("fedlens run ", "# ")) and "not run here" not in line for line in said), name
        assert not (tmp_path / "dry").exists(), name


def test_a_figure_of_images_as_printed(out, fedlens):
    """FedXDS's figure 1: as the paper's equation 10, without clipping."""
    fedlens("fedxds/figure1", "--quick", "--images", "2", "--out", out)
    noted = json.loads((out / "quick" / "fedxds" / "figure1.json").read_text())
    assert noted["clip_norm"] is None and noted["kept"] == pytest.approx(0.3, abs=0.01)
    assert noted["sigma"] == pytest.approx(0.242, abs=0.001)


def test_what_is_not_here_is_said_before_anything_starts(tmp_path, fedlens, nothing_here):
    known = reproducible()
    asked = [name for name, one in known.items() if isinstance(one, Figure)]
    for name in (*asked, "fedxds/table3", "pse/table3", "fedxds/figure2c"):
        said = fedlens(name, "--dry-run", "--out", tmp_path / "out").out.splitlines()
        assert all(line.startswith(("fedlens run ", "# ")) for line in said), name
        assert any("not run here: needs" in line for line in said), name
    assert not (tmp_path / "out").exists()
    with pytest.raises(BadInput, match="not run here: needs celeba"):
        fedlens("fedxds/table3", "--rows", "fedavg", "--columns", "celeba", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()  # where nothing can begin
    told = {("fedavg", "celeba", 0): "not run here: needs celeba"}
    table = replace(gather(known["fedxds/table3"], tmp_path, ()), failures=told)
    assert "- celeba: not run here: needs celeba." in table.markdown()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*reproducible()])
def test_everything_within_two_minutes(name, tmp_path, fedlens):
    start = time.process_time()
    fedlens(name, "--quick", "--out", tmp_path)
    assert time.process_time() - start < 120 and list((tmp_path / "quick").rglob(f"{name}*"))
