"""How many runs at a time: as many as do more rounds a second, found out while they run."""

import pytest

from fedlens import config
from fedlens.compare import crew
from fedlens.compare.crew import Crew, Growth


def grown(rates: dict[int, float], most: int = 8) -> Growth:
    """What comes of a device on which so many processes do so many rounds a second."""
    now, done = [0.0], 0.0
    growth = Growth(Crew(1, most), clock=lambda: now[0])
    for _ in range(200):
        now[0] += 1.0
        done += rates[growth.count]
        growth.look(int(done), growth.count)
    return growth


def test_it_grows_while_more_processes_do_more():
    found = grown({1: 10, 4: 30, 16: 31}, most=16)
    assert found.count == found.best == 16 and found.settled  # the best of all, though hardly
    assert grown({1: 10, 4: 19, 8: 18}).count == 4
    assert grown({1: 10, 4: 10.5, 8: 99}).count == 4
    assert grown({1: 10, 4: 6}).count == 1
    assert grown({1: 10, 3: 30}, most=3).count == 3


def test_a_process_that_has_not_begun_is_waited_for():
    now = [0.0]
    growth = Growth(Crew(1, 8), clock=lambda: now[0])
    for now[0] in range(100):
        assert growth.look(rounds=now[0] * 9, busy=0) == 1
    assert growth.rates == {}


def test_a_number_that_is_given_stays():
    growth = Growth(Crew(3, 3))
    assert growth.look(1000, 3) == 3 and growth.settled


def test_what_paid_is_remembered_for_such_networks(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    one, other = (config.read(None, [f"model={name}"]) for name in ("cnn", "mlp"))
    assert crew.known(one) is None
    crew.remember(one, 4)
    crew.remember(other, 100)
    assert (crew.known(one), crew.known(other)) == (4, crew.MOST)
    (tmp_path / "fedlens" / "side_by_side.json").write_text("[")
    assert crew.known(one) is None


@pytest.mark.parametrize("tasks", [0, 1, 3])
def test_few_runs_go_one_after_another_on_a_gpu(tasks, monkeypatch):
    from fedlens.compare import parallel

    monkeypatch.setattr(parallel, "_is_on_cpu", lambda asked: False)
    task = parallel.Task("a", config.read(None, []), (), ())
    assert parallel.side_by_side([task] * tasks) == Crew(1, 1)
