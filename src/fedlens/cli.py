"""The command line. Nothing heavy is imported before a command needs it: help answers at once."""

from __future__ import annotations

import errno
import json as json_module
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="fedlens",
    help="Federated learning on data that differs, guided by what models look at.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Json = Annotated[bool, typer.Option("--json", help="End with one line of JSON on standard output.")]
Words = Annotated[list[str] | None, typer.Argument(metavar="[FILE.yaml] [key=value ...]", show_default=False)]


def _split(words: list[str] | None) -> tuple[str | None, list[str]]:
    from .core.errors import BadInput

    files = [word for word in words or () if "=" not in word]
    if len(files) > 1:
        raise BadInput(f"one YAML file at most, not {' and '.join(files)}; settings look like key=value")
    return (files[0] if files else None), [word for word in words or () if "=" in word]


@app.command(context_settings={"ignore_unknown_options": True})
def run(words: Words = None, json: Json = False) -> None:
    """Run one experiment; with no arguments a small real one that ends in under a minute.

    Every field of the configuration is a key: data=cifar10 partition.alpha=0.1 algorithm=scaffold rounds=50 ...
    """
    from . import config, panel, simulate

    experiment = config.read(*_split(words))
    with panel.watcher(json) as watcher:
        result = simulate.run(experiment, watcher=watcher)
    _closing(result, json)


@app.command()
def resume(
    run: Annotated[str, typer.Argument(help="The run's folder.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", show_default=False)] = None,
    json: Json = False,
) -> None:
    """Go on after a crash, to the same bits."""
    from . import panel, simulate

    with panel.watcher(json) as watcher:
        result = simulate.resume(run, tuple(words or ()), watcher=watcher)
    _closing(result, json)


@app.command()
def describe(
    algorithm: Annotated[str, typer.Argument(help="A method's name, such as scaffold.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", show_default=False)] = None,
    model: Annotated[str, typer.Option(help="The model its messages are about.")] = "cnn",
    classes: Annotated[int, typer.Option(min=1)] = 10,
    channels: Annotated[int, typer.Option(min=1)] = 3,
    size: Annotated[int, typer.Option(min=1, help="Pixels of a side.")] = 32,
    json: Json = False,
) -> None:
    """What a method sends, keeps and costs, from its own hooks."""
    from . import config
    from .describe import describe, settings, traffic

    experiment = config.read(None, [f"algorithm={algorithm}", f"model={model}", *(words or ())])
    leaves = describe(experiment, classes, channels, size)
    if json:
        rows = [leaf.__dict__ for leaf in leaves]
        _say_json({"algorithm": config.plain(experiment.algorithm), "bytes": traffic(leaves), "leaves": rows})
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(
        f"[bold]{algorithm}[/]: {' '.join((type(experiment.algorithm).__doc__ or '').split())}", highlight=False
    )
    console.print(", ".join(f"{k}={v}" for k, v in settings(experiment.algorithm)) or "no settings", highlight=False)
    table = Table("stage", "where", "leaf", "shape", "type", "bytes")
    table.columns[-1].justify = "right"
    for leaf in leaves:
        shape = " x ".join(map(str, leaf.shape))
        table.add_row(leaf.stage, leaf.where, leaf.name, shape, leaf.dtype, f"{leaf.bytes:,}")
    console.print(table)
    for stage, row in traffic(leaves).items():
        console.print(
            f"{stage}: " + ", ".join(f"{where} {count:,} bytes" for where, count in row.items()), highlight=False
        )


@app.command()
def diff(a: str, b: str, json: Json = False) -> None:
    """Whether two runs are the same to the bit: weights, client memories, metrics without timings. Exit code 0 or 1."""
    from .diff import differences

    found = list(differences(a, b))
    if json:
        _say_json({"same": not found, "differences": found})
    elif found:
        print(f"{a} and {b} differ: {found[0]}" + (f" (and {len(found) - 1} more)" if len(found) > 1 else ""))
    else:
        print(f"{a} and {b} are the same to the bit")
    raise typer.Exit(1 if found else 0)


def _closing(result: Any, json: bool) -> None:
    if json:
        _say_json(result.plain())
        return
    from .panel import size

    if result.accuracy is not None:
        print(f"accuracy {result.accuracy:.4f} (global model, pooled test set, after {result.rounds} rounds)")
    for name, spread in result.personal.items():
        words = {"before": "personal models before local training", "after": "personal models after local training"}
        numbers = f"mean {spread['mean']:.4f}, std {spread['std']:.4f}, worst decile {spread['worst_decile']:.4f}"
        print(f"{words.get(name, f'{name} models')}: {numbers} (each on its client's test shard)")
    print(f"sent up {size(result.bytes_up)}, down {size(result.bytes_down)}; {result.seconds:.1f} s; {result.run}")


def _say_json(value: Any) -> None:
    print(json_module.dumps(value))


def main() -> None:
    """One clear sentence for everything that can go wrong; the exit code says whose turn it is."""
    sys.exit(_guarded())


def _guarded() -> int:
    from .core.errors import BadInput, ClientFailed, RunFailed

    try:
        app(standalone_mode=False)
    except BadInput as error:
        return _complain(str(error), 2)
    except ClientFailed as error:
        print(error.trace, file=sys.stderr)
        return _complain(str(error), 1)
    except RunFailed as error:
        return _complain(str(error), 1)
    except KeyboardInterrupt:
        return _complain("stopped; what was checkpointed is kept: go on with `fedlens resume RUN`", 130)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            place = f" at {Path(error.filename).parent}" if error.filename else ""
            return _complain(
                f"the disk is full{place}; the last checkpoint is intact: make room, then `fedlens resume`", 1
            )
        raise
    except typer.Exit as stop:
        return stop.exit_code
    except Exception as error:
        if type(error).__module__.startswith("click") and hasattr(error, "format_message"):
            return _complain(error.format_message(), 2)  # pyright: ignore[reportAttributeAccessIssue]
        raise
    return 0


def _complain(sentence: str, code: int) -> int:
    print(f"fedlens: {sentence}", file=sys.stderr)
    return code
