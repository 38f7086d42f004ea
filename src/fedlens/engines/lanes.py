"""Clients side by side on one device or several: a lane is a seat with storage, a stream and a recorded step.

On CUDA a lane's step is recorded once as a graph and replayed for every client that sits there, round after round;
streams overlap, so that small models fill a large device. Elsewhere the same lanes step eagerly, which tests the
seating without a GPU. Plans, weights and keys of a client lie on the device: a replay needs no work of the host.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..core.algorithm import Client, Stage
from ..core.batches import Federation, Plan
from ..core.memories import Memories
from ..core.network import Network
from ..core.rng import key
from ..core.run import Job, Reply
from ..core.tree import Tree
from .sequential import Sequential

_WARM_UP = 3  # steps before recording: libraries choose kernels and allocate on the first ones


@dataclass(frozen=True)
class Kind:
    """What a lane can serve without being recorded anew."""

    algorithm: Any
    objective: Any
    optimizer: Any
    size: int
    steps: int
    local: tuple
    memory: tuple


class Lane:
    """A seat that clients take in turn: storage that stays, and a step over it."""

    def __init__(self, place: Place, kind: Kind, client: Client, local: Tree):
        self.kind, self.place, self.device = kind, place, place.device
        self.local, self.memory = local.clone(), client.memory.clone()
        self.rows = torch.zeros(kind.steps, kind.size, dtype=torch.long, device=self.device)
        self.weights = torch.zeros(kind.steps, kind.size, dtype=torch.float64, device=self.device)
        self.keys = torch.zeros(kind.steps, dtype=torch.long, device=self.device)
        self.t = torch.zeros(1, dtype=torch.long, device=self.device)
        self.view = client.inside(received=place.received, shared=place.shared, memory=self.memory)
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._views: dict[str, Client] = {}

    def seat(self, job: Job, i: int, client: Client, local: Tree, batches: Plan) -> None:
        """Copy a client's trees and plan into the lane."""
        self.i, self.client, self.epochs, self.done = i, client, batches.epochs, 0
        self.fill(local, client.memory)
        steps = len(batches.epochs)
        if steps:
            rows = client.data.index[batches.rows.to(self.device)]
            keys = torch.tensor([key(job.seed, "step", job.round, i, t) for t in range(steps)])
            self.rows[:steps].copy_(rows)
            self.weights[:steps].copy_(batches.weights)
            self.keys[:steps].copy_(keys)
        self.t.zero_()

    def fill(self, local: Tree, memory: Tree) -> None:
        self.local.copy_(local)
        self.memory.copy_(memory)
        if self.stream is not None:
            # Made on other streams: their storage must not be given away before this copy has happened.
            for leaf in (*local.leaves(), *memory.leaves()):
                if leaf.device.type == "cuda":
                    leaf.record_stream(self.stream)

    def step(self) -> None:
        """The next step of whoever sits here."""
        phase = self.kind.algorithm.phase(self.epochs[self.done])
        self.done += 1
        if phase in self._graphs:
            self._graphs[phase].replay()
        else:
            self._step(phase)

    def _step(self, phase: str) -> None:
        if phase not in self._views:
            self._views[phase] = self.view.inside(phase=phase)
        row, weight, seed = (table.index_select(0, self.t)[0] for table in (self.rows, self.weights, self.keys))
        batch = self.place.federation.data.batch(row, weight, seed)
        self.local.copy_(self.kind.algorithm.step(self._views[phase], self.local, batch))
        self.t += 1

    def record(self, phases: Sequence[str]) -> None:
        """One graph for each kind of step. Warming up moves the lane's values: a client is seated afterwards."""
        assert self.stream is not None
        for phase in phases:
            with torch.cuda.stream(self.stream):
                for _ in range(_WARM_UP):
                    self.t.zero_()
                    self._step(phase)
                self.t.zero_()
                self.stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._step(phase)
                finally:
                    graph.capture_end()
            self._graphs[phase] = graph


class Place:
    """One device: the data, the network, what all clients received, and the lanes that are free."""

    def __init__(self, number: int, device: torch.device, net: Network, federation: Federation):
        self.number, self.device, self.net, self.federation = number, device, net, federation
        self.received, self.shared = Tree(), Tree()
        self.free: dict[Kind, list[Lane]] = {}
        self.rooms: dict[Stage, int] = {}  # how many lanes of a stage fit

    def take_in(self, job: Job) -> Job:
        """The job as clients on this device see it."""
        self.received, self.shared = self._hold(self.received, job.download), self._hold(self.shared, job.shared)
        return replace(job, download=self.received, shared=self.shared)

    def _hold(self, held: Tree, new: Tree) -> Tree:
        """One copy for all lanes; in the same storage while its shapes stay, since recorded steps read it there."""
        if _shape(held) == _shape(new):
            return held.copy_(new)
        self.free.clear()
        return new.map(lambda leaf: leaf.to(self.device, copy=True))

    def kind(self, stage: Stage, client: Client, local: Tree) -> Kind:
        longest = max((math.ceil(len(index) / stage.size) for index in self.federation.train.values()), default=0)
        steps = max(1, stage.epochs * longest if stage.steps is None else stage.steps)
        parts = stage.algorithm, stage.objective, stage.optimizer, stage.size, steps
        return Kind(*parts, _shape(local), _shape(client.memory))


class Lanes(Sequential):
    """Clients of any size run side by side; when one is done, the next takes its lane."""

    def __init__(
        self,
        net: Network,
        federation: Federation,
        *,
        lanes: int = 0,
        devices: Sequence[torch.device | str] | None = None,
        memories: Memories | None = None,
        record: bool = True,
    ):
        """`lanes` on each device; 0: as many as its free memory holds. `record` False: eager steps on CUDA too."""
        super().__init__(net, federation, memories=memories)
        self.home = federation.data.x.device
        self.places = [
            Place(n, torch.device(device), net if n == 0 else net.copy().to(device), federation.to(device))
            for n, device in enumerate(devices or [self.home])
        ]
        self.count, self.recorded = lanes, record and self.home.type == "cuda"

    def run(self, job: Job, cohort: Sequence[int]) -> list[Reply]:
        jobs = [place.take_in(job) for place in self.places]
        waiting = deque(sorted(cohort, key=lambda i: (-len(self.federation.train[i]), i)))
        seated: list[Lane] = []
        replies: list[Reply] = []
        while waiting or seated:
            while waiting and (place := self._roomiest(job.stage, seated)) is not None:
                lane = self._seat(jobs[place.number], place, waiting[0], alone=not seated)
                if lane is None:  # no memory for another one: wait until a client leaves
                    break
                waiting.popleft()
                seated.append(lane)
            for lane in seated:
                if lane.done < lane.client.steps:
                    with _on(lane.stream):
                        lane.step()  # recorded: asynchronous, the streams overlap
            for lane in [lane for lane in seated if lane.done == lane.client.steps]:
                seated.remove(lane)
                replies.append(self._leave(jobs[lane.place.number], lane))
        for place in self.places if self.recorded else ():
            main = torch.cuda.current_stream(place.device)
            for lane in (lane for lanes in place.free.values() for lane in lanes):
                main.wait_stream(lane.stream)
        return replies

    def close(self) -> None:
        """Recorded graphs hold device memory: give it back before the next run of this process."""
        for place in self.places:
            place.free.clear()
        if self.recorded:
            gc.collect()
            torch.cuda.empty_cache()

    def _roomiest(self, stage: Stage, seated: list[Lane]) -> Place | None:
        """The device with the fewest clients, if another fits."""
        busy = {place.number: sum(lane.place is place for lane in seated) for place in self.places}
        place = min(self.places, key=lambda place: busy[place.number])
        trains = stage.epochs > 0 or stage.steps is not None
        # The first recorded lane tells what one costs; without training there is nothing to overlap.
        limit = self.count or place.rooms.get(stage, 1 if self.recorded and trains else _EAGER)
        return place if busy[place.number] < limit else None

    def _seat(self, job: Job, place: Place, i: int, alone: bool) -> Lane | None:
        client, batches = self.open(job, i, place.net, place.federation)
        client = replace(client, memory=client.memory.map(lambda leaf: leaf.to(place.device, non_blocking=True)))
        local = job.stage.algorithm.begin(client)
        kind = place.kind(job.stage, client, local)
        free = place.free.setdefault(kind, [])
        try:
            lane = free.pop() if free else self._new_lane(place, kind, client, local, job.stage)
        except torch.cuda.OutOfMemoryError:
            if not alone:
                return None
            for other in place.free.keys() - {kind}:  # lanes of earlier stages, kept warm while there was room
                del place.free[other]
            gc.collect()
            torch.cuda.empty_cache()
            lane = self._new_lane(place, kind, client, local, job.stage)
        if lane.stream is not None:
            lane.stream.wait_stream(torch.cuda.current_stream(place.device))  # received, memory and local are there
        with _on(lane.stream):
            lane.seat(job, i, client, local, batches)
        return lane

    def _new_lane(self, place: Place, kind: Kind, client: Client, local: Tree, stage: Stage) -> Lane:
        before = _free_memory(place.device)
        lane = Lane(place, kind, client, local)
        if self.recorded and client.steps and getattr(kind.algorithm, "capturable", True):
            some = client.data.index[torch.arange(kind.size, device=place.device) % client.examples]
            lane.rows.copy_(some.expand_as(lane.rows))
            lane.weights.fill_(1)
            phases = dict.fromkeys(kind.algorithm.phase(epoch) for epoch in range(max(stage.epochs, 1)))
            torch.cuda.current_stream(place.device).synchronize()
            with _no_collection():
                lane.record(list(phases))
            if stage not in place.rooms:
                cost = max(before - _free_memory(place.device), 1 << 20)
                place.rooms[stage] = max(1, min(_MOST, 1 + int(0.8 * _free_memory(place.device) / cost)))
        return lane

    def _leave(self, job: Job, lane: Lane) -> Reply:
        with _on(lane.stream):
            reply = self.conclude(job, lane.i, lane.client, lane.local.clone())  # the next client writes over it
            if lane.place.device != self.home:
                reply = Reply(reply.client, reply.upload.map(lambda leaf: leaf.to(self.home)))
        lane.place.free.setdefault(lane.kind, []).append(lane)
        return reply


_EAGER = 4  # lanes without recording: there is no overlap to gain
_MOST = 128  # lanes on a device; beyond that the host cannot keep up


def _shape(tree: Tree) -> tuple:
    return tuple((path, leaf.shape, leaf.dtype, leaf.device.type, leaf.stride()) for path, leaf in tree.paths())


def _current(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """A tensor collected while a graph is recorded would break the recording."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _on(stream: Any) -> contextlib.AbstractContextManager:
    return torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()


def _free_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
