"""About how long it takes: images ahead are counted by hand, seconds are those of a step."""

import pytest

from fedlens import config
from fedlens.papers import duration
from fedlens.papers.duration import Effort, about, images_ahead, seconds, sentence


def experiment(*words):
    return config.read(None, ["data=mnist5k", "model=mlp", "engine=sequential", *words])


def test_images_ahead_by_hand():
    looks = ("evaluate.every=5", "evaluate.personal=none", "clients=20", "cohort=4")
    plain = experiment("rounds=10", "local.epochs=2", *looks)
    images = plain.data.load()
    own, test = len(images.train) // 20, len(images.test)
    assert images_ahead(plain, images) == pytest.approx(10 * 4 * 2 * own + 2 * test / 3)
    xds = experiment("rounds=10", "local.epochs=2", "algorithm=fedxds/paper", *looks)  # and ten rounds of ten epochs
    warm = images_ahead(xds, images) - images_ahead(plain, images)
    assert warm == pytest.approx(10 * 20 * 10 * own)


def test_seconds_are_a_steps_times_the_steps(monkeypatch):
    measured = []
    monkeypatch.setattr(duration, "_measured", lambda *args: measured.append(args) or 0.001)
    one, two = experiment("rounds=2"), experiment("rounds=4")
    images = one.data.load()
    ahead = sum(images_ahead(each, images) for each in (one, two))
    assert seconds([one, two]) == pytest.approx(0.001 * ahead + 2 * 0.5) and len(measured) == 1
    assert seconds([], [Effort(one, lambda images: 500.0)]) == pytest.approx(0.5)
    assert seconds([config.read(None, ["data=npz", "data.path=nowhere.npz"])]) is None


def test_a_step_is_measured():
    one = experiment()
    assert 0 < duration.Pace()(one.resolved(), one.data.load()) < 1


def test_in_words():
    said = {3: "some seconds", 30: "less than a minute", 58: "about 1 minute", 700: "about 12 minutes"}
    said |= {3 * 3600: "about 3 hours", 100_000: "about 28 hours", 300_000: "about 3 days"}
    assert {taken: about(taken) for taken in said} == said
    assert sentence(22, 700.0).startswith("22 runs: about 12 minutes on this machine")
    assert "cannot be told" in sentence(1, None) and sentence(0, 3.0).startswith("some seconds on")
