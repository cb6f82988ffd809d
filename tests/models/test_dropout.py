import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, vmap

from fedbasin.core.rng import keys_tensor, root, torch_draws_from
from fedbasin.models import Dropout, Network, emnist_cnn, key_names, mobilenetv2, number_sites

KEYS = [root(seed).fold("dropout") for seed in range(5)]


def dropped(x, p=0.5, key=KEYS[0], site=0):
    layer = Dropout(p)
    layer.site = site
    return functional_call(layer, {"key": key.tensor()}, (x,))


@settings(max_examples=20, deadline=None)
@given(p=st.floats(0, 0.95), seed=st.integers(0, 10**6), site=st.integers(0, 5))
def test_a_fraction_p_is_dropped_and_the_rest_scaled(p, seed, site):
    n = 20_000
    y = dropped(torch.full((100, 200), 3.0), p, root(seed), site)
    kept = y != 0
    p = round(p * 65536) / 65536
    assert abs(kept.sum() - n * (1 - p)) <= 5 * math.sqrt(n * p * (1 - p))
    torch.testing.assert_close(y[kept], torch.full((int(kept.sum()),), 3 / (1 - p)))


def test_almost_certain_dropout_keeps_something_to_scale():
    y = dropped(torch.ones(64, 4096), 1 - 1e-9, root(3), 0)
    assert torch.isfinite(y).all()
    assert set(y.unique().tolist()) <= {0.0, 65536.0}


def hashed(key, counter):
    """`bits`, written again with Python's whole numbers."""

    def mix(x):
        x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
        x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
        return x ^ (x >> 15)

    return mix(mix((counter + (key.bits >> 32)) & 0xFFFFFFFF) ^ (key.bits & 0xFFFFFFFF))


@pytest.mark.parametrize(("p", "wide"), [(0.25, 8), (0.3, 16)])
def test_mask_is_the_stated_formula(p, wide):
    rows, size, lanes = 2, 15, 32 // wide
    chance = round(p * 2**wide) / 2**wide
    each = math.ceil(size / lanes)
    expected = torch.zeros(rows, size)
    for row in range(rows):
        for column in range(size):
            place, word = divmod(column, each)
            drawn = hashed(KEYS[1], 4 * 2**24 + row * each + word) >> (place * wide) & (2**wide - 1)
            expected[row, column] = drawn / 2**wide >= chance
    x = torch.arange(1.0, 31.0).reshape(2, 3, 5)
    found = dropped(x, p, KEYS[1], 4)
    torch.testing.assert_close(found, x * expected.reshape(2, 3, 5) / (1 - chance))


def test_an_empty_batch_passes():
    assert dropped(torch.ones(0, 3, 4)).shape == (0, 3, 4)


def test_same_key_same_mask_other_key_site_or_row_another():
    x = torch.ones(4, 100)
    y = dropped(x)
    assert torch.equal(y, dropped(x))
    assert not torch.equal(y, dropped(x, key=KEYS[1]))
    assert not torch.equal(y, dropped(x, site=1))
    assert len({tuple(row.tolist()) for row in y}) == 4


def test_rows_added_at_the_end_change_no_earlier_row():
    x = torch.ones(7, 2, 3, 3)
    assert torch.equal(dropped(x)[:5], dropped(x[:5]))


def test_evaluation_and_p_zero_are_the_identity():
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtype_is_kept_and_the_mask_does_not_depend_on_it(dtype):
    y = dropped(torch.ones(5, 9, dtype=dtype))
    assert y.dtype is dtype
    assert torch.equal(y != 0, dropped(torch.ones(5, 9)) != 0)


@pytest.mark.parametrize("p", [-0.1, 1.0, 2])
def test_a_wrong_probability_is_refused(p):
    with pytest.raises(ValueError, match=r"must be in \[0, 1\), got"):
        Dropout(p)


def test_the_key_is_no_part_of_the_state():
    layer = Dropout(0.5)
    assert layer.key.shape == (2,) and layer.key.dtype is torch.int64 and not layer.key.any()
    assert not layer.state_dict()


def network():
    with torch_draws_from(root(0)):
        return emnist_cnn((1, 8, 8), 3).double()


def test_every_dropout_of_a_network_has_its_own_site_and_is_found():
    assert [m.site for m in network().modules() if isinstance(m, Dropout)] == [0, 1]
    assert key_names(network()) == ("body.dropout1.key", "body.dropout2.key")
    assert set(key_names(network())) == {name for name, _ in network().named_buffers()}
    assert key_names(Dropout(0.1)) == ("key",)
    assert key_names(emnist_cnn((1, 8, 8), 3, dropout=(0, 0))) == ()
    with torch.device("meta"):
        assert key_names(mobilenetv2((1, 8, 8), 3, dropout=0.2)) == ("body.dropout.key",)
        assert key_names(mobilenetv2((1, 8, 8), 3)) == ()
    nested = Network(nn.Sequential(Dropout(0.1), nn.Sequential(Dropout(0.2))), nn.Linear(2, 2))
    assert repr(nested.body[1][0]) == "Dropout(p=0.2, site=1)"
    number_sites(nested.body[1])
    assert nested.body[1][0].site == 0


def test_dropout_stands_behind_the_pooling_and_behind_the_hidden_layer():
    layers = list(dict(network().body.named_children()))
    assert layers[layers.index("pool2") :][:4] == ["pool2", "conv2_relu", "flat", "dropout1"]
    assert layers[-3:] == ["fc1", "fc1_relu", "dropout2"]
    assert [m.p for m in network().modules() if isinstance(m, Dropout)] == [0.25, 0.5]


def step(net):
    def loss(parameters, key, x):
        keys = {name: key for name in key_names(net)}
        return functional_call(net, (parameters, keys), (x,)).square().sum()

    return grad(loss)


def test_cohort_under_vmap_sees_the_masks_of_a_loop():
    net = network()
    parameters = {k: v.detach().expand(5, *v.shape) for k, v in net.named_parameters()}
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    together = vmap(step(net), in_dims=(0, 0, None))(parameters, keys_tensor(KEYS), x)
    for k, key in enumerate(KEYS):
        alone = step(net)({n: v[k] for n, v in parameters.items()}, key.tensor(), x)
        for name in alone:
            torch.testing.assert_close(together[name][k], alone[name], rtol=1e-9, atol=1e-9)
    weights = together["head.weight"]
    assert len({tuple(w.flatten().tolist()) for w in weights}) == 5, "every client its own mask"


def test_compiled_step_equals_the_eager_one():
    net = network()
    parameters = {k: v.detach().expand(2, *v.shape) for k, v in net.named_parameters()}
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    eager = vmap(step(net), in_dims=(0, 0, None))
    compiled = torch.compile(eager, backend="aot_eager", fullgraph=True)
    for keys in (KEYS[:2], KEYS[2:4]):
        expected = eager(parameters, keys_tensor(keys), x)
        found = compiled(parameters, keys_tensor(keys), x)
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-9)
