"""Clients and classes keep the names of their folders wherever people look; their numbers stay where programs do."""

import json
import os
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from typer.testing import CliRunner

from browser import Chromium, needs_chromium
from fedlens import config
from fedlens.algorithms import FineTuned
from fedlens.algorithms.fedftg import FedFTG
from fedlens.cli import main as cli
from fedlens.core.errors import BadInput
from fedlens.data.client_names import NUMBERS, Names, client_names
from fedlens.data.images import Images
from fedlens.data.partition.base import ByUser, Domains, Iid
from fedlens.data.sources.folders import ClientsFolder, Folder
from fedlens.data.sources.modalities import Modalities
from fedlens.data.split import Split
from fedlens.papers.fedsls import saliency
from fedlens.papers.fedsls.weights import explain_weights
from fedlens.report import client_figures as bars
from fedlens.report.page import gather, write
from fedlens.runs import figure as figures
from fedlens.runs.folder import RunFolder, passport
from fedlens.runs.opened import OpenedRun
from fedlens.runs.read import client_accuracies
from fedlens.simulate import run as simulate
from fedlens.simulate.describe import describe
from fedlens.ui import clients
from fedlens.ui.server import LiveServer

SITES = {"St Anna": 9, "University Hospital East": 12, "University Hospital West": 6, "north": 6}
SHORT = ["St Anna", "Universit…tal East", "Universit…tal West", "north"]
KINDS = ("benign", "nevus")
QUICK = ["model=cnn_small", "rounds=1", "local.steps=1", "engine=sequential", "device=cpu", "algorithm=fedsls"]
QUICK += ["algorithm.pretrain_epochs=1"]


def fill(root: Path, sites=SITES) -> Path:
    """A folder per site with folders of two classes; the first pixel of an image tells its site."""
    draw = np.random.default_rng(0)
    for number, (site, count) in enumerate(sites.items()):
        for kind in KINDS:
            (root / site / kind).mkdir(parents=True)
            for image in range(count):
                pixels = draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                pixels[0, 0] = number
                Image.fromarray(pixels).save(root / site / kind / f"{image}.png")
    return root


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory):
    """All in one folder, with a cache of its own."""
    place, before = tmp_path_factory.mktemp("names"), os.environ.get("FEDLENS_CACHE")
    os.environ["FEDLENS_CACHE"] = str(place / "cache")
    yield place
    os.environ.pop("FEDLENS_CACHE") if before is None else os.environ.update(FEDLENS_CACHE=before)


@pytest.fixture(scope="module")
def sites(here) -> Path:
    return fill(here / "sites")


@pytest.fixture(scope="module")
def finished(here, sites) -> RunFolder:
    words = ["data=clients_folder", f"data.path={sites}", *QUICK, f"out={here / 'run'}"]
    simulate.run(config.read(None, words))
    return RunFolder(here / "run")


@pytest.fixture
def nameless(finished, tmp_path) -> RunFolder:
    """The same run as it was written before names were kept."""
    folder = RunFolder(shutil.copytree(finished.path, tmp_path / "run"))
    card = folder.passport()
    del card["names"]
    folder.write_json("passport.json", card)
    return folder


def holders(images: Images, split: Split) -> list[list[str]]:
    """The sites whose images each client has, as their first pixels tell."""
    names = list(SITES)
    return [sorted({names[int(images.x[i, 0, 0, 0])] for i in shard}) for shard in split.train]


# ---- where names come from -------------------------------------------------------------------------------------------
def test_a_client_is_called_after_the_folder_it_has_its_images_from(sites):
    images = ClientsFolder(str(sites)).load()
    for _ in range(2):  # decoded, and from the decoded copy
        for count, seed in ((4, 0), (2, 0), (2, 1), (3, 5)):
            split = ByUser().split(images, count, seed)
            assert [[name] for name in client_names(images, split)] == holders(images, split)
        images = ClientsFolder(str(sites)).load()
    assert Names.of(images, split).classes == KINDS


def test_a_client_of_several_folders_is_called_after_all_of_them(sites):
    images = ClientsFolder(str(sites)).load()
    split = ByUser(more="merge").split(images, 2, 0)
    assert [sorted(name.split(" + ")) for name in client_names(images, split)] == holders(images, split)
    whole = ByUser(more="merge").split(images, 1, 0)
    assert client_names(images, whole) == ("St Anna + 3 more",)


def test_nobody_is_called_after_a_folder_that_was_parted(sites):
    images = ClientsFolder(str(sites)).load()
    assert client_names(images, Iid().split(images, 4, 0)) == ()
    first, second, *_ = ByUser().split(images, 4, 0).train
    shards = [np.concatenate([first, second[:1]]), second[1:]]
    assert client_names(images, Split(shards, shards)) == ()
    assert client_names(replace(images, users=None), ByUser().split(images, 4, 0)) == ()
    assert client_names(replace(images, owner_names=()), ByUser().split(images, 4, 0)) == ()


def test_domains_give_their_names_to_clients_of_their_own(sites):
    images = Folder(str(sites), domains=True).load()
    split = Domains().split(images, 4, 0)
    assert [[name] for name in client_names(images, split)] == holders(images, split)
    assert client_names(images, Domains().split(images, 8, 0)) == ()  # two clients each
    seen = Modalities(Folder(str(sites), domains=True), ("gray", "inverted")).load()
    assert client_names(seen, Domains().split(seen, 2, 0)) == ("gray", "inverted")
    twice = replace(seen, owner_names=("gray", "gray"))
    assert client_names(twice, Domains().split(twice, 2, 0)) == ()
    by_user = Modalities(ClientsFolder(str(sites)), ("gray", "inverted")).load()
    assert client_names(by_user, ByUser().split(by_user, 4, 0)) == tuple(SITES)


def test_a_folder_called_by_a_number_is_not_taken_for_a_client(tmp_path):
    images = ClientsFolder(str(fill(tmp_path, {"1": 4, "2": 4, "ten": 4}))).load()
    names = Names.of(images, ByUser().split(images, 3, 0))
    assert names.clients == ("user 1", "user 2", "ten")
    assert (names.number("1"), names.number("user 1"), names.client(0)) == (1, 0, "user 1 (client 0)")


def test_a_decoded_copy_from_before_has_no_names_and_is_still_read(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path / "cache"))
    source = ClientsFolder(str(fill(tmp_path / "sites", {"east": 3, "west": 3})))
    assert source.load().owner_names == ("east", "west")
    (header,) = (tmp_path / "cache").glob("*/header.json")
    header.write_text(json.dumps({k: v for k, v in json.loads(header.read_text()).items() if k != "owner_names"}))
    images = source.load()
    assert images.owner_names == () and client_names(images, ByUser().split(images, 2, 0)) == ()


# ---- what people read ------------------------------------------------------------------------------------------------
def test_words_for_clients_and_classes():
    names = Names(tuple(SITES), KINDS)
    assert [names.tick(client) for client in range(4)] == SHORT
    assert names.client(1) == "University Hospital East (client 1)" and names.title(1) == f"{SHORT[1]} (1)"
    assert names.title(3) == "north (3)" and names.label(1) == "nevus"
    assert (NUMBERS.client(3), NUMBERS.title(3), NUMBERS.tick(3), NUMBERS.label(3)) == (
        "client 3",
        "client 3",
        "3",
        "3",
    )
    assert names.client(4) == "client 4" and names.tick(4) == "4"  # a damaged list is no reason to stop


def test_a_client_may_be_asked_for_by_its_name():
    names = Names(tuple(SITES))
    assert [names.number(word) for word in ("north", "2", "St Anna")] == [3, 2, 0]
    for asked, word, sentence in (
        (names, "nort", "there is no client 'nort'; did you mean 'north'?"),
        (NUMBERS, "north", "there is no client 'north'; name clients by their numbers, counted from 0"),
        (Names(tuple(f"site {n}" for n in range(50))), "x", "there is no client 'x'; name clients by their numbers, "),
    ):
        with pytest.raises(BadInput, match=re.escape(sentence)):
            asked.number(word)


def test_a_run_keeps_the_names_and_its_tables_the_numbers(finished):
    assert finished.names() == Names(tuple(SITES), KINDS)
    listed = {row["client"] for row in pq.read_table(finished.path / "metrics.parquet").to_pylist()}
    assert listed == {None, 0, 1, 2, 3}


def test_a_damaged_list_of_names_is_one_sentence(nameless):
    for names in ([], {"clients": 3}):
        nameless.write_json("passport.json", {**nameless.passport(), "names": names})
        with pytest.raises(BadInput, match=r"passport\.json is damaged: names should hold two lists"):
            nameless.names()
    (nameless.path / "passport.json").unlink()
    assert nameless.names() == NUMBERS


def test_a_server_does_not_name_nodes_that_have_data_of_their_own(sites):
    experiment = config.read(None, ["data=clients_folder", f"data.path={sites}"])
    images = experiment.data.load()
    cards = [passport(experiment, images, ByUser(more="merge").split(images, n, 0)) for n in (1, 4)]
    assert [len(card["names"]["clients"]) for card in cards] == [0, 4]
    assert all(card["names"]["classes"] == KINDS for card in cards)


# ---- where people look -----------------------------------------------------------------------------------------------
def test_the_live_page_calls_clients_and_classes_by_their_names(finished, nameless):
    rows = clients.clients(finished.path, "number", 0)["rows"]
    assert [(row["client"], row["name"]) for row in rows] == [(n, f"{s} (client {n})") for n, s in enumerate(SITES)]
    counts = json.loads((finished.path / "label_counts.json").read_text())
    for row, own in zip(rows, counts, strict=True):
        assert dict(row["most"]) == dict(zip(KINDS, own, strict=True))
    card = clients.client(finished.path, 3)
    assert (card["client"], card["name"], card["classes"]) == (3, "north (client 3)", list(KINDS))
    before = clients.client(nameless.path, 3)
    assert (before["name"], before["classes"]) == ("client 3", ["0", "1"])
    assert {**card, "name": "", "classes": []} == {**before, "name": "", "classes": []}


def test_the_report_calls_clients_and_classes_by_their_names(finished, nameless):
    shown, before = (gather([folder.path]) for folder in (finished, nameless))
    (split,), (look, *_) = shown["splits"], shown["runs"][0]["evaluations"].values()
    called = [f"{site} (client {n})" for n, site in enumerate(SITES)]
    assert (split["names"], split["ticks"], split["classes"]) == (called, SHORT, list(KINDS))
    assert look["clients"] == [0, 1, 2, 3] and look["names"] == called
    assert "names" not in shown["runs"][0]["passport"]  # they are in the page once
    (split,), (look, *_) = before["splits"], before["runs"][0]["evaluations"].values()
    assert (split["ticks"], split["classes"], look["names"]) == (["0", "1", "2", "3"], ["0", "1"], None)
    assert before["runs"][0]["state"] == "complete"


@needs_chromium
def test_pages_show_the_names(finished, tmp_path):
    server = LiveServer(finished.path.parent, port=0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    write([finished.path], tmp_path / "report.html")
    with Chromium() as browser, server:
        with browser.open((tmp_path / "report.html").as_uri(), 1100, 900) as page:
            page.until("document.querySelectorAll('#split svg circle').length === 8")
            words = page.evaluate("[...document.querySelectorAll('#split svg text')].map((e) => e.textContent)")
            assert words == [*KINDS, *SHORT, "client", "class"]
            page.hover("#split svg circle")
            tip = page.evaluate("document.querySelector('#split .tip').innerText")
            assert "St Anna (client 0)" in tip and "class benign" in tip
            page.hover("#clients svg circle")
            assert "(client " in page.evaluate("document.querySelector('#clients .tip').innerText")
            assert page.errors == []
        with browser.open(server.address, 1100, 900) as page:
            page.until("document.querySelector('.runs a.name') !== null")
            page.click(".runs a.name")
            page.until("document.querySelectorAll('#clients tbody tr').length === 4")
            # Not by a mouse: pictures that still load move the page under it.
            page.evaluate("""document.querySelector("#clients [data-client='1']").click()""")
            page.until("document.querySelector('#client h3')?.textContent === 'University Hospital East (client 1)'")
            page.until("document.querySelectorAll('#client .mix rect').length === 2")
            words = page.evaluate("[...document.querySelectorAll('#client .mix text')].map((e) => e.textContent)")
            assert words[-4:] == [*KINDS, "images", "class"] and page.errors == []
        server.shutdown()


def ticks(axis: object) -> tuple[list[str], list[str]]:
    return tuple([label.get_text() for label in labels] for labels in (axis.get_xticklabels(), axis.get_yticklabels()))


def test_the_first_picture_has_names_on_its_axes(finished, nameless, monkeypatch):
    monkeypatch.setattr(figures, "save", lambda figure, path, **_: figure)
    split, _, own = figures.draw_run(finished, Path("run")).axes
    assert ticks(split) == (SHORT, list(KINDS))
    accuracy = client_accuracies(finished.metrics())["personal before"]
    assert ticks(own)[0] == [SHORT[client] for client in sorted(accuracy, key=lambda client: accuracy[client])]
    split, _, own = figures.draw_run(nameless, Path("run")).axes
    assert ticks(split)[1] == ["0", "1"] and sorted(ticks(own)[0]) == ["0", "1", "2", "3"]


def test_bars_of_clients_have_names_below_the_last_row(monkeypatch):
    monkeypatch.setattr(bars, "save", lambda figure, path: figure)
    by, fair = {0: 0.5, 1: 0.9, 2: 0.7, 3: 0.6}, dict.fromkeys(("mean", "std", "worst_decile", "jain"), 0.5)
    for names, words in ((Names(tuple(SITES)), [[], [SHORT[c] for c in (0, 3, 2, 1)]]), (NUMBERS, [[*"0321"]] * 2)):
        drawn = bars.accuracy_bars({"a": by, "b": by}, {"a": fair, "b": fair}, Path("bars"), names)
        drawn.canvas.draw()
        below = [[label.get_text() for label in axis.get_xticklabels() if label.get_visible()] for axis in drawn.axes]
        assert below == words


def test_pictures_of_explain_are_titled_by_names(finished, nameless, monkeypatch):
    experiment = config.read(finished.config).with_execution(device="cpu", precision="fp32")
    images = experiment.data.load()
    net, (federation, _) = experiment.network(images), experiment.federation(images)
    for folder, titles in ((finished, ["north (3)", f"{SHORT[1]} (1)"]), (nameless, ["client 3", "client 1"])):
        run = OpenedRun(folder, experiment, images, net, federation)
        assert list(run.models(clients=[3, 1])) == titles
        last = folder.rounds()[-1]
        (title,) = run.models(clients=[3], rounds=[last])  # one of its rounds weighs, and trains nothing
        assert title == f"{titles[0]}, round {last} ({last - 1} of training)"
    drawn = []
    monkeypatch.setattr("fedlens.papers.fedsls.weights.save", lambda figure, path, **_: drawn.append(figure) or path)
    monkeypatch.setattr(saliency, "save", lambda figure, path, **_: drawn.append(figure) or path)
    explain_weights(finished.path, clients=[3, 0], count=2)
    grid, chart = drawn
    assert [axis.get_title() for axis in grid.axes[:4]] == ["image", "at first", "north (3)", "St Anna (0)"]
    assert [axis.get_ylabel() for axis in grid.axes[::4]] == list(KINDS)
    sizes = [sum(own) for own in json.loads((finished.path / "label_counts.json").read_text())]
    assert ticks(chart.axes[0])[0] == [SHORT[c] for c in sorted(range(4), key=lambda client: -sizes[client])]
    assert ticks(chart.axes[2])[0] == ["at first", "north (3)", "St Anna (0)"]
    stored = json.loads((finished.figures / "explain-weights.json").read_text())
    assert set(stored["used"]) == {"0", "1", "2", "3"}


def test_commands_take_names_and_numbers(finished, sites, tmp_path, monkeypatch):
    def said(*words):
        answer = CliRunner().invoke(cli.app, [*map(str, words)])
        assert answer.exit_code == 0, answer.output
        return answer.output

    by_name, by_number = (
        said("clients", finished.path, "--confusion", word, "--out", tmp_path / "c") for word in ("north", "3")
    )
    assert by_name == by_number and "c-confusion-3.png" in by_name and "University Hospital East" in by_name
    drawn = said(
        "explain", finished.path, "--clients", "north, 1", "--methods", "gradient", "--out", tmp_path / "e.png"
    )
    assert (tmp_path / "e.png").exists() and "e.png" in drawn
    monkeypatch.setattr("fedlens.report.split_figure.draw_split", lambda images, split, path: [path])
    words = ["data", "show", "data=clients_folder", f"data.path={sites}", "--out", tmp_path / "s.png"]
    table = [line.split("  ")[0] for line in said(*words).splitlines() if line[:1].isdigit()]
    assert table == [f"{number} {name}" for number, name in enumerate(SITES)]
    assert json.loads(said(*words, "--json"))["names"] == {"clients": list(SITES), "classes": list(KINDS)}


# ---- what a saved split says -----------------------------------------------------------------------------------------
def test_a_saved_split_does_not_say_what_was_read(finished, sites):
    """Or a run with other data on the same split would say both."""
    stored = json.loads((finished.path / "split.json").read_text())
    read = "66 images, 2 classes (benign, nevus), 32 x 32"
    assert stored["notes"] == [] and finished.passport()["split_notes"] == [read]
    assert stored["hash"] == finished.passport()["split_hash"]
    words = [
        "data=clients_folder",
        f"data.path={sites}",
        "data.size=16",
        "clients=4",
        f"partition={finished.path}/split.json",
    ]
    other = config.read(None, words)
    images = other.data.load()
    _, split = other.federation(images)
    assert split.notes == ("66 images, 2 classes (benign, nevus), 32 x 32 made 16 x 16 (data.size)",)
    assert split.hash == stored["hash"] and client_names(images, split) == tuple(SITES)


def test_what_a_partition_said_is_saved(sites, tmp_path):
    words = ["data=clients_folder", f"data.path={sites}", "clients=2", "partition.more=sample"]
    experiment = config.read(None, words)
    _, split = experiment.federation(experiment.data.load())
    split.save(tmp_path / "split.json")
    read, drawn = split.notes
    assert drawn.startswith("2 of 4 users were drawn") and read.startswith("66 images")
    assert Split.load(tmp_path / "split.json").notes == (drawn,)


# ---- describe --------------------------------------------------------------------------------------------------------
def test_describe_does_not_wait_for_training_at_the_server(monkeypatch):
    """The leaves are those of a server that trains for long; this one makes images once, two at a time."""
    lessons = []
    lesson = FedFTG.lesson
    monkeypatch.setattr(FedFTG, "lesson", lambda *words: lessons.append(words[-1]) or lesson(*words))
    algorithm = FedFTG(iterations=3, batch=4, student_steps=2, width=8)
    experiment = config.check(config.read(None, ["model=mlp"]))
    none = describe(replace(experiment, algorithm=FineTuned(replace(algorithm, iterations=0))), 10, 1, 8)
    assert not lessons and not any(leaf.name.startswith("generator") for leaf in none)
    found = describe(replace(experiment, algorithm=FineTuned(algorithm)), 10, 1, 8)
    assert [len(labels) for labels in lessons] == [2]
    monkeypatch.setattr(FedFTG, "brief", lambda algorithm: algorithm)
    assert describe(replace(experiment, algorithm=FineTuned(algorithm)), 10, 1, 8) == found
    assert [len(labels) for labels in lessons] == [2, 4, 4, 4]
    assert any(leaf.where == "state" and leaf.name.startswith("generator") for leaf in found)
