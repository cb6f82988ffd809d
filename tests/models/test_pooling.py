"""The pooling of many clients: torch's own numbers, and images left as they lie."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedbasin.models import convolution
from fedbasin.models.parts import MaxPool2d, Pooling

CLIENTS = 3


@pytest.fixture
def side_by_side(monkeypatch):
    """Take a CPU for a GPU."""
    monkeypatch.setattr(convolution, "_many_on_gpu", lambda _: True)


def images(*size, values=None):
    """Images, of few values where many pixels of a window are to be equal."""
    draws = torch.Generator().manual_seed(4)
    shape = (CLIENTS, 4, 6, *size)
    if values is None:
        return torch.randn(shape, generator=draws, dtype=torch.float64)
    return torch.randint(values, shape, generator=draws).double()


def with_gradient(layer, x):
    """What every client's images give, and the gradient of a sum that tells outputs apart."""

    def loss(x):
        y = layer(x)
        return (y * torch.arange(1.0, 1 + y.numel(), dtype=y.dtype).view_as(y)).sum(), y

    gradient, y = torch.func.vmap(torch.func.grad(loss, has_aux=True))(x)
    return y, gradient


@pytest.mark.parametrize("values", [None, 2, 1], ids=["apart", "many equal", "all equal"])
@pytest.mark.parametrize("size", [(8, 12), (2, 2), (7, 5), (6, 3)])
def test_values_and_gradients_are_those_of_torch(side_by_side, monkeypatch, size, values):
    calls, whole = [], Pooling.apply
    monkeypatch.setattr(Pooling, "apply", lambda *args: calls.append(1) or whole(*args))
    x = images(*size, values=values)
    ours, theirs = with_gradient(MaxPool2d(2), x), with_gradient(nn.MaxPool2d(2), x)
    assert calls
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


@pytest.mark.parametrize(
    "how", [{"padding": 1}, {"kernel_size": 3}, {"stride": 1}, {"dilation": 2}, {"ceil_mode": True}]
)
def test_other_windows_are_torch_s(side_by_side, monkeypatch, how):
    monkeypatch.setattr(Pooling, "apply", lambda *_: pytest.fail("not of 2 x 2 side by side"))
    how, x = {"kernel_size": 2, "stride": 2, **how}, images(7, 7)[0]
    torch.testing.assert_close(MaxPool2d(**how)(x), nn.MaxPool2d(**how)(x), rtol=0, atol=0)


def test_one_client_s_pooling_is_torch_s(monkeypatch):
    monkeypatch.setattr(Pooling, "apply", lambda *_: pytest.fail("not of many clients"))
    x = images(4, 4)[0]
    torch.testing.assert_close(MaxPool2d(2)(x), F.max_pool2d(x, 2), rtol=0, atol=0)


def test_what_is_not_a_number_stays_so():
    x = images(2, 2)[0]
    x[0, 0, 1, 0] = float("nan")
    y = Pooling.apply(x)[0]
    assert y.isnan().sum() == 1 and y[0, 0].isnan().all()


def test_gradients_have_channels_innermost_and_the_images_type():
    x = images(8, 12)[0].bfloat16().requires_grad_()
    y, taken = Pooling.apply(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert (dx.dtype, taken.dtype) == (torch.bfloat16, torch.int8)
    assert dx.permute(0, 2, 3, 1).is_contiguous()
