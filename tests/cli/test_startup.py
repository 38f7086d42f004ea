"""How a command begins and ends: nothing of it changes what it says or its exit code."""

import gc
import subprocess
import sys
from types import SimpleNamespace

import pytest

from fedlens.cli import startup


@pytest.mark.parametrize(
    ("program", "armed"),
    [
        (SimpleNamespace(__spec__=SimpleNamespace(name="fedlens.__main__")), True),
        (SimpleNamespace(__spec__=None, __file__="/usr/bin/fedlens"), True),
        (SimpleNamespace(__spec__=SimpleNamespace(name="pytest.__main__")), False),
        (SimpleNamespace(__spec__=None, __file__="/home/me/experiment.py"), False),
        (SimpleNamespace(__spec__=None), False),
    ],
)
def test_only_the_command_itself_ends_at_once(monkeypatch, program, armed):
    registered = []
    monkeypatch.setitem(sys.modules, "__main__", program)
    monkeypatch.setattr(startup.atexit, "register", registered.append)
    startup.end_at_once()
    assert registered == [startup._end] * armed


def test_a_command_says_all_and_lets_others_finish(tmp_path):
    """What was registered after the command began runs, and buffers that are not full arrive."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, threading\n"
        "class Late(threading.Thread):\n"
        "    def run(self):\n"
        "        threading.main_thread().join()\n"
        "        atexit.register(print, 'others have finished')\n"
        "Late().start()\n"
    )
    code = "import sys; sys.path.insert(0, '.'); sys.argv = ['fedlens', 'run', 'nonsense=1']; import sitecustomize"
    program = f"{code}\nimport runpy; runpy.run_module('fedlens', run_name='__main__', alter_sys=True)"
    found = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (2, "others have finished\n")
    assert found.stderr.startswith("fedlens: unknown key nonsense")


def test_modules_are_not_looked_through_for_garbage():
    was = gc.get_freeze_count()
    with startup.importing():
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() > was
