"""SPATL's figures 4, 5 and 6, and its tables of bytes and of sub-models, from our own runs.

Runs are carried out first where they are missing; `--columns` names other networks than the paper's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from ...core.errors import BadInput
from ...plots.style import COLOURS, caption, pyplot, save
from ...report.client_figures import accuracy_bars
from ...runs.folder import RunFolder
from ...runs.grid import Cell
from ...runs.read import bytes_until, client_evaluation, fairness
from ...selection.sub_models import SubModel, device_name
from ..figure_runs import Figure, Wanted, note
from .agents import reward_over_updates, reward_runs
from .shown import cells, listed, shown, titled
from .tables import (
    CNN,
    COLUMNS,
    EVERY,
    INFERENCE,
    PROTOCOL,
    SEARCHED,
    TO_80,
    bytes_to,
    personal_accuracies,
    sub_models_by,
)
from .transfer import PROTOCOL as OF_TRANSFER
from .transfer import transfer, transfer_runs

MODEL = "resnet20"  # of figure 5
PANELS = (*COLUMNS, *CNN)  # of figure 4
CONTROLLED = ("vgg11",)  # of figure 6
METHODS = ("spatl", "spatl_salient", "scaffold", "fedavg", "fedprox", "fednova")
CONTROL = ("spatl", "no_control", "l2_global")
LINES: dict[str, str] = {**dict(zip((*METHODS, "no_control"), COLOURS, strict=True)), "l2_global": "#888888"}
CALLED = {"no_control": "no gradient control", "l2_global": "smallest norms, no agent"}
TARGETS = (0.7, 0.8)
MOST = "rounds=200"  # of table 1, where the figures have 100
LOW = (0.1, 0.2)  # in quick mode
RIGHT = ("accuracy", "dense", "own", "smaller", "own_settled", "settled", "own_tuned", "tuned")
SHARES = [field.name for field in fields(SubModel) if field.name not in ("client", *RIGHT)]
TUNED = 1  # epochs of a sub-model at its client
CUT = {"selected": "", "norms": ", smallest norms left out", "alike": ", every layer alike"}


# ---- over rounds -----------------------------------------------------------------------------------------------------
def accuracy_over_rounds(wanted: Wanted) -> list[Path]:
    """Figure 4: mean accuracy of clients' personal models over rounds and over bytes, by method; a panel a network."""
    return _curves(wanted, "spatl/accuracy", METHODS, PANELS)


def gradient_control(wanted: Wanted) -> list[Path]:
    """Figure 6: SPATL with and without control variates, and with the smallest norms in its agents' place."""
    return _curves(wanted, "spatl/ablations", CONTROL, CONTROLLED)


def _curves(wanted: Wanted, table: str, rows: Sequence[str], networks: Sequence[str]) -> list[Path]:
    runs, told = shown(wanted, table, rows, networks)
    found = {model: {row: curve(RunFolder(run)) for row, run in by.items()} for model, by in runs.items()}
    size = 10, 3.3 * len(found)
    figure, axes = pyplot().subplots(len(found), 2, figsize=size, squeeze=False, sharey="row")
    for (model, by), (over_rounds, over_bytes) in zip(found.items(), axes, strict=True):
        most = max(line["bytes"][-1] for line in by.values())
        unit, in_words = (1e9, "gigabytes") if most >= 1e9 else (1e6, "megabytes")
        for row, line in by.items():
            style = {"color": LINES[row], "linewidth": 1.6, "markersize": 3, "label": CALLED.get(row, row)}
            mark = "o-" if len(line["round"]) < 2 else "-"  # one evaluation alone would not be seen
            percents = [100 * value for value in line["accuracy"]]
            over_rounds.plot(line["round"], percents, mark, **style)
            over_bytes.plot([count / unit for count in line["bytes"]], percents, mark, **style)
        over_rounds.set(xlabel="rounds", ylabel="mean accuracy of clients, %", title=titled(model, runs[model]))
        over_rounds.xaxis.get_major_locator().set_params(integer=True)
        over_bytes.set(xlabel=f"{in_words} of all clients, up and down")
        over_bytes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    if told:
        caption(figure, " ".join(told))
    return [save(figure, wanted.path), note(wanted, {"curves": found, "not run": told})]


def curve(folder: RunFolder) -> dict[str, list[Any]]:
    """Mean accuracy of clients' personal models before they train, after each round; and bytes until then."""
    seen = personal_accuracies(folder)
    if not seen:
        raise BadInput(f"{folder.path} was not evaluated: leave evaluate.personal=before and evaluate.personal_every=1")
    at, accuracies = zip(*seen.values(), strict=True)
    return {"round": [*seen], "accuracy": [*accuracies], "bytes": bytes_until(folder, at)}


def to_a_target(wanted: Wanted) -> Wanted:
    """With the rounds of table 1, unless the user or quick mode asks for others."""
    asked = wanted.quick or any(word.startswith("rounds=") for word in wanted.words)
    return wanted if asked else replace(wanted, words=(MOST, *wanted.words))


def bytes_to_accuracy(wanted: Wanted) -> list[Path]:
    """Table 1: rounds and bytes until clients' personal models reach 70 and 80 %."""
    found: dict[str, dict[str, Any]] = {}
    targets = LOW if wanted.quick else TARGETS
    head = ["", *(f"{what} to {100 * t:.0f} %" for t in targets for what in ("rounds", "GB"))]
    head += [] if wanted.quick else ["paper's rounds", "GB"]
    lines = []
    by_network, told = shown(to_a_target(wanted), "spatl/accuracy", METHODS, tuple(COLUMNS))
    for model, runs in by_network.items():
        lines += [[f"**{titled(model, runs)}**", *[""] * (len(head) - 1)]]
        for row, run in runs.items():
            folder = RunFolder(run)
            last = curve(folder)["round"][-1]
            reached = {f"{target:g}": bytes_to(folder, target) for target in targets}
            paper = None if wanted.quick else TO_80.get((row, model))
            found.setdefault(model, {})[row] = {"rounds": last, "reached": reached, "paper, 80 %": paper}
            ours = [
                text
                for at in reached.values()
                for text in ((f"{at['round']}", f"{at['bytes'] / 1e9:.4g}") if at else (f"> {last}", ""))
            ]
            theirs = [str(paper[0] or "> 200"), f"{paper[1]:g}"] if paper else ["", ""]
            lines.append([row, *ours, *theirs][: len(head)])
    notes = [
        "Accuracy: mean over clients of their personal models on their own test images, before local training.",
        "Bytes: of all clients, up and down, headers included. The paper's are for 80 %, of 200 rounds where its "
        "method never gets there; it counts one way for VGG-11 and charges FedNova twice.",
        *told,
    ]
    table = listed(wanted, "bytes until clients reach", head, lines, notes)
    return [note(wanted, {"models": found, "not run": told}), table]


# ---- single clients --------------------------------------------------------------------------------------------------
def accuracy_of_clients(wanted: Wanted) -> list[Path]:
    """Figure 5: accuracy of every client by method, and how fair that is; with one network."""
    by_network, _ = shown(wanted, "spatl/accuracy", METHODS, (MODEL,))
    runs = next(iter(by_network.values()))
    by_client = {row: client_evaluation(RunFolder(run))[1] for row, run in runs.items()}
    fair = {row: fairness(list(by.values())) for row, by in by_client.items()}
    return [accuracy_bars(by_client, fair, wanted.path), note(wanted, {"accuracy": by_client, "fairness": fair})]


def submodels(wanted: Wanted) -> list[Path]:
    """Table 2: what each client's sub-model costs, of the whole network."""
    runs, told = shown(wanted, "spatl/accuracy", ("spatl",), tuple(COLUMNS))
    repeats = 2 if wanted.quick else 9
    by_rule = {model: sub_models_by(run["spatl"], repeats=repeats, epochs=TUNED) for model, run in runs.items()}
    found = {model: rules["selected"] for model, rules in by_rule.items()}
    titles = {model: titled(model, run) for model, run in runs.items()}
    drawn = _shares(found, titles, wanted.path)
    paper = {} if wanted.quick else {model: INFERENCE[model] for model in found if model in INFERENCE}
    head, lines = _costs(by_rule, titles, paper)
    notes = [
        "flops, parameters: of the smaller network; sent: parameters of kept filters, of those of convolutions (the "
        "paper's sparsity ratio is of all parameters); bytes: of the last upload, of one of all filters, controls "
        "included.",
        f"latency: of the sliced network, batches of 32, on {device_name()}.",
        "Rows without a client are means. Smallest norms, every layer alike: what is trained, cut down to the same "
        "budget by a rule that asks no client and searches nothing; nobody sends that.",
        "kept back: accuracy on the few images that rewards are measured on, of the sub-model and of the whole one.",
        "own test: on the client's test images, of its whole model and of the sub-model as it was cut out; of both "
        "with the statistics of norms taken anew over the client's images; of both after training on these from "
        f"there, epochs: {TUNED}.",
        *told,
    ]
    numbers = {
        "device": device_name(),
        "models": {model: [_known(asdict(one)) for one in each] for model, each in found.items()},
        "other rules": {
            model: {rule: [_known(asdict(one)) for one in rules[rule]] for rule in rules if rule != "selected"}
            for model, rules in by_rule.items()
        },
        "paper": {name: dict(zip(("kept", "flops off", "at most"), said, strict=True)) for name, said in paper.items()},
        "not run": told,
    }
    table = listed(wanted, "sub-models of clients", head, lines, notes)
    return [drawn, note(wanted, numbers), table]


def _shares(found: Mapping[str, Sequence[SubModel]], titles: Mapping[str, str], path: Path) -> Path:
    """A panel for each network: what is left of it at clients, and on average."""
    means = {model: {share: _mean(each, share) for share in SHARES} for model, each in found.items()}
    figure, axes = pyplot().subplots(1, len(found), figsize=(4.6 * len(found) + 0.8, 3.3), squeeze=False, sharey=True)
    for (model, each), axis in zip(found.items(), axes[0], strict=True):
        axis.bar(SHARES, [100 * means[model][share] for share in SHARES], color=COLOURS[0], alpha=0.35, label="mean")
        for at, share in enumerate(SHARES):
            values = [100 * getattr(one, share) for one in each]
            axis.plot([at] * len(values), values, "_", color=COLOURS[0], markersize=11, label="" if at else "a client")
        axis.axhline(100, color="black", linewidth=0.8)
        axis.set(title=titles[model])
        axis.grid(axis="x", visible=False)
    axes[0, 0].set_ylabel("% of the whole network's")
    axes[0, 0].set_ylim(top=1.15 * axes[0, 0].get_ylim()[1])  # room for the legend
    axes[0, -1].legend(fontsize=8, loc="upper left", ncols=2)
    figure.tight_layout()
    return save(figure, path)


def _costs(
    by_rule: Mapping[str, Mapping[str, Sequence[SubModel]]],
    titles: Mapping[str, str],
    paper: Mapping[str, tuple[float, float, float]],
) -> tuple[list[str], list[list[str]]]:
    """(head, rows) of a table: each network by each rule, the paper's where it has one, each client."""
    head = ["", *(f"{share}, %" for share in SHARES), "most FLOPs off, %", "kept back, %", "whole, %"]
    head += ["own test, whole, %", "smaller, %", "norms anew: whole, %", "smaller, %"]
    head += ["trained on: whole, %", "smaller, %"]
    lines = []
    for model, rules in by_rule.items():
        for rule, ones in rules.items():
            most, right = 1 - min(one.flops for one in ones), [_mean(ones, name) for name in RIGHT]
            numbers = _percents([*(_mean(ones, share) for share in SHARES), most, *right])
            lines.append([f"**{titles[model]}**{CUT[rule]}", *numbers])
        if model in paper:
            kept, less, best = paper[model]
            theirs = {"flops": f"{100 - less:g}", "sent": f"{kept:g}"}
            shares = (theirs.get(share, "") for share in SHARES)
            lines.append([f"paper, {model}", *shares, f"{best:g}", *[""] * len(RIGHT)])
        for one in rules["selected"]:
            shares = _percents([getattr(one, share) for share in SHARES])
            lines.append([f"client {one.client}", *shares, "", *_percents([getattr(one, name) for name in RIGHT])])
    return head, lines


def _mean(each: Sequence[SubModel], share: str) -> float:
    """Over clients of which it is known."""
    values = [value for one in each if not math.isnan(value := getattr(one, share))]
    return sum(values) / len(values) if values else math.nan


def _percents(values: Sequence[float]) -> list[str]:
    return ["" if math.isnan(value) else f"{100 * value:.1f}" for value in values]


def _known(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no word for what is not a number."""
    return {name: None if math.isnan(value) else value for name, value in numbers.items()}


# ---- all of them -----------------------------------------------------------------------------------------------------
def _runs(table: str, rows: Sequence[str], networks: Sequence[str]) -> Callable[[Wanted], list[Cell]]:
    return lambda wanted: cells(wanted, table, rows, networks)


ACCURACY, NETWORKS = "spatl/accuracy", (*EVERY, *CNN)
FIGURES = [
    Figure(
        "spatl/figure4",
        "accuracy of clients' personal models over rounds and bytes",
        0,
        accuracy_over_rounds,
        runs=_runs(ACCURACY, METHODS, PANELS),
        columns=NETWORKS,
        **PROTOCOL,
    ),
    Figure(
        "spatl/figure5",
        "accuracy of every client, and its fairness",
        0,
        accuracy_of_clients,
        runs=_runs(ACCURACY, METHODS, (MODEL,)),
        columns=NETWORKS,
        **PROTOCOL,
    ),
    Figure(
        "spatl/figure6",
        "with and without gradient control, over rounds",
        0,
        gradient_control,
        runs=_runs("spatl/ablations", CONTROL, CONTROLLED),
        columns=tuple(EVERY),
        **PROTOCOL,
    ),
    Figure(
        "spatl/figure7",
        "the agent's reward over its updates",
        0,
        reward_over_updates,
        runs=reward_runs,
        columns=(*SEARCHED, *EVERY),
        **PROTOCOL,
    ),
    Figure(
        "spatl/submodels",
        "table 2: each client's sub-model against the whole network",
        0,
        submodels,
        runs=_runs(ACCURACY, ("spatl",), tuple(COLUMNS)),
        columns=NETWORKS,
        **PROTOCOL,
    ),
    Figure(
        "spatl/bytes",
        "table 1: rounds and bytes to 70 and 80 %",
        0,
        bytes_to_accuracy,
        runs=lambda wanted: cells(to_a_target(wanted), ACCURACY, METHODS, tuple(COLUMNS)),
        columns=NETWORKS,
        **PROTOCOL,
    ),
    Figure(
        "spatl/transfer",
        "a new predictor on new images, over frozen encoders",
        10_000,
        transfer,
        runs=transfer_runs,
        few=100,
        columns=tuple(name for name in EVERY if name.startswith("vgg11")),
        **OF_TRANSFER,
    ),
    Figure(
        "spatl/transfer_whole",
        "the same, where encoders train on",
        10_000,
        functools.partial(transfer, part="all"),
        runs=transfer_runs,
        few=100,
        columns=tuple(name for name in EVERY if name.startswith("vgg11")),
        **OF_TRANSFER,
    ),
]
