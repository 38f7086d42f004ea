"""compile=auto: the rule, what it measures, and what it remembers."""

import json

import pytest

from fedlens.core.batches import Federation
from fedlens.engines import compiling
from fedlens.engines.compiling import Measured, decide
from small import PLAN, federation, network


class Ruler:
    """Stands for a device: so many seconds of a step, and until the first round."""

    def __init__(self, plain: float, compiled: float, first: float = 15.0):
        self.answers, self.asked = {False: (plain, 1.0), True: (compiled, first)}, []

    def __call__(self, compiled: bool) -> tuple[float, float]:
        self.asked.append(compiled)
        return self.answers[compiled]


@pytest.fixture
def file(tmp_path):
    return tmp_path / "fedlens" / "net.json"


def test_few_steps_are_not_even_measured(file):
    ruler = Ruler(1.0, 0.1)
    assert decide(file, 100, ruler) == (False, "compile is off: 100 steps are few, compiling takes 20 s")
    assert ruler.asked == [] and not file.exists()


def test_what_cannot_pay_is_measured_once_and_never_compiled(file):
    ruler = Ruler(1e-4, 1e-5)
    for _ in range(2):
        pays, said = decide(file, 50_000, ruler)
        assert not pays and said == "compile is off: 50,000 steps save about 1.0 s, compiling takes 20 s"
    assert ruler.asked == [False]


def test_what_pays_is_compiled_and_known_from_then_on(file):
    ruler = Ruler(1e-3, 7e-4)
    pays, said = decide(file, 200_000, ruler)
    assert pays and said == "compile is on: 200,000 steps save about 60.0 s, the compiler has done its work"
    assert compiling.read(file) == Measured(plain=1e-3, compiled=7e-4, cold=15.0)
    # The cache has it now: 5 s, unless a run has shown what it takes.
    assert decide(file, 20_000, ruler) == (True, "compile is on: 20,000 steps save about 6.0 s, compiling takes 5 s")
    compiling._here.discard(file)
    compiling.note(file, 7.0)
    compiling.note(file, 0.1)  # the same process again: no compiler ran
    assert compiling.read(file).warm == 7.0
    assert decide(file, 20_000, ruler)[0] is False
    assert ruler.asked == [False, True]


def test_hopes_that_a_measurement_does_not_confirm(file):
    ruler = Ruler(1e-3, 1.1e-3)
    pays, said = decide(file, 200_000, ruler)
    assert not pays and said == "compile is off: 200,000 steps save about 0.0 s, the compiler has done its work"
    assert decide(file, 10_000_000, ruler)[0] is False
    assert ruler.asked == [False, True]


def test_other_networks_of_this_machine_say_what_compiling_takes(file):
    decide(file, 200_000, Ruler(1e-3, 7e-4, first=60.0))
    ruler = Ruler(1e-3, 7e-4)
    assert decide(file.with_name("other.json"), 200_000, ruler)[1].endswith("save about 40.0 s, compiling takes 60 s")


def test_a_file_that_cannot_be_read_is_measured_again(file):
    file.parent.mkdir()
    for text in ("", "[1]", '{"a": 1}'):
        file.write_text(text)
        assert compiling.read(file) == Measured()


def test_networks_and_shapes_have_files_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = {
        compiling.store(net, federation(), size, "cpu")
        for net in (network(), network(norm=False), network(buffers="local"))
        for size in (4, 8)
    }
    assert len(found) == 6 and all(path.parent == tmp_path / "fedlens" for path in found)
    assert compiling.store(network(), federation(), 4, "cpu") in found


def test_steps_are_measured_in_lanes_and_leave_the_network_as_it_was():
    net, few = network(), federation()
    before = net.initial_weights()
    few = Federation(few.data, {0: few.train[3], 1: few.train[1][:0]}, few.test)  # one image in all
    seconds, first = compiling.measured(net, few, PLAN, "cpu", False)
    assert 0 < seconds < first and net.compile is False
    assert all((a == b).all() for a, b in zip(before.leaves(), net.initial_weights().leaves(), strict=True))
    json.dumps([seconds, first])
