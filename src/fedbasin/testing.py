"""The laws every method obeys, for our catalogue and for methods of your own.

    from fedbasin.testing import check_method
    check_method(MyMethod())

Laws run on a toy federation: ragged clients, partial participation, real local training. There is
one for every task of `TOY_TASKS`.
A law that a method cannot obey is named on its card (`exempt`) with the reason.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedbasin.core.catalogue import card_of, needs_of
from fedbasin.core.evaluator import Evaluator
from fedbasin.core.expressions import parse, text
from fedbasin.core.method import (
    Context,
    Method,
    Plan,
    Replies,
    ReplyError,
    Served,
    Wrapped,
    Wrapper,
)
from fedbasin.core.needs import NeedError, check_task
from fedbasin.core.net import Net
from fedbasin.core.permutations import Group
from fedbasin.core.protocols import needs_gradients, shared_prefix, state_from_prefix
from fedbasin.core.rng import root, torch_draws_from
from fedbasin.core.round import Launch, ProbeRequest, Sent, Server
from fedbasin.core.rule import Finish, LocalRule, Start
from fedbasin.core.state import load, same, save
from fedbasin.core.task import (
    CLASSIFICATION,
    Binary,
    Multilabel,
    Regression,
    Survival,
    Targets,
    Task,
    Tokens,
)
from fedbasin.core.tree import flatten, mapped, tensors
from fedbasin.local import SGD, AdamW, Optimiser, Trainer
from fedbasin.methods.fedavg import FedAvg
from fedbasin.models.symmetries import permutations
from fedbasin.sim import Federation, LoopExecutor, Population
from fedbasin.sim.cohort import CohortExecutor
from fedbasin.sim.participation import sampling_of
from fedbasin.sim.rounds import Diverged

_FEW_NUMBERS = 64  # bytes of scalars that travel beside models
Law = Callable[[Method], None]

TOY_TASKS: tuple[Task, ...] = (
    CLASSIFICATION,
    Binary(),
    Regression(),
    Survival(),
    Multilabel(),
    Tokens(vocabulary=3),
)


def replies_of(
    models: Tensor,
    weights: Sequence[float] | None = None,
    clients: Sequence[int] | None = None,
    reports: tuple[Any, ...] = (),
) -> Replies:
    """Make replies by hand: models [C, P], with equal weights and ids 0..C-1 by default."""
    count = len(models)
    ones = torch.ones(count, dtype=torch.float64)
    return Replies(
        models=models,
        weights=ones if weights is None else torch.tensor(weights, dtype=torch.float64),
        clients=torch.tensor(list(range(count)) if clients is None else list(clients)),
        steps=ones,
        lr_sum=ones * 0.1,
        effective_steps=ones,
        last_loss=torch.zeros(count),
        train_loss=torch.zeros(count, dtype=torch.float64),
        buffers=models.new_zeros(count, 0),
        reports=reports,
    )


def toy_federation(
    method: Method,
    *,
    seed: int = 0,
    rounds: int = 4,
    dtype: torch.dtype = torch.float64,
    optimiser: Optimiser | None = None,
    clip: float | None = None,
    keep_optimiser: bool = False,
    module: nn.Module | None = None,
    participation: str = "count(clients=3)",
    task: Task = CLASSIFICATION,
) -> Federation:
    """Return a small federation: 6 clients of 1 to 16 rows, half of them a round.

    Inputs are 4 bytes and 3 classes in classification, 4 numbers in other tasks; of tokens 2
    positions of 2 numbers each. A method that needs what the task does not provide is refused.

    Args:
        method: what merges.
        seed: of data, model, cohorts and batches.
        rounds: how many.
        dtype: floating type.
        optimiser: the clients', plain SGD by default.
        clip: largest norm of a gradient, or None.
        keep_optimiser: whether clients keep the optimiser's state between rounds.
        module: a network for such inputs and outputs, a small one by default.
        participation: who takes part.
        task: what the network's outputs mean.
    """
    check_task(method, task)
    key = root(seed)
    sizes = (16, 9, 7, 5, 3, 1)
    toy = _toy_rows(task, sum(sizes) + 30, key.fold("toy").numpy())
    inputs = toy.inputs
    labels = toy.labels
    ends = np.cumsum(sizes)
    clients = [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    with torch_draws_from(key.fold("model")):
        net = Net(module or _ToyNetwork(*toy.widths), dtype=dtype)

    def transform(raw: Tensor, key: Tensor | None = None) -> Tensor:
        numbers = raw.to(dtype)
        return numbers / 255 if raw.dtype == torch.uint8 else numbers

    def examiner(rows: slice) -> Evaluator:
        held = torch.from_numpy(inputs[rows]), torch.from_numpy(labels[rows])
        return Evaluator(net, *held, transform, task)

    population = Population.of(inputs, labels, clients)
    optimiser = optimiser or SGD()
    trainer = Trainer(
        net=net,
        rules=method.rules(),
        optimiser=optimiser,
        batch=4,
        transform=transform,
        classes=toy.classes,
        clip=clip,
        keep_optimiser=keep_optimiser,
        task=task,
    )
    return Federation(
        method=method,
        net=net,
        trainer=trainer,
        population=population,
        evaluator=examiner(slice(56, 71)),
        executor=LoopExecutor(trainer, population, key),
        context=Context(
            net.layout,
            6,
            rounds,
            key,
            batch=4,
            examples=sum(sizes) / 6,
            effective_steps=optimiser.effective_steps,
            proxy=examiner(slice(41, 56)),
            class_counts=population.class_counts(toy.classes),
            net=net,
            permutations=None if module else _toy_permutations(*toy.widths),
            sampling=sampling_of(parse(participation, "participation"), np.arange(6), key),
        ),
        schedule=lambda round: Plan(0.3 * 0.9**round, 2),
        participation=parse(participation, "participation"),
        eligible=np.arange(6),
        key=key,
        rounds=rounds,
    )


class _ToyNetwork(nn.Module):
    """Five hidden units between inputs and outputs."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.hidden = nn.Linear(inputs, 5)
        self.head = nn.Linear(5, outputs, bias)

    def features(self, x: Tensor) -> Tensor:
        """Return the input of the head."""
        return torch.tanh(self.hidden(x))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, at every position where there are several."""
        return self.head(self.features(x))  # type: ignore[no-any-return]


class _ToyRows(NamedTuple):
    """Rows of a toy federation."""

    inputs: np.ndarray
    labels: np.ndarray
    classes: int  # 0 where targets are no classes
    widths: tuple[int, int, bool]  # inputs and outputs of the network, whether its head has a bias


def _toy_rows(task: Task, count: int, rng: np.random.Generator) -> _ToyRows:
    """Draw inputs, and targets of the task that can be learnt from them."""
    if task.kind == "classes":
        labels = rng.integers(0, 3, count)
        pixels = rng.integers(0, 256, (count, 4)).astype(np.uint8)
        pixels[np.arange(count), labels] //= 4  # something to learn
        return _ToyRows(pixels, labels, 3, (4, 3, True))
    inputs = rng.normal(size=(count, 4)).astype(np.float32)
    signal = inputs[:, :2] + 0.3 * rng.normal(size=(count, 2)).astype(np.float32)
    if task.kind == "tokens":
        labels = np.digitize(signal, [-0.5, 0.5]).astype(np.int64)
        labels[::7, 1] = -1  # padding
        outputs = task.outputs(Targets(0, 2, True))
        return _ToyRows(inputs.reshape(-1, 2, 2), labels, 0, (2, outputs, True))
    if task.kind == "binary":
        labels = (signal[:, 0] > 0).astype(np.int64)
    elif task.kind == "labels":
        labels = (signal > 0).astype(np.int64)
    elif task.kind == "survival":
        event = rng.random(count) < 0.7
        labels = np.stack([np.exp(-signal[:, 0]), event], 1).astype(np.float32)
    else:
        labels = signal[:, 0]
    classes = 2 if task.kind == "binary" else 0
    columns = 1 if labels.ndim == 1 else labels.shape[1]
    outputs = task.outputs(Targets(classes, columns, labels.dtype == np.int64))
    # Cox has no slope in the last bias, and Adam would take steps along its rounding error.
    bias = task.kind != "survival"
    return _ToyRows(inputs, labels, classes, (4, outputs, bias))


@cache
def _toy_permutations(inputs: int, outputs: int, bias: bool) -> tuple[Group, ...]:
    return permutations(_ToyNetwork(inputs, outputs, bias), torch.zeros(2, inputs))


def trajectory(method: Method, **settings: Any) -> list[Server]:
    """Return the server after each round of the toy federation."""
    return _servers(toy_federation(method, **settings))


def _servers(federation: Federation) -> list[Server]:
    server, states = federation.begin()
    return [after for after, _ in federation.rounds_from(server, states)]


def _one_round(
    method: Method, seed: int, dtype: torch.dtype = torch.float64
) -> tuple[Any, Tensor, Replies, Context]:
    """Return what `aggregate` is given in the second round: state, server, replies, context."""
    federation = toy_federation(method, seed=seed, dtype=dtype)
    server, states = federation.begin()
    server, _ = next(iter(federation.rounds_from(server, states)))
    plan = federation.method.plan(federation.schedule, federation.context.at(1, 0.0))
    context = federation.context.at(1, plan.lr, plan)
    cohort = np.sort(federation.key.fold("law", seed).numpy().permutation(6)[:4])
    if needs_gradients(method):
        start = Sent(server.send, server.buffers, (), 1)
        probe = federation.executor.probe([ProbeRequest(cohort, start)])[0]
        context = replace(context, probe=probe)
    shared = method.broadcast(server.state, server.send, context)
    sent = Sent(server.send, server.buffers, shared, 1)
    gathered = federation.executor.train([Launch(cohort, sent, plan, states)])[0]
    return server.state, server.send, gathered.replies, context


def _close(a: Tensor, b: Tensor, what: str) -> None:
    if not torch.allclose(a, b, rtol=1e-9, atol=1e-11):
        raise AssertionError(f"{what}: the models differ by {float((a - b).abs().max()):.3g}")


def law_is_fedavg_when_declared(method: Method, task: Task = CLASSIFICATION) -> None:
    """At the setting its card names, the method is FedAvg, or the method it wraps."""
    card = card_of(method)
    if isinstance(card.is_fedavg_when, str):
        return
    neutral = replace(method, **card.is_fedavg_when)  # type: ignore[type-var]
    plain = getattr(neutral, "inner", None) or FedAvg(getattr(neutral, "weighting", "samples"))
    pairs = zip(trajectory(neutral, task=task), trajectory(plain, task=task), strict=True)
    for ours, theirs in pairs:
        _close(ours.send, theirs.send, f"{text(neutral)} is not {text(plain)}")
        _close(ours.score, theirs.score, f"{text(neutral)} scores another model than {text(plain)}")


def law_differs_by_default(method: Method, task: Task = CLASSIFICATION) -> None:
    """A method as given is not FedAvg, unless it is that very method."""
    if isinstance(method, FedAvg):
        return
    fedavg = FedAvg(weighting=getattr(method, "weighting", "samples"))
    pairs = zip(trajectory(method, task=task), trajectory(fedavg, task=task), strict=True)
    if all(torch.equal(a.send, b.send) and torch.equal(a.score, b.score) for a, b in pairs):
        raise AssertionError(f"{text(method)} is FedAvg in every round")


def law_order_of_clients_is_immaterial(method: Method) -> None:
    """Permuting the replies changes nothing."""
    for seed in range(5):
        state, server, replies, context = _one_round(method, seed)
        straight, _ = method.aggregate(state, server, replies, context)
        for number in range(4):
            order = torch.randperm(len(replies.clients), generator=_generator(4 * seed + number))
            shuffled, _ = method.aggregate(state, server, replies.take(order), context)
            _close(straight.send, shuffled.send, f"seed {seed}: order of clients changes `send`")
            _close(straight.score, shuffled.score, f"seed {seed}: order changes `score`")


def law_scale_of_weights_is_immaterial(method: Method) -> None:
    """Counting samples in dozens changes nothing."""
    state, server, replies, context = _one_round(method, 1)
    scaled = replace(replies, weights=replies.weights * 12)
    a, _ = method.aggregate(state, server, replies, context)
    b, _ = method.aggregate(state, server, scaled, context)
    _close(a.send, b.send, "the scale of weights changes `send`")
    _close(a.score, b.score, "the scale of weights changes `score`")


def law_zero_weight_client_is_immaterial(method: Method) -> None:
    """A client with no sample changes nothing, whatever model it sends."""
    state, server, replies, context = _one_round(method, 2)
    absent = next(i for i in range(6) if i not in replies.clients.tolist())
    ghost = replace(replies.take(torch.tensor([0])), clients=torch.tensor([absent]))
    ghost = replace(ghost, models=ghost.models + 7, weights=torch.zeros(1, dtype=torch.float64))
    joined = _join(replies, ghost)
    a, _ = method.aggregate(state, server, replies, context)
    b, _ = method.aggregate(state, server, joined, context)
    _close(a.send, b.send, "a client of weight zero changes `send`")
    _close(a.score, b.score, "a client of weight zero changes `score`")


def law_nothing_given_is_changed(method: Method) -> None:
    """State, server model and replies are the same after a merge as before."""
    state, server, replies, context = _one_round(method, 3)
    before = _copied((state, server, replies))
    method.aggregate(state, server, replies, context)
    if not same(before, (state, server, replies)):
        raise AssertionError(f"{text(method)} changed what it was given")


def law_dtype_is_kept(method: Method) -> None:
    """Models stay in the floating type they came in."""
    for dtype in (torch.float32, torch.float64):
        state, server, replies, context = _one_round(method, 4, dtype)
        served, _ = method.aggregate(state, server, replies, context)
        for name, model in (("send", served.send), ("score", served.score)):
            if model.dtype != dtype or model.shape != server.shape:
                raise AssertionError(f"`{name}` is {model.dtype} {tuple(model.shape)}, not {dtype}")


def law_resume_equals_uninterrupted(method: Method) -> None:
    """Saving the server after any round and resuming from the file gives the same bits."""
    federation = toy_federation(method)
    whole = trajectory(method)
    server, states = federation.begin()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        while server.round < federation.rounds:
            server, _ = next(iter(federation.rounds_from(server, states)))
            save(path, (server, states.kept()))
            fresh, states = toy_federation(method).begin()
            server, kept = load(path, (fresh, states.kept()))
            states.restore(kept)
            if not same(server, whole[server.round - 1]):
                raise AssertionError(f"resuming after round {server.round} changes the result")


@dataclass(frozen=True)
class _BadUpload(LocalRule):
    """Client 0, the only one of 16 rows, sends a model that is not finite."""

    value: float

    def upload(self, carry: Any, start: Start, finish: Finish) -> Tensor:
        """Replace the model where the client is the one."""
        return torch.where(start.examples == 16, self.value, finish.vector)


@dataclass(frozen=True)
class _Spoilt(Wrapper):
    """A method with one bad client, which must never reach `aggregate`."""

    inner: Method
    value: float

    def rules(self) -> tuple[LocalRule, ...]:
        """Spoil the upload last."""
        return (*self.inner.rules(), _BadUpload(self.value))

    def broadcast(self, state: Wrapped, server: Tensor, context: Context) -> tuple[Any, ...]:
        """Send nothing to the rule that spoils."""
        return (*super().broadcast(state, server, context), ())

    def aggregate(
        self, state: Wrapped, server: Tensor, replies: Replies, context: Context
    ) -> tuple[Served, Wrapped]:
        """Fail: the round has a bad reply and should have been stopped."""
        raise AssertionError(f"{self.inner} was given a reply with {self.value}")


def law_bad_replies_are_refused(method: Method) -> None:
    """A client's NaN or Inf stops the round before `aggregate`; the others can be merged.

    The error names the client. Replies of the wrong length are refused too.
    """
    for value in (float("nan"), float("inf")):
        federation = toy_federation(_Spoilt(method, value), participation="fraction(rate=1.0)")
        try:
            next(iter(federation.rounds_from(*federation.begin())))
        except (ReplyError, Diverged) as error:
            if "client 0 " not in str(error):
                raise AssertionError(f"the error does not name client 0: {error}") from error
        else:
            raise AssertionError(f"a reply with {value} was accepted")
    state, server, replies, context = _one_round(method, 5)
    try:
        replace(replies, models=replies.models[:, 1:]).check(server)
    except ReplyError:
        pass
    else:
        raise AssertionError("replies of the wrong length were accepted")
    for left_out in range(len(replies.clients)):  # as a federation drops a bad reply
        rest = replies.take(torch.arange(len(replies.clients)) != left_out)
        served, _ = method.aggregate(state, server, rest, context)
        for name, model in (("send", served.send), ("score", served.score)):
            if model.shape != server.shape or not bool(torch.isfinite(model).all()):
                raise AssertionError(f"without one client's reply `{name}` is not a finite model")


def law_prefix_is_shared(method: Method) -> None:
    """A run equals its prefix in the rounds they share, and can be continued from it."""
    rounds = 12
    plain, common = shared_prefix(method, rounds)
    if plain == method or not common:
        return
    whole = trajectory(method, rounds=rounds)
    prefix = toy_federation(plain, rounds=rounds)
    begun, states = prefix.begin()
    for server, _ in itertools.islice(prefix.rounds_from(begun, states), common):
        own = whole[server.round - 1]
        if not same((server.send, server.score), (own.send, own.score)):
            raise AssertionError(f"round {server.round}: {method} does not equal {plain}")
    federation = toy_federation(method, rounds=rounds)
    context = federation.context.at(common, 0.0)
    state = state_from_prefix(method, server.state, server.send, context)
    for after, _ in federation.rounds_from(replace(server, state=state), states):
        own = whole[after.round - 1]
        _close(own.send, after.send, f"round {after.round}: continued from the prefix, `send`")
        _close(own.score, after.score, f"round {after.round}: continued from the prefix, `score`")


def law_cohort_equals_loop(method: Method, task: Task = CLASSIFICATION) -> None:
    """Training the cohort as one matrix gives what training client by client gives."""
    settings: list[dict[str, Any]] = [{"optimiser": SGD(0.5, 0.01), "clip": 2.0}]
    if "plain_sgd" not in needs_of(method):
        settings.append({"optimiser": AdamW(), "keep_optimiser": True})
    for given in settings:
        loop = toy_federation(method, task=task, **given)
        whole = CohortExecutor(loop.trainer, loop.population, loop.key, compiled=False)
        for a, b in zip(_servers(loop), _servers(replace(loop, executor=whole)), strict=True):
            under = f"{given['optimiser']}, round {a.round}"
            _close(a.send, b.send, f"{under}: the cohort executor sends another model")
            _close(a.score, b.score, f"{under}: the cohort executor scores another model")


def law_right_or_refused_on_every_task(method: Method) -> None:
    """On every task the method works as on classification, or is refused with an alternative.

    A method that assumes classes and does not say so on its card (`needs=("classes",)`) fails, or
    is silently FedAvg: a softmax over one output is always 1.
    """
    exempt = card_of(method).exempt
    laws = (law_is_fedavg_when_declared, law_differs_by_default, law_cohort_equals_loop)
    for task in TOY_TASKS[1:]:
        try:
            check_task(method, task)
        except NeedError as refusal:
            _, _, alternative = str(refusal).partition("; ")
            if not alternative:
                raise AssertionError(f"the refusal names no alternative: {refusal}") from refusal
            continue
        for law in laws:
            if law.__name__ in exempt:
                continue
            try:
                law(method, task)
            except (AssertionError, RuntimeError, ValueError, TypeError, IndexError) as error:
                raise AssertionError(f"on the task {task}: {error}") from error


def law_stream_equals_matrix(method: Method) -> None:
    """Where a method says that replies may be averaged as they arrive, it makes no difference."""
    weighting = method.streams()
    if weighting is None:
        return
    for seed in range(5):
        state, server, replies, context = _one_round(method, seed)
        whole, after = method.aggregate(state, server, replies, context)
        mean, after_mean = method.aggregate(state, server, replies.averaged(weighting), context)
        _close(whole.send, mean.send, "averaging replies as they arrive changes `send`")
        _close(whole.score, mean.score, "averaging replies as they arrive changes `score`")
        for (path, a), (_, b) in zip(flatten(after), flatten(after_mean), strict=True):
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                _close(a, b, f"averaging replies as they arrive changes the state at {path}")


def law_payload_is_what_the_card_says(method: Method) -> None:
    """A round moves as many models down and up as the card says, and a few numbers."""
    federation = toy_federation(method)
    card = card_of(method.base if isinstance(method, Wrapper) else method)
    servers, record = next(iter(federation.rounds_from(*federation.begin())))
    model = servers.send.numel() * servers.send.element_size()
    down = record.bytes_down / (record.replies + record.dropped)
    up = record.bytes_up / record.replies
    for name, moved, models in (("down", down, card.down), ("up", up, card.up)):
        if abs(moved - models * model) > _FEW_NUMBERS:
            raise AssertionError(
                f"{text(method)} moves {moved / model:.2f} models {name}, its card says {models}"
            )


def law_text_reads_back(method: Method) -> None:
    """The method's text parses to an equal method."""
    if parse(text(method), "method") != method:
        raise AssertionError(f"{text(method)} reads back as another method")


LAWS: tuple[Law, ...] = (
    law_is_fedavg_when_declared,
    law_differs_by_default,
    law_order_of_clients_is_immaterial,
    law_scale_of_weights_is_immaterial,
    law_zero_weight_client_is_immaterial,
    law_nothing_given_is_changed,
    law_dtype_is_kept,
    law_resume_equals_uninterrupted,
    law_bad_replies_are_refused,
    law_prefix_is_shared,
    law_cohort_equals_loop,
    law_right_or_refused_on_every_task,
    law_stream_equals_matrix,
    law_payload_is_what_the_card_says,
    law_text_reads_back,
)


def check_method(method: Method, laws: Sequence[Law] = LAWS) -> None:
    """Check a method against the laws; those its card exempts, with a reason, are left out."""
    exempt = card_of(method).exempt
    for law in laws:
        if law.__name__ in exempt:
            continue
        try:
            law(method)
        except AssertionError as error:
            name = law.__name__
            error.add_note(
                f"{type(method).__name__} breaks {name}. If its paper asks for that, say so in its "
                f'card: @entry("method", ..., exempt={{"{name}": "the reason"}})'
            )
            raise


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _copied(tree: Any) -> Any:
    return mapped(torch.clone, tree)


def _join(replies: Replies, more: Replies) -> Replies:
    below = iter(tensors(more))
    return mapped(lambda column: torch.cat([column, next(below)]), replies)
