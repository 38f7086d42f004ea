"""`fedlens recommend` for five real splits, before and after a new book of the league.

python benchmarks/league_splits.py --evidence OLD.json    what an earlier evidence.json says, beside what is said now
python benchmarks/league_splits.py                        what is said now, alone

OLD.json is src/fedlens/recommend/evidence.json as it was before: `git show COMMIT:src/fedlens/recommend/evidence.json`.
Nothing is trained; the data of the splits must be here.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from fedlens import config
from fedlens.recommend.rank import known, read, recommend

# One model for all, or one for each client; ten clients and a hundred; strong skew, mild skew, two classes.
SPLITS = (
    ("data=cifar10 partition.alpha=0.1 clients=10", "global"),
    ("data=cifar10 partition.alpha=0.5 clients=100 cohort=10", "global"),
    ("data=fashion_mnist partition.alpha=0.1 clients=10", "personal"),
    ("data=fashion_mnist partition=shards partition.classes=2 partition.distinct=true clients=100 cohort=10", "global"),
    ("data=mnist5k partition.alpha=0.1 clients=20 cohort=10", "personal"),
)


def told(words: str, kind: Any, evidence: list[dict[str, Any]]) -> str:
    """What is proposed, what it stands on, and what is named as behind."""
    found = recommend(config.read(None, shlex.split(words)), evidence, kind)
    if not found.advice:
        return "nothing (no evidence)"
    tried = [f"{one.method} {100 * (one.over_fedavg or 0):+.1f}" for one in found.advice if one.verdict == "try"]
    worlds = max(one.worlds for one in found.advice)
    behind = sum(one.verdict == "behind" for one in found.advice)
    return f"{', '.join(tried)}; {behind} behind; {found.advice[0].source}, {worlds} world{'s' * (worlds > 1)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evidence", type=Path, help="an earlier evidence.json")
    before = parser.parse_args().evidence
    old = read(before.read_text("utf-8"), str(before))["results"] if before else None
    for words, kind in SPLITS:
        print(f"fedlens recommend {words}{' --personal' if kind == 'personal' else ''}")
        if old is not None:
            print(f"    before: {told(words, kind, old)}")
        print(f"    {'after' if old is not None else 'now'}: {told(words, kind, known())}", flush=True)


if __name__ == "__main__":
    main()
