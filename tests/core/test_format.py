"""Numbers as people read them."""

import pytest

from fedlens.core.format import duration, percent, size


@pytest.mark.parametrize(
    "write, number, text",
    [
        (percent, 0.4312, "43.1 %"),
        (percent, None, "–"),
        (size, 0, "0 B"),
        (size, 999.4, "999 B"),
        (size, 999.6, "1 kB"),
        (size, 34_902_112, "34.9 MB"),
        (size, 2e15, "2e+03 TB"),
        (duration, 0.04, "0.0 s"),
        (duration, 9.96, "10.0 s"),
        (duration, 119.4, "119 s"),
        (duration, 120, "2.0 min"),
        (duration, 7199, "120.0 min"),
        (duration, 7200, "2.0 h"),
    ],
)
def test_numbers_have_a_unit_that_fits(write, number, text):
    assert write(number) == text
