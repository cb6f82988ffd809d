"""A federation that cannot learn stops at once, says why, and never ends as finished."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")

from counting import Clock
from deploy.grids import LocalGrid, app_for, strategy_for
from deploy.test_sklearn import CLIENTS, first, logistic_app
from flwr.app import ArrayRecord, Error, Message, MessageType

from fedbasin.cli.app import app as command
from fedbasin.core.evaluator import Evaluator
from fedbasin.core.expressions import parse
from fedbasin.core.net import Net
from fedbasin.core.record import RunFolder
from fedbasin.core.task import Binary, Classification
from fedbasin.deploy import FedbasinStrategy, Handling, Records, Secure, ServerSide
from fedbasin.deploy.clients import TooFewNodes, reasons_of
from fedbasin.deploy.merge import NothingMerged
from fedbasin.testing import toy_federation

EVERYONE = "fraction(rate=1.0)"
NEVER = 1e6  # seconds that a test must not wait


@pytest.fixture
def no_waiting(monkeypatch):
    """A round in which a second is waited fails."""

    def sleep(seconds):
        raise AssertionError("the round waits")

    clock = Clock(tick=0.01)
    monkeypatch.setattr(clock, "sleep", sleep)
    for room in ("cohort", "secure.cohort", "probe"):
        monkeypatch.setattr(f"fedbasin.deploy.{room}.time", clock)


def failing(reply, text="ValueError: no data today"):
    """The answer of a client whose app raises."""
    error = Message(Error(2, text), reply_to=reply)
    error.metadata.__dict__.update(reply.metadata.__dict__)
    return [error]


def with_nan(reply):
    for name, array in reply.content["arrays"].items():
        reply.content["arrays"][name] = type(array)(array.numpy() * np.nan)
    return [reply]


class Run:
    """A federation of six clients on a grid."""

    def __init__(self, expression="fedavg", rounds=1, timeout=NEVER, prepare=None, **settings):
        forge = {n: settings.pop(n) for n in ("tamper", "misstate") if n in settings}
        method = parse(expression, "method") if isinstance(expression, str) else expression
        federation = toy_federation(method, rounds=rounds, participation=EVERYONE)
        self.grid = LocalGrid(app_for(federation), 6, **forge)
        if prepare is not None:
            prepare(self.grid)
        self.strategy = strategy_for(federation, method, **({"patience": NEVER} | settings))
        self.arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
        self.rounds = rounds
        self.timeout = timeout

    def start(self):
        self.strategy.start(self.grid, self.arrays, num_rounds=self.rounds, timeout=self.timeout)

    def fails(self, kind=NothingMerged):
        with pytest.raises(kind) as error:
            self.start()
        return str(error.value)

    def trained(self):
        """The clients that were asked to train, in order."""
        sent = [m.metadata for m in self.grid.sent if m.metadata.message_type == MessageType.TRAIN]
        return [self.grid.client(each.dst_node_id) for each in sent]


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


# All replies refused


@pytest.mark.parametrize(
    ("tamper", "why"),
    [
        (lambda c, r: with_nan(r), "hidden.weight holds NaN or Inf"),
        (lambda c, r: failing(r), "ValueError: no data today"),
    ],
)
def test_a_round_whose_replies_are_all_refused_ends_at_once_with_the_reasons(
    tamper, why, no_waiting, tmp_path
):
    run = Run(tamper=tamper, folder=tmp_path)
    told = run.fails(TooFewNodes)
    assert told == (
        "round 1: 0 of 2 replies can be used, and nobody is left to ask: client 0, client 1, "
        f"client 2, 3 more: {why}; correct this and start the run again"
    )
    assert sorted(run.trained()) == [0, 1, 2, 3, 4, 5]
    assert (summary(tmp_path)["status"], summary(tmp_path)["reason"]) == ("failed", told)
    assert not (tmp_path / "model.safetensors").exists()


def test_reasons_of_clients_are_bounded_and_printable(no_waiting):
    """Twelve kilobytes that would clear a terminal, other ones from each client."""
    told = Run(tamper=lambda c, r: failing(r, f"{c}\x1b[2J{'x' * 12_000}")).fails(TooFewNodes)
    assert told.isprintable() and "client 0: 0\\x1b[2Jxxx" in told and "; 3 more;" in told
    assert len(told) < 1200


def test_reasons_are_told_once_for_all_clients_that_share_them():
    failed = {4: "late", 1: "NaN", 2: "NaN", 3: "NaN", 7: "NaN", 8: "a", 9: "b"}
    told = "client 1, client 2, client 3, 1 more: NaN; client 4: late; client 8: a; 1 more"
    assert reasons_of(failed) == told
    assert reasons_of({}) == ""


def test_with_one_good_reply_of_two_the_round_ends_when_all_have_answered(no_waiting):
    run = Run(tamper=lambda c, r: [r] if c == 0 else with_nan(r))
    assert "round 1: 1 of 2 replies can be used, and nobody is left" in run.fails(TooFewNodes)
    assert sorted(run.trained()) == [0, 1, 2, 3, 4, 5]


def test_a_client_that_is_not_there_yet_is_waited_for_while_a_reply_is_good(clock, monkeypatch):
    """It comes in the first second that the round waits, and makes up the minimum."""
    run = Run(tamper=lambda c, r: [r] if c in (0, 5) else with_nan(r))
    (late,) = [node for node in run.grid.contexts if run.grid.client(node) == 5]
    context = run.grid.contexts.pop(late)
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        run.grid.contexts[late] = context

    monkeypatch.setattr(clock, "sleep", sleep)
    run.start()
    assert len(waits) == 1 and run.strategy.journal.records[0].replies == 2


def test_where_all_are_refused_nobody_else_is_waited_for(no_waiting):
    def without_client_5(grid):
        grid.contexts = {n: c for n, c in grid.contexts.items() if grid.client(n) != 5}

    run = Run(tamper=lambda c, r: with_nan(r), prepare=without_client_5)
    assert "nobody is left to ask" in run.fails(TooFewNodes)
    assert sorted(run.trained()) == [0, 1, 2, 3, 4]


def test_replies_that_agree_on_no_report_end_the_round(no_waiting):
    """Two clients with a report of another shape each: neither is the majority's."""

    def tamper(client, reply):
        if client == 1:
            del reply.content["report"], reply.content["report-shape"]
        return [reply] if client < 2 else with_nan(reply)

    told = Run("scaffold", tamper=tamper).fails(TooFewNodes)
    assert "1 of 2 replies can be used, and nobody is left to ask" in told


def test_gradients_that_are_all_refused_end_the_round(no_waiting):
    def misstate(client, reply):
        return failing(reply) if "arrays" in reply.content else [reply]

    told = Run("mime", misstate=misstate).fails(TooFewNodes)
    assert "0 of 2 clients sent a gradient (client 0, client 1, client 2, 3 more: Value" in told


def test_clients_that_take_no_part_in_secure_aggregation_end_the_run(no_waiting):
    def misstate(client, reply):
        return [reply] if "metrics" in reply.content else failing(reply)

    run = Run(secure=Secure(clip=1.0, rows=16), misstate=misstate)
    told = run.fails(TooFewNodes)
    assert "round 1: 0 clients sent keys, 5 are needed, and nobody is left to ask" in told
    assert "client 0, client 1, client 2, 3 more: secure-keys: ValueError: no data today" in told


def test_clients_that_cannot_train_under_secure_aggregation_end_the_run(no_waiting, tmp_path):
    """Their keys were good, so it is the first round's end that shows it."""
    secure = Secure(clip=1.0, rows=16)
    run = Run(rounds=3, secure=secure, tamper=lambda c, r: failing(r), folder=tmp_path)
    told = run.fails()
    assert "round 1 (no round was merged before): all replies were refused: client 0" in told
    assert summary(tmp_path)["status"] == "failed" and len(run.trained()) == 6


# Merges that fail


def breaking(monkeypatch, when=lambda context: True):
    """Let FedAvg raise in chosen rounds."""
    kind = type(parse("fedavg", "method"))
    whole = kind.serve

    def serve(self, state, server, mean, context):
        if when(context):
            raise KeyError("the proxy")
        return whole(self, state, server, mean, context)

    monkeypatch.setattr(kind, "serve", serve)


@pytest.mark.parametrize("secure", [None, Secure(clip=1.0, rows=16)], ids=["plain", "secure"])
def test_a_run_stops_when_its_first_merge_fails_and_begins_anew(secure, tmp_path, monkeypatch):
    with monkeypatch.context() as broken:
        breaking(broken)
        run = Run(rounds=3, secure=secure, folder=tmp_path)
        told = run.fails()
    assert told == (
        "round 1 (no round was merged before): the merge failed, for no single client's fault: "
        "KeyError: 'the proxy'; correct this and start the run again"
    )
    found = summary(tmp_path)
    assert (found["status"], found["reason"]) == ("failed", told)
    assert (found["rounds"], found["merge_refused"]) == (1, 1)
    assert sorted(run.trained()) == [0, 1, 2, 3, 4, 5]
    assert not (tmp_path / "model.safetensors").exists()
    assert len((tmp_path / "merged.jsonl").read_text().splitlines()) == 1
    again = Run(rounds=3, secure=secure, folder=tmp_path)
    again.start()
    assert [r.round for r in again.strategy.journal.records] == [1, 2, 3]
    assert summary(tmp_path)["status"] == "finished"


def test_a_single_clients_fault_stops_nothing(monkeypatch):
    kind = type(parse("fedavg", "method"))
    whole = kind.mean

    def mean(self, replies):
        if 2 in replies.clients.tolist():
            raise KeyError("what client 2 reports")
        return whole(self, replies)

    monkeypatch.setattr(kind, "mean", mean)
    run = Run(rounds=2, stream=False)
    run.start()
    assert run.strategy.journal.merged.tolist() == [2, 2, 0, 2, 2, 2]
    assert list(run.strategy.journal.refused.values()) == [2]


@pytest.mark.parametrize("failed", [9, 10])
def test_a_run_goes_on_for_some_rounds_without_a_merge_and_not_for_ever(
    failed, tmp_path, monkeypatch
):
    """Round 1 is merged, then so many fail; after a restart the round that stopped it is next."""
    with monkeypatch.context() as broken:
        breaking(broken, lambda context: 1 <= context.round <= failed)
        run = Run(rounds=13, folder=tmp_path)
        if failed == 9:
            run.start()
            assert summary(tmp_path)["status"] == "finished"
            assert summary(tmp_path)["merge_refused"] == 9
            return
        told = run.fails()
    assert "round 11 (10 rounds running): the merge failed" in told
    assert len(run.trained()) == 6 * 11 and summary(tmp_path)["status"] == "failed"
    again = Run(rounds=13, folder=tmp_path)
    again.start()
    assert [r.round for r in again.strategy.journal.records] == list(range(1, 14))
    assert len(again.trained()) == 6 * 3 and summary(tmp_path)["merge_refused"] == 9


def test_a_run_that_merged_no_reply_does_not_end_as_finished(tmp_path):
    def tamper(client, reply):
        reply.content["metrics"]["num-examples"] = 0
        return [reply]

    run = Run(rounds=2, tamper=tamper, folder=tmp_path)
    told = run.fails()
    assert told == "no reply of 2 rounds was merged: the log says why"
    assert summary(tmp_path)["status"] == "failed" and summary(tmp_path)["rounds"] == 2
    start = toy_federation(parse("fedavg", "method")).net.initial()[0]
    assert torch.equal(run.strategy._server.send, start)


# The clients' losses


def logistic(method, name, **settings):
    strategy = FedbasinStrategy(
        method, fraction_evaluate=0, handling=Handling(patience=3.0), **settings
    )
    grid = LocalGrid(logistic_app(name), CLIENTS)
    strategy.start(grid, first(), num_rounds=4, timeout=NEVER)
    return strategy


@pytest.mark.parametrize("method", ["fedcda", "ima(fedcda)"])
def test_a_method_that_needs_the_clients_loss_says_so(method, no_waiting, tmp_path):
    with pytest.raises(TooFewNodes) as error:
        logistic(method, "train_logloss", records=Records(tmp_path))
    told = str(error.value)
    assert "client 0, client 1, client 2: it reports no train_loss, which the method needs" in told
    assert "it has num-examples, train_logloss" in told
    assert summary(tmp_path)["status"] == "failed"


def test_a_method_that_needs_the_clients_loss_takes_it_by_its_name():
    assert len(logistic("fedcda", "train_loss").journal.records) == 4


def test_without_the_loss_term_no_loss_is_needed():
    strategy = logistic("fedcda(loss_term=False)", "train_logloss")
    assert not strategy.journal.refused and strategy.journal.merged.tolist() == [4, 4, 4]


# What the server is given


def module():
    torch.manual_seed(3)
    return nn.Linear(4, 3)


ROWS = np.linspace(-1, 1, 40, dtype=np.float32).reshape(10, 4), np.arange(10) % 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("of", [lambda rows: rows, torch.from_numpy], ids=["numpy", "torch"])
def test_arrays_and_a_module_are_what_an_evaluator_is(dtype, of):
    here = ServerSide(
        net=module().to(dtype), proxy=tuple(map(of, ROWS)), evaluator=tuple(map(of, ROWS))
    )
    net = Net(module().to(dtype), dtype=dtype)
    inputs, labels = map(torch.from_numpy, ROWS)
    expected = Evaluator(net, inputs, labels, lambda rows, key: rows.to(dtype), Classification())
    model = net.initial()[0]
    assert here.proxy_rows.size == 10
    assert torch.equal(here.proxy_rows.loss(model), expected.loss(model))
    assert here.proxy_rows.logits(model).dtype == dtype
    assert here.test_rows.score(model) == expected.score(model)
    assert here.headline().name == "accuracy" and here.known_classes() == 3


def test_a_method_learns_from_arrays_on_the_server():
    """As the page on federations has it: fedlaw, rows and the app's own module."""
    federation = toy_federation(parse("fedlaw", "method"), rounds=2, participation=EVERYONE)
    rows = federation.context.proxy
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    models = []
    for given in (rows, (rows.transform(rows.inputs, None), rows.labels)):
        server = replace(ServerSide.of(federation), context=None, proxy=given)
        strategy = strategy_for(federation, federation.method, server=server)
        strategy.start(LocalGrid(app_for(federation), 6), arrays, num_rounds=2, timeout=5)
        models.append(strategy._server.send)
    torch.testing.assert_close(*models, rtol=1e-12, atol=1e-12)
    assert not torch.equal(models[1], federation.net.initial()[0])


WRONG = [
    (dict(proxy=ROWS[0]), "proxy is a ndarray; give arrays (x, y), or an Evaluator"),
    (dict(proxy=list(ROWS)), "proxy is a list; give arrays (x, y), or an Evaluator"),
    (dict(proxy=(*ROWS, 1)), "proxy is a tuple; give arrays (x, y), or an Evaluator"),
    (dict(proxy="rows.csv"), "proxy is 'rows.csv'; give arrays (x, y), or an Evaluator"),
    (dict(evaluator=ROWS[0]), "evaluator is a ndarray; give arrays (x, y), or an Evaluator"),
    (dict(proxy=ROWS), "proxy is arrays, and net is missing: give the module"),
    (dict(evaluator=ROWS), "evaluator is arrays, and net is missing: give the module"),
    (dict(net=nn.Linear), "net is a type; give a torch module"),
    (dict(net=module(), proxy=(ROWS[0], ROWS[1][:3])), "inputs has 10 rows and labels has 3"),
    (dict(net=module(), proxy=(ROWS[0][:, :2], ROWS[1])), "the network cannot score proxy=(x, y)"),
    (dict(net=module(), proxy=(ROWS[0], ROWS[1] + 3)), "the network cannot score proxy=(x, y)"),
    (dict(net=module(), proxy=(ROWS[0][:0], ROWS[1][:0])), "holds no rows"),
    (dict(net=module(), evaluator=(ROWS[0][:, :2], ROWS[1])), "cannot score evaluator=(x, y)"),
    (dict(net=module(), task=Binary(), proxy=ROWS), "cannot score proxy=(x, y)"),
    (dict(task="binary"), "task is 'binary'; give a task such as Binary()"),
    (dict(statistics="keep"), "statistics is 'keep'; give Statistics('keep') or another policy"),
    (dict(schedule=0.1), "schedule is 0.1; give a function of the round that returns a Plan"),
    (dict(counts="none"), "counts is 'none'; give 'plain' or 'private'"),
    (dict(context=3), "context is 3; give a Context"),
]


@pytest.mark.parametrize(("given", "words"), WRONG, ids=[words[:40] for _, words in WRONG])
def test_what_would_fail_in_every_round_is_refused_at_once(given, words):
    with pytest.raises(ValueError) as error:
        ServerSide(**given)
    assert str(error.value).startswith("ServerSide: ") and words in str(error.value)


def test_a_context_whose_proxy_is_no_proxy_is_refused():
    context = replace(toy_federation(parse("fedlaw", "method")).context, proxy=ROWS)
    with pytest.raises(ValueError, match=r"context\.proxy is a tuple; give an Evaluator"):
        ServerSide(context=context)


def test_a_network_of_another_type_than_the_first_arrays_is_refused():
    run = Run(server=ServerSide(net=Net(module())))
    run.arrays = ArrayRecord(module().double().state_dict())
    with pytest.raises(ValueError, match=r"float64, and ServerSide\(net=...\) runs in .*float32"):
        run.start()


# The command


def test_flower_up_fails_where_the_run_did(tmp_path, monkeypatch):
    """Flower's own command ends with 0 then: the run was started, and its log was shown."""

    class Over:
        def __init__(self, *args, **more):
            self.folder = tmp_path

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def run(self, app, settings):
            (tmp_path / "run").mkdir()
            told = {"status": "failed", "reason": "round 1: no proxy", "method": "fedavg"}
            RunFolder(tmp_path / "run").write_summary(told)
            return SimpleNamespace(poll=lambda: 0)

    monkeypatch.setattr("fedbasin.deploy.federation.LocalFederation", Over)
    result = CliRunner().invoke(command, ["flower", "up", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "the run failed: round 1: no proxy" in str(result.exception)
