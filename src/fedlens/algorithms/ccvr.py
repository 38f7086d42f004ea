from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..core.algorithm import Algorithm, Errand, Recipe
from ..core.errors import BadInput
from ..core.fields import Count, Number, Positive
from ..core.rng import key
from ..core.tree import Tree
from ..models.generators import linear_head
from ._normal_features import Covariance, drawn, moments, reduced, refitted, spread
from ._own_images import class_sums
from .fedavg import FedAvg
from .feddf import check_whole


@dataclass(frozen=True)
class CCVR:
    """Luo et al., 2021: after the last round of any base, the head learns anew from features drawn for each class.

    Features are normal, with the mean and the covariance that those of all clients' images have under the final model.
    """

    base: Recipe = FedAvg()  # the method whose model is calibrated
    samples: Count = 100  # features that are drawn of each class; the paper has 100 on CIFAR-10, 500 on CIFAR-100
    epochs: Number = 10  # over them; 0 leaves the model unchanged
    batch: Count = 64  # features of a step
    lr: Positive = 0.01  # of plain steps
    covariance: Covariance = "full"  # pooled: one for all classes; diagonal: variances alone, and the least to send

    sends: ClassVar[str] = "as its base; once counts, means, scatter"

    def stages(self, plan):
        *before, last = self.base.stages(plan)
        if isinstance(last.algorithm, Errand) and not last.algorithm.updates_model:
            raise BadInput("ccvr comes after the last round of training: put fine-tuning after it, algorithm=ccvr+ft")
        yield from (*before, last)
        yield last.errand(Calibrate(base=last.algorithm, by=self), fresh=False)


@dataclass(frozen=True)
class Calibrate(Errand):
    """The last stage of CCVR. down: model, with what its base sends; up: counts, means, scatter"""

    by: CCVR = CCVR()

    updates_model: ClassVar = True
    discloses: ClassVar = (
        "once, each client's label counts, mean features of each class and their scatter leave unprotected"
    )

    validate_upload = Algorithm.validate_upload

    def setup(self, server):
        """calibrated: the judged model of the base, before its head is trained."""
        weight, _ = linear_head(server.net, "ccvr")
        check_whole(server.net, "ccvr")
        if self.base.is_private(server.net, weight):
            name = type(self.base).__name__.lower()
            raise BadInput(f"ccvr trains the global head, and {name} keeps the head at its clients: take another base")
        state = self.base.setup(server)
        return state.replace(calibrated=self.base.global_model(state | server.state))

    def broadcast(self, server):
        return self.base.broadcast(server).replace(model=server.state.calibrated)

    def global_model(self, state):
        return state.calibrated

    def finish(self, client, local):
        """Products around the client's own means: what is left of sums of squares would lose digits."""
        found = class_sums(client.net, client.received.model, client.data, outer=True)
        like = next(iter(client.received.model.params.values()))
        means = found.sums / found.counts.clamp(min=1)[:, None]
        scatter = reduced(found.products - spread(found.counts, means), self.by.covariance)
        return Tree(counts=found.counts.int(), means=means.to(like), scatter=scatter.to(like)), Tree()

    def aggregate(self, server, uploads):
        """On the CPU and in double precision, so that all engines agree."""
        by, model = self.by, server.state.calibrated
        if not by.epochs:
            return server.state
        z, y = drawn(*moments(uploads, by.covariance), by.samples, key(server.key, "features"))
        weight, bias = linear_head(server.net, "ccvr")
        old = Tree({name: model.params[name] for name in (weight, bias)})
        new = refitted(old, z, y, by.epochs, by.batch, by.lr, key(server.key, "order"))
        return server.state.replace(calibrated=model | Tree(params=new))
