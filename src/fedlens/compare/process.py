"""One process of a comparison: carries out the runs it is told of, one after another.

Started as `python -m fedlens.compare.process`. Orders come in as lines of JSON, and so goes out how they get on.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO


class Told:
    """A watcher that passes everything on as lines of JSON."""

    def __init__(self, out: TextIO):
        self.out = out

    def say(self, kind: str, **values: Any) -> None:
        print(json.dumps({"kind": kind, **values}), file=self.out, flush=True)

    def begin(self, experiment, folder, notes, round, rounds):
        self.say("begin", round=round, rounds=rounds)

    def clients(self, answered, asked):
        pass  # a line of many has no room for it

    def round(self, progress):
        self.say("round", **asdict(progress))

    def note(self, text):
        self.say("note", text=text)


def main() -> None:
    from .. import config
    from ..simulate.finish import GOES_WRONG, finish, reason

    told = Told(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)  # a method of the user's own may print
    for order in _orders():
        try:
            experiment = replace(config.read(None, order["words"]), out=order["out"])
            finish(experiment, order["where"], told, among=Path(order["out"]).parents[1])
        except GOES_WRONG as error:
            told.say("failed", why=reason(error))
        else:
            told.say("done")


def _orders() -> Any:
    """Until there are no more. When whoever gives them is gone, so is this process, in the middle of a round."""
    waiting: queue.Queue[dict[str, Any]] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            waiting.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        yield waiting.get()


if __name__ == "__main__":
    main()
