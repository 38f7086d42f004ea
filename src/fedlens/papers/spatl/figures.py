"""SPATL's figures 4 to 7, its tables of bytes and of sub-models, and transfer to new images, from our own runs.

Runs of ResNet-20 are carried out first where they are missing; of other models those are shown that a table has.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ... import config
from ...algorithms.spatl import SPATL, accuracies
from ...core.batches import Shard
from ...core.errors import BadInput
from ...core.files import write_atomic
from ...core.rng import generator, key
from ...core.tree import Tree
from ...engines.sequential import owned
from ...plots.style import COLOURS, pyplot, save
from ...report.client_figures import accuracy_bars, grouped_bars
from ...runs.folder import RunFolder
from ...runs.opened import OpenedRun
from ...runs.read import bytes_until, client_evaluation, fairness
from ...selection.agent import Learns, Situation, first_agent, situation
from ...selection.pruning import Choice, Costs, ranked
from ...selection.search import WAVE, Accuracies, search
from ...selection.sub_models import SubModel, device_name
from ..figure_runs import SEED, Figure, finished, note, out_of, table_named
from ..table import gather
from .tables import (
    INFERENCE,
    TO_80,
    TRANSFER,
    bytes_to,
    judged_alone,
    looks,
    sub_models_by,
    tables,
)

MODEL = "resnet20"  # whose runs are carried out
METHODS = ("spatl", "spatl_salient", "scaffold", "fedavg", "fedprox", "fednova")
LINES: dict[str, str] = dict(zip((*METHODS, "no_control"), COLOURS, strict=True))
TARGETS = (0.7, 0.8)
UPDATES = 60  # of the agent in figure 7; the paper's converges at about 40
EPOCHS = 50  # on new images
RIGHT = ("accuracy", "dense", "own", "smaller", "own_settled", "settled", "own_tuned", "tuned")
SHARES = [field.name for field in fields(SubModel) if field.name not in ("client", *RIGHT)]
TUNED = 1  # epochs of a sub-model at its client
CUT = {"selected": "", "norms": ", smallest norms left out", "alike": ", every layer alike"}


# ---- over rounds -----------------------------------------------------------------------------------------------------
def accuracy_over_rounds(words: Sequence[str], images: int, path: Path) -> list[Path]:
    """Figure 4: mean accuracy of clients' own models over rounds and over bytes, by method."""
    return _curves("spatl/accuracy", METHODS, words, path)


def gradient_control(words: Sequence[str], images: int, path: Path) -> list[Path]:
    """Figure 6: SPATL with and without control variates."""
    return _curves("spatl/ablations", ("spatl", "no_control"), words, path)


def _curves(table: str, rows: Sequence[str], words: Sequence[str], path: Path) -> list[Path]:
    runs = shown(table, rows, words, path)
    found = {model: {row: curve(RunFolder(run)) for row, run in by.items()} for model, by in runs.items()}
    size = 10, 3.3 * len(found)
    figure, axes = pyplot().subplots(len(found), 2, figsize=size, squeeze=False, sharey="row")
    for (model, by), (over_rounds, over_bytes) in zip(found.items(), axes, strict=True):
        most = max(line["bytes"][-1] for line in by.values())
        unit, in_words = (1e9, "gigabytes") if most >= 1e9 else (1e6, "megabytes")
        for row, line in by.items():
            style = {"color": LINES[row], "linewidth": 1.6, "markersize": 3, "label": row}
            mark = "o-" if len(line["round"]) < 2 else "-"  # one look alone would not be seen
            percents = [100 * value for value in line["accuracy"]]
            over_rounds.plot(line["round"], percents, mark, **style)
            over_bytes.plot([count / unit for count in line["bytes"]], percents, mark, **style)
        over_rounds.set(xlabel="rounds", ylabel="mean accuracy of clients, %", title=called(runs[model]))
        over_rounds.xaxis.get_major_locator().set_params(integer=True)
        over_bytes.set(xlabel=f"{in_words} of all clients, up and down")
        over_bytes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    return [save(figure, path), note(path, words, {"curves": found})]


def curve(folder: RunFolder) -> dict[str, list[Any]]:
    """Mean accuracy of clients' own models before they train, after each round; and bytes until then."""
    seen = looks(folder)
    if not seen:
        raise BadInput(f"{folder.path} was not looked at: leave evaluate.personal=before and evaluate.personal_every=1")
    at, accuracies = zip(*seen.values(), strict=True)
    return {"round": [*seen], "accuracy": [*accuracies], "bytes": bytes_until(folder, at)}


def bytes_to_accuracy(words: Sequence[str], images: int, path: Path) -> list[Path]:
    """Table 1: rounds and bytes until clients' own models reach 70 and 80 %."""
    found: dict[str, dict[str, Any]] = {}
    head = ["", *(f"{what} to {100 * t:.0f} %" for t in TARGETS for what in ("rounds", "GB")), "paper's rounds", "GB"]
    lines = []
    for model, runs in shown("spatl/accuracy", METHODS, words, path).items():
        lines += [[f"**{called(runs)}**", *[""] * (len(head) - 1)]]
        for row, run in runs.items():
            folder = RunFolder(run)
            last = curve(folder)["round"][-1]
            reached = {f"{target:g}": bytes_to(folder, target) for target in TARGETS}
            paper = TO_80.get((row, model))
            found.setdefault(model, {})[row] = {"rounds": last, "reached": reached, "paper, 80 %": paper}
            ours = [
                text
                for at in reached.values()
                for text in ((f"{at['round']}", f"{at['bytes'] / 1e9:.4g}") if at else (f"> {last}", ""))
            ]
            theirs = [str(paper[0] or "> 200"), f"{paper[1]:g}"] if paper else ["", ""]
            lines.append([row, *ours, *theirs])
    notes = [
        "Accuracy: mean over clients of their own models on their own test images, before local training.",
        "Bytes: of all clients, up and down, headers included. The paper's are for 80 %, of 200 rounds where its "
        "method never gets there; it counts one way for VGG-11 and charges FedNova twice.",
    ]
    return [note(path, words, {"models": found}), listed(path, "bytes until clients reach", words, head, lines, notes)]


# ---- single clients --------------------------------------------------------------------------------------------------
def accuracy_of_clients(words: Sequence[str], images: int, path: Path) -> list[Path]:
    """Figure 5: accuracy of every client by method, and how fair that is."""
    runs = finished(table_named(tables(), "spatl/accuracy"), METHODS, MODEL, words, path)
    by_client = {row: client_evaluation(RunFolder(run))[1] for row, run in runs.items()}
    fair = {row: fairness(list(by.values())) for row, by in by_client.items()}
    return [accuracy_bars(by_client, fair, path), note(path, words, {"accuracy": by_client, "fairness": fair})]


def submodels(words: Sequence[str], images: int, path: Path) -> list[Path]:
    """Table 2: what each client's sub-model costs, of the whole network."""
    runs = shown("spatl/accuracy", ("spatl",), words, path)
    by_rule = {model: sub_models_by(run["spatl"], epochs=TUNED) for model, run in runs.items()}
    found = {model: rules["selected"] for model, rules in by_rule.items()}
    means = {model: {share: _mean(each, share) for share in SHARES} for model, each in found.items()}
    figure, axes = pyplot().subplots(1, len(found), figsize=(4.6 * len(found) + 0.8, 3.3), squeeze=False, sharey=True)
    for (model, each), axis in zip(found.items(), axes[0], strict=True):
        axis.bar(SHARES, [100 * means[model][share] for share in SHARES], color=COLOURS[0], alpha=0.35, label="mean")
        for at, share in enumerate(SHARES):
            values = [100 * getattr(one, share) for one in each]
            axis.plot([at] * len(values), values, "_", color=COLOURS[0], markersize=11, label="" if at else "a client")
        axis.axhline(100, color="black", linewidth=0.8)
        axis.set(title=called(runs[model]))
        axis.grid(axis="x", visible=False)
    axes[0, 0].set_ylabel("% of the whole network's")
    axes[0, 0].set_ylim(top=1.15 * axes[0, 0].get_ylim()[1])  # room for the legend
    axes[0, -1].legend(fontsize=8, loc="upper left", ncols=2)
    figure.tight_layout()
    head = ["", *(f"{share}, %" for share in SHARES), "most FLOPs off, %", "kept back, %", "whole, %"]
    head += ["own test, whole, %", "smaller, %", "norms anew: whole, %", "smaller, %"]
    head += ["trained on: whole, %", "smaller, %"]
    lines = []
    for model, each in found.items():
        for rule, ones in by_rule[model].items():
            most, right = 1 - min(one.flops for one in ones), [_mean(ones, name) for name in RIGHT]
            numbers = _percents([*(_mean(ones, share) for share in SHARES), most, *right])
            lines.append([f"**{called(runs[model])}**{CUT[rule]}", *numbers])
        kept, less, best = INFERENCE[model]
        theirs = {"flops": f"{100 - less:g}", "sent": f"{kept:g}"}
        lines.append([f"paper, {model}", *(theirs.get(share, "") for share in SHARES), f"{best:g}", *[""] * len(RIGHT)])
        for one in each:
            shares = _percents([getattr(one, share) for share in SHARES])
            lines.append([f"client {one.client}", *shares, "", *_percents([getattr(one, name) for name in RIGHT])])
    notes = [
        "flops, parameters: of the smaller network; sent: parameters of kept filters, of those of convolutions (the "
        "paper's sparsity ratio); bytes: of the last upload, of one of all filters, controls included.",
        f"latency: of the sliced network, batches of 32, on {device_name()}.",
        "Rows without a client are means. Smallest norms, every layer alike: what is trained, cut down to the same "
        "budget by a rule that asks no client and searches nothing; nobody sends that.",
        "kept back: accuracy on the few images that rewards are measured on, of the sub-model and of the whole one.",
        "own test: on the client's test images, of its whole model and of the sub-model as it was cut out; of both "
        "with the statistics of norms taken anew over the client's images; of both after training on these from "
        f"there, epochs: {TUNED}.",
    ]
    numbers = {
        "device": device_name(),
        "models": {model: [_known(asdict(one)) for one in each] for model, each in found.items()},
        "other rules": {
            model: {rule: [_known(asdict(one)) for one in rules[rule]] for rule in rules if rule != "selected"}
            for model, rules in by_rule.items()
        },
        "paper": {model: dict(zip(("kept", "flops off", "at most"), INFERENCE[model], strict=True)) for model in found},
    }
    table = listed(path, "sub-models of clients", words, head, lines, notes)
    return [save(figure, path), note(path, words, numbers), table]


def _mean(each: Sequence[SubModel], share: str) -> float:
    """Over clients of which it is known."""
    values = [value for one in each if not math.isnan(value := getattr(one, share))]
    return sum(values) / len(values) if values else math.nan


def _percents(values: Sequence[float]) -> list[str]:
    return ["" if math.isnan(value) else f"{100 * value:.1f}" for value in values]


def _known(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no word for what is not a number."""
    return {name: None if math.isnan(value) else value for name, value in numbers.items()}


# ---- the agent -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Selection:
    """What an agent is asked at one client: filters of its model, judged on images that it keeps back."""

    client: int
    seen: Situation
    choice: Choice
    judge: Accuracies
    images: int
    learns: Learns

    @classmethod
    def of(cls, run: OpenedRun) -> Selection:
        """At the client that keeps back most."""
        algorithm, federation = run.experiment.algorithm, run.federation
        if not isinstance(algorithm, SPATL) or algorithm.selector != "rl":
            raise BadInput(f"{run.folder.path} has no agents: leave algorithm.selector=rl")
        stage, _, _ = run.experiment.timetable()[-1]
        held = {
            client: Shard(federation.data, owned(stage, client, mine)[1]) for client, mine in federation.train.items()
        }
        client = max(held, key=lambda number: (len(held[number]), -number))
        part, net, weights = held[client], run.net, run.model(client)
        layers = algorithm.layers(net)
        costs = Costs.of(net, part.x[:1])
        shape = algorithm.constraint, algorithm.budget, algorithm.keep_floor, algorithm.spend
        choice = Choice(costs, layers, ranked(layers, weights), *shape)

        mine = Shard(federation.data, owned(stage, client, federation.train[client])[0])
        some = algorithm.settling(mine, len(part), algorithm.episodes)

        def judge(tried):
            return accuracies(net, weights, tried, part, some)

        return cls(client, situation(costs, layers), choice.feasible(), judge, len(part), algorithm.agent_learns)

    def rewards(self, agent: Tree, updates: int, seed: int) -> list[float]:
        """Mean reward of the episodes that each update learns from."""
        found = []
        for update in range(updates):
            seeded = key(seed, "update", update)
            wave = search(self.seen, agent, self.choice, self.judge, WAVE, seeded, self.learns)
            agent = wave.agent
            found.append(wave.reward)
        return found


def reward_over_updates(words: Sequence[str], images: int, path: Path) -> list[Path]:
    """Figure 7: the reward of an agent that knows nothing yet, and of the one that its client has after all rounds."""
    run = OpenedRun.open(finished(table_named(tables(), "spatl/accuracy"), ("spatl",), MODEL, words, path)["spatl"])
    task, last = Selection.of(run), run.newest().round
    memory = run.folder.client_memories(last)[task.client]
    agents = {"a new agent": first_agent(key(SEED, "agent"), task.seen), f"after {last} rounds": memory.agent}
    with run.at_work():
        found = {name: task.rewards(agent, UPDATES, SEED) for name, agent in agents.items()}
        uniform, whole = (100 * task.judge([kept])[0] for kept in (task.choice.uniform(), {}))
    figure, axis = pyplot().subplots(figsize=(6.5, 3.5))
    for (name, rewards), colour in zip(found.items(), COLOURS, strict=False):
        axis.plot(range(UPDATES), rewards, color=colour, linewidth=1.6, label=name)
    axis.axhline(whole, color="black", linewidth=1, label="the whole network")
    axis.axhline(uniform, color="black", linewidth=1, linestyle=":", label="the same share of every layer")
    about = f"client {task.client}, {task.images} images it keeps back"
    axis.set(xlabel="updates of the agent", ylabel=f"reward, mean of {WAVE} episodes", title=about)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(fontsize=8)
    numbers = {"client": task.client, "images": task.images, "rewards": found, "whole": whole, "uniform": uniform}
    return [save(figure, path), note(path, words, numbers)]


# ---- transfer --------------------------------------------------------------------------------------------------------
Part = Literal["head", "all"]


def transfer(words: Sequence[str], images: int, path: Path, *, part: Part = "head") -> list[Path]:
    """Section 4.5: encoders meet images that no client had, with a new predictor; `part` of the network trains."""
    grid = table_named(tables(), "spatl/encoders")
    model = next(iter(grid.columns))
    runs = {row: OpenedRun.open(run) for row, run in finished(grid, tuple(grid.rows), model, words, path).items()}
    before = {row: 100 * fairness([*client_evaluation(run.folder)[1].values()])["mean"] for row, run in runs.items()}
    new = {row: 100 * transferred(run, images, part) for row, run in runs.items()}
    new["scratch"] = 100 * transferred(runs["spatl"], images, "all", encoder=Tree())
    trained = "the predictor" if part == "head" else "everything"
    figure, axis = pyplot().subplots(figsize=(7, 3.4))
    grouped_bars(axis, {"clients, on their own test images": before, f"new images, {trained} trained": new})
    axis.set_ylabel("accuracy, % (axis cut)")
    counts = dict(zip(("training", "test"), map(len, new_images(runs["spatl"], images)), strict=True))
    paper = dict(zip(("clients", "new images"), TRANSFER, strict=True))
    numbers = {"images": counts, "epochs": EPOCHS, "part": part, "clients": before, "new images": new, "paper": paper}
    lines = [[row, *(f"{by[row]:.2f}" if row in by else "" for by in (before, new))] for row in new]
    lines.append(["paper, spatl", *(f"{value:g}" for value in TRANSFER)])
    notes = [
        f"New images: no client's; {counts['training']:,} to train on, {counts['test']:,} to judge, {EPOCHS} epochs of "
        f"{trained} by the clients' own rule. The last epoch counts.",
        "scratch: the whole network, trained on the new images alone.",
    ]
    table = listed(path, "encoders on new images, accuracy in %", words, ["", "clients", "new images"], lines, notes)
    return [save(figure, path), note(path, words, numbers), table]


def transferred(run: OpenedRun, images: int, part: Part, *, encoder: Tree | None = None) -> float:
    """Accuracy on new images of a run's encoder under a predictor that nothing has seen before."""
    experiment, net = run.experiment, run.net
    train, test = new_images(run, images)
    # Another draw than the clients' first weights: an encoder that was trained beside those has grown towards them.
    device = experiment.execution.device
    fresh = replace(experiment, seed=key(experiment.seed, "transfer")).network(run.images).to(device)
    shared = run.newest().state.model if encoder is None else encoder
    body = shared.select(lambda name: name not in net.head).map(lambda leaf: leaf.to(device))
    seed = key(experiment.seed, "transfer")
    return judged_alone(run, net, fresh.initial_weights() | body, (train, test), seed, EPOCHS, part)


def new_images(run: OpenedRun, images: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Nine tenths and one tenth of so many test images, none of which any client has."""
    federation = run.federation
    pool = federation.pool
    theirs = torch.cat([*federation.train.values(), *federation.test.values()])
    if torch.isin(pool, theirs).any():
        raise BadInput("spatl/transfer needs images that no client has: leave partition.test=holdout")
    order = torch.randperm(len(pool), generator=generator(key(run.experiment.seed, "new images")))[:images]
    if len(order) < 10:
        raise BadInput(f"spatl/transfer needs 10 new images or more, but has {len(order)}: raise --images")
    new = pool[order.to(pool.device)]
    return new[: 9 * len(new) // 10], new[9 * len(new) // 10 :]


FIGURES = [
    Figure("spatl/figure4", "accuracy of clients' own models over rounds and bytes", 0, accuracy_over_rounds),
    Figure("spatl/figure5", "accuracy of every client, and its fairness", 0, accuracy_of_clients),
    Figure("spatl/figure6", "with and without gradient control, over rounds", 0, gradient_control),
    Figure("spatl/figure7", "the agent's reward over its updates", 0, reward_over_updates),
    Figure("spatl/submodels", "table 2: each client's sub-model against the whole network", 0, submodels),
    Figure("spatl/bytes", "table 1: rounds and bytes to 70 and 80 %", 0, bytes_to_accuracy),
    Figure("spatl/transfer", "a new predictor on new images, over frozen encoders", 10_000, transfer),
    Figure(
        "spatl/transfer_whole",
        "the same, where encoders train on",
        10_000,
        functools.partial(transfer, part="all"),
    ),
]


# ---- runs and tables -------------------------------------------------------------------------------------------------
def shown(table: str, rows: Sequence[str], words: Sequence[str], path: Path) -> dict[str, dict[str, Path]]:
    """Folders of runs by model and row: those of MODEL, run where they are missing; of other models what there is."""
    grid, out = table_named(tables(), table), out_of(path)
    found = {MODEL: finished(grid, rows, MODEL, words, path)}
    done = gather(grid, out, words).done
    for model in grid.columns:
        there = {row: out / done[row, model][SEED].run for row in rows if SEED in done.get((row, model), {})}
        if there and model != MODEL:
            found[model] = there
    return found


def called(runs: Mapping[str, Path]) -> str:
    """The model of these runs, which the user may have changed."""
    return config.to_dict(config.read(RunFolder(next(iter(runs.values()))).config).model)["is"]


def listed(
    path: Path,
    about: str,
    words: Sequence[str],
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
) -> Path:
    """A table in Markdown, beside the numbers."""
    lines = [f"# spatl/{path.name}: {about}", "", f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    changes = " ".join(word for word in words if config.affects_results(word.partition("=")[0]))
    changed = f"Changed from the paper's protocol: `{changes}`." if changes else "The paper's protocol."
    lines += ["", *(f"- {each}" for each in (*notes, changed, f"Seed {SEED}."))]
    beside = path.with_name(f"{path.name}.md")
    write_atomic(beside, ("\n".join(lines) + "\n").encode())
    return beside
