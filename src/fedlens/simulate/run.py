"""Run an experiment on this machine: load, split, train, look, remember; or go on where a run stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch

from .. import config
from ..core.algorithm import Server
from ..core.batches import Federation
from ..core.check import Check
from ..core.cohort import Everyone
from ..core.dry_run import Rehearsal
from ..core.engine import Engine, Job, Reply
from ..core.errors import BadInput, RunFailed
from ..core.evaluate import Evaluate, total
from ..core.format import percent
from ..core.ledger import Ledger
from ..core.memories import GIB, Memories, prune
from ..core.network import Network
from ..core.policy import EVERY_REPLY
from ..core.replies import Replies, ask
from ..core.rng import key
from ..core.run import Turn, job_of
from ..core.run import run as run_rounds
from ..core.tree import Tree
from ..data import Images
from ..devices.clock import Clock
from ..engines.lanes import Lanes
from ..engines.process import keep_freed_memory, matmuls, threads
from ..engines.sequential import Sequential
from ..engines.timing import Timed, moment, seconds_between
from ..engines.worker import Storage
from ..engines.workers import Workers
from ..experiment import Execution, Experiment, build, devices, to_device
from ..privacy.report import Disclosure
from ..robust.attacks import Backdoor, Hostile
from ..robust.faults import Faulty
from ..runs.figure import draw_run
from ..runs.folder import Checkpoint, RunFolder, code_hash, config_hash, passport
from ..runs.read import Result, summary, summary_statistics
from ..runs.reuse import steps
from ..runs.trackers import check as check_trackers
from ..runs.trackers import tracked
from ..runs.transcript import Recording
from . import checks as scope
from .timing import clock_of

STOP = "stop"  # a file of this name in its folder asks a run to end after the round it is in


class Stopped(RunFailed):
    """Somebody asked the run to end, and it did; all of it is saved."""


@dataclass(frozen=True)
class Progress:
    """What a watcher is told after each round."""

    round: int
    rounds: int
    accuracy: float | None
    loss: float | None
    bytes_up: int
    bytes_down: int
    seconds: float  # of the whole run so far


class Watcher(Protocol):
    def begin(self, experiment: Experiment, folder: Path, notes: list[str], round: int, rounds: int) -> None: ...
    def clients(self, answered: int, asked: int) -> None: ...
    def round(self, progress: Progress) -> None: ...
    def note(self, text: str) -> None: ...


class Nobody:
    def begin(self, experiment, folder, notes, round, rounds):
        pass

    def clients(self, answered, asked):
        pass

    def round(self, progress):
        pass

    def note(self, text):
        pass


def run(experiment: Experiment | None = None, *, watcher: Watcher | None = None) -> Result:
    """From the beginning, into a new folder."""
    experiment = config.check(experiment or Experiment()).resolved()
    images, _, _ = checked(experiment)
    folder = RunFolder.create(experiment)
    with folder.locked():
        try:
            return _carry_on(folder, experiment, None, [], watcher or Nobody(), images)
        except BadInput:
            folder.withdraw()
            raise


def checked(experiment: Experiment) -> tuple[Images, Federation, Network]:
    """What a run works with; what it cannot work with is refused here, before anything is written."""
    for stage, _, _ in experiment.timetable():
        stage.cohort.size(experiment.clients)
    images = experiment.data.load()
    if experiment.local.batch_size > len(images.train):
        raise BadInput(f"local.batch_size is {experiment.local.batch_size}, but there are {len(images.train)} images")
    federation, _ = experiment.federation(images)
    net = experiment.network(images)
    scope.check(experiment, images)
    public = public_images(experiment)
    if public is not None and public.checksum == images.checksum:
        raise BadInput("auxiliary and data are the same images: public data are such as no client owns")
    check_trackers(experiment)
    return images, federation, net


def resume(path: str | Path, words: Sequence[str] = (), *, watcher: Watcher | None = None) -> Result:
    """Go on after a crash, to the same bits; `words` may change where it runs and how many rounds."""
    folder = RunFolder.open(path)
    for word in words:
        if not changeable(word):
            can = ", ".join(("rounds", *_MOVABLE, "uplink.dp.budget"))
            raise BadInput(f"{word.partition('=')[0]} cannot change when a run is resumed; {can} can")
    began, experiment = (config.read(folder.config, w).with_execution(out=str(folder.path)) for w in ((), words))
    experiment = experiment.resolved()
    with folder.locked():
        _same_settings(folder, began)
        checkpoint, notes = folder.load()
        done = checkpoint.round if checkpoint else 0
        if experiment.uplink != began.uplink:
            raise BadInput(f"uplink.dp.budget cannot change: {folder.path} runs without uplink=dp")
        _same_path(began, experiment, done, folder.path)
        if (before := folder.result()) and done == len(experiment.timetable()):
            return Result(**before)
        if config_hash(experiment) != config_hash(began):  # a later resume aims for the new rounds and budget too
            folder.change(experiment)
        return _carry_on(folder, experiment, checkpoint, notes, watcher or Nobody(), experiment.data.load())


_MOVABLE = [each.name for each in fields(Execution) if each.name not in Execution.FIXED]


def changeable(word: str) -> bool:
    """Whether a word may change a run that has begun."""
    key = config.setting(word)[0]
    return key in ("rounds", "uplink.dp.budget") or key.partition(".")[0] in _MOVABLE


def _same_settings(folder: RunFolder, began: Experiment) -> None:
    """A config.yaml changed by hand would silently be another experiment; another version may read it differently."""
    card = folder.passport() if (folder.path / "passport.json").exists() else None
    if card and card["code"]["sha256"] == code_hash() and card["config_hash"] != config_hash(began):
        raise BadInput(f"{folder.config} has changed since the run began; start a new run with these settings")


def _same_path(began: Experiment, now: Experiment, done: int, path: Path) -> None:
    """With another number of rounds, the rounds that are done must have been the same."""
    if len(now.timetable()) < done:
        raise BadInput(f"rounds is {now.rounds}, but {path} has done {done} already")
    if steps(began)[:done] != steps(now)[:done]:
        why = "the rounds already done would have been others (a last stage, or a rate that depends on their number)"
        raise BadInput(f"rounds cannot change any more: {why}")


def _carry_on(
    folder: RunFolder,
    experiment: Experiment,
    checkpoint: Checkpoint | None,
    notes: list[str],
    watcher: Watcher,
    images: Any,
) -> Result:
    start = checkpoint or Checkpoint(0, Tree(), Ledger(), 0.0)
    federation, split = experiment.federation(images)
    card = passport(experiment, images, split)
    public = public_images(experiment)
    if public is not None:
        card["auxiliary"] = {"name": public.name, "origin": public.origin, "sha256": public.checksum}
    if (folder.path / "passport.json").exists():
        _same_origin(folder.passport(), card)
    else:
        folder.write_json("passport.json", card)
        split.save(folder.path / "split.json")
        folder.write_json("label_counts.json", label_counts(federation, len(images.classes)))
    folder.memories.mkdir(exist_ok=True)
    prune(folder.memories, before=0, after=start.round)
    keep_freed_memory()
    tracking = tracked(watcher, experiment, folder.path, start.round)
    with _last_words(folder), threads(1), matmuls(experiment.execution.precision), tracking as watcher:
        net = experiment.network(images).to(experiment.execution.device)
        federation = to_device(experiment, federation)
        engine = _engine(experiment, net, federation, folder, start.round)
        engine.heard = watcher.clients
        timed = Timed(engine, experiment.execution.device)
        engine, attack = timed, experiment.attack
        if attack is not None and attack.forges:
            engine = Hostile(engine, attack, experiment.seed)
        try:
            recorder = Recorder(folder, experiment, engine, start, watcher)
            recorder.timed = timed
            if experiment.execution.devices is not None:
                sizes = [len(federation.train[i]) for i in range(len(federation.train))]
                recorder.clock = clock_of(experiment, images, sizes, experiment.execution.devices)
            if isinstance(attack, Backdoor):
                recorder.backdoor = attack.success(net, federation)
            recorder.disclosure.refuse(start.round)
            watcher.begin(experiment, folder.path, notes + list(split.notes), start.round, recorder.rounds)
            run_rounds(
                experiment.algorithm,
                net,
                Faulty(engine, experiment.faults) if experiment.faults else engine,
                experiment.plan,
                seed=experiment.seed,
                auxiliary=None if public is None else experiment.public(public, images),
                state=start.state.map(lambda leaf: leaf.to(experiment.execution.device)),
                round=start.round,
                observe=recorder,
                policy=experiment.policy,
                # Where nothing is injected, clients are this very program.
                check=reply_check(experiment, net, federation) if experiment.faults else None,
            )
            result = recorder.conclude()
        finally:
            engine.close()
    if experiment.execution.picture:
        draw_run(folder, folder.figures / "run")
    return result


@contextmanager
def _last_words(folder: RunFolder) -> Iterator[None]:
    """Why a run ended early, in its log; one that is killed has none."""
    try:
        yield
    except BaseException as error:
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


def _engine(experiment: Experiment, net, federation, folder: RunFolder, round: int) -> Any:
    where = experiment.execution
    limit = int(where.memory * GIB)
    if where.engine == "workers":
        sizes = [len(federation.train[i]) for i in range(len(federation.train))]
        return Workers(partial(build, experiment), sizes, where.workers, Storage(folder.memories, limit, round))
    if where.engine == "ray":
        from ..engines.ray import RayActors

        sizes = [len(federation.train[i]) for i in range(len(federation.train))]
        return RayActors(
            partial(_in_actor, experiment),
            sizes,
            Storage(folder.memories, limit, round),
            actors=where.workers,
            address=where.ray.address,
            device=where.device,
        )
    return _in_process(experiment, net, federation, Memories(folder.memories, limit, round))


def _in_process(experiment: Experiment, net, federation, memories: Memories) -> Sequential:
    where = experiment.execution
    if where.engine == "lanes" or (where.engine == "ray" and where.device != "cpu"):
        return Lanes(net, federation, lanes=where.lanes, devices=devices(where.device), memories=memories)
    return Sequential(net, federation, memories=memories)


def _in_actor(experiment: Experiment, memories: Memories) -> Sequential:
    """The engine of a process that does nothing else, as long as it lives."""
    matmuls(experiment.execution.precision).__enter__()
    return _in_process(experiment, *build(experiment), memories)


def _same_origin(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Other data or another split would silently be another experiment."""
    for part in ("data", "auxiliary"):
        if part in now and before[part]["sha256"] != now[part]["sha256"]:
            raise BadInput(
                f"the {part} of this run have changed: {before[part]['name']} had another checksum when it began"
            )
    if before["split_hash"] != now["split_hash"]:
        raise BadInput("the split of this run cannot be made again: its hash differs from the one in passport.json")


class Recorder:
    """Observes the round loop: evaluates, books bytes, writes tables and checkpoints, tells the watcher."""

    def __init__(self, folder: RunFolder, experiment: Experiment, engine: Engine, start: Checkpoint, watcher: Watcher):
        self.folder, self.experiment, self.engine, self.watcher = folder, experiment, engine, watcher
        self.ledger, stages = start.ledger, [stage for stage, _, _ in experiment.timetable()]
        self.rounds = len(stages)
        self.ends = {
            n for n, (a, b) in enumerate(pairwise(stages), 1) if a is not b and a.algorithm.updates_model
        }  # of stages
        self.metrics, self.bytes = folder.tables()
        privacy = folder.path / "privacy.json"
        self.disclosure = Disclosure(privacy, experiment.timetable(), experiment.clients, experiment.seed)
        limit = experiment.execution.transcript
        self.transcript = Recording(folder.path / "transcript", limit, start.round) if limit else None
        for table in (self.metrics, self.bytes):
            table.cut(start.round)
        self._stop = folder.path / STOP
        self._stop.unlink(missing_ok=True)  # it was meant for an earlier process
        self._began = time.perf_counter() - start.seconds
        self._last_round = start.seconds
        self._look: tuple[float, float] | None = None
        self.timed: Timed | None = None  # what tells how long the server worked
        self._server: list[tuple[int, Any, Any]] = []  # (round, answers were there, new state was there)
        self.clock: Clock | None = None
        self.check: Check | None = None  # of answers about clients' own models
        self.backdoor: Callable[[Tree], float] | None = None  # of a model: how often attack=backdoor succeeds

    def __call__(self, server: Server, job: Job, replies: Replies) -> None:
        if self.timed is not None:
            self._server.append((server.round, self.timed.answered, moment(self.experiment.execution.device)))
        received, last = sorted(replies.received, key=lambda reply: reply.client), server.round == self.rounds
        cohort = sorted({reply.client for reply in received})
        entries = self.ledger.book(job, cohort, received, round=server.round)
        self.metrics.add(setbacks(server.round, replies))
        self.bytes.add(entries)
        if self.clock is not None:
            simulated = self.clock.round(server.round, entries)
            self.metrics.add([(server.round, None, "", "", "", "simulated seconds", simulated)])
        evaluate = self.experiment.evaluate
        closing = server.round > self.rounds - evaluate.closing
        if last or closing or _due(server.round, evaluate.every):
            self._look = self._look_at_global(server, job)
        if last or _due(server.round, evaluate.personal_every):
            self._look_at_personal(server, job)
        seconds = time.perf_counter() - self._began
        self.metrics.add([(server.round, None, "", "", "", "seconds", seconds - self._last_round)])
        self._last_round = seconds
        self.disclosure.book(job, replies)
        full = self.transcript.add(job, replies) if self.transcript else ""  # before the checkpoint: no gap if killed
        asked_to_stop = self._stop.exists()
        stops = asked_to_stop or self.disclosure.overspends(server.round + 1) is not None
        where = self.experiment.execution
        due = any(_due(server.round, every) for every in (where.checkpoint, where.keep))
        if last or stops or due or server.round in self.ends:
            self.disclosure.write(server.round, self.folder.write_json)
            self.engine.save(server.round)
            self._book_server()
            self.metrics.flush()
            self.bytes.flush()
            checkpoint = Checkpoint(server.round, server.state, self.ledger, seconds)
            self.folder.save(checkpoint, where.keep, self.ends)
        notes = job.stage.algorithm.notes(replies) if replies else []
        for note in [*notes, *said(server.round, replies), *([full] if full else [])]:
            self.folder.log(f"note: {note}")
            self.watcher.note(note)
        accuracy, loss = self._look or (None, None)
        progress = Progress(server.round, self.rounds, accuracy, loss, self.ledger.up, self.ledger.down, seconds)
        self.folder.log(line(progress))
        self.watcher.round(progress)
        self.disclosure.refuse(server.round)
        if asked_to_stop:
            self._stop.unlink(missing_ok=True)
            if not last:
                raise Stopped(f"stopped after round {server.round} of {self.rounds}, as asked")

    def _look_at_global(self, server: Server, job: Job) -> tuple[float, float] | None:
        """The global model on the pooled test set; none when clients keep a part of it."""
        model = job.stage.algorithm.global_model(server.state)
        whole = server.net.initial_weights()
        if {path for path, _ in model.paths()} != {path for path, _ in whole.paths()}:
            return None
        score = total(self.engine.measure(model))
        accuracy, loss = (float(score[name]) / int(score.examples) for name in ("correct", "loss"))
        where = server.round, None, "pooled test", "global", "examples"
        self.metrics.add([(*where, "accuracy", accuracy), (*where, "loss", loss)])
        if self.backdoor is not None:
            self.metrics.add([(*where, "backdoor", self.backdoor(model))])
        return accuracy, loss

    def _look_at_personal(self, server: Server, job: Job) -> None:
        """Every client's own model on its own test shard, before or after local training."""
        wanted, algorithm, local = self.experiment.evaluate.personal, job.stage.algorithm, self.experiment.local
        for name in algorithm.evaluated_as:
            if name.startswith("personal") and wanted != "both" and not name.endswith(wanted):
                continue
            trained = name == "personal after"
            epochs = algorithm.closing_epochs(local.epochs)
            how = dict(epochs=epochs, steps=local.steps) if trained else dict(epochs=0, steps=None)
            stage = job.stage.errand(Evaluate(base=algorithm), **how)
            look = replace(job_of(server, Turn(stage, job.at, job.since), job.seed), shared=job.shared)
            cohort = Everyone()(server.population, key(job.seed, "evaluation"))
            replies, _ = ask(self.engine, server, look, cohort, EVERY_REPLY, self.check)
            self.bytes.add(self.ledger.book(look, cohort, replies.received, round=server.round, purpose="evaluation"))
            self.disclosure.book(look, replies)
            for note in said(server.round, replies):
                self.folder.log(f"note: {note}")
                self.watcher.note(note)
            if replies:
                self._book_personal(server.round, name, replies)

    def _book_server(self) -> None:
        """Only now and then: on a GPU it means to wait for all that is queued."""
        spans = ((round, seconds_between(before, after)) for round, before, after in self._server)
        self.metrics.add((round, None, "", "", "", "server seconds", seconds) for round, seconds in spans)
        self._server = []

    def _book_personal(self, round: int, name: str, replies: list[Reply]) -> None:
        found = {r.client: r.upload for r in replies if int(r.upload.examples)}
        accuracies = {client: int(s.correct) / int(s.examples) for client, s in found.items()}
        where = round, None, "client test", name, "clients"
        summary = summary_statistics(list(accuracies.values()))
        losses = [float(s.loss) / int(s.examples) for s in found.values()]
        self.metrics.add((*where, f"accuracy_{key}", value) for key, value in summary.items())
        self.metrics.add([(*where, "loss_mean", sum(losses) / len(losses))])
        each = "client test", name, "examples"
        self.metrics.add((round, client, *each, "accuracy", value) for client, value in accuracies.items())

    def conclude(self) -> Result:
        self.metrics.merge()
        self.bytes.merge()
        result = summary(self.folder, self.experiment)
        self.folder.write_json("result.json", result.plain())
        return result


def setbacks(round: int, answers: Replies) -> Iterator[tuple[Any, ...]]:
    """Rows of the metrics: whose reply was missing, late or refused, and whether the round does not count."""
    kinds = {
        "missing": answers.missing,
        "late": [reply.client for reply in answers.late],
        "refused": [reply.client for reply, _ in answers.refused],
        "void": [None] if answers.void else [],
    }
    return ((round, client, "", "", "", kind, 1.0) for kind, clients in kinds.items() for client in clients)


def said(round: int, answers: Replies) -> list[str]:
    """Whom a round went on without, in a sentence; and whether it was for nothing."""
    parts = [f"client {reply.client}: {why}" for reply, why in answers.refused]
    for clients, why in (([reply.client for reply in answers.late], "late"), (answers.missing, "no reply")):
        parts += [f"client{'s' * (len(clients) > 1)} {', '.join(map(str, clients))}: {why}"] if clients else []
    notes = [f"round {round} goes on without {'; '.join(parts)}"] if parts else []
    return [*notes, f"round {round} leaves the model as it was: {answers.void}"] if answers.void else notes


def _due(round: int, every: int) -> bool:
    return every > 0 and round % every == 0


def line(progress: Progress) -> str:
    accuracy = (
        "" if progress.accuracy is None else f"  accuracy {percent(progress.accuracy, 2)}  loss {progress.loss:.4f}"
    )
    traffic = f"  up {progress.bytes_up / 1e6:.1f} MB  down {progress.bytes_down / 1e6:.1f} MB"
    return f"round {progress.round}/{progress.rounds}{accuracy}{traffic}  {progress.seconds:.1f} s"
