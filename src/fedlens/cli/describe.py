"""`fedlens describe`: what a method sends, keeps and costs, totals first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from .format import Json, print_rows, print_text, say_json

if TYPE_CHECKING:
    from ..simulate.describe import MessageLeaf

_TITLES = {
    "down": "down",
    "shared": "down, once",
    "up": "up",
    "memory": "kept by a client",
    "state": "kept by the server",
}


def describe(
    algorithm: Annotated[str, typer.Argument(help="A method's name, such as fedavg.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", show_default=False)] = None,
    model: Annotated[
        str, typer.Option(help="The model its messages are about; without one the method's usual one.")
    ] = "",
    classes: Annotated[int, typer.Option(min=1)] = 10,
    channels: Annotated[int, typer.Option(min=1)] = 3,
    size: Annotated[int, typer.Option(min=1, help="Pixels of a side.")] = 32,
    leaves: Annotated[bool, typer.Option("--leaves", help="Also every tensor that is sent or kept.")] = False,
    json: Json = False,
) -> None:
    """What a method sends, keeps and costs, from its own hooks."""
    from .. import config
    from ..simulate import describe as messages
    from ..simulate.describe import describe, described_with, own_hooks, preset_table, settings, traffic, usual_model

    model = model or usual_model(algorithm)
    given = [f"algorithm={algorithm}", f"model={model}", *described_with(algorithm), *(words or ())]
    experiment = config.read(None, given)
    if ":" in algorithm:  # the user's own: all its hooks are tried
        with own_hooks(algorithm):
            found = describe(experiment, classes, channels, size, to_the_end=True)
    else:
        found = describe(experiment, classes, channels, size)
    if json:
        rows = [leaf.__dict__ for leaf in found]
        about = {"algorithm": config.to_dict(experiment.algorithm), "discloses": experiment.discloses}
        say_json({**about, "bytes": traffic(found), "leaves": rows})
        return
    images = f"{classes} classes, {channels} x {size} x {size} pixels"
    print_text(f"{algorithm} with {model} ({images}), bytes of a client in a round:")
    print_rows(_totals(traffic(found)))
    if said := messages.about_rows(found):
        print_text(said)
    print_text(" ".join((type(experiment.algorithm).__doc__ or "").split()))
    print_text(f"Settings: {', '.join(f'{k}={v}' for k, v in settings(experiment.algorithm)) or 'none'}.")
    for name, said in experiment.discloses.items():
        print_text(f"Beside model updates, {name}: {said}.")
    head, rows = preset_table(experiment.algorithm)
    if rows:
        print_text(f"\nWhere presets differ, algorithm={algorithm.partition('/')[0]}/PRESET")
        print_rows([dict(zip(head, row, strict=True)) for row in rows])
    if leaves:
        _print_leaves(found)
    else:
        print_text(f"{sum(leaf.name != '(header)' for leaf in found)} tensors are sent or kept; --leaves lists them.")


def _totals(traffic: dict[str, dict[str, int]]) -> list[dict[str, str]]:
    shown = [where for where in _TITLES if any(row.get(where) for row in traffic.values())]
    return [
        {"stage": stage, **{_TITLES[where]: f"{row.get(where, 0):,}" for where in shown}}
        for stage, row in traffic.items()
    ]


def _print_leaves(leaves: Sequence[MessageLeaf]) -> None:
    """Stage by stage, whole names, for grep."""
    for stage in dict.fromkeys(leaf.stage for leaf in leaves):
        print_text(f"\n{stage}")
        print_rows(
            [
                {
                    "where": leaf.where,
                    "leaf": leaf.name,
                    "shape": " x ".join(map(str, leaf.shape)),
                    "type": leaf.dtype,
                    "bytes": f"{leaf.bytes:,}",
                }
                for leaf in leaves
                if leaf.stage == stage
            ],
            wide=True,
        )
