"""What distillation at the server does, round by round: the clients' average, their ensemble, and the student.

    python benchmarks/distillation.py feddf algorithm.lr=1e-3 algorithm.steps=200
    python benchmarks/distillation.py fedaux algorithm.lr=5e-5

Any settings of a run may follow; the defaults are digits over 20 unequal clients, 10 of them a round, and clothes as
public images. All three are judged on the pooled test set. The ensemble is the plain mean of the clients' logits: what
FedAux weighs them by is known of public images alone.
"""

from __future__ import annotations

import argparse

import torch

from fedlens import config
from fedlens.core.batches import Shard
from fedlens.core.evaluate import pieces
from fedlens.core.run import run
from fedlens.core.tree import mean
from fedlens.engines.sequential import Sequential
from fedlens.experiment import build
from fedlens.simulate.run import public_images

USUAL = (
    "data=mnist5k auxiliary=fashion_mnist clients=20 cohort=uniform cohort.count=10 partition=dirichlet "
    "partition.alpha=0.1 model=cnn2 local.epochs=2 local.lr=0.02 rounds=10 device=cpu"
)


def main(name: str, *words: str) -> None:
    torch.set_num_threads(1)
    experiment = config.read(None, [*USUAL.split(), f"algorithm={name}", *words])
    net, federation = build(experiment)
    images = experiment.data.load()
    public = public_images(experiment)
    assert public is not None, f"{name} takes no public data"
    test = Shard(federation.data, federation.pool)

    def logits(weights):
        with torch.no_grad():
            return torch.cat([net(weights, piece.x) for piece in pieces(test)])

    def accuracy(said):
        return 100 * float((said.argmax(1) == test.y).double().mean())

    def observe(server, job, replies):
        uploads = [reply.upload for reply in replies]
        if "delta" not in uploads[0]:
            return
        before = job.download.model
        average = before + mean([u.delta for u in uploads], [u.weight for u in uploads])
        together = sum(logits(before + upload.delta) for upload in uploads)
        found = accuracy(logits(average)), accuracy(together), accuracy(logits(server.state.model))
        print("round {:3d}  average {:5.1f}  ensemble {:5.1f}  student {:5.1f}".format(job.round, *found), flush=True)

    run(
        experiment.algorithm,
        net,
        Sequential(net, federation),
        experiment.plan,
        seed=experiment.seed,
        auxiliary=experiment.public(public, images),
        observe=observe,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", help="feddf or fedaux")
    parser.add_argument("words", nargs="*", help="settings of the run, such as algorithm.lr=1e-3")
    asked = parser.parse_args()
    main(asked.method, *asked.words)
