"""Clients dealt to Ray actors, on one machine or several, on CPUs or GPUs; a run goes on when some of them are lost.

An actor owns clients `i % actors` and trains them with a sequential engine, or with lanes on a GPU of its own. It
writes what a client remembers to the run's folder before it answers, and the driver says which version counts: whatever
an actor or a machine takes down with it, another one trains again from the same memory, to the same bits. That costs a
file for every client that remembers and every round, and a folder that all machines share.
"""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import secrets
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..core.engine import Job, OnProgress, Reply, ignore
from ..core.errors import BadInput, ClientFailed, RunFailed
from ..core.evaluate import score
from ..core.files import Seal, remove
from ..core.memories import Memories, Version, name, newest
from ..core.tree import Tree
from ..core.wire import empty_branches, nested, raw, tensor
from .process import keep_freed_memory
from .sequential import Sequential
from .worker import Storage

Make = Callable[[Memories], Sequential]
_LOSSES = 3  # of actors over one client: then it is the client that kills them
_PATIENCE = 30.0  # seconds without an actor before the cluster is asked whether there is room for one


# ---- trees between machines ----
@dataclass(frozen=True)
class Parcel:
    """A tree as arrays of bytes, which Ray lays into its store without pickling; those that arrived are read-only."""

    leaves: dict[str, tuple[torch.dtype, tuple[int, ...], Any]]  # type, shape, bytes
    empty: tuple[str, ...]


def pack(tree: Tree) -> Parcel:
    leaves = {path: (leaf.dtype, tuple(leaf.shape), raw(leaf)) for path, leaf in tree.paths()}
    return Parcel(leaves, tuple(empty_branches(tree)))


def unpack(parcel: Parcel, device: torch.device | str = "cpu") -> Tree:
    """Copied, so that the store gets its room back."""
    leaves = {path: tensor(data, dtype, shape).to(device) for path, (dtype, shape, data) in parcel.leaves.items()}
    return nested({**leaves, **{path: Tree() for path in parcel.empty}})


# ---- actors ----
class Versions(Memories):
    """Memories that others may have advanced: the driver says which version of each counts."""

    def take_up(self, client: int, version: int | None) -> None:
        held = self._hot.get(client)
        if held is not None and held[0] != version:
            self._size -= self._hot.pop(client)[1].nbytes
        if version is None:
            self._stored.pop(client, None)
        else:
            self._stored[client] = version

    def put(self, client: int, memory: Tree, round: int) -> None:
        super().put(client, memory, round)
        self._stored.pop(client, None)  # a client that is asked twice in a round writes twice
        self._write(client, round, memory)

    def version(self, client: int) -> tuple[int | None, Seal | None]:
        """Which one counts now; and its file's length and checksum, where it is new."""
        version = self._stored.get(client)
        return version, None if version is None else self._written.pop((client, version), None)


class Owner:
    """An actor. Every answer is (what went wrong, the answer): Ray would bury a sentence in a traceback."""

    def __init__(self, paths: Sequence[str]):
        sys.path += [path for path in paths if path not in sys.path]  # modules of the user's own
        torch.set_num_threads(1)
        keep_freed_memory()
        self._job: tuple[int, Job] | None = None
        self._shared: tuple[int, Tree] = 0, Tree()

    def begin(self, order: bytes, storage: Storage, mark: str) -> Any:
        """Build the engine; the answer is how many pieces the test set has."""
        return self._answered(self._begin, order, storage, mark)

    def train(self, order: Any, shared: Any, clients: Sequence[int], versions: Sequence[int | None]) -> Any:
        """(client, (upload, version of its memory)) for each."""
        return self._answered(self._train, order, shared, clients, versions)

    def measure(self, weights: Any, pieces: Sequence[int], detailed: bool) -> Any:
        """(piece, (score, None)) for each."""
        return self._answered(self._measure, weights, pieces, detailed)

    def _answered(self, work: Callable, *arguments: Any) -> tuple[Exception | None, Any]:
        try:
            return None, work(*arguments)
        except (BadInput, ClientFailed, OSError, MemoryError) as error:
            return error, None
        except Exception:
            return RunFailed(f"an actor failed:\n{traceback.format_exc()}"), None

    def _begin(self, order: bytes, storage: Storage, mark: str) -> int:
        assert storage.folder is not None
        if not (storage.folder / mark).exists():
            where = f"{os.uname().nodename} does not see {storage.folder}"
            raise BadInput(f"out: {where}; put the run into a folder that all machines of the cluster share")
        self._memories = Versions(storage.folder, storage.limit)
        self._engine = pickle.loads(order)(self._memories)
        self._pieces = self._engine.pieces()
        return len(self._pieces)

    def _train(self, order: Any, shared: Any, clients: Sequence[int], versions: Sequence[int | None]) -> Any:
        ray = _ray()
        if self._shared[0] != shared[0]:
            self._shared = shared[0], unpack(ray.get(shared[1]), self._device)
        if self._job is None or self._job[0] != order[0]:
            bare, download = ray.get(order[1])
            self._job = order[0], replace(bare, download=unpack(download, self._device), shared=self._shared[1])
        for client, version in zip(clients, versions, strict=True):
            self._memories.take_up(client, version)
        replies = self._engine.run(self._job[1], clients)
        return [(reply.client, (pack(reply.upload), self._memories.version(reply.client))) for reply in replies]

    def _measure(self, weights: Any, pieces: Sequence[int], detailed: bool) -> Any:
        ray = _ray()
        tree = unpack(ray.get(weights[1]), self._device)
        scores = ((piece, score(self._engine.net, tree, self._pieces[piece], detailed)) for piece in pieces)
        return [(piece, (pack(each), None)) for piece, each in scores]

    @property
    def _device(self) -> torch.device:
        return self._engine.federation.data.x.device


class RayActors:
    """Hands clients to actors, the largest first; one that is lost is started again where there is room."""

    def __init__(
        self,
        make: Make,
        sizes: Sequence[int],
        storage: Storage,
        *,
        actors: int = 0,
        address: str = "",
        device: torch.device | str = "cpu",
    ):
        """`make` builds the engine inside an actor; `actors` 0: one for each core, or GPU, that the cluster has."""
        ray = _ray()
        self.population, self.sizes, self.device = len(sizes), sizes, torch.device(device)
        self.heard: OnProgress = ignore
        assert storage.folder is not None
        self._folder = storage.folder.absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        taken = newest(self._folder, storage.round or 0) if storage.versions is None else storage.versions
        self._versions: dict[int, int] = dict(taken)
        self._written: dict[Version, Seal] = {}  # since the last save
        self._kind = "GPU" if self.device.type == "cuda" else "CPU"
        try:
            self._order = ray.cloudpickle.dumps(make)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise BadInput(f"engine=ray cannot send a part of this run ({error}); use engine=sequential") from None
        self._mark = self._folder / f".{secrets.token_hex(8)}"  # a machine that does not see it has another folder
        self._storage = replace(storage, folder=self._folder)
        self._number = itertools.count(1)
        self._shared: tuple[Tree, Any] | None = None
        self._losses: Counter[int] = Counter()
        self._ready: dict[int, Any] = {}
        self._starting: dict[Any, tuple[int, Any]] = {}
        self._ours = _connect(ray, address, actors or len(os.sched_getaffinity(0)))
        try:
            self._mark.touch()
            self.actors = self._room(actors)
            for index in range(self.actors):
                self._start(index)
            while self._starting:
                self._wait([])
        except BaseException:
            self.close()
            raise

    # ---- the engine ----
    def run(self, job: Job, cohort: Sequence[int]) -> list[Reply]:
        ray, number = _ray(), next(self._number)
        shared = self._shared_order(job.shared)
        order = number, ray.put((replace(job, download=Tree(), shared=Tree()), pack(job.download)))

        def ask(owner: Any, clients: Sequence[int]) -> Any:
            return owner.train.remote(order, shared, clients, [self._versions.get(client) for client in clients])

        replies, written = [], {}
        waiting = sorted(cohort, key=lambda i: (-self.sizes[i], i))
        for client, (parcel, (version, new)) in self._share_out(waiting, ask, whole=self._kind == "GPU"):
            replies.append(Reply(client, unpack(parcel, self.device)))
            self.heard(len(replies), len(cohort))
            if version is not None and new is not None:
                written[client] = version, new
        for client, (version, new) in written.items():
            old = self._versions.get(client)
            if old not in (None, version) and self._written.pop((client, old), None):  # no checkpoint has it
                remove(self._folder / name(client, old))
            self._versions[client], self._written[client, version] = version, new
        return replies

    def measure(self, weights: Tree, detailed: bool = False) -> list[Tree]:
        order = next(self._number), _ray().put(pack(weights))
        answers = self._share_out(
            range(self._pieces), lambda owner, pieces: owner.measure.remote(order, pieces, detailed), whole=True
        )
        scores = {piece: unpack(parcel, self.device) for piece, (parcel, _) in answers}
        return [scores[piece] for piece in range(self._pieces)]

    def save(self, round: int) -> dict[Version, Seal]:
        """Memories are written already; from now on a checkpoint needs these versions."""
        written, self._written = self._written, {}
        return written

    def close(self) -> None:
        ray = _ray()
        if self._ours:
            ray.shutdown()
        elif ray.is_initialized():
            for owner in (*self._ready.values(), *(owner for _, owner in self._starting.values())):
                ray.kill(owner)
        self._ready, self._starting = {}, {}
        self._mark.unlink(missing_ok=True)

    # ---- actors ----
    def _room(self, wanted: int) -> int:
        """How many actors there will be."""
        there, asked = int(_ray().cluster_resources().get(self._kind, 0)), time.monotonic()
        if max(wanted, 1) > there:
            raise BadInput(f"workers is {wanted}, but the Ray cluster has {there} {self._kind}s; give it more, or less")
        actors = wanted or min(there, self.population)
        while (free := int(_ray().available_resources().get(self._kind, 0))) < actors:
            if time.monotonic() - asked > _PATIENCE:  # those of a run that has just ended are given back by and by
                others = f"others hold all but {free} of the Ray cluster's {there} {self._kind}s"
                raise RunFailed(f"workers is {actors}, but {others}")
            time.sleep(0.1)
        return actors

    def _start(self, index: int) -> None:
        resources = {"num_gpus": 1, "num_cpus": 0} if self._kind == "GPU" else {"num_cpus": 1}
        options = {**resources, "max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": "SPREAD"}
        owner = _ray().remote(Owner).options(**options).remote([path for path in sys.path if path])
        self._starting[owner.begin.remote(self._order, self._storage, self._mark.name)] = index, owner

    def _wait(self, busy: Sequence[Any]) -> list[Any]:
        """Those of the busy ones that are done, while actors that started join in."""
        ray = _ray()
        done, _ = ray.wait([*busy, *self._starting], num_returns=1, timeout=_PATIENCE)
        if not done and not busy and not self._ready and ray.cluster_resources().get(self._kind, 0) < 1:
            raise RunFailed("no machine of the Ray cluster is left")
        for ref in [ref for ref in done if ref in self._starting]:
            index, owner = self._starting.pop(ref)
            try:
                failure, pieces = ray.get(ref)
            except ray.exceptions.RayError as error:
                self._lost(index, owner, -1 - index, "an actor that starts", error)
                continue
            if failure is not None:
                raise failure
            self._ready[index], self._pieces = owner, pieces
        return [ref for ref in done if ref in busy]

    def _lost(self, index: int, owner: Any, item: int, what: str, error: Exception) -> None:
        """Start it again; `item` is what it had in hand."""
        self._losses[item] += 1
        if self._losses[item] >= _LOSSES:
            last = str(error).strip().splitlines()[-1].strip()
            raise RunFailed(f"{_LOSSES} actors were lost over {what}, the last one by: {last}")
        _ray().kill(owner)  # one that is cut off may be alive
        self._ready.pop(index, None)
        self._start(index)

    def _share_out(
        self, items: Sequence[int], ask: Callable[[Any, Sequence[int]], Any], *, whole: bool
    ) -> Iterator[tuple[int, Any]]:
        """Every item's answer, as they come. `whole`: an actor is asked for all of its own at once, for its lanes."""
        ray, waiting, busy = _ray(), [*items], {}
        self._losses.clear()
        while waiting or busy:
            for index in self._ready.keys() - {index for index, _ in busy.values()}:
                if mine := self._next(index, waiting, whole):
                    waiting = [item for item in waiting if item not in mine]
                    busy[ask(self._ready[index], mine)] = index, mine
            for ref in self._wait([*busy]):
                index, mine = busy.pop(ref)
                try:
                    failure, answers = ray.get(ref)
                except ray.exceptions.RayError as error:  # it died, or its answer went down with its machine
                    waiting = [item for item in items if item in {*waiting, *mine}]
                    self._lost(index, self._ready[index], mine[0], f"client or piece {mine[0]}", error)
                    continue
                if failure is not None:
                    raise failure
                yield from answers

    def _next(self, index: int, waiting: Sequence[int], whole: bool) -> Sequence[int]:
        """Its own first: it holds what they remember. Others' where that balances, or where their owner is gone."""
        own = [item for item in waiting if item % self.actors == index]
        if whole:
            return own or [item for item in waiting if item % self.actors not in self._ready]
        return (own or waiting)[:1]

    def _shared_order(self, shared: Tree) -> Any:
        """The common payload goes to the store when it changed."""
        if self._shared is None or self._shared[0] is not shared:
            self._shared = shared, (next(self._number), _ray().put(pack(shared)))
        return self._shared[1]


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before the import, which reads it
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # or each start warns of what Ray will do one day
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise BadInput("engine=ray needs another package: pip install 'fedlens[ray]'") from None
    return ray


def _connect(ray: Any, address: str, cores: int) -> bool:
    """To the cluster that is named, or to a new one on this machine. True: it is ours to end."""
    if ray.is_initialized():
        return False
    address = address or os.environ.get("RAY_ADDRESS", "")
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    if not address:
        if not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # Ray would leave one in the home folder
        ray.init(address="local", num_cpus=cores, include_dashboard=False, **quiet)
        return True
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BadInput(f"ray.address: no Ray cluster can be used at {address} ({reason})") from None
    return True
