"""The evidence of `recommend` is what results/data makes of it."""

from pathlib import Path

import pytest

from fedlens import config
from fedlens.algorithms import ALGORITHMS
from fedlens.recommend.rank import described, known
from scripts import script

ROOT = Path(__file__).parents[2]
WORDS = ("data=mnist5k", "partition=dirichlet", "partition.alpha=0.3", "clients=5", "model=cnn2", "rounds=7")


@pytest.fixture(scope="module")
def evidence():
    return script("docs/evidence.py")


def cell(row, *words, seed=0, last=None, over=(), **personal):
    looks = {kind: {"mean": value} for kind, value in personal.items()}
    head = {"table": "pse/x", "row": row, "words": [*WORDS, *words, *over], "over": [*over]}
    return {**head, "seed": seed, "accuracy_last": last, "personal": looks}


def test_nothing_is_stale(evidence):
    assert evidence.text() == evidence.FILE.read_text("utf-8"), "run `python docs/evidence.py`"


def test_cells_become_results_by_setting_and_seeds(evidence):
    avg, pse = ("algorithm=fedavg",), ("algorithm=pse/paper", "algorithm.attention=self")
    cells = [
        cell("fedavg", *avg, last=0.5, after=0.6),
        cell("fedavg", *avg, seed=1, last=0.7, after=0.8),
        cell("fedavg_uniform", *avg, "weighting=uniform", last=0.4),
        cell("fedrep", "algorithm=fedrep", "algorithm.private=classifier", after=0.9),
        cell("fedrep", "algorithm=fedrep", "algorithm.private=classifier", seed=1, after=0.7),
        cell("v2", *pse, after=0.99),  # a setting without a name
        cell("fedavg", *avg, over=["algorithm.prox=1"], last=0.99, after=0.99),
        cell("fedrep", "algorithm=fedrep", over=["model.position=false"], after=0.99),
        cell("v3", "algorithm=fedprox", "model.position=false", after=0.99),  # a row of ablations
        cell("fedx_lrp", "algorithm=fedxds/paper", "algorithm.attribution=lrp", last=0.3),  # which it has anyway
        cell("fedavg+ft", "algorithm=fedavg+ft", last=0.5, after=0.6, **{"fine-tuned": 0.65}),
        cell("alone", *avg, "rounds=9", last=0.1),  # nothing beside it
    ]
    found = evidence.built({"usual": {}, "results": []}, cells, [])["results"]
    skew, _ = described(config.read(None, WORDS))
    head = {"source": "results/pse.md", "data": "mnist5k", "clients": 5, "partition": "dirichlet, alpha 0.3"}
    head |= {"model": "cnn2", "rounds": 7, "skew": {key: round(value, 4) for key, value in skew.items()}}
    one = (
        {"fedavg": 0.5, "uniform": 0.4, "fedxds/paper": 0.3, "fedavg+ft": 0.5},
        {"fedavg": 0.6, "fedrep": 0.9, "fedavg+ft": 0.65},
    )
    two = {"fedavg": 0.6}, {"fedavg": 0.7, "fedrep": 0.8}
    assert found == [
        {**head, "seeds": seeds, "global": each, "personal": personal}
        for seeds, (each, personal) in ((1, one), (2, two))
    ]


def test_methods_are_named_with_the_defaults_they_had():
    """Defaults that changed since are presets now; every name can be run."""
    names = {name for result in known() for kind in ("global", "personal") for name in result[kind]}
    assert {"pse/means", "fedrep/closing_round", "fedfed/earlier", "fedftg/joint"} <= names
    for name in names - {"uniform"}:
        method, _, preset = name.partition("+")[0].partition("/")
        assert method in ALGORITHMS and (not preset or preset in ALGORITHMS[method].presets), name
