"""What is left at one client of a network without a fifth of its operations: by selector, and by what is done then.

    FEDLENS_DATA=... python benchmarks/submodels.py --seed 1            # a ResNet-20, about seven minutes of one core
    FEDLENS_DATA=... python benchmarks/submodels.py --paper --seed 1 --json results/data/submodels.json    # 20 minutes

The client has 4,000 images of CIFAR-10, its classes drawn from Dirichlet 0.25, and 1,000 test images of the same mix;
its network trains for 11 epochs. Columns: operations and parameters that are left; accuracy as it is cut out; with the
statistics of its norms taken anew over the client's images; after one epoch more. "silenced": filters that were not
kept are zero although the sub-model computes their channel. The agent has 70 episodes; "spend": what it takes beyond
the budget is given back; "settle": it judges sub-models with norms of their own.

`--paper`: agents search at the paper's cadence, 40 updates of 20 episodes, and rewards are of 1,000 images that the
client keeps back; all rows as sub-models are computed. Only those of one seed are rows to compare: they choose on the
same model. `--json` adds them to a file, with the mean reward of every update.

`--stand-in`: the same search at a ResNet18 that is not trained here, as in figure 7. It has the stand-in weights, and
Tiny-ImageNet's images at 32 pixels: 1,000 of the validation part give rewards, 1,000 others of it test, and norms are
taken anew over 4,000 that the weights have learned from. The seed draws them, and the agent; the network is the same.
What --model, --data, --images, --epochs and --episodes say does not count then.

Two seeds, one thread of an x86 CPU (whole networks 89.6 and 86.5; after one epoch more 89.6 and 85.1), norms anew:
  uniform, silenced 87.4 and 79.8; as it is computed 88.2 and 84.3
  by norm, silenced 86.6 and 82.5; as it is computed 88.8 and 86.2
  agent, silenced 86.8 and 76.6 (68 and 55 % of the operations); with spend and settle 89.2 and 85.9 (80 %)
In these one class is 86 and 76 % of the test images, in seeds 4 to 6 at most 39 %.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlens.core.errors import BadInput
from fedlens.core.files import write_atomic
from fedlens.core.network import Network
from fedlens.core.rng import key, seeded
from fedlens.core.tree import Tree
from fedlens.data import DATASETS
from fedlens.data.sources.photos import TinyImagenet
from fedlens.models import model_named
from fedlens.models.resnet import ResNet18
from fedlens.selection.agent import first_agent, situation
from fedlens.selection.pruning import Choice, Costs, Kept, ranked, settled, sliced
from fedlens.selection.search import search

BATCH, SETTLING, JUDGED = 64, 256, 200
SETTLED = 4000  # images that norms are taken anew over, beside the stand-in weights
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # the weights are of images with this mean and deviation
UPDATES, EPISODES = 40, 20  # of the paper's search; it begins to converge at so many updates (section 4.6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--data", default="cifar10", choices=DATASETS)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--epochs", type=int, nargs=2, default=(8, 3), help="at lr 0.02, then at 0.005")
    parser.add_argument("--episodes", type=int, nargs=2, default=(30, 10), help="of the first search and of four more")
    parser.add_argument("--paper", action="store_true", help="the paper's search, on images that are kept back")
    parser.add_argument("--stand-in", action="store_true", help="the same at a ResNet18 with the stand-in weights")
    parser.add_argument("--updates", type=int, default=UPDATES, help="of the paper's search")
    parser.add_argument("--plain", action="store_true", help="without the agent that spends and settles")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the rows to this file")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(asked.seed)
    try:
        task = pretrained(asked.seed) if asked.stand_in else trained_here(asked)
    except BadInput as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    net, mine, test = task.net, task.mine, task.test
    name, images = ("resnet18 stand-in", "tiny_imagenet") if asked.stand_in else (asked.model, asked.data)
    about = {"model": name, "data": images, "seed": asked.seed, "paper": asked.paper or asked.stand_in}
    if about["paper"]:
        about["updates"] = asked.updates
    tell({**about, "choice": "whole", "cut out": accuracy(net.module, test), **later(net.module, task)}, asked.json)
    weights = net.initial_weights()
    costs = Costs.of(net, mine[0][:1])
    layers = tuple(costs.graph.layers)
    choice = Choice(costs, layers, ranked(layers, weights))
    if about["paper"]:
        searched = by_paper(net, weights, choice, mine, task.kept_back, asked.seed, asked.updates, asked.plain)
    else:
        searched = ((*pair, {}) for pair in chosen(net, weights, choice, mine, asked.seed, asked.episodes))
    for name, kept, more in searched:
        raw, anew = sliced(net, weights, kept), settled(sliced(net, weights, kept), mine[0].split(BATCH))
        row = {
            "flops": costs.size("flops", kept),
            "parameters": costs.parameters(kept) / costs.parameters({}),
            "cut out": accuracy(raw, test),
            "norms anew": accuracy(anew, test),
            **later(anew, task),
        }
        tell({**about, "choice": name, **{key: round(value, 3) for key, value in row.items()}, **more}, asked.json)


@dataclass(frozen=True)
class Task:
    """A trained network, what its client trains on and keeps back for rewards, and test images."""

    net: Network
    mine: tuple[Tensor, Tensor]
    kept_back: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    trains: bool = True  # whether sub-models are also looked at after an epoch more


def trained_here(asked: argparse.Namespace) -> Task:
    images = client(asked.data, asked.seed, asked.images, asked.images // 4 if asked.paper else 0)
    with seeded(0):
        net = Network(model_named(asked.model).build(10, *images[0][0].shape[1:3]))
    for epochs, rate in zip(asked.epochs, (0.02, 0.005), strict=True):
        trained(net.module, images[0], epochs, rate)
    return Task(net, *images)


def pretrained(seed: int) -> Task:
    """A ResNet18 with the stand-in weights. Its norms are taken anew over images that it has learned from."""
    data = TinyImagenet(size=32).load()
    net = Network(ResNet18(weights="stand-in").build(len(data.classes), 3, 32))

    def part(rows: Tensor) -> tuple[Tensor, Tensor]:
        low, high = (torch.tensor(each).view(3, 1, 1) for each in IMAGENET)
        return (data.x[rows].float() / 255 - low) / high, data.y[rows]

    draw = torch.Generator().manual_seed(seed)
    held = data.test[torch.randperm(len(data.test), generator=draw)]
    mine = data.train[torch.randperm(len(data.train), generator=draw)[:SETTLED]]
    net.module.eval()
    return Task(net, part(mine), part(held[:1000]), part(held[1000:2000]), trains=False)


def later(module: Any, task: Task) -> dict[str, float]:
    """Accuracy of a copy after an epoch more, where its client trains."""
    if not task.trains:
        return {}
    return {"after an epoch": accuracy(trained(copy.deepcopy(module), task.mine, 1, 0.005), task.test)}


def tell(row: dict[str, Any], file: Path | None) -> None:
    """Print a row, and put it into the file in the place of an earlier one of the same choice."""
    print(json.dumps({key: value for key, value in row.items() if key != "rewards"}), flush=True)
    if file is not None:
        names = "model", "data", "seed", "paper", "updates", "choice"
        rows = json.loads(file.read_text()) if file.is_file() else []
        rows = [*(one for one in rows if [one.get(k) for k in names] != [row.get(k) for k in names]), row]
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, ("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n").encode())


def client(name: str, seed: int, images: int, kept_back: int) -> list[tuple[Tensor, Tensor]]:
    """What it trains on, what it keeps back for rewards, and its test images."""
    data, draw = DATASETS[name]().load(), np.random.default_rng(seed)
    mix = draw.dirichlet([0.25] * 10)

    def part(among: Tensor, count: int) -> tuple[Tensor, Tensor]:
        labels = data.y[among].numpy()
        of_class = [np.flatnonzero(labels == label) for label in range(10)]
        sizes = [min(len(rows), int(count * share)) for rows, share in zip(of_class, mix, strict=True)]
        rows = among[np.concatenate([draw.choice(r, n, replace=False) for r, n in zip(of_class, sizes, strict=True)])]
        return (data.x[rows].float() / 255 - 0.47) / 0.25, data.y[rows]

    whole, test = part(data.train, images + kept_back), part(data.test, images // 4)
    order = draw.permutation(len(whole[1])) if kept_back else np.arange(len(whole[1]))
    mine, held = order[: len(order) - kept_back], order[len(order) - kept_back :]
    return [(whole[0][mine], whole[1][mine]), (whole[0][held], whole[1][held]), test]


def trained(module: Any, mine: tuple[Tensor, Tensor], epochs: int, rate: float) -> Any:
    module.train().requires_grad_()
    rule = torch.optim.SGD(module.parameters(), rate, momentum=0.9)
    for rows in (rows for _ in range(epochs) for rows in torch.randperm(len(mine[1])).split(BATCH)):
        x = mine[0][rows]
        rule.zero_grad()
        F.cross_entropy(module(x.flip(3) if torch.rand(()) < 0.5 else x), mine[1][rows]).backward()
        rule.step()
    return module.eval()


@torch.no_grad()
def accuracy(module: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    module = module.to(memory_format=torch.channels_last)  # with small batches twice as fast as images of one plane
    parts = zip(test[0].split(50), test[1].split(50), strict=True)
    right = [(module(x.contiguous(memory_format=torch.channels_last)).argmax(1) == y).sum() for x, y in parts]
    return 100 * int(torch.stack(right).sum()) / len(test[1])


def chosen(net: Network, weights: Tree, choice: Choice, mine: Any, seed: int, episodes: Sequence[int]):
    """(name, filters) by each selector."""
    costs = choice.costs
    for name, kept in (("uniform", choice.uniform()), ("by norm", choice.by_norm(weights))):
        yield f"{name}, silenced", kept
        yield name, costs.computed(kept)
    seen, rows = situation(costs, choice.layers), torch.randperm(len(mine[1]))[:JUDGED]
    for silenced, spend, settle in (
        (True, False, False),
        (False, False, False),
        (False, True, False),
        (False, True, True),
    ):
        judge = judged(net, weights, costs, mine, (mine[0][rows], mine[1][rows]), silenced, settle)
        one = Choice(costs, choice.layers, choice.order, spend=spend)
        found = search(seen, first_agent(seed, seen), one, judge, episodes[0], seed)
        for more in range(1, 5):
            found = search(seen, found.agent, one, judge, episodes[1], seed + more)
        words = [word for word, on in (("silenced", silenced), ("spend", spend), ("settle", settle)) if on]
        yield ", ".join(["agent", *words]), found.kept if silenced else costs.computed(found.kept)


def judged(net: Network, weights: Tree, costs: Costs, mine: Any, images: Any, silenced: bool, settle: bool):
    """What rewards are: the accuracy of each sub-model on these images."""

    def judge(tried: Sequence[Kept]) -> list[float]:
        found = []
        for kept in tried:
            module = sliced(net, weights, kept if silenced else costs.computed(kept))
            if settle:
                settled(module, [mine[0][:: -(-len(mine[1]) // SETTLING)]])
            found.append(accuracy(module, images) / 100)
        return found

    return judge


def by_paper(
    net: Network, weights: Tree, choice: Choice, mine: Any, images: Any, seed: int, updates: int, plain: bool
) -> Iterator[tuple[str, Kept, dict[str, Any]]]:
    """(name, filters, rewards): two rules, the paper's agent, and one with both settings of the preset `smaller`.

    An agent's filters are the best of its last search, the episodes after its last update but one, as in a federation.
    """
    costs, seen = choice.costs, situation(choice.costs, choice.layers)
    yield "uniform", costs.computed(choice.uniform()), {}
    yield "by norm", costs.computed(choice.by_norm(weights)), {}
    for name, both in (("agent", False), ("agent, spend, settle", True))[: 1 if plain else 2]:
        judge = judged(net, weights, costs, mine, images, False, both)
        one, agent, rewards = Choice(costs, choice.layers, choice.order, spend=both), first_agent(seed, seen), []
        kept: Kept = {}
        for update in range(updates):
            found = search(seen, agent, one, judge, EPISODES, key(seed, "search", update))
            agent, kept = found.agent, found.kept
            rewards.append(round(found.reward, 2))
        yield name, costs.computed(kept), {"rewards": rewards}


if __name__ == "__main__":
    main()
