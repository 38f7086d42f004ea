"""The search of one client in one round: the agent tries sub-models, and learns from how well they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.rng import key, normal
from ..core.tree import Tree
from . import agent as ppo
from .agent import SPREAD, Experience, Learns, Situation
from .pruning import Choice, Kept

WAVE = 20  # episodes between two updates
STEPS = 10  # of an episode at most
MOST = 0.9  # of a layer that one step can take away
MISSED = -100.0  # the reward of an episode that ends over budget

Accuracies = Callable[[Sequence[Kept]], Sequence[float]]


class SearchResult(NamedTuple):
    kept: dict[str, int]
    agent: Tree
    accuracy: float  # of the sub-model that is kept; not a number if no episode met the budget
    reward: float  # mean over episodes


def search(
    seen: Situation,
    agent: Tree,
    choice: Choice,
    judge: Accuracies,
    episodes: int,
    seed: int,
    learns: Learns = "all",
) -> SearchResult:
    """Yu et al., 2022, algorithm 1. Within the budget the most accurate sub-model wins, then the smaller one."""
    best: tuple[tuple[float, float], dict[str, int]] | None = None
    rewards: list[float] = []
    last: list[float] = []
    for wave, begin in enumerate(range(0, episodes, WAVE)):
        tried = explored(seen, agent, choice, min(WAVE, episodes - begin), key(seed, "wave", wave))
        met = [each for each in tried if each.met]
        for each, accuracy in zip(met, judge([each.kept for each in met]) if met else [], strict=True):
            rank = accuracy, -choice.costs.sent(each.kept)
            best = max(best, (rank, each.kept), key=lambda pair: pair[0]) if best else (rank, each.kept)
            each.rewards[-1] = 100 * accuracy
        rewards += [each.rewards[-1] for each in tried]
        last = tried[-1].ratios
        agent = ppo.updated(agent, seen, remembered(tried), learns=learns)
    kept = best[1] if best else choice.projected(last)
    return SearchResult(kept, agent, best[0][0] if best else torch.nan, sum(rewards) / len(rewards))


class Episode:
    """Ratios that shrink from one until the budget is met."""

    def __init__(self, layers: int):
        self.ratios = [1.0] * layers
        self.states: list[Tensor] = []
        self.actions: list[Tensor] = []
        self.likely: list[Tensor] = []
        self.rewards: list[float] = []
        self.kept: dict[str, int] = {}
        self.met = False

    @property
    def over(self) -> bool:
        return self.met or len(self.states) == STEPS

    def step(self, state: Tensor, action: Tensor, likely: Tensor, choice: Choice) -> None:
        self.states.append(state)
        self.actions.append(action)
        self.likely.append(likely)
        taken = action.clamp(0, MOST).tolist()
        self.ratios = [min(1.0, max(choice.floor, r * (1 - a))) for r, a in zip(self.ratios, taken, strict=True)]
        self.kept = choice.kept(self.ratios)
        self.met = choice.fits(self.kept)
        if self.met and choice.spend:
            self.kept = choice.spent(self.ratios)
        self.rewards.append(MISSED if self.over and not self.met else 0.0)


@torch.no_grad()
def explored(seen: Situation, agent: Tree, choice: Choice, count: int, seed: int) -> list[Episode]:
    """Episodes side by side: one look of the actor serves all that still go on."""
    episodes = [Episode(len(choice.layers)) for _ in range(count)]
    for step in range(STEPS):
        going = [each for each in episodes if not each.over]
        if not going:
            break
        states = seen.states(torch.tensor([each.ratios for each in going]))
        middle = ppo.actions(agent.weights, seen, states)
        drawn = middle + SPREAD * normal(torch.tensor(key(seed, "actions", step)), *middle.shape)
        likely = ppo.log_probability(middle, drawn)
        for at, each in enumerate(going):
            each.step(states[at], drawn[at], likely[at], choice)
    return episodes


def remembered(episodes: Sequence[Episode]) -> Experience:
    """All steps of all episodes in a row."""
    return Experience(
        torch.stack([state for each in episodes for state in each.states]),
        torch.stack([action for each in episodes for action in each.actions]),
        torch.stack([likely for each in episodes for likely in each.likely]),
        torch.tensor([value for each in episodes for value in ppo.returns(each.rewards)]),
    )
