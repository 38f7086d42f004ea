"""The examples of a lane's next steps, where the data set itself stays on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.batches import Dataset, OnHost


class Window:
    """Room on the device for `steps` batches of `size`: a recorded step finds its batch where it was recorded.

    The host gathers examples into page-locked memory while the device works on those before, and only queues the copy,
    so that other lanes compute meanwhile. It is never further ahead than one gather.
    """

    def __init__(self, source: Dataset, steps: int, size: int):
        assert isinstance(source.x, OnHost) and isinstance(source.y, OnHost)
        self.steps, self._sources = steps, (source.x, source.y)
        self._staged = [part.room(steps * size, staged=True) for part in self._sources]
        self._rooms = [part.room(steps * size) for part in self._sources]
        self._copied: Any = None
        self.data = replace(source, x=self._rooms[0], y=self._rooms[1])

    def rows(self, steps: int) -> Tensor:
        """[steps, size]: where in the window each step finds its batch."""
        places = torch.arange(len(self._rooms[0]), device=self._rooms[0].device).view(self.steps, -1)
        return places[torch.arange(steps, device=places.device) % self.steps]

    def fetch(self, rows: Tensor) -> None:
        """Let these examples of the data set, [steps, size], follow the ones that queued steps still read."""
        if self._copied is not None:
            self._copied.synchronize()
        index = rows.flatten()
        for source, staged, room in zip(self._sources, self._staged, self._rooms, strict=True):
            found = torch.index_select(source.stored, 0, index, out=staged[: len(index)])
            room[: len(index)].copy_(found, non_blocking=True)
        if self._rooms[0].is_cuda:
            self._copied = torch.cuda.current_stream(self._rooms[0].device).record_event()
