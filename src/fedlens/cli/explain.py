"""`fedlens explain`: what models look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .format import Json, Style, Width, figures, is_setting, numbers, print_text, runs_among, say_json, split_words


def explain(
    words: Annotated[list[str] | None, typer.Argument(metavar="[RUN ...] [key=value ...]", show_default=False)] = None,
    weights: Annotated[str, typer.Option(help="A safetensors file, when there is no run.")] = "",
    clients: Annotated[str, typer.Option(help="Clients whose personal models are shown, by number or name: 0,3.")] = "",
    rounds: Annotated[str, typer.Option("--round", help="Rounds whose models are shown, such as 50,100.")] = "",
    methods: Annotated[str, typer.Option(help="Such as lrp,guided_backprop,grad_cam.")] = "",
    images: Annotated[int, typer.Option(min=1, max=64)] = 6,
    which: Annotated[str, typer.Option(help="With several runs: places in the client's test images, as 0,7.")] = "",
    out: Annotated[str, typer.Option(help="PNG, SVG or PDF.")] = "",
    style: Style = "screen",
    width: Width = "3.3in",
    json: Json = False,
) -> None:
    """Draw what models look at: a run's, or model=... with --weights FILE on data=...

    Several runs are drawn side by side: their models of one client (--clients 3) by one method, on its test images.
    """
    from ..attribution import METHODS
    from ..attribution.figures import USUAL
    from ..core.errors import BadInput, nearest

    chosen = [name.strip() for name in methods.split(",") if name.strip()]
    for name in chosen:
        if name not in METHODS:
            raise BadInput(f"--methods {name!r} is unknown; {nearest(name, METHODS)}")
    place, told = Path(out) if out else None, list[str]()
    with figures(style, width) as printed:
        if len([word for word in words or () if not is_setting(word) and not word.startswith("-")]) > 1:
            if rounds or weights:
                raise BadInput("several runs are compared by their newest models: without --round and --weights")
            drawn = _several(words or [], place, clients, chosen or ["grad_cam"], images, which)
        elif which:
            raise BadInput("--which is for several runs; name two or more")
        else:
            asked = clients, numbers("--round", rounds), chosen or list(USUAL), images
            drawn = _one(words, weights, place, *asked, told)
    paths = printed or [path for path, _ in drawn]
    if json:
        say_json({"picture": str(paths[0]), "more": [str(path) for path in paths[1:]], "notes": told})
        return
    for sentence in told:
        print_text(f"{sentence}.")
    for path, how_to_read in drawn:
        print(path)
        print_text(f"  {how_to_read}", indent="  ")
    for path in printed:
        if path not in [one for one, _ in drawn]:
            print(path)


def _several(
    words: list[str], place: Path | None, clients: str, methods: list[str], count: int, which: str
) -> list[tuple[Path, str]]:
    from ..core.errors import BadInput
    from ..explain.runs import LEGEND, explain_runs

    runs = runs_among(words)
    who = _clients(runs[0], clients) or [0]
    if len(who) > 1 or len(methods) > 1:
        raise BadInput("several runs are compared by one client's models and one method: --clients 0 --methods lrp")
    at = numbers("--which", which)
    return [(explain_runs(runs, place, client=who[0], count=count, which=at, method=methods[0]), LEGEND)]


def _one(
    words: list[str] | None,
    weights: str,
    place: Path | None,
    clients: str,
    rounds: list[int],
    methods: list[str],
    count: int,
    told: list[str],
) -> list[tuple[Path, str]]:
    """A run's models, or one of a file; with what to know of how to read it."""
    from .. import config
    from ..attribution.figures import ASKED, legend
    from ..core.errors import BadInput
    from ..explain.run import explain_model, explain_run
    from ..papers.explain import own_figures

    run, settings = split_words(words)
    how = {"count": count, "methods": methods, "tell": told.append}
    if not run:
        drawn = explain_model(config.read(None, settings), weights, place or Path("explain.png"), **how)
        return [(drawn, legend(ASKED["given"]))]
    if weights:
        raise BadInput("a run has its own model, data and weights: name a RUN, or model=, data= and --weights")
    runs_among(words)
    who = _clients(run, clients)
    drawn = explain_run(run, place, clients=who, rounds=rounds, **how)
    return [(drawn, legend(ASKED["true"])), *own_figures(run, place, who, count)]


def _clients(run: str, text: str) -> list[int]:
    from ..runs.folder import RunFolder

    names = RunFolder.open(run).names()
    return [names.number(part.strip()) for part in text.split(",") if part.strip()]
