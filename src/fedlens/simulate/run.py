"""Run an experiment on this machine: load, split, train, evaluate, remember."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from threading import Thread
from typing import Any, NamedTuple

import torch

from .. import config
from ..core.batches import Dataset, Federation
from ..core.check import Check
from ..core.dry_run import Rehearsal
from ..core.engine import Engine, OnProgress
from ..core.errors import BadInput
from ..core.ledger import Ledger
from ..core.memories import GIB, Memories
from ..core.network import Network
from ..core.phases import heard_by
from ..core.run import run as run_rounds
from ..core.tree import Tree
from ..data import Images, Split
from ..engines.fork_server import discard_early
from ..engines.lanes import Lanes
from ..engines.process import keep_freed_memory, matmuls, threads
from ..engines.sequential import Sequential
from ..engines.timing import Timed
from ..engines.worker import Storage
from ..engines.workers import Workers
from ..experiment import Experiment, build, to_device
from ..experiment import devices as all_devices
from ..plots.style import import_matplotlib
from ..robust.attacks import Backdoor, Hostile
from ..robust.faults import Faulty
from ..runs.checkpoints import Checkpoint
from ..runs.figure import draw_run
from ..runs.folder import RunFolder, config_hash, passport
from ..runs.labels import label
from ..runs.places import located, remember
from ..runs.read import Result
from ..runs.start import with_run_weights
from ..runs.trackers import check as check_trackers
from ..runs.trackers import tracked
from . import checks as scope
from .recorder import Enough, Nobody, Parts, Recorder, Stopped, Watcher
from .settle import note_compiling, settled
from .timing import clock_of


def run(experiment: Experiment | None = None, *, watcher: Watcher | None = None, tags: Sequence[str] = ()) -> Result:
    """From the beginning, into a new folder; `tags` are words to find it by."""
    with heard_by(watcher.phase if watcher else None):
        ready = with_run_weights(config.check(experiment or Experiment())).resolved()
        return _begun(ready, watcher or Nobody(), tags)


def _begun(experiment: Experiment, watcher: Watcher, tags: Sequence[str]) -> Result:
    ready = checked(experiment)
    experiment, said = settled(experiment, ready.net, ready.federation)
    folder = RunFolder.create(experiment)
    with folder.locked():
        try:
            label(folder.path, tags=tags)
            return carry_on(folder, experiment, ready, None, said, watcher)
        except BadInput:
            folder.withdraw()
            raise


class RunInputs(NamedTuple):
    """What a run works with, on the host."""

    images: Images
    federation: Federation
    split: Split
    net: Network
    public: Images | None  # what the server has of its own


def checked(experiment: Experiment) -> RunInputs:
    """What a run works with; what it cannot work with is refused here, before anything is written."""
    for stage, _, _ in experiment.timetable():
        stage.cohort.size(experiment.clients)
    ready = inputs(experiment)
    scope.check(experiment, ready.images)
    if ready.public is not None and ready.public.checksum == ready.images.checksum:
        raise BadInput("auxiliary and data are the same images: public data are such as no client owns")
    check_trackers(experiment)
    return ready


def inputs(experiment: Experiment) -> RunInputs:
    """What a run works with, made once."""
    experiment, images = with_run_weights(experiment), experiment.images()
    if experiment.local.batch_size > len(images.train):
        raise BadInput(f"local.batch_size is {experiment.local.batch_size}, but there are {len(images.train)} images")
    with threads(1):  # as the rounds have: first weights may depend on the number
        net = experiment.network(images)
    federation, split = experiment.federation(images)
    check_pool(federation, images)
    return RunInputs(images, federation, split, net, public_images(experiment))


def weight_notes(net: Network) -> tuple[str, ...]:
    """What became of the weights that a network begins with."""
    return getattr(net.module, "notes", ())


def check_pool(federation: Federation, images: Images) -> None:
    """Every run ends with an evaluation."""
    if not len(federation.pool):
        raise BadInput(f"{images.name} has no test images: add some, or hold some out by data.holdout=0.2")


def carry_on(
    folder: RunFolder,
    experiment: Experiment,
    ready: RunInputs,
    checkpoint: Checkpoint | None,
    notes: list[str],
    watcher: Watcher,
) -> Result:
    """The rounds that are left, into the run's folder."""
    start = checkpoint or Checkpoint(0, Tree(), Ledger(), 0.0)
    images, federation, split, net, public = ready
    card = passport(experiment, images, split)
    if public is not None:
        card["auxiliary"] = {"name": public.name, "origin": public.origin, "sha256": public.checksum}
    if not (folder.path / "passport.json").exists():
        card |= remember(folder, experiment)
        folder.register(card, split, label_counts(federation, len(images.classes)))
    experiment = located(folder, experiment)
    folder.unsynced.durable = experiment.execution.durable
    folder.unsynced.mkdir(folder.memories)
    folder.tidy(start)
    keep_freed_memory()
    tracking = tracked(watcher, experiment, folder.path, start.round)
    with _last_words(folder) as began, threads(1), matmuls(experiment.execution.precision), tracking as watcher:
        net, federation = net.to(experiment.execution.device), to_device(experiment, federation)
        made = engine = _engine(experiment, net, federation, folder, start)
        engine.heard = watcher.clients
        if experiment.execution.picture and isinstance(made, Workers):
            engine.heard = _preparing_to_draw(watcher.clients)
        timed = Timed(engine, experiment.execution.device)
        engine, attack, devices = timed, experiment.attack, experiment.execution.devices
        if attack is not None and attack.forges:
            engine = Hostile(engine, attack, experiment.seed)
        try:
            parts = Parts(
                timed=timed,
                clock=devices and clock_of(experiment, images, _sizes(federation), devices),
                backdoor=attack.success(net, federation) if isinstance(attack, Backdoor) else None,
            )
            recorder = Recorder(folder, experiment, engine, start, watcher, parts)
            # Where nothing is injected, clients are this very program.
            check = reply_check(experiment, net, federation) if experiment.faults else None
            asked = Faulty(engine, experiment.faults) if experiment.faults else engine
            auxiliary = None if public is None else experiment.public(public, images)
            if config_hash(config.read(folder.config)) != config_hash(experiment):
                folder.change(experiment)  # a later resume aims for the new rounds and budget, too
            began.append(True)
            result = session(recorder, asked, net, [*notes, *weight_notes(net), *split.notes], auxiliary, check)
            note_compiling(experiment, made)
        finally:
            engine.close()
    if experiment.execution.picture and folder.has_all_rows:
        draw_run(folder, folder.figures / "run")
    return result


def session(
    recorder: Recorder,
    engine: Engine,
    net: Network,
    notes: list[str],
    auxiliary: Dataset | None,
    check: Check | None,
) -> Result:
    """The rounds that are left, over simulated or deployed clients, as the recorder sees them."""
    experiment, start = recorder.experiment, recorder.start
    recorder.disclosure.refuse(start.round)
    if start.round < (first := recorder.counts.preparation):
        notes = [*notes, f"rounds 1 to {first} prepare training, and are counted in no curve, mean or target"]
    recorder.watcher.begin(experiment, recorder.folder.path, notes, start.round, recorder.rounds)
    recorder.tell_stage(start.round)
    if not recorder.evaluation.enough:  # it ended early, and was cut off before it could say so
        with suppress(Enough):
            run_rounds(
                experiment.algorithm,
                net,
                engine,
                experiment.plan,
                seed=experiment.seed,
                auxiliary=auxiliary,
                state=start.state.map(lambda leaf: leaf.to(experiment.execution.device)),
                round=start.round,
                observe=recorder,
                policy=experiment.policy,
                check=check,
            )
    return recorder.conclude()


def _preparing_to_draw(heard: OnProgress) -> OnProgress:
    """The same; and in the second round, when others train, this process imports what the picture at the end needs."""
    rounds = 0

    def told(answered: int, asked: int) -> None:
        nonlocal rounds
        heard(answered, asked)
        rounds += answered == 1
        if rounds == 2 and answered == 1:
            Thread(target=import_matplotlib, daemon=True).start()

    return told


@contextmanager
def _last_words(folder: RunFolder) -> Iterator[list[bool]]:
    """Why a run ended early, in its log; one that is killed has none, and one refused before it `began` needs none."""
    began: list[bool] = []
    try:
        yield began
    except BaseException as error:
        if isinstance(error, BadInput) and not began:
            raise
        stopped = isinstance(error, KeyboardInterrupt | Stopped)
        said = " ".join(str(error).split())
        with suppress(OSError):  # the disk may be full, which is then the reason
            folder.log("stopped" if stopped else f"failed: {said or type(error).__name__}")
        raise


def reply_check(experiment: Experiment, net: Network, federation: Federation) -> Check:
    return Check(Rehearsal(Sequential, net, federation.data), experiment.policy.max_reply_mib)


def public_images(experiment: Experiment) -> Images | None:
    """What the server has of its own, where the method needs it; nobody looks at its labels."""
    if not experiment.needs_public_data or experiment.auxiliary is None:
        return None
    try:
        return experiment.auxiliary.load(labelled=False)
    except BadInput as error:
        raise BadInput(f"auxiliary: {error}") from None


def label_counts(federation: Federation, classes: int) -> list[list[int]]:
    """How many training images of each class every client owns."""
    owned = (federation.train[client] for client in sorted(federation.train))
    return [torch.bincount(federation.data.y[index], minlength=classes).tolist() for index in owned]


def _sizes(federation: Federation) -> list[int]:
    """How many training images each client owns."""
    return [len(federation.train[client]) for client in range(len(federation.train))]


def _engine(experiment: Experiment, net, federation, folder: RunFolder, start: Checkpoint) -> Any:
    where = experiment.execution
    limit = int(where.memory * GIB)
    storage = Storage(folder.memories, limit, start.round, start.versions)
    if where.engine == "workers":
        return Workers(partial(build, experiment), _sizes(federation), where.workers, storage)
    discard_early()
    if where.engine == "ray":
        from ..engines.ray import RayActors

        return RayActors(
            partial(_in_actor, experiment),
            _sizes(federation),
            storage,
            actors=where.workers,
            address=where.ray.address,
            device=where.device,
        )
    return _in_process(experiment, net, federation, Memories(folder.memories, limit, versions=start.versions))


def _in_process(experiment: Experiment, net, federation, memories: Memories) -> Sequential:
    where = experiment.execution
    if where.engine == "lanes" or (where.engine == "ray" and where.device != "cpu"):
        return Lanes(net, federation, lanes=where.lanes, devices=all_devices(where.device), memories=memories)
    return Sequential(net, federation, memories=memories)


def _in_actor(experiment: Experiment, memories: Memories) -> Sequential:
    """The engine of a process that does nothing else, as long as it lives."""
    matmuls(experiment.execution.precision).__enter__()
    return _in_process(experiment, *build(experiment), memories)
