"""The command line. Nothing heavy is imported before a command needs it: help answers at once."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer
import typer.core

from . import analyse, methods, papers, run
from .data import data
from .deploy import deploy
from .errors import Explained, explain_error, notes

typer.core.HAS_RICH = False  # help is plain text: brackets escaped for rich would show as \[default: 1]

app = typer.Typer(
    name="fedlens",
    help="Federated learning on data that differs, guided by what models look at.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_ANY_WORD = {"ignore_unknown_options": True}


def _say_version(asked: bool) -> None:
    if asked:
        from .. import __version__

        typer.echo(f"fedlens {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_say_version, is_eager=True, help="Say which FedLens this is, and stop."),
]


@app.callback()
def about(version: Version = False) -> None:
    pass


app.command(context_settings=_ANY_WORD, epilog=methods.help_text())(run.run)
app.command()(run.resume)
app.command()(run.describe)
app.command("list")(methods.list_known)
app.command()(analyse.diff)
app.command(context_settings=_ANY_WORD)(analyse.explain)
app.command()(analyse.clients)
app.command("time")(analyse.time_on_devices)
app.command()(run.bench)
app.command(context_settings=_ANY_WORD)(run.compare)
app.command(context_settings=_ANY_WORD)(run.recommend)
app.command()(papers.reproduce)
app.command()(analyse.audit)
app.command()(analyse.report)
app.command()(analyse.ui)
app.add_typer(data, name="data")
app.add_typer(deploy, name="deploy")


def main() -> None:
    """One clear sentence for everything that can go wrong; the exit code says whose turn it is."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, io.TextIOWrapper
        ):  # a locale without UTF-8 spells what it can, and shows the rest as \u2013
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _guarded()
    except BrokenPipeError:  # whoever read it, such as head, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    sys.exit(code)


def _guarded() -> int:
    try:
        with notes():
            code = app(prog_name="fedlens", standalone_mode=False)
    except Explained as stop:
        return stop.code
    except Exception as error:
        return explain_error(error, None)
    return explain_error(KeyboardInterrupt(), None) if code == 130 else code or 0  # typer's answer to Ctrl-C
