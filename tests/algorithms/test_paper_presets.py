"""Presets beside the lines of the papers and of the released code that they stand for."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest

import fedlens
from fedlens import config
from fedlens.algorithms import ALGORITHMS, PSE, SPATL, FedSLS, FedXDS
from fedlens.core.errors import BadInput
from fedlens.core.objective import by_batches, by_examples, uniformly
from fedlens.papers.registry import reproducible
from fedlens.papers.table import gather
from fedlens.runs.grid import Grid
from fedlens.selection import agent, search
from fedlens.simulate.describe import describe, preset_table

PRINTED = {
    # Algorithm 1, lines 2 to 4; equations 2, 6, 8, 10 and 11; algorithm 2, line 15; section 5.1.
    "fedxds/paper": dict(
        attribution="lrp", lrp="epsilon", mask="binary", sparsity=70, clip_norm=None, sigma=None, accounting="paper",
        epsilon=20, delta=1e-5, mix="additive", lam=0.5, weighed="uniform", attribution_model="global",
        warmup_rounds=10, warmup_epochs=10, warmup_fraction=1, target="true", continue_from_warmup=False,
        absolute=False, mask_epsilon=None, share_fraction=1, sparse=False,
    ),
    # The released script: soft masks, norm 10, the 80 % smallest values dropped, noise 0.15, losses added.
    "fedxds/official": dict(
        attribution="lrp", lrp="epsilon_plus_flat", ig="right", mask="soft", sparsity=80, clip_norm=10, sigma=0.15,
        target="batch_labels", attribution_model="local", mix="additive", lam=1, weighed="batches", warmup_rounds=10,
        warmup_epochs=10, warmup_fraction=1, warmup_augment=False, continue_from_warmup=False,
    ),
    # Equations 7 to 12 and section 4.1: an update every 20 search steps, 1,000 images of validation, c = 0 at first.
    "spatl/paper": dict(
        selector="rl", private="predictor", control_scale=1, control_at="grad", control_norm="population",
        control_upload="dense", weighed="uniform", agent="persistent", agent_learns="all", episodes=20,
        later_episodes=20, validation=1000, validation_share=0.2, normalise="all_selected", spend=False, settle=False,
        constraint="flops", budget=0.8, control_over="reach",
    ),
    "spatl/official": dict(
        selector="all", private="as_released", control_scale=0.01, control_at="post_step", control_over="steps",
        control_norm="cohort", weighed="samples",
    ),
    # Equations 3 (sums), 4 (xi 0.01), 7 (queries are exchanged) and F = W * F before it: a convolution's output.
    "pse/paper": dict(
        private="classifier", xi=0.01, excite="direct", attention="cross", cam="gradcam", score="logit",
        score_path="cross", reduce="sum", threshold_scope="layer", tap="conv", local_init="global",
    ),
    # Equations 4 to 8: guided gradient times ReLU(F), tau 0.5, a sum over images; found once.
    "fedsls/paper": dict(
        saliency="guided_grad_x_act", norm="l2", target="true", score="logit", tau=0.5, tap="conv", normalize="sum",
        recompute_every=0, blend=0,
    ),
    "fedsls/literal": dict(saliency="guided_grad_x_act", norm="sqrt_l2", tau=0.5, normalize="sum", blend=0),
}  # fmt: skip


def read(name: str):
    model = "model=pse_net" if name.startswith("pse") else "model=cnn"
    return config.read(None, [f"algorithm={name}", model])


@pytest.mark.parametrize("name", PRINTED)
def test_fields_are_the_printed_ones(name):
    found = read(name).algorithm
    assert {key: getattr(found, key) for key in PRINTED[name]} == PRINTED[name]


@pytest.mark.parametrize("name", [name for name in PRINTED if name.startswith(("fedxds", "fedsls"))])
def test_settings_by_several_stages_can_be_described(name):
    """Also where clients count by batches, of which a dry run has none."""
    experiment = config.read(None, [f"algorithm={name}", "model=cnn2"])
    assert {leaf.where for leaf in describe(experiment, 2, 1, 16, to_the_end=True)} >= {"down", "up"}


def test_noise_of_the_three_settings():
    """Equation 2 at epsilon 20 and delta 1e-5, sensitivity one; the code's constant."""
    paper, official = (FedXDS(**FedXDS.presets[name]) for name in ("paper", "official"))
    assert paper.noise == FedXDS().noise == math.sqrt(2 * math.log(1.25 / 1e-5)) / 20
    assert round(paper.noise, 3) == 0.242 and official.noise == 0.15


def test_only_the_printed_setting_states_what_is_unproven():
    paper, official = (FedXDS(**FedXDS.presets[name]).statement() for name in ("paper", "official"))
    assert (paper.epsilon, paper.holds) == (20, False)
    for said in (FedXDS().statement(), official):
        assert said.holds and said.epsilon == said.details["any_two_images"] and "any other" in said.adjacency
    bare = FedXDS(clip_norm=None).statement()
    assert (bare.epsilon, bare.holds, bare.because) == (None, False, "nothing bounds images: no clip_norm")


@pytest.mark.parametrize(("name", "said"), [("fedxds/paper", True), ("fedxds", False), ("fedxds/official", False)])
def test_a_run_says_at_the_start_that_the_promise_is_unproven(name, said):
    experiment = read(name)
    notes = " ".join(experiment.federation(experiment.data.load())[1].notes)
    assert ("unproven as the paper states it" in notes) == said


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("fedxds", [], by_examples),
        ("fedxds/paper", [], uniformly),
        ("fedxds/official", [], by_batches),
        ("fedxds/paper", ["weighting=samples"], by_examples),
    ],
)
def test_whose_mean_it_is(name, words, expected):
    experiment = config.read(None, [f"algorithm={name}", *words])
    assert {turn.stage.weighting for turn in experiment.timetable()} == {expected}


@pytest.mark.parametrize(("name", "warm"), [("fedxds", True), ("fedxds/paper", True), ("fedxds/official", False)])
def test_which_rounds_are_augmented(name, warm):
    """The released warm-up, the local training of its last round among it, sees images as they are."""
    stages = {turn.stage: turn.stage.augment for turn in read(name).timetable()}
    *before, training = stages.values()
    assert len(before) == 2 and set(before) == {warm} and training


@pytest.mark.parametrize(
    ("examples", "default", "paper"), [(5000, 250, 1000), (156, 8, 32), (1, 0, 0), (60000, 1000, 1000)]
)
def test_images_kept_back_for_rewards(examples, default, paper):
    assert SPATL().holdout_size(examples) == default
    assert SPATL(**SPATL.presets["paper"]).holdout_size(examples) == paper
    assert SPATL(**SPATL.presets["official"]).holdout_size(examples) == 0


@pytest.mark.parametrize("kind", [one for one in ALGORITHMS.values() if getattr(one, "presets", {})])
def test_where_presets_differ_setting_by_setting(kind):
    head, rows = preset_table(kind())
    assert head == ["setting", "default", *kind.presets]
    assert {name for name, *_ in rows} <= {field.name for field in fields(kind)}
    for column, preset in enumerate(kind.presets.values(), 2):
        changed = {key for key, value in preset.items() if value != getattr(kind(), key)}
        assert changed == {row[0] for row in rows if row[column] != row[1]}


def test_a_method_without_presets_has_no_table():
    assert preset_table(fedlens.Experiment().algorithm) == ([], [])


@pytest.mark.parametrize(("norm", "said"), [("0", "greater than 0"), ("-1", "greater than 0")])
def test_a_clip_norm_that_would_erase_images(norm, said):
    with pytest.raises(BadInput, match=f"algorithm.clip_norm is {norm}, but it should be {said}"):
        config.read(None, ["algorithm=fedxds", f"algorithm.clip_norm={norm}"])
    with pytest.raises(BadInput, match="none: no clipping"):
        FedXDS(clip_norm=float(norm))


def test_defaults_are_not_the_papers():
    """Each default is what we would recommend; PSE's maps are taken after the ReLU."""
    assert PSE().tap == "relu" and FedSLS() == FedSLS(**FedSLS.presets["paper"])


# ---- splits of the papers' tables ----
def splits(grid: str) -> dict[str, str]:
    """{column: how its clients are drawn}"""
    found = {cell.column: cell.experiment.partition for cell in reproducible()[grid].cells()}
    return {column: getattr(one, "dialect", type(one).__name__) for column, one in found.items()}


def test_splits_are_those_of_text_or_code():
    spatl = splits("spatl/accuracy")  # shares of labels; 6,000 images each; the code
    assert {name: spatl[name] for name in ("resnet20", "resnet20-client", "resnet20-balanced")} == {
        "resnet20": "class",
        "resnet20-client": "client",
        "resnet20-balanced": "balanced",
    }
    assert set(splits("fedxds/table1").values()) == {"balanced"}  # the code: the text says Dirichlet alone
    assert set(splits("compose/cifar10").values()) == {"class"}  # no paper's
    fedsls = splits("fedsls/table1")
    assert fedsls["cifar10/0.1"] == "class" and fedsls["cifar10-client/0.1"] == "client"


@pytest.mark.parametrize("grid", ["pse/table1", "pse/table2"])
def test_every_client_of_pse_has_as_many_classes(grid):
    for cell in reproducible()[grid].cells(["pse"]):
        dealt = getattr(cell.experiment.partition, "base", cell.experiment.partition)
        assert dealt.distinct and str(dealt.classes) == cell.column.rpartition("/")[2]
        assert cell.experiment.algorithm == PSE(**PSE.presets["paper"])


def test_rows_of_the_tables_are_the_papers_presets():
    for grid, row, kind in (("fedxds/table1", "fedx_lrp", FedXDS), ("spatl/accuracy", "spatl", SPATL)):
        assert {cell.experiment.algorithm for cell in reproducible()[grid].cells([row])} == {
            kind(**kind.presets["paper"])
        }


def settings(grid: str, row: str, column: str) -> dict[str, object]:
    """What a table's cell really runs with, of what papers write about."""
    (cell,) = reproducible()[grid].cells([row], [column])
    e = cell.experiment
    names = ("epochs", "steps", "batch_size", "lr", "momentum", "weight_decay")
    local = {name: getattr(e.local, name) for name in names}
    network = config.to_dict(e.model)["is"]
    return {"rounds": e.rounds, "clients": e.clients, "cohort": e.cohort.size(e.clients), "model": network} | local


PROTOCOLS = {
    # Section 4.1 and GradMA's defaults: 10 steps of 64 images.
    ("fedsls/table1", "fedsls", "cifar10/0.1"): (2000, 100, 10, "resnet18", 10, 64, 0.01, 0, 0),
    ("fedsls/table1", "fedavg", "tiny_imagenet/0.5"): (1000, 100, 10, "resnet50", 10, 64, 0.01, 0, 0),
    # Section 5.1, and the released code for local training.
    ("fedxds/table1", "fedx_lrp", "cifar10/K10/0.1"): (200, 10, 5, "resnet8", 5, 64, 0.01, 0.9, 1e-4),
    ("fedxds/table1", "fedavg", "cifar100/K100/0.05"): (200, 100, 10, "resnet8", 5, 64, 0.01, 0.9, 1e-4),
    # Section 4.1, and the released code for batch, momentum and decay.
    ("spatl/accuracy", "spatl", "resnet32"): (100, 10, 10, "resnet32", 10, 64, 0.005, 0.9, 1e-5),
    ("spatl/encoders", "spatl", "vgg11-client"): (100, 10, 10, "vgg11", 10, 64, 0.01, 0.9, 1e-5),
    # Section 3.1, and FedRep's code for batch and decay.
    ("pse/table2", "pse", "cifar100/15"): (100, 50, 25, "pse_net", 5, 10, 0.01, 0.5, 1e-4),
    ("pse/table2", "fedrep", "fashion_mnist/3"): (100, 100, 10, "pse_net", 5, 10, 0.01, 0.5, 1e-4),
    ("pse/table1", "ditto", "femnist_gray_colour/5"): (100, 200, 20, "pse_net", 5, 10, 0.01, 0.5, 1e-4),
}


@pytest.mark.parametrize("where", PROTOCOLS, ids="/".join)
def test_tables_run_with_the_printed_numbers(where):
    rounds, clients, cohort, model, length, batch, rate, momentum, decay = PROTOCOLS[where]
    found = settings(*where)
    assert (found["steps"] or found["epochs"]) == length and bool(found["steps"]) == where[0].startswith("fedsls")
    expected = dict(rounds=rounds, clients=clients, cohort=cohort, model=model, batch_size=batch, lr=rate)
    expected |= dict(momentum=momentum, weight_decay=decay)
    assert {name: found[name] for name in expected} == expected


def test_baselines_of_pse_attend_by_equation_6():
    """Position is in equation 7 alone, the exchange's."""
    for cell in reproducible()["pse/table2"].cells((), ["cifar10/2"]):
        assert cell.experiment.model.position == (cell.row == "pse"), cell.row


def test_colour_is_added_as_the_text_says():
    columns = reproducible()["pse/table1"].columns
    assert "data.views=gray,added" in columns["fashion_gray_colour/3"].words
    assert "data.views=colour,edge" in columns["fashion_colour_edge-difference/3"].words


def test_fedavg_of_fedxds_in_both_readings():
    """Section 2.1 prints the uniform mean; FedAvg's own paper counts by images."""
    cells = reproducible()["fedxds/table1"].cells(("fedavg", "fedavg_uniform"), ["cifar10"])
    found = {(cell.row, cell.experiment.weighting) for cell in cells}
    assert found == {("fedavg", "auto"), ("fedavg_uniform", "uniform")}


def test_every_reading_of_a_split_has_its_columns():
    for grid in ("spatl/accuracy", "spatl/table1", "spatl/ablations", "spatl/encoders"):
        drawn = {each for name, each in splits(grid).items() if not name.startswith("cnn2-")}  # FEMNIST: by writers
        assert drawn == {"class", "client", "balanced"}, grid


def test_agents_learn_as_section_4_1_of_spatl_says():
    assert (search.WAVE, agent.EPOCHS, agent.DISCOUNT, agent.CLIP, agent.SPREAD) == (20, 20, 0.99, 0.2, 0.5)
    assert (agent.ADAM.lr, agent.ADAM.beta1, agent.ADAM.beta2) == (3e-4, 0.9, 0.999)


@pytest.mark.parametrize("name", [name for name, one in reproducible().items() if isinstance(one, Grid)])
def test_tables_say_what_the_paper_says_and_what_it_leaves_open(name, tmp_path):
    grid = reproducible()[name]
    if name.startswith("compose/"):  # no paper's
        assert not grid.protocol
        return
    assert [*grid.protocol] == ["The paper says", "It leaves open"]
    page = gather(grid, tmp_path, ()).markdown()
    assert all(f"## {heading}" in page and f"- {lines[0]}" in page for heading, lines in grid.protocol.items())
