"""What an upload says to whoever knows the protocol: the model behind it, and the gradient of a single step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from ..core.algorithm import Server
from ..core.network import Network
from ..core.optimizer import Sgd
from ..core.tree import Tree
from ..runs.transcript import Crossing, Transcript
from ..selection.pruning import scattered
from .attack import Inapplicable


def decoded(crossing: Crossing, upload: Tree, net: Network) -> Tree:
    """The upload as the server's own aggregate reads it."""
    if "delta" not in upload:
        return upload
    server = Server(net, Tree(model=crossing.download.model), 0)
    for transform in reversed(crossing.stage.uplink):
        upload = transform.decode(server, upload)
    return upload


def after_training(crossing: Crossing, client: int, net: Network) -> Tree | None:
    """The client's model after training; none where a part of it does not cross."""
    upload, whole = decoded(crossing, crossing.replies[client], net), net.initial_weights()
    if "model" in upload:
        after = upload.model
    elif "delta" not in upload or "kept" in upload or not crossing.stage.algorithm.sends_update:
        return None
    else:
        reach = float(upload.get("reach", torch.tensor(1.0)))  # where what one step moved is sent
        after = crossing.download.model + upload.delta.replace(params=upload.delta.params * reach)
    return after if {path for path, _ in after.paths()} == {path for path, _ in whole.paths()} else None


@dataclass(frozen=True)
class GradientStep:
    """The gradient of one local step, as far as it crosses."""

    weights: Tree  # at which it was taken; what stays at the client is as it began
    gradient: Tree  # zero where nothing crosses
    seen: Tree  # one where it crosses, zero elsewhere
    source: Literal["delta", "control"]


def single_step(transcript: Transcript, round: int, client: int, net: Network) -> GradientStep:
    """From an upload after one step of SGD. A control variate is that gradient itself."""
    crossing = transcript[round]
    stage, sent = crossing.stage, crossing.replies[client]
    if stage.steps != 1 or not isinstance(stage.optimizer, Sgd):
        raise Inapplicable("uploads are of more than one step of SGD; run with local.steps=1 local.optimizer=sgd")
    if "delta" not in sent or not stage.algorithm.sends_update:
        raise Inapplicable("no update of a known model crosses")
    upload, model = decoded(crossing, sent, net), crossing.download.model
    weights = net.initial_weights() | model
    params = model.params
    rows = _rows(crossing, upload, net)
    ones = params.map(torch.ones_like)
    control = upload.get("control")
    before = _own_control(transcript, round, client, params, net) if control is not None else params.zeros()
    if control is not None and all(control[name].shape == leaf.shape for name, leaf in params.items()):
        gradient, seen, source = control + before, ones, "control"
    else:
        pace = scattered(upload.delta.params, params, rows) / -stage.optimizer.at(crossing.at, stage.rounds).lr
        seen = scattered(Tree({n: ones[n][rows[n]] if n in rows else ones[n] for n in params}), params, rows)
        if any(transform.packs for transform in stage.uplink):  # what was left out is not zero but unknown
            seen = Tree({name: (pace[name] != 0).to(ones[name]) for name in pace})
        pull = crossing.download.control - before if "control" in crossing.download else params.zeros()
        gradient, source = (pace - pull) * seen, "delta"
    decay = params * stage.optimizer.weight_decay
    return GradientStep(weights, (gradient - decay) * seen, seen, source)


def _rows(crossing: Crossing, upload: Tree, net: Network) -> dict[str, torch.Tensor]:
    """The rows of each weight that a sparse upload holds."""
    return crossing.stage.algorithm.sent_rows(net, upload) if "kept" in upload else {}


def _own_control(transcript: Transcript, round: int, client: int, params: Tree, net: Network) -> Tree:
    """A client's control before this round: it begins at zero, and the server has seen all its moves."""
    total = params.zeros()
    for earlier in range(round):
        crossing = transcript[earlier]
        if "control" in crossing.replies.get(client, Tree()):
            upload = crossing.replies[client]
            total = total + scattered(upload.control, params, _rows(crossing, upload, net))
    return total


def last_layer(net: Network) -> tuple[str, str | None]:
    """Names of the weight and the bias that logits come out of."""
    named = [(name, part) for name, part in net.module.named_modules() if isinstance(part, nn.Linear)]
    if not named or f"{named[-1][0]}.weight" not in net.head:
        raise Inapplicable("the network does not end in a linear layer")
    name, part = named[-1]
    return f"{name}.weight", f"{name}.bias" if part.bias is not None else None
