"""`fedlens data`, `bench` and `explain`, as a person calls them."""

import json
import os
import re

import pytest

from fedlens.cli.data import _print_counts
from fedlens.cli.main import app
from fedlens.data import Names
from fedlens.data.show import source_named
from fedlens.runs.folder import RunFolder
from fedlens.runs.read import bytes_until, curve


@pytest.fixture(scope="module")
def fedlens(everyone):
    def call(*words, cwd, code=0):
        ended = everyone(*words, cwd=cwd)
        assert ended.code == code, ended.err
        return ended.out if code == 0 else ended.err

    return call


@pytest.fixture(scope="module")
def finished(fedlens, tmp_path_factory):
    place = tmp_path_factory.mktemp("finished")
    small = ["clients=4", "cohort=2", "model=cnn2", "rounds=1", "evaluate.personal=none", "engine=sequential"]
    fedlens("run", *small, "local.steps=2", "picture=false", "out=run", cwd=place)
    return place


def test_data_list_and_check(fedlens, tmp_path):
    rows = json.loads(fedlens("data", "list", "--json", cwd=tmp_path))
    names = {row["name"] for row in rows}
    assert {"mnist5k", "cifar10", "femnist", "celeba", "dirichlet", "shards"} <= names
    row = json.loads(fedlens("data", "get", "mnist5k", "--json", cwd=tmp_path))
    assert (row["train"], row["test"], row["classes"], row["size"]) == (4000, 1000, 10, "1x28x28")
    checked = json.loads(fedlens("data", "check", "mnist5k", "--json", cwd=tmp_path))
    assert checked[-1]["state"] == "ok" and checked[-1]["checksum"] == source_named("mnist5k").load().checksum
    assert "did you mean 'cifar10'" in fedlens("data", "get", "cifar-10", cwd=tmp_path, code=2)


def test_data_show_draws_the_split(fedlens, tmp_path):
    words = ["clients=6", "partition.alpha=0.1", "--out", "picture.png", "--json"]
    row = json.loads(fedlens("data", "show", *words, cwd=tmp_path))
    assert (tmp_path / "picture.png").stat().st_size > 10_000 and (tmp_path / "picture.svg").exists()
    assert len(row["hash"]) == 64 and 0 < row["skew"]["size_gini"] < 1
    assert len(row["counts"]) == 6 and sum(map(sum, row["counts"])) == 4000
    table = [line.split() for line in fedlens("data", "show", *words[:-1], cwd=tmp_path).splitlines()]
    for number, own in enumerate(row["counts"]):  # by class
        assert [str(number), str(sum(own)), *map(str, own)] in table
    assert ["all", "4000", *["400"] * 10] in table


def test_counts_of_many_classes_and_clients_fit_a_screen(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _print_counts([[number, 0, 7, *[1] * 40] for number in range(21)], Names())
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80 and "the first 20 of 21 clients; --json has all" in said
    assert ["9", "56", "42", "0", "(9),", "2", "(7),", "3", "(1)"] in [line.split() for line in said.splitlines()]


def test_explain_a_run_and_its_clients(fedlens, finished):
    words = ["--images", "2", "--methods", "lrp,guided_backprop"]
    told, place, legend = fedlens("explain", "run", *words, cwd=finished).splitlines()
    assert (
        "right on" in told
        and "of these 2 images" in told
        and place == os.path.join("run", "figures", "explain.png")
        and "red speaks for the true class" in legend
    )
    picture = json.loads(fedlens("explain", "run", *words, "--clients", "0,3", "--json", cwd=finished))["picture"]
    assert (finished / picture).stat().st_size > 5_000
    assert "lrp" in fedlens("explain", "run", "--methods", "lpr", cwd=finished, code=2)
    assert "client 9 does not exist" in fedlens("explain", "run", "--clients", "9", cwd=finished, code=2)
    assert "there is no run nothing" in fedlens("explain", "nothing", cwd=finished, code=2)


def test_curve_and_bytes_of_a_run(finished):
    run = RunFolder(finished / "run")
    rounds, accuracies = curve(run)
    assert rounds == [1] and 0 <= accuracies[0] <= 1
    assert bytes_until(run, rounds) == [run.result()["bytes_up"] + run.result()["bytes_down"]]


def test_explain_a_model_without_a_run(fedlens, tmp_path):
    words = ["model=cnn2", "--images", "2", "--methods", "gradient", "--out", "look.svg"]
    _, place, legend = fedlens("explain", *words, cwd=tmp_path).splitlines()
    assert place == "look.svg" and (tmp_path / place).exists() and "red speaks for the class asked about" in legend


def test_bench_gives_a_row_for_each_engine(fedlens, tmp_path):
    found = json.loads(fedlens("bench", "--small", "--repeats", "1", "--out", "bars.png", "--json", cwd=tmp_path))
    engines = {row["engine"]: row for row in found["rows"]}
    assert {"sequential", "central"} <= engines.keys() and all(r["images_per_second"] > 0 for r in engines.values())
    assert engines["sequential"]["over_sequential"] == 1 and (tmp_path / "bars.png").exists()


def test_it_says_its_version(fedlens, tmp_path):
    from fedlens import __version__

    assert fedlens("--version", cwd=tmp_path) == f"fedlens {__version__}\n"


# ---- clients ---------------------------------------------------------------------------------------------------------
def test_clients_are_listed_in_percent_the_worst_first(fedlens, tmp_path):
    small = ["clients=22", "cohort=2", "model=cnn2", "rounds=1", "local.steps=2", "evaluate.personal=before"]
    fedlens("run", *small, "engine=sequential", "picture=false", "out=run", cwd=tmp_path)
    rows = RunFolder(tmp_path / "run").metrics().to_pylist()
    found = {r["client"]: r["value"] for r in rows if r["client"] is not None and r["metric"] == "accuracy"}
    said = fedlens("clients", "run", cwd=tmp_path)
    listed = re.findall(r"^ *(\d+) +(\d+\.\d\d) *$", said, re.MULTILINE)
    worst = sorted(found, key=lambda client: (found[client], client))[:20]
    assert [(int(client), value) for client, value in listed] == [(c, f"{100 * found[c]:.2f}") for c in worst]
    assert f"{100 * sum(found.values()) / 22:.2f}" in said and "and 2 more" in said
    whole = json.loads(fedlens("clients", "run", "--json", cwd=tmp_path))
    (accuracies,) = whole["accuracies"].values()
    assert {int(client): value for client, value in accuracies.items()} == found


@pytest.mark.parametrize(
    ("words", "promise"),
    [
        ([], ""),
        (["uplink=dp"], r"privacy, as simulated: epsilon \d+\.\d+ at delta 1e-05 of a client, with all of its data \("),
        (
            ["algorithm=fedxds/paper", "algorithm.warmup_rounds=1", "algorithm.warmup_epochs=1"],
            "privacy, as simulated: epsilon 20 at delta 1e-05 of one image, which does not hold: the mask depends on",
        ),
    ],
)
def test_a_run_ends_with_what_was_promised_about_what_left(words, promise, tmp_path, capsys):
    few = ["model=cnn2", "clients=4", "cohort=2", "rounds=1", "local.steps=1", "picture=false", "engine=sequential"]
    app(["run", *few, *words, f"out={tmp_path / 'run'}"], standalone_mode=False)
    said = capsys.readouterr().out
    assert (re.search(promise, said) is not None) if promise else ("privacy" not in said)
