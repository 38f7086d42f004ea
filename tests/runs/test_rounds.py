"""Rounds of warm-up, weighing, exchange and fine-tuning are counted nowhere: one place decides, and all ask it."""

import io
import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from fedlens import config
from fedlens.cli import analyse as commands
from fedlens.cli.run import _closing
from fedlens.compare import figure as comparison_figure
from fedlens.compare.board import LiveBoard
from fedlens.compare.measured import measured
from fedlens.compare.table import _row
from fedlens.core.errors import BadInput
from fedlens.devices.clock import Seconds
from fedlens.flower import launch
from fedlens.papers.fedsls import weights as saliency_weights
from fedlens.papers.fedxds.tables import rounds_to_target
from fedlens.papers.spatl import figures as spatl_figures
from fedlens.papers.spatl import tables as spatl_tables
from fedlens.papers.table import PaperTable
from fedlens.report.collect import collect
from fedlens.report.groups import grouped
from fedlens.report.ranking import rank
from fedlens.report.summary_text import told
from fedlens.report.thumbnails import Pictures
from fedlens.runs import figure as run_figure
from fedlens.runs import trackers
from fedlens.runs.folder import RunFolder
from fedlens.runs.grid import Column, Grid, Row
from fedlens.runs.opened import OpenedRun
from fedlens.runs.read import Result, StoredRun, curve, points, rounds_of
from fedlens.runs.reuse import _before_the_end
from fedlens.runs.rounds import Rounds
from fedlens.simulate import run as simulate
from fedlens.simulate.progress import LivePanel
from fedlens.simulate.recorder import Evaluations
from fedlens.simulate.timing import Timing
from fedlens.ui import clients as client_pages
from fedlens.ui.follow import Followed

# Labels are counted (1), warm-up (2, 3), exchange (4), labels again (5), training (6 to 8), fine-tuning (9).
ALL_KINDS = (
    *("algorithm=finetune", "algorithm.epochs=1", "algorithm.base=fedxds", "algorithm.base.base=feddisco"),
    *(
        "algorithm.base.base.target=global",
        "algorithm.base.warmup_rounds=2",
        "algorithm.base.warmup_epochs=1",
        "rounds=3",
    ),
)
SMALL = (
    "model=mlp",
    "model.hidden=8",
    "clients=3",
    "cohort=2",
    "local.steps=2",
    "local.lr=0.05",
    "engine=sequential",
    "picture=false",
)
EVERY = ("evaluate.personal=before", "evaluate.personal_every=1", "evaluate.targets=0.01", "keep=1")
EVERY += ("evaluate.last=10",)  # more than there are: the mean is over all that count, and no other
COUNTED = [1, 2, 3]


class Told:
    """A tracker, a panel and a line of a board that hear of the same run."""

    steps: list[int] = []  # noqa: RUF012

    def __init__(self, *told):
        pass

    def log(self, values, round):
        self.steps.append(round)

    def close(self):
        pass


class Both:
    def __init__(self):
        self.panel, self.board = LivePanel(Console(file=io.StringIO())), LiveBoard(Console(file=io.StringIO()))
        self.board.expect({"it": 9}, there=0)
        self.line = self.board.watch("it")
        self.notes = []

    def begin(self, experiment, folder, notes, round, rounds):
        self.notes += notes

    def clients(self, answered, asked):
        pass

    def round(self, progress):
        self.panel.round(progress)
        self.line.round(progress)

    def note(self, text):
        self.notes.append(text)

    def phase(self, name, done, total):
        pass


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Where it lies, and who watched it."""
    out, watcher = tmp_path_factory.mktemp("rounds") / "run", Both()
    Told.steps.clear()  # a process whose tests were given away and back makes the run again
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(trackers.TRACKERS, "tensorboard", Told)
        patch.setattr(trackers, "check", lambda experiment: None)
        patch.setattr(simulate, "check_trackers", lambda experiment: None)
        words = [*ALL_KINDS, *SMALL, *EVERY, "track=tensorboard", f"out={out}"]
        simulate.run(config.read(None, words), watcher=watcher)
    return SimpleNamespace(out=out, folder=RunFolder(out), watcher=watcher, stored=StoredRun.read(out))


# ---- who counts rounds: each of these asks one of them ---------------------------------------------------------------
def the_summary(run, patch):
    result = run.folder.result()
    seen = points(run.folder.metrics())["global"]
    mean = sum(seen[round][0] for round in (6, 7, 8)) / 3
    assert result["accuracy_last"] == pytest.approx(mean) and result["accuracy_best"] <= 1
    assert result["last_rounds"] == COUNTED
    assert result["rounds"] == 9  # checkpoints and tables have these numbers
    assert rounds_to_target(result) in COUNTED and spatl_tables.megabytes_of(result) == pytest.approx(
        (result["bytes_up"] + result["bytes_down"]) / 30e6
    )
    yield result["training_rounds"]


def what_is_printed(run, patch):
    said = []
    patch.setattr("builtins.print", lambda text, **_: said.append(text))
    _closing(Result(**run.folder.result()), json=False)
    assert "after 3 rounds)" in said[0]


def the_curve_of_a_run(run, patch):
    yield curve(run.folder)[0]


def all_curves_of_a_run(run, patch):
    curves = run.stored.curves()
    assert curves["fine-tuned"]["round"] == [3]
    sent = run.stored.traffic()
    before = sum(sum(parts.values()) for kind, parts in sent.items() if not kind.startswith("evaluation"))
    assert 0.3 * before < curves["global"]["bytes"][0] < before  # what preparation cost is not forgotten
    yield from (curves[model]["round"] for model in ("global", "personal before"))
    yield run.stored.rounds
    yield run.stored.planned


def the_picture_of_a_run(run, patch):
    patch.setattr(run_figure, "save", lambda figure, path, **_: figure)
    yield run_figure.draw_run(run.folder, Path()).axes[1].lines[0].get_xdata().tolist()


def a_comparison(run, patch):
    compared = measured("", "it", 0, run.out)
    assert (
        compared.last_rounds == COUNTED
        and compared.last == 3
        and compared.global_last == run.folder.result()["accuracy_last"]
    )
    patch.setattr(comparison_figure, "save", lambda figure, path: figure)
    yield comparison_figure.draw([compared], Path()).axes[0].lines[0].get_xdata().tolist()
    yield compared.rounds
    yield _row([compared], "global", "accuracy")["rounds"]


def a_report(run, patch):
    found = collect(run.out, "it", Pictures(run.out))
    (group,) = groups = grouped([found])
    rank(groups, [found], [[0]])
    assert "in 3 rounds" in told([found], groups, [[0]])["headline"]
    yield from (found["rounds"], found["planned"], group["rounds"]["mean"], group["curves"]["global"]["round"])


def the_live_page(run, patch):
    page = Followed(run.out, "it")
    page.refresh()
    best = max(page.curves(0, 0)["curves"]["fine-tuned"]["accuracy"])
    assert len(page.row["spark"]) == 3 and round(page.row["best"], 5) == best  # as curves are sent
    assert (page.row["done"], page.row["all"], page.row["preparation"]) == (9, 9, 5)
    news = page.curves(7, page.generation)
    assert news["curves"]["global"]["round"] == [3] and news["after"] == 2
    yield from (page.row["round"], page.row["rounds"], page.curves(0, 0)["curves"]["global"]["round"])


def the_live_page_of_rounds_that_are_in_no_table_yet(run, patch):
    copy = Path(shutil.copytree(run.out, run.out.parent / "live"))
    shutil.rmtree(copy / "metrics.parquet")
    (copy / "result.json").unlink()
    page = Followed(copy, "live")
    page.refresh()
    yield page.curves(0, 0)["curves"]["global"]["round"]
    lines = (copy / "log.txt").read_text().splitlines(keepends=True)
    (copy / "log.txt").write_text("".join(line for line in lines if line.startswith(("round 1/", "round 2/"))))
    page = Followed(copy, "live")
    page.refresh()
    assert page.row["round"] == 0 and page.row["trouble"].endswith(
        "in its preparation: killed, or the machine went down"
    )
    shutil.rmtree(copy)


def the_live_pages_words(run, patch):
    if (node := shutil.which("node")) is None:
        pytest.skip("there is no node here")
    source = (Path(client_pages.__file__).parent / "assets" / "list.js").read_text().splitlines()
    wanted = [line for line in source if line.startswith(("const preparing =", "const progress ="))]
    rows = [dict(done=d, all=9, round=r, rounds=3, preparation=5) for d, r in ((2, 0), (6, 1), (9, 3))]
    script = "\n".join([*wanted, f"console.log(JSON.stringify({json.dumps(rows)}.map(progress)))"])
    said = subprocess.run([node, "-e", script], capture_output=True, text=True, check=True).stdout
    assert json.loads(said) == ["preparing, 2 / 5", "1 / 3", "3"]


def the_live_page_of_a_client(run, patch):
    assert client_pages.clients(run.out, "number", 0)["round"] == 3
    found = [client_pages.client(run.out, number) for number in range(3)]
    assert sum(each["took_part"] for each in found) == 6 and max(each["last_part"] for each in found) == 3
    yield found[0]["curves"]["personal before"]["round"]


def trackers_and_panels(run, patch):
    assert Told.steps == [*COUNTED, 3]  # and what clients got
    assert len(run.watcher.panel.curve) == len(run.watcher.line.line.curve) == 3
    assert "rounds 1 to 5 prepare training, and are counted in no curve, mean or target" in run.watcher.notes


def training_losses_and_models_over_rounds(run, patch):
    opened = OpenedRun.open(run.out, device="cpu")
    assert [*opened.models(rounds=[8])] == ["round 8 (3 of training)"]
    patch.setattr(saliency_weights, "saliency_maps", lambda net, model, x, y: x)
    patch.setattr(saliency_weights, "coloured", lambda maps: maps)
    patch.setattr(saliency_weights, "copies", lambda *_: {})
    maps, _, _ = saliency_weights._looked(run.folder, opened.experiment, [0], 2)
    shown = ["at first", *(f"round {at} ({at - 5} of training)" for at in (6, 7, 8))]
    assert [*maps["the global model over rounds"]] == shown
    yield [*opened.training_losses()]


def time_on_devices(run, patch):
    said = []
    patch.setattr(commands, "say_json", said.append)
    whole = Timing(
        dict.fromkeys(range(1, 10), 1.0), dict.fromkeys(range(1, 10), Seconds(*[0.0] * len(Seconds._fields)))
    )
    patch.setattr("fedlens.simulate.timing.timing", lambda path, devices: whole)
    commands.time_on_devices([str(run.out)], devices="phone", targets="0.01", json=True)
    at = rounds_to_target(run.folder.result())
    assert said[0]["runs"][0]["seconds to 0.01"] == 5 + at  # preparation takes its time, too
    yield said[0]["runs"][0]["rounds"]


def a_papers_figure(run, patch):
    assert spatl_tables.bytes_to(run.folder, 0.0)["round"] == 1
    yield spatl_figures.curve(run.folder)["round"]


def a_papers_table(run, patch):
    grid = Grid("it", "", {"it": Row(())}, {"": Column(())}, (*ALL_KINDS, *SMALL))
    copy = Path(shutil.copytree(run.out, run.out.parent / "tables" / "it" / "it" / "seed0"))
    (copy / "result.json").unlink()
    table = PaperTable(grid, run.out.parent / "tables", "it", grid.cells()).read()
    assert [*table.begun.values()] == ["3 of 3 rounds are saved"]


def a_deployments_status(run, patch):
    patch.setattr(launch, "experiment_of", lambda folder: config.read(RunFolder.open(run.out).config))
    patch.setattr(launch, "flower_runs", lambda environment: [])
    patch.setattr(launch, "server_environment", lambda folder: {})
    yield launch.status(run.out.parent)["run"]["rounds"]


CONSUMERS = (
    *(the_summary, what_is_printed, the_curve_of_a_run, all_curves_of_a_run, the_picture_of_a_run, a_comparison),
    *(a_report, the_live_page, the_live_page_of_rounds_that_are_in_no_table_yet, the_live_pages_words),
    *(the_live_page_of_a_client, trackers_and_panels, training_losses_and_models_over_rounds, time_on_devices),
    *(a_papers_figure, a_papers_table, a_deployments_status),
)


@pytest.mark.parametrize("consumer", CONSUMERS, ids=lambda consumer: consumer.__name__)
def test_only_rounds_of_training_are_counted(run, monkeypatch, consumer):
    for found in consumer(run, monkeypatch) or ():
        assert found == (COUNTED if isinstance(found, list) else 3)


# ---- the place that decides ------------------------------------------------------------------------------------------
def counts(*words):
    return Rounds.of(config.read(None, [*words]).timetable())


def test_which_rounds_count():
    assert counts("rounds=4").plain() == {"all": 4, "training": [[1, 4]]}
    assert counts("rounds=4", "algorithm=fedavg+ft").plain() == {"all": 5, "training": [[1, 4]]}
    often = counts("rounds=5", "algorithm=fedsls", "algorithm.recompute_every=2")
    assert often.spans == ((2, 3), (5, 6), (8, 8)) and often.total == 5 and often.preparation == 1
    assert [often.trained(round) for round in range(10)] == [0, 0, 1, 2, 2, 3, 4, 4, 5, 6]
    kept = counts("rounds=2", "algorithm=fedxds", "algorithm.warmup_rounds=1", "algorithm.continue_from_warmup=true")
    assert kept.spans == ((1, 1), (3, 4))  # its warm-up trained the model that is evaluated
    assert often.counted({1: "a", 3: "b", 4: "c", 5: "d"}) == {2: (3, "b"), 3: (5, "d")}
    assert Rounds((), 3).trained(3) == Rounds((), 3).total == 0


def test_the_run_says_which_and_a_run_from_before_is_asked(run, tmp_path):
    whole = {"all": 9, "training": [[6, 8]]}
    assert run.folder.passport()["rounds"] == whole
    copy = RunFolder(shutil.copytree(run.out, tmp_path / "copy"))
    card = {key: value for key, value in copy.passport().items() if key != "rounds"}
    copy.write_json("passport.json", card)
    assert rounds_of(copy).plain() == whole
    copy.config.write_text(copy.config.read_text().replace("is: finetune", "is: nowhere:Mine"))
    assert rounds_of(copy).spans == ((1, 3),)  # nobody's code is imported to find that out
    spans = ([[0, 3]], [[3, 2]], [[1, "2"]], [1], 7, [[1, 2, 3]], [[8, 10]])
    for damaged in (*({"all": 9, "training": each} for each in spans), {"all": 9}, [], 3):
        copy.write_json("passport.json", {**card, "rounds": damaged})
        with pytest.raises(BadInput, match="rounds should say which of them train"):
            rounds_of(copy)


def test_evaluations_are_due_by_rounds_of_training():
    """One round of weighing must not move all evaluations of a method by one."""
    words = ("rounds=7", "algorithm=fedsls+ft", "evaluate.every=3", "evaluate.closing=2", "evaluate.personal_every=2")
    experiment = config.read(None, [*words])  # round 1 weighs, 9 fine-tunes
    seen = Evaluations(experiment, None, None, "accuracy", None, None)
    seen._of_global = lambda server, job: server.round
    due = []
    for round in range(1, 10):
        seen.newest = None
        assert not list(seen.of_global(SimpleNamespace(round=round), None))
        due += [seen.newest] if seen.newest else []
    assert due == [4, 7, 8, 9]
    assert [round for round in range(1, 10) if seen._is_due(round, 2)] == [3, 5, 7, 9]
    assert _before_the_end(experiment) == 6
    assert _before_the_end(config.read(None, ["rounds=7", "algorithm=fedsls+ft"])) == 8
