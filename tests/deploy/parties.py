"""The parties of secure aggregation in one process, without Flower's messages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from flwr.app import ConfigRecord, Context, RecordDict

from fedbasin.deploy.clients import ASK
from fedbasin.deploy.secure.client import KEYS, MAIL, SHARES, UNMASK, SecureClient
from fedbasin.deploy.secure.quantise import NUMBERS
from fedbasin.deploy.secure.server import ServerProtocol
from fedbasin.deploy.secure.settings import SECURE, Session

SESSION = Session(
    run="ab12",
    round=1,
    attempt=1,
    threshold=3,
    clients=4,
    bits=24,
    clip=1.0,
    rows=100,
    statistics=0.0,
    weighting="samples",
)


def asking(stage, session, mail=None):
    records = {"config": ConfigRecord({ASK: stage}), SECURE: session.record()}
    return RecordDict(records | {MAIL: ConfigRecord(mail or {})})


class Parties:
    """A server and its clients; each stage takes the clients that answer it."""

    def __init__(self, count=4, size=5, session=SESSION, neighbours=0, floor=0, **node):
        self.session = replace(session, clients=max(count, session.clients))
        self.count = count
        self.size = size
        self.neighbours = neighbours
        self.floor = floor
        self.contexts = [Context(1, c, dict(node), RecordDict(), {}) for c in range(count)]
        self.server = ServerProtocol(self.session, size, neighbours)
        draws = np.random.default_rng(count + size)
        self.words = draws.integers(0, 1 << 32, (count, size), dtype=np.uint32)
        self.numbers = draws.integers(0, 1 << 20, (count, NUMBERS), dtype=np.uint64)

    def client(self, client):
        return SecureClient(self.contexts[client], client, self.floor)

    def ask(self, client, stage, mail=None):
        content = asking(stage, self.session, mail)
        return self.client(client).answer(content)["config"]

    def keys(self, who=None):
        for client in range(self.count) if who is None else who:
            self.server.take_keys(client, self.ask(client, KEYS))
        self.server.close_keys()

    def shares(self, who=None):
        for client in self.server.with_keys if who is None else who:
            mail = self.server.keys_for(client)
            self.server.take_shares(client, self.ask(client, SHARES, mail))
        self.server.close_shares()

    def masked_reply(self, client, mail=None):
        content = asking("train", self.session, mail or self.server.shares_for(client))
        party = self.client(client)
        assert party.begin(content) == self.session
        sent = self.words[client].copy(), self.numbers[client].copy()
        arrays = party.masked(self.session, *sent, content)
        return arrays["words"].numpy(), arrays["numbers"].numpy()

    def masked(self, who=None):
        for client in self.server.masking if who is None else who:
            self.server.take_masked(client, *self.masked_reply(client))
        self.server.close_masked()

    def unmask(self, who=None):
        for client in self.server.survivors if who is None else who:
            mail = self.server.lists_for(client)
            self.server.take_unmask(client, self.ask(client, UNMASK, mail))

    def opened(self):
        """The opened words and numbers; the check of the numbers' sums is another test's."""
        total = self.server._total
        import fedbasin.deploy.secure.server as module

        real = module.Sums.of
        module.Sums.of = lambda words, replies, session: words.copy()
        try:
            words, numbers = self.server.open()
        finally:
            module.Sums.of = real
        assert total is not None
        return words, numbers

    def expected(self, who):
        who = list(who)
        words = self.words[who].sum(0, dtype=np.uint32)
        return words, self.numbers[who].sum(0, dtype=np.uint64)
