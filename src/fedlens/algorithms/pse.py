from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attribution.cam import resized, stretched
from ..attribution.channels import ChannelTaps
from ..attribution.inputs import scores
from ..core.algorithm import Client
from ..core.errors import BadInput
from ..core.fields import NonNegative
from ..core.network import Network
from ..core.objective import cross_entropy
from ..core.tree import Tree, grad
from ..models.pse_net import PseNetwork
from .fedper import FedPer, Part, has_extractor, is_extractor

# Of a network whose attention another model's maps can take part in; what is not in its extractor stays private.
PARTS = ("maps", "project", "attend", "embed")
Pair = tuple[Tree, Tree]  # weights of the local and of the global network, both with the client's classifier
_UNTAPPED = nullcontext(), nullcontext()
_ROWS = 1024  # masked images of Score-CAM at a time


@dataclass(frozen=True)
class PSE(FedPer):
    """Xia, Li & Ding, 2023: filters whose channel speaks more for the classes in the global extractor are pulled to it.

    down: model; up: delta, weight; memory: private

    The extractor is shared, the classifier private. In training the frozen global extractor runs beside the local one
    under the client's own classifier; both predictions count, and their attentions exchange queries. Prediction is by
    the local network alone. The paper's ablations are excite=none (v1), attention=self (v2), model.position=false (v3).

    A network needs maps(x), project(maps), attend(query, key, value, maps), embed(attended) and, as a part of its own,
    its extractor, as pse_net has. Others have no queries to exchange: attention=self excites their convolutions and
    nothing else. Clients of one class or one image train like others, and so do maps of one place (images of 8 pixels).

    Evidence is summed over images and places, as equation 3 is printed. The paper's equation 4 moves filters after the
    step; its equation 8 puts a weaker pull into the loss (excite=penalty). The threshold has no layer's index there and
    sums over one layer's channels: here each layer has its own. Differs from the paper: a channel is excited only where
    the difference is more than zero, since after the download all are zero. The preset paper takes maps at a
    convolution's output, as "the output of the last convolutional layer" says. By default they are taken after the
    ReLU, as the next layer gets them. Not compared with code of the authors: there is none, their repository holds a
    title alone.
    """

    usual_model: ClassVar = "pse_net"
    private: Part = "classifier"  # none: averaged like the extractor
    xi: NonNegative = 0.01  # how far an excited filter, with its bias, moves to the global one
    excite: Literal["direct", "penalty", "none"] = "direct"  # after the step (eq. 4), or xi/2 |.|^2 in the loss (eq. 8)
    attention: Literal["cross", "self"] = "cross"  # self: each model by itself
    cam: Literal["gradcam", "gradcam++", "scorecam"] = "gradcam"  # what a channel's evidence is
    score: Literal["logit", "prob"] = "logit"  # of the true class
    score_path: Literal["cross", "self"] = "cross"  # whose scores: those of training, or of each model alone
    reduce: Literal["sum", "mean"] = "sum"  # over images and places
    exact: bool = True  # sigmoids in float64: about one half, float32 does not tell means of 1e-6 from zero
    threshold_scope: Literal["layer", "global"] = "layer"  # the mean difference in a layer, or in all layers
    tap: Literal["relu", "conv"] = "relu"  # a convolution's maps: after its ReLU, or its output
    local_init: Literal["global", "persistent"] = "global"  # persistent: every client goes on from its own extractor

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        # Equations 3, 4 and 7, and section 3.1; a map is what a convolution gives, F = W * F before it.
        "paper": {
            "private": "classifier",
            "xi": 0.01,
            "excite": "direct",
            "attention": "cross",
            "cam": "gradcam",
            "score": "logit",
            "score_path": "cross",
            "reduce": "sum",
            "threshold_scope": "layer",
            "tap": "conv",
            "local_init": "global",
        },
        "means": {"reduce": "mean", "exact": False},  # what the runs of results/pse_details.md had
    }

    def __post_init__(self):
        if self.excite == "direct" and self.xi > 1:
            raise BadInput(f"algorithm.xi is {self.xi:g}, and a filter cannot move further than to the global one, 1")

    def setup(self, server):
        self.crosses(server.net)  # refused before anyone is asked
        return super().setup(server)

    def initial_memory(self, client):
        memory = super().initial_memory(client)
        return memory.replace(joined=torch.tensor(False)) if self.local_init == "persistent" else memory

    def start(self, client):
        if "joined" in client.memory and not client.memory.joined:  # it has no extractor of its own yet
            return client.received.model | super().private_part(client.net, client.memory.private)
        return super().start(client)

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        return upload, memory.replace(joined=torch.tensor(True)) if "joined" in client.memory else memory

    def private_part(self, net, weights):
        if self.local_init == "persistent":  # all of it is remembered; what leaves is the same
            return Tree(params=weights.params, buffers=weights.buffers)
        return super().private_part(net, weights)

    def crosses(self, net: Network) -> bool:
        """Whether queries are exchanged."""
        if self.attention == "self":
            return False
        there = {part: hasattr(net.module, part) for part in PARTS} | {"extractor": has_extractor(net)}
        if missing := [part for part, is_there in there.items() if not is_there]:
            raise BadInput(
                f"pse exchanges queries between networks with {', '.join(there)}, and this one lacks "
                f"{', '.join(missing)}: use model=pse_net, or algorithm.attention=self for excitation alone"
            )
        return True

    def step(self, client, local, batch):
        net, received = client.net, client.received.model
        extractor = received.select(lambda name: is_extractor(net, name))
        ours = Tree(params=local.params.map(lambda p: p.detach().requires_grad_()), buffers=local.buffers)
        with torch.enable_grad():
            pair = self.both(net, ours, extractor)
            taps = self.tap_of(net, pair[0]), self.tap_of(net, pair[1])
            seen = self.look(net, pair, batch.x, batch.key, taps)
            pulls = {}
            if self.excite != "none":
                excited = self.excited(*self.evidence(net, pair, batch, taps, seen))
                pulls = _by_weight(excited * self.xi, extractor.params)
            grads = self.gradient_of_both(client, ours, batch, seen)
        if self.excite == "penalty":
            drift = {name: pull * (local.params[name] - extractor.params[name]) for name, pull in pulls.items()}
            grads = grads.replace(**{name: grads[name] + away for name, away in drift.items()})
        client.optimizer.update_(local.params, grads, local.optimizer)
        if self.excite == "direct":
            for name, pull in pulls.items():
                local.params[name].lerp_(extractor.params[name], pull)
        return local

    def both(self, net: Network, ours: Tree, extractor: Tree) -> Pair:
        # A frozen norm keeps its statistics for the way back: not those that the training pass moves in place.
        still = ours.replace(buffers=ours.buffers.clone())
        if not self.crosses(net):
            return ours, still | extractor
        halved = net.in_halves(ours.params)  # which passes of maps and of attention share
        theirs = still.replace(params=halved) | extractor.replace(params=net.in_halves(extractor.params))
        return ours.replace(params=halved), theirs

    def gradient_of_both(self, client: Client, ours: Tree, batch: Tree, seen: Seen) -> Tree:
        """Of the sum of both predictions' losses."""
        if client.objective is not cross_entropy or type(self).loss is not PSE.loss:
            both = self.loss(client, ours, batch, seen.outs[0]) + self.loss(client, ours, batch, seen.outs[1])
            return grad(both, ours.params)
        # Image by image: both at once, and nobody needs the losses themselves.
        losses = F.cross_entropy(seen.logits, batch.y.repeat(2), reduction="none").view(2, -1)
        return grad(losses, ours.params, by=(batch.weight / batch.weight.sum()).expand(2, -1))

    def tap_of(self, net: Network, weights: Tree) -> Any:
        """A context in which a pass leaves what evidence is made of."""
        if self.excite == "none":
            return nullcontext()
        if self.cam == "scorecam":
            return _Maps(net, weights, tap=self.tap)
        plain = self.cam == "gradcam" and self.reduce == "sum" and self.crosses(net)
        if net.compile and plain and isinstance(net.module, PseNetwork):
            return _Added(net.module, weights, self.tap)
        return ChannelTaps(net, weights, tap=self.tap, cam=self.cam)

    def look(self, net: Network, pair: Pair, x: Tensor, key: Tensor | None = None, taps: Any = _UNTAPPED) -> Seen:
        """Both networks on the same images. With a key it is a training pass of the local one; the other is frozen."""
        crosses, seen, x = self.crosses(net), [], net.laid_out(x)
        for weights, own_key, tap in zip(pair, (key, None), taps, strict=True):
            with tap:
                how: dict[str, Any] = dict(train=own_key is not None, key=own_key)
                if isinstance(tap, _Added):
                    seen.append(net.apply(weights, tap.maps, x, *tap.leaves.values(), in_step=True, **how))
                elif crosses:
                    seen.append(net.apply(weights, _maps, x, **how))
                else:
                    seen.append(net.forward(weights, x, **how))
        if not crosses:
            logits = torch.cat([out.logits for out in seen])
            return Seen([out.features for out in seen], logits, logits)
        how = dict(train=key is not None, key=key)
        maps = torch.cat(seen)
        projected = net.apply(pair[0], _projected, maps, **how)
        features, logits = net.apply(pair[0], _exchanged, *projected, **how)
        features, logits = features.chunk(2), logits.to(x.dtype)
        if self.score_path == "cross":
            return Seen(features, logits, logits, projected[1:])
        _, alone = net.apply(pair[0], _alone, maps)
        return Seen(features, logits, alone.to(x.dtype))

    def evidence(self, net: Network, pair: Pair, batch: Tree, taps: tuple[Any, Any], seen: Seen) -> tuple[Tree, Tree]:
        """{convolution: [channels]} of the local and of the global extractor: how each speaks for the true classes."""
        layers = [layer for layer in taps[0].leaves if is_extractor(net, f"{layer}.weight")]
        if not layers:
            raise BadInput(
                f"pse excites convolutions, and this network has none with a {self.tap} to tap; take another model, "
                f"{'algorithm.tap=conv, ' if self.tap == 'relu' else ''}or algorithm.excite=none"
            )
        if self.cam == "scorecam":
            maps = ({layer: tap.maps[layer] for layer in layers} for tap in taps)
            ours, theirs = (self.score_cam(net, pair, batch, at, some) for at, some in enumerate(maps))
            return ours, theirs
        asked = scores(seen.asked, self.score)
        # What is asked is the sum of the true classes' scores times their images' weights: this is its gradient.
        truth = asked.new_zeros(2, len(batch.y), asked.shape[1])
        y, weight = (part[:, None].expand(2, -1, -1) for part in (batch.y, batch.weight))
        truth = truth.scatter_(2, y, weight).flatten(0, 1)
        found = _slopes(asked, truth, seen.back, [tap.leaves[layer] for tap in taps for layer in layers])
        for tap in taps:
            tap.was_read = True  # nobody needs the taps of the training gradient
        # In half precision a sum would lose its small parts, and the sigmoid of a small mean would be one half.
        found = [slope.to(asked.dtype) for slope in found]
        if self.reduce == "mean":
            places = [tap.places[layer] for tap in taps for layer in layers]
            found = torch._foreach_div(torch._foreach_div(found, places), batch.weight.sum())
        return Tree(zip(layers, found, strict=False)), Tree(zip(layers, found[len(layers) :], strict=True))

    @torch.no_grad()
    def score_cam(self, net: Network, pair: Pair, batch: Tree, at: int, maps: dict[str, Tensor]) -> Tree:
        """Wang et al., 2020: how far the score rises from the empty image to what a channel's map lets through."""

        def score(x: Tensor, y: Tensor) -> Tensor:
            apart = self.score_path == "self" or not self.crosses(net)
            logits = net(pair[at], x) if apart else self.look(net, pair, x).asked.chunk(2)[at]
            return scores(logits, self.score).gather(1, y[:, None])[:, 0]

        x, y, found = batch.x, batch.y, {}
        base, together = score(torch.zeros_like(x), y), max(1, _ROWS // len(y))
        for layer, every in maps.items():
            rises = []
            for part in every.to(x.dtype).transpose(0, 1).split(together):  # [channels, images, h, w]
                masks = stretched(resized(part.flatten(0, 1), x))
                through = masks.unflatten(0, part.shape[:2])[:, :, None] * x
                reached = score(through.flatten(0, 1), y.repeat(len(part))).view(-1, len(y))
                rises.append(((reached - base) * batch.weight).sum(1))
            found[layer] = torch.cat(rises) / (batch.weight.sum() if self.reduce == "mean" else 1)
        return Tree(found)

    def excited(self, ours: Tree, theirs: Tree) -> Tree:
        """{convolution: [channels]}: one where the global evidence exceeds the local one, and by no less than usual."""
        evidence = torch.cat([*ours.leaves(), *theirs.leaves(ours)])
        a, b = (evidence.double() if self.exact else evidence).chunk(2)
        # One by one: a CPU's vectors and what is left over at their end round differently, and equals must stay equal.
        gap = (b.sigmoid() - a.sigmoid()).clamp(min=0)
        sizes = [len(channels) for channels in ours.values()]
        scopes = [gap] if self.threshold_scope == "global" else gap.split(sizes)
        usual = torch.cat([scope.mean().expand(len(scope)) for scope in scopes])
        # Just after the download both extractors are the same and all gaps are zero: then none is excited.
        chosen = ((gap >= usual) & (gap > 0)).to(evidence.dtype)
        return Tree(zip(ours, chosen.split(sizes), strict=True))


class Seen(NamedTuple):
    """What a look at both networks gives."""

    features: Sequence[Tensor]  # of the local and of the global one
    logits: Tensor  # those of the global one after the local one's
    asked: Tensor  # logits that evidence is asked of, those of the global one after the local one's
    back: tuple[Tensor, ...] = ()  # where it goes back through when queries are exchanged; else by all ways

    @property
    def outs(self) -> list[Tree]:
        """Features and logits of the local and of the global one."""
        each = zip(self.features, self.logits.chunk(2), strict=True)
        return [Tree(features=features.to(logits.dtype), logits=logits) for features, logits in each]


class _Maps(ChannelTaps):
    """Keeps the maps themselves."""

    def __init__(self, net: Network, weights: Tree, **how: Any):
        super().__init__(net, weights, **how)
        self.maps: dict[str, Tensor] = {}

    def _tapped(self, names: list[str], out: Tensor) -> Tensor:
        self.maps |= dict.fromkeys(names, out.detach())
        return super()._tapped(names, out)


class _Added(nullcontext):
    """Taps of `pse_net` that a compiled pass can have: zeros that are added to the maps, one for each channel.

    The gradient of such a zero is the sum over images and places, in full precision.
    """

    def __init__(self, module: PseNetwork, weights: Tree, tap: str):
        super().__init__()
        self.maps = _with_relus if tap == "relu" else _with_convolutions
        kinds = [(f"extractor.{name}", part) for name, part in module.extractor.named_children()]
        named = [(name, weights.params[f"{name}.weight"]) for name, part in kinds if isinstance(part, nn.Conv2d)]
        full = {name: torch.promote_types(weight.dtype, torch.float32) for name, weight in named}
        self.leaves = {name: w.new_zeros(len(w), dtype=full[name], requires_grad=True) for name, w in named}


def _with_added(module: PseNetwork, x: Tensor, kind: type, leaves: Sequence[Tensor]) -> Tensor:
    left = [*leaves]
    for part in module.extractor:
        x = part(x)
        if isinstance(part, kind):
            leaf = left.pop(0)
            x = (x.to(leaf.dtype) + leaf[:, None, None]).to(x.dtype)
    return x


def _with_relus(module: PseNetwork, x: Tensor, *leaves: Tensor) -> Tensor:
    return _with_added(module, x, nn.ReLU, leaves)


def _with_convolutions(module: PseNetwork, x: Tensor, *leaves: Tensor) -> Tensor:
    return _with_added(module, x, nn.Conv2d, leaves)


def _maps(module: Any, x: Tensor) -> Tensor:
    return module.maps(x)


def _projected(module: Any, maps: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key and value of both models' maps, those of the local one first, and what a residual network adds."""
    query, key, value = module.project(maps)
    return query, key, value, maps.view_as(maps)  # a way back of its own


def _attended(module: Any, query: Tensor, key: Tensor, value: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """Features and logits of both models as one batch."""
    features = module.embed(module.attend(query, key, value, added))
    return features, module.head(features)


def _exchanged(module: Any, query: Tensor, key: Tensor, value: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of one model meet the queries of the other."""
    return _attended(module, query.roll(len(query) // 2, 0), key, value, added)


def _alone(module: Any, maps: Tensor) -> tuple[Tensor, Tensor]:
    return _attended(module, *_projected(module, maps))


def _slopes(asked: Tensor, truth: Tensor, back: Sequence[Tensor], leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    """d (truth . asked) / d leaves, in one pass for both models.

    A model's prediction depends on the other's maps through its queries alone. Going back past these, the sum of both
    scores leaves at each tap what its own model's score would.
    """
    if not back:
        return torch.autograd.grad(asked, leaves, truth, retain_graph=True, materialize_grads=True)
    slopes = torch.autograd.grad(asked, back, truth, retain_graph=True, allow_unused=True)
    used = [at for at, slope in enumerate(slopes) if slope is not None]
    ends, starts = [back[at] for at in used], [slopes[at] for at in used]
    return torch.autograd.grad(ends, leaves, starts, retain_graph=True, materialize_grads=True)


def _by_weight(channels: Tree, like: Tree) -> dict[str, Tensor]:
    """{weight: [channels, 1, ...]} of convolutions' filters and biases."""
    pairs = ((f"{layer}.{part}", values) for layer, values in channels.items() for part in ("weight", "bias"))
    return {n: values.to(like[n]).view(-1, *[1] * (like[n].dim() - 1)) for n, values in pairs if n in like}
