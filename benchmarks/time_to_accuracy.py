"""Does fewer bytes win? FedAvg, SCAFFOLD and SPATL on phones: rounds, bytes and simulated seconds to an accuracy.

    python benchmarks/time_to_accuracy.py OUT [key=value ...]

Accuracy is the mean over clients of their personal models on their own test images, before local training: SPATL's
clients keep their predictors, so it has no whole global model. Prints the tables of results/time_to_accuracy.md; writes
time_to_accuracy.png and .svg. Runs that are there already are gone on with.
"""

import argparse
from pathlib import Path

from fedlens import config
from fedlens.devices.clock import Seconds, time_to
from fedlens.devices.profiles import DEVICES, Devices
from fedlens.plots.style import COLOURS, pyplot, save
from fedlens.runs.folder import RunFolder
from fedlens.runs.read import bytes_until
from fedlens.simulate import run as simulate
from fedlens.simulate.resume import resume
from fedlens.simulate.timing import Timing, timing

METHODS = ("fedavg", "scaffold", "spatl")
TARGETS = (0.8, 0.85, 0.9)
SETTINGS = [
    "data=mnist5k",
    "partition.alpha=0.3",
    "clients=10",
    "cohort=everyone",
    "model=cnn2",
    "local.momentum=0.5",
    "rounds=40",
    "evaluate.every=0",
    "evaluate.personal=before",
    "evaluate.personal_every=1",
    "checkpoint=10",
    "picture=false",
]


def curve(folder: RunFolder) -> list[tuple[int, float]]:
    rows = folder.metrics().to_pylist()
    return [(row["round"], row["value"]) for row in rows if row["metric"] == "accuracy_mean"]


def table(folders: dict[str, RunFolder], timings: dict[str, Timing]) -> None:
    print("| method | accuracy, % | rounds | MB | simulated seconds |\n| --- | --- | --- | --- | --- |")
    for name, folder in folders.items():
        evaluations = curve(folder)
        for target in TARGETS:
            seconds = time_to(evaluations, target, timings[name].rounds)
            if seconds is None:
                best = max(accuracy for _, accuracy in evaluations)
                print(f"| {name} | {100 * target:g} | never in {evaluations[-1][0]} (best {100 * best:.1f}) | | |")
                continue
            first = next(round for round, accuracy in evaluations if accuracy >= target)
            (spent,) = bytes_until(folder, [first])
            print(f"| {name} | {100 * target:g} | {first} | {spent / 1e6:.1f} | {seconds:,.0f} |")


def parts(timings: dict[str, Timing]) -> None:
    """What a round of the slowest client is made of, on the average."""
    print(f"| method | {' | '.join(Seconds._fields)} | a round |\n| --- |{' --- |' * (len(Seconds._fields) + 1)}")
    for name, found in timings.items():
        means = [sum(column) / len(found.slowest) for column in zip(*found.slowest.values(), strict=True)]
        print(f"| {name} | {' | '.join(f'{mean:.2f}' for mean in means)} | {sum(means):.2f} |")


def draw(folders: dict[str, RunFolder], timings: dict[str, Timing], profile: str, path: Path) -> None:
    figure, axes = pyplot().subplots(1, 3, figsize=(11, 3.4), sharey=True)
    for (name, folder), colour in zip(folders.items(), COLOURS, strict=False):
        rounds, accuracies = zip(*curve(folder), strict=True)
        megabytes = [spent / 1e6 for spent in bytes_until(folder, rounds)]
        for axis, xs in zip(axes, (rounds, megabytes, [timings[name].until(r) for r in rounds]), strict=True):
            axis.plot(xs, accuracies, color=colour, label=name, linewidth=1.8)
    for axis, label in zip(axes, ("rounds", "megabytes, up and down", f"simulated seconds, {profile}"), strict=True):
        axis.set_xlabel(label)
    axes[0].set_ylabel("accuracy, mean over clients")
    axes[2].legend(loc="lower right")
    figure.tight_layout()
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("words", nargs="*", metavar="key=value")
    asked = parser.parse_args()
    out, words = asked.out, asked.words
    folders = {}
    for name in METHODS:
        place = out / name
        if (place / "config.yaml").exists():
            resume(place)
        else:
            simulate.run(config.read(None, [*SETTINGS, *words, f"algorithm={name}", f"out={place}"]))
        folders[name] = RunFolder.open(place)
    profiles: dict[str, Devices] = {
        "phone": DEVICES["phone"](),
        "phone, always there": DEVICES["phone"](availability=1.0),
        "iot": DEVICES["iot"](),
    }
    for profile, devices in profiles.items():
        timings = {name: timing(folder.path, devices) for name, folder in folders.items()}
        print(f"\n## {profile}\n")
        table(folders, timings)
        print()
        parts(timings)
        if profile == "phone":
            draw(folders, timings, profile, out / "time_to_accuracy")


if __name__ == "__main__":
    main()
