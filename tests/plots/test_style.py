"""matplotlib is imported in a thread, ahead of time."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("seconds", [0, 0.1])
def test_whoever_draws_meets_no_half_of_matplotlib(seconds):
    code = f"""
import sys, threading, time
from fedlens.plots import style
sys.setswitchinterval(1e-5)
ahead = threading.Thread(target=style.import_matplotlib)
ahead.start()
time.sleep({seconds})
figure, _ = style.pyplot().subplots()
figure.draw_without_rendering()
ahead.join()
print("drawn")
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "drawn\n", found.stderr
