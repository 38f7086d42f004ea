"""The least a two-process CPU simulator can do: flat shared weights, index batches, fused SGD, channels_last."""

import os
import sys

import torch
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from job import BATCH, LOOK_EVERY, MOMENTUM, RATE, ROUNDS, arrays, network, say, scaled

PROCESSES = 2


class Trainer:
    """One model whose parameters are views into a flat vector."""

    def __init__(self, job):
        self.model = network().to(memory_format=torch.channels_last)
        parameters = list(self.model.parameters())
        self.flat, at = torch.empty(sum(p.numel() for p in parameters)), 0
        for p in parameters:
            view = self.flat[at : at + p.numel()]
            if p.dim() == 4:
                out, inn, high, wide = p.shape
                view = view.view(out, high, wide, inn).permute(0, 3, 1, 2)
            view = view.view(p.shape) if p.dim() != 4 else view
            view.copy_(p.data)
            p.data, at = view, at + p.numel()
        self.optimizer = torch.optim.SGD(parameters, RATE, momentum=MOMENTUM, fused=True)
        wide = torch.channels_last
        self.x = [torch.from_numpy(scaled(job["x"][i])).contiguous(memory_format=wide) for i in job["owned"]]
        self.y = [torch.from_numpy(job["y"][i]).long() for i in job["owned"]]
        self.test_x = torch.from_numpy(scaled(job["test_x"])).contiguous(memory_format=wide)
        self.test_y = torch.from_numpy(job["test_y"]).long()

    def train(self, client, weights):
        self.flat.copy_(weights)
        self.optimizer.state.clear()
        x, y = self.x[client], self.y[client]
        for rows in torch.randperm(len(y)).split(BATCH):
            F.cross_entropy(self.model(x[rows].contiguous(memory_format=torch.channels_last)), y[rows]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return len(y)

    @torch.no_grad()
    def correct(self, weights, first, last):
        self.flat.copy_(weights)
        chunks = zip(self.test_x[first:last].split(250), self.test_y[first:last].split(250), strict=True)
        return sum(int((self.model(x).argmax(1) == y).sum()) for x, y in chunks)


def work(number, job, weights, sums, next_one, pipe):
    torch.set_num_threads(1)
    torch.manual_seed(number)
    trainer = Trainer(job)
    tests = len(job["test_y"])
    pipe.send(None)
    while (order := pipe.recv()) is not None:
        if order == "look":
            pipe.send(trainer.correct(weights, number * tests // PROCESSES, (number + 1) * tests // PROCESSES))
            continue
        total, seen = sum(len(job["owned"][client]) for client in order), 0
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
    job = arrays(folder)
    weights = Trainer(job).flat.clone().share_memory_()
    sums = torch.zeros(PROCESSES, len(weights)).share_memory_()
    context = multiprocessing.get_context("fork")
    next_one, pipes = context.Value("i", 0), []
    for number in range(PROCESSES):
        mine, theirs = context.Pipe()
        arguments = number, job, weights, sums, next_one, theirs
        context.Process(target=work, args=arguments, daemon=True).start()
        pipes.append(mine)
    [pipe.recv() for pipe in pipes]

    def everyone(order):
        for pipe in pipes:
            pipe.send(order)
        return sum(pipe.recv() for pipe in pipes)

    for round in range(1, ROUNDS + 1):
        next_one.value = 0
        cohort = sorted(job["cohorts"][round - 1].tolist(), key=lambda client: -len(job["owned"][client]))
        seen = everyone(cohort)
        torch.sum(sums, 0, out=weights)
        if round % LOOK_EVERY == 0:
            say("look", accuracy=everyone("look") / len(job["test_y"]))
        say("round", round=round, images=seen)
    for pipe in pipes:
        pipe.send(None)


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
    main(sys.argv[1])
