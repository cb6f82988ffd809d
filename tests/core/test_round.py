"""The round by itself: its cohort is trained by hand between the two calls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from fedbasin.core.method import Context, Method, Plan, Probe, Served
from fedbasin.core.protocols import NeedsGradients
from fedbasin.core.record import Headline, RoundRecord
from fedbasin.core.rng import root
from fedbasin.core.round import (
    Gathered,
    Returned,
    RoundSetup,
    Scoring,
    Server,
    Statistics,
    Traffic,
    begin_round,
    end_round,
    merge_refused,
    probe_of,
    scored,
    summary_of,
)
from fedbasin.core.vectors import Layout
from fedbasin.testing import replies_of

KEY = root(3)
ZEROS = torch.zeros(2, dtype=torch.float64)
MERGED = []  # the context of each merge


class Noted(NamedTuple):
    seen: int


@dataclass(frozen=True)
class Mean(Method):
    """The plain mean; counts its rounds."""

    def init(self, server, context):
        return 0

    def broadcast(self, state, server, context):
        return (server + 1, context.probe)

    def aggregate(self, state, server, replies, context):
        MERGED.append(context)
        model = replies.models.mean(0)
        return Served(model, model, Noted(len(replies.clients))), state + 1


class Takes:
    """A policy that takes every merge."""

    def merge(self, server, replies, attempt):
        return attempt()


class Refuses:
    """A policy that takes none."""

    def merge(self, server, replies, attempt):
        return None


class Rows:
    """An evaluator that tells models by their first weight."""

    def unscored(self):
        return {"accuracy": None}

    def of_round(self, score, send, buffers, *, last, train=None):
        found = {"accuracy": float(score[0]), "accuracy_send": float(send[0]), "last": last}
        return found | ({} if train is None else {"accuracy_train": float(score[0])})


@dataclass(frozen=True)
class Asking(Mean, NeedsGradients):
    """The same with gradients of the cohort."""


class States:
    def get(self, client):
        return ()


def setup_of(method=Mean(), policy=Takes(), **settings):  # noqa: B008
    layout = Layout(("w",), ((2,),))
    given = dict(
        method=method,
        context=Context(layout, 9, 4, KEY),
        schedule=lambda round: Plan(0.1 * (round + 1), 2),
        key=KEY,
        policy=policy,
        scoring=Scoring(4, Rows()),
    )
    return RoundSetup(**(given | settings))


def server_of(buffers=ZEROS[:0], round=1):
    return Server(round, ZEROS, ZEROS, buffers, 0)


def gathered_of(rows, weights=None, buffers=None, trusted=None):
    models = torch.tensor(rows, dtype=torch.float64)
    replies = replies_of(models, weights=weights)
    if buffers is not None:
        replies = replace(replies, buffers=buffers)
    return Gathered(replies, [], torch.tensor(0.25), trusted)


def played(setup, server, cohort, returned):
    launch = begin_round(setup, server, np.array(cohort), States())
    return end_round(setup, server, launch, returned)


def test_a_round_asks_for_training_and_ends_with_server_and_record():
    states, cohort = States(), np.array([2, 5])
    setup, server = setup_of(), server_of()
    assert probe_of(setup, server, cohort) is None
    launch = begin_round(setup, server, cohort, states)
    assert launch.cohort is cohort and launch.states is states and launch.key == KEY
    assert launch.plan == Plan(0.2, 2) and launch.sent.round == 1
    assert launch.sent.shared[0].tolist() == [1, 1]
    traffic = Traffic(replies=2, dropped=1, refused=3, bytes_down=40, bytes_up=50)
    returned = Returned(gathered_of([[2.0, 4], [4, 4]]), traffic, 1.5)
    after, record = end_round(setup, server, launch, returned)
    assert record.seconds_train == 1.5
    assert after.round == record.round == 2 and after.state == 1
    assert after.send.tolist() == [3, 4] and after.score is after.send
    assert (record.lr, record.train_loss, record.notes) == (0.2, 0.25, {"seen": 2.0})
    assert (record.update_norm, record.model_norm) == (5, 5)
    assert (record.replies, record.dropped, record.refused) == (2, 1, 3)
    assert (record.bytes_down, record.bytes_up, record.metric("accuracy")) == (40, 50, 3)


def test_only_clients_that_sent_a_gradient_are_asked_to_train():
    setup, server = setup_of(Asking()), server_of()
    request = probe_of(setup, server, np.array([2, 5, 7]))
    assert request.cohort.tolist() == [2, 5, 7] and request.sent.vector is server.send
    probe = Probe(torch.zeros(2, 2), torch.ones(2))
    launch = begin_round(setup, server, np.array([2, 7]), States(), probe)
    assert launch.cohort.tolist() == [2, 7] and launch.sent.shared[1] is probe
    end_round(setup, server, launch, Returned(gathered_of([[6.0, 8]]), Traffic()))
    assert MERGED[-1].probe is probe


def test_a_round_without_the_gradients_that_its_method_needs_does_not_begin():
    with pytest.raises(ValueError, match=r"needs the cohort's gradients .*probe_of"):
        begin_round(setup_of(Asking()), server_of(), np.array([2]), States())


def test_an_empty_cohort_is_asked_for_no_gradients():
    nobody = np.array([], dtype=np.int64)
    setup = setup_of(Asking())
    assert probe_of(setup, server_of(), nobody) is None
    launch = begin_round(setup, server_of(), nobody, States())
    assert not len(launch.cohort) and launch.sent.shared[1] is None


def test_a_round_ends_from_the_server_as_it_is_then():
    """Others may have been merged since the launch: the context is of now, the plan of then."""
    setup = setup_of()
    launch = begin_round(setup, server_of(round=1), np.array([2]), States())
    later = Server(3, ZEROS + 1, ZEROS + 1, ZEROS[:0], 7)
    traffic = Traffic(replies=1)
    after, record = end_round(setup, later, launch, Returned(gathered_of([[6.0, 8]]), traffic))
    context = MERGED[-1]
    assert (context.round, context.lr, context.plan) == (3, 0.2, Plan(0.2, 2))
    assert context.key == KEY.fold("server", 3) and context.answered == 1
    assert (after.round, after.state, record.round, record.lr) == (4, 8, 4, 0.2)


@pytest.mark.parametrize("refused", [False, True])
def test_without_a_merge_the_model_stays_and_the_round_counts(refused):
    policy = Refuses() if refused else Takes()
    before = server_of()
    gathered = gathered_of([[1.0, 1], [3, 3]]) if refused else None
    returned = Returned(gathered, Traffic(dropped=2))
    after, record = played(setup_of(policy=policy), before, [1, 2], returned)
    assert after == replace(before, round=2)
    assert merge_refused(record) == refused
    assert record.train_loss == (0.25 if refused else None)
    assert record.update_norm is None and record.dropped == 2 and record.metric("accuracy") == 0


@pytest.mark.parametrize(
    ("policy", "expected"), [("mean", [3.5]), ("keep", [7.0]), ("recalibrate", [4.5])]
)
def test_statistics_follow_their_policy_and_leave_out_who_is_not_trusted(policy, expected):
    statistics = Statistics(policy, lambda model, buffers: buffers + model[0])
    setup = setup_of(statistics=statistics)
    before = server_of(torch.tensor([7.0], dtype=torch.float64))
    buffers = torch.tensor([[2.0], [1e9], [4.0]], dtype=torch.float64)
    trusted = torch.tensor([True, False, True])
    gathered = gathered_of([[1.0, 1]] * 3, [1, 5, 3], buffers, trusted)
    after, _ = played(setup, before, [0, 1, 2], Returned(gathered, Traffic()))
    assert after.buffers.tolist() == expected


def test_a_policy_that_recalibrates_needs_a_function():
    with pytest.raises(ValueError, match="needs recalibrate="):
        Statistics("recalibrate")


def test_models_are_scored_when_it_is_time_to():
    scoring = Scoring(rounds=20, test=Rows(), train=Rows(), every=6, last=3)
    assert [r for r in range(1, 21) if scoring.due(r)] == [6, 12, 18, 19, 20]
    server = Server(6, ZEROS + 2, ZEROS + 1, ZEROS[:0], ())
    record = scored(RoundRecord(6), server, scoring)
    found = {"accuracy": 1, "accuracy_send": 2, "last": False, "accuracy_train": 1}
    assert record.metrics == found
    assert scored(RoundRecord(20), server, scoring).metrics == found | {"last": True}
    assert scored(RoundRecord(7), server, scoring) == RoundRecord(7, {"accuracy": None})
    assert scored(RoundRecord(6), server, replace(scoring, test=None)) == RoundRecord(6)


def test_the_summary_is_of_all_rounds_and_of_the_last_that_was_scored():
    records = [
        RoundRecord(t, {"accuracy": 0.1 * t, "loss": 1.0 / t}, bytes_up=t) for t in range(1, 13)
    ]
    every = [*records, RoundRecord(13, bytes_up=100)]
    found = summary_of(every, 5.0, Headline(), "stopped", "why")
    assert (found["headline"], found["higher_is_better"]) == ("accuracy", True)
    assert (found["status"], found["reason"], found["rounds"]) == ("stopped", "why", 13)
    assert found["accuracy_last"] == pytest.approx(1.2) and found["loss_last"] == 1 / 12
    assert found["accuracy_mean_last10"] == pytest.approx(0.8)  # rounds 4 to 12
    assert found["bytes_up"] == sum(range(13)) + 100 and found["seconds"] == 5.0
    assert summary_of([], 0.0, Headline())["accuracy_last"] is None
