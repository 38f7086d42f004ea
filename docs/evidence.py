"""Writes the evidence of `fedlens recommend` from what is in results/data; then run `python docs/cards.py`.

python docs/evidence.py            writes src/fedlens/recommend/evidence.json
python docs/evidence.py --check    only says whether it is stale, by its exit code

published.json has numbers of pages whose runs are older than results/data, under the presets that they were run with.
league.json has the worlds of `fedlens league`, one result each: tuned rates, an equal budget.
evidence.json has the cells of `benchmarks/evidence.py`, which are grouped here by setting, method and seed. The skew of
a new setting is that of its split, so that its data must be here; known ones keep theirs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedlens import config
from fedlens.algorithms import ALGORITHMS
from fedlens.experiment import Experiment
from fedlens.league.standings import Standings
from fedlens.recommend.rank import data_name, described, told
from fedlens.runs.grid import merged_words

ROOT = Path(__file__).parents[1]
DATA, FILE = ROOT / "results" / "data", ROOT / "src" / "fedlens" / "recommend" / "evidence.json"
PAGES = {"fedxds": "results/fedxds.md", "spatl": "results/spatl.md", "pse": "results/pse.md"}
PAGES |= {"fedsls": "results/fedsls_table1.md", "compose": "results/compose.md"}
Setting = tuple[str, str, int, str, str, int]  # page, data, clients, split, network, rounds
Skew = Mapping[str, float]


def built(
    published: Mapping[str, Any],
    cells: Sequence[Mapping[str, Any]],
    before: Sequence[Mapping[str, Any]],
    league: Mapping[str, Any] | None = None,
) -> Any:
    """The whole file: what was published, then one result for each setting and number of seeds."""
    skews = {_split(result): result["skew"] for result in (*before, *published["results"])}
    found: dict[Setting, dict[str, dict[int, Mapping[str, Any]]]] = {}
    for cell in cells:
        if (name := method(cell["row"], cell["words"], cell["over"])) is not None:
            experiment = config.read(None, [*cell["words"], f"seed={cell['seed']}"])
            setting = setting_of(cell["table"], experiment)
            if cell["seed"] == 0 and setting[1:4] not in skews:
                skews[setting[1:4]] = {key: round(value, 4) for key, value in described(experiment)[0].items()}
            found.setdefault(setting, {}).setdefault(name, {})[cell["seed"]] = cell
    new = [result for setting, by in found.items() for result in results(setting, by, skews)]
    new += league_results(league, skews) if league else []
    return {"format": 1, "usual": published["usual"], "results": [*published["results"], *new]}


def league_results(content: Mapping[str, Any], skews: dict[Any, Skew]) -> list[dict[str, Any]]:
    """One for each world in which two methods or more are done; what a method ran with there is kept beside it."""
    standings, found = Standings(content), []
    for world, about in content["worlds"].items():
        rows = [row for row in standings.counted if row["world"] == world and _is_known(content, row["method"])]
        if len({row["method"] for row in rows}) < 2:
            continue
        experiment = config.read(None, [*merged_words([*about.get("common", ()), *about["words"]]).values()])
        split = data_name(experiment), experiment.clients, told(experiment.partition)
        if split not in skews:
            skews[split] = {key: round(value, 4) for key, value in described(experiment)[0].items()}
        kinds = {kind: _by_method(rows, kind) for kind in ("global", "personal")}
        head = {"source": "results/league_details.md", "data": split[0], "clients": split[1], "partition": split[2]}
        head |= {
            "model": config.to_dict(experiment.model)["is"],
            "rounds": experiment.rounds,
            "seeds": len({row["seed"] for row in rows}),
        }
        means = {kind: {name: round(fmean(v), 4) for name, v in by.items()} for kind, by in kinds.items()}
        spread = {k: {n: round(stdev(v), 4) for n, v in by.items() if len(v) > 1} for k, by in kinds.items()}
        least = {kind: {name: round(min(v), 4) for name, v in by.items()} for kind, by in kinds.items()}
        sent = _by_method([{**row, "bytes": row["bytes_up"] + row["bytes_down"]} for row in rows], "bytes")
        seconds = {name: round(fmean(v), 1) for name, v in _by_method(rows, "seconds").items()}
        cost = {"bytes": {name: round(fmean(v)) for name, v in sent.items()}, "seconds": seconds}
        ran = {"rates": {row["method"]: row["rate"] for row in rows}, "settings": _settings(content, rows)}
        uncertain = {"league": True, "deviation": spread, "least": least}
        found.append({**head, "skew": skews[split], **means, **uncertain, **cost, **ran})
    return found


def _is_known(content: Mapping[str, Any], name: str) -> bool:
    """Whether a method of the league has the name that users type: one of a user's own is nobody else's evidence."""
    return content["methods"][name]["words"][0] == f"algorithm={name}" and name.partition("+")[0] in ALGORITHMS


def _settings(content: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Words beside its name that a method ran with: the league's own, and the value of its main parameter."""
    found = {}
    for row in rows:
        about = content["methods"][row["method"]]
        value = [f"{about['main']}={row['value']}"] if row["value"] else []
        if words := [*about["words"][1:], *value]:
            found[row["method"]] = words
    return found


def _by_method(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.get(name) is not None:
            found.setdefault(row["method"], []).append(row[name])
    return found


def method(row: str, words: Sequence[str], over: Sequence[str]) -> str | None:
    """What `fedlens recommend` calls a row; nothing where the row is a method with settings that have no name.

    Rows have settings that make them comparable. What words over a row change, and a network in a row that has no
    method's name, is an ablation: its number is not the method's.
    """
    said, is_named = dict(config.setting(word) for word in words), row.partition("+")[0] in ALGORITHMS
    if any(word.startswith(("algorithm.", "model.")) for word in over):
        return None
    if not is_named and any(key.startswith("model.") for key in said):
        return None
    name, own = said["algorithm"], [key for key in said if key.startswith("algorithm.")]
    if "weighting" in said:
        return "uniform" if (name, own) == ("fedavg", []) and said["weighting"] == "uniform" else None
    is_plain = config.read(None, words).algorithm == config.read(None, [f"algorithm={name}"]).algorithm
    return name if is_plain or is_named else None


def setting_of(table: str, experiment: Experiment) -> Setting:
    plain = config.to_dict(experiment)
    page = PAGES[table.partition("/")[0]]
    split = told(experiment.partition)
    return page, plain["data"]["is"], experiment.clients, split, plain["model"]["is"], experiment.rounds


def results(
    setting: Setting, by: Mapping[str, Mapping[int, Mapping[str, Any]]], skews: Mapping[Any, Skew]
) -> Iterable[dict[str, Any]]:
    """One for all methods at their first seed, one more for those that have more; a method alone says nothing."""
    page, data, clients, split, network, rounds = setting
    for seeds in sorted({len(runs) for runs in by.values()}):
        some = {name: [runs[seed] for seed in sorted(runs)[:seeds]] for name, runs in by.items() if len(runs) >= seeds}
        kinds = {kind: _means(some, kind) for kind in ("global", "personal")}
        if max(map(len, kinds.values())) > 1 and setting[1:4] in skews:
            head = {"source": page, "data": data, "clients": clients, "partition": split, "model": network}
            yield {**head, "rounds": rounds, "seeds": seeds, "skew": skews[setting[1:4]], **kinds}


def _means(some: Mapping[str, Sequence[Mapping[str, Any]]], kind: str) -> dict[str, float]:
    """Of the methods whose runs all have such a model."""
    found = {}
    for name, runs in some.items():
        values = [value for run in runs if (value := _accuracy(run, kind)) is not None]
        if len(values) == len(runs):
            found[name] = round(sum(values) / len(values), 4)
    return found


def _accuracy(run: Mapping[str, Any], kind: str) -> float | None:
    """Of the global model, in its last evaluations; of personal models after local training."""
    if kind == "global":
        return run.get("accuracy_last")
    personal = run.get("personal") or {}
    return (personal.get("fine-tuned") or personal.get("after") or {}).get("mean")


def _split(result: Mapping[str, Any]) -> tuple[str, int, str]:
    return result["data"], result["clients"], result["partition"]


def text() -> str:
    cells = DATA / "evidence.json"
    before = json.loads(FILE.read_text("utf-8"))["results"] if FILE.is_file() else []
    published = json.loads((DATA / "published.json").read_text("utf-8"))
    league = json.loads((DATA / "league.json").read_text("utf-8")) if (DATA / "league.json").is_file() else None
    whole = built(published, json.loads(cells.read_text("utf-8")) if cells.is_file() else [], before, league)
    lines = ",\n  ".join(json.dumps(result, allow_nan=False) for result in whole["results"])
    return f'{{\n "format": 1,\n "usual": {json.dumps(whole["usual"])},\n "results": [\n  {lines}\n ]\n}}\n'


def main() -> None:
    new = text()
    if "--check" in sys.argv[1:]:
        sys.exit(0 if FILE.read_text("utf-8") == new else "stale, run `python docs/evidence.py`")
    FILE.write_text(new, "utf-8")
    print(f"{len(json.loads(new)['results'])} results; now `python docs/cards.py`")


if __name__ == "__main__":
    main()
