"""PSE's tables and figures, and what is said about single clients: every number found a second way."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.dataset
import pytest
import torch
import torch.nn.functional as F

from fedlens import config
from fedlens.algorithms import FineTuned
from fedlens.cli.main import app
from fedlens.core.errors import BadInput
from fedlens.core.rng import generator
from fedlens.explain.runs import chosen, explain_runs
from fedlens.papers.pse import figures as pse_figures
from fedlens.papers.pse import tables as pse
from fedlens.papers.registry import reproducible
from fedlens.plots.style import pyplot
from fedlens.report.client_figures import grouped_bars
from fedlens.runs.folder import RunFolder
from fedlens.runs.opened import OpenedRun, named, same_split
from fedlens.runs.read import client_evaluation, fairness
from fedlens.simulate import run as simulate

# A few small images a client: FedRep wants whole epochs.
SMALL = (
    "clients=4",
    "cohort=2",
    "partition=shards",
    "partition.classes=3",
    "rounds=3",
    "local.epochs=3",
    "local.batch_size=8",
    "local.lr=0.05",
    "local.momentum=0.9",
    "engine=sequential",
    "picture=false",
)
KINDS = {
    "pse": ("algorithm=pse",),
    "fedrep": ("algorithm=fedrep", "algorithm.private=classifier"),
    "ditto": ("algorithm=ditto",),
    "fedavg+ft": ("algorithm=fedavg+ft", "algorithm.epochs=2"),
    "l2gd": ("algorithm=l2gd", "algorithm.p=0.3", "algorithm.pull=2"),
    "scaffold, before": ("algorithm=scaffold", "evaluate.personal=before"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Ten classes of 16 x 16: a bright field at the class's place, under noise."""
    path, draw = tmp_path_factory.mktemp("data") / "fields.npz", generator(4)
    parts = {}
    for part, count in (("train", 16), ("test", 12)):
        y = torch.arange(10).repeat_interleave(count)
        x = torch.rand(len(y), 16, 16, generator=draw) * 0.4
        for image, label in zip(x, y.tolist(), strict=True):
            image[4 * (label // 3) : 4 * (label // 3) + 4, 5 * (label % 3) : 5 * (label % 3) + 5] += 0.5
        parts |= {f"x_{part}": x.numpy(), f"y_{part}": y.numpy()}
    np.savez(path, **parts)
    return f"data={path}"


@pytest.fixture(scope="module")
def run(data):
    def run(out, *words):
        simulate.run(config.read(None, [*SMALL, data, "model=pse_net", "keep=1", *words, f"out={out}"]))
        return out

    return run


@pytest.fixture(scope="module")
def runs(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    return {name: run(out / name.replace(", ", "-"), *words) for name, words in KINDS.items()}


def table_of(path):
    return pyarrow.dataset.dataset(path / "metrics.parquet").to_table().to_pylist()


# ---- tables ----------------------------------------------------------------------------------------------------------
def test_tables_are_the_papers_setting():
    table1, table2, table3, ablations = pse.tables()
    assert [len(table.cells()) for table in (table1, table2, table3, ablations)] == [231, 99, 30, 36]
    assert set(table1.paper) == {(c.row, c.column) for c in table1.cells()}
    assert set(table2.paper) == {(c.row, c.column) for c in table2.cells()}
    expected = {"cifar10": (20, 10), "cifar100": (50, 25), "fashion_mnist": (100, 10), "femnist": (200, 20)}
    for table in (table1, table2, table3, ablations):
        for cell in table.cells():
            e = cell.experiment
            assert (e.rounds, e.local.epochs, e.local.batch_size, e.local.lr, e.local.momentum) == (
                100,
                5,
                10,
                0.01,
                0.5,
            )
            assert type(e.model).__name__ == "PseNet" and e.model.count == 4
            assert e.model.position == (cell.row in ("pse", "v1", "v2", *pse.CAMS))  # equation 7; 6 has none
            family, classes = cell.column.split("/")
            if table in (table2, ablations):
                assert type(e.data).name == family and e.partition.classes == int(classes)
                assert (e.clients, e.cohort.size(e.clients)) == expected[family]
            else:
                family, _, reading = family.partition("-")
                base, *views = family.split("_")
                assert type(e.data.base).name == {"fashion": "fashion_mnist"}.get(base, base)
                mixed = "colour" if reading == "difference" else "added"  # MNIST-M's way to colour, and the text's
                assert list(e.data.views) == [mixed if view == "colour" else view for view in views]
                assert e.partition.base.classes == int(classes)
                joint = {"femnist_gray_colour": 200, "fashion_gray_colour": 100, "fashion_colour_edge": 200}[family]
                joint = 200 if reading == "200" else joint  # the text's count; the table's head has another
                assert (e.clients, e.cohort.size(e.clients)) == (joint, joint // 10)
            assert e.evaluate.personal == "both" and cell.changes == ()
            if isinstance(e.algorithm, FineTuned):
                assert (e.algorithm.epochs, e.algorithm.part) == (5, "all")
    methods = {c.row: c.experiment.algorithm for c in table2.cells(columns=["cifar10/2"])}
    stage = next(iter(methods["fedrep"].stages(table2.cells(["fedrep"])[0].experiment.plan)))
    assert stage.algorithm.head_epochs == 4 and stage.algorithm.private == "classifier"
    assert methods["lgfedavg"].shared_layers == 2 and methods["pse"].xi == 0.01 and methods["pse"].cam == "gradcam"
    variants = {c.row: c.experiment.algorithm for c in ablations.cells(columns=["cifar10/2"])}
    assert (variants["v1"].excite, variants["v1"].attention) == ("none", "cross")
    assert (variants["v2"].excite, variants["v2"].attention) == ("direct", "self") and variants["v3"] == variants["pse"]


def test_the_papers_numbers_say_what_its_text_says():
    table1, table2, table3, ablations = pse.tables()
    for table in (table1, table2):
        for column in table.columns:
            best = max((number.mean, row) for (row, at), number in table.paper.items() if at == column)
            assert best[1] == "pse"  # "state-of-the-art performance in all mentioned tasks"
    assert (table2.paper["pse", "cifar100/15"].mean, table2.paper["fedrep", "cifar100/15"].mean) == (62.46, 58.94)
    # "all involved methods suffer from performance degradation when introducing distribution shift on inputs"
    for row, count in ((row, count) for row in table1.rows for count in (3, 4, 5)):
        shifted = table1.paper[row, f"fashion_gray_colour/{count}"].mean
        assert shifted < table2.paper[row, f"fashion_mnist/{count}"].mean
    # Typed again from the tables: first, middle and last columns.
    again = {"ditto": (85.23, 85.76, 84.13), "apfl": (82.85, 81.16, 79.22), "lgfedavg": (83.27, 79.23, 78.31)}
    for row, numbers in again.items():
        at = ("femnist_gray_colour/3", "fashion_gray_colour/4", "fashion_colour_edge/5")
        assert tuple(table1.paper[row, column].mean for column in at) == numbers
    again = {"l2gd": (83.76, 55.30, 82.84), "fedmtl": (83.19, 54.84, 82.86), "local": (79.65, 58.76, 85.75)}
    for row, numbers in again.items():
        at = ("cifar10/2", "cifar100/10", "fashion_mnist/5")
        assert tuple(table2.paper[row, column].mean for column in at) == numbers
    assert all(table3.paper["pse", c] == table1.paper["pse", c] for c in table3.columns)
    for reading in ("-200", "-difference"):
        assert table1.paper["ditto", f"fashion_gray_colour{reading}/4"].mean == 85.76
    assert all(ablations.paper["pse", c] == table2.paper["pse", c] for c in ablations.columns)


def test_tables_share_the_runs_they_have_in_common():
    table1, table2, table3, ablations = pse.tables()
    where = lambda table, row, column: table.cells([row], [column])[0].folder(Path("x"), 0)  # noqa: E731
    assert where(table3, "pse", "fashion_gray_colour/3") == where(table1, "pse", "fashion_gray_colour/3")
    assert where(ablations, "pse", "cifar10/2") == where(table2, "pse", "cifar10/2")
    places = [cell.folder(Path("x"), 0) for table in (table1, table2, table3, ablations) for cell in table.cells()]
    assert len(set(places)) == 231 + 99 + 20 + 27


def test_the_measure_is_the_last_trained_model(runs):
    for name, path in runs.items():
        result = RunFolder(path).result()
        ends = [r for r in table_of(path) if r["metric"] == "accuracy" and r["client"] is not None]
        look = {"fedavg+ft": "fine-tuned", "scaffold, before": None}.get(name, "personal after")
        values = [r["value"] for r in ends if r["model"] == look]
        assert pse.accuracy_of(result) == (pytest.approx(100 * sum(values) / 4, abs=1e-12) if look else None)


# ---- clients ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [1, 7, 10, 25])
def test_fairness_by_its_definitions(count):
    values = torch.rand(count, generator=generator(count), dtype=torch.float64).tolist()
    found, middle = fairness(values), sum(values) / count
    worst = sorted(values)[: max(1, count // 10)]
    assert found["mean"] == pytest.approx(middle, abs=1e-15)
    assert found["std"] == pytest.approx(math.sqrt(sum((v - middle) ** 2 for v in values) / count), abs=1e-15)
    assert found["worst_decile"] == pytest.approx(sum(worst) / len(worst), abs=1e-15)
    # Jain, Chiu & Hawe, 1984: one over (1 + squared coefficient of variation).
    assert found["jain"] == pytest.approx(1 / (1 + (found["std"] / middle) ** 2), abs=1e-14)


def test_fairness_at_its_ends():
    assert fairness([0.3] * 5)["jain"] == pytest.approx(1) and fairness([0.0] * 3)["jain"] == 1
    assert fairness([0.8, 0.0, 0.0, 0.0])["jain"] == pytest.approx(1 / 4)


@pytest.mark.parametrize("name", KINDS)
def test_a_clients_model_is_the_one_that_was_judged(runs, name):
    """Confusions on the diagonal are the accuracy in the run's own table, for every client, to the bit."""
    path = runs[name]
    opened = OpenedRun.open(path)
    expected = {"fedavg+ft": "fine-tuned", "scaffold, before": "personal before"}.get(name, "personal after")
    look, accuracies = client_evaluation(RunFolder(path))
    recorded = {r["client"]: r["value"] for r in table_of(path) if r["model"] == expected and r["client"] is not None}
    assert look == opened.evaluated_on == expected and accuracies == recorded and len(set(recorded.values())) > 1
    for client, accuracy in recorded.items():
        matrix = opened.confusion(client)
        test = opened.images.y[opened.federation.test[client]]
        assert matrix.sum(1).tolist() == torch.bincount(test, minlength=10).tolist()
        assert int(matrix.diagonal().sum()) / len(test) == accuracy


def test_confusions_by_a_loop(runs):
    opened = OpenedRun.open(runs["pse"])
    model, module = opened.model(1), opened.net.module
    found = opened.confusion(1)
    module.load_state_dict({**model.params})
    by_hand = torch.zeros(10, 10, dtype=torch.long)
    for at in opened.federation.test[1].tolist():
        x = opened.federation.data.prepare(opened.federation.data.x[at : at + 1], None)
        by_hand[opened.images.y[at], module(x).argmax()] += 1
    assert torch.equal(by_hand, found) and found.sum() > found.diagonal().sum()


@pytest.mark.parametrize("name", ["fedrep", "ditto"])
def test_training_loss_by_hand(runs, name):
    """Weights put together from the checkpoint's file and memories of who took part, one image after another."""
    opened = OpenedRun.open(runs[name])
    folder, module = opened.folder, opened.net.module
    found, first = opened.training_losses(), opened.net.initial_weights().clone().params
    assert list(found) == [1, 2, 3] == folder.rounds()
    for round in (1, 3):
        losses, memories = [], folder.client_memories(round)
        for client, memory in memories.items():
            index, weights = opened.federation.train[client], dict(first)
            if name == "fedrep":
                weights |= folder.at(round).state.model.params | memory.private.params
            else:
                weights |= memory.own.params
            module.load_state_dict(weights)
            x = opened.federation.data.prepare(opened.federation.data.x[index], None)
            logits = [module(one[None]).detach() for one in x]
            each = [F.cross_entropy(z, y[None]).item() for z, y in zip(logits, opened.images.y[index], strict=True)]
            losses.append(sum(each) / len(each))
        assert found[round] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert len(folder.client_memories(1)) < 4  # so that who has not taken part would be noticed


def test_training_loss_of_one_model_is_over_all_clients(run, tmp_path):
    opened = OpenedRun.open(run(tmp_path / "fedavg", "algorithm=fedavg", "rounds=2"))
    checkpoint, module, losses = opened.folder.at(2), opened.net.module, []
    assert not checkpoint.versions
    module.load_state_dict({**checkpoint.state.model.params})
    for index in opened.federation.train.values():
        x = opened.federation.data.prepare(opened.federation.data.x[index], None)
        losses.append(F.cross_entropy(module(x).detach(), opened.images.y[index]).item())
    assert opened.training_losses()[2] == pytest.approx(sum(losses) / 4, abs=1e-5)


def test_names_of_runs(runs, run, tmp_path):
    assert list(named([runs["fedavg+ft"], runs["pse"]])) == ["fedavg+ft", "pse"]
    other = run(tmp_path / "deep" / "other", "algorithm=pse", "rounds=1", "partition.classes=2")
    assert len(set(named([runs["pse"], other]))) == 2 and "pse" not in named([runs["pse"], other])
    with pytest.raises(BadInput, match="named twice"):
        named([runs["pse"], runs["pse"]])
    with pytest.raises(BadInput, match="another split"):
        same_split({"a": OpenedRun.open(runs["pse"]), "b": OpenedRun.open(other)})
    with pytest.raises(BadInput, match=r"client 7 does not exist: there are 4"):
        OpenedRun.open(other).model(7)
    with pytest.raises(BadInput, match=r"no checkpoint of an earlier round: run it with keep=1"):
        OpenedRun.open(other).training_losses()


def test_what_cannot_be_said(runs, run, tmp_path):
    silent = run(tmp_path / "silent", "algorithm=fedavg", "rounds=1", "evaluate.personal=none")
    with pytest.raises(BadInput, match=r"evaluate\.personal=both"):
        client_evaluation(RunFolder(silent))
    wild = run(tmp_path / "wild", "algorithm=fedavg", "rounds=1", "local.lr=1e30")
    with pytest.raises(BadInput, match="training diverged, and client 0 has no model"):
        OpenedRun.open(wild).model(0)
    opened = OpenedRun.open(runs["pse"])
    with pytest.raises(BadInput, match=r"--which 99999: client 2 has \d+ test images"):
        chosen(opened, 2, 4, [0, 99999])
    empty = replace(opened.federation, test={**opened.federation.test, 2: torch.empty(0, dtype=torch.long)})
    for ask in (lambda run: run.confusion(2), lambda run: chosen(run, 2, 4)):
        with pytest.raises(BadInput, match="client 2 has no test images"):
            ask(replace(opened, federation=empty))


def test_refusals_of_the_methods_themselves(run, tmp_path):
    with pytest.raises(BadInput, match=r"this one lacks maps, project, attend, embed, extractor: use model=pse_net"):
        run(tmp_path / "a", "algorithm=pse", "model=cnn2")
    with pytest.raises(BadInput, match=r"give local.epochs=2 or more"):
        run(tmp_path / "b", "algorithm=fedrep", "local.epochs=1")


# ---- pictures --------------------------------------------------------------------------------------------------------
def test_the_command(runs, tmp_path, capsys):
    def fedlens(*words):
        app([*map(str, words), "--json"], standalone_mode=False)
        return json.loads(capsys.readouterr().out)

    out = tmp_path / "seen"
    said = fedlens("clients", runs["fedavg+ft"], runs["pse"], "--confusion", "1", "--loss", "--out", out)
    assert [row["run"] for row in said["runs"]] == ["fedavg+ft", "pse"]
    for row in said["runs"]:
        end = [r for r in table_of(runs[row["run"]]) if r["model"] == row["model"] and r["client"] is None]
        recorded = {r["metric"].removeprefix("accuracy_"): r["value"] for r in end}
        assert all(row[key] == recorded[key] for key in ("mean", "std", "worst_decile")) and 0 < row["jain"] <= 1
    names = [Path(path).name for path in said["pictures"]]
    assert names == ["seen.png", "seen-confusion-1.png", "seen-loss.png"]
    assert all(Path(path).stat().st_size > 5_000 for path in said["pictures"])
    drawn = fedlens("explain", runs["fedavg+ft"], runs["pse"], "--clients", "3", "--which", "0,5", "--out", out)
    assert Path(drawn["picture"]).stat().st_size > 5_000
    one, newest = "one client's models and one method", "by their newest models: without --round and --weights"
    for words, said in (("--clients", "0,1"), one), (("--methods", "lrp,grad_cam"), one), (("--round", "1"), newest):
        with pytest.raises(BadInput, match=said):
            fedlens("explain", runs["fedavg+ft"], runs["pse"], *words)
    with pytest.raises(BadInput, match="--which is for several runs"):
        fedlens("explain", runs["pse"], "--which", "0")


def test_maps_are_of_the_models_that_were_judged(runs, tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr("fedlens.explain.runs.draw_maps", lambda pictures, columns, titles, path: seen.update(columns))
    explain_runs([runs["pse"], runs["fedavg+ft"]], tmp_path / "x", client=2, which=range(20))
    assert list(seen) == ["global\n(fedavg+ft)", "pse", "fedavg+ft"]  # PSE has no whole global model
    for name in ("pse", "fedavg+ft"):
        opened = OpenedRun.open(runs[name])
        index = opened.federation.test[2][:20]
        right = (opened.predictions(opened.model(2), index) == opened.images.y[index]).tolist()
        assert seen[name][2] == right and seen[name][0].shape == (20, 16, 16, 3)


def test_figures_run_what_is_missing_once(data, tmp_path, monkeypatch):
    monkeypatch.setattr(pse_figures, "TASKS", ("cifar10/2", "cifar10/4"))
    monkeypatch.setattr(pse_figures, "CONVERGENCE", ("cifar10/2", "fashion_mnist/4"))
    words = [*SMALL, data, "keep=1", "rounds=2", "local.epochs=2", "local.batch_size=32"]
    figures = {name: one for name, one in reproducible().items() if name.startswith("pse/figure")}
    assert list(figures) == [f"pse/figure{n}" for n in (1, 2, 3, 4)]
    drawn = {name: figure.draw(words, 3, tmp_path / name) for name, figure in figures.items()}
    pictures = [path for paths in drawn.values() for path in paths if path.suffix == ".png"]
    assert len(pictures) == 6 and all(path.stat().st_size > 5_000 for path in pictures)
    begun = []
    monkeypatch.setattr(simulate, "run", lambda *args, **named: begun.append(args))
    monkeypatch.setattr("fedlens.simulate.resume.resume", lambda *args, **named: begun.append(args))
    assert {name: figure.draw(words, 3, tmp_path / name) for name, figure in figures.items()} == drawn and not begun
    noted = json.loads((tmp_path / "pse" / "figure3.json").read_text())
    assert noted["paper"]["pse"]["std"] == 0.0501 and list(noted["training loss"]["cifar10/2"]) == ["1", "2"]
    folder = next((tmp_path / "pse" / "table2").glob("fedrep-fashion_mnist-4*/seed0"))
    assert noted["fairness"]["fedrep"] == fairness(list(client_evaluation(RunFolder(folder))[1].values()))
    bars = json.loads((tmp_path / "pse" / "figure2.json").read_text())["accuracy"]
    folder = next((tmp_path / "pse" / "ablations").glob("v2-cifar10-4*/seed0"))
    assert bars["cifar10/4"]["v2"] == pse.accuracy_of(RunFolder(folder).result())


def test_a_run_of_a_gpu_is_opened_on_a_cpu(runs, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    import shutil

    shutil.copytree(runs["pse"], tmp_path / "moved")
    text = (tmp_path / "moved" / "config.yaml").read_text()
    assert "device: cpu" in text and "precision: fp32" in text
    moved = text.replace("device: cpu", "device: cuda").replace("precision: fp32", "precision: bf16")
    (tmp_path / "moved" / "config.yaml").write_text(moved)
    opened = OpenedRun.open(tmp_path / "moved")
    assert (opened.experiment.execution.device, opened.experiment.execution.precision) == ("cpu", "fp32") and len(
        opened.model(0)
    ) == 2


def test_bars_say_where_their_axis_is_cut():
    for low, said in ((90.0, "accuracy, % (axis cut)"), (2.0, "accuracy, %")):
        figure, axis = pyplot().subplots()
        grouped_bars(axis, {"task": {"a": low, "b": 95.0, "c": None}}, "accuracy, %")
        assert axis.get_ylabel() == said and (axis.get_ylim()[0] == 0) == (low == 2)
        pyplot().close(figure)
