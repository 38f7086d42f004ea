"""Clients side by side on one device or several: a lane is a seat with storage, a stream and a recorded step.

On CUDA a lane's step is recorded once as a graph and replayed for every client that sits there, round after round;
streams overlap, so that small models fill a large device. Elsewhere the same lanes step eagerly, which tests the
seating without a GPU. Plans, weights and keys of a client lie on the device: a replay needs no work of the host.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..core.algorithm import Client, Stage
from ..core.batches import Federation, OnHost, Plan
from ..core.engine import Job, Reply
from ..core.memories import Memories
from ..core.network import Network
from ..core.rng import key
from ..core.tree import Tree
from .prefetch import Window
from .sequential import Sequential, looked_at, owned, tuned

_WARM_UP = 3  # steps before the first recording of a stage: libraries choose kernels and allocate on the first ones
_AGAIN = 1  # before the next ones: what is chosen is known, and each stream needs storage of its own
_BURST = 8  # steps queued for a lane at a time: no lane starves, and the host is ahead of the device
_EAGER = 4  # lanes without recording: there is no overlap to gain
MOST = 64  # recorded lanes on a device: more gain nothing, and recording each takes time
MOST_ONCE = 16  # in a stage of one round, which many recordings would outlast


class Lane:
    """A seat that clients take in turn: storage that stays, and a step over it."""

    def __init__(self, place: DeviceLanes, stage: Stage, client: Client, local: Tree):
        self.place, self.stage, self.device = place, stage, place.device
        self.local = local.map(place.laid_out)
        self.memory, self._memory_shape = client.memory.clone(), _shape(client.memory)
        steps = place.most_steps(stage)
        self.data, self.window = place.federation.data, place.window(min(steps, _BURST), stage.size)
        if self.window is not None:
            self.data, self.rows = self.window.data, self.window.rows(steps)
        # A line for each step: the examples' places, their weights (the bits of float64), the key.
        self.lines = torch.zeros(steps, 2 * stage.size + 1, dtype=torch.long, device=self.device)
        self.t = torch.zeros(1, dtype=torch.long, device=self.device)
        self.storages = _storages(self.local, place.received, place.shared)
        self.view = client.inside(received=place.received, shared=place.shared, memory=self.memory)
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._views: dict[str, Client] = {}

    def fits(self, memory: Tree) -> bool:
        """Whether the recorded step can serve a client that remembers this."""
        return _shape(memory) == self._memory_shape

    def load(self, job: Job, i: int, client: Client, local: Tree, batches: Plan) -> None:
        """Copy a client's trees and plan into the lane."""
        self.i, self.client, self.epochs, self.done = i, client, batches.epochs, 0
        if self.stage.algorithm.full_rows:
            self.used = [self.stage.size] * len(batches.epochs)
        else:
            self.used = [looked_at(batches, t, self.place.net, self.device) for t in range(len(batches.epochs))]
        self.local.copy_(local)
        self.memory.copy_(client.memory)
        if steps := len(batches.epochs):
            rows = owned(self.stage, i, self.place.train[i])[0][batches.rows]
            if self.window is not None:
                self.wanted, rows = rows, self.rows[:steps]
            keys = torch.tensor([key(job.seed, "step", job.round, i, t) for t in range(steps)])
            self._write(rows, batches.weights, keys)
        self.t.zero_()

    def _write(self, rows: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> None:
        """The plan in one copy, and without making the host wait for what is queued on the device."""
        lines = torch.empty(len(keys), self.lines.shape[1], dtype=torch.long, pin_memory=self.stream is not None)
        lines[:, : self.stage.size] = rows
        lines[:, self.stage.size : -1] = weights.view(torch.long)
        lines[:, -1] = keys
        self.lines[: len(lines)].copy_(lines, non_blocking=True)

    def advance(self, most: int) -> None:
        """The next steps of whoever sits here; recorded ones are only queued."""
        with _on(self.stream):
            if self.window is not None and self.done < len(self.epochs):
                self.window.fetch(self.wanted[self.done : self.done + most])
            for epoch in self.epochs[self.done : self.done + most]:
                phase = self.stage.algorithm.phase(epoch)
                if phase in self._graphs:
                    self._graphs[phase].replay()
                else:
                    self._step(phase, self.used[self.done])
                self.done += 1

    def _step(self, phase: str, size: int | None = None) -> None:
        if phase not in self._views:
            self._views[phase] = self.view.inside(phase=phase)
        line = self.lines.index_select(0, self.t)[0]
        rows, weights = line[:-1].view(2, -1)[:, :size]
        batch = self.data.batch(rows, weights.view(torch.float64), line[-1], self.stage.augment)
        self.local.copy_(self.stage.algorithm.step(self._views[phase], self.local, batch))
        self.t += 1

    def record(self, client: Client, warm_up: int = _WARM_UP) -> None:
        """One graph for each kind of step. Warming up moves the lane's values: a client is seated afterwards."""
        assert self.stream is not None
        some = client.data.index.cpu()[torch.arange(self.stage.size) % client.examples].expand(len(self.lines), -1)
        if self.window is not None:
            self.window.fetch(some[: self.window.steps])
            some = self.rows
        self._write(some, torch.ones(some.shape, dtype=torch.float64), torch.zeros(len(some), dtype=torch.long))
        torch.cuda.synchronize(self.device)
        for phase in dict.fromkeys(self.stage.algorithm.phase(epoch) for epoch in range(max(self.stage.epochs, 1))):
            with torch.cuda.stream(self.stream):
                for _ in range(warm_up):
                    self.t.zero_()
                    self._step(phase)
                self.t.zero_()
                self.stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with _recorded(graph):
                    self._step(phase)
            self._graphs[phase] = graph


class DeviceLanes:
    """One device: the data, the network, what all clients received, and the lanes that are free."""

    def __init__(self, number: int, device: torch.device, net: Network, federation: Federation):
        self.number, self.device, self.net, self.federation = number, device, net, federation
        self.received, self.shared = Tree(), Tree()
        self.free: dict[Stage, list[Lane]] = {}
        self.rooms: dict[Stage, int] = {}  # how many lanes of a stage fit
        self.hosted = isinstance(federation.data.x, OnHost)
        self.train = {i: index.cpu() for i, index in federation.train.items()}

    def take_in(self, job: Job) -> Job:
        """The job as clients on this device see it."""
        self.received, self.shared = self._hold(self.received, job.download), self._hold(self.shared, job.shared)
        return replace(job, download=self.received, shared=self.shared)

    def _hold(self, held: Tree, new: Tree) -> Tree:
        """One copy for all lanes; in the same storage while its shapes stay, since recorded steps read it there."""
        if _shape(held) == _shape(new):
            return held.copy_(new)
        self.free.clear()
        return new.map(lambda leaf: self.laid_out(leaf.to(self.device)))

    def laid_out(self, leaf: torch.Tensor) -> torch.Tensor:
        """A copy. On a GPU convolutions want channels side by side in their weights too."""
        wide = self.net.layout is not None and self.device.type == "cuda" and leaf.dim() == 4
        return leaf.clone(memory_format=torch.channels_last if wide else torch.preserve_format)

    def window(self, steps: int, size: int) -> Window | None:
        """Where lanes find their batches when the data stay on the host."""
        return Window(self.federation.data, steps, size) if self.hosted else None

    def most_steps(self, stage: Stage) -> int:
        longest = max((math.ceil(len(index) / stage.size) for index in self.federation.train.values()), default=0)
        return max(1, stage.epochs * longest if stage.steps is None else stage.steps)

    def serves(self, net: Network, federation: Federation) -> bool:
        """Whether what was recorded here holds for this network and these clients: the same shapes, the same images."""
        mine, data, new = self.net, self.federation.data, federation.data
        same = (mine.precision, mine.buffers, mine.compile) == (net.precision, net.buffers, net.compile)
        if not same or not _is_ours(net.module) or str(mine.module) != str(net.module) or data.prepare != new.prepare:
            return False
        pairs = [(data.x, new.x), (data.y, new.y)]
        return all(isinstance(b, torch.Tensor) and _equal(a, b) for a, b in pairs)

    def take_over(self, net: Network, federation: Federation) -> None:
        """For another run: its network's values where recorded steps read them, its clients, the images as they lie."""
        self.net.module.load_state_dict(net.module.state_dict())
        self.federation = replace(federation, data=self.federation.data)
        self.train = {i: index.cpu() for i, index in federation.train.items()}


class _Shelf:
    """Where the lanes of a run that has ended lie until the next of this process."""

    def __init__(self) -> None:
        self.is_open, self.places = False, []

    def taken(self, net: Network, federation: Federation, devices: Sequence[torch.device]) -> list[DeviceLanes] | None:
        """What serves this run; what does not is given up, and its memory with it."""
        found, self.places = self.places, []
        same = [place.device for place in found] == [*devices]
        if found and same and all(place.serves(net, federation.to(place.device)) for place in found):
            return found
        if found:
            del found
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return None


_shelf = _Shelf()


@contextlib.contextmanager
def recordings_kept() -> Iterator[None]:
    """Within the block, a run goes on with the lanes of the one before, where they serve it: the same results."""
    before, _shelf.is_open = _shelf.is_open, True
    try:
        yield
    finally:
        _shelf.is_open = before
        if not before:
            _shelf.places = []


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
        home = federation.data.x.device
        wanted = [torch.empty(0, device=device).device for device in devices or [home]]  # with their numbers
        kept = _shelf.taken(net, federation, wanted) if _shelf.is_open else None
        for place in kept or ():
            place.take_over(net, federation.to(place.device))
        if kept is not None:
            net, federation = kept[0].net, kept[0].federation
        super().__init__(net, federation, memories=memories)
        self.home = home
        self.places = kept or [
            DeviceLanes(n, device, net if n == 0 else net.copy().to(device), federation.to(device))
            for n, device in enumerate(wanted)
        ]
        self.count, self.recorded = lanes, record and self.home.type == "cuda"
        self.compile_seconds = 0.0  # until the first compiled step was recorded; 0: none was
        self._asked: set[Stage] = set()

    def run(self, job: Job, cohort: Sequence[int]) -> list[Reply]:
        self._asked.add(job.stage)
        jobs = [place.take_in(job) for place in self.places]
        waiting = deque(sorted(cohort, key=lambda i: (-len(self.federation.train[i]), i)))
        seated: list[Lane] = []
        replies: list[Reply] = []
        while waiting or seated:
            while waiting and (place := self._least_busy(job.stage, seated)) is not None:
                lane = self._load(jobs[place.number], place, waiting[0], alone=not seated)
                if lane is None:  # no memory for another one: wait until a client leaves
                    break
                waiting.popleft()
                seated.append(lane)
                lane.advance(_BURST)  # the device works while the host seats the next
            for lane in seated:
                lane.advance(_BURST)
            for lane in [lane for lane in seated if lane.done == lane.client.steps]:
                seated.remove(lane)
                replies.append(self._unload(jobs[lane.place.number], lane))
                self.heard(len(replies), len(cohort))
        for place in self.places if self.recorded else ():
            main = torch.cuda.current_stream(place.device)
            for lane in place.free[job.stage]:
                if lane.stream is not None:
                    main.wait_stream(lane.stream)
        return replies

    def close(self) -> None:
        """Recorded graphs hold device memory: give it back before the next run of this process, or hand them to it."""
        if _shelf.is_open:
            for place in self.places:  # what this run had no use for goes: a hundred runs must not fill the device
                place.free = {stage: free for stage, free in place.free.items() if stage in self._asked}
                place.rooms = {stage: room for stage, room in place.rooms.items() if stage in self._asked}
            _shelf.places = self.places
            return
        for place in self.places:
            place.free.clear()
        if self.recorded:
            gc.collect()
            torch.cuda.empty_cache()

    def measure(self, weights: Tree, detailed: bool = False) -> list[Tree]:
        try:
            return super().measure(weights, detailed)
        except torch.cuda.OutOfMemoryError:
            self._make_room()
            return super().measure(weights, detailed)

    def _make_room(self) -> None:
        """Lanes fill a device with what is to spare: where something else needs it, half as many have to do."""
        for place in self.places:
            place.free = {stage: [] for stage in place.free}
            place.rooms = {stage: max(1, room // 2) for stage, room in place.rooms.items()}
        gc.collect()
        torch.cuda.empty_cache()

    def _least_busy(self, stage: Stage, seated: list[Lane]) -> DeviceLanes | None:
        """The device with the fewest clients, if another fits."""
        busy = {place.number: sum(lane.place is place for lane in seated) for place in self.places}
        place = min(self.places, key=lambda place: busy[place.number])
        # The first recorded lane tells what one costs. Without training there is nothing to overlap, and every lane's
        # stream has memory of its own, which the device would have to find first.
        limit = self.count or place.rooms.get(stage, 1 if self.recorded else _EAGER)
        return place if busy[place.number] < limit else None

    def _load(self, job: Job, place: DeviceLanes, i: int, alone: bool) -> Lane | None:
        client, batches = self.open(job, i, place.net, place.federation)
        free = place.free.setdefault(job.stage, [])
        steps = place.most_steps(job.stage)
        lane = next((lane for lane in free if lane.fits(client.memory) and len(lane.lines) >= steps), None)
        if lane is not None:
            free.remove(lane)
        else:
            try:
                lane = self._new_lane(place, job, client)
            except torch.cuda.OutOfMemoryError:
                if not alone:
                    return None
                place.free = {job.stage: []}  # other lanes were kept warm while there was room
                gc.collect()
                torch.cuda.empty_cache()
                lane = self._new_lane(place, job, client)
        with self._on_its_stream(lane):
            client = replace(client, memory=self._moved(client.memory, place))
            lane.load(job, i, client, job.stage.algorithm.begin(client), batches)
        return lane

    def _moved(self, memory: Tree, place: DeviceLanes) -> Tree:
        memory = memory.map(lambda leaf: leaf.to(place.device, non_blocking=True))
        if place.device.type == "cuda":
            # Kept memories were made on another stream: their storage must not be given away while this one reads.
            for leaf in memory.leaves():
                leaf.record_stream(torch.cuda.current_stream(place.device))
        return memory

    @contextlib.contextmanager
    def _on_its_stream(self, lane: Lane) -> Iterator[None]:
        """All of a client's own work is on its lane's stream; what it reads is queued already."""
        if lane.stream is not None:
            lane.stream.wait_stream(torch.cuda.current_stream(lane.device))
        with _on(lane.stream):
            yield

    def _new_lane(self, place: DeviceLanes, job: Job, client: Client) -> Lane:
        before = _free_memory(place.device)
        client = replace(client, memory=self._moved(client.memory, place))
        lane = Lane(place, job.stage, client, job.stage.algorithm.begin(client))
        if self.recorded and client.steps and job.stage.algorithm.capturable:
            began = time.perf_counter()
            with _no_collection(), tuned(place.net):
                lane.record(client, _AGAIN if job.stage in place.rooms else _WARM_UP)
            if place.net.compile and not self.compile_seconds:
                self.compile_seconds = time.perf_counter() - began
            if job.stage not in place.rooms:
                most = MOST if job.stage.rounds > 1 else MOST_ONCE
                cost = max(before - _free_memory(place.device), 1 << 20)
                place.rooms[job.stage] = max(1, min(most, 1 + int(0.8 * _free_memory(place.device) / cost)))
        return lane

    def _unload(self, job: Job, lane: Lane) -> Reply:
        conclude = partial(self.conclude, job, lane.i, lane.client, lane.local, partial(_apart, lane.storages))
        with _on(lane.stream):
            try:
                reply = conclude()
            except torch.cuda.OutOfMemoryError:
                self._make_room()
                reply = conclude()
            if lane.place.device != self.home:
                reply = Reply(reply.client, reply.upload.map(lambda leaf: leaf.to(self.home)))
        lane.place.free[job.stage].append(lane)
        return reply


def _is_ours(module: torch.nn.Module) -> bool:
    """Whether all of a network is torch's or ours: others may keep numbers where nobody finds them."""
    return all(type(part).__module__.partition(".")[0] in ("torch", "fedlens") for part in module.modules())


def _equal(a: Any, b: torch.Tensor) -> bool:
    return isinstance(a, torch.Tensor) and a.device == b.device and a.dtype == b.dtype and torch.equal(a, b)


def _storages(*trees: Tree) -> frozenset[int]:
    return frozenset(leaf.untyped_storage().data_ptr() for tree in trees for leaf in tree.leaves())


def _apart(storages: frozenset[int], tree: Tree) -> Tree:
    """The same values in tensors of their own: the next client writes over the lane's."""
    leaves = tree.leaves()
    inside = [leaf for leaf in leaves if leaf.untyped_storage().data_ptr() in storages]
    if not inside:
        return tree
    copies = dict(zip(map(id, inside), Tree(enumerate(inside)).clone().leaves(), strict=True))
    return tree.rebuild(iter([copies.get(id(leaf), leaf) for leaf in leaves]))


def _shape(tree: Tree) -> dict[str, Any]:
    """Whatever the order: a tree that was on disk comes back in another one. Empty branches count."""
    return {k: _shape(v) if isinstance(v, Tree) else (v.shape, v.dtype) for k, v in tree.items()}


@contextlib.contextmanager
def _recorded(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Where the step fails, its own error is raised: out of memory is something that lanes know how to go on from."""
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the end of a broken recording says only that it is broken
            graph.capture_end()
        raise
    graph.capture_end()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """A tensor collected while a graph is recorded would break the recording."""
    enabled = gc.isenabled()
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
