"""`fedlens data`: data sets and splits."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .format import (
    CLIENTS,
    Json,
    Style,
    Width,
    Words,
    columns,
    figures,
    needed,
    print_rows,
    print_text,
    say_json,
    split_words,
)

data = typer.Typer(no_args_is_help=True, help="Data sets and splits.", rich_markup_mode=None)


@data.command("list")
def data_list(json: Json = False) -> None:
    """Every data set and where it was found, and every partition."""
    from ..data.show import list_rows

    rows = list_rows()
    if json:
        say_json(rows)
        return
    for kind, shown in {"data": ("name", "state", "about"), "partition": ("name", "about", "options")}.items():
        print_rows([{name: row[name] for name in shown} for row in rows if row["kind"] == kind])
    print("`fedlens data get NAME` says what to fetch and where to put it")


@data.command("get")
def data_get(name: str, json: Json = False) -> None:
    """Fetch and decode a data set into the cache."""
    from ..data.show import get

    row = get(name)
    say_json(row) if json else print_rows([row])


@data.command("check")
def data_check(
    names: Annotated[list[str] | None, typer.Argument(show_default=False)] = None, json: Json = False
) -> None:
    """Verify the checksums of data sets that are here.

    The exit code is 1 where something is damaged.
    """
    from ..data.show import check_rows

    rows = check_rows(names or ())
    say_json(rows) if json else _print_checked(rows)
    raise typer.Exit(1 if any(row["state"] == "damaged" for row in rows) else 0)


def _print_checked(rows: list[dict[str, Any]]) -> None:
    """What is wrong first; then folders, and a table of what is sound."""
    for row in rows:
        if row["state"] == "damaged":
            print_text(f"{row['name']}: {row['where']}")
    for row in rows:
        if "classes" not in row and row["state"] != "damaged":
            print_text(f"{row['name']}: {row['state']} ({row['where']})")
    shown = ("name", "state", "train", "test", "classes", "size")
    read = [
        {name: row[name] for name in shown} | {"checksum": row["checksum"][:16]} for row in rows if "classes" in row
    ]
    if read:
        print_rows(read)


@data.command("show")
def data_show(
    words: Words = None,
    out: Annotated[str, typer.Option(help="The picture.")] = "split.png",
    style: Style = "screen",
    width: Width = "3.3in",
    json: Json = False,
) -> None:
    """Draw who owns which images, and count them by class.

    Settings are those of `fedlens run`, such as data=cifar10 partition.alpha=0.1 clients=100.
    """
    from dataclasses import asdict

    from .. import config
    from ..data import Names, class_counts, skew
    from ..report.split_figure import check_place, draw_split

    experiment = config.read(*split_words(words))
    check_place(out, panels=style == "paper")
    images = experiment.images()
    _, split = experiment.federation(images)
    with figures(style, width) as printed:
        drawn = draw_split(images, split, out)
    pictures = [str(path) for path in printed or drawn]
    known, counts = Names.of(images, split), class_counts(split, images).tolist()
    row = {"hash": split.hash, "notes": list(split.notes), "skew": asdict(skew(split, images)), "pictures": pictures}
    if json:
        say_json({**row, "names": asdict(known), "counts": counts})
        return
    for note in split.notes:
        print(f"note: {note}")
    _print_counts(counts, known)
    print(f"split {split.hash[:16]}")
    print(*(pictures if printed else pictures[:1]), sep="\n")


def _print_counts(counts: list[list[int]], names: Any) -> None:
    """Training images by client and class; of classes that do not fit a screen, the three that a client has most of."""
    shown = [*enumerate(counts[:CLIENTS])]
    # Whole names, since other commands take them.
    called = {number: " ".join((str(number), *names.clients[number : number + 1])) for number, _ in shown}
    total = [sum(column) for column in zip(*counts, strict=True)]
    lines = [*((called[number], own) for number, own in shown), ("all", total)]
    rows = [
        {"client": who, "images": sum(own), **{names.label(at): count for at, count in enumerate(own)}}
        for who, own in lines
    ]
    if needed(rows) > (columns() or 80):
        rows = [{"client": who, "images": sum(own), **_mostly(own, names)} for who, own in lines]
    print_rows(rows)
    if len(counts) > CLIENTS:
        print(f"the first {CLIENTS} of {len(counts)} clients; --json has all")


def _mostly(own: list[int], names: Any) -> dict[str, Any]:
    most = sorted(range(len(own)), key=lambda at: -own[at])[:3]
    told = ", ".join(f"{names.label(at)} ({own[at]})" for at in most if own[at])
    return {"classes": sum(count > 0 for count in own), "most of class": told}
