"""Attribution beside a plain pass and beside captum, interleaved in one run.

    python benchmarks/attribution.py                       # on the GPU where there is one
    python benchmarks/attribution.py --device cpu --batch 64 --repeats 5
    python benchmarks/attribution.py --models --epoch 49920     # LRP over as many images as an epoch trains on, alone

Times are medians over the repeats of all jobs taken in turn, so that a busy machine slows all alike. Each job goes over
`--passes` batches: a call of ours looks at one image first, which is not part of a pass. The plain passes are the
network's own, with nothing watching: to the images alone, and to images and weights as in training. captum is left out
where it is not installed or cannot do it (its LRP has no rule for sums, reused modules and what it does not know).

With `--epoch` LRP is asked as FedXDS asks it, `--batch` images at a time, and training is a round of FedAvg in lanes:
ten clients, ResNet-8, batches of 64, one epoch; in bf16 on a GPU, where LRP is fp32 with TF32. Each is the best of
several, one after the other.

One thread of a busy x86 CPU, torch 2.13.0, 32 images of 32 px, median of 3, times a plain pass to the image:
  ResNet18, stock stem (152 ms)  guided with all layer norms 1.30, LRP 2.02; captum: guided without norms 1.29, no LRP
  VGG-11 (534 ms)                guided with all layer norms 1.06, LRP 1.86, LRP epsilon 1.23; captum: LRP epsilon 1.65
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedlens.attribution import attribute, channel_gradients, layer_saliency
from fedlens.cli.bench import Work, parts, seconds
from fedlens.core.batches import Shard
from fedlens.core.network import Network
from fedlens.core.rng import generator, seeded
from fedlens.core.tree import Tree
from fedlens.engines.lanes import Lanes
from fedlens.engines.process import matmuls
from fedlens.models import model_named
from fedlens.models.resnet import ResNet18

Job = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=0, help="images a pass; 512 (epoch: 2048) on a GPU, 32 on a CPU")
    parser.add_argument("--passes", type=int, default=0, help="batches a job; 4 on a GPU, 1 on a CPU")
    parser.add_argument("--repeats", type=int, default=0, help="of each job; 20 on a GPU, 5 on a CPU")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--models", nargs="*", default=["resnet18 stock", "resnet18 cifar", "vgg11"])
    parser.add_argument("--epoch", type=int, default=0, metavar="IMAGES", help="LRP over them beside training on them")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    on_gpu = asked.device.startswith("cuda")
    batch, passes = asked.batch or (512 if on_gpu else 32), asked.passes or (4 if on_gpu else 1)
    repeats = asked.repeats or (20 if on_gpu else 5)
    machine = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU, {asked.threads} thread(s)"
    setting = {"machine": machine, "torch": torch.__version__, "size": asked.size, "batch": batch, "passes": passes}
    found = {**setting, "repeats": repeats, "seconds": {}}
    for name in asked.models:
        found["seconds"][name] = measure(name, batch, passes, asked.size, asked.device, repeats)
        if not asked.json:
            show(name, found)
    if asked.epoch:
        chunk = asked.batch or (2048 if on_gpu else 32)
        found["epoch"] = beside_an_epoch(asked.epoch, chunk, asked.size, asked.device, asked.repeats or 3)
        if not asked.json:
            print(f"\nResNet-8, {asked.size} px, LRP on {chunk} images at a time, {machine}, torch {torch.__version__}")
            print("  " + ", ".join(f"{name} {value:.4g}" for name, value in found["epoch"].items()))
    if asked.json:
        print(json.dumps(found, indent=1))


def measure(name: str, batch: int, passes: int, size: int, device: str, repeats: int) -> dict[str, float]:
    """Median seconds of every job."""
    model, _, stem = name.partition(" ")
    configured = ResNet18(stem=stem) if stem else model_named(model)  # pyright: ignore[reportArgumentType]
    with seeded(0):
        net = Network(configured.build(10, 3, size)).to(device)
    x = torch.randn(batch * passes, 3, size, size, generator=generator(1)).to(device)
    y = (torch.arange(len(x)) % 10).to(device)
    todo = jobs(net, x, y, batch) | oracles(net, x, y, batch)
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    for job in todo.values():  # once for warmth
        job()
    seconds: dict[str, list[float]] = {name: [] for name in todo}
    for _ in range(repeats):
        for name_of_job, job in todo.items():
            wait()
            start = time.perf_counter()
            job()
            wait()
            seconds[name_of_job].append(time.perf_counter() - start)
    return {name: sorted(values)[len(values) // 2] for name, values in seconds.items()}


def beside_an_epoch(images: int, chunk: int, size: int, device: str, repeats: int) -> dict[str, float]:
    """Seconds of LRP over so many images, in chunks, and of one epoch of training on them."""
    clients = 10
    batch = max(1, min(64, images // clients))
    work = Work("ResNet-8", model_named("resnet8"), clients, max(1, images // clients // batch), batch, size=size)
    on_gpu = device.startswith("cuda")
    precision = "bf16" if on_gpu else "fp32"
    net, federation = parts(work, precision, device)
    weights, everything = net.initial_weights(), Shard(federation.data, torch.arange(work.images, device=device))
    laps = []
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with matmuls(precision):
        for _ in range(1 + repeats):  # once for warmth
            began = time.perf_counter()
            for some in everything.chunks(chunk):
                attribute("lrp", net, weights, some.x, some.y)
            if on_gpu:
                torch.cuda.synchronize()
            laps.append(time.perf_counter() - began)
        lrp, memory = min(laps[1:]), torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
        epoch, _ = seconds(work, lambda: (net, Lanes(net, federation)), device, repeats)
    found = {"images": work.images, "LRP, seconds": lrp, "epoch, seconds": epoch, "LRP / epoch": lrp / epoch}
    return found if memory is None else {**found, "LRP, GiB": memory}


def jobs(net: Network, x: Tensor, y: Tensor, chunk: int) -> dict[str, Job]:
    weights = net.initial_weights()
    batches = list(zip(x.split(chunk), y.split(chunk), strict=True))

    def plain(trains: bool) -> None:
        for images, labels in batches:
            own = weights.params.map(lambda p: p.detach().requires_grad_(trains))
            leaf = images.detach().requires_grad_()
            score = net(weights.replace(params=own), leaf).gather(1, labels[:, None]).sum()
            torch.autograd.grad(score, [leaf, *own.leaves()] if trains else [leaf])

    def channels() -> None:
        for images, labels in batches:
            batch = Tree(x=images, y=labels, weight=torch.ones_like(labels, dtype=x.dtype))
            channel_gradients(net, weights, batch)

    def ours(method: str, **options: Any) -> Job:
        return lambda: attribute(method, net, weights, x, y, chunk=chunk, **options)

    return {
        "plain pass to the image": lambda: plain(trains=False),
        "plain pass to image and weights": lambda: plain(trains=True),
        "gradient": ours("gradient"),
        "guided_backprop": ours("guided_backprop"),
        "layer_saliency (guided, all layers)": lambda: layer_saliency(net, weights, x, y, chunk=chunk),
        "channel_gradients": channels,
        "lrp epsilon": ours("lrp", composite="epsilon"),
        "lrp epsilon_plus_flat": ours("lrp"),
        "grad_cam": ours("grad_cam"),
        "integrated_gradients, 8 steps": ours("integrated_gradients", steps=8),
    }


class Sequence(nn.Module):
    """A network without branches, of nothing but what captum has rules for."""

    def __init__(self, module: nn.Module):
        super().__init__()
        known = (nn.Conv2d, nn.ReLU, nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.Linear)
        layers = [part for part in module.modules() if isinstance(part, known)]
        at = next(i for i, part in enumerate(layers) if isinstance(part, nn.Linear))
        self.maps, self.vectors = nn.Sequential(*layers[:at]), nn.Sequential(*layers[at:])

    def forward(self, x: Tensor) -> Tensor:
        return self.vectors(self.maps(x).flatten(1))


def oracles(net: Network, x: Tensor, y: Tensor, chunk: int) -> dict[str, Job]:
    """What captum can do with this network."""
    try:
        from captum import attr
    except ImportError:
        return {}
    warnings.filterwarnings("ignore", module="captum")
    has_branches = any(isinstance(part, nn.BatchNorm2d) for part in net.module.modules())
    module = (net.module if has_branches else Sequence(net.module)).eval()

    def theirs(method: Any, **options: object) -> Job:
        def job() -> None:
            for images, labels in zip(x.split(chunk), y.split(chunk), strict=True):
                method.attribute(images.detach().requires_grad_(), target=labels, **options)

        return job

    last = [part for part in module.modules() if isinstance(part, nn.Conv2d)][-1]
    found = {
        "captum Saliency": theirs(attr.Saliency(module), abs=False),
        "captum GuidedBackprop": theirs(attr.GuidedBackprop(module)),
        "captum LayerGradCam": theirs(attr.LayerGradCam(module, last)),
        "captum IntegratedGradients, 8 steps": theirs(attr.IntegratedGradients(module), n_steps=8),
        "captum LRP": theirs(attr.LRP(module)),
    }
    for name, job in list(found.items()):
        try:
            job()
        except Exception as error:
            print(f"  {name}: left out, {type(error).__name__}: {str(error).splitlines()[0][:90]}")
            del found[name]
    return found


def show(name: str, found: dict) -> None:
    seconds = found["seconds"][name]
    plain, images = seconds["plain pass to the image"], found["batch"] * found["passes"]
    what = f"{found['size']} px, {found['passes']} x {found['batch']} images, median of {found['repeats']}"
    print(f"\n{name}, {what}, {found['machine']}, torch {found['torch']}")
    print(f"  {'':38} {'ms':>9} {'images/s':>10} {'x plain':>8}")
    for job, value in seconds.items():
        print(f"  {job:38} {1e3 * value:9.2f} {images / value:10.0f} {value / plain:8.2f}")


if __name__ == "__main__":
    main()
