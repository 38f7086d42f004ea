"""A node's only executor: it answers with the code that its owner installed, and never touches what a server ships.

The SuperNode runs with `--isolation process` and starts nothing itself. This process takes its tasks, drops the app
that came along unread, and has the message answered. Whoever asks for anything else gets an error; the node lives on.

Run as `python -P -m fedlens.flower.guard NODE ADDRESS`.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .messages import Payload, from_records, to_records

if TYPE_CHECKING:
    from flwr.app import Message

_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
_PAUSE = 0.1  # seconds between two questions for a task
SECRET = "executor.secret"  # what the SuperNode and its guard share


def serve(place: Path, address: str) -> None:
    """One task after another, until the process is ended."""
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.auth import load_superexec_auth_secret
    from flwr.supercore.constant import TaskType
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, SuperExecAuthHttpInterceptor

    from .client import Trainer
    from .node import Node

    trainer = Trainer(Node.read(place / "node.yaml"), say=lambda text: print(text, file=sys.stderr, flush=True))
    secret = load_superexec_auth_secret(secret_file=str(place / SECRET))
    assert secret is not None  # its file is there
    signed = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={_ACQUIRE})
    door = _client(place, address, signed)
    while True:
        got = door.AcquireTask(AcquireTaskRequest(supported_task_types=[str(kind) for kind in TaskType]))
        if got.HasField("task") and got.token:
            _one(_client(place, address, RuntimeTokenHttpInterceptor(got.token)), got.task, trainer.answer)
        else:
            time.sleep(_PAUSE)


def _client(place: Path, address: str, *more: Any) -> Any:
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.retry import make_simple_http_retry_invoker
    from flwr.supercore.runtime import RuntimeHttpClient

    return RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=False,
        root_certificates=(place / "ca.crt").read_bytes(),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec"), *more],
        retry_invoker=make_simple_http_retry_invoker(),
    )


def _one(line: Any, task: Any, answer: Callable[[Payload], tuple[Payload, Any]]) -> None:
    """Answer one task; the SuperNode hears of its end in any case, as it would wait for it for ever."""
    from flwr.common.constant import SubStatus
    from flwr.supercore.constant import TaskType
    from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
    from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

    beat = HeartbeatSender(make_task_heartbeat_fn_http(line))
    beat.start()
    context, status, details = None, SubStatus.FAILED, "refused"
    try:
        message, context, _, shipped = pull_task_input(line)
        del shipped  # the server's app: not unpacked, not imported, not read
        if task.type == TaskType.CLIENT_APP:
            reply, status, details = replied(message, answer), SubStatus.COMPLETED, ""
        else:
            reply = _error(message, "this node answers the orders of FedLens alone")
        push_message(line, reply, context)
    except Exception as error:
        print(f"a task failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        push_task_output(line, context, status, details)
        beat.stop()
        line.close()


def replied(message: Message, answer: Callable[[Payload], tuple[Payload, Any]]) -> Message:
    """Flower's reply to a message; one that is no payload gets an error."""
    from flwr.app import Message

    from ..core.errors import RunFailed

    try:
        payload = from_records(message.content)
    except RunFailed:
        return _error(message, "the message is damaged")
    return Message(to_records(answer(payload)[0]), reply_to=message)


def _error(message: Message, reason: str) -> Message:
    from flwr.app import Message
    from flwr.app.error import Error
    from flwr.common.constant import ErrorCode

    return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=message)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2])
