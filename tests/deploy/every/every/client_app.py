"""Clients of the laws' toy federation, for whichever method the server runs."""

from functools import cache

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

import fedbasin.methods  # noqa: F401  (fills the catalogue)
from fedbasin.core.expressions import parse
from fedbasin.deploy import ClientSetup, app_of
from fedbasin.testing import toy_federation

app = ClientApp()


@cache
def app_for(method: str) -> ClientApp:
    """Return the clients of one method."""
    federation = toy_federation(parse(method, "method"), rounds=3)
    return app_of(lambda context: ClientSetup.of(federation, context, counts="plain"))


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train by the rules of the method that the message names."""
    return app_for(str(message.content["config"]["fedbasin-method"]))(message, context)


@app.query()
def query(message: Message, context: Context) -> Message:
    """Say which client this is."""
    return app_for("fedavg")(message, context)
