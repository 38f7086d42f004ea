"""SPATL's figure 7: what an agent's search is worth, update by update, beside selections that search nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...algorithms.spatl import SPATL, accuracies
from ...core.batches import Shard
from ...core.errors import BadInput
from ...core.rng import key
from ...core.tree import Tree
from ...engines.sequential import owned
from ...plots.style import COLOURS, caption, pyplot, save
from ...runs.grid import Cell
from ...runs.opened import OpenedRun
from ...selection.agent import Learns, Situation, first_agent, situation
from ...selection.pruning import Choice, Costs, ranked
from ...selection.search import WAVE, Accuracies, search
from ..figure_runs import SEED, Wanted, at_hand, finished, note
from .shown import called
from .tables import SEARCHED, tables

NETWORKS = tuple(SEARCHED)  # the paper's
UPDATES = 60  # of the agent; the paper's converges at about 40
FEW = 3  # of quick mode


@dataclass(frozen=True)
class Selection:
    """What an agent is asked at one client: filters of its model, judged on images that it keeps back."""

    client: int
    seen: Situation
    choice: Choice
    judge: Accuracies
    images: int
    learns: Learns
    weights: Tree

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

        seen = situation(costs, layers)
        return cls(client, seen, choice.feasible(), judge, len(part), algorithm.agent_learns, weights)

    def rewards(self, agent: Tree, updates: int, seed: int) -> list[float]:
        """Mean reward of the episodes that each update learns from."""
        found = []
        for update in range(updates):
            seeded = key(seed, "update", update)
            wave = search(self.seen, agent, self.choice, self.judge, WAVE, seeded, self.learns)
            agent = wave.agent
            found.append(wave.reward)
        return found


def reward_runs(wanted: Wanted) -> list[Cell]:
    """The run of each network that was asked for."""
    grid = wanted.table(tables(), "spatl/agents")
    return grid.cells(("spatl",), wanted.chosen([*grid.columns], NETWORKS), wanted.words)


def reward_over_updates(wanted: Wanted) -> list[Path]:
    """Figure 7: the reward of an agent that knows nothing yet, and of the one that its client has after all rounds."""
    grid = wanted.table(tables(), "spatl/agents")
    networks, told = at_hand(wanted, grid, ("spatl",), wanted.chosen([*grid.columns], NETWORKS))
    updates = FEW if wanted.quick else UPDATES
    found = {}
    for network in networks:
        run = OpenedRun.open(finished(wanted, grid, ("spatl",), network)["spatl"])
        found[network] = {"model": called({"spatl": run.folder.path}), **searched(run, updates)}
    size = 6.5 * len(found), 3.6
    figure, axes = pyplot().subplots(1, len(found), figsize=size, squeeze=False)
    for axis, (network, numbers) in zip(axes[0], found.items(), strict=True):
        _rewards(axis, network, numbers)
    axes[0, 0].set_ylabel(f"reward (accuracy, %), mean of {WAVE} episodes", fontsize=9)
    axes[0, -1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    if told:
        caption(figure, " ".join(told))
    return [save(figure, wanted.path), note(wanted, {"networks": found, "not run": told})]


def searched(run: OpenedRun, updates: int) -> dict[str, Any]:
    """Rewards over updates of a new agent and of the client's own, and of what needs no agent, in %."""
    task, last = Selection.of(run), run.newest().round
    memory = run.folder.client_memories(last)[task.client]
    agents = {"a new agent": first_agent(key(SEED, "agent"), task.seen), f"after {last} rounds": memory.agent}
    with run.at_work():
        rewards = {name: task.rewards(agent, updates, SEED) for name, agent in agents.items()}
        without = (task.choice.uniform(), task.choice.by_norm(task.weights), {})
        uniform, norms, whole = (100 * task.judge([kept])[0] for kept in without)
    about = {"client": task.client, "images": task.images, "updates": updates}
    return {**about, "rewards": rewards, "whole": whole, "uniform": uniform, "norms": norms}


def _rewards(axis: Any, network: str, numbers: Mapping[str, Any]) -> None:
    for (name, rewards), colour in zip(numbers["rewards"].items(), COLOURS, strict=False):
        axis.plot(range(len(rewards)), rewards, color=colour, linewidth=1.6, label=name)
    for what, style, label in (  # they may have the same height: each shows through the next
        ("whole", {"linestyle": "-", "color": "0.8", "linewidth": 5}, "the whole network"),
        ("norms", {"linestyle": "--", "color": COLOURS[2], "linewidth": 2.5}, "smallest norms left out"),
        ("uniform", {"linestyle": ":", "color": "black", "linewidth": 1.2}, "the same share of every layer"),
    ):
        axis.axhline(numbers[what], label=label, **style, zorder=1)
    named = network if network == numbers["model"] else f"{network} (here {numbers['model']})"
    about = f"{named}: client {numbers['client']}, {numbers['images']} images it keeps back"
    axis.set(xlabel="updates of the agent")
    axis.set_title(about, fontsize=10)
    axis.xaxis.get_major_locator().set_params(integer=True)
