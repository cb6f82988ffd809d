"""What every network must do, and what each is built to do."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from fedbasin import models
from fedbasin.core.catalogue import cards
from fedbasin.core.rng import root, torch_draws_from
from fedbasin.models.densenet import DenseBlock
from fedbasin.models.mobilenet import InvertedResidual
from fedbasin.models.parts import GlobalAverage
from fedbasin.models.resnets import ZeroPadShortcut

# name: the smallest side it takes, from the windows of its layers by hand
SMALLEST = {
    "logistic": 1,
    "mlp": 1,
    "fmnist_cnn": 16,  # 1 <- 2 <- 6 <- 12 <- 16
    "cifar_cnn": 16,
    "digit_cnn": 8,
    "vgg11": 32,
    "alexnet": 63,  # 1 <- 3 <- 7 <- 15 <- 63
    "fedcda_cnn": 4,
    "lenet": 4,
    "simple_cnn": 18,  # 1 <- 3 <- 6 <- 8 <- 16 <- 18
    "emnist_cnn": 6,
    "pfl_cnn": 6,
    "densenet121": 8,
    **dict.fromkeys(("resnet8", "resnet20", "resnet56", "resnet110", "wrn56_4"), 1),
    **dict.fromkeys(("resnet18", "resnet34", "mobilenetv2"), 1),
    "shakespeare_lstm": 1,
}
OTHERS = (
    "custom",
    "given",
    "hf",
    "lora",
    "timm",
)  # made of a user's module, of files, of another network
MODELS = {card.name: card.make for card in cards("model") if card.name not in OTHERS}
BOUNDED = sorted(name for name, side in SMALLEST.items() if side > 1)
NORMED = sorted(
    card.name for card in cards("model") if any(p.name == "norm" for p in card.parameters)
)
CLASSES = 5


def build(name, shape, classes=CLASSES, **arguments):
    with torch_draws_from(root(1).fold(name)):
        return MODELS[name](shape, classes, **arguments)


def tiny(name):
    """A small input that the network takes; at least 4 x 4, so that padding matters."""
    if name == "shakespeare_lstm":
        return (6,)
    side = max(SMALLEST[name], 4)
    return (2, side, side)


def batch(shape, rows=2, dtype=torch.float64, classes=CLASSES):
    generator = torch.Generator().manual_seed(7)
    if len(shape) == 1:
        return torch.randint(0, classes, (rows, *shape), generator=generator)
    return torch.randn(rows, *shape, generator=generator, dtype=dtype)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_head_of_features_is_the_output_and_nothing_is_unused(name):
    network = build(name, tiny(name)).double().eval()
    x = batch(tiny(name), rows=3)
    logits, features = network(x), network.features(x)
    assert isinstance(network.head, nn.Linear)
    assert features.shape == (3, network.head.in_features)
    assert logits.shape == (3, CLASSES)
    torch.testing.assert_close(network.head(features), logits, rtol=0, atol=0)
    loss = functional.cross_entropy(logits, torch.tensor([0, 1, 2]))
    gradients = torch.autograd.grad(loss, list(network.parameters()))  # raises if one is unused
    for (parameter, _), gradient in zip(network.named_parameters(), gradients, strict=True):
        assert gradient.isfinite().all(), parameter
        assert gradient.any(), parameter


@pytest.mark.parametrize("name", sorted(MODELS))
def test_vmap_over_three_models_equals_a_loop(name):
    network = build(name, tiny(name)).double()
    x = batch(tiny(name))
    generator = torch.Generator().manual_seed(3)
    stacked = {
        key: value.detach()
        + 0.05 * torch.randn(3, *value.shape, generator=generator, dtype=torch.float64)
        for key, value in network.named_parameters()
    }

    def forward(parameters):
        return functional_call(network, parameters, (x,))

    together = vmap(forward)(stacked)
    alone = [forward({key: value[k] for key, value in stacked.items()}) for k in range(3)]
    assert together.isfinite().all()
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"shakespeare_lstm"}))
def test_inputs_of_odd_sizes_and_channels(name):
    side = SMALLEST[name]
    shape = (4, side + 3, side + 6)
    with torch.device("meta"):
        network = MODELS[name](shape, 3)
        assert network(torch.empty(2, *shape)).shape == (2, 3)


@pytest.mark.parametrize("name", BOUNDED)
def test_an_image_that_is_too_small_is_refused_with_the_smallest_size(name):
    side = SMALLEST[name]
    with torch.device("meta"):
        MODELS[name]((1, side, side), 2)
        for shape in ((1, side - 1, side), (1, side, side - 1)):
            message = (
                f"{name} needs images of at least {side} x {side}, got {shape[1]} x {shape[2]}"
            )
            with pytest.raises(ValueError, match=message):
                MODELS[name](shape, 2)


def test_alexnet_on_small_images():
    with pytest.raises(ValueError, match="or stem='cifar'"):
        models.alexnet((3, 32, 32), 10)
    with torch.device("meta"):
        assert models.alexnet((3, 32, 32), 10, stem="cifar").body.fc1.in_features == 256 * 3 * 3
        models.alexnet((3, 15, 15), 10, stem="cifar")
        with pytest.raises(ValueError, match=r"at least 15 x 15, got 14 x 14; .* another model$"):
            models.alexnet((3, 14, 14), 10, stem="cifar")


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"logistic", "mlp"}))
def test_a_shape_of_the_wrong_kind_is_refused(name):
    wrong = (3, 8, 8) if name == "shakespeare_lstm" else (80,)
    with pytest.raises(ValueError, match=r"takes .* got shape"):
        MODELS[name](wrong, 2)


@settings(max_examples=15, deadline=None)
@given(height=st.integers(18, 70), width=st.integers(18, 70), name=st.sampled_from(BOUNDED))
def test_flat_features_are_what_the_convolutions_give(height, width, name):
    shape = (1, max(height, SMALLEST[name]), max(width, SMALLEST[name]))
    with torch.device("meta"):
        network = MODELS[name](shape, 2)
        assert network.features(torch.empty(1, *shape)).shape == (1, network.head.in_features)


@pytest.mark.parametrize(
    ("name", "arguments", "side", "expected"),
    [
        ("resnet20", {}, 32, 8),
        ("wrn56_4", {}, 32, 8),
        ("resnet18", {}, 32, 4),
        ("resnet18", {"stem": "imagenet"}, 224, 7),
        ("densenet121", {}, 32, 4),
        ("mobilenetv2", {}, 224, 7),
        ("mobilenetv2", {"stem": "cifar"}, 32, 4),
    ],
)
def test_size_of_the_last_feature_map(name, arguments, side, expected):
    seen = []
    with torch.device("meta"):
        network = MODELS[name]((3, side, side), 2, **arguments)
        (average,) = (m for m in network.modules() if isinstance(m, GlobalAverage))
        average.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[2:]))
        network(torch.empty(1, 3, side, side))
    assert seen == [(expected, expected)]


def test_fmnist_cnn_layer_by_layer():
    network = build("fmnist_cnn", (1, 28, 28))
    x = batch((1, 28, 28), dtype=torch.float32)
    weights = dict(network.named_parameters())

    def of(layer):
        return weights[f"{layer}.weight"], weights[f"{layer}.bias"]

    y = x
    for layer in ("body.conv1", "body.conv2"):
        y = functional.max_pool2d(functional.relu(functional.conv2d(y, *of(layer))), 2)
    y = y.reshape(2, 512)
    for layer in ("body.fc1", "body.fc2"):
        y = functional.relu(functional.linear(y, *of(layer)))
    torch.testing.assert_close(network.features(x), y)
    logits = functional.linear(y, *of("head"))
    torch.testing.assert_close(network(x), logits)
    ours, papers = (
        torch.autograd.grad(out.square().sum(), list(weights.values()))
        for out in (network(x), logits)
    )
    torch.testing.assert_close(ours, papers)  # ReLU stands behind the pooling, to the same effect


def test_digit_cnn_layer_by_layer():
    network = build("digit_cnn", (3, 28, 28)).double()
    y = x = batch((3, 28, 28))
    weights = dict(network.named_parameters())

    def of(layer):
        return weights[f"{layer}.weight"], weights[f"{layer}.bias"]

    for i in (1, 2, 3):
        y = functional.conv2d(y, *of(f"body.conv{i}"), padding=2)
        halves = y.reshape(2, 2, -1)  # two groups of channels, each of mean 0 and variance 1
        halves = halves - halves.mean(-1, keepdim=True)
        y = (halves / (halves.square().mean(-1, keepdim=True) + 1e-5).sqrt()).reshape(y.shape)
        y = functional.max_pool2d(y.clamp(min=0), 2)
    y = functional.linear(y.reshape(2, 1152), *of("body.fc1")).clamp(min=0)
    y = functional.linear(y, *of("body.fc2"))
    assert (y < 0).any()  # no ReLU on the features
    torch.testing.assert_close(network.features(x), y)


@pytest.mark.parametrize("shortcut", ["conv", "pad"])
def test_resnet8_layer_by_layer(shortcut):
    network = build("resnet8", (3, 8, 8), norm="none", shortcut=shortcut).double()
    x = batch((3, 8, 8))
    weights = dict(network.named_parameters())
    y = functional.relu(functional.conv2d(x, weights["body.conv.weight"], padding=1))
    for stage, stride in ((1, 1), (2, 2), (3, 2)):
        name = f"body.stage{stage}_1"
        branch = functional.conv2d(y, weights[f"{name}.conv1.weight"], stride=stride, padding=1)
        branch = functional.conv2d(branch.relu(), weights[f"{name}.conv2.weight"], padding=1)
        if stage > 1 and shortcut == "conv":
            y = functional.conv2d(y, weights[f"{name}.shortcut.conv.weight"], stride=2)
        elif stage > 1:
            y = torch.cat([y[:, :, ::2, ::2], torch.zeros_like(y[:, :, ::2, ::2])], dim=1)
        y = (branch + y).relu()
    torch.testing.assert_close(network.features(x), y.mean((2, 3)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vgg11", "1 pool 2 pool 3 4 pool 5 6 pool 7 8 pool"),
        ("alexnet", "1 pool 2 pool 3 4 5 pool"),
        ("pfl_cnn", "1 2 pool"),
    ],
)
def test_order_of_convolutions_norms_and_poolings(name, expected):
    with torch.device("meta"):
        body = MODELS[name]((3, 64, 64), 2).body
    kinds = (nn.Conv2d, nn.MaxPool2d, nn.GroupNorm, nn.ReLU)
    layers = [next((k for k in kinds if isinstance(each, k)), type(each)) for each in body]
    norm = [] if name == "pfl_cnn" else [nn.GroupNorm]
    wanted = []
    for word in expected.replace(" pool", "+pool").split():
        wanted += [nn.Conv2d, *norm, *[nn.MaxPool2d] * ("pool" in word), nn.ReLU]
    assert layers[: len(wanted)] == wanted


def test_zero_pad_shortcut_adds_no_parameters():
    assert not list(ZeroPadShortcut(4, 2).parameters())


def test_dense_block_keeps_its_input_behind_the_new_channels():
    block = DenseBlock(6, 4, nn.BatchNorm2d)
    x = batch((6, 3, 3), dtype=torch.float32)
    assert block(x).shape == (2, 10, 3, 3)
    torch.testing.assert_close(block(x)[:, 4:], x, rtol=0, atol=0)


def test_inverted_residual_adds_its_input_where_shapes_agree():
    def silent(inputs, outputs, stride):
        block = InvertedResidual(inputs, outputs, 6, stride, lambda _: nn.Identity())
        for parameter in block.parameters():
            nn.init.zeros_(parameter)
        return block(torch.ones(1, inputs, 4, 4))

    assert silent(4, 4, 1).eq(1).all()
    assert silent(4, 8, 1).eq(0).all()
    assert silent(4, 4, 2).shape == (1, 4, 2, 2)
    with torch.device("meta"):
        blocks = models.mobilenetv2((3, 32, 32), 2).modules()
    residual = [b.residual for b in blocks if isinstance(b, InvertedResidual)]
    assert (len(residual), sum(residual)) == (17, 10)


def test_resnet18_projector_is_linear():
    network = build("resnet18", (1, 4, 4), projector=6)
    assert network.head.in_features == 6
    assert isinstance(list(network.body)[-1], nn.Linear)


@pytest.mark.parametrize("name", NORMED)
def test_normalisation_by_name(name):
    with torch.device("meta"):
        kinds = {
            norm: MODELS[name](tiny(name), 2, norm=norm) for norm in ("group", "batch", "none")
        }
        four = MODELS[name](tiny(name), 2, groups=4)

    def found(network, kind):
        return [layer for layer in network.modules() if isinstance(layer, kind)]

    grouped = found(kinds["group"], nn.GroupNorm)
    assert {layer.num_groups for layer in grouped} == {2}
    assert {layer.num_groups for layer in found(four, nn.GroupNorm)} == {4}
    assert len(found(kinds["batch"], nn.BatchNorm2d)) == len(grouped) > 0
    for norm, banned in (("group", nn.BatchNorm2d), ("batch", nn.GroupNorm)):
        assert not found(kinds[norm], banned)
    assert not found(kinds["none"], nn.GroupNorm | nn.BatchNorm2d)
    assert not list(kinds["group"].buffers())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"norm": "layer"}, "norm must be one of group, batch, none, got 'layer'"),
        ({"groups": 3}, "groups=3 does not divide a layer of 64 channels"),
        ({"groups": 0}, "groups=0 does not divide"),
        ({"stem": "svhn"}, "stem must be one of cifar, imagenet, got 'svhn'"),
    ],
)
def test_a_wrong_argument_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        models.resnet18((3, 8, 8), 2, **arguments)


def test_other_wrong_arguments():
    with pytest.raises(ValueError, match="shortcut must be one of conv, pad, got 'id'"):
        models.resnet20((3, 8, 8), 2, shortcut="id")
    with pytest.raises(ValueError, match="stem must be one of imagenet, cifar, got 'x'"):
        models.mobilenetv2((3, 8, 8), 2, stem="x")
    with pytest.raises(ValueError, match="dropout takes two probabilities"):
        models.pfl_cnn((3, 8, 8), 2, dropout=(0.5,))


def test_batch_norm_under_vmap_equals_a_loop_and_moves_the_statistics():
    network = build("resnet8", (1, 4, 4), norm="batch").double()
    parameters = {k: v.detach().expand(3, *v.shape) for k, v in network.named_parameters()}
    start = {k: v.clone() for k, v in network.named_buffers()}
    x = torch.stack([batch((1, 4, 4), rows=4) * (k + 1) + k for k in range(3)])

    def loss(parameters, buffers, x):
        return functional_call(network, (parameters, buffers), (x,)).square().sum()

    together = {k: v.expand(3, *v.shape).clone() for k, v in start.items()}
    gradients = vmap(grad(loss))(parameters, together, x)
    for client in range(3):
        alone = {k: v.clone() for k, v in start.items()}
        expected = grad(loss)({k: v[client] for k, v in parameters.items()}, alone, x[client])
        for k in expected:
            torch.testing.assert_close(gradients[k][client], expected[k])
        for k in alone:
            torch.testing.assert_close(together[k][client], alone[k])
            assert not torch.equal(alone[k], start[k]), k
    for k, v in network.named_buffers():
        assert torch.equal(v, start[k]), "the module's own statistics must stay untouched"


@pytest.mark.parametrize("name", ["digit_cnn", "emnist_cnn", "resnet8", "shakespeare_lstm"])
def test_state_dict_round_trip(name):
    first, second = build(name, tiny(name)).eval(), MODELS[name](tiny(name), CLASSES).eval()
    x = batch(tiny(name), dtype=torch.float32)
    assert not torch.equal(first(x), second(x))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x), second(x))
    assert all(value.is_floating_point() for value in first.state_dict().values())


def test_the_same_key_builds_the_same_network():
    states = [build("fmnist_cnn", (1, 16, 16)).state_dict() for _ in range(2)]
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])


def weight_layers(network):
    return [m for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]


def test_fedjax_initialisation():
    network = build("emnist_cnn", (1, 28, 28), 62)
    for layer in weight_layers(network):
        deviation = 1 / math.sqrt(layer.weight[0].numel())
        assert layer.weight.abs().max() <= 2 * deviation
        if layer.weight.numel() > 5000:  # a normal cut at two deviations has 0.8796 of its spread
            assert layer.weight.std().item() == pytest.approx(0.8796 * deviation, rel=0.03)
        assert not layer.bias.any()


def test_pfl_initialisation_is_glorot():
    network = build("pfl_cnn", (3, 32, 32), 10)
    for layer in weight_layers(network):
        outputs, inputs, *window = layer.weight.shape
        limit = math.sqrt(6 / ((inputs + outputs) * math.prod(window)))
        assert 0.97 * limit < layer.weight.abs().max() <= limit
        assert layer.bias.any()


def test_resnet18_initialisation_is_he():
    network = build("resnet18", (3, 4, 4))
    weight = network.body.stage2_1.conv1.weight  # [128, 64, 3, 3]
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (128 * 9)), rel=0.02)
    fan_in = build("resnet20", (3, 4, 4)).body.stage3_2.conv1.weight  # torch's own: U(-a, a)
    assert fan_in.abs().max() <= 1 / math.sqrt(64 * 9)
