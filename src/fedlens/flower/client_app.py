"""The ClientApp: opens Flower's message, has it answered, and puts the answer into Flower's reply.

Imports nothing heavy: Flower starts a new Python for every task, and where a warm process answers that is all it costs.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from .messages import Payload, from_records, to_records
from .resident import ask

app = ClientApp()


def _answer(message: Message, context: Context) -> Message:
    payload = from_records(message.content)
    socket = str(context.node_config.get("warm", ""))
    reply = ask(socket, payload) if socket else None
    if reply is None:
        reply = _answer_here(payload, context)
    return Message(to_records(reply), reply_to=message)


def _answer_here(payload: Payload, context: Context) -> Payload:
    from ..core.errors import BadInput
    from .client import Trainer
    from .node import Node

    try:
        node = Node.of(context.node_config)
    except BadInput as error:
        return Payload({"refused": str(error)}, {})
    kept = from_records(context.state).trees if "notes" in context.state else {}
    reply, keep = Trainer(node).answer(payload, kept)
    if not node.storage:
        context.state = to_records(Payload({}, keep))
    return reply


app.train()(_answer)
app.query()(_answer)
