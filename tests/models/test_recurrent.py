import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedbasin.core.rng import root, torch_draws_from
from fedbasin.models import shakespeare_lstm
from fedbasin.models.recurrent import LSTM


def as_torch(layer):
    """The same cell as torch's LSTM: gates i, f, g, o and the 1 of the forget gate in the bias."""
    hidden = layer.recurrent.in_features
    reference = nn.LSTM(layer.input.in_features, hidden, batch_first=True).double()
    order = [0, 2, 1, 3]

    def sort(rows):
        return torch.cat([rows.chunk(4)[k] for k in order])

    bias = sort(layer.input.bias.detach()).clone()
    bias[hidden : 2 * hidden] += 1
    reference.load_state_dict(
        {
            "weight_ih_l0": sort(layer.input.weight.detach()),
            "weight_hh_l0": sort(layer.recurrent.weight.detach()),
            "bias_ih_l0": bias,
            "bias_hh_l0": torch.zeros_like(bias),
        }
    )
    return reference


@settings(max_examples=10, deadline=None)
@given(inputs=st.integers(1, 5), hidden=st.integers(1, 5), steps=st.integers(1, 6))
def test_lstm_equals_torchs(inputs, hidden, steps):
    with torch_draws_from(root(0)):
        layer = LSTM(inputs, hidden).double()
        nn.init.normal_(layer.input.bias)
        x = torch.randn(3, steps, inputs, dtype=torch.float64)
    torch.testing.assert_close(layer(x), as_torch(layer)(x)[0])


def test_network_is_embedding_two_layers_with_tanh_and_the_last_step():
    with torch_draws_from(root(0)):
        network = shakespeare_lstm((7,), 11, embedding=3, hidden=4).double()
        x = torch.randint(0, 11, (5, 7))
    y = network.body.embedding.weight[x]
    for layer in (network.body.lstm1, network.body.lstm2):
        y = as_torch(layer)(y)[0].tanh()
    torch.testing.assert_close(network.features(x), y[:, -1])
    assert network(x).shape == (5, 11)


def test_the_last_character_counts_and_so_does_the_first():
    with torch_draws_from(root(0)):
        network = shakespeare_lstm((4,), 9, embedding=3, hidden=8).double()
    x = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5], [6, 2, 3, 4]])
    plain, last, first = network(x)
    assert not torch.allclose(plain, last)
    assert not torch.allclose(plain, first, atol=1e-6)


def test_initialisation_is_haikus():
    with torch_draws_from(root(0)):
        network = shakespeare_lstm((80,), 90)
    lstm = network.body.lstm2
    for weight in (lstm.input.weight, lstm.recurrent.weight):
        assert weight.abs().max() <= 2 / math.sqrt(512)
        assert weight.std().item() == pytest.approx(0.8796 / math.sqrt(512), rel=0.02)
    assert not lstm.input.bias.any() and not network.head.bias.any()
    assert network.body.embedding.weight.std().item() == pytest.approx(0.8796, rel=0.05)


def test_it_asks_not_to_be_compiled():
    assert not shakespeare_lstm((4,), 9, hidden=4).compiles
