"""The convolution of many clients: its operators, its kernels (interpreted), its gradient."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models.interpreted_kernels import SHAPES, one_by_one, pair, problem
from torch.nn import functional as F

from fedbasin.models import convolution
from fedbasin.models.convolution import (
    FEW,
    Conv2d,
    Convolution,
    image_gradients,
    outputs_of,
    weight_gradients,
)
from fedbasin.sim.tracing import Compiled

SCRIPT = Path(__file__).with_name("interpreted_kernels.py")


@pytest.mark.parametrize("shape", SHAPES)
def test_operators_equal_convolutions_one_by_one(shape):
    _, _, window, stride, padding, size, *_ = shape
    x, w, bias, dy = problem(shape)
    y, dx, dw = one_by_one(x, w, bias, dy, stride, padding)
    found = (
        outputs_of(x, w, bias, stride, padding),
        image_gradients(dy, w, pair(size), stride, padding),
        weight_gradients(dy, x, pair(window), stride, padding),
    )
    for ours, theirs in zip(found, (y, dx, dw), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    for op, args in (
        (outputs_of, (x, w, bias, stride, padding)),
        (image_gradients, (dy, w, pair(size), stride, padding)),
        (weight_gradients, (dy, x, pair(window), stride, padding)),
    ):  # shapes and strides that the compiler is told are those that come out
        torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("channels", [FEW - 1, FEW])
def test_halves_give_gradients_of_weights_that_were_summed_whole(channels):
    """With many channels images are read as they lie, with few they are padded and copied."""
    _, _, window, stride, padding, _, *_ = shape = (channels, 12, 3, 2, 1, 7, 5, 3)
    x, w, bias, dy = (t.bfloat16() for t in problem(shape))
    wanted = one_by_one(*(t.double() for t in (x, w, bias, dy)), stride, padding)[2]
    args = (dy, x, pair(window), stride, padding)
    sums = weight_gradients(*args)
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums.double(), wanted, rtol=0.02, atol=0.05)
    torch.library.opcheck(
        weight_gradients.default, args, test_utils=("test_schema", "test_faketensor")
    )

    def loss(w, x, dy):
        return (Convolution.apply(x, w, None, stride, padding) * dy).sum()

    found = torch.func.vmap(torch.func.grad(loss))(w, x, dy)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), wanted, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("has_bias", [True, False])
def test_gradients_under_vmap_are_those_of_torch(has_bias):
    x, w, bias, _ = problem((3, 4, 3, 2, 1, 7, 5, 3))

    def gradients(convolve):
        def loss(w, bias, x):
            return (convolve(x, w, bias if has_bias else None) ** 2).sum()

        wanted = (0, 1, 2) if has_bias else (0, 2)
        return torch.func.vmap(torch.func.grad(loss, argnums=wanted))(w, bias, x)

    ours = gradients(lambda x, w, b: Convolution.apply(x, w, b, 2, 1))
    theirs = gradients(lambda x, w, b: F.conv2d(x, w, b, 2, 1))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


def test_shared_images_and_nested_axes():
    x, w, bias, _ = problem((3, 4, 3, 1, 0, 6, 2, 4))
    shared = torch.func.vmap(lambda w, b: Convolution.apply(x[0], w, b, 1, 0))(w, bias)
    torch.testing.assert_close(shared[2], F.conv2d(x[0], w[2], bias[2]))
    pairs = [t.unflatten(0, (2, 2)) for t in (x, w, bias)]
    nested = torch.func.vmap(torch.func.vmap(lambda x, w, b: Convolution.apply(x, w, b, 1, 0)))
    torch.testing.assert_close(nested(*pairs)[1, 0], F.conv2d(x[2], w[2], bias[2]))


def test_a_second_derivative_is_refused_and_not_zero():
    x, w, bias, _ = problem((3, 4, 3, 1, 0, 6, 2, 1))

    def slope(w):
        return torch.func.grad(lambda w: (Convolution.apply(x[0], w, bias[0], 1, 0) ** 2).sum())(w)

    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.func.grad(lambda w: slope(w).sum())(w[0])


def test_images_that_need_no_gradient_get_none():
    x, w, bias, dy = problem((3, 4, 3, 1, 0, 6, 2, 1))
    leaf = w[0].clone().requires_grad_()
    y = Convolution.apply(x[0], leaf, None, 1, 0)
    assert [edge is None for edge, _ in y.grad_fn.next_functions] == [True, False]
    torch.testing.assert_close(
        torch.autograd.grad(y, leaf, dy[0])[0], one_by_one(x, w, bias, dy, 1, 0)[2][0]
    )


def test_the_layer_is_torch_s_own_where_the_kernels_stand_aside():
    x, w, bias, _ = problem((3, 4, 3, 2, 1, 7, 5, 2))
    layer = Conv2d(3, 4, 3, 2, 1).double()

    def run(w, b, x):
        return torch.func.functional_call(layer, {"weight": w, "bias": b}, (x,))

    torch.testing.assert_close(run(w[0], bias[0], x[0]), F.conv2d(x[0], w[0], bias[0], 2, 1))
    every = torch.func.vmap(run)(w, bias, x)  # on a CPU
    torch.testing.assert_close(every[1], F.conv2d(x[1], w[1], bias[1], 2, 1))
    assert not Conv2d(4, 4, 3, groups=2)._plain()
    assert not Conv2d(4, 4, 3, dilation=2)._plain()
    assert not Conv2d(4, 4, 3, padding=(1, 2))._plain()
    assert not Conv2d(4, 4, 3, stride=(1, 2))._plain()


@pytest.fixture
def counted(monkeypatch):
    """Take a CPU for a GPU, and count how often the operators run in place of torch's layer."""
    calls = []
    whole = Convolution.apply
    monkeypatch.setattr(convolution, "_many_on_gpu", lambda _: True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(Convolution, "apply", lambda *args: calls.append(1) or whole(*args))
    return calls


@pytest.mark.parametrize("has_bias", [True, False])
def test_the_layer_takes_the_operators_in_training_and_for_scores(counted, has_bias):
    x, w, bias, _ = (t.float() for t in problem((3, 4, 3, 2, 1, 7, 5, 2)))
    layer = Conv2d(3, 4, 3, 2, 1, bias=has_bias)
    parameters = {"weight": w} | ({"bias": bias} if has_bias else {})

    def run(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,))

    wanted = torch.stack(
        [F.conv2d(x[a], w[a], bias[a] if has_bias else None, 2, 1) for a in (0, 1)]
    )
    torch.testing.assert_close(torch.func.vmap(run)(parameters, x), wanted)
    assert len(counted) == 1
    layer.eval()
    torch.testing.assert_close(torch.func.vmap(run)(parameters, x), wanted)
    assert len(counted) == 1  # a gradient may be asked for, even twice
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(run)(parameters, x), wanted)
    assert len(counted) == 2


def test_the_layer_is_torch_s_where_factors_may_not_be_rounded(counted, monkeypatch):
    x, w, bias, _ = problem((3, 4, 3, 2, 1, 7, 5, 1))
    layer = Conv2d(3, 4, 3, 2, 1)
    run = torch.func.functional_call
    run(layer, {"weight": w[0], "bias": bias[0]}, (x[0],))  # float64
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    run(layer, {"weight": w[0].float(), "bias": bias[0].float()}, (x[0].float(),))
    assert not counted
    with torch.autocast("cpu", torch.bfloat16):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
        y = run(layer, {"weight": w[0].float(), "bias": bias[0].float()}, (x[0].float(),))
    assert counted and y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), F.conv2d(x[0], w[0], bias[0], 2, 1), rtol=0.05, atol=0.1)


def test_kernels_equal_convolutions_one_by_one():
    """Triton's interpreter runs them on a CPU, in a process of its own: it is chosen at import."""
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("ok") == 2 * (len(SHAPES) + 2)


def test_a_compiled_step_takes_the_convolution_s_gradient_for_any_number_of_clients():
    """Tracing by source would pass the gradient by."""
    _, w, bias, _ = problem((3, 4, 3, 1, 0, 6, 2, 12))
    x = problem((3, 4, 3, 1, 0, 6, 2, 12))[0]

    def loss(w, bias, x):
        return (Convolution.apply(x, w, bias, 1, 0).relu() ** 2).mean()

    def step(weights, inputs, scale):
        return (weights[0] - scale * torch.func.vmap(torch.func.grad(loss))(*weights, inputs[0]),)

    compiled = Compiled(step, "aot_eager")
    scale = torch.tensor(0.1, dtype=torch.float64)
    for clients in (4, 1, 2, 12):
        args = ((w[:clients], bias[:clients]), (x[:clients],), scale)
        torch.testing.assert_close(compiled(*args)[0], step(*args)[0], rtol=1e-12, atol=1e-12)
    assert compiled.count == 2


WINDOWS = [
    (window, stride, padding, size)
    for window in (1, 2, 3, 4, (3, 2))
    for stride in (1, 2, 3)
    for padding in (0, 1, 2)
    for size in (1, 2, 3, (1, 2), (4, 1))
    if all(s + 2 * padding >= w for s, w in zip(pair(size), pair(window), strict=True))
]


@pytest.mark.parametrize("window", [1, 2, 3, 4, (3, 2)], ids=str)
def test_taps_that_see_no_pixel_are_left_out_and_change_nothing(counted, monkeypatch, window):
    taps = []
    whole = Convolution.apply
    monkeypatch.setattr(
        Convolution, "apply", lambda x, w, *rest: taps.append(w.shape[2:]) or whole(x, w, *rest)
    )
    for _, stride, padding, size in (each for each in WINDOWS if each[0] == window):
        x, w, bias, dy = problem((3, 4, window, stride, padding, size, 2, 2), torch.float32)
        layer = Conv2d(3, 4, window, stride, padding)

        def run(w, b, x, layer=layer):
            return torch.func.functional_call(layer, {"weight": w, "bias": b}, (x,))

        ours, back = torch.func.vjp(torch.func.vmap(run), w, bias, x)
        y, dx, dw = one_by_one(x, w, bias, dy, stride, padding)
        for mine, theirs in zip((ours, *back(dy)), (y, dw, dy.sum((1, 3, 4)), dx), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        if (window, stride, padding) == (3, 1, 1):
            assert taps[-1] == ((1, 1) if size == 1 else (3, 3))
        if (window, stride, padding, size) == (3, 2, 1, 2):
            assert taps[-1] == (2, 2)


def test_a_window_that_torch_pads_by_name_is_left_to_it(counted):
    layer = Conv2d(3, 4, 3, padding="same")
    x = torch.ones(2, 3, 5, 5)
    torch.testing.assert_close(layer(x), F.conv2d(x, layer.weight, layer.bias, padding="same"))
    assert not counted
