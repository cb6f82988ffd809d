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
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from flwr.app import ConfigRecord, Context, RecordDict

from fedbasin.core.method import Method, PrivateCounts
from fedbasin.core.protocols import asks_for_scores, score_counts
from fedbasin.core.rng import Key
from fedbasin.deploy.clients import ASK, Clients, TooFewNodes
from fedbasin.deploy.wire import Refused, number, printable, the_record
from fedbasin.local.private_counts import (
    FEWEST,
    PrivateCountsError,
    add_counts,
    check_counts,
    decrypt_counts,
    draw_holders,
    encrypt_counts,
    encrypt_share,
    make_keys,
    read_public,
)

_SECRET = "fedbasin-secret"
_MOST_BYTES = 1 << 20  # of a key or of encrypted counts
_MOST_HOLDERS = 3  # that make a key, one after another, until one opens the sum
_log = logging.getLogger("flwr")


def gather_private(clients: Clients, key: Key, classes: int, method: Method) -> PrivateCounts:
    """Return the sum of all class counts, and each client's score if asked: the server's part.

    A client without a usable score has the others' median. If the sum cannot be opened, the
    method runs as if classes were balanced.
    """
    total = gather(clients, key, classes)
    rows = torch.tensor([clients.examples(client) for client in range(clients.total)])
    known = torch.ones(classes, dtype=torch.int64) if total is None else torch.tensor(total)
    if total is None:
        _log.warning("The class counts are not known: the method runs as if they were balanced")
    if not asks_for_scores(method):
        return PrivateCounts(known, torch.zeros(0), rows)
    scores = torch.zeros(clients.total, dtype=torch.float64)
    if total is not None:
        told = _usable(clients, clients.everyone(), {ASK: "score", "total": total}, _score)
        if told:
            scores += torch.tensor(list(told.values()), dtype=torch.float64).median()
        for client, score in told.items():
            scores[client] = score
    return PrivateCounts(known, scores, rows)


def gather(clients: Clients, key: Key, classes: int) -> list[int] | None:
    """Return how many rows of each class the clients hold together: the server's part.

    A client whose counts cannot be read counts for none. If the one that holds the key cannot open
    the sum, another one makes a new key. None means that nobody could open it.
    """
    nodes = clients.everyone()
    holding = sum(clients.examples(client) > 0 for client in nodes)
    if holding < FEWEST:
        raise TooFewNodes(f"{holding} clients hold data: their sum would show the counts of one")
    for _ in range(_MOST_HOLDERS):
        if not nodes:
            break
        holder = draw_holders(sorted(nodes), 1, key)[0]
        opened = _opened(clients, nodes, holder, classes)
        if opened is not None:
            _log.info("Class counts of all clients, opened by client %d: %s", holder, opened)
            return opened
        del nodes[holder]  # it still sends its own counts: `_opened` asks everyone
    return None


def _opened(
    clients: Clients, nodes: Mapping[int, int], holder: int, classes: int
) -> list[int] | None:
    """Return the sum of all clients' counts under a new key of one of them; None if it fails."""
    at_holder = {holder: nodes[holder]}
    public = _usable(clients, at_holder, {ASK: "keys"}, _public).get(holder)
    if public is None:
        return None

    def encrypted(record: ConfigRecord) -> bytes:
        counts = _bytes(record, "counts")
        check_counts(public, counts, classes)
        return counts

    asked = clients.everyone()
    encrypt: dict[str, Any] = {ASK: "encrypt", "public": public}
    fewest = FEWEST
    if clients.secure:  # clients agree to a sum of so many, and tell nobody how many rows they hold
        encrypt["clients"] = len(asked)
        fewest = len(asked)
    sent = _usable(clients, asked, encrypt, encrypted)
    if len(sent) < fewest or sum(clients.examples(client) > 0 for client in sent) < FEWEST:
        return None
    rows = 0 if clients.secure else sum(clients.examples(client) for client in sent)

    def whole(record: ConfigRecord) -> list[int]:
        opened = record.get("total")
        if not isinstance(opened, list) or len(opened) != classes:
            raise Refused(f"it opened the sum of {classes} classes as {opened!r}")
        counted = all(isinstance(n, int) and n >= 0 for n in opened)
        if not counted or (rows and sum(opened) != rows):
            raise Refused(f"it opened the sum of {rows or 'hidden'} rows as {opened!r}")
        return [int(n) for n in opened]

    total = add_counts(public, [sent[client] for client in sorted(sent)], classes)
    question = {ASK: "decrypt", "sum": total, "classes": classes, "rows": rows}
    return _usable(clients, at_holder, question, whole, blame=False).get(holder)


Answer = TypeVar("Answer")


def _usable(
    clients: Clients,
    nodes: Mapping[int, int],
    question: dict[str, Any],
    read: Callable[[ConfigRecord], Answer],
    *,
    blame: bool = True,
) -> dict[int, Answer]:
    """Ask clients; return the answers that can be used, and name the clients of the others.

    Args:
        clients: which node is which client.
        nodes: the node of each client that is asked.
        question: what is asked.
        read: reads an answer, or refuses it.
        blame: whether a client that answers with an error counts as refused. Who holds the key
            cannot open a sum that another one has spoilt.
    """
    content = RecordDict({"config": ConfigRecord(question)})
    answers, failed = clients.ask(nodes, content, clients.patience, _MOST_BYTES)
    refused = dict(failed) if blame else {}
    found = {}
    for client, reply in answers.items():
        try:
            found[client] = read(the_record(reply, ConfigRecord))
        except (Refused, PrivateCountsError) as reason:
            refused[client] = printable(str(reason))
    for client, why in refused.items():
        clients.refuse(nodes[client], f"class counts, at {question[ASK]!r}: {why}")
    for client, why in (failed | refused).items():
        _log.warning("class counts, at %r: client %d: %s", question[ASK], client, why)
    return found


def _public(record: ConfigRecord) -> bytes:
    """Return a public key, checked as clients check it."""
    public = _bytes(record, "public")
    read_public(public)
    return public


def _score(record: ConfigRecord) -> float:
    score = number(record, "score")
    if abs(score) > 1 + 1e-6:  # of shares of rows: one client could claim the whole model
        raise Refused(f"its score is {score}, expected -1 to 1")
    return score


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
