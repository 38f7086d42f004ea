"""Where clients' models look: whether they keep looking where the global model looks, and how much at the object.

    python benchmarks/pse_looks.py FEDAVG+FT DITTO FEDREP PSE --clients 20 --json results/data/pse_looks.json

Folders of runs on one split, images of 32 pixels: the methods of PSE's figure 1. All are compared with the global model
of FedAvg, fine-tuned there, or of the first run that has a whole one. Other whole models are rows, too: how far two
global models agree is what to expect of a model that nobody changed. Clients of PSE train once more first, which takes
most of the time. Each client's test images, Grad-CAM of the true class at the last convolution's places.

kept         of the global model's map what the client's map covers: the sum of the smaller of both, each summing to 1
kept, lost   the same, of images that the global model has right and the client's model wrong
alike        rank correlation of the two maps: new places count against it, too
other image  rank correlation with the global model's map of another test image of that client and class
on object    share of the map on the object, which is what is brighter than 0 in the grey image; of views of such images
area         share of the picture that the object takes: what an even map would have on the object
lost         of the images that the global model has right, those that the client's model has wrong
empty        maps without any evidence for the true class

Means over images, then clients; deviations are over clients. Columns of maps are of images for which all models have
one. kept, alike and other image go up to 1, the others are in percent.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedlens.attribution import attribute
from fedlens.attribution.cam import resized
from fedlens.attribution.similarity import rank_correlation
from fedlens.core.batches import Shard
from fedlens.core.errors import BadInput
from fedlens.core.files import write_atomic
from fedlens.core.tree import Tree
from fedlens.data import Images
from fedlens.models.pse_net import PseNetwork
from fedlens.runs.opened import OpenedRun, named, same_split

SHOWN = {"kept": 3, "kept, lost": 3, "alike": 3, "other image": 3}  # digits of each column
SHOWN |= dict.fromkeys(("on object", "area", "lost", "empty", "accuracy"), 1)


class Seen(NamedTuple):
    """What a model makes of a client's test images."""

    maps: Tensor
    taken: Tensor  # the classes that it takes them for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs on one split")
    parser.add_argument("--clients", type=int, default=20, help="so many of each domain, the first ones")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers of each client here")
    asked = parser.parse_args()
    try:
        found = looks(asked.runs, asked.clients)
    except BadInput as error:
        print(f"pse_looks.py: {error}", file=sys.stderr)
        sys.exit(2)
    for row in found:
        print(told(row), flush=True)
    if asked.json:
        lines = ",\n".join(json.dumps(row) for row in found)
        write_atomic(asked.json, f"[\n{lines}\n]\n".encode())


def looks(paths: Sequence[Path], count: int) -> list[dict[str, Any]]:
    """A row for each domain and model: the measures of each client."""
    runs = {name: OpenedRun.open(path, device="cpu", precision="fp32") for name, path in named(paths).items()}
    same_split(runs)
    wholes = {name: model for name, run in runs.items() if (model := run.global_model()) is not None}
    if not wholes:
        raise BadInput("none of these runs has a whole global model to compare with; add one of fedavg+ft")
    of = next((name for name in wholes if name.startswith("fedavg")), next(iter(wholes)))
    first, rows = runs[of], []
    check_size(first)
    for domain, clients in of_domains(first, count).items():
        by_model: dict[str, dict[int, Any]] = {}
        for client in clients:
            index = first.federation.test[client].cpu()
            models = {f"global of {name}": (runs[name], model) for name, model in wholes.items()}
            models |= {name: (run, run.model(client)) for name, run in runs.items()}
            every = {name: seen(run, model, index) for name, (run, model) in models.items()}
            for name, one in measured(first.images, index, every, f"global of {of}").items():
                by_model.setdefault(name, {})[client] = one
            print(f"  {domain}: client {client}", file=sys.stderr, flush=True)
        rows += [{"domain": domain, "model": name, "beside": of, "clients": by} for name, by in by_model.items()]
    return rows


def check_size(run: OpenedRun) -> None:
    """Of 28 pixels pse_net's pools drop what is left over, so that a map has places that no score depends on."""
    side, module = min(run.images.x.shape[2:]), run.net.module
    if isinstance(module, PseNetwork) and side % 16 and not module.ceil:
        raise BadInput(f"pse_net does not see all of {side} pixels; give runs on 32, or with model.ceil=true")


def of_domains(run: OpenedRun, count: int) -> dict[str, list[int]]:
    """The first clients of each domain by its name; all are of one where the data have no domains."""
    images, found = run.images, dict[str, list[int]]()
    for client, index in sorted(run.federation.test.items()):
        which = 0 if images.domains is None else int(images.domains[index.cpu()].mode().values)
        name = images.name if images.domains is None else images.owner_names[which]
        found.setdefault(name, []).append(client)
    return {name: clients[:count] for name, clients in sorted(found.items())}


def seen(run: OpenedRun, weights: Tree, index: Tensor) -> Seen:
    x, truth = Shard(run.federation.data, index).x, run.images.y[index]
    with run.at_work():
        maps = attribute("grad_cam", run.net, weights, x, truth, upsample=False)
    return Seen(maps, run.predictions(weights, index))


def measured(images: Images, index: Tensor, models: Mapping[str, Seen], beside: str) -> dict[str, dict[str, Any]]:
    """Means over a client's images for each model; None where there is nothing to take a mean of."""
    truth, whole = images.y[index], models[beside]
    there = torch.stack([one.maps.flatten(1).amax(1) > 0 for one in models.values()]).all(0)
    other = partners(truth)
    paired = there & there[other] & (other != torch.arange(len(other)))
    right, objects = whole.taken == truth, objects_of(images, index)
    found = {}
    for name, (maps, taken) in models.items():
        kept, lost = covered(maps, whole.maps), right & (taken != truth)
        found[name] = {
            "kept": mean(kept[there]),
            "kept, lost": mean(kept[there & lost]),
            "alike": mean(rank_correlation(maps, whole.maps)[paired]),
            "other image": mean(rank_correlation(maps, whole.maps[other])[paired]),
            "on object": None if objects is None else mean(100 * on_object(maps[there], objects[there])),
            "area": None if objects is None else mean(100 * objects[there].float().flatten(1).mean(1)),
            "lost": mean(100.0 * lost[right]),
            "empty": mean(100.0 * (maps.flatten(1).amax(1) <= 0)),
            "accuracy": mean(100.0 * (taken == truth)),
        }
    return found


def covered(maps: Tensor, theirs: Tensor) -> Tensor:
    """[images] the part of their map that these maps cover, each map summing to one."""
    a, b = (each.flatten(1) / each.flatten(1).sum(1, keepdim=True).clamp(min=1e-30) for each in (maps, theirs))
    return torch.minimum(a, b).sum(1)


def partners(truth: Tensor) -> Tensor:
    """For each image the next one of its class, the first one for the last; itself where it is alone."""
    found = torch.arange(len(truth))
    for label in truth.unique():
        mine = (truth == label).nonzero()[:, 0]
        found[mine] = mine.roll(-1)
    return found


def objects_of(images: Images, index: Tensor) -> Tensor | None:
    """[images, h, w] where the grey image is brighter than 0; None where no view is that, or none is known to be."""
    if images.domains is None:
        return images.x[index].amax(1) > 0 if images.x.shape[1] == 1 else None
    views = len(images.owner_names)
    each = len(images) // views
    same = len(images) == views * each and torch.equal(images.y, images.y[:each].repeat(views))
    if images.owner_names[0] != "gray" or not same:
        return None
    return images.x[index % each].amax(1) > 0


def on_object(maps: Tensor, objects: Tensor) -> Tensor:
    """[images] the share of a map, at the size of the image, that lies on the object."""
    large = resized(maps, objects)
    return (large * objects).flatten(1).sum(1) / large.flatten(1).sum(1)


def mean(values: Tensor) -> float | None:
    return round(float(values.double().mean()), 5) if len(values) else None


def told(row: Mapping[str, Any]) -> str:
    """A line: mean and deviation over the clients that have a value."""
    parts = []
    for what, digits in SHOWN.items():
        values = [one[what] for one in row["clients"].values() if one[what] is not None]
        if values:
            spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
            parts.append(f"{what} {statistics.mean(values):.{digits}f}{spread}")
    return f"{row['domain']:10s} {row['model']:20s} {', '.join(parts)}"


if __name__ == "__main__":
    main()
