"""The job by FedLens: a run as anyone starts it, with a watcher that notes the time."""

import sys
import tempfile
from pathlib import Path

from job import LOOK_EVERY, WORDS, say

from fedlens import config, run
from fedlens.simulate.recorder import Nobody


class Clock(Nobody):
    def round(self, progress):
        if progress.round == LOOK_EVERY:
            say("look", accuracy=progress.accuracy)
        say("round", round=progress.round)

    def note(self, text):
        print(text)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run(config.read(words=[*WORDS, f"out={Path(folder) / 'run'}", *sys.argv[2:]]), watcher=Clock())
