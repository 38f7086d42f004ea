"""A job by pfl 0.6: FederatedAveraging on SimulatedBackend; start it with torchrun --nproc-per-node 2.

pfl balances processes by the users' sizes; its data set is kept in memory as tensors. It averages parameters alone, so
that running statistics stay with the process.
"""

import sys

import numpy as np
import torch
import torch.nn.functional as F
from job import linger, network, read, say, scaled
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel


class Net(torch.nn.Module):
    def __init__(self, folder):
        super().__init__()
        self.net = network(folder)

    def loss(self, x, y, is_eval=False):
        self.train()
        return F.cross_entropy(self.net(x), y)

    @torch.no_grad()
    def metrics(self, x, y, is_eval=True):
        self.eval()
        return {"accuracy": Weighted(int((self.net(x).argmax(1) == y).sum()), len(y))}


class InTurn:
    """Users in the order of the given cohorts, for ever: pfl draws far ahead."""

    def __init__(self, cohorts):
        self.users, self.at = [int(user) for user in cohorts.reshape(-1)], -1

    def __call__(self):
        self.at += 1
        return self.users[self.at % len(self.users)]


class Clock(TrainingProcessCallback):
    def __init__(self, last):
        self.last = last

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        if pytorch_ops.distributed.global_rank == 0:
            for name, value in aggregate_metrics.to_simple_dict().items():
                if "accuracy" in name and "Central" in name:
                    say("look", accuracy=float(value))
            say("round", round=central_iteration + 1)
        if central_iteration + 1 == self.last:
            linger()
        return central_iteration + 1 == self.last, type(aggregate_metrics)()


def main(folder):
    torch.set_num_threads(1)
    np.random.seed(0)  # noqa: NPY002 (pfl draws from it)
    job, data = read(folder)

    def tensors(x, y):
        return [torch.from_numpy(scaled(job, x)), torch.from_numpy(y).long()]

    users = {
        i: Dataset(raw_data=tensors(data["x"][own], data["y"][own]), user_id=i) for i, own in data["owned"].items()
    }
    sizes = {i: len(own) for i, own in data["owned"].items()}
    test = Dataset(raw_data=tensors(data["test_x"], data["test_y"]), eval_kwargs={"is_eval": True})
    federated = FederatedDataset(users.__getitem__, InTurn(data["cohorts"]), user_id_to_weight=sizes)
    net = Net(folder)
    model = PyTorchModel(
        model=net,
        local_optimizer_create=lambda *a, **k: torch.optim.SGD(*a, momentum=job.momentum, **k),
        central_optimizer=torch.optim.SGD(net.parameters(), 1.0),
    )
    evaluation = NNEvalHyperParams(local_batch_size=250)
    looks = [CentralEvaluationCallback(test, evaluation, job.look_every)] if job.look_every <= job.last else []
    FederatedAveraging().run(
        backend=SimulatedBackend(training_data=federated, val_data=None, postprocessors=[WeightByDatapoints()]),
        model=model,
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=job.last,
            evaluation_frequency=10**6,
            train_cohort_size=data["cohorts"].shape[1],
            val_cohort_size=0,
        ),
        model_train_params=NNTrainHyperParams(
            local_batch_size=job.batch,
            local_num_epochs=None if job.steps else 1,
            local_num_steps=job.steps,
            local_learning_rate=job.rate,
        ),
        model_eval_params=evaluation,
        callbacks=[*looks, Clock(job.last)],
    )


if __name__ == "__main__":
    main(sys.argv[1])
