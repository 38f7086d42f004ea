"""Methods that hand clients' models on: what `describe` says of a round is what later rounds of a run send."""

from __future__ import annotations

import pytest

from fedlens import config
from fedlens.simulate import run as simulate
from fedlens.simulate.describe import about_rows, describe, traffic

SMALL = ["clients=4", "cohort=3", "model=mlp", "model.hidden=4", "local.batch_size=400", "evaluate.every=9"]
SMALL += ["engine=sequential", "picture=false", "checkpoint=0", "durable=false", "evaluate.personal=none"]


@pytest.mark.parametrize("method", ["fedamp", "fedfomo", "fedpac"])
def test_bytes_of_a_later_round(method, tmp_path):
    words = [f"algorithm={method}", *SMALL]
    asked = [config.read(None, [*words, f"rounds={rounds}", f"out={tmp_path}/{rounds}"]) for rounds in (2, 3)]
    leaves = describe(asked[0], 10, 1, 28)
    (said,) = traffic(leaves).values()
    assert about_rows(leaves).startswith("In rounds of 3 clients, after the first")
    sent = [simulate.run(each) for each in asked]
    assert sent[1].bytes_down - sent[0].bytes_down == 3 * said["down"]
    assert sent[1].bytes_up == 9 * said["up"]


def test_others_have_no_rows():
    assert about_rows(describe(config.read(None, ["algorithm=ifca", "model=mlp"]), 10, 1, 28)) == ""
