"""Pickle files of others: arrays and containers come back, a damaged type is refused before numpy believes it."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from fedlens.core.errors import BadInput
from fedlens.data.pickles import unpickled

KINDS = [np.arange(3), np.float32([1, 2]), np.array(["a", "bc"]), np.array([[1], "x"], dtype=object), np.uint8(7)]


@pytest.mark.parametrize("what", KINDS, ids=lambda what: str(what.dtype))
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_what_numpy_writes_comes_back(what, protocol):
    again = unpickled(pickle.dumps({"a": [what]}, protocol), Path("x.pkl"))["a"][0]
    assert again.dtype == what.dtype and np.array_equal(again, what)


@pytest.mark.parametrize("changed", [b"K\x3ft", b"K\x08t"])
def test_a_type_with_other_flags_is_refused_without_a_traceback(changed, capfd):
    sound = pickle.dumps(np.arange(3), 2)
    ends = b"J\xff\xff\xff\xff" * 2  # size and alignment of the type; its flags follow
    assert sound.count(ends + b"K\x00t") == 1
    with pytest.raises(BadInput, match=r"x\.pkl is damaged"):
        unpickled(sound.replace(ends + b"K\x00t", ends + changed), Path("x.pkl"))
    assert not capfd.readouterr().err  # numpy prints one itself where it gets that far
