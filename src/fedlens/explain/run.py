"""What a run's models look at, drawn: images x methods, for the global model or for single clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..attribution import METHODS, GradCam, ScoreCam, attribute
from ..attribution.figures import USUAL, explain, predicted, readable
from ..attribution.inputs import Target
from ..core.batches import Federation, Shard
from ..core.network import Network
from ..core.tree import Tree
from ..data import Images
from ..experiment import Experiment
from ..models.weights import classes_of, load_weights
from ..runs.opened import OpenedRun

FEWEST = 4  # places down and across from which on a map can be read
Tell = Callable[[str], None]


def silent(text: str) -> None:
    pass


def explain_run(
    path: str | Path,
    out: Path | None = None,
    *,
    clients: Sequence[int] = (),
    rounds: Sequence[int] = (),
    count: int = 6,
    methods: Sequence[str] = USUAL,
    tell: Tell = silent,
) -> Path:
    """The models of a run: the global one, or those that these clients predict with; of these rounds, or the newest.

    `tell` hears how many images each model gets right, and which maps are too coarse to read.
    """
    run = OpenedRun.open(path, device="cpu", precision="fp32")
    federation, found = run.federation, run.models(clients, rounds)
    pool = torch.cat([federation.test[client] for client in clients]) if clients else federation.pool
    name = "explain" + ("-clients" if clients else "") + ("-rounds" if rounds else "")
    where = out or run.folder.figures / f"{name}.png"
    shown = some_images(run.images, pool, count)
    return _draw(run.net, found, federation, run.images, shown, where, methods, tell)


def explain_model(
    experiment: Experiment,
    weights: str,
    out: Path,
    *,
    count: int = 6,
    methods: Sequence[str] = USUAL,
    tell: Tell = silent,
) -> Path:
    """A model with weights from a file, on test images of a data set.

    Weights for other classes than those of the data are asked about the class that they predict.
    """
    images = experiment.images()
    federation, _ = experiment.federation(images)
    net, target = experiment.network(images), "true"
    if weights:
        known = classes_of(net.module, weights, len(images.classes))
        if known != len(images.classes):  # maps of a last layer that starts anew would show nothing
            net = experiment.network(replace(images, classes=tuple(map(str, range(known)))))
            target = "predicted"
        load_weights(net.module, weights)
    shown = some_images(images, federation.pool, count)
    return _draw(net, net.initial_weights(), federation, images, shown, out, methods, tell, target)


def some_images(images: Images, index: torch.Tensor, count: int) -> torch.Tensor:
    """Some of these images, of as many classes as there are, the first of each."""
    labels = images.y[index].tolist()
    turns: dict[int, int] = {}
    order = []
    for position, label in enumerate(labels):
        turns[label] = turns.get(label, 0) + 1
        order.append((turns[label], label, position))
    return index[torch.tensor([position for _, _, position in sorted(order)[:count]])]


def _draw(
    net: Network,
    weights: Tree | dict[str, Tree],
    federation: Federation,
    images: Images,
    shown: torch.Tensor,
    out: Path,
    methods: Sequence[str],
    tell: Tell,
    target: Target = "true",
) -> Path:
    x, y = Shard(federation.data, shown).x, images.y[shown]
    titles = [images.classes[label] for label in y.tolist()]
    pictures = images.pictures(shown)
    own = target == "true"  # the data's classes are the network's
    for name, model in ({"": weights} if isinstance(weights, Tree) else weights).items() if own else ():
        right = sum(is_right for _, is_right in predicted(net, model, x, y))
        tell(f"{name or 'the model'}: right on {right} of these {len(shown)} images")
    for method in methods:
        if sentence := coarse(method, net, weights, x):
            tell(sentence)
    how = {"pictures": pictures, "titles": titles, "target": target, "classes": images.classes if own else None}
    explain(net, weights, x, y, out, methods=methods, **how)
    return out


def coarse(method: str, net: Network, weights: Tree | dict[str, Tree], x: torch.Tensor) -> str:
    """What is said of a class activation map with too few places to read anything from it; else nothing."""
    if not issubclass(METHODS[method], (GradCam, ScoreCam)):
        return ""
    one = weights if isinstance(weights, Tree) else next(iter(weights.values()))
    high, wide = attribute(GradCam(upsample=False), net, one, x[:1], target="predicted").shape[-2:]
    if min(high, wide) >= FEWEST:
        return ""
    return (
        f"{readable(method)} is too coarse to read: the network tells {high} x {wide} places apart in images of "
        f"{x.shape[-2]} x {x.shape[-1]} pixels; take larger images, or a smaller stem (model.stem=cifar)"
    )
