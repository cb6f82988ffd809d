from dataclasses import replace

import numpy as np
import pytest
import torch
from methods.numpy_clients import NumpyClients, linear_federation
from torch import nn

from fedbasin.core.expressions import parse
from fedbasin.core.method import Context
from fedbasin.core.rng import root
from fedbasin.core.rule import Setting
from fedbasin.core.vectors import Layout
from fedbasin.methods import FedAvg, FedExP
from fedbasin.testing import replies_of, toy_federation, trajectory


def numpy_fedexp(world, rounds, eps, follow_lr, weighting):
    """Jhunjhunwala et al., Algorithm 1, with the mean of the last two iterates as output."""
    server, before, first = world.start.copy(), None, world.lr(0)
    for t in range(rounds):
        ends, sizes, _ = world.sgd(t, server)
        p = sizes / sizes.sum() if weighting == "samples" else np.full(len(sizes), 1 / len(sizes))
        d = ends - server
        mean = p @ d
        e = eps * (world.lr(t) / first) ** 2 if follow_lr else eps
        eta = max(1.0, (p @ (d**2).sum(1)) / (2 * ((mean**2).sum() + len(p) * e)))
        before, server = server, server + eta * mean
        yield server, server if t == 0 else (server + before) / 2, eta


@pytest.mark.parametrize("follow_lr", [False, True])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("eps", [0.0, 1e-5, 1e-3])
def test_fedexp_equals_a_plain_numpy_loop(eps, follow_lr, weighting):
    method = FedExP(FedAvg(weighting), eps=eps, follow_lr=follow_lr)
    federation = linear_federation(method, rounds=5, participation="count(clients=5)")
    oracle = numpy_fedexp(NumpyClients(federation), 5, eps, follow_lr, weighting)
    rounds = federation.rounds_from(*federation.begin())
    steps = []
    for (after, record), (send, score, eta) in zip(rounds, oracle, strict=True):
        np.testing.assert_allclose(after.send, send, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(after.score, score, rtol=1e-9, atol=1e-12)
        assert record.notes["server_lr"] == pytest.approx(eta)
        steps.append(eta)
    assert min(steps) >= 1 and (eps or max(steps) > 1.0)


def served(updates, method, weights=None, lr=0.1):
    """What a method makes of updates [C, P] of a model at zero, in its second round."""
    models = torch.as_tensor(np.asarray(updates), dtype=torch.float64)
    server = torch.zeros(models.shape[1], dtype=torch.float64)
    context = Context(Layout(("w",), ((models.shape[1],),)), 9, 5, root(0), round=1, lr=lr)
    state = method.init(server, context)
    return method.aggregate(state, server, replies_of(models, weights), context)[0]


def eta(found):
    return float(found.notes[0].server_lr)


def test_agreement_gives_one_and_orthogonality_half_the_clients():
    row = np.array([1.0, 2.0, 3.0])
    assert eta(served([row] * 4, FedExP(eps=0.0))) == 1.0
    for m in (2, 4, 6, 10):
        assert eta(served(np.eye(m), FedExP(FedAvg("uniform"), eps=0.0))) == pytest.approx(m / 2)
    # p_i weighs the numerator too: with nearly all weight on one client there is nothing to gain
    assert eta(served(np.eye(4), FedExP(eps=0.0), weights=[1e6, 1, 1, 1])) == 1.0


def test_it_never_steps_less_than_the_mean():
    rng = np.random.default_rng(0)
    for _ in range(30):
        d = rng.normal(size=(rng.integers(1, 7), 5)) + rng.normal(size=5) * 3
        assert eta(served(d, FedExP(eps=float(rng.choice([0, 1e-3, 1.0]))))) >= 1
    still = served(np.zeros((3, 4)), FedExP(eps=0.0))
    assert eta(still) == 1 and not still.send.any()


def test_infinite_eps_is_fedavg_and_eps_counts_once_for_each_client():
    for a, b in zip(
        trajectory(FedExP(eps=float("inf"), average=False)), trajectory(FedAvg()), strict=True
    ):
        torch.testing.assert_close(a.send, b.send, rtol=1e-12, atol=1e-14)
        assert a.score is a.send
    found = eta(served(np.eye(4) * 10, FedExP(FedAvg("uniform"), eps=0.5)))
    assert found == pytest.approx(100 / (2 * (25 + 4 * 0.5)))


def test_the_middle_of_the_last_step_is_scored_from_the_second_round_on():
    federation = toy_federation(FedExP())
    before = federation.begin()[0].send
    for after, record in federation.rounds_from(*federation.begin()):
        middle = after.send if record.round == 1 else (before + after.send) / 2
        torch.testing.assert_close(after.score, middle, rtol=1e-12, atol=1e-14)
        before = after.send


def test_the_weighting_is_the_base_methods():
    method = parse("fedexp(wima(fedavgm(scaffold)))", "method")
    assert method.base == parse("scaffold", "method") and method.base.weighting == "uniform"
    wrapped = parse("fedexp(fedavgm(fedavg('uniform')), eps=0)", "method")
    updates = np.diag([1.0, 2.0, 3.0, 4.0])
    assert eta(served(updates, wrapped, weights=[9, 1, 1, 1])) == pytest.approx(4 / 2)


def test_a_client_without_rows_is_not_one_of_the_m():
    found = eta(served(np.eye(4) * 10, FedExP(eps=0.5), weights=[1, 1, 1, 0]))
    assert found == pytest.approx(100 / (2 * (100 / 3 + 3 * 0.5)))


def test_a_first_round_at_a_learning_rate_of_zero_leaves_eps_as_it_is():
    following = FedExP(eps=0.01, follow_lr=True)
    assert eta(served(np.eye(6), following, lr=0.0)) == eta(served(np.eye(6), FedExP(eps=0.01)))


def test_a_model_scored_apart_moves_with_the_one_that_is_sent():
    """FedACG sends a look-ahead: both go on by the same difference, then half of the way back."""
    updates, inner = np.eye(6), parse("fedacg(momentum=0.5)")
    base, found = served(updates, inner), served(updates, FedExP(inner, eps=0.0))
    further = (eta(found) - 1) * base.send
    torch.testing.assert_close(found.send, base.send + further)
    torch.testing.assert_close(found.score, base.score + further - found.send / 2)
    assert eta(found) > 1 and not torch.equal(base.send, base.score)


def test_averaged_iterates_make_batchnorm_statistics_stale():
    setting = Setting(momentum=0, weight_decay=0, clip=None, ragged=False, statistics=True)
    assert any("BatchNorm" in caution for caution in FedExP().cautions(setting))
    assert not list(FedExP(average=False).cautions(setting))


def test_statistics_are_averaged_and_never_extrapolated():
    def buffers(method):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        federation = toy_federation(method, module=module, participation="count(clients=2)")
        federation = replace(federation, eligible=np.array([0, 2]))
        return next(iter(federation.rounds_from(*federation.begin())))[0].buffers

    plain = buffers(FedAvg())
    for source in ("fedexp(eps=0)", "fedadam", "fedavgm(lr=0.3)", "fedgma", "fednova", "ldawa"):
        torch.testing.assert_close(buffers(parse(source, "method")), plain, rtol=0, atol=0)


def test_a_negative_eps_is_refused():
    with pytest.raises(ValueError, match="eps"):
        FedExP(eps=-1.0)
