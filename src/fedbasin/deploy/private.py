"""The class counts of all clients together, gathered by messages that show no client's own.

    server -> holder    "keys"      holder makes a key pair; the public key comes back
    server -> client    "encrypt"   with the public key; the client's encrypted counts come back
    server -> holder    "decrypt"   with their sum; the sum in plain comes back
    server -> client    "score"     with the sum in plain; one number comes back, by the method;
                                    only for methods that take such numbers

The secret key stays in the holder's client state and is thrown away after it has opened one
sum. `fedbasin.local.private_counts` says what this protects, and what it does not.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, RecordDict

from fedbasin.core.method import Method, PrivateCounts
from fedbasin.core.protocols import asks_for_scores, score_counts
from fedbasin.core.rng import Key
from fedbasin.deploy.clients import ASK, Clients, TooFewNodes
from fedbasin.deploy.wire import Refused, number, the_record
from fedbasin.local.private_counts import (
    PrivateCountsError,
    add_counts,
    decrypt_counts,
    draw_holders,
    encrypt_counts,
    encrypt_share,
    make_keys,
)

_SECRET = "fedbasin-secret"
_MOST_BYTES = 64 << 20  # of a key or of encrypted counts
_log = logging.getLogger("flwr")


def gather_private(clients: Clients, key: Key, classes: int, method: Method) -> PrivateCounts:
    """Return the sum of all class counts, and each client's score if asked: the server's part."""
    total = gather(clients, key, classes)
    rows = [clients.examples(client) for client in range(clients.total)]
    if not asks_for_scores(method):
        return PrivateCounts(torch.tensor(total), torch.zeros(0), torch.tensor(rows))
    nodes = clients.wait(clients.total, empty=True)
    told = _ask(clients, nodes, {ASK: "score", "total": total})
    scores = [number(told[client], "score") for client in range(clients.total)]
    for client, score in enumerate(scores):
        if abs(score) > 1 + 1e-6:  # of shares of rows: one client could claim the whole model
            raise Refused(f"client {client} says that its score is {score}, expected -1 to 1")
    return PrivateCounts(
        torch.tensor(total), torch.tensor(scores, dtype=torch.float64), torch.tensor(rows)
    )


def gather(clients: Clients, key: Key, classes: int) -> list[int]:
    """Return how many rows of each class the clients hold together: the server's part."""
    nodes = clients.wait(clients.total, empty=True)
    holding = sum(clients.examples(client) > 0 for client in nodes)
    if holding < 3:
        raise TooFewNodes(f"{holding} clients hold data: their sum would show the counts of one")
    holder = draw_holders(sorted(nodes), 1, key)[0]
    public = _bytes(_ask(clients, {holder: nodes[holder]}, {ASK: "keys"})[holder], "public")
    encrypt: dict[str, Any] = {ASK: "encrypt", "public": public}
    rows = clients.rows()
    if clients.secure:  # clients tell nobody how many rows they hold
        encrypt["clients"] = len(nodes)
        rows = 0
    sent = _ask(clients, nodes, encrypt)
    messages = [_bytes(sent[client], "counts") for client in sorted(sent)]
    total = add_counts(public, messages, classes)
    question = {ASK: "decrypt", "sum": total, "classes": classes, "rows": rows}
    opened = _ask(clients, {holder: nodes[holder]}, question)[holder].get("total")
    whole = isinstance(opened, list) and all(isinstance(n, int) for n in opened)
    if not isinstance(opened, list) or not whole or len(opened) != classes:
        raise Refused(f"client {holder} opened the sum of {classes} classes as {opened!r}")
    _log.info("Class counts of all clients, opened by client %d: %s", holder, opened)
    return [int(n) for n in opened]


def _ask(
    clients: Clients, nodes: Mapping[int, int], question: dict[str, Any]
) -> dict[int, ConfigRecord]:
    """Ask clients and return the answers of all of them; one that is missing is an error."""
    content = RecordDict({"config": ConfigRecord(question)})
    answers, failed = clients.ask(nodes, content, clients.patience, _MOST_BYTES)
    if failed:
        who = "; ".join(f"client {client}: {why}" for client, why in list(failed.items())[:5])
        raise TooFewNodes(f"class counts need every client, at {question[ASK]!r}: {who}")
    return {client: the_record(reply, ConfigRecord) for client, reply in answers.items()}


def answer(config: ConfigRecord, counts: list[int], context: Context, method: Method) -> RecordDict:
    """Answer the server's question: a client's part."""
    asked = config.get(ASK)
    if asked == "keys":
        keys = make_keys()
        context.state[_SECRET] = ConfigRecord({"secret": keys.secret})
        return _reply({"public": keys.public})
    if asked == "encrypt":
        public = _bytes(config, "public")
        if "clients" not in config:
            return _reply({"counts": encrypt_counts(public, counts)})
        clients = int(number(config, "clients", least=1))
        return _reply({"counts": encrypt_share(public, counts, clients)})
    if asked == "decrypt":
        held = context.state.config_records.get(_SECRET)
        if held is None:
            raise PrivateCountsError("this client holds no key, or has opened its one sum already")
        del context.state[_SECRET]  # first, so that no sum is opened twice whatever happens
        classes = int(number(config, "classes", least=1))
        rows = int(number(config, "rows", least=0))
        opened = decrypt_counts(_bytes(held, "secret"), _bytes(config, "sum"), classes, rows)
        return _reply({"total": opened})
    if asked == "score":
        total = config.get("total")
        if not isinstance(total, list) or len(total) != len(counts):
            raise Refused(f"total is {total!r}, expected rows by class of {len(counts)} classes")
        own = torch.tensor(counts)
        everyone = torch.tensor([int(n) for n in total])
        return _reply({"score": score_counts(method, own, everyone)})
    raise Refused(f"unknown question {asked!r}; available: who, keys, encrypt, decrypt, score")


def _reply(values: dict[str, Any]) -> RecordDict:
    return RecordDict({"config": ConfigRecord(values)})


def _bytes(record: ConfigRecord, key: str) -> bytes:
    value = record.get(key)
    if not isinstance(value, bytes):
        raise Refused(f"{key} is {type(value).__name__}, expected bytes")
    return value
