"""Passes over a client's own images outside of local steps: running statistics are read and never written."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..core.algorithm import Client
from ..core.batches import Shard
from ..core.evaluate import pieces
from ..core.network import Network
from ..core.rng import fold, generator, key
from ..core.tree import Tree, grad
from ..models.generators import head_shape


def class_sums(net: Network, weights: Tree, shard: Shard, *, outer: bool = False) -> Tree:
    """Features by class, in double: counts [C], squares [C], sums [C, d] and, with `outer`, products [C, d, d]."""
    width, classes = head_shape(net, "summing features")
    like = torch.zeros((), dtype=torch.float64, device=shard.index.device)
    zeros = like.new_zeros(classes)
    found = Tree(counts=zeros, squares=zeros, sums=like.new_zeros(classes, width))
    if outer:
        found = found.replace(products=like.new_zeros(classes, width, width))
    for piece in pieces(shard):
        with torch.no_grad():
            z = net.forward(weights, piece.x).features.flatten(1).double()
        mine = F.one_hot(piece.y, classes).to(z)
        # No scatter: its order of adding is not fixed on a GPU.
        more = Tree(counts=mine.sum(0), squares=mine.T @ z.square().sum(1), sums=mine.T @ z)
        if outer:
            more = more.replace(products=torch.stack([(z * one[:, None]).T @ z for one in mine.T]))
        found = found + more
    return found


def gradient_on(client: Client, weights: Tree, shard: Shard, wanted: Tree) -> Tree:
    """Of the client's objective, as its model would predict, in these parameters; over all images of the shard."""
    whole = Tree(params=weights.params, buffers=weights.buffers.clone())  # an objective may have passes of its own
    found = wanted.zeros()
    for number, piece in enumerate(pieces(shard)):
        trained = wanted.map(lambda p: p.detach().requires_grad_())
        with torch.enable_grad():
            at = whole | Tree(params=trained)
            x = piece.x
            seed = fold(torch.tensor(client.key, device=x.device), f"own images {number}")
            batch = Tree(x=x, y=piece.y, weight=torch.ones(len(piece), dtype=x.dtype, device=x.device), key=seed)
            value = client.objective(client, at, batch, client.net.forward(at, x))
            found = found + grad(value, trained) * (len(piece) / len(shard))
    return found


def random_part(client: Client, share: float, purpose: str) -> Shard:
    """So large a share of the client's images, drawn anew in each round; at least one where it has any."""
    data = client.data
    count = min(len(data), max(1, round(share * len(data))))
    order = torch.randperm(len(data), generator=generator(key(client.key, purpose)))
    return Shard(data.whole, data.index[order[:count].to(data.index.device)])
