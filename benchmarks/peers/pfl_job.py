"""The job by pfl 0.6: FederatedAveraging on SimulatedBackend; start it with torchrun --nproc-per-node 2.

pfl balances processes by the users' sizes; its data set is kept in memory as tensors.
"""

import sys

import numpy as np
import torch
import torch.nn.functional as F
from job import BATCH, LAST_TIMED, LOOK_EVERY, MOMENTUM, RATE, ROUNDS, arrays, network, say, scaled
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

assert LAST_TIMED <= ROUNDS


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network()

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
    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        if pytorch_ops.distributed.global_rank == 0:
            for name, value in aggregate_metrics.to_simple_dict().items():
                if "accuracy" in name and "Central" in name:
                    say("look", accuracy=float(value))
            say("round", round=central_iteration + 1)
        return False, type(aggregate_metrics)()


def main(folder):
    torch.set_num_threads(1)
    np.random.seed(0)  # noqa: NPY002 (pfl draws from it)
    job = arrays(folder)
    x, y = torch.from_numpy(scaled(job["x"])), torch.from_numpy(job["y"]).long()
    owned = [torch.from_numpy(index) for index in job["owned"]]
    users = {i: Dataset(raw_data=[x[index], y[index]], user_id=i) for i, index in enumerate(owned)}
    sizes = {i: len(index) for i, index in enumerate(job["owned"])}
    test = Dataset(
        raw_data=[torch.from_numpy(scaled(job["test_x"])), torch.from_numpy(job["test_y"]).long()],
        eval_kwargs={"is_eval": True},
    )
    federated = FederatedDataset(users.__getitem__, InTurn(job["cohorts"]), user_id_to_weight=sizes)
    net = Net()
    model = PyTorchModel(
        model=net,
        local_optimizer_create=lambda *a, **k: torch.optim.SGD(*a, momentum=MOMENTUM, **k),
        central_optimizer=torch.optim.SGD(net.parameters(), 1.0),
    )
    FederatedAveraging().run(
        backend=SimulatedBackend(training_data=federated, val_data=None, postprocessors=[WeightByDatapoints()]),
        model=model,
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=ROUNDS,
            evaluation_frequency=10**6,
            train_cohort_size=job["cohorts"].shape[1],
            val_cohort_size=0,
        ),
        model_train_params=NNTrainHyperParams(local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=RATE),
        model_eval_params=NNEvalHyperParams(local_batch_size=250),
        callbacks=[CentralEvaluationCallback(test, NNEvalHyperParams(local_batch_size=250), LOOK_EVERY), Clock()],
    )


if __name__ == "__main__":
    main(sys.argv[1])
