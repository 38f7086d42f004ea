"""`fedlens recommend`: methods worth trying on a split like yours, from our own results alone, with the evidence.

The evidence is `evidence.json`: {"format": 1, "results": [...]}, each result one comparison over one split:

- source: the file that the numbers are from; data, clients, partition, model, rounds, seeds: what it was run on;
- skew: label_entropy (bits) of so many classes, size_gini and distance (EMD of labels), as in `fedlens data show`;
- global: method -> accuracy of the global model on the pooled test set, mean of the last looks, mean over seeds;
- personal: method -> accuracy of clients' own models on their own test images, after local training, mean over both.

`add(comparison folder, evidence file, source)` adds those of a finished `fedlens compare`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from . import config
from .algorithms import ALGORITHMS
from .core.errors import BadInput
from .core.strict_json import write_json
from .data import skew
from .describe import describe
from .experiment import Experiment

Kind = Literal["global", "personal"]
NEAR = 0.25  # splits that differ by more than this are no evidence for each other
MARGIN = 0.01  # methods within a point of the best are worth trying; one seed cannot tell them apart
WORDS = {"uniform": ("algorithm=fedavg", "weighting=uniform")}  # rows that are no method's name


@dataclass(frozen=True)
class Advice:
    """What a method did on the splits nearest to yours."""

    method: str
    verdict: Literal["try", "behind", "ruled out"]
    why: str
    accuracy: float
    over_fedavg: float | None
    source: str


@dataclass(frozen=True)
class Recommendation:
    skew: Mapping[str, float]
    kind: Kind
    advice: Sequence[Advice]
    notes: Sequence[str]


def known() -> list[dict[str, Any]]:
    """The evidence that comes with the package."""
    return read(resources.files("fedlens").joinpath("evidence.json").read_text("utf-8"), "evidence.json")


def read(text: str, name: str) -> list[dict[str, Any]]:
    try:
        content = json.loads(text)
    except ValueError:
        raise BadInput(f"{name} is not JSON; it should be a file of evidence") from None
    if not isinstance(content, dict) or content.get("format") != 1 or not isinstance(content.get("results"), list):
        raise BadInput(f"{name} is no evidence of this version: it should have format 1 and results")
    return content["results"]


def described(experiment: Experiment) -> tuple[dict[str, float], tuple[int, int, int]]:
    """(skew of its split, (classes, channels, pixels of a side)); the data are loaded, nothing is trained."""
    images = experiment.data.load()
    _, split = experiment.federation(images)
    found = asdict(skew(split, images))
    numbers = {name: float(found[name]) for name in ("label_entropy", "size_gini", "distance")}
    channels, size = images.x.shape[1], images.x.shape[2]
    return {**numbers, "classes": float(len(images.classes))}, (len(images.classes), channels, size)


def apart(a: Mapping[str, float], b: Mapping[str, float]) -> float:
    """How different two splits are: the largest difference of label entropy, size Gini and EMD, each from 0 to 1."""

    def scaled(one: Mapping[str, float]) -> tuple[float, float, float]:
        return one["label_entropy"] / math.log2(max(one["classes"], 2)), one["size_gini"], one["distance"] / 2

    return max(abs(x - y) for x, y in zip(scaled(a), scaled(b), strict=True))


def recommend(
    experiment: Experiment,
    evidence: Sequence[Mapping[str, Any]],
    kind: Kind,
    *,
    megabytes: float = 0.0,
    private: bool = False,
) -> Recommendation:
    """From the nearest result of this kind; methods that the constraints rule out are named with the reason."""
    mine, shape = described(experiment)
    usable = [result for result in evidence if result[kind]]
    notes = [
        f"Your split: label entropy {mine['label_entropy']:.2f} bits of {math.log2(max(mine['classes'], 2)):.2f}, "
        f"size Gini {mine['size_gini']:.2f}, EMD {mine['distance']:.2f} (0 to 2)."
    ]
    near = sorted(
        (result for result in usable if apart(mine, result["skew"]) <= NEAR), key=lambda r: apart(mine, r["skew"])
    )
    if not near:
        there = (
            "; ".join(f"{r['data']} {r['partition']} (EMD {r['skew']['distance']:.2f})" for r in usable) or "nothing"
        )
        notes.append(
            f"We have no evidence for a {kind} model on a split like this: there is {there}. Compare on your own data: "
            "`fedlens compare fedavg scaffold ...`."
        )
        return Recommendation(mine, kind, (), notes)
    best = near[0]
    top = max(best[kind].values())
    advice = []
    for method, accuracy in sorted(best[kind].items(), key=lambda pair: -pair[1]):
        against = best[kind].get("fedavg")
        over = None if against is None else accuracy - against
        reason = _ruled_out(method, experiment, shape, megabytes, private)
        close = accuracy >= top - MARGIN
        why = reason or (
            f"within {100 * MARGIN:g} point of the best there"
            if close
            else f"{100 * (top - accuracy):.1f} points behind"
        )
        verdict = "ruled out" if reason else "try" if close else "behind"
        advice.append(Advice(method, verdict, why, accuracy, over, best["source"]))
    notes.append(
        f"Evidence: {best['source']}: {best['data']}, {best['clients']} clients, {best['partition']}, {best['model']}, "
        f"{best['rounds']} rounds, {best['seeds']} seed{'s' * (best['seeds'] > 1)}; "
        f"{apart(mine, best['skew']):.2f} from your split, where {NEAR:g} is too far."
    )
    if best["seeds"] < 3:
        notes.append("With fewer than three seeds this is a hint where to begin, no ranking.")
    for other in near[1:]:
        order = sorted(other[kind], key=lambda name: -other[kind][name])
        notes.append(f"Also near: {other['source']}, {other['data']} {other['partition']}: {', '.join(order)}.")
    if best["data"] != config.plain(experiment.data)["is"]:
        notes.append(f"It is of {best['data']}, not of your data: how hard the images are changes the order, too.")
    untried = sorted(set(ALGORITHMS) - {name for result in near for name in result[kind]})
    notes.append(f"No evidence on such a split: {', '.join(untried)}.")
    return Recommendation(mine, kind, advice, notes)


def _ruled_out(
    method: str, experiment: Experiment, shape: tuple[int, int, int], megabytes: float, private: bool
) -> str:
    """Why the constraints do not allow a method, found out from its own messages; empty when they do."""
    if not megabytes and not private:
        return ""
    algorithm = config.read(None, WORDS.get(method, (f"algorithm={method.partition(',')[0]}",))).algorithm
    asked = config.resolve(Experiment, {**config.plain(experiment), "algorithm": config.plain(algorithm)})
    try:
        leaves = describe(asked, *shape)
    except BadInput as error:
        return f"it cannot run here: {error}"
    sent = {
        stage: sum(leaf.bytes for leaf in leaves if leaf.stage == stage and leaf.where == "up")
        for stage in {leaf.stage for leaf in leaves}
    }
    if megabytes and (most := max(sent.values()) / 1e6) > megabytes:
        return f"a client sends {most:.2f} MB in a round, more than {megabytes:g}"
    if private and any(leaf.where == "shared" for leaf in leaves):
        return "it gives everyone something made of clients' images"
    answers = {leaf.name.partition("/")[0] for leaf in leaves if leaf.where == "up"} - _UPDATES
    if private and answers:
        return f"clients send more than updates: {', '.join(sorted(answers))}"
    return ""


_UPDATES = {"delta", "weight", "control", "kept", "(header)"}  # what describes a step of training, and nothing else


# ---- adding evidence -------------------------------------------------------------------------------------------------
def results_of(folder: Path, source: str) -> list[dict[str, Any]]:
    """Those of a finished comparison: one for each setting."""
    try:
        content = json.loads((folder / "compare.json").read_text())
    except FileNotFoundError:
        raise BadInput(f"{folder} holds no comparison: there is no compare.json in it") from None
    except ValueError:
        raise BadInput(f"{folder / 'compare.json'} is damaged: it is not JSON") from None
    if not content["complete"]:
        raise BadInput(f"{folder} is not finished; the command that began it goes on with it")
    found = []
    for setting, rows in content["settings"].items():
        run = next(run for run in content["runs"] if run["setting"] == setting)
        experiment = config.read(Path(run["run"]) / "config.yaml")
        plain, (numbers, _) = config.plain(experiment), described(experiment)
        looks = {
            row["method"]: row["fine-tuned"] if row["fine-tuned"] is not None else row["personal_after"] for row in rows
        }
        found.append(
            {
                "source": source,
                "data": plain["data"]["is"],
                "clients": experiment.clients,
                "partition": _told(experiment.partition),
                "model": plain["model"]["is"],
                "rounds": experiment.rounds,
                "seeds": min(len(row["seeds"]) for row in rows),
                "skew": {name: round(value, 4) for name, value in numbers.items()},
                "global": {r["method"]: round(r["global_last"], 4) for r in rows if r["global_last"] is not None},
                "personal": {method: round(value, 4) for method, value in looks.items() if value is not None},
            }
        )
    return found


def _told(partition: Any) -> str:
    """`dirichlet, alpha 0.1`: its main setting, and others where somebody chose them."""
    plain, usual = config.plain(partition), config.plain(type(partition)())
    always = {"is", next((f.name for f in fields(partition) if not f.kw_only), "is")}
    chosen = {key: value for key, value in plain.items() if key in always or value != usual[key]}
    return ", ".join(str(value) if key == "is" else f"{key} {value}" for key, value in chosen.items())


def add(folder: Path, file: Path, source: str) -> int:
    """Lay a comparison's results beside those of a file of evidence; what this source said before is replaced."""
    before = read(file.read_text(), str(file)) if file.exists() else []
    new = results_of(folder, source)
    kept = [result for result in before if result["source"] != source]
    write_json(file, {"format": 1, "results": [*kept, *new]})
    return len(new)
