import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.numpy_clients import NumpyClients, linear_federation

from fedbasin.core.expressions import parse
from fedbasin.core.method import Context
from fedbasin.core.rng import root
from fedbasin.core.vectors import Layout
from fedbasin.methods import FedAdam, FedAvg, FedGMA
from fedbasin.testing import replies_of, trajectory


def numpy_mask(d, threshold, mask, votes):
    agreement = np.abs(votes @ np.sign(d))
    return np.where(agreement >= threshold - 1e-9, 1.0, agreement if mask == "soft" else 0.0)


@pytest.mark.parametrize("mask", ["soft", "hard"])
@pytest.mark.parametrize("vote", ["clients", "samples"])
@pytest.mark.parametrize(("threshold", "lr"), [(0.8, 1.0), (0.5, 0.3)])
def test_fedgma_equals_a_plain_numpy_loop(mask, vote, threshold, lr):
    method = FedGMA(threshold=threshold, mask=mask, vote=vote, lr=lr)
    federation = linear_federation(method, rounds=4, participation="count(clients=5)")
    world = NumpyClients(federation)
    server, masked = world.start, 0
    for t, (after, record) in enumerate(federation.rounds_from(*federation.begin())):
        ends, sizes, _ = world.sgd(t, server)
        p, d = sizes / sizes.sum(), ends - server
        votes = p if vote == "samples" else np.full(len(p), 1 / len(p))
        m = numpy_mask(d, threshold, mask, votes)
        server = server + lr * m * (p @ d)
        np.testing.assert_allclose(after.send, server, rtol=1e-9, atol=1e-12)
        assert record.notes["mask_mean"] == pytest.approx(m.mean())
        assert record.notes["agreed"] == pytest.approx((m == 1).mean())
        masked += (m < 1).sum()
    assert masked


def step(method, d, weights=None):
    models = torch.as_tensor(np.asarray(d), dtype=torch.float64)
    server = torch.zeros(models.shape[1], dtype=torch.float64)
    context = Context(Layout(("w",), ((models.shape[1],),)), 9, 5, root(0))
    state = method.init(server, context)
    return method.aggregate(state, server, replies_of(models, weights), context)[0].send.numpy()


@given(st.integers(1, 9), st.integers(0, 20), st.sampled_from(["soft", "hard"]))
@settings(max_examples=40)
def test_clients_of_one_sign_are_fedavg_and_flipping_all_flips_the_step(m, seed, mask):
    d = np.random.default_rng(seed).normal(size=(m, 6))
    for threshold in (0.0, 0.4, 1.0):
        method = FedGMA(threshold=threshold, mask=mask)
        same = np.abs(d) * np.array([1, -1, 1, -1, 1, -1])
        np.testing.assert_allclose(step(method, same), same.mean(0), rtol=1e-12)
        np.testing.assert_allclose(step(method, d), -step(method, -d), rtol=1e-12)
    np.testing.assert_allclose(step(FedGMA(threshold=0.0, mask=mask), d), d.mean(0), rtol=1e-12)


def test_a_parameter_that_some_do_not_move_loses_their_votes():
    d = np.array([[1.0, 1, 1], [1, 1, 0], [1, -1, 0], [1, 0, 0]])  # agreement 1, 1/4, 1/4
    np.testing.assert_allclose(step(FedGMA(), d), [1, 0.25 / 4, 0.25 / 4])
    np.testing.assert_allclose(step(FedGMA(mask="hard"), d), [1, 0, 0])
    np.testing.assert_allclose(step(FedGMA(threshold=0.25, mask="hard"), d), d.mean(0))


def test_one_client_has_one_vote_unless_samples_vote():
    d, weights = [[1.0], [1.0], [-1.0]], [1, 1, 8]
    assert step(FedGMA(), d, weights) == pytest.approx(-0.6 / 3)
    assert step(FedGMA(vote="samples"), d, weights) == pytest.approx(-0.6 * 0.6)


def test_the_mask_is_not_the_releases_correction_of_the_plain_mean():
    """FedIMA's release changes the mean by 1e-4 of an update; the paper's mask by whole parts."""
    d = np.random.default_rng(0).normal(size=(5, 200))
    change = np.linalg.norm(step(FedGMA(), d) - d.mean(0)) / np.linalg.norm(d.mean(0))
    assert change > 0.1


def test_the_mask_multiplies_the_step_of_an_optimiser_inside():
    d = np.random.default_rng(1).normal(size=(5, 8))
    m = numpy_mask(d, 0.8, "soft", np.full(5, 0.2))
    adam = step(FedAdam(first="zero"), d)
    np.testing.assert_allclose(step(FedGMA(FedAdam(first="zero")), d), m * adam, rtol=1e-12)
    masked = m * d.mean(0)
    expected = 0.01 * 0.1 * masked / (np.sqrt(0.01) * np.abs(masked) + 1e-3)
    np.testing.assert_allclose(step(FedAdam(FedGMA(), first="zero"), d), expected, rtol=1e-10)


def test_it_composes_with_averaging_and_other_bases():
    for source in ("wima(fedgma(scaffold))", "fedgma(ima(fedadam))", "fedavgm(fedgma(fednova))"):
        last = trajectory(parse(source, "method"))[-1]
        assert torch.isfinite(last.send).all()
    for a, b in zip(trajectory(FedGMA(threshold=0.0)), trajectory(FedAvg()), strict=True):
        torch.testing.assert_close(a.send, b.send, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("fedgma(threshold=1.1)", "threshold"),
        ("fedgma(lr=0)", "lr"),
        ("fedgma(mask='and')", "mask"),
    ],
)
def test_bad_settings_are_named(source, word):
    with pytest.raises(ValueError, match=word):
        parse(source, "method")
