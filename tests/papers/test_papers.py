"""Tables of papers: what is missing is run, nothing is mixed, and every number is that of its runs."""

import json
import math
import shlex
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow.dataset
import pytest
import torch
from torch import nn

from fedlens import config
from fedlens.algorithms import FedSLS
from fedlens.cli.main import app
from fedlens.core.errors import BadInput
from fedlens.core.network import Network
from fedlens.core.rng import generator, seeded
from fedlens.core.run import run as run_rounds
from fedlens.core.tree import Tree
from fedlens.data import DATASETS
from fedlens.engines.sequential import Sequential
from fedlens.experiment import Experiment, build
from fedlens.papers import table_figure as picture
from fedlens.papers.fedsls import tables as fedsls
from fedlens.papers.fedsls.cost import measured, operations, pass_cost
from fedlens.papers.fedsls.latents import Eye, comparable, latents, likeness, quartiles, saliency_maps
from fedlens.papers.fedsls.weighing import Weights, copies, weights_by_switch, weights_of, weights_over_rounds
from fedlens.papers.figure_runs import Figure
from fedlens.papers.registry import reproducible
from fedlens.papers.table import gather, reproduce
from fedlens.runs.diff import differences
from fedlens.runs.folder import RunFolder
from fedlens.runs.grid import Column, Grid, Reported, Row, protocol_name, seeds_of
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
    "evaluate.last=2",
    "engine=sequential",
    "picture=false",
)
GRID = Grid(
    "tiny/table",
    "a small one",
    {"fedavg": Row(("algorithm=fedavg",)), "fedprox": Row(("algorithm=fedprox", "algorithm.mu=0.1"))},
    {"skewed/0.1": Column(("partition.alpha=0.1",)), "skewed/1": Column(("partition.alpha=1",))},
    SMALL,
    {("fedavg", "skewed/0.1"): Reported(58.04, 1.0), ("fedprox", "skewed/1"): Reported(61.2)},
)


def nobody():
    return nullcontext(recorder.Nobody())


def run_all(grid, out, **options):
    return reproduce(grid, out, watch=nobody, **options)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out = tmp_path_factory.mktemp("reproduced")
    return out, run_all(GRID, out, seeds=[0, 1])


class Interrupting(recorder.Nobody):
    def round(self, progress):
        if progress.round == 1:
            raise KeyboardInterrupt


# ---- the grid --------------------------------------------------------------------------------------------------------
def test_numbers_are_those_of_the_runs_tables(done):
    out, table = done
    for entry in table.entries():
        values = []
        for seed in (0, 1):
            run = out / "tiny" / "table" / f"{entry['row']}-{entry['column'].replace('/', '-')}" / f"seed{seed}"
            rows = pyarrow.dataset.dataset(run / "metrics.parquet").to_table().to_pylist()
            looks = [r for r in rows if r["model"] == "global" and r["metric"] == "accuracy"]
            assert [r["round"] for r in looks] == [1, 2] and config.read(run / "config.yaml").seed == seed
            values.append(100 * np.mean([r["value"] for r in looks[-2:]]))
        assert entry["seeds"] == 2 and entry["rounds"] == 2 and values[0] != values[1]
        assert entry["mean"] == pytest.approx(np.mean(values), abs=1e-12)
        assert entry["std"] == pytest.approx(np.std(values, ddof=1), abs=1e-12)


def test_the_three_files_say_the_same(done):
    out, _ = done
    text = (out / "tiny" / "table.md").read_text()
    whole = json.loads((out / "tiny" / "table.json").read_text())
    lines = (out / "tiny" / "table.csv").read_text().splitlines()
    assert len(lines) == 5 and len(whole["cells"]) == 4
    for entry, line in zip(whole["cells"], lines[1:], strict=True):
        assert f"{entry['mean']:.2f} ± {entry['std']:.2f} (2 x 2)" in text
        assert line.startswith(f"{entry['row']},{entry['column']},{entry['mean']!r},{entry['std']!r},2,2,")
    assert "58.04 ± 1" in text and "| 61.2 |" in text and "Initial weights of skewed/0.1, skewed/1: drawn" in text
    assert "the paper's." in text and "CPU, fp32" in text and "5,000 images" in text


def test_a_picture_shows_every_run_and_the_papers_numbers(done, monkeypatch, tmp_path):
    _, table = done
    figures = []
    monkeypatch.setattr(picture, "save", lambda figure, path: figures.append((figure, path)) or path)
    table = replace(table, out=tmp_path)
    assert picture.draw(table) == tmp_path / "tiny" / "table.png"
    ((figure, _),) = figures
    axes = {axis.get_title(): axis for axis in figure.axes}
    assert list(axes) == ["skewed/0.1", "skewed/1"]
    for entry in table.entries():
        axis, at = axes[entry["column"]], ["fedavg", "fedprox"].index(entry["row"])
        here = [line for line in axis.lines if set(line.get_ydata()) == {at}]
        dots = next(sorted(line.get_xdata()) for line in here if line.get_marker() == "o")
        assert dots == sorted(one["value"] for one in entry["runs"].values()) and len(dots) == 2
        diamonds = [line.get_xdata()[0] for line in here if line.get_marker() == "D"]
        assert diamonds == ([] if entry["paper"] is None else [entry["paper"]])
        assert f"{entry['mean']:.1f}" in {text.get_text() for text in axis.texts if text.xy[1] == at}
    assert "the paper's protocol" not in figure.texts[-1].get_text().replace("\n", " ")
    assert picture.draw(gather(GRID, tmp_path, ())) is None and len(figures) == 1  # nothing has been run
    monkeypatch.undo()
    other = [replace(cell, changes=("rounds=3",)) for cell in table.cells]
    changed = replace(table, name="tiny/table~partition.alpha=0.1", cells=other)
    assert picture.draw(changed) == tmp_path / "tiny" / "table~partition.alpha=0.1.png"
    assert (tmp_path / "tiny" / "table~partition.alpha=0.1.png").exists()
    plot = "".join((tmp_path / "tiny" / "table~partition.alpha=0.1.svg").read_text().split())
    assert "rounds=3" in plot


def test_no_papers_number_stands_beside_a_stand_in(done):
    out, table = done
    place, column = ("fedavg", "skewed/0.1"), Column(("partition.alpha=0.1",), ("local.steps=2",))
    other = gather(replace(GRID, columns={**GRID.columns, "skewed/0.1": column}), out, ())
    assert table.paper(*place).mean == 58.04 and other.paper(*place) is None and other.paper("fedprox", "skewed/1")
    other = replace(other, asked=other.cells)  # shown although nothing is done
    assert "58.04" not in other.markdown() and "stand in for its own: skewed/0.1." in other.markdown()
    part = replace(table, done={**table.done, place: {0: replace(table.done[place][0], part=True)}})
    assert part.paper(*place) is None and "58.04" not in part.markdown() and "61.2" in part.markdown()


def test_rows_that_are_numbers_are_an_axis(done, monkeypatch, tmp_path):
    _, table = done
    figures, values = [], {"0.5": 3.0, "1": 4.0, "2": 9.0}
    monkeypatch.setattr(picture, "save", lambda figure, path: figures.append(figure) or path)
    rows = {name: Row(("algorithm=fedprox", f"algorithm.mu={name}")) for name in values}
    paper = {("1", "skewed/1"): Reported(61.2)}
    empty = gather(Grid("tiny/mu", "mu", rows, {"skewed/1": GRID.columns["skewed/1"]}, SMALL, paper), tmp_path, ())
    one = next(iter(table.done["fedavg", "skewed/1"].values()))
    picture.draw(replace(empty, done={(n, "skewed/1"): {0: replace(one, value=v)} for n, v in values.items()}))
    line = next(line for line in figures[0].axes[0].lines if line.get_label() == "skewed/1")
    assert [*line.get_xdata()] == [0.5, 1, 2] and [*line.get_ydata()] == [*values.values()]
    diamonds = [line for line in figures[0].axes[0].lines if line.get_marker() == "D"]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in diamonds] == [(1, 61.2)]


def test_what_is_done_is_not_run_again_and_what_is_missing_is(done, monkeypatch):
    out, table = done
    begun = []
    monkeypatch.setattr(simulate, "run", lambda experiment, watcher: begun.append(experiment))
    monkeypatch.setattr("fedlens.simulate.resume.resume", lambda *args, **named: pytest.fail("nothing to resume"))
    assert run_all(GRID, out, seeds=[1, 0]).entries() == table.entries() and not begun
    run_all(GRID, out, rows=["fedprox"], columns=["skewed/1"], seeds=[0, 2])
    assert [(e.seed, e.algorithm.mu, e.partition.alpha) for e in begun] == [(2, 0.1, 1.0)]


def test_goes_on_after_an_interruption_to_the_same_bits(done, tmp_path):
    which = dict(rows=["fedavg"], columns=["skewed/1"], seeds=[0])
    with pytest.raises(KeyboardInterrupt):
        reproduce(GRID, tmp_path, **which, watch=lambda: nullcontext(Interrupting()))
    run = "tiny/table/fedavg-skewed-1/seed0"
    assert RunFolder(tmp_path / run).result() is None and RunFolder(tmp_path / run).load()[0].round == 1
    assert gather(GRID, tmp_path, ()).entries()[0]["mean"] is None
    assert "- Begun: fedavg, skewed/1, seed 0: 1 of 2 rounds are saved." in gather(GRID, tmp_path, ()).markdown()
    table = run_all(GRID, tmp_path, **which)
    assert list(differences(tmp_path / run, done[0] / run)) == [] and "Begun" not in table.markdown()
    assert table.entries()[0]["mean"] == RunFolder(done[0] / run).result()["accuracy_last"] * 100


def test_one_failure_is_told_and_the_others_go_on(tmp_path):
    rows = {"wrong": Row(("cohort=99",)), "fedavg": GRID.rows["fedavg"]}
    grid = Grid("tiny/broken", "one row cannot run", rows, {"all": Column(())}, SMALL)
    table = run_all(grid, tmp_path)
    assert [entry["seeds"] for entry in table.entries()] == [0, 1] and list(table.failures) == [("wrong", "all", 0)]
    text = (tmp_path / "tiny" / "broken.md").read_text()
    assert "- Failed: wrong, all, seed 0: " in text and "99" in text and "| wrong |  |" in text
    assert json.loads((tmp_path / "tiny" / "broken.json").read_text())["failures"][0]["row"] == "wrong"


def test_selection_by_name():
    names = [(cell.row, cell.column) for cell in GRID.cells(["fedprox"], ["skewed"])]
    assert names == [("fedprox", "skewed/0.1"), ("fedprox", "skewed/1")]
    assert len(GRID.cells()) == 4 and len(GRID.cells([], ["skewed/1"])) == 2
    with pytest.raises(BadInput, match=r"--rows 'fedprx' .* did you mean 'fedprox'"):
        GRID.cells(["fedprx"])
    with pytest.raises(BadInput, match="--rows 'feddf' is not in fedxds/table1; fedxds/public has it"):
        reproducible()["fedxds/table1"].cells(["feddf"])
    with pytest.raises(BadInput, match=r"--columns 'skewd' .* did you mean 'skewed'"):
        GRID.cells([], ["skewd"])
    with pytest.raises(BadInput, match="use --seeds"):
        GRID.cells(words=["seed=1"])
    with pytest.raises(BadInput, match="unknown key"):
        GRID.cells(words=["roundz=1"])


def test_another_protocol_never_meets_the_papers(done, tmp_path):
    def cell(*words):
        return GRID.cells(words=words)[0]

    assert cell().changes == cell("engine=workers", "picture=true").changes == cell("rounds=2").changes == ()
    assert cell("num_rounds=3", "engine=lanes").changes == ("rounds=3",)
    places = {cell(*words).folder(done[0], 0) for words in ((), ["rounds=3"], ["rounds=4"], ["device=cpu"])}
    assert len(places) == 4
    which = dict(rows=["fedavg"], columns=["skewed/1"], words=["rounds=3", "checkpoint=3"])
    table = run_all(GRID, tmp_path, **which)
    assert table.entries()[0]["rounds"] == 3 and table.entries()[0]["changed"] == "rounds=3"
    assert gather(GRID, tmp_path, ()).entries()[2]["seeds"] == 0  # of the paper's protocol there is none
    assert {path.name for path in (tmp_path / "tiny").iterdir()} == {
        "table",
        *(f"table~rounds=3.{ending}" for ending in ("md", "csv", "json")),
    }
    assert "changed from the paper's by `rounds=3`" in (tmp_path / "tiny" / "table~rounds=3.md").read_text()


def test_words_may_be_about_one_row_alone(done):
    table = gather(GRID, done[0], ["algorithm.mu=0.5"])
    assert {(cell.row, cell.changes) for cell in table.shown} == {("fedprox", ("algorithm.mu=0.5",))}
    assert table.name == "tiny/table~algorithm.mu=0.5" and "| fedprox |" in table.markdown()
    with pytest.raises(BadInput, match=r"unknown key algorithm\.mu of fedavg"):
        GRID.cells(["fedavg"], words=["algorithm.mu=0.5"])


def test_a_folder_with_another_experiment_is_refused(done, tmp_path):
    cell = GRID.cells(["fedavg"], ["skewed/1"])[0]
    other = config.read(None, [*cell.words, "local.lr=0.5", f"out={cell.folder(tmp_path, 0)}"])
    simulate.run(other)
    table = run_all(GRID, tmp_path, rows=["fedavg"], columns=["skewed/1"])
    assert table.entries()[0]["seeds"] == 0 and "holds another experiment" in next(iter(table.failures.values()))


def test_a_table_can_take_its_runs_from_another(done):
    out, _ = done
    shared = Grid("tiny/other", "", {"fedavg": Row(("algorithm=fedavg",), home="tiny/table")}, GRID.columns, SMALL)
    assert [entry["seeds"] for entry in gather(shared, out, ()).entries()] == [2, 2]


def test_words_that_lie_over_others():
    column = Column(("model=resnet18", "model.weights=timm/resnet18.tv_in1k"), ("model.weights=stand-in",))

    def cell(*words):
        return Grid("a/b", "", {"row": Row(())}, {"column": column}).cells(words=words)[0]

    assert cell().changes == ("model.weights=stand-in",)
    assert cell("model.weights=timm/resnet18.tv_in1k").changes == ()
    assert cell("model=cnn2").words == ("model=cnn2",)  # what belongs to another model goes with it
    assert cell("model=resnet18").words == ("model=resnet18", "model.weights=stand-in")


def test_names_of_protocols_fit_a_file():
    assert protocol_name("table", ()) == "table" and protocol_name("table", ["rounds=3"]) == "table~rounds=3"
    long = protocol_name("table", [f"model.weights=/somewhere/{'x' * 90}"])
    assert len(long) < 30 and "/" not in long and long != protocol_name("table", [f"model.weights=/else/{'x' * 90}"])


def test_seeds():
    assert seeds_of("3") == [0, 1, 2] and seeds_of("4,7") == [4, 7] and seeds_of("4,") == [4]
    for wrong in ("", "0", "-1", "x", "1.5", ","):
        with pytest.raises(BadInput, match="--seeds"):
            seeds_of(wrong)


# ---- FedSLS's tables -------------------------------------------------------------------------------------------------
def test_table_1_is_the_papers_setting(monkeypatch):
    monkeypatch.delenv("FEDLENS_DATA", raising=False)
    table, switches, dynamic = fedsls.tables()
    assert len(table.cells()) == 2 * 4 * 3 * 10 and len(table.paper) == 2 * 4 * 3 * 9
    for cell in table.cells():
        e = cell.experiment
        large = cell.column.startswith("tiny")
        assert (e.clients, e.cohort.size(100), e.local.steps, e.local.batch_size) == (100, 10, 10, 64)
        assert (e.local.lr, e.local.momentum, e.local.weight_decay, e.evaluate.last) == (0.01, 0.0, 0.0, 20)
        assert e.evaluate.closing >= 20 or e.evaluate.every == 1  # the last 20 looks are the last 20 rounds
        assert e.rounds == (1000 if large else 2000) and e.model.stem == "stock"
        assert e.model.weights == f"timm/resnet{50 if large else 18}.tv_in1k"
        reading = {"class": "", "client": "-client"}[e.partition.dialect]  # two readings of the text
        assert cell.column == f"{type(e.data).name}{reading}/{e.partition.alpha:g}" and cell.changes == ()
    assert table.cells(["uniform"])[0].experiment.weighting == "uniform"
    # From the summary of the paper, typed again: alpha 0.5, 0.1, 0.05.
    typed = {"fedavg": (70.77, 58.04, 40.99), "moon": (77.02, 62.79, 55.64), "fedsls": (82.67, 70.51, 63.43)}
    typed |= {"fedsl4": (81.65, 48.91, 38.44), "fedau": (74.91, 60.04, 49.24)}
    for row, numbers in typed.items():
        assert tuple(table.paper[row, f"cifar10/{alpha}"].mean for alpha in (0.5, 0.1, 0.05)) == numbers
    best = {c: max((n.mean, row) for (row, at), n in table.paper.items() if at == c)[1] for c in table.columns}
    assert {c: row for c, row in best.items() if row != "fedsls"} == dict.fromkeys(
        ("cinic10/0.5", "cinic10-client/0.5"), "fedsl4"
    )  # as the text forgets
    paper = switches.cells(["fedsls"])[0].experiment.algorithm
    others = [c.experiment.algorithm for c in switches.cells(columns=["cifar10/0.1"])[3:]]
    assert paper == FedSLS() and len({*others}) == len(others) and paper not in others
    shared = switches.cells(["fedavg"], ["cifar10/0.05"])[0].folder(fedsls.Path("x"), 0)
    assert shared == table.cells(["fedavg"], ["cifar10/0.05"])[0].folder(fedsls.Path("x"), 0)
    assert {cell.folder(fedsls.Path("x"), 0).parts[2] for cell in dynamic.cells()} == {"table1", "switches"}


def test_initial_weights_are_the_best_there_are(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDLENS_DATA", str(tmp_path))
    (tmp_path / "weights").mkdir()
    assert fedsls.column("cifar10", "0.1").instead == ()
    (tmp_path / fedsls.STAND_IN).touch()
    assert fedsls.column("cifar10", "0.1").instead == ("model.weights=stand-in",)
    assert fedsls.column("tiny_imagenet", "0.1").instead == ()  # there is no stand-in of that network
    (tmp_path / "weights" / "resnet18.tv_in1k.safetensors").touch()
    column = fedsls.column("cifar10", "0.1")
    assert column.instead == () and column.words[-1].endswith("weights/resnet18.tv_in1k.safetensors")


# ---- the command -----------------------------------------------------------------------------------------------------
def test_the_command(tmp_path, monkeypatch, capsys):
    def fedlens(*words, code=0):
        assert app(["reproduce", *words], standalone_mode=False) in (None, code)
        return capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    listed = {row["name"] for row in json.loads(fedlens("--json"))} - {""}  # drawings of methods
    assert listed == set(reproducible()) >= {"fedsls/table1", "fedsls/switches", "fedsls/figure5"}
    with pytest.raises(BadInput, match="did you mean 'fedsls/table1'"):
        fedlens("fedsls/tabel1")
    with pytest.raises(BadInput, match="fedsls/figure3 is a figure: --rows is for tables"):
        fedlens("fedsls/figure3", "--rows", "fedavg")
    where = ["--columns", "cifar10/K10/0.1", "--dry-run"]
    for rows in (["fedxds, uniform", "fedavg,fedsls"], [" fedsls, fedxds, uniform,fedavg, "]):
        said = fedlens("compose/cifar10", *(word for row in rows for word in ("--rows", row)), *where)
        lines = [line for line in said.splitlines() if not line.startswith("#")]  # what this machine lacks
        algorithms = [config.read(None, shlex.split(line)[2:]) for line in lines]
        assert [type(e.algorithm).__name__ for e in algorithms] == ["FedAvg", "FedSLS", "FedXDS"]
        assert [e.weighting for e in algorithms] == ["auto", "auto", "uniform"]
    with pytest.raises(BadInput, match="--rows ' , ' names nothing"):
        fedlens("compose/cifar10", "--rows", " , ")
    words = [word for word in SMALL if not word.startswith("evaluate.last")]
    which = ["fedsls/table1", "--rows", "fedavg,uniform", "--columns", "cifar10/0.1", *words]
    said = fedlens(*which, "--dry-run").splitlines()
    protocol = [line for line in said if line.startswith("# ")]
    assert {line.partition(":")[0] for line in protocol} == {"# The paper says", "# It leaves open"}
    commands = said[len(protocol) :]
    experiments = [config.read(None, shlex.split(command)[2:]) for command in commands]
    assert [e.weighting for e in experiments] == ["auto", "uniform"] and not list(tmp_path.iterdir())
    text = fedlens(*which)
    assert all((tmp_path / e.execution.out / "result.json").exists() for e in experiments)
    assert config.read(tmp_path / experiments[1].execution.out / "config.yaml") == experiments[1].resolved()
    assert "| uniform |" in text and fedlens(*which, "--dry-run").splitlines() == protocol
    with pytest.raises(BadInput, match=r"cohort.count is 99"):  # nothing can begin, and nothing is written
        fedlens(*which, "cohort=99")


# ---- what figures are drawn from -------------------------------------------------------------------------------------
class GuidedRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(min=0) * (ctx.saved_tensors[0] > 0)


class Colours(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 5, 3, stride=2, padding=1), nn.Conv2d(5, 4, 3)
        self.norm = nn.GroupNorm(1, 5)  # or a ReLU would stop gradients where the layer itself is negative
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()
        self.head = nn.Linear(4, 6)

    def features(self, x):
        return self.relu2(self.two(self.relu1(self.norm(self.one(x))))).mean((2, 3))

    def forward(self, x):
        return self.head(self.features(x))


@pytest.fixture(scope="module")
def eye():
    with seeded(5):
        return Eye(Network(Colours(), "fp64"))


def some_images(count, side=64):
    return torch.rand(count, 3, side, side, generator=generator(9), dtype=torch.float64)


def slow_map(module, x, y):
    """One image by hand: the guided gradient at the first layer, times what it lets through, channels averaged."""
    out = module.one(x[None])
    first = out.detach().requires_grad_()
    second = GuidedRelu.apply(module.two(GuidedRelu.apply(module.norm(first))))
    logits = module.head(second.mean((2, 3)))[0]
    (gradient,) = torch.autograd.grad(logits[logits.argmax() if y is None else y], first)
    return (gradient * first.clamp(min=0))[0].mean(0).detach()


def test_saliency_maps_equal_those_by_hand(eye):
    x, y = some_images(4, 16) - 0.4, torch.tensor([0, 3, 5, 1])
    by_hand = torch.stack([slow_map(eye.net.module, image, label) for image, label in zip(x, y, strict=True)])
    found = saliency_maps(eye.net, eye.net.initial_weights(), x, y)
    assert found.shape == (4, 8, 8) and (by_hand != 0).any() and torch.allclose(found, by_hand, atol=1e-14)
    predicted = torch.stack([slow_map(eye.net.module, image, None) for image in x])
    assert torch.allclose(saliency_maps(eye.net, eye.net.initial_weights(), x), predicted, atol=1e-14)


def slow_comparable(picture):
    wide = nn.functional.interpolate(torch.as_tensor(picture)[None, None], (64, 64), mode="bilinear")[0, 0].numpy()
    return np.clip(0.5 + 0.25 * (wide - wide.mean()) / wide.std(ddof=1), 0, 1)


def test_boxes_equal_a_slow_loop(eye):
    metrics = pytest.importorskip("skimage.metrics")
    images = some_images(3)
    scores = likeness(eye, images)
    mean, std = (np.array(values)[:, None, None] for values in (eye.mean, eye.std))
    for at, image in enumerate(images.numpy()):
        gray = slow_comparable(image.mean(0))
        smaller = {f: image.reshape(3, 64 // f, f, 64 // f, f).mean((0, 2, 4)) for f in (2, 4, 8)}
        scaled = torch.from_numpy((image - mean) / std)
        maps = {"saliency": slow_map(eye.net.module, scaled, None).numpy()}
        maps |= {f"f = {f}": small for f, small in smaller.items()}
        for name, latent in ((name, slow_comparable(found)) for name, found in maps.items()):
            seen = [
                eye.net.module(torch.from_numpy((np.stack([gray_map] * 3) - mean) / std)[None])[0].detach()
                for gray_map in (gray, latent)
            ]
            alike = metrics.structural_similarity(
                gray, latent, data_range=1.0, gaussian_weights=True, sigma=1.5, use_sample_covariance=False
            )
            a, b = (vector.numpy() for vector in seen)
            assert float(scores["SSIM"][name][at]) == pytest.approx(alike, abs=1e-9)
            cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
            assert float(scores["cosine of outputs"][name][at]) == pytest.approx(cosine, abs=1e-12)
            distance = np.linalg.norm(gray - latent)
            assert float(scores["Euclidean distance"][name][at]) == pytest.approx(distance, abs=1e-9)
    boxes = quartiles(scores)["SSIM"]["f = 4"]
    values = scores["SSIM"]["f = 4"].numpy()
    assert list(boxes.values()) == pytest.approx([values.mean(), *np.percentile(values, (25, 50, 75))])


def test_latents_are_of_the_images_size(eye):
    found = latents(eye, some_images(2))
    assert {name: maps.shape[1] for name, maps in found.items()} == {
        "saliency": 32,
        "at pixels": 64,
        "f = 2": 32,
        "f = 4": 16,
        "f = 8": 8,
    }
    flat = comparable(torch.full((1, 8, 8), 0.3))
    assert torch.equal(flat, torch.full((1, 1, 64, 64), 0.5))


# ---- weights ---------------------------------------------------------------------------------------------------------
@cache
def some_digits() -> str:
    """An eighth of the digits, as a file."""
    images, path = DATASETS["mnist5k"]().load(), Path(tempfile.mkdtemp()) / "digits.npz"
    x, y = images.x[::8, 0].numpy(), images.y[::8].numpy()
    np.savez(path, x_train=x[::2], y_train=y[::2], x_test=x[1::2], y_test=y[1::2])
    return f"data={path}"


def weighing(*words) -> Experiment:
    base = [some_digits(), *(word for word in SMALL if not word.startswith(("cohort", "data")))]
    more = ["cohort=4", "algorithm=fedsls", "algorithm.pretrain_epochs=0", "precision=fp64", "partition.alpha=0.3"]
    return config.read(None, [*base, *more, *words]).resolved()


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("algorithm.normalize=mean",),
        ("algorithm.blend=0.25", "algorithm.blend_with=uniform"),
        ("algorithm.normalize=mean", "algorithm.blend=0.5", "algorithm.blend_with=samples"),
    ],
)
def test_weights_are_those_that_the_server_used(words):
    experiment = weighing("rounds=1", *words)
    net, federation = build(experiment)
    engine, seen = Sequential(net, federation), []
    run_rounds(
        experiment.algorithm,
        net,
        engine,
        experiment.plan,
        observe=lambda server, job, replies: seen.append((server.state.model, [reply.upload for reply in replies])),
    )
    weights = weights_of({client: engine.memories.get(client) for client in range(4)}, experiment.algorithm)
    (before, asked), (after, uploads) = seen
    assert [float(u.saliency.total) for u in asked] == list(weights.saliency.values())
    assert list(weights.examples.values()) == [len(federation.train[client]) for client in range(4)]
    for name, start in before.params.items():
        moved = sum(weights.used[client] * uploads[client].delta.params[name] for client in range(4))
        assert torch.allclose(after.params[name], start + moved, atol=1e-12, rtol=0)
    assert sum(weights.used.values()) == pytest.approx(1) and weights.used != weights.by_samples
    assert weights.per_image[2] == weights.saliency[2] / len(federation.train[2])


def test_copies_are_the_models_that_clients_looked_with():
    experiment = weighing("rounds=1", "algorithm.pretrain_epochs=1")
    net, federation = build(experiment)
    engine = Sequential(net, federation)
    run_rounds(experiment.algorithm, net, engine, experiment.plan)
    made = copies(experiment, net, federation, [1, 3])
    for client, model in made.items():
        x, y = federation.data.prepare(federation.data.x[federation.train[client]], None), federation.data.y
        again = FedSLS().of_images(
            type("View", (), {"net": net}), model, type("Piece", (), {"x": x, "y": y[federation.train[client]]})
        )
        kept = engine.memories.get(client).saliency
        assert float(again.sum()) == pytest.approx(float(kept.total), rel=1e-12) and float(kept.total) > 0
    with pytest.raises(BadInput, match="fedsls"):
        copies(config.read(None, SMALL), net, federation, [0])


def test_weights_over_rounds():
    experiment = weighing("rounds=3", "algorithm.recompute_every=2")
    found = weights_over_rounds(experiment, *build(experiment))
    once = weights_over_rounds(weighing("rounds=3"), *build(experiment))
    assert list(found) == [0, 2] and list(once) == [0] and found[0] == once[0] and found[2] != found[0]
    assert weights_of({0: Tree()}, experiment.algorithm) is None


def test_weights_by_switch_are_those_of_a_run_with_it():
    words = {"sum": (), "mean": ("algorithm.normalize=mean",), "trained": ("algorithm.pretrain_epochs=1",)}
    experiments = {name: weighing("rounds=1", *own) for name, own in words.items()}
    net, federation = build(experiments["sum"])
    switched = {name: one.algorithm for name, one in experiments.items()}
    found = weights_by_switch(experiments["sum"], net, federation, switched, 0)
    for name, experiment in experiments.items():
        run = weights_over_rounds(experiment, *build(experiment))[0]
        for mine, theirs in ((found[name].used, run.used), (found[name].saliency, run.saliency)):
            assert mine == pytest.approx(theirs, rel=1e-12)
    assert found["sum"].used != found["mean"].used != found["trained"].used
    some = weights_by_switch(experiments["sum"], net, federation, {"sum": switched["sum"]}, 3)["sum"]
    assert some.examples == found["sum"].examples and some.saliency != found["sum"].saliency
    assert some.saliency == pytest.approx(found["sum"].saliency, rel=0.5)


def test_what_is_said_of_weights_by_hand():
    from scipy.stats import entropy, spearmanr

    sizes, totals = {0: 10.0, 1: 30.0, 2: 60.0, 3: 10.0}, {0: 5.0, 1: 9.0, 2: 48.0, 3: 5.0}
    by_samples = {c: n / 110 for c, n in sizes.items()}
    weights = Weights(sizes, totals, by_samples, {c: total / 67 for c, total in totals.items()})
    assert weights.counted == pytest.approx(math.exp(entropy([5, 9, 48, 5])))
    assert weights.moved == pytest.approx(48 / 67 - 60 / 110)  # one alone gained
    assert weights.grows == pytest.approx(spearmanr([10, 30, 60, 10], [0.5, 0.3, 0.8, 0.5]).statistic)


SKETCH = {
    "maps": ("algorithm.pretrain_epochs=0",),
    "figure3": (),
    "figure4": (),
    "figure5": (),
    "static_dynamic": ("rounds=2", "algorithm.recompute_every=1", "algorithm.pretrain_epochs=0"),
    "weights": ("algorithm.pretrain_epochs=0",),
    "cost": (),
    "seconds": ("algorithm.pretrain_epochs=0",),
}


def test_every_figure_is_drawn(tmp_path):
    known = reproducible().items()
    figures = {
        n.removeprefix("fedsls/"): one for n, one in known if n.startswith("fedsls/") and isinstance(one, Figure)
    }
    assert figures.keys() == {*SKETCH, "figure1"}  # which is drawn of runs
    for name, words in SKETCH.items():
        files = figures[name].draw(["data=mnist5k", "model=cnn2", "clients=5", "cohort=2", *words], 4, tmp_path / name)
        assert all(path.stat().st_size > 100 for path in files)
        pictured = name not in ("cost", "seconds")
        assert (tmp_path / f"{name}.svg").exists() == (tmp_path / f"{name}.png").exists() == pictured
    boxes = json.loads((tmp_path / "figure5.json").read_text())
    assert boxes["images"] == 4 and boxes["boxes"].keys() == {"SSIM", "cosine of outputs", "Euclidean distance"}
    assert boxes["setting"] == "cnn2 on mnist5k, random weights"
    assert json.loads((tmp_path / "seconds.json").read_text())["images"] == 4000
    shares = json.loads((tmp_path / "static_dynamic.json").read_text())["shares"]
    assert list(shares) == ["0", "1"] and sum(shares["1"].values()) == pytest.approx(1)


# ---- cost ------------------------------------------------------------------------------------------------------------
def test_cost_of_a_pass_by_hand(eye):
    """Products by hand; backwards each layer takes as many for its input, the first for no input, none for weights."""
    x, y = some_images(6, 16), torch.zeros(6, dtype=torch.long)
    one, two, head = 8 * 8 * 5 * 27, 6 * 6 * 4 * 45, 4 * 6
    found = pass_cost(eye.net, eye.net.initial_weights(), x, y)
    assert found.forward_operations == 2 * 6 * (one + two + head)
    assert found.all_operations >= found.forward_operations + 2 * 6 * (two + head)
    assert found.map_bytes == 6 * 4 * (64 + 36) and found.channel_bytes == 6 * 4 * (5 * 64 + 4 * 36)
    assert found.first_map_bytes == 6 * 4 * 64 and found.first_channel_bytes == 6 * 4 * 5 * 64


def test_peak_memory_is_measured():
    for size in (30, 90):
        peak, seconds, result = measured(
            lambda size=size: torch.ones(size << 20, dtype=torch.uint8), torch.device("cpu")
        )
        assert size - 5 <= peak / 2**20 <= size + 20 and seconds > 0 and len(result) == size << 20
        del result
    assert operations(lambda: torch.ones(3, 4) @ torch.ones(4, 5)) == 2 * 3 * 4 * 5
