"""`fedlens recommend`: methods worth trying on a split like yours, from our own results alone, with the evidence.

The evidence is `evidence.json`: {"format": 1, "usual": {...}, "results": [...]}. `usual` says where to
begin when nothing is known, for each kind of model; each result is one comparison over one split:

- source: the file that the numbers are from; data, clients, partition, model, rounds, seeds: what it was run on;
- skew: label_entropy (bits) of so many classes, size_gini and distance (EMD of labels), as in `fedlens data show`;
- global: method -> accuracy of the global model on the pooled test set, mean of the last evaluations, mean over seeds;
- personal: method -> accuracy of personal models on each client's test images, after local training, mean over both;
- ranked_by, measure, order: of a comparison of one's own, which kind and measure it ranks by, and methods in its order;
- league: whether it is a world of the league, at tuned rates and an equal budget; such worlds are ranked together.
  Those have deviation and least (kind -> method -> over seeds), bytes and seconds (method -> of a run), rates and
  settings (method -> what it ran with there, as words), too.

`add(comparison folder, evidence file, source)` adds those of a finished `fedlens compare`.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

from .. import config
from ..algorithms import ALGORITHMS
from ..core.errors import BadInput
from ..core.files import parse_json, read_json, write_json
from ..data import skew
from ..experiment import Experiment
from ..simulate.describe import describe, described_with, privacy_class
from .weighted import failed, fitting, overlaps, placed, settings_of

Kind = Literal["global", "personal"]
NEAR = 0.25  # splits that differ by more than this are no evidence for each other
MARGIN = 0.01  # methods within a point of the best are worth trying; one seed cannot tell them apart
WORDS = {"uniform": ("algorithm=fedavg", "weighting=uniform")}  # rows that are no method's name
_TRIED = 3  # methods beside fedavg in a comparison that is proposed
_NOT_COMMON = ("algorithm", "seed", "out")  # which a comparison does not take for all methods


@dataclass(frozen=True)
class Advice:
    """What a method did on the splits nearest to yours."""

    method: str
    verdict: Literal["try", "behind", "ruled out"]
    why: str
    accuracy: float
    over_fedavg: float | None
    source: str
    low: float | None = None  # of a 95 % interval of over_fedavg, where several worlds or seeds tell
    high: float | None = None
    worlds: int = 1
    cost: str = ""  # beside FedAvg's, as measured
    privacy: str = ""  # whom a method shows what, where that is more than updates


@dataclass(frozen=True)
class Recommendation:
    skew: Mapping[str, float]
    kind: Kind
    advice: Sequence[Advice]
    notes: Sequence[str]


def known() -> list[dict[str, Any]]:
    """The evidence that comes with the package."""
    return _packaged()["results"]


def _packaged() -> dict[str, Any]:
    return read(resources.files("fedlens.recommend").joinpath("evidence.json").read_text("utf-8"), "evidence.json")


def read(text: str, name: str) -> dict[str, Any]:
    """A file of evidence; refuses what is none, or of another version."""
    try:
        content = parse_json(text)
    except ValueError:
        raise BadInput(f"{name} is not JSON; it should be a file of evidence") from None
    if not isinstance(content, dict) or content.get("format") != 1 or not isinstance(content.get("results"), list):
        raise BadInput(f"{name} is no evidence of this version: it should have format 1 and results")
    return content


def described(experiment: Experiment) -> tuple[dict[str, float], tuple[int, int, int]]:
    """(skew of its split, (classes, channels, pixels of a side)); the data are loaded, nothing is trained."""
    images = experiment.images()
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
    own: Sequence[Mapping[str, Any]] = (),
    megabytes: float = 0.0,
    private: bool = False,
) -> Recommendation:
    """From the nearest result of this kind; methods that the constraints rule out are named with the reason.

    `own`: results of comparisons of one's own. Where one is near enough, its ranking is followed.
    """
    mine, shape = described(experiment)
    # How far splits are apart speaks of labels and sizes alone: where images differ, too, is a question of its own.
    looks = told(experiment.partition).startswith(_DOMAINS)
    every = [*own, *evidence]
    usable = [result for result in every if result[kind] and result["partition"].startswith(_DOMAINS) == looks]
    notes = [
        f"Your split: label entropy {mine['label_entropy']:.2f} bits of {math.log2(max(mine['classes'], 2)):.2f}, "
        f"size Gini {mine['size_gini']:.2f}, EMD {mine['distance']:.2f} (0 to 2)."
    ]
    near = sorted(  # of the same split, first what has most seeds, then most methods
        (result for result in usable if apart(mine, result["skew"]) <= NEAR),
        key=lambda r: (apart(mine, r["skew"]), -r["seeds"], -len(r[kind])),
    )
    limits = shape, megabytes, private
    if not near:
        return _without_evidence(usable, experiment, kind, mine, notes, limits)
    mine_first = [result for result in near if any(result is one for one in own)]
    fits = fitting(near, experiment.clients)
    fits = [result for result in fits if _is_of(result, experiment)] or fits
    if any(result.get("league") for result in fits) and not mine_first:
        return _by_league(near, experiment, kind, mine, notes, limits)
    first = mine_first or fits
    near = [*first, *(result for result in near if result not in first)]
    best = near[0]
    advice = [*_by_result(best, experiment, kind, limits)]
    notes.append(f"Evidence: {_setting(best, mine)}")
    if best["seeds"] < 3:
        notes.append("With fewer than three seeds this is a hint where to begin, no ranking.")
    if (measure := best.get("measure", "accuracy")) != "accuracy":
        notes.append(f"In the order of that comparison, which ranks by {measure}.")
    for other in near[1:]:
        order = sorted(other[kind], key=lambda name: -other[kind][name])
        notes.append(f"Also near: {_what(other)}: {', '.join(order)}.")
    if not _is_of(best, experiment):
        notes.append(f"It is of {best['data']}, not of your data: how hard the images are changes the order, too.")
    untried = sorted(set(ALGORITHMS) - {name for result in near for name in result[kind]})
    notes.append(f"No evidence on such a split: {', '.join(untried)}.")
    return Recommendation(mine, kind, advice, notes)


def _by_result(best: Mapping[str, Any], experiment: Experiment, kind: Kind, limits: Limits) -> Iterator[Advice]:
    """From one comparison. One of yours that ranks by another measure than accuracy keeps its order."""
    top, against = max(best[kind].values()), best[kind].get("fedavg")
    order = best["order"] if best.get("measure", "accuracy") != "accuracy" and kind == best["ranked_by"] else None
    for method in order or sorted(best[kind], key=lambda name: -best[kind][name]):
        accuracy = best[kind][method]
        reason, shows = _ruled_out(method, experiment, *limits), _privacy(method)
        if order:
            good, said = method == order[0], f"rank {order.index(method) + 1} by {best['measure']} there"
        else:
            good = accuracy >= top - MARGIN
            behind = f"{100 * (top - accuracy):.1f} points behind"
            said = f"within {100 * MARGIN:g} point of the best there" if good else behind
        why = f"{reason or said}; {shows}" if shows else reason or said
        over = None if against is None else accuracy - against
        verdict = "ruled out" if reason else "try" if good else "behind"
        yield Advice(method, verdict, why, accuracy, over, best["source"], privacy=shows)


Limits = tuple[tuple[int, int, int], float, bool]  # of an image: classes, channels, pixels; megabytes; updates alone


def _without_evidence(
    usable: Sequence[Mapping[str, Any]],
    experiment: Experiment,
    kind: Kind,
    mine: Mapping[str, float],
    notes: list[str],
    limits: Limits,
) -> Recommendation:
    """The nearest that there is, named as no evidence, and what would measure it."""
    notes.append(f"We have no evidence for a {kind} model on a split like this: nothing is recommended.")
    methods = _packaged()["usual"][kind]
    if usable:
        nearest = min(usable, key=lambda result: apart(mine, result["skew"]))
        notes += _elsewhere(nearest, kind, mine, experiment)
        methods = sorted(nearest[kind], key=lambda name: -nearest[kind][name])
    able = [name for name in methods if not _ruled_out(name, experiment, *limits)]
    named = list(dict.fromkeys(["fedavg", *(name for name in able if name not in WORDS)]))[: 1 + _TRIED]
    command = shlex.join(["fedlens", "compare", *named, *typed(experiment), "--seeds", "3"])
    notes.append(f"`{command}` measures it; --runs with the folder of that comparison then takes it as evidence.")
    notes += [f"{name}: {said}." for name in named if (said := _privacy(name))]
    return Recommendation(mine, kind, (), notes)


def _by_league(
    near: Sequence[Mapping[str, Any]],
    experiment: Experiment,
    kind: Kind,
    mine: Mapping[str, float],
    notes: list[str],
    limits: Limits,
) -> Recommendation:
    """From the league's worlds around this split: those with the nearest number of clients, the nearer the more."""
    worlds = [result for result in near if result.get("league")]
    used = fitting(worlds, experiment.clients)
    found = placed([(apart(mine, result["skew"]), result) for result in used], kind)
    ran_with = {one.method: settings_of(used, one.method) for one in found}
    reasons = {one.method: _ruled_out(one.method, experiment, *limits, ran_with[one.method]) for one in found}
    fails = {one.method: failed(one, used, kind, MARGIN) for one in found}
    top = next((one for one in found if not reasons[one.method] and not fails[one.method]), None)
    advice = []
    for one in found:
        reason, shows, fails_there = reasons[one.method], _privacy(one.method), fails[one.method]
        reaches = top is not None and overlaps(one, top, MARGIN)
        said = fails_there or ("cannot be told from the best there" if reaches else "behind the best there")
        verdict = "ruled out" if reason else "try" if reaches and not fails_there else "behind"
        words = " ".join(word.removeprefix("algorithm.") for word in ran_with[one.method])
        why = "; ".join(part for part in (reason or said, words and f"ran with {words}", one.cost, shows) if part)
        found_there = (one.accuracy, one.over, used[0]["source"], one.low, one.high, one.worlds, one.cost, shows)
        advice.append(Advice(one.method, verdict, why, *found_there))
    notes += _about_worlds(used, experiment, mine)
    left = Counter(f"of {result['clients']} clients" for result in worlds if result not in used)
    others = Counter(f"{result['source']}: {result['data']}" for result in near if result not in worlds)
    notes += [f"Left out, with another number of clients: {_counted(left, 'world')}."] if left else []
    notes += [f"Not of the league, and not counted: {'; '.join(others)}."] if others else []
    notes.append("Brackets (low, high): 95 % intervals over fedavg. One world alone borrows the spread of others.")
    tried = [one.method for one in advice if one.verdict == "try" and one.method != "fedavg"][:_TRIED]
    own = [word.replace("algorithm", name, 1) for name in ("fedavg", *tried) for word in ran_with.get(name, ())]
    command = shlex.join(["fedlens", "compare", "fedavg", *tried, *own, *typed(experiment), "--seeds", "3"])
    notes.append(f"`{command}` tests it here.")
    rates = {name: used[0].get("rates", {}).get(name) for name in ("fedavg", *tried)}
    if shown := [f"{name} {rate:g}" for name, rate in rates.items() if rate]:
        notes.append(f"Rates (local.lr) that the league found in the nearest: {', '.join(shown)}. Search yours, too.")
    untried = sorted(set(ALGORITHMS) - {one.method for one in found})
    notes.append(f"No evidence on such a split: {', '.join(untried)}.")
    return Recommendation(mine, kind, advice, notes)


def _counted(of: Mapping[str, int], what: str) -> str:
    return ", ".join(f"{count} {what}{'s' * (count > 1)} {each}" for each, count in of.items())


def _about_worlds(
    used: Sequence[Mapping[str, Any]], experiment: Experiment, mine: Mapping[str, float]
) -> Iterator[str]:
    """Which worlds of the league these are, and what is different there."""
    seeds = min(result["seeds"] for result in used)
    worlds = f"{len(used)} world{'s' * (len(used) > 1)}"
    yield f"Evidence: {worlds} of the league, {seeds} seeds each; the nearer, the more it counts."
    yield from (f"- {_setting(result, mine)}" for result in used)
    if used[0]["clients"] != experiment.clients:
        yield f"They have {used[0]['clients']} clients, yours {experiment.clients}: the nearest number there is."
    if others := sorted({result["data"] for result in used if not _is_of(result, experiment)}):
        yield f"Not of your data: {', '.join(others)}. How hard the images are changes the order."


def _privacy(method: str) -> str:
    """Whom a method shows what, where that is more than updates."""
    if method in WORDS:
        return ""
    try:
        experiment = config.read(None, [f"algorithm={method.partition(',')[0]}", *described_with(method)])
    except BadInput:
        return ""
    said = privacy_class(method, list(experiment.discloses.values()))
    return "" if said == "updates only" else said


_DOMAINS = "domains"


def _setting(result: Mapping[str, Any], mine: Mapping[str, float]) -> str:
    far = f"distance from your split {apart(mine, result['skew']):.2f}"
    return f"{_what(result)}; {far} (above {NEAR:g} we do not compare)."


def _what(result: Mapping[str, Any]) -> str:
    return (
        f"{result['source']}: {result['data']}, {result['clients']} clients, {result['partition']}, {result['model']}, "
        f"{result['rounds']} round{'s' * (result['rounds'] > 1)}, {result['seeds']} seed{'s' * (result['seeds'] > 1)}"
    )


def _elsewhere(
    result: Mapping[str, Any], kind: Kind, mine: Mapping[str, float], experiment: Experiment
) -> Iterator[str]:
    """A result that is no evidence for this experiment: what it is of, what it says there, and how that differs."""
    order = sorted(result[kind].items(), key=lambda pair: -pair[1])
    yield f"The nearest there is, and no evidence for yours: {_setting(result, mine)}"
    yield f"There, in %: {', '.join(f'{method} {100 * accuracy:.1f}' for method, accuracy in order)}."
    plain = config.to_dict(experiment)
    yours = {"data": data_name(experiment), "partition": told(experiment.partition), "model": plain["model"]["is"]}
    yours |= {"clients": experiment.clients, "rounds": experiment.rounds}
    numbers = {"label_entropy": "label entropy", "size_gini": "size Gini", "distance": "EMD"}
    pairs = {words: (f"{result['skew'][name]:.2f}", f"{mine[name]:.2f}") for name, words in numbers.items()}
    pairs |= {name: (result[name], value) for name, value in yours.items()}
    apart_in = [f"{name} ({there}; yours {here})" for name, (there, here) in pairs.items() if there != here]
    yield f"It differs in {', '.join(apart_in)}."


def typed(experiment: Experiment) -> list[str]:
    """The words that give this experiment again, but its method, seed and place: as `fedlens compare` takes them."""
    return [word for word in _fields(experiment, "") if re.split("[.=]", word)[0] not in _NOT_COMMON]


def _fields(part: Any, prefix: str) -> Iterator[str]:
    """A word for every field that is not as it is by default."""
    for each in fields(part):
        value, key = getattr(part, each.name), f"{prefix}{each.name}".removeprefix("execution.")
        if value == each.default or not each.init:
            continue
        if is_dataclass(value):
            if "is" in (plain := config.to_dict(value)):
                yield f"{key}={plain['is']}"
            yield from _fields(value, f"{key}.")
        else:
            yield f"{key}={value if isinstance(value, str) else _in_a_line(config.to_dict(value))}"


def _in_a_line(value: Any) -> str:
    """As YAML, without its mark of an end."""
    return " ".join(yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").split())


def _ruled_out(
    method: str,
    experiment: Experiment,
    shape: tuple[int, int, int],
    megabytes: float,
    private: bool,
    settings: Sequence[str] = (),
) -> str:
    """Why the constraints do not allow a method, found out from its own messages; empty when they do."""
    if not megabytes and not private:
        return ""
    words = WORDS.get(method, (f"algorithm={method.partition(',')[0]}",))
    algorithm = config.read(None, [*words, *settings]).algorithm
    asked = config.resolve(Experiment, {**config.to_dict(experiment), "algorithm": config.to_dict(algorithm)})
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
        return "it gives everyone more than a model, made of clients' images or of public ones"
    answers = {leaf.name.partition("/")[0] for leaf in leaves if leaf.where == "up"} - _UPDATES
    if private and answers:
        return f"clients send more than updates: {', '.join(sorted(answers))}"
    return ""


_UPDATES = {"delta", "weight", "control", "kept", "(header)"}  # what describes a step of training, and nothing else


# ---- adding evidence -------------------------------------------------------------------------------------------------
def results_of(folder: Path, source: str) -> list[dict[str, Any]]:
    """Those of a finished comparison: one for each setting."""
    try:
        content = read_json(folder / "compare.json")
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
        plain, (numbers, _) = config.to_dict(experiment), described(experiment)
        personal = ("fine-tuned", "personal_after", "personal_before")
        looks = {row["method"]: next((row[name] for name in personal if row[name] is not None), None) for row in rows}
        found.append(
            {
                "source": source,
                "data": data_name(experiment),
                "clients": experiment.clients,
                "partition": told(experiment.partition),
                "model": plain["model"]["is"],
                "rounds": experiment.rounds,
                "seeds": min(len(row["seeds"]) for row in rows),
                "skew": {name: round(value, 4) for name, value in numbers.items()},
                "global": {r["method"]: round(r["global_last"], 4) for r in rows if r["global_last"] is not None},
                "personal": {method: round(value, 4) for method, value in looks.items() if value is not None},
                "ranked_by": content["ranked_by"],
                "measure": content.get("measure", "accuracy"),
                "order": [row["method"] for row in rows if row["rank"] is not None],
            }
        )
    return found


def experiment_of(folder: Path) -> Experiment:
    """What a comparison is about, as its first run has it."""
    first = next(iter(read_json(folder / "compare.json")["runs"]))
    return config.read(Path(first["run"]) / "config.yaml")


def data_name(experiment: Experiment) -> str:
    """A part of a data set is named after it: `cifar10 (10,000 images)`."""
    said = config.to_dict(experiment.data)
    return said["is"] if said["is"] != "sample" else f"{said['base']['is']} ({said['train']:,} images)"


def _is_of(result: Mapping[str, Any], experiment: Experiment) -> bool:
    """Whether a result is of these data, be it of a part of them."""
    there, here = (name.partition(" (")[0] for name in (result["data"], data_name(experiment)))
    return there == here


def told(partition: Any) -> str:
    """`dirichlet, alpha 0.1`: its main setting, and others where somebody chose them; within another in brackets."""
    plain, usual = config.to_dict(partition), config.to_dict(type(partition)())
    always = {"is", next((f.name for f in fields(partition) if not f.kw_only), "is")}
    chosen = {key: value for key, value in plain.items() if key in always or value != usual[key]}
    inner = {key: f"({told(getattr(partition, key))})" for key, value in chosen.items() if isinstance(value, dict)}
    return ", ".join(str(value) if key == "is" else f"{key} {value}" for key, value in (chosen | inner).items())


def add(folder: Path, file: Path, source: str) -> int:
    """Lay a comparison's results beside those of a file of evidence; what this source said before is replaced."""
    before = read(file.read_text("utf-8"), str(file)) if file.exists() else {"format": 1, "results": []}
    new = results_of(folder, source)
    kept = [result for result in before["results"] if result["source"] != source]
    write_json(file, {**before, "results": [*kept, *new]})
    return len(new)
