"""The guard of a federation and the wrapper `norm_bound` of a simulation are one rule."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")

from fedbasin.core.method import Context, Replies
from fedbasin.core.rng import root
from fedbasin.core.vectors import Layout
from fedbasin.deploy import Guard
from fedbasin.deploy.replies import guarded
from fedbasin.methods import FedAvg, NormBound
from fedbasin.testing import replies_of


@dataclass(frozen=True)
class Seeing(FedAvg):
    """FedAvg that keeps what it is given."""

    seen: tuple[list[Replies], ...] = ([],)

    def aggregate(self, state, server, replies, context):
        self.seen[0].append(replies)
        return super().aggregate(state, server, replies, context)


@pytest.mark.parametrize("action", ["clip", "drop"])
@pytest.mark.parametrize("seed", range(4))
def test_updates_and_reports_are_bounded_alike(action, seed):
    """For odd cohorts; of an even one the guard takes the lower of the two middle lengths."""
    draws = np.random.default_rng(seed)
    server = torch.from_numpy(draws.normal(size=6))
    moves = torch.from_numpy(draws.normal(size=(7, 6)) * 10.0 ** draws.integers(-1, 3, (7, 1)))
    said = torch.from_numpy(draws.normal(size=(7, 6)) * 10.0 ** draws.integers(-1, 3, (7, 1)))
    if action == "drop":
        said = torch.ones(7, 6, dtype=torch.float64)  # the wrapper drops by the update alone
    replies = replace(replies_of(server + moves, [5.0] * 7), reports=((said,),))
    ours, _ = guarded(replies, server, Guard(1.0, action, weight=None))
    inner = Seeing()
    context = Context(Layout(("w",), ((6,),)), 7, 1, root(0)).at(0, 0.1)
    method = NormBound(inner, times=1.0, claims=float("inf"), action=action)
    method.aggregate(method.init(server, context), server, replies, context)
    (theirs,) = inner.seen[0]
    inner.seen[0].clear()
    assert ours.clients.tolist() == theirs.clients.tolist()
    torch.testing.assert_close(ours.models, theirs.models, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.reports[0][0], theirs.reports[0][0])
    assert float((ours.models - server).norm(dim=1).max()) < float(moves.norm(dim=1).max())


def replies_with(reports, models=None):
    """Replies of a cohort that differ in what the clients report."""
    server = torch.zeros(2, dtype=torch.float64)
    models = torch.ones(len(reports[0]), 2, dtype=torch.float64) if models is None else models
    return replace(replies_of(models, [5.0] * len(models)), reports=(reports,)), server


def test_a_report_of_one_number_is_bounded():
    replies, server = replies_with((torch.tensor([1.0, 1.0, 96.0, 1.0]),))
    ours, excess = guarded(replies, server, Guard(3.0, weight=None))
    assert ours.reports[0][0].tolist() == [1.0, 1.0, 3.0, 1.0]
    assert [client for client, _ in excess.far] == [2]


def test_everybody_may_be_dropped():
    """Each is far beyond the others in a report of its own."""
    reports = tuple(1 + 99 * torch.eye(3, dtype=torch.float64))
    replies, server = replies_with(reports)
    ours, excess = guarded(replies, server, Guard(3.0, "drop", weight=None))
    assert len(ours.clients) == 0 and excess.dropped == {0, 1, 2}
