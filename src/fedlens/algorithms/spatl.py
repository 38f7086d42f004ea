from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Gt, Le
from torch import Tensor

from ..core.algorithm import Algorithm, Client
from ..core.batches import Shard, plan
from ..core.errors import BadInput
from ..core.evaluate import pieces
from ..core.fields import Count, NonNegative, Number
from ..core.network import Network
from ..core.objective import WEIGHTINGS
from ..core.rng import generator, key
from ..core.tree import Tree, grad, mean
from ..selection.agent import Learns, first_agent, pretrained_agent, situation
from ..selection.graph import Layer, layer_graph
from ..selection.pruning import (
    Choice,
    Constraint,
    Costs,
    Kept,
    every,
    gathered,
    masked,
    packed,
    ranked,
    row_indices,
    scattered,
    unpacked,
)
from ..selection.search import search
from ..selection.sub_models import BATCH, RULES, device_name, sub_models_by
from .scaffold import uneven

Ratio = Annotated[float, Gt(0), Le(1)]
Selector = Literal["rl", "uniform", "l2_global", "random", "all"]
Private = Literal["predictor", "predictor_and_stem", "as_released", "none"]

_ADAPTED = 64  # examples a step when a predictor is adapted
_SETTLING = 256  # examples at most that statistics of norms are taken anew over
_STEP = 2.5  # looks at an image cost what a training step on it does: three by count, less by the clock


@dataclass(frozen=True)
class SPATL(Algorithm):
    """Yu et al., 2022: a shared encoder under control variates, a predictor of one's own, and what matters is sent.

    After local training an agent tries sub-models of the encoder and sends the filters of the best one. Clients that
    never took part train their predictor on the frozen encoder when they are evaluated.

    down: model, control; up: kept, delta, control, weight; memory: private, joined, control, selection, agent

    kept has one bit a filter; delta holds the rows of kept filters, with their norms' entries, and all else whole.

    Differs from the paper where its equations cannot be meant. The server goes towards the clients, by a step of one.
    Controls are added to the gradient and divide the local path by its reach, not by epochs. The budget is of
    operations that the smaller network really does. Rewards are accuracies of that network on images that the client
    keeps back and never trains on. A channel that another layer of a sum keeps is computed anyway: it is not silenced
    there, though it is not sent. A client that kept back images of one class alone takes `uniform`.

    The paper's rewards are of a validation set that it also reports accuracy on. It does not give the size of its
    sub-models: the budget is the released code's. By default the operations of a search of 30 episodes are about those
    of a local epoch at most. The preset paper searches longer, on more images. `l2_global` goes by the root mean square
    of a filter's weights: by plain norms, layers whose filters have more inputs would win.

    The preset official is the released code with controls (`--alg scaffold` there). What its agent selects never
    reaches the server: all is sent. A residual network's stem stays at the client. A hundredth of the controls acts,
    after each step; in the first version (`--alg gradient_control`) all of it, control_scale=1. `--alg spatl` has none
    and lowers the rate by 1 % a round: control_scale=0 with local.schedule=exponential. Not taken over: controls that
    begin as random networks and cover norms' statistics; rewards and accuracies on the whole test set.
    """

    selector: Selector = "rl"  # an agent, the same share of all layers, the largest norms anywhere, chance, all filters
    constraint: Constraint = "flops"  # of the sub-model; params: of the filters that are sent
    budget: Ratio = 0.8  # the share of it that is left
    keep_floor: Ratio = 0.1  # the least share of a layer's filters
    spend: bool = False  # prune less until the budget is used exactly; one agent step overshoots
    settle: bool = False  # evaluate sub-models with BatchNorm statistics re-estimated over at most 256 images
    private: Private = "predictor"  # as_released: and the stem of a residual network; none: no transfer
    control_scale: NonNegative = 1.0  # 0: no gradient control
    control_at: Literal["grad", "post_step"] = "grad"  # added to the gradient, or to the weights after each step
    control_over: Literal["reach", "steps"] = "reach"  # steps: learned as if without momentum and at full scale
    control_upload: Literal["dense", "salient"] = "dense"  # salient: controls of kept filters alone
    control_norm: Literal["population", "cohort"] = "population"  # what divides the sum of controls
    normalise: Literal["all_selected", "per_index"] = "all_selected"  # per_index: by those who sent the filter
    weighed: Literal["uniform", "samples"] = "uniform"  # how clients count where the experiment's weighting is not set
    agent: Literal["persistent", "fresh"] = "persistent"  # a client's own, which goes on learning; or new every round
    agent_learns: Learns = "all"  # head: what is behind the graph encoders, which stay as they came
    pretrained: str = ""  # a file with an agent that all begin with
    episodes: Count = 30  # of the first search
    later_episodes: Count = 5  # of the next ones, where agents persist
    validation: Count = 1000  # images at most that are kept back for rewards
    validation_share: Ratio = 0.05  # of a client's images at most, for the same
    adapt_epochs: Number = 10  # of a predictor whose client never took part

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        # 20 search steps (episodes) are one update of the agent, one a round; 1,000 images for rewards beside 4,000.
        "paper": {
            "selector": "rl",
            "constraint": "flops",
            "budget": 0.8,
            "spend": False,
            "settle": False,
            "private": "predictor",
            "control_scale": 1.0,
            "control_at": "grad",
            "control_over": "reach",
            "control_upload": "dense",
            "control_norm": "population",
            "normalise": "all_selected",
            "weighed": "uniform",
            "agent": "persistent",
            "agent_learns": "all",
            "episodes": 20,
            "later_episodes": 20,
            "validation": 1000,
            "validation_share": 0.2,
        },
        "official": {
            "selector": "all",
            "private": "as_released",
            "control_scale": 0.01,
            "control_at": "post_step",
            "control_over": "steps",
            "control_norm": "cohort",
            "weighed": "samples",
        },
        # Sub-models that are as large as they may be and right with norms of their own, results/spatl.md
        "smaller": {"spend": True, "settle": True},
    }

    def __post_init__(self):
        for name in ("budget", "keep_floor"):
            if not 0 < getattr(self, name) <= 1:
                raise BadInput(f"algorithm.{name} is {getattr(self, name)}, but it should be above 0 and at most 1")

    def holdout_size(self, examples):
        """By default so few that 30 looks cost half an epoch of training; a client's only image is trained on."""
        if self.selector != "rl":
            return 0
        share = math.ceil(round(self.validation_share * examples, 9))  # 0.05 of 20 is one, not two
        return max(0, min(self.validation, share, examples - 1))

    def report(self, opened, repeats=0, progress=iter):
        """Sub-models of the last selection. Latency only where it is asked for: it differs each time."""
        if self.selector == "all":
            return {}
        rows = sub_models_by(opened(), RULES[:1], BATCH, repeats, progress=progress)["selected"]
        shown = ("client", "flops", "parameters", "sent", "bytes", "accuracy", "dense", *["latency"] * bool(repeats))
        passes = f"{BATCH} images at once, the fastest of {repeats} passes, on {device_name()}"
        said = f"Latency was measured while this page was written: {passes}." if repeats else ""
        return {"sub_models": [{key: getattr(row, key) for key in shown} for row in rows], "timed": said}

    def start_notes(self, steps):
        return uneven(steps) if self.control_scale else []

    def stages(self, plan):
        if self.control_scale:
            plan.optimizer.effective_steps(1)  # refused here, before anything is trained
        if self.selector != "all" and (packs := [each.name for each in plan.uplink if each.packs]):
            raise BadInput(f"uplink {packs[0]} packs what spatl sends in parts already; leave it out, or selector=all")
        yield from super().stages(replace(plan, weighting=plan.weighting or WEIGHTINGS[self.weighed]))

    # ---- what is whose -----------------------------------------------------------------------------------------------
    def is_private(self, net, name):
        if self.private != "none" and name in net.head:
            return True
        joined = self.private == "as_released" and any(layer.joins for layer in layer_graph(net).layers)
        has_stem = joined or self.private == "predictor_and_stem"
        return (has_stem and name in stem(net)) or super().is_private(net, name)

    def layers(self, net: Network) -> tuple[Layer, ...]:
        """The convolutions that filters are selected of."""
        if self.selector == "all":
            return ()
        found = tuple(each for each in layer_graph(net).layers if not self.is_private(net, f"{each.name}.weight"))
        if not found:
            raise BadInput(
                "spatl selects filters of convolutions, and the shared part of this network has none; "
                "take another model, or algorithm.selector=all"
            )
        return found

    # ---- server ------------------------------------------------------------------------------------------------------
    def setup(self, server):
        if self.private != "none" and not any(name in server.net.head for name in server.net.initial_weights().params):
            raise BadInput(
                "spatl leaves each client its own predictor, and this network's head has no weights; "
                "take another model, or algorithm.private=none"
            )
        self.layers(server.net)
        state = super().setup(server)
        if not state.model.params:
            raise BadInput(f"algorithm.private={self.private} leaves nothing of this network to share; take predictor")
        return state.replace(control=state.model.params.zeros()) if self.control_scale else state

    def broadcast(self, server):
        download = super().broadcast(server)
        return download.replace(control=server.state.control) if self.control_scale else download

    def validate_upload(self, server, upload, expected):
        """kept says how many rows delta must have."""
        layers = self.layers(server.net)
        if not layers or "kept" not in expected:
            return super().validate_upload(server, upload, expected)
        if upload.kept.shape != expected.kept.shape:
            return f"kept is {list(upload.kept.shape)}, and should be {list(expected.kept.shape)}"
        rows, whole = row_indices(unpacked(upload.kept, layers), layers), server.state.model
        sent = expected.replace(delta=Tree({part: _short(tree, rows) for part, tree in whole.items()}))
        if self.control_scale and self.control_upload == "salient":
            sent = sent.replace(control=_short(server.state.control, rows))
        return super().validate_upload(server, upload, sent)

    def sent_rows(self, net, upload):
        layers = self.layers(net)
        return row_indices(unpacked(upload.kept, layers), layers, upload.kept.device) if layers else {}

    def aggregate(self, server, uploads):
        """A filter that a client did not send moved by nothing there."""
        layers, whole = self.layers(server.net), server.state.model
        rows = [self.sent_rows(server.net, u) for u in uploads]
        wide = [u.replace(delta=scattered(u.delta, whole, index)) for u, index in zip(uploads, rows, strict=True)]
        delta = mean([u.delta for u in wide], [u.weight for u in wide])
        if self.normalise == "per_index" and layers:
            delta = by_senders(delta, rows, [float(u.weight) for u in wide])
        state = self.advance(server, delta)
        if not self.control_scale:
            return state
        controls = [u.control for u in uploads]
        if self.control_upload == "salient":
            pairs = zip(controls, rows, strict=True)
            controls = [scattered(control, server.state.control, index) for control, index in pairs]
        among = server.population if self.control_norm == "population" else len(uploads)
        moved = mean(controls, [1.0] * len(uploads)) * (len(uploads) / among)
        return state.replace(control=server.state.control + moved)

    # ---- client: training --------------------------------------------------------------------------------------------
    def initial_memory(self, client):
        memory = super().initial_memory(client)
        if "private" in memory:
            memory = memory.replace(joined=torch.tensor(0))
        if self.control_scale:
            memory = memory.replace(control=client.received.control.zeros())
        if self.selector == "all":
            return memory
        choice = self.choice(client, client.net.initial_weights()).feasible()
        everything = packed({each.name: every(each.filters) for each in choice.layers}, choice.layers)
        unknown = torch.tensor(torch.nan, dtype=torch.float64)
        chosen = Tree(kept=everything, accuracy=unknown, dense=unknown.clone(), reward=unknown.clone())
        memory = memory.replace(selection=chosen)
        if self.selector != "rl":
            return memory
        agent = first_agent(client.key, situation(choice.costs, choice.layers))
        return memory.replace(agent=pretrained_agent(self.pretrained, agent) if self.pretrained else agent)

    def gradient(self, client, local, batch):
        grads = super().gradient(client, local, batch)
        if not self.control_scale or self.control_at != "grad":
            return grads
        return grads.plus(self.pull(client))

    def step(self, client, local, batch):
        local = super().step(client, local, batch)
        if self.control_scale and self.control_at == "post_step":
            pull = self.pull(client)
            local.params.copy_(local.params | (local.params.within(pull) - pull * local.optimizer.lr))
        return local

    def pull(self, client: Client) -> Tree:
        difference = client.received.control - client.memory.control
        return difference * self.control_scale if self.control_scale != 1 else difference

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        if "private" in memory:
            memory = memory.replace(joined=torch.tensor(1))
        moved = self.moved(client, upload.delta.params) if self.control_scale else None
        layers = self.layers(client.net)
        if layers:
            kept, more = self.selected(client, Tree(params=local.params, buffers=local.buffers))
            memory = memory.replace(**more)
            device = next(iter(local.params.values())).device
            rows = row_indices(kept, layers, device)
            delta = Tree({part: gathered(tree, rows) for part, tree in upload.delta.items()})
            upload = upload.replace(kept=packed(kept, layers).to(device), delta=delta)
            if moved is not None and self.control_upload == "salient":
                sent = gathered(moved, rows)
                own = client.memory.control + scattered(sent, moved, rows)
                return upload.replace(control=sent), memory.replace(control=own)
        if moved is None:
            return upload, memory
        return upload.replace(control=moved), memory.replace(control=client.memory.control + moved)

    def moved(self, client: Client, delta: Tree) -> Tree:
        """How far the client's control goes: to the mean gradient of its path, without what the controls added."""
        if not client.steps:
            return delta.zeros()
        if self.control_over == "steps":
            return delta / (-client.optimizer.lr * client.steps) - client.received.control
        reach = client.optimizer.effective_steps(client.steps)
        pace = delta / (-client.optimizer.lr * reach)
        share = self.control_scale * (client.steps / reach if self.control_at == "post_step" else 1)
        moved = pace - client.received.control * share
        return moved if share == 1 else moved - client.memory.control * (1 - share)

    # ---- client: selection -------------------------------------------------------------------------------------------
    def choice(self, client: Client, weights: Tree) -> Choice:
        layers, whole = self.layers(client.net), client.data.whole
        first = torch.zeros(1, dtype=torch.long, device=client.data.index.device)
        costs = Costs.of(client.net, whole.prepare(whole.x[first], None))
        order = ranked(layers, weights)
        if self.selector == "random":
            draw = generator(key(client.key, "filters"))
            order = tuple(tuple(torch.randperm(each.filters, generator=draw).tolist()) for each in layers)
        return Choice(costs, layers, order, self.constraint, self.budget, self.keep_floor, self.spend)

    def selected(self, client: Client, weights: Tree) -> tuple[dict[str, int], Tree]:
        """(the filters that are sent, what changes in memory)"""
        choice = self.choice(client, weights)
        unknown = torch.full_like(client.memory.selection.accuracy, torch.nan)
        chosen, part = Tree(accuracy=unknown, dense=unknown, reward=unknown), client.held
        changed = Tree(agent=client.memory.agent) if self.selector == "rl" else Tree()
        if self.selector == "l2_global":
            kept = choice.by_norm(weights)
        elif self.selector == "rl" and len(part) and bool((part.y != part.y[0]).any()):
            kept, chosen, changed = self.searched(client, weights, choice, part)
        else:
            kept = choice.uniform()
        return kept, changed.replace(selection=chosen.replace(kept=packed(kept, choice.layers)))

    def searched(self, client: Client, weights: Tree, choice: Choice, part: Shard) -> tuple[dict[str, int], Tree, Tree]:
        """By the agent, which lives on the host: its matrices are too small for anything else."""
        seen, agent = situation(choice.costs, choice.layers), client.memory.agent.map(lambda leaf: leaf.cpu())
        again = self.agent == "persistent" and not bool(client.memory.selection.reward.isnan())
        if self.agent == "fresh":
            agent = first_agent(client.key, seen)
            agent = pretrained_agent(self.pretrained, agent) if self.pretrained else agent
        episodes = self.later_episodes if again else self.episodes
        some = self.settling(client.data, len(part), episodes)

        def judge(tried: Sequence[Kept]) -> list[float]:
            return accuracies(client.net, weights, tried, part, some)

        found = search(seen, agent, choice, judge, episodes, client.key, self.agent_learns)
        numbers = {"accuracy": found.accuracy, "dense": judge([{}])[0], "reward": found.reward}
        chosen = Tree({name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()})
        return found.kept, chosen, Tree(agent=found.agent)

    def settling(self, mine: Shard, held: int, episodes: int) -> Tensor | None:
        """Images for norms of a sub-model's own: as many as keep a search within the cost of an epoch on `mine`.

        It looks at them and at those held back once an episode, and once more with the whole network.
        """
        affordable = int(_STEP * len(mine)) // (episodes + 1) - held
        return spaced(mine, min(_SETTLING, affordable)).x if self.settle and affordable > 1 else None

    # ---- client: prediction ------------------------------------------------------------------------------------------
    def personal(self, client, local=None):
        weights = super().personal(client, local)
        if local is None and "joined" in client.memory and not bool(client.memory.joined) and self.adapt_epochs:
            return self.adapted(client, weights)
        return weights

    def adapted(self, client: Client, weights: Tree) -> Tree:
        """Equation 4: the predictor alone learns, on what the encoder makes of the images; nothing of that moves."""
        net, device = client.net, client.data.index.device
        with torch.no_grad():
            seen = [net.forward(weights, piece.x).features for piece in pieces(client.data)]
        if not seen:
            return weights
        features, labels, weights = torch.cat(seen), client.data.y, weights.clone()
        rows, counted, *_ = plan(len(labels), _ADAPTED, key(client.key, "adapted"), epochs=self.adapt_epochs)
        params = weights.params.select(lambda name: name in net.head)
        state = client.optimizer.init(params)
        for t, (row, weight) in enumerate(zip(rows.to(device), counted.to(device), strict=True)):
            seed = torch.tensor(key(client.key, "adapted", t), device=device)
            batch = Tree(y=labels[row], weight=weight.to(features), key=seed)
            with torch.enable_grad():
                leaves = params.map(lambda leaf: leaf.detach().requires_grad_())
                mine = weights | Tree(params=leaves)
                logits = net.apply(mine, _predicted, features[row], train=True, key=seed).to(features)
                slope = grad(client.objective(client, mine, batch, Tree(features=features[row], logits=logits)), leaves)
            client.optimizer.update_(params, slope, state)
        return weights | Tree(params=params)


def stem(net: Network) -> frozenset[str]:
    """Weights of the first convolution and of the norm behind it."""
    first = layer_graph(net).layers[:1]
    names = [name for layer in first for name in (layer.name, *layer.norms)]
    return frozenset(f"{name}.{part}" for name in names for part in _PARTS)


_PARTS = ("weight", "bias", "running_mean", "running_var")


def _predicted(module: Any, features: Tensor) -> Tensor:
    return module.head(features)


@torch.no_grad()
def accuracies(
    net: Network, weights: Tree, tried: Sequence[Kept], part: Shard, settling: Tensor | None = None
) -> list[float]:
    """Of sub-models with all that they compute on these images, all of them read back at once.

    With `settling`, images, each has the statistics of norms that it has on these.
    One pass each: all masks at once would be a grouped convolution, which is slower (benchmarks/spatl.py).
    """
    graph, parts = layer_graph(net), [(piece.x, piece.y) for piece in pieces(part)]
    costs, correct = Costs(graph, {}), []
    for kept in tried:
        smaller = masked(weights, costs.computed(kept), graph)
        if settling is not None:
            smaller = net.with_batch_statistics(smaller, settling)
        correct.append(torch.stack([(net(smaller, x).argmax(1) == y).sum() for x, y in parts]).sum())
    return [count / len(part) for count in torch.stack(correct).tolist()]


def spaced(part: Shard, count: int) -> Shard:
    """So many of these examples at most, evenly from first to last: they may lie in the order of their classes."""
    return Shard(part.whole, part.index[:: max(1, -(-len(part) // count))])


# ---- rows of filters -------------------------------------------------------------------------------------------------
def _short(tree: Tree, rows: dict[str, Tensor]) -> Tree:
    """As `gathered`, without values."""
    meta = {name: leaf.to("meta") for name, leaf in tree.items()}
    return Tree({n: t.new_empty(len(rows[n]), *t.shape[1:]) if n in rows else t for n, t in meta.items()})


def by_senders(delta: Tree, rows: Sequence[dict[str, Tensor]], weights: Sequence[float]) -> Tree:
    """The mean over all clients made one over those who sent the row."""

    def scaled(name: str, leaf: Tensor) -> Tensor:
        if name not in rows[0]:
            return leaf
        sent = torch.zeros(len(leaf), dtype=torch.float64, device=leaf.device)
        for index, weight in zip(rows, weights, strict=True):
            sent[index[name]] += weight
        factor = torch.where(sent > 0, sum(weights) / sent.clamp(min=torch.finfo(sent.dtype).tiny), 0)
        return leaf * factor.to(leaf).view(-1, *[1] * (leaf.dim() - 1))

    return Tree({part: Tree({n: scaled(n, leaf) for n, leaf in tree.items()}) for part, tree in delta.items()})
