"""A client of a federation: the same rules as in a simulation, behind Flower's ClientApp."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedbasin.core.errors import bare_text
from fedbasin.core.evaluator import Evaluator
from fedbasin.core.expressions import parse
from fedbasin.core.method import Method, Plan
from fedbasin.core.needs import check_network
from fedbasin.core.net import Net
from fedbasin.core.rng import Key, root
from fedbasin.core.task import Task
from fedbasin.core.tree import mapped, tensors
from fedbasin.deploy.client_state import ClientStateStore
from fedbasin.deploy.clients import ASK
from fedbasin.deploy.cohort import MERGED
from fedbasin.deploy.frozen import FROZEN, check_frozen, hash_record
from fedbasin.deploy.own_rows import Data, Given, Held, held_by
from fedbasin.deploy.private import answer
from fedbasin.deploy.probe import GRADIENT, answer_gradient
from fedbasin.deploy.secure.client import STAGES, SecureClient
from fedbasin.deploy.secure.settings import SECURE, Session
from fedbasin.deploy.secure.update import words_of
from fedbasin.deploy.wire import (
    Codec,
    Refused,
    number,
    read_tree,
    the_record,
    write_tree,
)
from fedbasin.local import SGD, Optimiser, Trainer
from fedbasin.local.optimisers import check_plain_steps
from fedbasin.local.privacy import secret_noise, without_noise
from fedbasin.local.train import Received, Shard, Transform, class_counts
from fedbasin.models import number_sites
from fedbasin.sim import Federation
from fedbasin.sim.loop import client_key

_log = logging.getLogger("flwr")


Answer = Callable[["ClientSetup", RecordDict, Context], RecordDict]


@dataclass(frozen=True)
class ClientSetup:
    """What one client trains with.

    Args:
        method: the method's expression, which must be the server's.
        trainer: how it trains.
        rows: what it holds.
        client: its id, from 0.
        clients: how many there are.
        held_out: rows it evaluates on; its own by default.
        counts: ``"plain"`` shows its class counts to the server when asked; ``"private"`` takes
            part in the encrypted sum alone.
        secure: the least threshold with which it takes part in secure aggregation; above 0 it
            sends nothing in plain.
        metrics: what it evaluates beside the task's own metrics, as expressions.
    """

    method: str
    trainer: Trainer
    rows: Shard
    client: int
    clients: int
    held_out: Shard | None = None
    counts: Literal["plain", "private"] = "private"
    secure: int = 0
    metrics: tuple[str, ...] = ()

    @property
    def net(self) -> Net:
        """The client's network."""
        return self.trainer.net

    @property
    def examples(self) -> int:
        """How many rows the client holds."""
        return len(self.rows.labels)

    def class_counts(self) -> list[int]:
        """Count the client's rows by class."""
        counts: list[int] = class_counts(self.rows.labels, self.trainer.classes).tolist()
        return counts

    @classmethod
    def of(
        cls,
        federation: Federation,
        context: Context,
        *,
        rows: Given | None = None,
        counts: Literal["plain", "private"] = "private",
        secure: int = 0,
    ) -> ClientSetup:
        """Set up a node's client as the simulated federation has it.

        Args:
            federation: the network, the training, and the rows if none are given.
            context: Flower's context of the node.
            rows: what this client holds: a `Dataset`, whose test rows it evaluates on, arrays
                ``(x, y)``, or a `Shard`. They go through the federation's own transform.
            counts: whether it shows its class counts in plain.
            secure: the least threshold for secure aggregation; above 0 nothing goes in plain.
        """
        client, clients = place(context)
        aside = None
        if rows is None:
            known = len(federation.population)
            if clients != known:
                raise Refused(f"the node counts {clients} clients, the settings {known}")
            rows = federation.population.shard(client)
            aside = None if federation.home is None else federation.home.shard(client)
        held = Held.of(rows, client).on(federation.net.device)
        trainer = federation.trainer
        _check_classes(held, trainer.classes, client)
        method = str(federation.method)
        aside = aside or held.held_out
        more = federation.evaluator.more
        return cls(method, trainer, held.rows, client, clients, aside, counts, secure, more)


def as_floats(raw: Tensor, key: Tensor | None = None) -> Tensor:
    """Turn stored bytes into numbers in [0, 1]; leave floating inputs as they are."""
    return raw if raw.is_floating_point() else raw.to(torch.get_default_dtype()) / 255


def client_app(
    model: Callable[[], nn.Module] | nn.Module,
    data: Data,
    method: Method | str | None = None,
    *,
    classes: int = 0,
    task: Task | str = "classification",
    batch: int = 32,
    optimiser: Optimiser | str | None = None,
    clip: float | None = None,
    keep_optimiser: bool = False,
    transform: Transform | None = None,
    held_out: Data | None = None,
    counts: Literal["plain", "private"] = "private",
    secure: int = 0,
    device: str = "cpu",
) -> ClientApp:
    """Make a ClientApp from a model, the clients' data and a method.

    Args:
        model: the network, or a function that makes it.
        data: returns the rows of a client, called with ``(client, clients)`` or with Flower's
            context of the node: a `fedbasin.data.Dataset`, whose train rows are this client's and
            whose test rows it evaluates on; arrays ``(x, y)`` of any type; or a `Shard`. Nodes
            say which client they are, and where their files lie, in ``--node-config``.
        method: the method that the server runs: clients follow its rules. None takes the run
            configuration's ``method``.
        classes: number of classes; 0 where targets are no classes, or the `Dataset` says it.
        task: what the network's outputs mean, as an expression or an object.
        batch: batch size.
        optimiser: how clients step, such as ``"adamw"``; plain SGD by default.
        clip: largest norm of a gradient, or None.
        keep_optimiser: whether the client keeps the optimiser's state between rounds.
        transform: turns stored rows into network inputs; by default what suits the data.
        held_out: rows to evaluate on; by default the test rows of a `Dataset`, else the client's
            own.
        counts: whether the server may see the client's class counts in ``"plain"``.
        secure: the least threshold with which clients take part in secure aggregation; above 0
            they send nothing in plain. A node's own ``secure-threshold`` may ask for more.
        device: where the client trains.
    """
    import fedbasin.methods  # noqa: F401  (fills the catalogue)

    steps: Optimiser = SGD()
    if optimiser is not None:
        steps = parse(optimiser, "optimiser") if isinstance(optimiser, str) else optimiser

    def setup(context: Context) -> ClientSetup:
        named = context.run_config.get("method", "fedavg") if method is None else method
        chosen: Method = parse(named, "method") if isinstance(named, str) else named
        client, clients = place(context)
        module = model if isinstance(model, nn.Module) else model()
        number_sites(module)  # as the simulator does, so that dropout has its masks
        net = Net(module, device)
        held = held_by(data, context, client, clients).on(net.device)
        if classes:
            _check_classes(held, classes, client)
        try:
            check_plain_steps(chosen, steps, keep_optimiser)
            check_network(chosen, net, "the client's network")
        except ValueError as error:
            raise Refused(str(error)) from error
        trainer = Trainer(
            net=net,
            rules=chosen.rules(),
            optimiser=steps,
            batch=batch,
            transform=transform or held.transform or as_floats,
            classes=classes or held.classes or 0,
            task=parse(task, "task") if isinstance(task, str) else task,
            clip=clip,
            keep_optimiser=keep_optimiser,
        )
        aside = held.held_out
        if held_out is not None:
            aside = held_by(held_out, context, client, clients).on(net.device).rows
        return ClientSetup(str(chosen), trainer, held.rows, client, clients, aside, counts, secure)

    return app_of(setup)


def _check_classes(held: Held, classes: int, client: int) -> None:
    """Refuse data whose number of classes is not the app's."""
    if held.classes is not None and held.classes != classes:
        raise Refused(
            f"client {client}: its data has {held.classes} classes, and the app {classes}: give "
            "all clients one encoding, or the same classes"
        )


def place(context: Context) -> tuple[int, int]:
    """Return which client a node is, and how many there are, from its node configuration."""
    try:
        client = int(context.node_config["partition-id"])
        clients = int(context.node_config["num-partitions"])
    except KeyError as error:
        raise Refused(
            f"the node does not say {error}: start it with --node-config "
            "'partition-id=0 num-partitions=10'"
        ) from error
    if not 0 <= client < clients:
        raise Refused(f"partition-id {client} is not below num-partitions {clients}")
    return client, clients


def app_of(setup: Callable[[Context], ClientSetup]) -> ClientApp:
    """Make a ClientApp from a function that sets up one client.

    Whatever fails there, in `setup` too, is logged in full at the site. The server gets the error's
    bare text (`fedbasin.core.errors`).
    """
    app = ClientApp()

    def answering(answer: Answer) -> Callable[[Message, Context], Message]:
        def handle(message: Message, context: Context) -> Message:
            try:
                return Message(answer(setup(context), message.content, context), reply_to=message)
            except Exception as error:
                _log.error("this client cannot answer", exc_info=error)
                shown = bare_text(error)
            # Outside of the handler: the log has the error already. Flower sends what is raised.
            raise Refused(shown)

        return handle

    app.train()(answering(_train))
    app.evaluate()(answering(_evaluate))
    app.query()(answering(_query))
    return app


def _train(setup: ClientSetup, content: RecordDict, context: Context) -> RecordDict:
    config: ConfigRecord = the_record(content, ConfigRecord, "config")
    if config.get("fedbasin-method") != setup.method:
        raise Refused(
            f"the server runs {config.get('fedbasin-method')!r}, this client was made for "
            f"{setup.method!r}: give both the same method"
        )
    secure = SecureClient(context, setup.client, setup.secure)
    session = secure.begin(content)
    trainer = setup.trainer
    net = setup.net
    round = int(number(config, "server-round", least=1)) - 1
    epochs = int(number(config, "local-epochs", least=0))
    steps = int(number(config, "local-steps", least=0))
    plan = Plan(number(config, "lr", least=0), epochs or None, steps or None)
    arrays: ArrayRecord = the_record(content, ArrayRecord, "arrays")
    codec, vector, buffers, frozen = _received(setup, arrays, content)
    shared = mapped(lambda leaf: leaf.to(net.device), _shared(content, len(trainer.rules)))
    zero = trainer.zero_state(vector)
    store = ClientStateStore(context, str(config.get("fedbasin-name")), setup.client, zero)
    merged = the_record(content, ConfigRecord, MERGED)
    before = store.at(round, int(number(merged, "round", least=0)))
    seed = int(number(config, "fedbasin-seed"))
    key = client_key(root(seed), round, setup.client)
    if session is not None:
        key = _session_key(session, key, round, config)
    received = Received(vector, buffers, shared, before, round, key.tensor(net.device))
    # Noise that protects this client must not follow from the seed, which the server knows.
    quiet = replace(trainer, rules=without_noise(trainer.rules))
    trained = quiet.train(setup.rows, received, plan)
    noise = secret_noise(vector, trainer.rules, shared)
    trained = trained._replace(vector=trained.vector + noise)
    if session is not None:
        masked = secure.masked(session, *words_of(session, vector, buffers, trained), content)
        store.write(round, before, trained.own)
        address = MetricRecord({"server-round": round + 1, "partition-id": setup.client})
        reply = RecordDict({SECURE: masked, "metrics": address})
        if frozen:
            reply[FROZEN] = hash_record(frozen)
        return reply
    store.write(round, before, trained.own)
    reply = RecordDict(
        {
            "arrays": codec.write(trained.vector, trained.buffers, whole=False),
            "metrics": MetricRecord(
                {
                    "num-examples": trained.examples,
                    "steps": trained.steps,
                    "lr-sum": trained.lr_sum,
                    "length": trained.length,
                    "last-loss": float(trained.last_loss),
                    "train_loss": float(trained.mean_loss),
                    "server-round": round + 1,
                    "partition-id": setup.client,
                }
            ),
        }
    )
    if frozen:
        reply[FROZEN] = hash_record(frozen)
    if tensors(trained.reports):
        reply["report"], reply["report-shape"] = write_tree(trained.reports)
    return reply


def _session_key(session: Session, key: Key, round: int, config: ConfigRecord) -> Key:
    """Return the randomness of a round under secure aggregation: new in every run and every start.

    Two sums over almost the same clients, who trained on the same batches, would differ by a single
    client's update. So no two runs share batches, not even runs of one seed.
    """
    if (session.run, session.round) != (config.get("fedbasin-name"), round + 1):
        raise Refused("the round to train is not the one that keys were made for")
    return key.fold("secure", session.run, session.attempt)


def _shared(content: RecordDict, rules: int) -> tuple[Any, ...]:
    """Return what the method broadcasts, one entry for each rule."""
    if "shared" not in content:
        return tuple(() for _ in range(rules))
    shared = read_tree(
        the_record(content, ArrayRecord, "shared"),
        the_record(content, ConfigRecord, "shared-shape"),
    )
    if not isinstance(shared, tuple) or len(shared) != rules:
        raise Refused(f"the server sends for another number of rules than the client's {rules}")
    return shared


def _received(
    setup: ClientSetup, arrays: ArrayRecord, content: RecordDict
) -> tuple[Codec, Tensor, Tensor, str]:
    """Return how models travel, the one that came in where the network runs, and frozen's hash."""
    net = setup.net
    codec = Codec.of(arrays, net)
    vector, buffers = codec.read(arrays)
    frozen = check_frozen(net, codec, content)
    return codec, vector.to(net.device, net.dtype), buffers.to(net.device, net.dtype), frozen


def _evaluate(setup: ClientSetup, content: RecordDict, context: Context) -> RecordDict:
    SecureClient(context, setup.client, setup.secure).refuse_plain("scores")
    trainer = setup.trainer
    arrays: ArrayRecord = the_record(content, ArrayRecord, "arrays")
    _, vector, buffers, _ = _received(setup, arrays, content)
    rows = setup.held_out or setup.rows
    test = Evaluator(
        setup.net, rows.inputs, rows.labels, trainer.transform, trainer.task, setup.metrics
    )
    metrics: dict[str, float] = {"num-examples": test.size}
    for name, value in test.score(vector, buffers).items():
        if isinstance(value, float) and math.isfinite(value):  # AUROC of one class is undefined
            metrics[name] = value
    return RecordDict({"metrics": MetricRecord(metrics)})


def _query(setup: ClientSetup, content: RecordDict, context: Context) -> RecordDict:
    config: ConfigRecord = the_record(content, ConfigRecord, "config")
    secure = SecureClient(context, setup.client, setup.secure)
    if config.get(ASK) in STAGES:
        return secure.answer(content)
    if config.get(ASK) == GRADIENT:
        secure.refuse_plain("gradient")
        arrays: ArrayRecord = the_record(content, ArrayRecord, "arrays")
        _, vector, buffers, _ = _received(setup, arrays, content)
        gradient = setup.trainer.full_gradient(setup.rows, vector, buffers)
        return answer_gradient(gradient, setup.examples)
    counts = setup.class_counts()
    if config.get(ASK) == "score":
        secure.refuse_plain("score of its class counts")
    if config.get(ASK) == "encrypt":
        secure.check_sum(config)
    if config.get(ASK) != "who":
        return answer(config, counts, context, parse(setup.method, "method"))
    facts = MetricRecord({"partition-id": setup.client, "num-partitions": setup.clients})
    hidden = secure.floor > 0 or config.get("secure") is True
    facts["num-examples"] = min(setup.examples, 1) if hidden else setup.examples
    if config.get("class-counts"):
        secure.refuse_plain("class counts")
        if setup.counts != "plain":
            raise Refused(
                "this client does not show its class counts in plain: make its app with "
                "counts='plain', or the strategy with counts='private'"
            )
        facts["class-counts"] = counts
    return RecordDict({"metrics": facts})
