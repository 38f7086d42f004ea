"""The model card: where a model comes from, how well it does for whom, what its training let out, how to use it."""

from __future__ import annotations

from typing import Any

from .. import __version__, config
from ..core.format import percent
from ..runs.opened import OpenedRun
from ..runs.places import without_folders
from ..runs.read import client_accuracies, flat, label_counts, method_of, rounds_of, settings_of

_SHOWN = 50  # clients at most


def facts_of(run: OpenedRun, client: int | None, round: int | None, accuracy: float | None) -> dict[str, Any]:
    """What a card says of a run's model."""
    folder, settings = run.folder, settings_of(run.folder.path)
    shown = {key: without_folders(value) for key, value in flat(settings).items()}
    names, card, counts = folder.names(), folder.passport(), label_counts(folder)
    found = client_accuracies(folder.metrics())
    whose = "the global model" if client is None else f"the personal model of {names.client(client)}"
    evaluated = next(iter(found), "")
    return {
        "run": folder.path.absolute().name,
        "whose": whose,
        "round": round or rounds_of(folder).total,
        "method": method_of(settings["algorithm"]),
        "model": config.to_dict(run.experiment.model)["is"],
        "data": {"name": card["data"]["name"], "images": card["data"]["images"], "sha256": card["data"]["sha256"]},
        "origin": without_folders(card["data"]["origin"]),
        "split": {key: value for key, value in shown.items() if key.split(".")[0] in ("partition", "clients")},
        "settings": {key: value for key, value in shown.items() if config.affects_results(key)},
        "clients": {names.client(number): sum(row) for number, row in enumerate(counts or ())},
        "accuracy": accuracy,
        "on": "the pooled test set" if client is None else "this client's test images",
        "by_client": {names.client(number): value for number, value in (found.get(evaluated) or {}).items()},
        "evaluated": evaluated,
        "privacy": folder.read_json("privacy.json") if (folder.path / "privacy.json").exists() else None,
        "precision": run.experiment.execution.precision,
    }


def page(facts: dict[str, Any], classes: tuple[str, ...], about: dict[str, Any], files: list[str], command: str) -> str:
    """README.md of an exported model."""
    whose = f"{facts['whose']} of the run {facts['run']}" if "run" in facts else facts["whose"]
    parts = [
        "# Model card",
        f"This folder holds {whose}, after {facts['round']} rounds of {facts['method']} with FedLens {__version__}."
        + (" Of all rounds it was the best on validation images." if facts.get("best") else "")
        + (" It is cut down to the filters that the client selected." if facts.get("sub_model") else ""),
        "## Use it",
        "```\npip install torch numpy pillow safetensors\npython predict.py FOLDER_OF_IMAGES\n```",
        "In Python: `from predict import load_model, prepared, read_about`. `load_model()` is a plain `nn.Module`.",
        "## What is here",
        _table(["file", "what it is"], [[f"`{name}`", _FILES[name]] for name in files if name in _FILES]),
        "## Input and classes",
        _table(["key", "value"], [[key, f"`{value}`"] for key, value in _input(about).items()]),
        f"Classes, in the order of the outputs: {', '.join(classes)}.",
        "## How well it does",
        *_accuracies(facts),
        "## Data and training",
        _table(["key", "value"], [[key, f"`{value}`"] for key, value in _training(facts).items()]),
        *([f"Training images of each client: {_listed(facts['clients'])}."] if facts.get("clients") else []),
        "## Privacy",
        *_privacy(facts),
        "## Made by",
        f"```\n{command}\n```",
        "All settings of the run:",
        "```\n" + "\n".join(f"{key}={value}" for key, value in facts.get("settings", {}).items()) + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


_FILES = {
    "weights.safetensors": "a plain `state_dict`",
    "model.py": "`build()` makes the network that the weights are for",
    "model.onnx": "the network for onnxruntime; its input is prepared as below",
    "model.pt2": "the network as `torch.export` writes it; its input is prepared as below",
    "preprocessing.json": "how images become its input, and its classes",
    "decode.py": "reads image files as the run did",
    "predict.py": "classifies a folder of images",
}


def _input(about: dict[str, Any]) -> dict[str, Any]:
    files = about["images"] or {"images": "none: tensors were given ready-made"}
    return {"shape": about["shape"], **files, "mean": about["mean"], "std": about["std"]}


def _accuracies(facts: dict[str, Any]) -> list[str]:
    found = []
    if facts.get("accuracy") is not None:
        found.append(f"Accuracy of this model: {percent(facts['accuracy'], 2)} on {facts['on']}.")
    elif facts.get("sub_model"):
        found.append("The run did not evaluate this sub-model by itself: its tables are of the whole model.")
    by = facts.get("by_client") or {}
    if by:
        shown = dict([*by.items()][:_SHOWN])
        found.append(
            f"Each client on its own test images, with the model that the run evaluated ({facts['evaluated']}):"
        )
        found.append(_table(["client", "accuracy"], [[name, percent(value, 2)] for name, value in shown.items()]))
        found += [f"And {len(by) - _SHOWN} more."] if len(by) > _SHOWN else []
    return found or ["The run has not evaluated it."]


def _training(facts: dict[str, Any]) -> dict[str, Any]:
    data = facts.get("data", {})
    named = {"method": facts["method"], "network": facts.get("model", ""), "precision": facts.get("precision", "")}
    about = {"data": data.get("name", ""), "images": data.get("images", ""), "sha256": data.get("sha256", "")}
    return {k: v for k, v in {**named, **about, **facts.get("split", {})}.items() if v != ""}


def _privacy(facts: dict[str, Any]) -> list[str]:
    privacy = facts.get("privacy")
    if not privacy:
        return ["No privacy is promised: clients sent model updates as they are. The model may remember images."]
    said = []
    for each in privacy["statements"]:
        promise = "no privacy" if each["epsilon"] is None else f"epsilon {each['epsilon']:.4g}, delta {each['delta']:g}"
        holds = "" if each["holds"] else f" This does not hold: {each['because']}."
        said.append(f"- {each['release']}: {promise}, for {each['unit']}.{holds} Noise: {each['randomness']}.")
    if plain := privacy["updates_as_they_are"]:
        said.append(f"- Sent as they are: {', '.join(plain)}.")
    return ["\n".join(said)]


def _listed(counts: dict[str, int]) -> str:
    few = [*counts.items()][:_SHOWN]
    more = f", and {len(counts) - _SHOWN} more" if len(counts) > _SHOWN else ""
    return ", ".join(f"{name} {count}" for name, count in few) + more


def _table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
