"""What watches the rounds of a run: evaluations, bytes, privacy, seconds and checkpoints go into its folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..core.algorithm import Server
from ..core.check import Check
from ..core.cohort import Everyone
from ..core.engine import Engine, Job, Reply
from ..core.errors import RunFailed
from ..core.evaluate import Evaluate, personal_evaluations, total
from ..core.files import remove
from ..core.format import percent
from ..core.ledger import Entry, Ledger
from ..core.measures import (
    LOWER_IS_BETTER,
    MEASURES,
    best_round,
    each_class,
    measure_value,
    measured,
    numbered,
    pooled_scores,
)
from ..core.policy import EVERY_REPLY
from ..core.replies import Replies, ask
from ..core.rng import key
from ..core.run import Turn, job_of
from ..core.tree import Tree
from ..devices.clock import Clock
from ..engines.timing import Timed, moment, seconds_between
from ..experiment import Experiment
from ..privacy.report import Disclosure
from ..runs.checkpoints import Checkpoint
from ..runs.folder import RunFolder
from ..runs.measures import validated
from ..runs.read import Result, summary, summary_statistics
from ..runs.rounds import Rounds, stage_names
from ..runs.tables import METRICS, GrowingTable, empty, read
from ..runs.transcript import Recording

_COUNTS = 20_000  # of clients' confusions that a round's table takes at most; with more, they are left out
STOP = "stop"  # a file of this name in its folder asks a run to end after the round it is in


class Enough(Exception):
    """Validation has not got better for as long as `evaluate.patience` allows."""


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
    trained: int = 0  # rounds of training among those that are done
    training: int = 0  # and in all
    stage: str = ""  # what the round did, where it did not train the model


class Watcher(Protocol):
    def begin(self, experiment: Experiment, folder: Path, notes: list[str], round: int, rounds: int) -> None:
        pass

    def clients(self, answered: int, asked: int) -> None:
        pass

    def round(self, progress: Progress) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def phase(self, name: str, done: int, total: int) -> None:
        """What is under way besides clients' work; total is 0 where nobody knows it."""


class Nobody(Watcher):
    """Looks away: a base for watchers of one thing."""


class Parts(NamedTuple):
    """What a recorder can do without: each is there in some kinds of runs alone."""

    own_noise: Collection[int] = ()  # clients whose noise does not come from the run's seed
    timed: Timed | None = None  # what tells how long the server worked
    clock: Clock | None = None  # simulated seconds
    check: Check | None = None  # of answers about personal models
    backdoor: Callable[[Tree], float] | None = None  # of a model: how often attack=backdoor succeeds


class Recorder:
    """Observes the round loop: every duty is a small observer's, called in an order that leaves no gap if killed."""

    def __init__(
        self,
        folder: RunFolder,
        experiment: Experiment,
        engine: Engine,
        start: Checkpoint,
        watcher: Watcher,
        parts: Parts = Parts(),  # noqa: B008
    ):
        self.folder, self.experiment, self.start, self.watcher = folder, experiment, start, watcher
        self.engine = engine
        self.rounds = len(experiment.timetable())
        self.counts, self.stages = Rounds.of(experiment.timetable()), stage_names(experiment.timetable())
        self.metrics, table = folder.tables()
        for each in (self.metrics, table):
            each.cut(start.round)
        self.bytes = Bytes(table, start.ledger, self.metrics, parts.clock)
        private = folder.path / "privacy.json", experiment.timetable(), experiment.clients, experiment.seed
        self.disclosure = Disclosure(*private, parts.own_noise)
        self.disclosure.take_up(start.answers if start.round else {})
        limit, place = experiment.execution.transcript, folder.path / "transcript"
        known = start.round, folder.unsynced, start.transcript
        self.transcript = Recording(place, limit, *known) if limit else None
        self.clock = RoundClock(self.metrics, start.seconds, parts.timed, experiment.execution.device)
        watch = numbered("evaluate.watch", experiment.evaluate.watch, folder.names().classes)
        self.evaluation = Evaluations(experiment, engine, self.metrics, watch, parts.check, parts.backdoor)
        self.checkpoints, self.memories = Checkpoints(folder, experiment), dict(start.memories)
        self._stop = folder.path / STOP
        remove(self._stop)  # it was meant for an earlier process

    def __call__(self, server: Server, job: Job, replies: Replies) -> None:
        self.clock.answered(server.round)
        self.metrics.add(setbacks(server.round, replies))
        self.bytes.book(job, replies, server.round)
        of = self.evaluation
        for evaluation, cohort, found in chain(
            of.of_validation(server, job), of.of_global(server, job), of.of_personal(server, job)
        ):
            self.bytes.book_evaluation(evaluation, cohort, found, server.round)
            self.disclosure.book(evaluation, found)
            self._note(reply_notes(server.round, found))
        if of.is_open:
            watch = self.experiment.evaluate.watch
            self._note([f"round {server.round} has no {watch}: no client's validation images have what it needs"])
        seconds = self.clock.round(server.round)
        self.disclosure.book(job, replies)
        full = self.transcript.add(job, replies) if self.transcript else ""  # before the checkpoint: no gap if killed
        asked_to_stop = self._stop.exists()
        stops = asked_to_stop or self.disclosure.overspends(server.round + 1) is not None
        stops = stops or self.evaluation.enough
        if stops or self.checkpoints.due(server.round) or self.evaluation.best == server.round:
            self._save(server, seconds)
        notes = job.stage.algorithm.notes(replies) if replies else []
        self._note([*notes, *reply_notes(server.round, replies), *([full] if full else [])])
        sent, (accuracy, loss) = self.bytes.ledger, self.evaluation.newest or (None, None)
        counts = self.counts.trained(server.round), self.counts.total, self.stages[server.round - 1]
        progress = Progress(server.round, self.rounds, accuracy, loss, sent.up, sent.down, seconds, *counts)
        self.folder.log(progress_line(progress))
        self.watcher.round(progress)
        self.tell_stage(server.round)
        if self.evaluation.enough:
            count, best = self.experiment.evaluate.patience, self.counts.trained(self.evaluation.best or 0)
            self._note([f"ended early: {count} evaluations on validation images were no better than round {best}"])
            raise Enough
        self.disclosure.refuse(server.round)
        if asked_to_stop:
            remove(self._stop)
            if server.round < self.rounds:
                raise Stopped(f"stopped after round {server.round} of {self.rounds}, as asked")

    def tell_stage(self, round: int) -> None:
        """What the round after this one does, where it is something new."""
        before, *after = ["", *self.stages][round : round + 2]
        if after and after[0] != (before if round > self.start.round else ""):
            self.watcher.phase(after[0] or "training", 0, 0)

    def _save(self, server: Server, seconds: float) -> None:
        """A checkpoint, and before it all that it stands on."""
        self.disclosure.write(server.round, self.folder.write_json)
        for (client, round), seal in self.engine.save(server.round).items():
            self.memories[client] = round, seal
        self.clock.book_server()
        grown = self.metrics, self.bytes.table
        for table in grown:
            table.flush()
        checkpoint = Checkpoint(
            server.round,
            server.state,
            self.bytes.ledger,
            seconds,
            memories=self.memories,
            transcript=self.transcript.files if self.transcript else {},
            tables={table.folder.name: table.seal() for table in grown},
            answers=self.disclosure.answers,
        )
        self.checkpoints.save(checkpoint, self.evaluation.best)

    def _note(self, notes: list[str]) -> None:
        for note in notes:
            self.folder.log(f"note: {note}")
            self.watcher.note(note)

    def conclude(self) -> Result:
        self.metrics.merge()
        self.bytes.table.merge()
        result = summary(self.folder, self.experiment)
        self.folder.write_json("result.json", result.plain())
        self.folder.sync()
        return result


class Bytes:
    """Books what crosses, and how long that and the work would have taken on devices."""

    def __init__(self, table: GrowingTable, ledger: Ledger, metrics: GrowingTable, clock: Clock | None):
        self.table, self.ledger, self.metrics, self.clock = table, ledger, metrics, clock

    def book(self, job: Job, replies: Replies, round: int) -> None:
        received = sorted(replies.received, key=lambda reply: reply.client)
        cohort = sorted({reply.client for reply in received})
        entries: list[Entry] = self.ledger.book(job, cohort, received, round=round)
        self.table.add(entries)
        if self.clock is not None:
            simulated = self.clock.round(round, entries)
            self.metrics.add([(round, None, "", "", "", "simulated seconds", simulated)])

    def book_evaluation(self, job: Job, cohort: Sequence[int], replies: Replies, round: int) -> None:
        self.table.add(self.ledger.book(job, cohort, replies.received, round=round, purpose="evaluation"))


class Evaluations:
    """The global model on the pooled test set, and personal models on their clients' own, as often as asked for."""

    def __init__(
        self,
        experiment: Experiment,
        engine: Engine,
        metrics: GrowingTable,
        watch: str,
        check: Check | None,
        backdoor: Callable[[Tree], float] | None,
    ):
        self.experiment, self.engine, self.metrics, self.check = experiment, engine, metrics, check
        self.watch, self.is_open = watch, False  # what decides which round is best; whether it had no value
        self.backdoor, self.rounds = backdoor, len(experiment.timetable())
        self.counts = Rounds.of(experiment.timetable())
        self.newest: tuple[float, float] | None = None  # accuracy and loss of the global model
        self.detailed = experiment.evaluate.measures == "all"
        known = read(metrics.folder, metrics.schema) if experiment.evaluate.validation else empty(METRICS)
        self.watched = validated(known, experiment.evaluate.watch)  # round -> what decides which round is best

    @property
    def best(self) -> int | None:
        """The round with the best validation so far."""
        return best_round(self.experiment.evaluate.watch, self.watched)

    @property
    def enough(self) -> bool:
        """Whether so many evaluations on validation images were no better."""
        patience, best = self.experiment.evaluate.patience, self.best
        return bool(patience) and best is not None and sum(round > best for round in self.watched) >= patience

    def of_validation(self, server: Server, job: Job) -> Iterator[tuple[Job, Sequence[int], Replies]]:
        """The model that clients start from, on images that none of them trains on and no test set has."""
        asked = self.experiment.evaluate
        if not asked.validation or not self._is_due(server.round, asked.every):
            return
        if not self.counts.trained(server.round):
            return
        detailed = asked.watch not in ("accuracy", "loss")
        cohort, replies, order = self._ask(
            server, job, Evaluate(job.stage.algorithm, detailed=detailed, validation=True)
        )
        yield order, cohort, replies
        if found := [r.upload for r in replies if int(r.upload.examples)]:
            value = measure_value(found, self.watch)
            self.is_open = value is None
            if value is None:
                return
            self.metrics.add([(server.round, None, "validation", "", "examples", asked.watch, value)])
            self.watched[server.round] = value

    def _ask(self, server: Server, job: Job, errand: Evaluate, **how: Any) -> tuple[Sequence[int], Replies, Job]:
        """Everyone's answers to an errand."""
        turn = Turn(job.stage.errand(errand, **how), job.at, job.since)
        asked = replace(job_of(server, turn, job.seed), shared=job.shared)
        cohort = Everyone()(server.population, key(job.seed, "evaluation"))
        replies, _ = ask(self.engine, server, asked, cohort, EVERY_REPLY, self.check)
        return cohort, replies, asked

    def of_global(self, server: Server, job: Job) -> Iterator[Any]:
        """Asks nobody: the server has the pooled test set. Only when its turn comes: validation may end the run."""
        asked = self.experiment.evaluate
        trained = self.counts.trained(server.round)
        closes = trained > max(0, self.counts.total - asked.closing)
        if closes or self._is_due(server.round, asked.every):
            self.newest = self._of_global(server, job)
        yield from ()

    def _is_due(self, round: int, every: int) -> bool:
        """After the last round, and `every` so many rounds of training; a preparation has a count of its own."""
        return self._is_last(round) or _due(self.counts.trained(round) or round, every)

    def _is_last(self, round: int) -> bool:
        return round == self.rounds or self.enough

    def _of_global(self, server: Server, job: Job) -> tuple[float, float] | None:
        """None when clients keep a part of the model."""
        model = job.stage.algorithm.global_model(server.state)
        whole = server.net.initial_weights()
        if {path for path, _ in model.paths()} != {path for path, _ in whole.paths()}:
            return None
        score = total(self.engine.measure(model, self.detailed))
        found = measured([score])
        accuracy, loss = found["accuracy"], found["loss"]
        where = server.round, None, "pooled test", "global", "examples"
        self.metrics.add((*where, name, value) for name, value in found.items())
        if self.detailed and self._is_last(server.round):
            self.metrics.add((*where, name, value) for name, value in each_class(score).items())
        if self.backdoor is not None:
            self.metrics.add([(*where, "backdoor", self.backdoor(model))])
        return accuracy, loss

    def of_personal(self, server: Server, job: Job) -> Iterator[tuple[Job, Sequence[int], Replies]]:
        """Every client's personal model, before or after local training: what is asked of whom, and the answers."""
        if not self._is_due(server.round, self.experiment.evaluate.personal_every):
            return
        algorithm, local = job.stage.algorithm, self.experiment.local
        wanted = self.experiment.evaluate.personal
        for name, how in personal_evaluations(algorithm, wanted, local.epochs, local.steps):
            cohort, replies, asked = self._ask(server, job, Evaluate(algorithm, detailed=self.detailed), **how)
            yield asked, cohort, replies
            if replies:
                self._book_personal(server.round, name, replies)

    def _book_personal(self, round: int, name: str, replies: list[Reply]) -> None:
        found = {r.client: r.upload for r in replies if int(r.upload.examples)}
        if not found:  # the pooled test set may be all there is to test on
            return
        by_client = {client: measured([score]) for client, score in found.items()}
        where = round, None, "client test", name, "clients"
        losses = [each["loss"] for each in by_client.values()]
        for measure in [each for each in MEASURES if each != "loss"]:
            if values := [each[measure] for each in by_client.values() if measure in each]:
                summary = summary_statistics(values, lowest=measure in LOWER_IS_BETTER)
                self.metrics.add((*where, f"{measure}_{key}", value) for key, value in summary.items())
        self.metrics.add([(*where, "loss_mean", sum(losses) / len(losses))])
        each = "client test", name, "examples"
        for client, measures in by_client.items():
            kept = {measure: value for measure, value in measures.items() if measure != "loss"}
            if self.detailed:
                kept |= each_class(found[client], len(found) * found[client].confusion.numel() <= _COUNTS)
            self.metrics.add((round, client, *each, measure, value) for measure, value in kept.items())
        if self.detailed:
            pooled = pooled_scores([*found.values()])
            rows = measured([pooled]) | each_class(pooled)
            new = (row for row in rows.items() if row[0] not in ("accuracy", "loss"))  # means over clients are there
            self.metrics.add((round, None, *each, measure, value) for measure, value in new)


class RoundClock:
    """Seconds of every round, and of the server within it."""

    def __init__(self, metrics: GrowingTable, seconds: float, timed: Timed | None, device: str):
        self.metrics, self.timed, self.device = metrics, timed, device
        self._began, self._last = time.perf_counter() - seconds, seconds
        self._server: list[tuple[int, Any, Any]] = []  # (round, answers were there, new state was there)

    def answered(self, round: int) -> None:
        if self.timed is not None:
            self._server.append((round, self.timed.answered, moment(self.device)))

    def round(self, round: int) -> float:
        """Seconds of the whole run so far."""
        seconds = time.perf_counter() - self._began
        self.metrics.add([(round, None, "", "", "", "seconds", seconds - self._last)])
        self._last = seconds
        return seconds

    def book_server(self) -> None:
        """Only now and then: on a GPU it means to wait for all that is queued."""
        spans = ((round, seconds_between(before, after)) for round, before, after in self._server)
        self.metrics.add((round, None, "", "", "", "server seconds", seconds) for round, seconds in spans)
        self._server = []


class Checkpoints:
    """Kept as often as asked for, after the last round, and after every stage that trains: others can begin there."""

    def __init__(self, folder: RunFolder, experiment: Experiment):
        self.folder, self.asked = folder, experiment.execution
        stages = [stage for stage, _, _ in experiment.timetable()]
        self.last = len(stages)
        self.ends = {n for n, (a, b) in enumerate(pairwise(stages), 1) if a is not b and a.algorithm.updates_model}

    def due(self, round: int) -> bool:
        often = any(_due(round, every) for every in (self.asked.checkpoint, self.asked.keep))
        return often or round == self.last or round in self.ends

    def save(self, checkpoint: Checkpoint, best: int | None) -> None:
        self.folder.save(checkpoint, self.asked.keep, self.ends | ({best} if best else set()))


def setbacks(round: int, answers: Replies) -> Iterator[tuple[Any, ...]]:
    """Rows of the metrics: whose reply was missing, late or refused, and whether the round does not count."""
    kinds = {
        "missing": answers.missing,
        "late": [reply.client for reply in answers.late],
        "refused": [reply.client for reply, _ in answers.refused],
        "void": [None] if answers.void else [],
    }
    return ((round, client, "", "", "", kind, 1.0) for kind, clients in kinds.items() for client in clients)


def reply_notes(round: int, answers: Replies) -> list[str]:
    """Whom a round went on without, in a sentence; and whether it was for nothing."""
    parts = [f"client {reply.client}: {why}" for reply, why in answers.refused]
    for clients, why in (([reply.client for reply in answers.late], "late"), (answers.missing, "no reply")):
        parts += [f"client{'s' * (len(clients) > 1)} {', '.join(map(str, clients))}: {why}"] if clients else []
    notes = [f"round {round} goes on without {'; '.join(parts)}"] if parts else []
    return [*notes, f"round {round} leaves the model as it was: {answers.void}"] if answers.void else notes


def _due(round: int, every: int) -> bool:
    return every > 0 and round % every == 0


def progress_line(progress: Progress) -> str:
    accuracy = (
        "" if progress.accuracy is None else f"  accuracy {percent(progress.accuracy, 2)}  loss {progress.loss:.4f}"
    )
    traffic = f"  up {progress.bytes_up / 1e6:.1f} MB  down {progress.bytes_down / 1e6:.1f} MB"
    stage = f" ({progress.stage})" if progress.stage else ""
    return f"round {progress.round}/{progress.rounds}{stage}{accuracy}{traffic}  {progress.seconds:.1f} s"
