"""Which node is which client: nodes that come late, err, fall silent or claim another's place."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")

from deploy.grids import LocalGrid, app_for, strategy_for
from flwr.app import ArrayRecord, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from fedbasin.core.expressions import parse
from fedbasin.deploy import ClientSetup, app_of, place
from fedbasin.deploy.clients import Clients, NodeIdentity, TooFewNodes
from fedbasin.deploy.mail import Mailbox
from fedbasin.deploy.wire import Refused
from fedbasin.sim.population import Population
from fedbasin.testing import toy_federation


def app():
    return app_for(toy_federation(parse("fedavg", "method")))


def telling():
    """An app that passes on whatever its node configuration says."""
    executor = toy_federation(parse("fedavg", "method")).executor

    def setup(context):
        client, clients = place(context)
        return ClientSetup(
            "fedavg", executor.trainer, executor.population.shard(client), client, clients
        )

    return app_of(setup)


def foreign():
    """An app of somebody else, which answers no queries."""
    made = ClientApp()
    made.train()(lambda message, context: Message(RecordDict(), reply_to=message))
    return made


class Late(LocalGrid):
    """Nodes come one after another: one more with every third look."""

    looks = 0

    def get_node_ids(self):
        self.looks += 1
        return list(self.contexts)[: 1 + self.looks // 3]


class Lossy(LocalGrid):
    """The first message of all is lost, or answered by an error."""

    error = None

    def push_messages(self, messages):
        first = not self.sent
        ids = super().push_messages(messages)
        if first:
            lost = [Message(self.error, reply_to=messages[0])] if self.error else []
            self._inbox[ids[0]] = lost
        return ids


class Hiccup(Late, Lossy):
    """Both."""

    error = Error(2, "OSError: data not mounted yet")


def test_nodes_without_a_name_may_come_one_by_one():
    clients = Clients(Mailbox(Late(foreign(), 6)), patience=9.0)
    found = clients.wait(3)
    assert clients.anonymous and clients.total == len(found) >= 3
    assert sorted(found) == list(range(clients.total))


def test_a_node_that_errs_at_first_does_not_make_all_nameless():
    clients = Clients(Mailbox(Hiccup(app(), 6)), patience=20.0)
    assert sorted(clients.wait(6)) == list(range(6))
    assert not clients.anonymous and clients.total == 6


def test_a_node_whose_question_was_lost_is_asked_again():
    clients = Clients(Mailbox(Lossy(app(), 6)), patience=4.0)
    assert len(clients.online()) == 5
    assert len(clients.wait(6)) == 6
    assert not clients.mail.late


class Slow(LocalGrid):
    """One node answers after so many seconds."""

    node = 7777
    clock = None
    seconds = 0.0
    asked = None

    def push_messages(self, messages):
        if self.asked is None and any(m.metadata.dst_node_id == self.node for m in messages):
            self.asked = self.clock.now
        return super().push_messages(messages)

    def pull_messages(self, message_ids):
        found = super().pull_messages(message_ids)
        for reply in found:
            slow = reply.metadata.src_node_id == self.node
            if slow and self.clock.now - self.asked < self.seconds:
                self._inbox[reply.metadata.reply_to_message_id] = [reply]
                return []
        return found


def newcomer(seconds, clock):
    """Five clients are there, the sixth one comes and takes so long to say who it is."""
    grid = Slow(app(), 6)
    grid.clock = clock
    grid.seconds = seconds
    grid.contexts = {n: c for n, c in grid.contexts.items() if c.node_config["partition-id"] != 5}
    clients = Clients(Mailbox(grid), patience=600.0)
    assert sorted(clients.wait(2)) == [0, 1, 2, 3, 4]
    grid.add(5, 7777)
    return clients


def test_a_silent_newcomer_holds_nobody_up_for_long(clock):
    clients = newcomer(1e9, clock)
    began = clock.now
    assert sorted(clients.wait(5)) == [0, 1, 2, 3, 4]
    assert 10 < clock.now - began < 15  # not half of the patience
    assert sorted(clients.online()) == [0, 1, 2, 3, 4]
    assert not clients.mail.late and list(clients._open.values()) == [7777]  # it may still say so


def test_a_node_that_is_silent_from_the_start_holds_nobody_up_for_long(clock):
    clients = Clients(Mailbox(Lossy(app(), 6)), patience=600.0)
    began = clock.now
    assert len(clients.wait(2)) == 5 and 10 < clock.now - began < 15


@pytest.mark.parametrize(("seconds", "known"), [(69, 6), (71, 5)])
def test_a_newcomer_has_ten_seconds_more_than_twice_the_time_of_the_slowest(seconds, known, clock):
    clients = newcomer(seconds, clock)
    clients._slowest = 30.0
    assert len(clients.wait(5)) == known


def test_nobody_goes_on_before_the_first_has_answered(clock):
    """All start together, so the first answer takes about as long as the others."""
    grid = Slow(telling(), 1)
    grid.clock = clock
    grid.contexts = {}
    grid.seconds = 50.0
    grid.add(0, 7777)
    assert list(Clients(Mailbox(grid), patience=600.0).online()) == [0]


def test_an_answer_that_took_long_is_still_taken(clock):
    grid = Lossy(app(), 6)
    clients = Clients(Mailbox(grid), patience=1.0)
    assert len(clients.online()) == 5
    ((message_id, node),) = clients._open.items()
    (question,) = [m for m in grid.sent if m.metadata.message_id == message_id]
    clients._pause[node] = (clock.now + 99, 99)
    grid._inbox[message_id] = [grid.app(question, grid.contexts[node])]
    assert len(clients.online()) == 6 and len(grid.sent) == 6


def test_a_node_with_a_name_is_known_among_nameless_ones():
    grid = LocalGrid(foreign(), 3)
    clients = Clients(Mailbox(grid), patience=5.0)
    first = clients.wait(2)
    assert clients.anonymous and clients.total == 3
    del grid.contexts[first[0]]
    grid.add(1, 7777)  # client 1 of 3, which is a number that a nameless node has
    federation = toy_federation(parse("fedavg", "method"))
    population = federation.population
    three = Population(population.inputs, population.labels, population.offsets[[0, 2, 4, 6]])
    federation = replace(federation, population=three)
    grid.app = app_for(federation)
    found = clients.online()
    assert found == {0: first[1], 1: 7777, 2: first[2]}
    assert clients.client(7777) == 1 and clients.examples(1) == len(three.shard(1).labels)


def test_a_second_node_of_one_client_waits_until_the_first_is_gone(caplog):
    grid = LocalGrid(app(), 6)
    clients = Clients(Mailbox(grid), patience=5.0)
    first = clients.online()[2]
    grid.add(2, 9999)
    with caplog.at_level(logging.WARNING, "flwr"):
        assert clients.online()[2] == first
    said = [r.getMessage() for r in caplog.records]
    assert any(f"node 9999 says it is client 2, as node {first} does" in s for s in said)
    del grid.contexts[first]
    clients._pause.clear()
    assert clients.online()[2] == 9999


def test_clients_without_rows_are_known_too():
    federation = toy_federation(parse("fedwcm", "method"), rounds=1)
    population = federation.population
    ends = population.offsets.copy()
    ends[-2] = ends[-1]  # the last client holds nothing
    bare = Population(population.inputs, population.labels, ends)
    federation = replace(federation, population=bare)
    strategy = strategy_for(federation, federation.method, patience=1.0)
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    strategy.start(LocalGrid(app_for(federation), 6), arrays, num_rounds=1, timeout=0.5)
    assert strategy._context.class_counts.sum(1).tolist() == np.diff(ends).tolist()
    assert 5 not in strategy._clients.online() and 5 in strategy._clients.online(empty=True)


class Node(int):
    """A node's id that counts how often it is looked up or compared."""

    looked = 0

    def __hash__(self):
        Node.looked += 1
        return super().__hash__()

    def __eq__(self, other):
        Node.looked += 1
        return super().__eq__(other)


def test_a_look_at_many_nodes_looks_at_each_a_few_times():
    """A set or a list made for every node would be as many looks at each as there are nodes."""
    nodes = [Node(number) for number in range(500)]
    grid = LocalGrid(None, 0)
    grid.contexts = dict.fromkeys(nodes)
    clients = Clients(Mailbox(grid), total=500)
    clients._identities = {node: NodeIdentity(int(node), 1) for node in nodes}
    Node.looked = 0
    assert len(clients.online()) == 500
    assert 500 < Node.looked < 20 * 500


class Unready(LocalGrid):
    """Every node errs when it is first asked."""

    def push_messages(self, messages):
        new = not self.sent
        ids = super().push_messages(messages)
        for message_id, message in zip(ids, messages, strict=True) if new else ():
            error = Message(Error(2, "OSError: data not mounted yet"), reply_to=message)
            self._inbox[message_id] = [error]
        return ids


def test_nodes_that_all_err_at_first_are_asked_again_before_they_are_numbered():
    clients = Clients(Mailbox(Unready(app(), 6)), patience=20.0)
    assert sorted(clients.wait(6)) == list(range(6)) and not clients.anonymous


def test_a_node_that_was_set_up_wrongly_and_is_mended_is_known():
    grid = LocalGrid(telling(), 6)
    node = next(iter(grid.contexts))
    config = grid.contexts[node].node_config
    right = config["num-partitions"]
    config["num-partitions"] = 99
    clients = Clients(Mailbox(grid), patience=20.0, total=6)
    assert len(clients.online()) == 5
    config["num-partitions"] = right
    assert len(clients.wait(6)) == 6


def test_who_comes_first_does_not_decide_how_many_clients_there_are():
    grid = LocalGrid(telling(), 6)
    first = next(iter(grid.contexts))
    grid.contexts[first].node_config["num-partitions"] = 99
    federation = toy_federation(parse("fedavg", "method"), rounds=1)
    strategy = strategy_for(federation, federation.method)
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    strategy.start(grid, arrays, num_rounds=1, timeout=0.5)
    assert strategy._clients.total == 6 and len(strategy.journal.records) == 1


def test_class_counts_add_up_to_the_rows():
    clients = Clients(Mailbox(LocalGrid(app(), 6)))
    facts = {"num-partitions": 6, "partition-id": 0, "num-examples": 7}
    assert clients._identity(facts | {"class-counts": [3, 4]}).counts == (3, 4)
    with pytest.raises(Refused, match="class-counts add up to 8, num-examples is 7"):
        clients._identity(facts | {"class-counts": [4, 4]})


def test_rows_in_the_mean_are_of_the_clients_that_are_known():
    clients = Clients(Mailbox(LocalGrid(app(), 6)), total=6)
    clients._identities = {10: NodeIdentity(0, 10), 11: NodeIdentity(1, 15)}
    assert clients.mean_examples() == 12.5 and clients.holders() == 0  # not all have said
    clients._identities = {n: NodeIdentity(n, 0 if n == 3 else 10 + n) for n in range(6)}
    assert clients.holders() == 5 and clients.mean_examples() == (10 + 11 + 12 + 14 + 15) / 5


def test_a_count_of_clients_is_waited_for_when_a_node_dies():
    class Dies(LocalGrid):
        """One node is gone after the first round."""

        def get_node_ids(self):
            trained = sum(m.metadata.message_type == "train" for m in self.sent)
            return list(self.contexts)[: 6 if trained < 6 else 5]

    federation = toy_federation(
        parse("fedavg", "method"), rounds=2, participation="count(clients=6)"
    )
    strategy = strategy_for(federation, federation.method, patience=1.0)
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    with pytest.raises(TooFewNodes, match="5 clients are connected, 6 are needed"):
        strategy.start(Dies(app_for(federation), 6), arrays, num_rounds=2, timeout=0.5)
