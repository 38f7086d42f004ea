"""The ClientApp of a simulation without owners. A node that has one runs the guard, and never this."""

# pyright: reportMissingImports=false

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from .messages import Payload, from_records, to_records

app = ClientApp()


def _answer(message: Message, context: Context) -> Message:
    return Message(to_records(_reply(from_records(message.content), context)), reply_to=message)


def _reply(payload: Payload, context: Context) -> Payload:
    from ..core.errors import BadInput
    from .client import Trainer
    from .node import Node

    try:
        node = Node.of(context.node_config)
    except BadInput as error:
        return Payload({"refused": str(error)}, {})
    kept = from_records(context.state).trees if "notes" in context.state else {}
    reply, keep = Trainer(node).answer(payload, kept)
    context.state = to_records(Payload({}, keep))
    return reply


app.train()(_answer)
app.query()(_answer)
