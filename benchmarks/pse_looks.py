"""Where clients' models look: whether they keep looking where the global model looks, and how much at the object.

    python benchmarks/pse_looks.py FEDAVG+FT FEDREP PSE --clients 50 --json results/data/pse_looks.json

Folders of runs on one split, at least one with a whole global model: the first such model is what all are compared
with. Half an hour of one core for a hundred clients of PSE, whose models are trained once more first; a minute a run
for methods that keep theirs. Each client's test images, Grad-CAM of the true class at the last convolution's places.

alike      rank correlation of the map with the global model's map of the same image, mean over images, then clients
by chance  the same with the global model's map of another test image of that client and class
on object  share of the map on the object, which is what is brighter than 0 in the grey image; of views of such images
lost       of the images that the global model has right, those that the client's model has wrong
empty      maps without any evidence for the true class; the other columns leave them out

Columns are in percent but for the first two. A deviation is over clients.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
from fedlens.runs.opened import OpenedRun, named, same_split

SHOWN = {"alike": 3, "by chance": 3, "on object": 1, "lost": 1, "empty": 1, "accuracy": 1}  # digits of each column
WHOLE = "global"


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
    whole = next(((run, model) for run in runs.values() if (model := run.global_model()) is not None), None)
    if whole is None:
        raise BadInput("none of these runs has a whole global model to compare with; add one of fedavg+ft")
    images, rows = whole[0].images, []
    for domain, clients in of_domains(whole[0], count).items():
        globally = {client: seen(*whole, client) for client in clients}
        by_model = {WHOLE: {client: measured(images, one, one) for client, one in globally.items()}}
        for name, run in runs.items():
            by_model[name] = {
                client: measured(images, seen(run, run.model(client), client), globally[client]) for client in clients
            }
            print(f"  {domain}: {name}, {len(clients)} clients", file=sys.stderr, flush=True)
        rows += [{"domain": domain, "model": name, "clients": by} for name, by in by_model.items()]
    return rows


def of_domains(run: OpenedRun, count: int) -> dict[str, list[int]]:
    """The first clients of each domain by its name; all are of one where the data have no domains."""
    images, found = run.images, dict[str, list[int]]()
    for client, index in sorted(run.federation.test.items()):
        which = 0 if images.domains is None else int(images.domains[index.cpu()].mode().values)
        name = images.name if images.domains is None else images.owner_names[which]
        found.setdefault(name, []).append(client)
    return {name: clients[:count] for name, clients in sorted(found.items())}


Seen = tuple[Tensor, Tensor, Tensor]  # of a client's test images: which they are, their maps, what they are taken for


def seen(run: OpenedRun, weights: Tree, client: int) -> Seen:
    index = run.federation.test[client].cpu()
    x, truth = Shard(run.federation.data, index).x, run.images.y[index]
    with run.at_work():
        maps = attribute("grad_cam", run.net, weights, x, truth, upsample=False)
    return index, maps, run.predictions(weights, index)


def measured(images: Images, one: Seen, whole: Seen) -> dict[str, float | None]:
    """The means over a client's images; None where there is nothing to take a mean of."""
    (index, maps, taken), (_, theirs, globally) = one, whole
    truth = images.y[index]
    there = (maps.flatten(1).amax(1) > 0) & (theirs.flatten(1).amax(1) > 0)
    other = partners(truth)
    paired = there & there[other] & (other != torch.arange(len(other)))
    right = globally == truth
    objects = objects_of(images, index)
    share = None if objects is None else on_object(maps[there], objects[there])
    return {
        "alike": mean(rank_correlation(maps, theirs)[there]),
        "by chance": mean(rank_correlation(maps, theirs[other])[paired]),
        "on object": None if share is None else mean(100 * share),
        "area": None if objects is None else mean(100 * objects[there].float().flatten(1).mean(1)),
        "lost": mean(100.0 * (taken != truth)[right]),
        "empty": mean(100.0 * (maps.flatten(1).amax(1) <= 0)),
        "accuracy": mean(100.0 * (taken == truth)),
    }


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
    """A line: mean and deviation over clients of what is shown."""
    parts = []
    for what, digits in SHOWN.items():
        values = [one[what] for one in row["clients"].values() if one[what] is not None]
        if values:
            parts.append(f"{what} {statistics.mean(values):.{digits}f} ({statistics.pstdev(values):.{digits}f})")
    return f"{row['domain']:14s} {row['model']:12s} {len(row['clients'])} clients: {', '.join(parts)}"


if __name__ == "__main__":
    main()
