import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbasin.core.method import Context
from fedbasin.core.rng import root
from fedbasin.core.vectors import Layout
from fedbasin.methods import LDAWA
from fedbasin.testing import replies_of, toy_federation

LAYOUT = Layout(("a", "b", "scalar"), ((2, 3), (4,), (1,)))
CONTEXT = Context(LAYOUT, 9, 5, root(0))
PARTS = [slice(0, 6), slice(6, 10), slice(10, 11)]


def numpy_ldawa(models, server, weights, clamp=False):
    out = np.zeros_like(server)
    for part in PARTS:
        w = server[part]
        for y, p in zip(models, weights / np.sum(weights), strict=True):
            both = np.linalg.norm(w) * np.linalg.norm(y[part])
            cosine = y[part] @ w / both if both > 0 and len(w) > 1 else 1.0
            out[part] += p * (max(cosine, 0.0) if clamp else cosine) * y[part]
    return out


def merge(method, models, server, weights=None):
    models, server = (torch.as_tensor(np.asarray(x), dtype=torch.float64) for x in (models, server))
    return method.aggregate((), server, replies_of(models, weights), CONTEXT)[0]


@given(st.integers(1, 6), st.integers(0, 50), st.booleans())
@settings(max_examples=40)
def test_ldawa_equals_a_plain_numpy_loop(m, seed, clamp):
    rng = np.random.default_rng(seed)
    models, server = rng.normal(size=(m, 11)), rng.normal(size=11)
    weights = rng.integers(1, 9, m).tolist()
    models[0, 6:10] *= seed % 3 > 0  # sometimes a tensor of zeros
    uniform = merge(LDAWA(clamp), models, server, weights)
    np.testing.assert_allclose(uniform.send, numpy_ldawa(models, server, np.ones(m), clamp))
    sampled = merge(LDAWA(clamp, "samples"), models, server, weights)
    np.testing.assert_allclose(sampled.send, numpy_ldawa(models, server, weights, clamp))
    assert np.linalg.norm(uniform.send) <= np.linalg.norm(models, axis=1).mean() + 1e-12


def test_clients_that_did_not_turn_are_averaged_as_they_are():
    server = np.random.default_rng(0).normal(size=11)
    np.testing.assert_allclose(merge(LDAWA(), [server] * 3, server).send, server)
    found = merge(LDAWA(), [2.5 * server] * 4, server)
    np.testing.assert_allclose(found.send, 2.5 * server)
    assert found.notes.cosine_least == pytest.approx(1)


def test_the_cosine_is_of_parameters_not_of_updates_and_not_renormalised():
    server = np.array([1.0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 3])
    turned = np.array([0.0, 1, 0, 0, 0, 0, -1, 0, 0, 0, 5])
    found = merge(LDAWA(), [turned, server], server).send.numpy()
    np.testing.assert_allclose(found[:2], [0.5, 0])  # a right angle: the client's layer is dropped
    assert found[6] == pytest.approx(1.0)  # a flipped layer is flipped back
    assert found[10] == 4  # one element has no angle
    assert merge(LDAWA(clamp=True), [turned, server], server).send[6] == pytest.approx(0.5)


def test_a_client_without_rows_is_not_in_the_record():
    server = np.arange(1.0, 12)
    notes = merge(LDAWA(), [server, -server], server, [3, 0]).notes
    assert notes.cosine_mean == pytest.approx(1) and notes.cosine_least == pytest.approx(1)


def test_a_bias_that_starts_at_zero_is_averaged():
    server = np.zeros(11)
    models = np.random.default_rng(1).normal(size=(3, 11))
    np.testing.assert_allclose(merge(LDAWA(), models, server).send, models.mean(0))


def test_the_previous_global_model_is_the_yardstick():
    federation = toy_federation(LDAWA())
    layout = federation.context.layout
    server, states = federation.begin()
    for after, record in federation.rounds_from(server, states):
        assert 0 < record.notes["cosine_mean"] <= 1
        assert torch.isfinite(after.send).all()
    sums = layout.sums(torch.arange(layout.size).double())
    assert layout.spread(sums).shape == (layout.size,) and len(sums) == len(layout.names)
