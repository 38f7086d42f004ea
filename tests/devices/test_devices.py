"""Simulated seconds: against sums written out by hand, FLOPs against closed forms, tables against the run itself."""

import json
import math
from dataclasses import replace

import pytest
import torch

from fedlens import config
from fedlens.core.batches import plan
from fedlens.core.errors import BadInput
from fedlens.core.ledger import Entry
from fedlens.data import Images
from fedlens.devices.clock import passes, time_to
from fedlens.devices.profiles import DEVICES, Phone
from fedlens.runs.folder import RunFolder
from fedlens.simulate import run as simulate
from fedlens.simulate.timing import clock_of, timing, work_of

SETTINGS = ["model=mlp", "clients=6", "cohort=3", "rounds=4", "picture=false", "engine=sequential"]


def images(side=6, classes=3):
    x, y, index = torch.zeros(9, 1, side, side, dtype=torch.uint8), torch.zeros(9, dtype=torch.long), torch.arange(9)
    names = tuple(map(str, range(classes)))
    return Images(x, y, index[:6], index[6:], names, (0.5,), (0.5,), None, None, "", "nowhere", "blank")


def mlp_flops(experiment, side=6, classes=3):
    """Forward: two for each weight. Backward: the same for the weights' gradients, and for inputs but the first's."""
    module = experiment.model.build(classes, 1, side)
    weights = [leaf.numel() for name, leaf in module.named_parameters() if name.endswith("weight")]
    return 2 * (3 * sum(weights) - weights[0]), 2 * sum(weights)


def work(*words, side=6):
    experiment = config.read(None, ["model=mlp", *words])
    return experiment, list(work_of(experiment, images(side)).values())


@pytest.mark.parametrize("words", [[], ["local.epochs=3"], ["local.steps=5"]], ids=str)
def test_flops_of_training_are_those_of_matrix_products(words):
    experiment, (found,) = work(*words)
    trained, _ = mlp_flops(experiment)
    assert found == (0, 0, trained)


def test_flops_of_what_methods_add_are_counted():
    """MOON looks through two more models at every batch; Ditto trains twice; SCAFFOLD adds numbers alone."""
    experiment, (moon,) = work("algorithm=moon")
    trained, forward = mlp_flops(experiment)
    weights = [leaf.numel() for n, leaf in experiment.model.build(3, 1, 6).named_parameters() if n.endswith("weight")]
    head = 2 * weights[-1]  # features are compared, so whether a head is computed for them is the method's own affair
    assert trained + 2 * (forward - head) <= moon.trained <= trained + 2 * forward
    assert work("algorithm=ditto")[1][0].trained == 2 * trained
    assert work("algorithm=scaffold")[1][0].trained == trained


def test_flops_beside_training_are_counted():
    """FedSLS asks for saliency of a client's own images: work that grows with what it owns and not with its steps."""
    method = "algorithm=fedsls", "model=cnn2"
    few, many = (work(*method, f"local.epochs={epochs}", side=16)[1] for epochs in (1, 3))
    assert [each.owned for each in few] == [each.owned for each in many]
    assert any(each.owned > 0 for each in few)


def test_flops_of_a_search_are_those_of_later_rounds():
    """SPATL tries sub-models on the images it keeps back: 30 in a client's first round, 5 in all others."""
    method = "algorithm=spatl", "model=cnn2"
    (few,), (many,), (once,), (whole,) = (
        work(*method, word, side=16)[1]
        for word in ("rounds=9", "algorithm.later_episodes=10", "rounds=1", "algorithm.selector=all")
    )
    assert few.trained == many.trained == once.trained == whole.trained
    assert whole.owned == whole.fixed == 0 < few.owned < many.owned < once.owned


@pytest.mark.parametrize("how", [{"epochs": 3}, {"steps": 1}, {"steps": 7}, {"steps": 12}, {"epochs": 0}], ids=str)
@pytest.mark.parametrize("examples", [0, 1, 4, 13])
def test_passes_are_those_of_the_plan(how, examples):
    stage = config.read(None, ["local.batch_size=4"]).timetable()[0][0]
    stage = replace(stage, **{"epochs": 1, "steps": None} | how)
    counted = plan(examples, 4, 0, **how).weights.sum()
    assert passes(stage, examples) == int(counted)


def test_a_round_lasts_as_long_as_its_slowest_client():
    experiment = config.read(None, [*SETTINGS, "devices=phone", "seed=3", "local.epochs=2"])
    sizes = [10, 200, 30, 40, 50, 60]
    clock = clock_of(experiment, images(), sizes, experiment.execution.devices)
    entries = [
        Entry(2, 1, "download", 1_000_000, 50),
        Entry(2, 1, "shared", 2_000_000, 0),
        Entry(2, 1, "upload", 4_000_000, 0),
        Entry(2, 4, "download", 1_000_000, 50),
        Entry(2, 4, "upload", 10, 0),
        Entry(2, 5, "download", 10**12, 0),  # never replied
        Entry(2, 1, "evaluation upload", 10**12, 0),
    ]
    trained, _ = mlp_flops(experiment)
    expected = {}
    for client, down, up, letters in ((1, 3_000_050, 4_000_000, 3), (4, 1_000_050, 10, 2)):
        devices = experiment.execution.devices
        device = devices.of(client, 3)
        moved = down / device.down + up / device.up + 0.03 * letters
        expected[client] = moved + 2 * sizes[client] * trained / device.speed + devices.wait(client, 2, 3)
    found = {client: sum(seconds) for client, seconds in clock.clients(2, entries).items()}
    assert found == pytest.approx(expected, rel=1e-12)
    assert clock.round(2, entries) == pytest.approx(max(expected.values()), rel=1e-12)


def test_devices_follow_their_medians_and_availability():
    phone = Phone(spread=0.7, availability=0.75)
    drawn = torch.tensor([phone.of(client, 0) for client in range(4000)], dtype=torch.float64)
    medians = torch.tensor([phone.down * 1e6 / 8, phone.up * 1e6 / 8, phone.speed * 1e9], dtype=torch.float64)
    logs = (drawn / medians).log()
    assert logs.median(0).values.abs().max() < 0.05
    assert (logs.std(0) - 0.7).abs().max() < 0.03
    assert torch.corrcoef(logs.T).fill_diagonal_(0).abs().max() < 0.06  # three draws, not one
    waits = torch.tensor([phone.wait(client, 5, 0) for client in range(4000)]) / phone.retry
    for asked in range(4):  # geometric: there at the first, the second ... time of asking
        assert (waits == asked).double().mean() == pytest.approx(0.75 * 0.25**asked, abs=0.03)
    assert [phone.of(3, 1), phone.wait(3, 5, 1)] == [phone.of(3, 1), phone.wait(3, 5, 1)]
    assert phone.of(3, 1) != phone.of(3, 2) and phone.of(3, 1) != phone.of(4, 1)
    assert Phone(availability=1.0).wait(0, 0, 0) == 0


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    words = [*SETTINGS, "evaluate.targets=[0.2,0.99]"]
    with_devices = config.read(None, [*words, "devices=iot", "devices.up=2", f"out={out / 'with'}"])
    without = config.read(None, [*words, f"out={out / 'without'}"])
    return [simulate.run(each) for each in (with_devices, without)], out


def test_a_run_says_its_simulated_seconds(timed):
    (found, plain), out = timed
    rows = RunFolder.open(out / "with").metrics().to_pylist()
    seconds = {row["round"]: row["value"] for row in rows if row["metric"] == "simulated seconds"}
    assert list(seconds) == [1, 2, 3, 4] and min(seconds.values()) > 0
    assert found.simulated_seconds == pytest.approx(sum(seconds.values()))
    assert found.accuracy == plain.accuracy and plain.simulated_seconds is None  # nothing that is learned changes
    reached = found.targets["0.2"]
    assert reached["simulated_seconds"] == pytest.approx(sum(v for r, v in seconds.items() if r <= reached["round"]))
    assert "simulated_seconds" not in plain.targets["0.2"] and found.targets["0.99"] is None
    assert json.loads((out / "with/result.json").read_text())["simulated_seconds"] == found.simulated_seconds


def test_after_the_fact_it_is_the_same(timed):
    (found, _), out = timed
    later = timing(out / "without", DEVICES["iot"](up=2))
    assert sum(later.rounds.values()) == pytest.approx(found.simulated_seconds, rel=1e-12)
    assert later.until(2) == pytest.approx(later.rounds[1] + later.rounds[2])
    slow = timing(out / "without", DEVICES["iot"](up=1))
    gained = [slow.slowest[r].upload / later.slowest[r].upload for r in (1, 2, 3, 4)]
    assert max(gained) == pytest.approx(2) and sum(slow.rounds.values()) > sum(later.rounds.values())


def test_time_to_accuracy():
    seconds = {1: 5.0, 2: 7.0, 3: 11.0}
    curve = [(1, 0.1), (2, 0.6), (3, 0.5)]
    assert time_to(curve, 0.1, seconds) == 5 and time_to(curve, 0.5, seconds) == 12
    assert time_to(curve, 0.7, seconds) is None


def test_bad_devices_are_named():
    with pytest.raises(BadInput, match=r"devices 'fone' is unknown; did you mean 'phone'"):
        config.read(None, ["devices=fone"])
    with pytest.raises(BadInput, match=r"devices.availability is 0"):
        config.read(None, ["devices=phone", "devices.availability=0"])
    assert config.read(None, ["devices=none"]).execution.devices is None
    assert math.isclose(config.read(None, ["devices=phone", "devices.up=3"]).execution.devices.up, 3)


def test_the_command_line_says_the_same(timed):
    from typer.testing import CliRunner

    from fedlens.cli.main import app

    (found, _), out = timed
    words = ["time", str(out / "without"), "devices.up=2", "--devices", "iot", "--targets", "0.2", "--json"]
    said = json.loads(CliRunner().invoke(app, words, catch_exceptions=False).output)
    (row,) = said["runs"]
    assert said["devices"]["is"] == "iot" and said["devices"]["up"] == 2
    assert row["seconds"] == pytest.approx(found.simulated_seconds)
    assert row["seconds to 0.2"] == pytest.approx(found.targets["0.2"]["simulated_seconds"])
    assert sum(row[part] for part in ("wait", "latency", "download", "compute", "upload")) == pytest.approx(
        row["seconds"]
    )
    with pytest.raises(BadInput, match=r"rounds=3 is no setting of devices"):
        CliRunner().invoke(app, ["time", str(out / "without"), "rounds=3"], catch_exceptions=False)
