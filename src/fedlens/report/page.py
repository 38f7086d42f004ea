"""`fedlens report`: runs as one HTML file that needs nothing else, no network and no server."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from .. import __version__
from ..audit.attack import LEGEND
from ..core.errors import BadInput
from ..core.files import write_atomic
from ..plots.style import COLOURS, DARK_COLOURS, DASHES
from ..runs.read import differing, runs_in
from . import summary_text as story
from .collect import collect
from .ranking import ranked
from .thumbnails import Pictures

_NOT_SHOWN = ("settings", "owned", "timed", "compared")  # of a run: shown elsewhere, or nowhere
_SCRIPTS = tuple(  # in this order, as one
    f"{name}.js" for name in ("elements", "tables", "charts", "lines", "answer", "sections", "details")
)


def write(runs: Sequence[Path], out: Path, latency: bool = False) -> Path:
    """A page about these runs, or those below these folders; with latency, that of sub-models is measured first."""
    if out.is_dir():
        raise BadInput(f"--out {out} is a folder; name a file such as {out / 'report.html'}")
    text = page(gather(runs, latency))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, text.encode())
    return out


def gather(paths: Sequence[Path], latency: bool = False) -> dict[str, Any]:
    """All that the page shows. Its script takes every number from here."""
    folders, pictures = runs_in(paths), Pictures()
    runs = [collect(folder, name, pictures, latency) for folder, name in zip(folders, _names(folders), strict=True)]
    groups, fields = ranked(runs)
    measure = story.measure_for([group for group in groups if group["complete"]])
    having = {model for group in groups for model in group["curves"]} | {measure}
    having |= {"personal"} if story.personal_models(groups) else set()
    return {
        "version": __version__,
        "title": _title(runs, groups),
        **story.told(runs, groups, fields),
        "warnings": story.warnings(runs, groups, fields),
        "measure": measure,
        "averaged": story.averaged(groups),  # what the means that rank are over
        "measures": {name: words for name, words in story.MODELS.items() if name in having},
        "personal_models": story.personal_models(groups),
        "arenas": len(fields),
        "groups": groups,
        "splits": _splits(runs),
        "settings": _settings(runs),
        "left_out": pictures.left_out,
        "timed": next((run["timed"] for run in runs if run.get("timed")), ""),
        "audit_legend": LEGEND,
        "dashes": DASHES,
        "runs": [{k: v for k, v in run.items() if k not in _NOT_SHOWN} for run in runs],
    }


def _names(folders: Sequence[Path]) -> list[str]:
    """Folders as seen from the one that holds them all."""
    places = [folder.absolute() for folder in folders]
    root = os.path.commonpath([place.parent for place in places])
    return [os.path.relpath(place, root) for place in places]


def _title(runs: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]]) -> str:
    methods = list(dict.fromkeys(group["method"] for group in groups))
    data = list(dict.fromkeys(run["passport"]["data"]["name"] for run in runs if "passport" in run))
    named = ", ".join(methods[:6]) + (" and more" if len(methods) > 6 else "")
    return f"{named} on {', '.join(data[:3])}" if groups else "Runs that cannot be read"


def _splits(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Who owns how many images of which class, once for each split."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        if run.get("owned"):
            card = run["passport"]
            split = {
                "hash": run["split"],
                "data": card["data"]["name"],
                "notes": card.get("split_notes", []),
                "runs": [],
            }
            found.setdefault(run["split"], split | run["owned"])["runs"].append(run["name"])
    return list(found.values())


def _settings(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Settings that all runs have in common, and the others run by run."""
    known = [{k: v for k, v in run["settings"].items() if k != "out"} for run in runs]
    other = differing([each for each in known if each])
    common = {key: value for each in known for key, value in each.items() if key not in other}
    return {"common": common, "other": other, "each": [{k: v for k, v in each.items() if k in other} for each in known]}


# ---- HTML ------------------------------------------------------------------------------------------------------------
def page(content: dict[str, Any]) -> str:
    """Only the script and the style that are in the package can act: a policy names them by their hashes."""
    style, script = style_sheet(), "\n".join(asset(name) for name in _SCRIPTS)
    return asset("page.html").format(
        title=html.escape(f"{content['title']} · FedLens"),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        content=inert(content),
    )


def inert(content: Any) -> str:
    """JSON that no HTML parser takes for anything else."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def style_sheet() -> str:
    light, dark = (
        ";".join(f"--c{number}:{colour}" for number, colour in enumerate(each)) for each in (COLOURS, DARK_COLOURS)
    )
    return asset("page.css").replace("/* light palette */", light).replace("/* dark palette */", dark)


def asset(name: str) -> str:
    return (resources.files("fedlens.report") / "assets" / name).read_text("utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
