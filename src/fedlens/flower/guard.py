"""A node's only executor: it answers with the code that its owner installed, and never touches what a server ships.

The SuperNode runs with `--isolation process` and starts nothing itself. This process takes its tasks, drops the app
that came along unread, and has the message answered. Whoever asks for anything else gets an error; the node lives on.

Run as `python -P -m fedlens.flower.guard NODE ADDRESS`.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from .messages import Payload, from_records, to_records

if TYPE_CHECKING:
    from flwr.app import Message

_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
_PAUSE = 0.1  # seconds between two questions for a task
_PATIENCE = 60  # questions in a row that fail before the guard gives up
_RETRIED = 10.0  # seconds that one call is tried again where the SuperNode cannot be reached
_BEAT = 10.0  # seconds between two signs of life; Flower gives a task up after a minute without
SECRET = "executor.secret"  # what the SuperNode and its guard share
LOCAL = "local"  # the folder of the certificates by which they know each other: the owner's own authority


Answer = Callable[[Payload], tuple[Payload, Any]]


class Arrived(NamedTuple):
    """A task whose message is here."""

    line: Any
    kind: Any
    beat: Any
    message: Any
    context: Any


def say(text: str) -> None:
    """Into the owner's log, without signs by which a server could rewrite it on the owner's screen."""
    plain = "".join(each if each.isprintable() or each == "\n" else "?" for each in text)
    print(plain, file=sys.stderr, flush=True)


def serve(place: Path, address: str) -> None:
    """One task after another, until the process is ended."""
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.auth import load_superexec_auth_secret
    from flwr.supercore.constant import TaskType
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, SuperExecAuthHttpInterceptor

    from .client import Trainer
    from .identity import Member
    from .node import Node

    node = Node.read(place / "node.yaml")
    held = alone(place)
    member = Member(place, node.client, Trainer(node, say=say).answer)
    secret = load_superexec_auth_secret(secret_file=str(place / SECRET))
    assert secret is not None  # its file is there
    signed = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={_ACQUIRE})
    door = _client(place, address, signed)
    asked = AcquireTaskRequest(supported_task_types=[str(kind) for kind in TaskType])

    def connect(token: str) -> Any:
        return _client(place, address, RuntimeTokenHttpInterceptor(token))

    with held:
        for _ in turns(lambda: door.AcquireTask(asked), connect, member.answer):
            pass


def alone(place: Path) -> IO[str]:
    """A lock: two guards of one node would draw two noises for one order, and pay for one."""
    lock = os.fdopen(os.open(place / "guard.lock", os.O_WRONLY | os.O_CREAT, 0o600), "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"a guard runs at {place} already") from None
    return lock


def turns(acquire: Callable[[], Any], connect: Callable[[str], Any], answer: Answer) -> Iterator[None]:
    """Look for a task, answer one that has arrived, and so on.

    Messages are pulled beside this: the rest of one whose server was killed never comes, and must not hold the others.
    """
    arrived: SimpleQueue[Arrived] = SimpleQueue()
    failed = 0
    while True:
        try:
            got, failed = acquire(), 0
        except Exception as error:  # a SuperNode that is being started anew; one that stays away ends the guard, too
            failed += 1
            say(f"the SuperNode did not hand out a task: {type(error).__name__}: {error}")
            if failed > _PATIENCE:
                raise
            time.sleep(1.0)
            continue
        if got.HasField("task") and got.token:
            Thread(target=_pull, args=(connect(got.token), got.task, arrived), daemon=True).start()
        with suppress(Empty):
            _answer(arrived.get(timeout=_PAUSE), answer)
        yield


def _client(place: Path, address: str, *more: Any) -> Any:
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    return RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=False,
        root_certificates=(place / LOCAL / "ca.crt").read_bytes(),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec"), *more],
        retry_invoker=patience(),
    )


def patience() -> Any:
    """Ask a SuperNode again that cannot be reached, for a while.

    Flower's own ends the whole process where a task is over, as when its run was stopped: any server could end guards.
    """
    import httpx
    from flwr.supercore.retry import RetryInvoker, exponential

    def is_final(error: Any) -> bool:
        return isinstance(error, httpx.HTTPStatusError) and error.response.status_code not in (502, 503, 504)

    again = httpx.TransportError, httpx.HTTPStatusError
    return RetryInvoker(lambda: exponential(max_delay=2), again, None, _RETRIED, should_giveup=is_final)


class Beat:
    """Tells the SuperNode that a task is in hand, until it is not; a task that is over already is no matter."""

    def __init__(self, line: Any):
        self._over = Event()
        Thread(target=self._run, args=(line,), daemon=True).start()

    def _run(self, line: Any) -> None:
        from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

        while not self._over.is_set():
            with suppress(Exception):
                line.SendTaskHeartbeat(SendTaskHeartbeatRequest())
            self._over.wait(_BEAT)

    def stop(self) -> None:
        self._over.set()


def _pull(line: Any, task: Any, arrived: SimpleQueue[Arrived]) -> None:
    """Fetch one task's message; the server's app that comes along is not unpacked, not imported, not read."""
    from flwr.supernode.runtime.run_clientapp import pull_task_input

    beat = Beat(line)
    try:
        message, context, _, _ = pull_task_input(line)
    except BaseException as error:  # some of Flower's are no Exception
        say(f"a task failed: {type(error).__name__}: {error}")
        _end(line, beat, None, done=False)
    else:
        arrived.put(Arrived(line, task.type, beat, message, context))


def _answer(task: Arrived, answer: Answer) -> None:
    """Answer one task; the SuperNode hears of its end in any case, as it would wait for it for ever."""
    from flwr.supercore.constant import TaskType
    from flwr.supernode.runtime.run_clientapp import push_message

    done = False
    try:
        if task.kind == TaskType.CLIENT_APP:
            push_message(task.line, replied(task.message, answer), task.context)
            done = True
        else:
            push_message(task.line, _error(task.message, "this node answers the orders of FedLens alone"), task.context)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        say(f"a task failed: {type(error).__name__}: {error}")
    finally:
        _end(task.line, task.beat, task.context, done)


def _end(line: Any, beat: Any, context: Any, done: bool) -> None:
    from flwr.common.constant import SubStatus
    from flwr.supernode.runtime.run_clientapp import push_task_output

    beat.stop()
    try:
        push_task_output(line, context, SubStatus.COMPLETED if done else SubStatus.FAILED, "" if done else "refused")
    except BaseException as error:  # its SuperNode may have been killed; the next one is asked for tasks as before
        say(f"Flower was not told that a task has ended: {type(error).__name__}: {error}")
    line.close()


def replied(message: Message, answer: Answer) -> Message:
    """Flower's reply to a message; one that is no payload, or is not signed for this node, gets an error."""
    from flwr.app import Message

    from ..core.errors import BadInput, RunFailed

    try:
        payload = from_records(message.content)
        return Message(to_records(answer(payload)[0]), reply_to=message)
    except RunFailed:
        return _error(message, "the message is damaged")
    except BadInput as error:
        say(f"refused: {error}")
        return _error(message, "the message is not one for this node")


def _error(message: Message, reason: str) -> Message:
    from flwr.app import Message
    from flwr.app.error import Error
    from flwr.common.constant import ErrorCode

    return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=message)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2])
