"""Whatever one client puts into any field of any message, the federation goes on without it.

Each case draws a method, a kind of message and what is done to one of its fields, by the case's
number. In the normal suite every method has one case. A long run:

    FEDBASIN_FUZZ=100000 python -m pytest tests/deploy/test_fuzz.py

`FEDBASIN_FUZZ_FROM=5000` begins at another number, and a failure names the number of its case.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")

from deploy.grids import LocalGrid, app_for, over_the_wire, strategy_for
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

import fedbasin.methods  # noqa: F401  (fills the catalogue)
from fedbasin.core.catalogue import cards
from fedbasin.core.expressions import parse
from fedbasin.core.protocols import needs_gradients
from fedbasin.core.rng import Key
from fedbasin.core.tree import tensors
from fedbasin.deploy import ServerSide
from fedbasin.deploy.wire import LARGEST, SKELETON
from fedbasin.testing import toy_federation

CULPRIT = 2
CLIENTS = 6
ROUNDS = 2
METHODS = sorted(c.name for c in cards("method") if c.make.__module__.startswith("fedbasin."))
PRIVATE = "fedwcm(momentum='scores')"  # with class counts that only their sum shows
if importlib.util.find_spec("tenseal"):
    METHODS.append(PRIVATE)
WITHOUT_NOISE = {"dp": "dp(noise=0.0)"}  # the noise is new in every run
FIRST = int(os.environ.get("FEDBASIN_FUZZ_FROM", "0"))
CASES = int(os.environ.get("FEDBASIN_FUZZ", str(len(METHODS))))
BLOCK = 12  # cases in one test
KINDS = ("train", "train", "train", "who", "evaluate", "gradient")

NUMBERS = [0, -1, 1, 2**31, 2**53, 2**63 - 1, -(2**63), 1e-300, -1e-300, 0.5, 1e15, 1e30, 1e308]
NUMBERS += [-1e308, float("nan"), float("inf"), -float("inf")]
LISTS = [[], [1], [1.5] * 3, [2**62] * 3, [-1, 2, 3], [float("nan")], [7] * 10_000]
TEXTS = ["", "x", "[" * 5000, "null", "[]", "{}", '{"=": 1}', "[null, null]", "[[], {}]", "\x00"]
TEXTS += ['[{"a": null}]', '[{"__class__": null}]', '{"0": null}', "[1e999]", "9" * 70_000]


def changed_values(values, draws):
    """Return an array with other values, or of another shape or type."""
    kind = draws.integers(12)
    odd = [np.nan, np.inf, -np.inf, 1e14, -1e14, 1e30, 0.0]
    if kind < 3 and values.size and values.dtype.kind == "f":
        changed = values.copy()
        changed.reshape(-1)[draws.integers(values.size)] = odd[draws.integers(len(odd))]
        return changed
    if kind < 5 and values.dtype.kind == "f":
        return np.full_like(values, odd[draws.integers(len(odd))])
    if kind == 5:
        return values * values.dtype.type(draws.choice([-1, 0, 3, 100]))
    if kind == 6:
        return values.reshape(-1)
    if kind == 7:
        return values[..., :-1] if values.ndim else values.reshape(1)
    if kind == 8:
        return np.stack([values, values])
    types = [np.float16, np.float32, np.float64, np.int8, np.int64, np.bool_, np.complex64]
    with np.errstate(all="ignore"):
        return values.astype(types[draws.integers(len(types))])


def changed_array(array, draws):
    """Return an array whose values, bytes or description are others."""
    if draws.random() < 0.6:
        return Array(np.ascontiguousarray(changed_values(array.numpy(), draws)))
    data = bytearray(array.data)
    kind = draws.integers(4)
    if kind == 0:
        for _ in range(draws.integers(1, 9)):
            data[draws.integers(len(data))] = draws.integers(256)
    elif kind == 1:
        data = data[: draws.integers(len(data))]
    elif kind == 2:
        place = draws.integers(min(128, len(data)))  # in the header
        data[place] = draws.integers(256)
    else:
        data += bytes(int(draws.integers(1, 64)))
    stype = "numpy.ndarray" if draws.random() < 0.9 else "torch.tensor"
    return Array(dtype=array.dtype, shape=array.shape, stype=stype, data=bytes(data))


def change_arrays(record, draws):
    name = list(record)[draws.integers(len(record))]
    kind = draws.integers(8)
    if kind == 0:
        del record[name]
    elif kind == 1:
        record["another" if draws.random() < 0.5 else name + "x"] = record[name]
    elif kind == 2:
        values = [record[n] for n in record]
        for n, value in zip(list(record), reversed(values), strict=True):
            record[n] = value
    else:
        record[name] = changed_array(record[name], draws)


def change_numbers(record, draws):
    name = list(record)[draws.integers(len(record))]
    kind = draws.integers(10)
    if kind == 0:
        del record[name]
    elif kind == 1:
        record[f"another{draws.integers(9)}"] = NUMBERS[draws.integers(len(NUMBERS))]
    elif kind == 2:
        record[name] = LISTS[draws.integers(len(LISTS))]
    else:
        record[name] = NUMBERS[draws.integers(len(NUMBERS))]


def change_texts(record, draws):
    name = list(record)[draws.integers(len(record))]
    value = record[SKELETON] if SKELETON in record else record[name]
    if draws.random() < 0.5:
        others = [*TEXTS, b"", b"\xff" * 9, True, 7, 1e308, [], ["a"], [1]]
        record[name] = others[draws.integers(len(others))]
    elif SKELETON in record and isinstance(value, str):
        place = draws.integers(len(value))
        record[SKELETON] = value[:place] + chr(draws.integers(32, 1000)) + value[place + 1 :]
    elif isinstance(value, bytes) and value:
        record[name] = changed_bytes(value, draws)
    elif isinstance(value, list) and value:
        record[name] = changed_list(value, draws)
    else:
        record[name] = NUMBERS[draws.integers(len(NUMBERS))]


def changed_bytes(value, draws):
    """Return other bytes: some changed, cut off, or more of them."""
    data = bytearray(value)
    kind = draws.integers(3)
    if kind == 0:
        for _ in range(draws.integers(1, 9)):
            data[draws.integers(len(data))] = draws.integers(256)
    elif kind == 1:
        data = data[: draws.integers(len(data))]
    else:
        data += bytes(int(draws.integers(1, 1 << 19)))
    return bytes(data)


def changed_list(value, draws):
    """Return a list of other numbers, or of fewer or more."""
    kind = draws.integers(3)
    if kind == 0:
        return value[1:]
    if kind == 1:
        return value + value
    whole = [n for n in NUMBERS if isinstance(n, int)]
    return [whole[draws.integers(len(whole))], *value[1:]]


def change_records(content, draws):
    keys = list(content)
    key = keys[draws.integers(len(keys))]
    kind = draws.integers(4)
    if kind == 0:
        del content[key]
    elif kind == 1:
        content["another"] = content[key]
    elif kind == 2:
        content[key] = [MetricRecord(), ArrayRecord(), ConfigRecord()][draws.integers(3)]
    else:
        content["extra"] = ArrayRecord({"a": Array(np.zeros(1 << draws.integers(19)))})


def change_envelope(reply, draws):
    """Return what arrives in place of a reply: nothing, two, an error, or with another address."""
    kind = draws.integers(5)
    if kind == 0:
        return []
    if kind == 1:
        return [reply, reply]
    if kind == 2:
        code = int(draws.choice([0, 1, 2, 3, 7, 99]))
        wrong = Message(Error(code, TEXTS[draws.integers(len(TEXTS))]), reply_to=reply)
        for name in ("_reply_to_message_id", "_src_node_id", "_dst_node_id"):
            wrong.metadata.__dict__[name] = reply.metadata.__dict__[name]
        return [wrong]
    if kind == 3:
        reply.metadata.__dict__["_reply_to_message_id"] = "made-up"
    else:
        reply.metadata.__dict__["_src_node_id"] = 4242
    return [reply]


def mutated(reply, draws):
    """Return what arrives in place of a reply."""
    place = draws.random()
    if place < 0.1:
        return change_envelope(reply, draws)
    if place < 0.2:
        change_records(reply.content, draws)
        return [reply]
    records = [r for r in reply.content.values() if len(r)]
    if not records:
        return [reply]
    record = records[draws.integers(len(records))]
    if isinstance(record, ArrayRecord):
        change_arrays(record, draws)
    elif isinstance(record, MetricRecord):
        change_numbers(record, draws)
    else:
        change_texts(record, draws)
    return [reply]


@dataclass
class Fuzz:
    """What one client does in one case: the same thing in every round."""

    case: int
    kind: str

    def trained(self, client, reply):
        return self.forged(reply, "train") if client == CULPRIT else [reply]

    def answered(self, client, reply):
        if client != CULPRIT:
            return [reply]
        metrics = reply.content.get("metrics", {})
        kind = "who" if "num-partitions" in metrics else "evaluate"
        if "config" in reply.content:
            kind = "private"
        return self.forged(reply, "gradient" if "shape" in reply.content else kind)

    def forged(self, reply, kind):
        if kind != self.kind:
            return [reply]
        if kind == "private" and self.question() not in reply.content["config"]:
            return [reply]
        arrived = mutated(reply, Key(self.case).fold("fuzz").numpy())
        return [over_the_wire(r) for r in arrived]

    def question(self):
        """Which of the questions about private counts is answered otherwise."""
        keys = ("counts", "counts", "score", "public", "total")
        return keys[Key(self.case).fold("question").numpy().integers(len(keys))]


class Lines(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def federation_of(method):
    return toy_federation(method, rounds=ROUNDS, participation="fraction(rate=1.0)")


@cache
def without_culprit(expression):
    """The simulator's model without the client."""
    federation = federation_of(parse(expression, "method"))
    rest = np.array([c for c in range(CLIENTS) if c != CULPRIT])
    federation = replace(federation, eligible=rest)
    server, states = federation.begin()
    return list(federation.rounds_from(server, states))[-1][0].send


def check(case):
    draws = Key(case).fold("case").numpy()
    expression = METHODS[case % len(METHODS)]
    expression = WITHOUT_NOISE.get(expression, expression)
    private = expression == PRIVATE
    fuzz = Fuzz(case, "private" if private else KINDS[draws.integers(len(KINDS))])
    federation = federation_of(parse(expression, "method"))
    evaluates = 1.0 if fuzz.kind == "evaluate" else 0.0
    settings = {"server": ServerSide.of(federation, counts="private")} if private else {}
    strategy = strategy_for(
        federation, federation.method, fraction_evaluate=evaluates, patience=0.3, **settings
    )
    append, refusals = strategy.journal.append_audited, []

    def noted(record, audited):
        refusals.extend(audited.refused)
        append(record, audited)

    strategy.journal.append_audited = noted
    grid = LocalGrid(
        app_for(federation), CLIENTS, fuzz.trained, misstate=fuzz.answered, carry=lambda m: m
    )
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    log = logging.getLogger("flwr")
    log.addHandler(lines := Lines())
    what = f"case {case}: {expression}, {fuzz.kind}"
    try:
        strategy.start(grid, arrays, num_rounds=ROUNDS, timeout=0.1)
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    finally:
        log.removeHandler(lines)
    records = strategy.journal.records
    assert len(records) == ROUNDS, what
    server = strategy._server
    for values in (server.send, server.score, server.buffers, *tensors(server.state)):
        if values.is_floating_point() and values.numel():
            assert float(values.abs().max()) <= LARGEST, what
    for record in records:
        for value in (record.train_loss, *record.metrics.values()):
            assert not isinstance(value, float) or np.isfinite(value), (what, record.metrics)
    others = [why for why in strategy.journal.refused if not why.startswith(f"client {CULPRIT}")]
    node = next(n for n in grid.contexts if grid.client(n) == CULPRIT)
    others = [why for why in others if not why.startswith(f"node {node}")]
    others += [each for each in refusals if each.client != CULPRIT and each.node != node]
    assert not others, (what, others)
    if private:
        counts = strategy._context.private_counts
        assert counts.scores.abs().max() <= 1 + 1e-6 and counts.total.min() >= 0, what
        assert 0 < counts.total.sum() <= counts.rows.sum(), what
    left_out = [r for r in records if r.replies < CLIENTS]
    named = [li for li in lines.lines if f"client {CULPRIT}" in li or str(node) in li]
    assert not left_out or named, (what, lines.lines)
    assert all(r.replies >= CLIENTS - 1 for r in records), what
    # A refused reply does not take back the gradient that its client has sent before.
    plain = not needs_gradients(federation.method)
    if fuzz.kind == "train" and len(left_out) == ROUNDS and plain:
        expected = without_culprit(expression)
        torch.testing.assert_close(
            server.send, expected, rtol=1e-9, atol=1e-11, msg=lambda m: f"{what}: {m}"
        )
    return bool(left_out)


BLOCKS = [range(i, min(i + BLOCK, FIRST + CASES)) for i in range(FIRST, FIRST + CASES, BLOCK)]


@pytest.mark.parametrize("cases", BLOCKS, ids=lambda cases: f"{cases.start}-{cases.stop - 1}")
def test_one_client_cannot_stop_spoil_or_blame(cases):
    failed = []
    for case in cases:
        try:
            check(case)
        except AssertionError as error:
            failed.append(str(error)[:600])
    assert not failed, "\n".join(failed)


def test_cases_repeat_and_most_do_something():
    """The same number forges the same, and the forgeries reach what is checked."""
    fuzzes = []
    for _ in range(2):
        fuzz = Fuzz(1, "train")
        record = RecordDict({"metrics": MetricRecord({"num-examples": 3, "steps": 2})})
        asked = Message(RecordDict(), 1, "train")
        asked.metadata.__dict__["_message_id"] = "1"
        (reply,) = fuzz.trained(CULPRIT, Message(record, reply_to=asked)) or [None]
        fuzzes.append(repr(reply and reply.content))
    assert fuzzes[0] == fuzzes[1]
    assert sum(check(case) for case in range(2, 8)) >= 1
