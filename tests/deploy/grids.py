"""A federation inside the test: Flower's messages and apps, without its processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from fedbasin.core.method import Method
from fedbasin.core.rng import Key
from fedbasin.deploy import ClientSetup, FedbasinStrategy, Handling, Records, app_of, strategy_of
from fedbasin.sim import Federation


def over_the_wire(message: Message) -> Message:
    """Take a message apart into the bytes that travel, and put it together again."""
    contents = {i: part.deflate() for i, part in get_all_nested_objects(message).items()}
    ids = message.metadata
    arrived = inflate_object_from_contents(message.object_id, contents)
    arrived.metadata.__dict__["_message_id"] = ids.message_id
    return arrived


Tamper = Callable[[int, Message], Iterable[Message]]  # (client, reply) -> what arrives instead


@dataclass
class LocalGrid(Grid):
    """Nodes that answer at once, each with a context of its own."""

    app: ClientApp
    clients: int
    tamper: Tamper = lambda client, reply: [reply]
    shuffle: int = 7
    node_config: dict = field(default_factory=dict)
    misstate: Tamper = lambda client, reply: [reply]  # the same for what is not training
    carry: Callable[[Message], Message] = over_the_wire
    contexts: dict[int, Context] = field(default_factory=dict)
    sent: list[Message] = field(default_factory=list)
    _inbox: dict[str, list[Message]] = field(default_factory=dict)

    def __post_init__(self):
        TaskIdentity.run_id = 1
        TaskIdentity.node_id = 1
        TaskIdentity.task_id = 1
        ids = Key(self.shuffle).fold("nodes").numpy().permutation(self.clients) + 1000
        for client, node in enumerate(ids.tolist()):
            self.add(client, node)

    def add(self, client: int, node: int) -> None:
        where = {"partition-id": client, "num-partitions": self.clients, **self.node_config}
        self.contexts[node] = Context(1, node, where, RecordDict(), {})

    def client(self, node: int) -> int:
        return self.contexts[node].node_config["partition-id"]

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def get_nodes(self):
        return [NodeInfo(node_id=n, public_key=self.key(n)) for n in self.get_node_ids()]

    def key(self, node: int) -> bytes:
        """The public key of a node, as the SuperLink knows it."""
        return f"key of node {node}".encode()

    def get_node_ids(self):
        return list(self.contexts)

    def push_messages(self, messages):
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid4())
            self.sent.append(message)
            node = message.metadata.dst_node_id
            context = self.contexts[node]
            arrived = self.carry(message)
            try:
                reply = self.app(arrived, context)
            except Exception as error:  # as Flower's client process does
                reply = Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=arrived)
            reply.metadata.__dict__["_src_node_id"] = node
            replies = [reply]
            if not reply.has_error():
                trains = message.metadata.message_type == "train"
                forge = self.tamper if trains else self.misstate
                replies = list(forge(self.client(node), reply))
            self._inbox[message.metadata.message_id] = [self.carry(r) for r in replies]
        return [m.metadata.message_id for m in messages]

    def pull_messages(self, message_ids):
        return [reply for i in list(message_ids) for reply in self._inbox.pop(i, [])]

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(list(messages)))


def app_for(federation: Federation) -> ClientApp:
    """A ClientApp whose clients are those of a simulation."""
    return app_of(lambda context: ClientSetup.of(federation, context, counts="plain"))


def strategy_for(federation: Federation, method: Method, **settings) -> FedbasinStrategy:
    """A strategy that does what a simulation does."""
    handling = {"patience": 5.0} | _taken(settings, ("guard", "stream", "patience"))
    records = _taken(settings, ("folder", "checkpoint_every", "log"))
    given = dict(fraction_evaluate=0, handling=Handling(**handling), records=Records(**records))
    federation = replace(federation, method=method)
    return strategy_of(federation, seed=0, **(given | settings))


def _taken(settings: dict, names: Iterable[str]) -> dict:
    """Take the settings of one object of the strategy's out of all settings."""
    return {name: settings.pop(name) for name in names if name in settings}
