"""`fedlens export`: a trained model as a folder that needs nothing of this package."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from .format import Json, one_run, say_json

if TYPE_CHECKING:
    from ..export.model import TrainedModel

To = Annotated[str, typer.Option(help="torch (weights and source), onnx, or exported (torch.export).")]
Out = Annotated[str, typer.Option(help="The new folder; without it, `export` beside the run.")]


def export(
    run: Annotated[str, typer.Argument(help="The run's folder.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[data.path=PLACE]", show_default=False)] = None,
    client: Annotated[str, typer.Option(help="A client's personal model, by number or name.")] = "",
    round: Annotated[
        str, typer.Option(help="Of this kept round, or best: by validation images; without it, of the last.")
    ] = "",
    to: To = "torch",
    sub_model: Annotated[bool, typer.Option("--sub-model", help="Only the filters that the client selected.")] = False,
    out: Out = "",
    push: Annotated[str, typer.Option(metavar="USER/NAME", help="Also upload it to the Hugging Face hub.")] = "",
    private: Annotated[bool, typer.Option("--private", help="With --push: where only you see it.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --push: only say what would be sent.")] = False,
    json: Json = False,
) -> None:
    """A run's model for use without FedLens: weights, network, preprocessing, a model card and predict.py."""
    from ..core.errors import BadInput
    from ..export.folder import check_form
    from ..export.hub import check_push
    from ..export.model import load

    check_form(to)
    if push:
        check_push(push, dry_run)
    elif dry_run:
        raise BadInput("--dry-run says what --push would send: name USER/NAME with --push")
    one_run("exported", run, words)
    model = load(run, client or None, _round(round), sub_model=sub_model)
    which = "-".join(["export", *([f"client-{client}"] if client else []), *([f"round-{round}"] if round else [])])
    place = Path(out) if out else Path(run) / (which + ("-sub-model" if sub_model else ""))
    written(model, place, to, Push(push, private, dry_run), json)


def _round(text: str) -> int | Literal["best"] | None:
    from ..core.errors import BadInput

    if text in ("", "best"):
        return "best" if text else None
    if not text.isdecimal() or int(text) == 0:
        raise BadInput(f"--round is {text!r}, but it should be the number of a kept round, or best")
    return int(text)


class Push(NamedTuple):
    """Where to on the hub, if anywhere."""

    name: str = ""
    private: bool = False
    dry_run: bool = False


def written(model: TrainedModel, place: Path, to: str, push: Push = Push(), json: bool = False) -> None:  # noqa: B008
    """Write the folder, upload it where that is asked for, and say what is there."""
    from ..core.format import percent
    from ..export.folder import write
    from ..export.hub import upload, would_send

    command = shlex.join(["fedlens", *sys.argv[1:]])
    files = write(model, place, to, command)
    sent = would_send(place, push.name, push.private) if push.dry_run else []
    address = upload(place, push.name, push.private) if push.name and not push.dry_run else ""
    accuracy = model.facts.get("accuracy")
    if json:
        said = {"folder": str(place), "files": files, "accuracy": accuracy, "classes": list(model.classes)}
        say_json({**said, **({"hub": address} if address else {}), **({"would_send": sent} if sent else {})})
        return
    print(f"{place}: {', '.join(files)}")
    if accuracy is not None:
        best = f", after round {model.facts['round']}, the best on validation images" if model.facts.get("best") else ""
        print(f"accuracy of {model.facts['whose']}: {percent(accuracy, 2)} on {model.facts['on']}{best}")
    print(f"try it: python {shlex.quote(str(place / 'predict.py'))} FOLDER_OF_IMAGES")
    for line in [*sent, *([address] if address else [])]:
        print(line)
