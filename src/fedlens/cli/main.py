"""The command line. Nothing heavy is imported before a command needs it: help answers at once."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
import typer.core

from . import analyse, describe, explain, export, league, methods, papers, run, runs
from .data import data
from .deploy import deploy
from .errors import Explained, explain_error, notes
from .startup import end_at_once, with_code

typer.core.HAS_RICH = False  # help is plain text: brackets escaped for rich would show as \[default: 1]


class _Grouped(typer.core.TyperGroup):
    """Commands by what they are for."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, commands in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:9}", summary) for name, (_, summary) in commands.items()])


app = typer.Typer(
    name="fedlens",
    cls=_Grouped,
    help="Federated learning on data that differs, guided by what models look at.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


_GROUPS: dict[str, dict[str, tuple[Callable[..., None] | typer.Typer, str]]] = {
    "Train": {
        "run": (run.run, "Run one experiment; alone, a small one in under a minute."),
        "resume": (run.resume, "Go on after a crash; on a CPU, to the same bits."),
        "compare": (run.compare, "Methods on the same data: verdict, table, curves, costs."),
        "league": (league.league, "Compare methods over many settings, at an equal budget."),
        "reproduce": (papers.reproduce, "Tables and figures of papers."),
    },
    "Choose": {
        "recommend": (run.recommend, "Methods worth trying on a split like yours, and why."),
        "describe": (describe.describe, "What a method sends, keeps and costs."),
        "data": (data, "Data sets and splits."),
        "bench": (run.bench, "Images per second of each engine on this machine."),
    },
    "Understand results": {
        "report": (analyse.report, "One HTML file about runs that needs nothing else."),
        "ui": (analyse.ui, "A live page over a folder of runs."),
        "clients": (analyse.clients, "What each client gets out of a run, and how fair that is."),
        "explain": (explain.explain, "Draw what models look at."),
        "audit": (analyse.audit, "Attack what the server received in a run."),
        "time": (analyse.time_on_devices, "How long runs would have taken on given devices."),
    },
    "Manage runs": {
        "list": (runs.list_known, "The runs below runs/, the newest first; or the methods."),
        "show": (runs.show, "One run: state, result, notes, settings, what to do next."),
        "note": (runs.note, "Write a note or tags on a run, or read them."),
        "diff": (analyse.diff, "Whether two runs are the same to the bit."),
        "rm": (runs.remove, "Delete runs."),
    },
    "Use elsewhere": {
        "export": (export.export, "A run's model for use without FedLens."),
        "deploy": (deploy, "The same experiment on several machines."),
    },
}
_TAKE_ANY_WORD = (run.run, run.compare, run.recommend, league.league, explain.explain)


def _register(name: str, command: Callable[..., None] | typer.Typer) -> None:
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
        return
    settings = {"ignore_unknown_options": True} if command in _TAKE_ANY_WORD else None
    epilog = methods.help_text() if command is run.run else None
    app.command(name, context_settings=settings, epilog=epilog)(command)


for _commands in _GROUPS.values():
    for _name, (_command, _) in _commands.items():
        _register(_name, _command)


def main() -> None:
    """One clear sentence for everything that can go wrong; the exit code says whose turn it is."""
    end_at_once()
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
    sys.exit(with_code(code))


def _guarded() -> int:
    try:
        with notes():
            code = app(prog_name="fedlens", standalone_mode=False)
    except Explained as stop:
        return stop.code
    except Exception as error:
        return explain_error(error, None)
    return explain_error(KeyboardInterrupt(), None) if code == 130 else code or 0  # typer's answer to Ctrl-C
