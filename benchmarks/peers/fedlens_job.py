"""A job by FedLens: a run as anyone starts it, with a watcher that notes the time."""

import contextlib
import sys
import tempfile
from pathlib import Path

from job import JOBS, linger, say

from fedlens import config, run
from fedlens.simulate.recorder import Nobody


class Timed(Exception):
    """All rounds that count are over."""


class Clock(Nobody):
    def __init__(self, job):
        self.job = job

    def round(self, progress):
        if progress.round == self.job.look_every:
            say("look", accuracy=progress.accuracy)
        say("round", round=progress.round)
        if progress.round == self.job.last:
            linger()
            raise Timed

    def note(self, text):
        print(text)


if __name__ == "__main__":
    asked = JOBS[Path(sys.argv[1]).name]
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(Timed):
        run(config.read(words=[*asked.settings, f"out={Path(folder) / 'run'}", *sys.argv[2:]]), watcher=Clock(asked))
