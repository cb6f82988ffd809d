import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedbasin.core.net import Net
from fedbasin.core.vectors import Layout, shares, weighted_mean

LAYOUT = Layout(("a", "b"), ((2, 3), (4,)), head=("b",))


def test_views_share_memory_and_lie_one_after_another():
    vector = torch.arange(10.0)
    views = LAYOUT.views(vector)
    assert views["a"].tolist() == [[0, 1, 2], [3, 4, 5]] and views["b"].tolist() == [6, 7, 8, 9]
    views["b"][0] = -1
    assert vector[6] == -1
    assert torch.equal(LAYOUT.flat(views), vector)
    assert LAYOUT.slices["b"] == slice(6, 10) and LAYOUT.size == 10
    assert LAYOUT.mask(["b"], vector).tolist() == [0] * 6 + [1] * 4


def test_wrong_sizes_and_names_are_refused():
    with pytest.raises(ValueError, match="10 elements"):
        LAYOUT.views(torch.zeros(9))
    with pytest.raises(ValueError, match="differ in b"):
        LAYOUT.flat({"a": torch.zeros(2, 3)})
    with pytest.raises(ValueError, match="b has shape"):
        LAYOUT.flat({"a": torch.zeros(2, 3), "b": torch.zeros(5)})


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=8).filter(any), st.integers(0, 99))
def test_weighted_mean_equals_a_plain_loop(weights, seed):
    models = np.random.default_rng(seed).normal(size=(len(weights), 5))
    total = sum(weights)
    expected = sum((w / total) * row for w, row in zip(weights, models, strict=True))
    share = shares(torch.tensor(weights))
    np.testing.assert_allclose(
        weighted_mean(torch.tensor(models), share), expected, rtol=1e-12, atol=1e-12
    )
    holders = [row for w, row in zip(weights, models, strict=True) if w > 0]
    uniform = weighted_mean(torch.tensor(models), shares(torch.tensor(weights), "uniform"))
    np.testing.assert_allclose(uniform, np.mean(holders, axis=0), rtol=1e-12, atol=1e-12)


def test_integer_weights_beyond_float32_are_shared_exactly():
    share = shares(torch.tensor([2**24 + 1, 2**24 - 1]))
    assert share.tolist() == [(2**24 + 1) / 2**25, (2**24 - 1) / 2**25]


class Batchy(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        self.out = nn.Linear(3, 2)

    def forward(self, x):
        return self.out(self.norm(x)) * self.frozen


def test_a_net_equals_its_module_and_changes_nothing():
    torch.manual_seed(0)
    module = Batchy()
    twin = Batchy()
    twin.load_state_dict(module.state_dict())
    net = Net(module)
    vector, buffers = net.initial()
    x = torch.randn(8, 3)
    twin.train()
    expected = twin(x)
    outputs = net(vector, x, buffers, training=True)
    torch.testing.assert_close(outputs.logits, expected)
    after = net.buffer_layout.views(outputs.buffers)
    torch.testing.assert_close(after["norm.running_mean"], twin.norm.running_mean)
    torch.testing.assert_close(after["norm.running_var"], twin.norm.running_var)
    assert torch.equal(buffers, net.initial()[1]) and not torch.equal(outputs.buffers, buffers)
    torch.testing.assert_close(net(vector, x, outputs.buffers).logits, twin.eval()(x))
    assert outputs.features is None
    assert module.norm.num_batches_tracked == 0


def test_integer_buffers_and_frozen_parameters_do_not_travel():
    net = Net(Batchy())
    assert net.layout.names == ("norm.weight", "norm.bias", "out.weight", "out.bias")
    assert net.layout.head == ("out.weight", "out.bias")
    assert net.buffer_layout.names == ("norm.running_mean", "norm.running_var")
    assert net.has_statistics


def test_vmap_over_models_equals_a_loop():
    net = Net(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), dtype=torch.float64)
    vectors = torch.stack([net.initial()[0] * s for s in (1.0, 0.5, -2.0)])
    x = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(5, 4)
    together = torch.func.vmap(lambda v: net(v, x).logits)(vectors)
    for row, vector in zip(together, vectors, strict=True):
        torch.testing.assert_close(row, net(vector, x).logits)


def test_a_module_without_parameters_is_refused():
    with pytest.raises(ValueError, match="no trainable parameter"):
        Net(nn.ReLU())


def test_state_dict_loads_into_the_module():
    module = Batchy()
    net = Net(module)
    vector, buffers = net.initial()
    fresh = Batchy()
    fresh.load_state_dict(net.state_dict(vector * 2, buffers + 1), strict=True)
    torch.testing.assert_close(fresh.norm.running_mean, module.norm.running_mean + 1)
    torch.testing.assert_close(fresh.out.weight.detach(), module.out.weight.detach() * 2)


def test_a_net_on_a_device_is_the_same_net_with_memory_of_its_own():
    net = Net(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), dtype=torch.float64)
    other = net.on("cpu")
    assert other.layout == net.layout and other.dtype == torch.float64
    for mine, theirs in zip(net.initial(), other.initial(), strict=True):
        assert torch.equal(mine, theirs)
    x = torch.linspace(-1, 1, 20, dtype=torch.float64).view(5, 4)
    vector, _ = net.initial()
    assert torch.equal(net(vector + 1, x).logits, other(vector + 1, x).logits)
    assert Net(nn.Linear(2, 2), mixed=True).on("cpu").mixed and not other.mixed
    assert net.on("meta").initial()[0].is_meta and net.device.type == "cpu"
    assert not net.initial()[0].is_meta and torch.isfinite(net(vector, x).logits).all()


def test_a_forward_that_a_copy_would_not_follow_is_refused():
    module = nn.Sequential(nn.Sequential(nn.Linear(4, 3)))
    module[0].forward = lambda x: module[0][0](x)
    with pytest.raises(
        ValueError, match=r"layer '0' \(Sequential\) .* define `forward` in the class"
    ):
        Net(module)
    module[0].forward = nn.Sequential.forward.__get__(module[0])  # a method follows its object
    net = Net(module)
    x = torch.rand(2, 4)
    assert torch.equal(net(net.initial()[0] * 0, x).logits, torch.zeros(2, 3))
