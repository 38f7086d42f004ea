"""Writes a card for each method, from its docstring, its fields and its own messages; and what each lets leave.

python docs/cards.py                       writes docs/methods.md, docs/methods/ and a table in docs/privacy.md
python docs/cards.py --check               only says whether they are stale, by its exit code
python docs/cards.py --measured FOLDER     first takes over the numbers of a finished `fedlens compare`

What no code can say (the rule as an equation, when to use it, how public code differs) is in methods.yaml. What was
measured is in measured.json and in the package's evidence.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import io
import json
import sys
import textwrap
import tokenize
import types
import typing
from pathlib import Path
from typing import Any

import yaml

from fedlens import config
from fedlens.algorithms import ALGORITHMS, FAMILIES
from fedlens.core.dry_run import PUBLIC
from fedlens.recommend.rank import known
from fedlens.simulate.describe import about_rows, describe, described_with, preset_table, usual_model

DOCS = Path(__file__).parent
MADE = "<!-- made by `python docs/cards.py` from the code, methods.yaml and measured.json: change those -->"
MODELS = {"cnn": "the default CNN", "pse_net": "PSE's network"}  # what a card's messages are about
RUNS = {  # what else a method needs before it can run
    "pse": "model=pse_net",
    "fedrep": "local.epochs=5",
    **dict.fromkeys(("fedcm", "perfedavg", "pfedme"), "local.momentum=0"),
    "feddf": "auxiliary=fashion_mnist",
    "fedaux": "auxiliary=fashion_mnist",
}
ONCE = {  # what the bytes that are handed out once are about
    **dict.fromkeys(("fedxds", "fedfed"), "shared images are those of a federation of two images"),
    "fedaux": f"features and scores are of {PUBLIC} public images and grow with their number",
}
UNCHECKED = "Not checked against the paper itself: the rule is that of public code and of what others write about it."
UNCOMPARED = "Not compared with public code."
BEGIN, END = "<!-- what leaves: made by `python docs/cards.py` from the code -->", "<!-- end of what leaves -->"
PART = "part of delta"  # where some weights stay at the client, or are left out
REVEALS = {  # what a part of a message can tell at worst to whoever knows the method; the most telling first
    "x": "the images, masked (FedXDS) or minus an autoencoder's reconstruction (FedFed), under noise; to all clients",
    "vae": "images that an autoencoder learned to draw",
    "control": "images and labels of small batches: after one step it is the gradient itself",
    "delta": "images and labels of small batches, whether an image was trained on, which classes there are",
    "model": "as delta, which is its difference to what was sent down; with FedAMP and FedFomo to other clients",
    PART: "as delta, limited to these parameters",
    "y": "labels of the images beside them; to all clients",
    "row": "its head and the mean features of each class; to all clients",
    "scatter": "how a network's features of a class differ from image to image",
    "means": "mean features of each class; of a class with one image, those of that image",
    "sensitivity": "which weights matter for its images",
    "prototypes": "mean features of each class; of a class with one image, those of that image",
    "counts": "how many images of each class, or (FedProto) which classes there are",
    "scores": "which public images are like its own, with noise",
    "saliency": "a sum over all its images (FedSL: about their brightness), and how many they are",
    "cluster": "which of several models fits its images best",
    "mean": "what its images have in common, as the mean of their features",
    "discrepancy": "how uneven its labels are",
    "kept": "which filters matter for its images",
    "weight": "how many images it has",
    "examples": "how many images it has",
    "reach": "how many local steps it took",
    "shape": "the size of an image",
    "ticket": "which messages are of one client",
}
BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def cards() -> dict[Path, str]:
    """Every generated file and its text."""
    said = yaml.safe_load((DOCS / "methods.yaml").read_text("utf-8"))
    if wrong := set(said) ^ set(ALGORITHMS):
        raise SystemExit(f"methods.yaml and the registry disagree about {', '.join(sorted(wrong))}")
    for name, entry in said.items():
        if lacking := {"equation", "use"} - entry.keys():
            raise SystemExit(f"methods.yaml: {name} lacks {', '.join(sorted(lacking))}")
    measured = json.loads((DOCS / "measured.json").read_text("utf-8"))
    made = {DOCS / "methods" / f"{name}.md": card(name, said[name], measured) for name in ALGORITHMS}
    privacy = (DOCS / "privacy.md").read_text("utf-8")
    before, after = privacy.partition(BEGIN)[0], privacy.partition(END)[2]
    leaving = f"{before}{BEGIN}\n\n{what_leaves()}\n\n{END}{after}"
    return {**made, DOCS / "methods.md": overview(measured), DOCS / "privacy.md": leaving}


# ---- one card --------------------------------------------------------------------------------------------------------
def card(name: str, said: dict[str, Any], measured: dict[str, Any]) -> str:
    kind = ALGORITHMS[name]
    first, *rest = paragraphs(kind)
    parts = [
        f"# {kind.__name__}",
        MADE,
        first,
        f"```\n{said['equation'].rstrip()}\n```",
        *rest,
        *disclosed(name),
        *([UNCHECKED] if said.get("unchecked") else []),
        "## When to use it",
        said["use"],
        "## Beside public code",
        said.get("public", UNCOMPARED),
        "## What it sends and keeps",
        messages(name),
        "## Settings",
        knobs(kind),
        *named(kind),
        "## What we measured",
        results(name, measured),
        "## Try it",
        f"```bash\n{command(name)}\n```",
        f"Code: [{source(kind).name}](../../{source(kind).relative_to(DOCS.parent).as_posix()}). "
        f"All methods: [overview](../methods.md).",
    ]
    return "\n\n".join(parts) + "\n"


def paragraphs(kind: type) -> list[str]:
    """Of the docstring, one line each; the line about traffic is left out, which the messages themselves tell."""
    text = inspect.cleandoc(kind.__doc__ or "")
    joined = [" ".join(part.split()) for part in text.split("\n\n")]
    return [part for part in joined if not part.startswith("down:")]


def disclosed(name: str) -> list[str]:
    """What leaves beside updates, or whom it reaches."""
    found = config.read(None, [f"algorithm={name}", *described_with(name)]).discloses
    return [f"Beside model updates: {said}." for said in dict.fromkeys(found.values())]


def source(kind: type) -> Path:
    return Path(inspect.getfile(kind)).resolve()


def command(name: str) -> str:
    return " ".join(filter(None, (f"fedlens run algorithm={name}", *described_with(name), RUNS.get(name, ""))))


# ---- messages --------------------------------------------------------------------------------------------------------
def messages(name: str) -> str:
    model = usual_model(name)
    experiment = config.read(None, [f"algorithm={name}", f"model={model}", *described_with(name)])
    found: dict[str, dict[str, dict[str, int]]] = {}
    leaves = describe(experiment, classes=10, channels=3, size=32)
    for leaf in leaves:
        if leaf.name != "(header)":
            place = found.setdefault(leaf.stage, {}).setdefault(leaf.where, {})
            place[leaf.name] = leaf.bytes  # a stage that comes twice sends the same twice, not twice as much
    once = any("shared" in stage for stage in found.values())
    columns = ["down", *(["shared"] if once else []), "up", "memory"]
    titles = {"down": "down", "shared": "down, once", "up": "up", "memory": "kept by the client"}
    head = ["part", *(titles[where] for where in columns)]
    rows = [[stage, *(contents(places.get(where, {})) for where in columns)] for stage, places in found.items()]
    about = f"Of a client that takes part in a round, for {MODELS[model]} on colour images of 32 pixels, ten classes."
    about += f" Down, once: {ONCE[name]}." if once else ""
    about += f" {said}" if (said := about_rows(leaves)) else ""
    return f"{table(head, rows)}\n\n{about} From its own hooks, as `fedlens describe {name}` shows them."


# ---- what leaves a client --------------------------------------------------------------------------------------------
def what_leaves() -> str:
    """What each part of a message shows; then methods, those that send the same in one row, the least first."""
    sent = {name: parts_sent(name) for name in ALGORITHMS}
    parts = {part for each in sent.values() for when in each for part in when}
    if wrong := parts ^ set(REVEALS):
        raise SystemExit(f"REVEALS in docs/cards.py and what methods send disagree about {', '.join(sorted(wrong))}")
    rows = []
    for each_round, once in sorted(set(sent.values()), key=lambda when: (len(when[0]) + len(when[1]), when)):
        names = [name for name, parts in sent.items() if parts == (each_round, once)]
        worst = next((part for part in REVEALS if part in (*each_round, *once)), "nothing")
        for some in (names[at : at + 13] for at in range(0, len(names), 13)):  # a cell that can be read
            linked = ", ".join(f"[{ALGORITHMS[name].__name__}](methods/{name}.md)" for name in some)
            rows.append([linked, ", ".join(each_round) or "nothing", ", ".join(once) or "nothing", worst])
    methods = table(["method", "in each round", "once", "most revealing part"], rows)
    return f"{table(['part', 'at worst it shows'], [[part, told] for part, told in REVEALS.items()])}\n\n{methods}"


@functools.lru_cache
def parts_sent(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a client sends by this method at its defaults: (in each round that it takes part in, once)."""
    experiment = config.read(None, [f"algorithm={name}", f"model={usual_model(name)}", *described_with(name)])
    rounds = [stage.rounds for stage, at, _ in experiment.timetable() if at == 0]
    ups: dict[str, dict[str, tuple[int, ...]]] = {}
    for leaf in describe(experiment, classes=10, channels=3, size=32):
        up = ups.setdefault(leaf.stage, {})
        if leaf.where == "up" and leaf.name != "(header)":
            up[leaf.name] = leaf.shape
    found: tuple[dict[str, None], dict[str, None]] = {}, {}
    for up, count in zip(ups.values(), rounds, strict=True):
        tops = dict.fromkeys(path.partition("/")[0] for path in up)
        is_part = any(up.get(path) != shape for path, shape in whole_update(usual_model(name)).items())
        found[count == 1].update(dict.fromkeys(PART if top == "delta" and is_part else top for top in tops))
    each_round, once = (tuple(sorted(parts, key=list(REVEALS).index)) for parts in found)
    return each_round, once


@functools.lru_cache
def whole_update(model: str) -> dict[str, tuple[int, ...]]:
    """The update of all weights of a model: FedAvg's."""
    experiment = config.read(None, ["algorithm=fedavg", f"model={model}"])
    leaves = describe(experiment, classes=10, channels=3, size=32)
    return {leaf.name: leaf.shape for leaf in leaves if leaf.where == "up" and leaf.name.startswith("delta/")}


def contents(leaves: dict[str, int]) -> str:
    sizes: dict[str, int] = {}
    for path, count in leaves.items():
        top = path.partition("/")[0]
        sizes[top] = sizes.get(top, 0) + count
    return ", ".join(f"{top} ({size(count)})" for top, count in sizes.items()) or "nothing"


def size(count: int) -> str:
    if count >= 1e6:
        return f"{count / 1e6:.2f} MB"
    return f"{count / 1e3:.1f} kB" if count >= 1e3 else f"{count} B"


# ---- settings --------------------------------------------------------------------------------------------------------
def named(kind: type) -> list[str]:
    """Settings that go by a name, beside the defaults."""
    head, rows = preset_table(kind())
    if not rows:
        return []
    name = next(name for name, one in ALGORITHMS.items() if one is kind)
    said = f"`algorithm={name}/PRESET` takes a column of this table; what is not in it is as by default."
    return ["## Presets", said, table(head, [[f"`{cell}`" for cell in row] for row in rows])]


def knobs(kind: type) -> str:
    hints, notes = typing.get_type_hints(kind, include_extras=True), comments(kind)
    rows = [
        [f"`algorithm.{field.name}`", default(field.default), allowed(hints[field.name]), notes.get(field.name, "")]
        for field in dataclasses.fields(kind)
    ]
    rows.sort(key=lambda row: row[0] == "`algorithm.server_lr`")  # what all methods have comes last
    return table(["key", "default", "may be", "what it is"], rows) if rows else "None of its own."


def default(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        return f"`{type(value).__name__.lower()}`"
    return "none" if value is None else f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value}`"


def allowed(hint: Any) -> str:
    """The type of a setting in words."""
    arguments = typing.get_args(hint)
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        inner = [allowed(one) for one in arguments if one is not type(None)]
        return " or ".join([*inner, *(["none"] if type(None) in arguments else [])])
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{one}`" for one in arguments)
    if typing.get_origin(hint) is typing.Annotated:
        bounds = [f"{sign} {getattr(one, name)}" for one in arguments[1:] for name, sign in BOUNDS.items()
                  if hasattr(one, name)]  # fmt: skip
        return f"{allowed(arguments[0])} {' and '.join(bounds)}"
    words = {int: "whole number", float: "number", bool: "true, false", str: "text"}
    return words.get(hint, "any method" if getattr(hint, "__name__", "") == "Recipe" else str(hint))


def comments(kind: type) -> dict[str, str]:
    """The comment beside each field, of the class and of those it is derived from; the nearest wins."""
    found: dict[str, str] = {}
    for cls in reversed([one for one in kind.__mro__ if dataclasses.is_dataclass(one)]):
        text = textwrap.dedent(inspect.getsource(cls))
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        beside = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
        (body,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
        for node in body.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                if note := " ".join(beside[line] for line in lines if line in beside):
                    found[node.target.id] = note
    return found


# ---- results ---------------------------------------------------------------------------------------------------------
def results(name: str, measured: dict[str, Any]) -> str:
    rows = league_rows(name)
    for result in (result for result in known() if not result.get("league")):
        for kind, method in ((k, m) for k in ("global", "personal") for m in result[k]):
            if method == name or method.startswith(f"{name}/"):
                where = f"{result['data']}, {result['partition']}, {result['clients']} clients, {result['model']}"
                rounds = f"{result['rounds']} rounds, {result['seeds']} seed{'s' * (result['seeds'] > 1)}"
                link = f"[{result['source']}](../../{result['source']})"
                numbers = [percent(result[kind][method]), percent(result[kind].get("fedavg"))]
                preset = f" (`{method}`)" if method != name else ""
                rows.append([f"{where}; {rounds}", f"{kind}{preset}", *numbers, link])
    fedavg = next(row for row in measured["rows"] if row["method"] == "fedavg")
    for row in (row for row in measured["rows"] if method_of(row) == name):
        preset = f" (`{row['method']}`)" if row["method"] != name else ""
        for kind in (kind for kind in ("global", "personal") if row[kind] is not None):
            numbers = [percent(row[kind]), percent(fedavg[kind])]
            link = "[all methods](../methods.md#all-methods-on-one-split)"
            rows.append([measured["about"], f"{kind}{preset}", *numbers, link])
    if not rows:
        line = " ".join(["fedlens compare fedavg", name, *described_with(name), *RUNS.get(name, "").split()])
        return f"Nothing yet. `{line}` measures it on your data."
    head = ["where", "model", "accuracy, %", "FedAvg there, %", "from"]
    return f"{table(head, rows)}\n\nOne seed shows where to begin, no ranking."


def league_rows(name: str) -> list[list[str]]:
    """One for each kind of model: the mean over the worlds of the league, which are named on its page."""
    rows = []
    for kind in ("global", "personal"):
        worlds = [one for one in known() if one.get("league") and {name, "fedavg"} <= one[kind].keys()]
        if worlds:
            means = [sum(one[kind][each] for one in worlds) / len(worlds) for each in (name, "fedavg")]
            seeds = min(one["seeds"] for one in worlds)
            where = f"the league: mean of {len(worlds)} world{'s' * (len(worlds) > 1)}, {seeds} seeds each, tuned rates"
            link = "[results/league.md](../../results/league.md)"
            rows.append([where, kind, *map(percent, means), link])
    return rows


def method_of(row: dict[str, Any]) -> str:
    """Without its preset: `fedfed/earlier` is FedFed with the defaults of an earlier version."""
    return row["method"].partition("/")[0]


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


# ---- all of them -----------------------------------------------------------------------------------------------------
def overview(measured: dict[str, Any]) -> str:
    parts = [
        "# Methods",
        MADE,
        f"You will find each of the {len(ALGORITHMS)} methods in one sentence, with its card. [Which one?](choose.md)",
        "`algorithm=NAME` chooses one, and `algorithm=NAME+ft` adds fine-tuning to any. `algorithm=NAME/PRESET` takes "
        "settings that have a name, which are on the method's card. FedSLS, FedXDS, FedFed, FedDISCO, FedDecorr, "
        "FedLC, FedRS and CCVR go over a base (`algorithm=fedsls algorithm.base=scaffold`). What cannot go together is "
        "refused: sharing data (FedXDS, FedFed) over PSE, FedAux or each other, and two methods that each decide how "
        "much a client counts.",
    ]
    for family, names in FAMILIES.items():
        rows = [
            [f"[{ALGORITHMS[name].__name__}](methods/{name}.md)", f"`{name}`", paragraphs(ALGORITHMS[name])[0]]
            for name in names
        ]
        parts += [f"## {family.capitalize()}", table(["method", "algorithm=", "in one sentence"], rows)]
    head = ["method", "global, %", "personal, %", "worst tenth of clients, %", "MB up"]
    ranked = sorted(measured["rows"], key=lambda row: -max(row["global"] or 0, row["personal"] or 0))
    rows = [
        [
            f"[{row['method']}](methods/{method_of(row)}.md)",
            *(percent(row[key]) for key in ("global", "personal", "worst")),
            f"{row['up'] / 1e6:.1f}",
        ]
        for row in ranked
    ]
    presets = any("/" in row["method"] for row in measured["rows"])
    earlier = "METHOD/PRESET: measured when that preset was the default. " if presets else ""
    left = sorted(set(ALGORITHMS) - {method_of(row) for row in measured["rows"]})
    parts += [
        "## All methods on one split",
        f"{measured['about']}. Every method has its own settings at their defaults, with these exceptions. "
        f"{measured['but']}",
        table(head, rows),
        "Global: one model on the pooled test set, mean of the last five evaluations. Personal: every client's "
        "personal model on its own test images after local training (fine-tuned where the method says so). "
        f"{earlier}Not measured here: {', '.join(left)}.",
        "This is a quick look, not a ranking: one seed, an easy data set, a tiny network. The rate, the epochs and "
        "the clients of a round were chosen so that FedAvg learns in ten rounds. That favours it and what is near it. "
        "SCAFFOLD, FedNova, FedAU, SPATL and others want settings of their own. The same at home:",
        f"```bash\n{measured['command']}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def measured_in(folder: Path) -> dict[str, Any]:
    """What measured.json holds, with the methods of a finished `fedlens compare` added or anew."""
    (rows,) = json.loads((folder / "compare.json").read_text())["settings"].values()
    kept = json.loads((DOCS / "measured.json").read_text("utf-8"))
    new = [
        {
            "method": row["method"],
            "global": row["global_last"],
            "personal": row["personal_after"] if row["fine-tuned"] is None else row["fine-tuned"],
            "worst": row["clients_worst_decile"],
            "up": row["bytes_up"],
        }
        for row in rows
        if row["seeds"]
    ]
    again = {row["method"] for row in new}
    kept["rows"] = [*(row for row in kept["rows"] if method_of(row) not in again), *new]
    kept["rows"].sort(key=lambda row: -(row["personal"] or 0))
    return kept


def main() -> None:
    if "--measured" in sys.argv[1:-1]:
        found = measured_in(Path(sys.argv[-1]))
        (DOCS / "measured.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    made = cards()
    stale = [path for path, text in made.items() if not path.exists() or path.read_text("utf-8") != text]
    stale += [path for path in (DOCS / "methods").glob("*.md") if path not in made]
    if "--check" in sys.argv[1:]:
        sys.exit(f"stale, run `python docs/cards.py`: {', '.join(path.name for path in stale)}" if stale else 0)
    (DOCS / "methods").mkdir(exist_ok=True)
    for path in stale:
        path.write_text(made[path], "utf-8") if path in made else path.unlink()
    print(f"{len(made)} files, {len(stale)} of them written anew")


if __name__ == "__main__":
    main()
