"""A browser for a module, and its folder of runs served."""

import pytest

from browser import Chromium
from live_page import serving


@pytest.fixture(scope="module")
def browser():
    with Chromium() as started:
        yield started


@pytest.fixture
def served(folder):
    with serving(folder) as server:
        yield server
