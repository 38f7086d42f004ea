"""Commands about run folders as such: list, show, rm, note."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .format import Json, columns, needed, print_rows, print_text, say_json
from .methods import method_rows

Tags = Annotated[list[str] | None, typer.Option("--tag", help="A word to find it by; may be given several times.")]
_COLUMNS = (
    "run",
    "method",
    "data",
    "clients",
    "seed",
    "round",
    "accuracy",
    "bytes",
    "seconds",
    "state",
    "tags",
    "began",
)
_SPARED = ("bytes", "seed", "seconds", "began", "round", "data", "method")  # left out in this order where room lacks
_LARGEST_FIRST = ("accuracy", "bytes", "seconds", "round", "clients", "began")


def list_known(
    folders: Annotated[list[str] | None, typer.Argument(metavar="[FOLDER ...]", show_default=False)] = None,
    methods: Annotated[bool, typer.Option("--methods", help="The methods, by family, in place of runs.")] = False,
    sort: Annotated[str, typer.Option(help="A column, such as accuracy, method or began.")] = "began",
    reverse: Annotated[bool, typer.Option("--reverse", help="The other way round.")] = False,
    tag: Annotated[str, typer.Option(help="Only runs with this tag.")] = "",
    json: Json = False,
) -> None:
    """The runs below runs/, or below other folders, the newest first; --methods lists the methods instead."""
    from ..core.errors import BadInput, nearest
    from ..runs.labels import checked

    if methods:
        rows = method_rows()
        say_json({"methods": rows}) if json else print_rows(rows)
        return
    if sort not in _COLUMNS:
        raise BadInput(f"--sort {sort!r} is no column; {nearest(sort, _COLUMNS)}")
    wanted = {*checked([tag])} if tag else set()
    rows = [row for row in run_rows(folders or ["runs"]) if wanted <= {*row["tags"]}]
    known = [row for row in rows if row[sort] is not None]
    known.sort(key=lambda row: row[sort], reverse=(sort in _LARGEST_FIRST) != reverse)
    rows = [*known, *(row for row in rows if row[sort] is None)]
    if json:
        say_json({"runs": rows})
        return
    if rows:
        shown, said = _fitted([_readable(row) for row in rows], sort)
        for line in said:
            print_text(line)
        print_rows(shown)
    for row in rows:
        if row["state"] == "corrupt":
            print(f"{row['run']}: {row['trouble']}")
    if rows:
        print(f"{len(rows)} run{'s' * (len(rows) != 1)}; `fedlens show RUN` tells more")
    else:
        print(f"no runs below {', '.join(folders or ['runs'])}{f' have the tag {tag}' if tag else ''}")


def run_rows(folders: list[str]) -> list[dict[str, Any]]:
    """A row for each run below these folders, whole or not."""
    from ..core.errors import BadInput
    from ..runs.folder import RunFolder
    from ..runs.labels import labels
    from ..runs.read import runs_in
    from ..ui.follow import Followed

    found = []
    for path in runs_in(map(Path, folders)):
        run = Followed(path, str(path))
        run.refresh()
        row = {name: run.row.get(name) for name in (*_COLUMNS, "rounds", "trouble", "evaluated_on")}
        row |= {"run": str(path), "tags": []}
        try:
            row["tags"] = labels(path)["tags"]
            if row["state"] == "done" and (result := RunFolder(path).result()):  # the log has rounded numbers
                row |= {"bytes": result["bytes_up"] + result["bytes_down"], "seconds": result["seconds"]}
        except BadInput as error:
            row |= {"state": "corrupt", "trouble": str(error)}
        found.append(row)
    return found


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    """As people read it; with --json a share, bytes, seconds and milliseconds stay what they are."""
    from ..core.format import duration, percent, size

    shown = {name: row[name] for name in _COLUMNS if name != "clients"}
    shown |= {"round": f"{row['round'] or 0}/{row['rounds'] or 0}", "tags": ", ".join(row["tags"])}
    for name, form in (("accuracy", lambda v: percent(v, 2)), ("bytes", size), ("seconds", duration)):
        shown[name] = "" if row[name] is None else form(row[name])
    shown["began"] = time.strftime("%Y-%m-%d %H:%M", time.localtime((row["began"] or 0) / 1000))
    return shown


def _fitted(rows: list[dict[str, Any]], sort: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows in as many columns as a terminal has, and lines about what was taken out of them.

    First goes what all have, then columns that matter least: no cell is wrapped in the middle of a word or number.
    """
    room, same = columns() or 80, []
    rows = _without(rows, *(() if any(row["tags"] for row in rows) else ("tags",)))
    for name in ("data", "state", "round", "method", "seed") if len(rows) > 1 else ():
        if needed(rows) > room and len({row[name] for row in rows}) == 1:
            same.append(f"{name} {rows[0][name]}")
            rows = _without(rows, name)
    if needed(rows) > room:
        day, year = time.strftime("%Y-%m-%d "), time.strftime("%Y-")
        rows = [row | {"began": row["began"].removeprefix(day).removeprefix(year)} for row in rows]
    above = [os.path.dirname(row["run"]) for row in rows]
    above = "" if len({*map(os.path.isabs, above)}) > 1 else os.path.commonpath(above)
    if needed(rows) > room and above:
        same.append(f"run below {above}/")
        rows = [row | {"run": row["run"].removeprefix(f"{above}/")} for row in rows]
    spared = []
    for name in (each for each in _SPARED if each != sort and each in rows[0]):
        if needed(rows) > room:
            spared.append(name)
            rows = _without(rows, name)
    lines = [f"All: {', '.join(same)}"] if same else []
    return rows, [*lines, f"Not shown in {room} columns, but with --json: {', '.join(spared)}"] if spared else lines


def _without(rows: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in names} for row in rows]


def show(run: Annotated[str, typer.Argument(help="The run's folder.")], json: Json = False) -> None:
    """One run: how far it is, its result, tags and notes, what differs from the defaults, and what to do next."""
    from .. import config
    from ..experiment import Experiment
    from ..runs.folder import RunFolder
    from ..runs.labels import labels
    from ..runs.read import flat, settings_of

    path = RunFolder.open(run).path
    (row,), written, result = run_rows([str(path)]), labels(path), RunFolder(path).result()
    usual, settings = flat(config.to_dict(Experiment())), flat(settings_of(path))
    changed = {key: value for key, value in settings.items() if usual.get(key, "") != value and key != "out"}
    if json:
        say_json({**row, **written, "settings": settings, "changed": changed, "result": result})
        return
    for name, value in _readable(row).items():
        if value not in ("", None):
            _fact(name, str(value))
    if row["trouble"]:
        _fact("", row["trouble"])
    for name, line in _result_lines(result or {}):
        _fact(name, line)
    _fact("settings", " ".join(f"{key}={value}" for key, value in changed.items()) or "as they are by default")
    for note in written["notes"]:
        _fact("note", f"{note['at']}  {note['text']}")
    verbs = [*(() if row["state"] in ("done", "running") else ("resume",)), "report", "explain"]
    verbs += ["export"] if row["state"] == "done" else []
    _fact("next", ", ".join(f"fedlens {verb} {run}" for verb in verbs))


def _fact(name: str, words: str) -> None:
    """What is known of a run, below each other, in lines that fit the terminal."""
    print_text(f"{name:9} {words}", " " * 10)


def _result_lines(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a complete run found beside its accuracy."""
    from ..core.format import percent
    from ..runs.measures import best_line, measure_line

    for model, spread in (result.get("personal") or {}).items():
        mean, worst = (percent(spread[part], 2) for part in ("mean", "worst_decile"))
        yield "personal", f"{model}: mean {mean}, worst tenth {worst}"
    if line := measure_line(result.get("measures") or {}):
        yield "measures", line
    if best := result.get("best"):
        yield "best", best_line(best).removeprefix("best ")


def remove(
    runs: Annotated[list[str], typer.Argument(metavar="RUN ...", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Delete runs. Asks first; refuses what is no run, and a run that is running."""
    import sys

    from ..core.errors import BadInput
    from ..core.format import size
    from ..runs.folder import RunFolder
    from ..ui.follow import is_locked

    paths = list(dict.fromkeys(RunFolder.open(run).path for run in runs))
    for path in paths:
        if path.is_symlink():
            raise BadInput(f"{path} is a link: name the folder that it points to")
        if is_locked(path / "lock"):
            raise BadInput(f"{path} is running: stop it first")
        if inner := [each for each in path.rglob("config.yaml") if each.parent != path]:
            raise BadInput(f"{path} holds another run, {inner[0].parent}: delete that first")
        if Path.cwd().resolve().is_relative_to(path.resolve()):
            raise BadInput(f"{path} is where you are: go elsewhere first")
    sizes = {path: sum(each.lstat().st_size for each in path.rglob("*") if not each.is_dir()) for path in paths}
    if not yes:
        if not sys.stdin.isatty():
            raise BadInput("nobody can be asked here; say --yes to delete")
        for path, bytes in sizes.items():
            print(f"{path}  {size(bytes)}")
        if not typer.confirm(f"Delete {len(paths)} run{'s' * (len(paths) != 1)}?"):
            print("nothing was deleted")
            raise typer.Exit(1)
    for path in paths:
        (path / "config.yaml").unlink()  # first: half a folder is no run
        shutil.rmtree(path)
    if json:
        say_json({"deleted": [str(path) for path in paths], "bytes": sum(sizes.values())})
    else:
        print(f"deleted {', '.join(map(str, paths))} ({size(sum(sizes.values()))})")


def note(
    run: Annotated[str, typer.Argument(help="The run's folder.")],
    text: Annotated[str, typer.Argument(help="What to remember.", show_default=False)] = "",
    tag: Tags = None,
    untag: Annotated[list[str] | None, typer.Option("--untag", help="A tag to take away.")] = None,
    json: Json = False,
) -> None:
    """Write a note or tags on a run, or print those it has; neither changes its hash or its results."""
    from ..runs.folder import RunFolder
    from ..runs.labels import label

    found = label(RunFolder.open(run).path, tags=tag or (), without=untag or (), note=text.strip())
    if json:
        say_json({"run": run, **found})
        return
    print(f"tags: {', '.join(found['tags']) or 'none'}")
    for each in found["notes"]:
        print(f"{each['at']}  {each['text']}")
