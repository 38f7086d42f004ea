"""Comparisons: numbers are those of the runs' tables, tests are scipy's, nothing is run twice or mixed silently."""

import csv
import io
import itertools
import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.dataset
import pytest

from fedlens import config
from fedlens.algorithms import ALGORITHMS
from fedlens.cli.format import print_rows
from fedlens.cli.main import app
from fedlens.compare import board as board_module
from fedlens.compare import figure
from fedlens.compare.board import Board, LiveBoard
from fedlens.compare.measured import Compared
from fedlens.compare.run import asked, compare, compare_existing, pictures
from fedlens.compare.significance import holm, paired_t, two_sided, wilcoxon
from fedlens.compare.table import Comparison
from fedlens.core.errors import BadInput
from fedlens.runs.diff import differences
from fedlens.runs.folder import RunFolder
from fedlens.runs.grid import stored
from fedlens.simulate import recorder
from fedlens.simulate import run as simulate

SMALL = (
    "model=cnn2",
    "clients=6",
    "cohort=3",
    "rounds=2",
    "local.steps=2",
    "evaluate.last=2",
    "local.lr=0.1",
    "engine=sequential",
)
WORDS = ("fedavg", "fedper", "fedprox", "fedprox.mu=0.1,1", *SMALL)
SETTINGS = "model=cnn2 rounds=2 clients=6 cohort=3 local.steps=2 local.lr=0.1"  # as it is said at the start
METHODS = ["fedavg", "fedper", "fedprox,mu=0.1", "fedprox,mu=1"]


def silent():
    return Board(io.StringIO())


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Four rows x two settings x three seeds, side by side in two processes."""
    out = tmp_path_factory.mktemp("compared")
    return out, compare(asked([*WORDS, "partition.alpha=0.1,5"]), [0, 1, 2], out, silent(), processes=2)


def tables(run):
    """metrics and bytes, read without our code."""
    return [
        pyarrow.dataset.dataset(Path(run) / f"{name}.parquet").to_table().to_pandas() for name in ("metrics", "bytes")
    ]


# ---- significance ----------------------------------------------------------------------------------------------------
def test_students_distribution_is_scipys():
    stats = pytest.importorskip("scipy.stats", reason="scipy is the oracle")
    for freedom, t in itertools.product([*range(1, 12), 29, 100], (0.0, 0.2, -1.3, 2.6, 9.0)):
        assert two_sided(t, freedom) == pytest.approx(2 * stats.t.sf(abs(t), freedom), abs=1e-13)


def test_paired_tests_are_scipys():
    stats = pytest.importorskip("scipy.stats", reason="scipy is the oracle")
    draw = np.random.default_rng(0)
    for count in (3, 4, 10, 45):
        a, b = draw.normal([[0.4], [0.0]], size=(2, count))
        assert paired_t(list(a - b)) == pytest.approx(stats.ttest_rel(a, b).pvalue, abs=1e-12)
        assert wilcoxon(a - b) == pytest.approx(stats.wilcoxon(a, b, method="exact").pvalue, abs=1e-12)
    tied = np.round(draw.normal(size=11) + 0.5)
    whole = stats.PermutationMethod(n_resamples=np.inf)
    assert wilcoxon(tied) == pytest.approx(stats.wilcoxon(tied[tied != 0], method=whole).pvalue, abs=1e-12)
    many = np.round(draw.normal(size=400) + 0.1, 1)
    assert wilcoxon(many) == pytest.approx(stats.wilcoxon(many, method="asymptotic").pvalue, abs=1e-12)


def test_tests_that_cannot_tell_say_nothing():
    assert paired_t([0.1, 0.2]) is None and paired_t([0.1] * 4) is None and wilcoxon([0.0, 0.0]) is None
    assert wilcoxon([5 / 6 - 3 / 4, 11 / 12 - 5 / 6, -0.5]) == wilcoxon([1.0, 1.0, -6.0])  # a tie but for the last bit


def test_holm_is_the_closed_test_of_bonferroni():
    values = [0.04, 0.001, 0.03, 0.2, 0.011]
    sets = [s for n in range(1, 6) for s in itertools.combinations(range(5), n)]
    closed = [max(min(1, len(s) * min(values[j] for j in s)) for s in sets if i in s) for i in range(5)]
    assert holm(values) == pytest.approx(closed, abs=1e-15) and holm([]) == []


# ---- numbers ---------------------------------------------------------------------------------------------------------
def test_numbers_are_those_of_the_runs_tables(done):
    stats = pytest.importorskip("scipy.stats", reason="scipy is the oracle")
    out, _ = done
    whole = json.loads((out / "compare.json").read_text())
    assert (
        whole["complete"] and whole["ranked_by"] == "personal" and list(whole["settings"]) == ["alpha=0.1", "alpha=5"]
    )
    for setting, rows in whole["settings"].items():
        found, clients = {}, {}
        for row in rows:
            values = []
            for seed in (0, 1, 2):
                metrics, sent = tables(out / f"{row['method']}-{setting}" / f"seed{seed}")
                own = metrics[metrics.client.notna() & (metrics.metric == "accuracy")]
                by = {model: part.groupby("client").value.last() for model, part in own.groupby("model")}
                looks = metrics[(metrics.model == "global") & (metrics.metric == "accuracy")].value
                method = sent[~sent.kind.str.startswith("evaluation")]
                up = method[method.kind == "upload"]
                spent = [int((part.payload + part.header).sum()) for part in (up, method)]
                after = by["personal after"]
                values.append(
                    [
                        after.mean(),
                        by["personal before"].mean(),
                        looks.mean() if len(looks) else np.nan,
                        looks.iloc[-1] if len(looks) else np.nan,
                        after.std(ddof=0),
                        after.min(),  # a tenth of six clients is one
                        spent[0],
                        spent[1] - spent[0],
                        metrics[metrics.metric == "seconds"].value.sum(),
                    ]
                )
                clients[row["method"], seed] = after
            found[row["method"]] = np.array(values)
            names = "personal_after personal_before global_last global_end clients_std clients_worst_decile"
            for column, name in enumerate([*names.split(), "bytes_up", "bytes_down", "seconds"]):
                expected = np.mean([value[column] for value in values])
                assert (row[name] is None and np.isnan(expected)) or row[name] == pytest.approx(expected, rel=1e-12)
            assert row["mean"] == row["personal_after"] and row["seeds"] == [0, 1, 2]
            assert row["std"] == pytest.approx(np.std([value[0] for value in values], ddof=1), rel=1e-12)
        assert [row["rank"] for row in rows] == [1, 2, 3, 4]
        assert [row["mean"] for row in rows] == sorted((row["mean"] for row in rows), reverse=True)
        best, others = rows[0]["method"], [row["method"] for row in rows[1:]]
        p = [stats.ttest_rel(found[best][:, 0], found[name][:, 0]).pvalue for name in others]
        assert [row["p_seeds"] for row in rows[1:]] == pytest.approx(holm(p), rel=1e-9) and rows[0]["p_seeds"] is None
        pairs = [np.concatenate([clients[best, s] - clients[name, s] for s in range(3)]) for name in others]
        assert [row["p_clients"] for row in rows[1:]] == pytest.approx(holm([wilcoxon(d) for d in pairs]), rel=1e-12)
        assert next(row for row in rows if row["method"] == "fedper")["global_last"] is None


def test_all_methods_have_the_same_split_and_seeds_have_others(done):
    _, found = done
    splits = {}
    for run in found.runs:
        splits.setdefault((run.setting, run.seed), set()).add(run.split)
    assert all(len(one) == 1 for one in splits.values()) and len(set.union(*splits.values())) == 6


def test_the_files_say_the_same(done):
    out, _ = done
    text, rows = (out / "compare.md").read_text(), list(csv.DictReader((out / "compare.csv").open()))
    assert len(rows) == 8
    for row in rows:
        mean, std = 100 * float(row["personal_after"]), 100 * float(row["personal_after_std"])
        assert f"{mean:.2f} ± {std:.2f}" in text
    assert "| fedper | – |" in text and "## alpha=0.1" in text and "Mean rank over settings" in text
    assert "each client's personal model on its own test images" in text


def test_side_by_side_gives_the_bits_of_one_after_another(done, tmp_path):
    out, _ = done
    what = asked(["fedavg", "fedper", *SMALL, "partition.alpha=5,"])
    compare(what, [1], tmp_path, silent(), processes=1)
    for method in ("fedavg", "fedper"):
        [run] = tmp_path.glob(f"{method}*/seed1")
        assert not list(differences(out / f"{method}-alpha=5" / "seed1", run))


def test_pictures_and_the_panel(done, tmp_path):
    from rich.console import Console

    _, found = done
    drawn = pictures(found, tmp_path)
    assert [path.name for path in drawn] == ["curves-alpha=0_1.png", "curves-alpha=5.png"]
    assert all(path.with_suffix(".svg").stat().st_size > 10_000 for path in drawn)
    console = Console(width=100, record=True, file=io.StringIO())
    board = LiveBoard(console)
    board.expect(dict.fromkeys("abc", 9), there=2)
    board.watch("a").end()
    board.watch("b").round(recorder.Progress(3, 9, 0.5, 1.0, 1, 1, 1.0))
    console.print(board.shown())
    text = console.export_text()
    assert "3 of 5 runs done, 2 to go" in text and "3/9" in text and "50.00 %" in text


def test_a_log_says_from_the_first_seconds_where_all_runs_are(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(board_module.time, "perf_counter", lambda: now[0])
    board = Board(io.StringIO())
    board.phase("checking", 0, 2)
    board.expect({"a": 4, "b": 4}, there=0)
    a, b = board.watch("a"), board.watch("b")
    b.phase("training at the server", 1, 3)
    for run in (a, b):
        run.begin(None, None, [], 0, 4)
    now[0] += 2
    a.clients(1, 1)  # half a round of eight
    now[0] += 11
    a.round(recorder.Progress(1, 4, 0.5, 1.0, 1, 1, 1.0))
    a.end()
    b.end("no memory")
    assert board.stream.getvalue().splitlines() == [
        "checking: 0 of 2",
        "[0 of 2] a: begins",
        "[0 of 2] b: begins",
        "[0 of 2] a: round 1 under way; b: training at the server: 1 of 3, about 30 s left",
        "[0 of 2] a: round 1/4; b: training at the server: 1 of 3, about 91 s left",
        "[1 of 2] a: done, accuracy 50.00 % (13 s)",
        "[2 of 2] b: failed: no memory (13 s)",
    ]


# ---- going on --------------------------------------------------------------------------------------------------------
def test_what_is_done_is_not_run_again_and_a_method_joins(done, tmp_path, monkeypatch):
    out, found = done
    shutil.copytree(out, tmp_path / "copy")
    monkeypatch.setattr(simulate, "run", lambda *args, **named: pytest.fail("nothing is missing"))
    words = [*WORDS, "partition.alpha=0.1,5"]
    again = compare(asked(words), [0, 1, 2], tmp_path / "copy", silent(), processes=1)
    assert [again.rows(s) for s in again.settings] == [found.rows(s) for s in found.settings]
    begun = []
    begin = lambda experiment, watcher: begun.append((experiment.seed, experiment.execution.out))  # noqa: E731
    monkeypatch.setattr(simulate, "run", begin)
    compare(asked([*words, "scaffold"]), [0], tmp_path / "copy", silent(), processes=1)
    assert [seed for seed, _ in begun] == [0, 0] and all("scaffold" in out for _, out in begun)


def test_a_killed_comparison_goes_on(nursery, tmp_path):
    out = tmp_path / "killed"
    words = ["fedavg", "scaffold", *SMALL, "rounds=4", "--seeds", "2", "--processes", "2", "--out", str(out)]
    nursery.begin("compare", *words, cwd=tmp_path)
    end = time.monotonic() + 60
    while not list(out.glob("*/seed*/result.json")) and time.monotonic() < end:
        time.sleep(0.02)
    nursery.kill()
    first = {path: path.stat().st_mtime_ns for path in out.glob("*/seed*/result.json")}
    assert 1 <= len(first) < 4
    said = nursery("compare", *words, cwd=tmp_path)
    assert said.code == 0, said.err
    assert f"{len(first)} of 4 runs are complete already" in said.out
    assert all(path.stat().st_mtime_ns == when for path, when in first.items())
    assert len(list(out.glob("*/seed*/result.json"))) == 4 and (out / "report.html").exists()
    alone = tmp_path / "alone"
    compare(asked(["fedavg", "scaffold", *SMALL, "rounds=4"]), [0, 1], alone, silent(), processes=1)
    for path in out.glob("*/seed*"):
        assert not list(differences(path, alone / path.relative_to(out)))


def test_a_method_that_fails_is_shown_and_the_others_go_on(tmp_path):
    for processes in (0, 1, 2):
        out = tmp_path / str(processes)
        found = compare(asked(["fedrep", "fedavg", "pse", *SMALL]), [0], out, silent(), processes)
        states = {run.method: run.state for run in found.runs}
        assert states == {"fedrep": "failed", "fedavg": "complete", "pse": "failed"} and not found.complete
        assert "- pse failed: " in (out / "compare.md").read_text()
        assert " pse.attention=self" in (out / "compare.md").read_text()


def test_what_cannot_run_is_found_out_before_anything_is_trained(tmp_path, monkeypatch):
    """By its server (pse), by its client (fedrep), by a bug of one's own."""
    (tmp_path / "faulty.py").write_text(
        "from fedlens.algorithms import FedAvg\n\n\n"
        "class Faulty(FedAvg):\n    def setup(self, server):\n        return server.nothing\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    began, told = [], []
    monkeypatch.setattr(simulate, "run", lambda experiment, watcher: began.append(experiment.execution.out))
    monkeypatch.setattr(Board, "say", lambda board, text: told.append((len(began), text)))
    words = ["fedavg", "pse", "fedrep", "faulty:Faulty", "fedprox", *SMALL]
    found = compare(asked(words), [0, 1], tmp_path / "out", silent(), processes=1)
    assert len(began) == 4 and not any("pse" in out or "fedrep" in out or "Faulty" in out for out in began)
    assert (0, SETTINGS) in told
    refused = [(count, text) for count, text in told if " failed: " in text]
    rest = [(count, text) for count, text in told if ": done" in text]  # each of them once, before anything had begun
    assert [(count, text.partition(" failed: ")[0]) for count, text in refused] == [
        (0, "pse"),
        (0, "fedrep"),
        (0, "faulty:Faulty"),
    ]
    assert "faulty:Faulty failed: AttributeError: 'Server'" in refused[2][1]
    assert [re.match(r"\[(.*?)\]", text)[1] for _, text in rest] == [f"{n} of 4" for n in range(1, 5)]
    assert [line for line in found.said() if " failed: " in line] == [text for _, text in refused]


def test_a_method_in_trouble_is_named_once_and_with_its_place_where_only_some_runs_are():
    def failed(setting, seed, why):
        return Compared(setting, "pse", seed, Path("x"), "failed", why)

    everywhere = [failed(setting, seed, "no maps") for seed in (0, 1) for setting in ("alpha=0.1", "alpha=5")]
    fine = [replace(compared("fedavg", seed), setting=one) for seed in (0, 1) for one in ("alpha=0.1", "alpha=5")]
    assert Comparison([*fine, *everywhere], "global").troubles("failed") == ["pse failed: no maps."]
    some = [*everywhere[:1], replace(compared("pse"), setting="alpha=5"), failed("alpha=0.1", 1, "no maps")]
    assert Comparison([*fine, *some], "global").troubles("failed") == [
        "pse (alpha=0.1, seed 0; alpha=0.1, seed 1) failed: no maps."
    ]
    two = [failed("", 0, "no maps"), failed("", 1, "no memory")]
    assert Comparison(two, "global").troubles("failed") == [
        "pse (seed 0) failed: no maps.",
        "pse (seed 1) failed: no memory.",
    ]
    assert Comparison(two, "global").troubles("corrupt") == []


# ---- how it looks ----------------------------------------------------------------------------------------------------
def compared(method, seed=0, accuracy=0.5, look="personal after", **more):
    clients = {look: {client: accuracy + client / 100 for client in range(5)}}
    numbers = dict(global_last=accuracy, global_end=accuracy, rounds=2, bytes_up=10, bytes_down=10, seconds=1.0)
    return Compared("", method, seed, Path("x"), "complete", algorithm=method, clients=clients, **numbers | more)


def test_equal_results_have_equal_ranks():
    runs = [compared("b", accuracy=0.3), compared("a", accuracy=0.1 + 0.2), compared("c", accuracy=0.2), compared("d")]
    rows = Comparison(runs, "global").rows("")
    assert {row["method"]: row["rank"] for row in rows} == {"d": 1, "a": 2, "b": 2, "c": 4}
    assert 0.1 + 0.2 != 0.3  # equal but for the last bit


def test_what_is_said_is_about_columns_that_are_there():
    plain = Comparison([compared("fedavg"), compared("fedper", accuracy=0.6)], "global")
    said = " ".join(plain.said())
    assert "at the server" not in said and "MB" not in said and "devices" not in said and "p seeds" not in said
    assert "over clients, personal after." in said and "fine-tuned of" not in said
    more = dict(server_seconds=0.5, simulated_seconds=9.0, look="fine-tuned")
    full = Comparison([*plain.runs, compared("fedavg+ft", accuracy=0.7, **more)], "global")
    said = " ".join(full.said())
    assert "at the server: of these" in said and "on devices: simulated" in said
    assert "over clients, personal after, but fine-tuned of fedavg+ft." in said
    assert all("clients by" not in row for _, *tables in full.tables() for table in tables for row in table)


def test_names_of_methods_are_whole_in_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    names = ["fedavg", "fedprox,mu=0.1,server_lr=0.5", "fedavg+ft"]
    looks = dict(zip(names, ("personal before", "personal after", "fine-tuned"), strict=True))
    runs = [compared(name, seed, 0.5 + seed / 50, look=looks[name]) for name in names for seed in range(3)]
    for _, *tables in Comparison(runs, "global").tables():
        for table in tables:
            print_rows(table)
            shown = capsys.readouterr().out
            assert all(name in shown for name in names) and "…" not in shown
            assert max(map(len, shown.splitlines())) <= 80
            squeezed = "".join(shown.split())
            assert all("".join(str(cell).split())[:4] in squeezed for row in table for cell in row.values())


# ---- words -----------------------------------------------------------------------------------------------------------
def test_words_become_rows_and_settings():
    what = asked([*WORDS, "partition.alpha=0.1,5", "uplink=clip,noise", "engine=workers", "local.steps=1,2"])
    assert list(what.grid.rows) == METHODS and "engine=workers" in what.where
    assert list(what.grid.columns) == [f"alpha={a},steps={s}" for a in ("0.1", "5") for s in (1, 2)]
    assert "uplink=clip,noise" in what.grid.words  # two transforms, no sweep
    experiment = what.cells[0].at(Path("x"), 7)
    assert experiment.seed == 7 and experiment.clients == 6 and len(experiment.uplink) == 2
    assert asked(["fedavg"]).folder == Path("runs/compare-mnist5k") != asked(["fedavg", "rounds=3"]).folder
    assert asked(["fedavg", "fedprox", "rounds=3"]).folder == asked(["scaffold", "rounds=3", "engine=workers"]).folder


@pytest.mark.parametrize("method", ALGORITHMS)
def test_defaults_are_those_of_a_run(method):
    """Nothing is changed behind anybody's back, with data= or without."""
    for words in ([], ["data=cifar10"], ["rounds=3", "model=cnn_small"]):
        [cell] = asked([method, *words]).cells
        alone = config.read(None, [f"algorithm={method}", *words])
        assert cell.experiment.with_execution(picture=True) == alone


def test_methods_may_be_named_with_commas():
    assert list(asked(["fedavg,ditto", "fedprox"]).grid.rows) == ["fedavg", "ditto", "fedprox"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["fedavgg"], "did you mean 'fedavg'"),
        (["rounds=3"], "name the methods to compare"),
        (["fedavg", "fedavg"], "fedavg is named twice"),
        (["fedavg", "seed=1,2"], "use --seeds"),
        (["fedavg", "out=x"], "use --out"),
        (["fedavg", "fedprox", "algorithm.mu=1"], r"say whose it is: .* fedavg\.mu=VALUE"),
        (["fedavg", "fedavg.mu=1"], "unknown key algorithm.mu"),
        (["fedavg", "fedprox,mu=1"], r"ask for it as fedprox fedprox\.mu=1$"),
        (["fedavg", "partition.alpha=0.1,x"], "partition.alpha is 'x'"),
        (["fedavg", "--sedes"], "unknown option --sedes"),
        (["fedavg,ditto", "fedprox.mu=1"], r"^fedprox\.mu is a setting of fedprox, which is not compared"),
        (["fedavg", "fedxds/paper.alpha=1"], r"^fedxds/paper\.alpha is a setting of fedxds/paper, which is not"),
        (["fedavg", "fedprx.mu=1"], "unknown key fedprx"),
    ],
)
def test_bad_words_are_refused_before_anything_runs(words, sentence):
    with pytest.raises(BadInput, match=sentence):
        asked(words)


def test_another_experiment_in_the_folder_is_refused(done):
    out, _ = done
    with pytest.raises(BadInput, match="holds another experiment than this cell's"):
        compare(asked([*WORDS, "partition.alpha=0.1,5", "local.batch_size=8"]), [0], out, silent())


@pytest.mark.parametrize("method", ALGORITHMS)
def test_what_is_stored_of_a_method_is_taken_for_its_own(method, tmp_path):
    """As it is written by a run: every field checked, so that a default of 70 is stored as 70.0."""
    experiment = config.read(None, [f"algorithm={method}"])
    placed = config.check(experiment.with_execution(device="cpu", precision="fp32"))
    (tmp_path / "config.yaml").write_text(config.to_yaml(placed))
    stored(RunFolder(tmp_path), experiment)
    with pytest.raises(BadInput, match="another experiment"):
        stored(RunFolder(tmp_path), replace(experiment, rounds=21))


# ---- runs that are there ---------------------------------------------------------------------------------------------
def test_existing_runs_give_the_same_table(done):
    out, found = done
    again = compare_existing([out])
    assert len(again.settings) == 2 and any("tables of their own" in note for note in again.notes)
    for before, now in zip(found.settings, again.settings, strict=True):
        assert now == before
        for old, new in zip(found.rows(before), again.rows(now), strict=True):
            assert {k: v for k, v in old.items() if k != "method"} == {k: v for k, v in new.items() if k != "method"}


def test_runs_of_other_splits_are_refused_by_name(done, tmp_path):
    out, _ = done
    pair = [out / "fedavg-alpha=0.1" / "seed0", out / "fedper-alpha=5" / "seed0"]
    with pytest.raises(BadInput) as refused:
        compare_existing(pair)
    assert all(str(path) in str(refused.value) for path in pair) and "another split" in str(refused.value)
    changed = tmp_path / "changed"
    shutil.copytree(out / "fedper-alpha=0.1" / "seed0", changed)
    card = json.loads((changed / "passport.json").read_text())
    (changed / "passport.json").write_text(json.dumps({**card, "split_hash": "0" * 64}))
    with pytest.raises(BadInput, match=r"changed and .*seed0 have other data or another split"):
        compare_existing([pair[0], changed])
    with pytest.raises(BadInput, match="nothing to compare"):
        compare_existing([out / "fedavg-alpha=0.1"])
    with pytest.raises(BadInput, match="there is no folder"):
        compare_existing([tmp_path / "none"])


def test_half_finished_and_corrupt_runs_are_shown_as_such(done, tmp_path):
    out, _ = done
    for name in ("fedavg", "fedper", "fedprox,mu=1", "fedprox,mu=0.1"):
        shutil.copytree(out / f"{name}-alpha=5" / "seed0", tmp_path / name)
    (tmp_path / "fedprox,mu=1" / "result.json").unlink()
    [part] = (tmp_path / "fedprox,mu=0.1" / "metrics.parquet").glob("*.parquet")
    part.write_bytes(part.read_bytes()[:100])
    shutil.copytree(tmp_path / "fedper", tmp_path / "broken")
    (tmp_path / "broken" / "config.yaml").write_text("algorithm: [")
    found = compare_existing([tmp_path])
    assert sorted(run.state for run in found.runs) == ["complete", "complete", "corrupt", "corrupt", "unfinished"]
    text = "\n".join(found.said())
    assert "mu=1 is unfinished: 2 of 2 rounds" in text
    assert "mu=0.1 is corrupt: " in text and "not a whole Parquet file" in text
    assert "broken is corrupt: " in text and "cannot be read as YAML" in text
    assert found.rows("")[-1]["rank"] is None


def test_other_differences_are_said(done, tmp_path):
    out, _ = done
    simulate.run(
        config.read(None, ["algorithm=scaffold", *SMALL, "partition.alpha=5", "rounds=1", f"out={tmp_path}/a"])
    )
    found = compare_existing([out / "fedavg-alpha=5" / "seed0", tmp_path / "a", out / "fedavg-alpha=5" / "seed1"])
    assert any("rounds of fedavg and scaffold is not the same" in note for note in found.notes)
    assert any("Not all methods have the same seeds (fedavg 0, 1; scaffold 0)" in note for note in found.notes)


@pytest.mark.parametrize(
    ("values", "limits"),
    [([0.43, 0.87], (40, 90)), ([0.5, 0.5], (50, 60)), ([None, float("nan")], (0, 100)), ([0.0, 1.0], (0, 100))],
)
def test_curves_have_the_room_that_they_need(values, limits):
    curves = {"global": {"accuracy": values, "round": [1, 2]}, "other": {"accuracy": [-9.0], "round": [1]}}
    assert figure._range([Compared("", "fedavg", 0, Path("x"), curves=curves)], ["global"]) == limits


def test_the_command_ends_with_one_line_of_json(done, tmp_path, capsys):
    out, _ = done
    app(
        [
            "compare",
            "--runs",
            str(out / "fedavg-alpha=5"),
            str(out / "fedper-alpha=5"),
            "--out",
            str(tmp_path),
            "--json",
        ],
        standalone_mode=False,
    )
    whole = json.loads(capsys.readouterr().out)
    assert whole["complete"] and whole["folder"] == str(tmp_path) and len(whole["settings"][""]) == 2
    assert RunFolder(whole["runs"][0]["run"]).result() is not None and Path(whole["report"]).exists()


def test_what_the_server_does_after_the_answers_is_timed_and_shown_where_it_is_much(tmp_path, monkeypatch):
    """A server that sleeps: that time is its own, and no other's."""
    words = ("model=cnn2", "clients=4", "cohort=2", "rounds=3", "local.steps=1", "engine=sequential", "picture=false")

    def seconds(name: str, *more: str) -> list[float]:
        simulate.run(config.read(None, [*words, *more]).with_execution(out=str(tmp_path / name)))
        rows = RunFolder(tmp_path / name).metrics().to_pylist()
        return [row["value"] for row in rows if row["metric"] == "server seconds"]

    quick = seconds("fedavg")
    for method in ("fedavg", "fedprox"):
        kind = ALGORITHMS[method]

        def slow(self, server, uploads, usual=kind.aggregate):
            time.sleep(0.3)
            return usual(self, server, uploads)

        monkeypatch.setattr(kind, "aggregate", slow)
    slept = seconds("slow fedavg"), seconds("slow fedprox", "algorithm=fedprox")
    assert len(quick) == 3 and all(0 <= each < 0.3 for each in quick)
    assert all(len(each) == 3 and all(0.3 <= one < 1.5 for one in each) for each in slept)
    assert not list(differences(tmp_path / "fedavg", tmp_path / "slow fedavg"))  # seconds are no difference
    found = compare_existing([tmp_path / "fedavg", tmp_path / "slow fedprox"])
    spent = {row["method"]: row["server_seconds"] for row in found.rows("")}
    assert spent == {"fedavg": pytest.approx(sum(quick)), "fedprox": pytest.approx(sum(slept[1]))}
    assert "| at the server |" in found.markdown()
