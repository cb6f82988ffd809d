"""The normalisation of many clients: torch's own numbers, and images left as they lie."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fedbasin.models import convolution
from fedbasin.models.convolution import Conv2d
from fedbasin.models.parts import GlobalAverage, GroupNorm, Normalisation

CLIENTS, BATCH, CHANNELS, GROUPS = 3, 4, 6, 2


@pytest.fixture
def side_by_side(monkeypatch):
    """Take a CPU for a GPU."""
    monkeypatch.setattr(convolution, "_many_on_gpu", lambda _: True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


def problem(*size, dtype=torch.float64):
    draws = torch.Generator().manual_seed(3)
    images = (CLIENTS, BATCH, CHANNELS, *size)
    shapes = (images, (CLIENTS, CHANNELS), (CLIENTS, CHANNELS), images)
    x, w, bias, dy = (torch.randn(shape, generator=draws, dtype=dtype) for shape in shapes)
    return 5 + 2 * x, 1 + w / 4, bias, dy


@pytest.mark.parametrize("size", [(5, 4), (7,), (1, 1)])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_values_and_gradients_are_those_of_torch(size, groups):
    x, w, bias, dy = problem(*size)

    def found(normalise):
        def loss(x, w, bias, dy):
            y = normalise(x, w, bias)
            return (y * dy).sum(), y

        take = torch.func.grad(loss, argnums=(0, 1, 2), has_aux=True)
        gradients, y = torch.func.vmap(take)(x, w, bias, dy)
        return (y, *gradients)

    ours = found(lambda x, w, b: Normalisation.apply(x, w, b, groups, 1e-3)[0])
    theirs = found(lambda x, w, b: F.group_norm(x, groups, w, b, 1e-3))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


def test_halves_are_summed_in_single_floats():
    x, w, bias, dy = (t[0] for t in problem(32, 32, dtype=torch.float32))
    halves = x.bfloat16()
    y, mean, scale = Normalisation.apply(halves, w, bias, GROUPS, 1e-5)
    assert (y.dtype, mean.dtype, scale.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    wanted = F.group_norm(halves.double(), GROUPS, w.double(), bias.double())
    torch.testing.assert_close(y.double(), wanted, rtol=2**-8, atol=1e-5)
    leaf = halves.clone().requires_grad_()
    same = leaf.detach().double().requires_grad_()
    (Normalisation.apply(leaf, w, bias, GROUPS, 1e-5)[0].float() * dy).sum().backward()
    rounded = dy.bfloat16().double()  # what reaches a layer of halves
    (F.group_norm(same, GROUPS, w.double(), bias.double()) * rounded).sum().backward()
    torch.testing.assert_close(leaf.grad.double(), same.grad, rtol=2**-7, atol=1e-4)


def test_the_layer_is_torch_s_own_but_in_training_of_many(side_by_side, monkeypatch):
    layer, x = GroupNorm(GROUPS, CHANNELS), problem(5, 4, dtype=torch.float32)[0][0].bfloat16()
    calls, whole = [], Normalisation.apply
    monkeypatch.setattr(Normalisation, "apply", lambda *args: calls.append(1) or whole(*args))
    with torch.autocast("cpu", torch.bfloat16):
        ours = layer(x)
        assert calls == [1] and ours.dtype == torch.bfloat16
        theirs = layer.eval()(x)
        assert calls == [1]  # a gradient may be asked for, even twice
        with torch.no_grad():
            layer(x)
        assert calls == [1, 1]
        monkeypatch.setattr(convolution, "_many_on_gpu", lambda _: False)
        layer.train()(x)
        assert calls == [1, 1]
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.02, atol=0.02)


def test_a_second_derivative_is_refused_and_not_wrong():
    x, w, bias, _ = (t[0] for t in problem(5, 4))

    def slope(x):
        return torch.func.grad(lambda x: (Normalisation.apply(x, w, bias, 2, 1e-5)[0] ** 3).sum())(
            x
        )

    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.func.grad(lambda x: slope(x).sum())(x)


def traced(layers, mixed):
    """Return the graph of the gradients of some layers, for several clients."""
    named = {n: p.detach().expand(CLIENTS, *p.shape) for n, p in layers.named_parameters()}
    inputs = torch.randn(CLIENTS, BATCH, 3, 10, 10)

    def loss(named, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            return torch.func.functional_call(layers, named, (x,)).float().square().mean()

    return make_fx(torch.func.vmap(torch.func.grad(loss)))(named, inputs).graph


@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "bf16"])
def test_images_between_layers_are_not_copied(side_by_side, mixed):
    """A copy of images is a pass over most of what a step reads and writes."""
    channels = 2 * convolution.FEW
    layers = nn.Sequential(
        *(Conv2d(3, channels, 3, padding=1, bias=False), GroupNorm(GROUPS, channels), nn.ReLU()),
        *(Conv2d(channels, channels, 3, padding=1), GroupNorm(GROUPS, channels), nn.ReLU()),
        GlobalAverage(),
    )
    graph = traced(layers, mixed)
    images = CLIENTS * BATCH * channels * 10 * 10
    copies = [
        node
        for node in graph.nodes
        if node.target in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
        and node.meta["val"].numel() >= images
        and node.meta["val"].dtype == node.args[0].meta["val"].dtype
    ]
    # In float32 gradients of weights want positions innermost: of two outputs, and of the images
    # (padded, which is another copy) that the second layer sees.
    assert len(copies) == (0 if mixed else 3)
    # and the compiler sees what made them, not a view of it that it would have to copy
    second = [n for n in graph.nodes if n.target == torch.ops.fedbasin.outputs_of.default][1]
    assert second.args[0].target == torch.ops.aten.relu.default


class PositionsInside(nn.Module):
    """A layer that leaves images as most of torch's do."""

    def forward(self, x):
        return x.contiguous()


def test_kernels_are_given_channels_innermost(side_by_side):
    """Also where a layer between them leaves them otherwise."""
    channels = 2 * convolution.FEW
    layers = nn.Sequential(
        Conv2d(3, channels, 3), nn.ReLU(), PositionsInside(), Conv2d(channels, channels, 3)
    )
    given = [
        argument.meta["val"]
        for node in traced(layers, mixed=True).nodes
        if "fedbasin" in str(node.target)
        for argument in node.args[:2]
    ]
    assert len(given) == 2 * (2 + 1 + 2)  # outputs, gradients of images, gradients of weights
    for each in given:
        few = each.shape[-3] < convolution.FEW
        assert few or each.movedim(-3, -1).is_contiguous()
