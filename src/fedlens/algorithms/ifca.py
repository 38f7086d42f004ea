from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..core.algorithm import Algorithm, Client
from ..core.evaluate import pieces
from ..core.fields import Count
from ..core.objective import uniformly
from ..core.rng import generator, key
from ..core.tree import Tree, mean


@dataclass(frozen=True)
class IFCA(Algorithm):
    """Ghosh et al., 2020: the server has several models, and a client trains the one with the least loss on its data.

    A client chooses anew in every round; of equal models it takes the first. One that nobody chose does not move. The
    global model is what most chose. Models after the first start from its numbers, each tensor in another order.

    down: model, others; up: cluster, delta, weight; memory: nothing
    """

    clusters: Count = 2  # models; 1 is FedAvg

    default_weighting = uniformly
    sends_update = False  # but how one of several models moved
    discloses = "the number of the model that fits a client best leaves unprotected"

    def setup(self, server):
        state = super().setup(server)
        others = {f"cluster {j}": shuffled(state.model, server.key, j) for j in range(1, self.clusters)}
        return state.replace(others=Tree(others), members=torch.zeros(self.clusters, dtype=torch.long))

    def broadcast(self, server):
        return super().broadcast(server).replace(others=server.state.others)

    def model(self, known: Tree, cluster: int) -> Tree:
        return known.others[f"cluster {cluster}"] if cluster else known.model

    def global_model(self, state):
        return self.model(state, int(state.members.argmax()))

    def start(self, client):
        return self.begun(client, self.chosen(client))

    def begun(self, client: Client, cluster: int) -> Tree:
        return self.model(client.received, cluster) | client.memory.get("private", Tree())

    @torch.no_grad()
    def chosen(self, client: Client) -> int:
        losses = torch.zeros(self.clusters, dtype=torch.float64)
        for piece in pieces(client.data) if self.clusters > 1 else ():
            x, seed = piece.x, torch.tensor(client.key, device=piece.y.device)
            batch = Tree(x=x, y=piece.y, weight=torch.ones_like(x.flatten(1)[:, 0]), key=seed)
            for j, weights in enumerate(self.begun(client, j) for j in range(self.clusters)):
                out = client.net.forward(weights, x)
                losses[j] += float(client.objective(client, weights, batch, out)) * len(piece)
        return int(losses.nan_to_num(torch.inf).argmin())

    def begin(self, client):
        weights = self.begun(client, cluster := self.chosen(client))  # once a round: finish reads it
        number = torch.tensor(cluster, device=client.received.model.leaves()[0].device)
        return weights.replace(optimizer=client.optimizer.init(weights.params), cluster=number)

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        delta = self.shared_part(client.net, local) - self.model(client.received, int(local.cluster))
        return upload.replace(delta=delta, cluster=local.cluster), memory

    def validate_upload(self, server, upload, expected):
        wrong = super().validate_upload(server, upload, expected)
        return wrong or ("" if 0 <= int(upload.cluster) < self.clusters else "there is no cluster of its number")

    def aggregate(self, server, uploads):
        chosen = [[u for u in uploads if int(u.cluster) == j and float(u.weight)] for j in range(self.clusters)]
        new = [self.model(server.state, j) for j in range(self.clusters)]
        for j, mine in enumerate(chosen):
            if mine:
                delta = mean([u.delta for u in mine], [u.weight for u in mine])
                new[j] = self.advance(replace(server, state=Tree(model=new[j])), delta).model
        others = Tree({f"cluster {j}": model for j, model in enumerate(new) if j})
        return server.state.replace(model=new[0], others=others, members=torch.tensor([len(mine) for mine in chosen]))


def shuffled(weights: Tree, seed: int, number: int) -> Tree:
    draws = (generator(key(seed, "cluster", number, path)) for path, _ in weights.paths())
    orders = (torch.randperm(leaf.numel(), generator=draw) for leaf, draw in zip(weights.leaves(), draws, strict=True))
    return weights.map(lambda leaf: leaf.flatten()[next(orders).to(leaf.device)].view_as(leaf))
