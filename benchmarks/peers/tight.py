"""The least a two-process CPU simulator can do: flat shared weights, index batches, fused SGD, channels_last."""

import os
import sys

import torch
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from job import linger, network, read, say, scaled

PROCESSES = 2


class Trainer:
    """One model whose parameters and running statistics are views into a flat vector."""

    def __init__(self, folder, job, data):
        self.job, self.model = job, network(folder).to(memory_format=torch.channels_last)
        for part in self.model.modules():
            if isinstance(part, torch.nn.BatchNorm2d):
                part.num_batches_tracked = None  # a counter that nobody needs
        parameters = list(self.model.parameters())
        weights = [*parameters, *self.model.buffers()]
        self.flat, at = torch.empty(sum(p.numel() for p in weights)), 0
        for p in weights:
            view = self.flat[at : at + p.numel()]
            if p.dim() == 4:
                out, inn, high, wide = p.shape
                view = view.view(out, high, wide, inn).permute(0, 3, 1, 2)
            view = view.view(p.shape) if p.dim() != 4 else view
            view.copy_(p.data)
            p.data, at = view, at + p.numel()
        self.optimizer = torch.optim.SGD(parameters, job.rate, momentum=job.momentum, fused=True)
        self.x = {client: self._images(data["x"][index]) for client, index in data["owned"].items()}
        self.y = {client: torch.from_numpy(data["y"][index]).long() for client, index in data["owned"].items()}
        self.test_x = self._images(data["test_x"])
        self.test_y = torch.from_numpy(data["test_y"]).long()

    def _images(self, x):
        return torch.from_numpy(scaled(self.job, x)).contiguous(memory_format=torch.channels_last)

    def train(self, client, weights):
        self.flat.copy_(weights)
        self.optimizer.state.clear()
        self.model.train()
        x, y = self.x[client], self.y[client]
        for rows in torch.randperm(len(y)).split(self.job.batch)[: self.job.steps]:
            F.cross_entropy(self.model(x[rows].contiguous(memory_format=torch.channels_last)), y[rows]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return len(y)

    @torch.no_grad()
    def correct(self, weights, first, last):
        self.flat.copy_(weights)
        self.model.eval()
        chunks = zip(self.test_x[first:last].split(250), self.test_y[first:last].split(250), strict=True)
        return sum(int((self.model(x).argmax(1) == y).sum()) for x, y in chunks)


def work(number, folder, weights, sums, next_one, pipe):
    torch.set_num_threads(1)
    torch.manual_seed(number)
    job, data = read(folder)
    trainer = Trainer(folder, job, data)
    tests = len(data["test_y"])
    pipe.send(None)
    while (order := pipe.recv()) is not None:
        if order == "look":
            pipe.send(trainer.correct(weights, number * tests // PROCESSES, (number + 1) * tests // PROCESSES))
            continue
        total, seen = sum(len(data["owned"][client]) for client in order), 0
        sums[number].zero_()
        while True:
            with next_one.get_lock():
                at, next_one.value = next_one.value, next_one.value + 1
            if at >= len(order):
                break
            examples = trainer.train(order[at], weights)
            seen += examples
            sums[number].add_(trainer.flat, alpha=examples / total)
        pipe.send(seen)


def main(folder):
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    job, data = read(folder)
    weights = Trainer(folder, job, data).flat.clone().share_memory_()
    sums = torch.zeros(PROCESSES, len(weights)).share_memory_()
    context = multiprocessing.get_context("fork")
    next_one, pipes = context.Value("i", 0), []
    for number in range(PROCESSES):
        mine, theirs = context.Pipe()
        arguments = number, folder, weights, sums, next_one, theirs
        context.Process(target=work, args=arguments, daemon=True).start()
        pipes.append(mine)
    [pipe.recv() for pipe in pipes]

    def everyone(order):
        for pipe in pipes:
            pipe.send(order)
        return sum(pipe.recv() for pipe in pipes)

    for round in range(1, job.last + 1):
        next_one.value = 0
        cohort = sorted(data["cohorts"][round - 1].tolist(), key=lambda client: -len(data["owned"][client]))
        seen = everyone(cohort)
        torch.sum(sums, 0, out=weights)
        if round % job.look_every == 0:
            say("look", accuracy=everyone("look") / len(data["test_y"]))
        say("round", round=round, images=seen)
    linger()
    for pipe in pipes:
        pipe.send(None)


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
    main(sys.argv[1])
