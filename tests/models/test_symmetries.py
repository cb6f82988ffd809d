"""Permutations derived from a network leave it the same function, and no more than those do."""

import numpy as np
import pytest
import torch
from models.test_networks import CLASSES, MODELS, batch, build, tiny
from torch import nn
from torch.nn import functional

from fedbasin.core.net import Net
from fedbasin.core.permutations import Group, reorder
from fedbasin.models.symmetries import SymmetryError, permutations

VARIANTS = [(name, {}) for name in sorted(MODELS)] + [
    ("resnet8", {"norm": "batch"}),
    ("resnet8", {"norm": "none", "shortcut": "pad"}),
    ("resnet8", {"norm": "group", "shortcut": "pad", "groups": 4}),
    ("resnet8", {"groups": 8}),
    ("mobilenetv2", {"norm": "batch", "dropout": 0.2}),
    ("vgg11", {"norm": "none", "projector": 0}),
]


def shaken(network):
    """A Net with a model whose weights are all different, biases and normalisation included."""
    net = Net(network, dtype=torch.float64)
    draw = torch.Generator().manual_seed(0)
    vector = torch.empty(net.layout.size, dtype=torch.float64)
    for name, part in net.layout.views(vector).items():
        part.copy_(torch.randn(part.shape, generator=draw, dtype=torch.float64))
        if part.dim() > 1:
            part.mul_((2 / part[0].numel()) ** 0.5)
        else:
            part.mul_(0.1).add_(1.0 if "norm" in name and "weight" in name else 0.0)
    return net, vector


def uninitialised(name, **arguments):
    """A network without the time its initialisers take."""
    with torch.device("meta"):
        network = MODELS[name](tiny(name), CLASSES, **arguments)
    buffers = dict(network.named_buffers())
    network.to_empty(device="cpu")
    for part in network.buffers():
        part.zero_()
    assert len(buffers) == len(list(network.buffers()))
    return network


def reordered(vector, layout, group, order):
    other = vector.clone()
    reorder(other, layout, group, order)
    return other


def random_order(group, rng):
    """Any order within blocks, and blocks in any order."""
    width = group.size // group.blocks
    parts = [block * width + rng.permutation(width) for block in rng.permutation(group.blocks)]
    return torch.from_numpy(np.concatenate(parts))


def shuffled(vector, layout, groups, seed=0):
    rng, other = np.random.default_rng(seed), vector.clone()
    for group in groups:
        reorder(other, layout, group, random_order(group, rng))
    return other


@pytest.mark.parametrize(("name", "arguments"), VARIANTS, ids=lambda v: str(v))
def test_a_reordered_network_is_the_same_function(name, arguments):
    network = uninitialised(name, **arguments)
    x = batch(tiny(name))
    groups = permutations(network, x)
    net, vector = shaken(network)
    other = shuffled(vector, net.layout, groups)
    # In training BatchNorm uses the batch's own statistics, so that none has to move along.
    training = net.has_statistics and "dropout" not in arguments
    if net.has_statistics and not training:
        assert len(groups) > 20  # statistics do not travel with the vector: only derived
        return
    before, after = (net(v, x, training=training).logits for v in (vector, other))
    assert before.std() > 1e-3
    torch.testing.assert_close(after, before, rtol=1e-7, atol=1e-8)
    if name != "logistic":  # it has no hidden unit
        moved = (other != vector).double().mean()
        assert moved > 0.95, "every weight of a network belongs to a unit that may move"


def sizes(name, **arguments):
    return [(g.size, g.blocks) for g in permutations(build(name, tiny(name), **arguments), batch(tiny(name)))]  # fmt: skip  # noqa: E501


def test_groups_are_what_one_derives_by_hand():
    assert sizes("mlp") == [(200, 1), (200, 1)]
    assert sizes("fedcda_cnn") == [(32, 1), (64, 1), (512, 1)]
    assert sizes("logistic") == []
    # a stream and an inside for each of three stages; GroupNorm of two groups
    assert sizes("resnet8") == [(16, 2), (16, 2), (32, 2), (32, 2), (64, 2), (64, 2)]
    assert sorted(sizes("resnet8", norm="batch")) == sorted([(16, 1), (32, 1), (64, 1)] * 2)
    # one group for each block's inside and one for each stage's stream
    assert len(sizes("resnet20")) == 9 + 3
    assert sizes("shakespeare_lstm") == [(8, 1), (256, 1), (256, 1)]


def test_a_residual_stream_is_one_group_and_a_channel_owns_a_block_of_the_linear_layer():
    network = build("resnet8", (2, 8, 8))
    stream = permutations(network, batch((2, 8, 8)))[0]
    touched = {(place.name, place.axis) for place in stream.places}
    assert {
        ("body.conv.weight", 0),
        ("body.norm.bias", 0),
        ("body.stage1_1.conv1.weight", 1),
    } <= touched
    assert {("body.stage1_1.conv2.weight", 0), ("body.stage2_1.shortcut.conv.weight", 1)} <= touched
    cnn = permutations(build("fedcda_cnn", (1, 8, 8)), batch((1, 8, 8)))[1]
    places = {(p.name, p.axis): p.index for p in cnn.places}
    assert set(places) == {("body.conv2.weight", 0), ("body.conv2.bias", 0), ("body.fc1.weight", 1)}
    assert places["body.fc1.weight", 1].tolist() == [
        [4 * c + k for k in range(4)] for c in range(64)
    ]


def test_the_four_gates_of_a_cell_move_together():
    group = permutations(build("shakespeare_lstm", (6,), hidden=5), batch((6,)))[1]
    places = {(p.name, p.axis): p.index for p in group.places}
    gates = [[u, 5 + u, 10 + u, 15 + u] for u in range(5)]
    assert places["body.lstm1.input.weight", 0].tolist() == gates
    assert places["body.lstm1.recurrent.weight", 0].tolist() == gates
    assert places["body.lstm1.recurrent.weight", 1].tolist() == [[u] for u in range(5)]
    assert group.coupled


def test_channels_of_different_norm_groups_may_not_change_places():
    """One channel of each norm group swapped is another function; whole groups are the same."""
    network = build("resnet8", (2, 8, 8))
    x = batch((2, 8, 8))
    net, vector = shaken(network)
    group = permutations(network, x)[0]
    before = net(vector, x).logits
    across = torch.arange(16)
    across[[0, 8]] = across[[8, 0]]
    torch.testing.assert_close(
        net(reordered(vector, net.layout, group, across.roll(8)), x).logits
        - net(reordered(vector, net.layout, group, across), x).logits,
        torch.zeros_like(before), rtol=0, atol=1e-8,
    )  # fmt: skip
    wrong = net(reordered(vector, net.layout, group, across), x).logits
    right = net(reordered(vector, net.layout, group, torch.arange(16).roll(8)), x).logits
    assert (wrong - before).abs().max() > 1e-4
    torch.testing.assert_close(right, before, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", ["mlp", "lenet", "shakespeare_lstm", "resnet8", "densenet121"])
def test_a_slice_left_behind_is_another_function(name):
    """Each place of a group is needed: without it the function changes."""
    network = uninitialised(name)
    x = batch(tiny(name))
    net, vector = shaken(network)
    groups = permutations(network, x)
    before = net(vector, x).logits
    rng = np.random.default_rng(0)
    for group in groups[:: max(len(groups) // 3, 1)]:
        order = random_order(group, rng)
        places = group.places[:: max(len(group.places) // 4, 1)]
        for place in places:
            rest = tuple(p for p in group.places if p is not place)
            other = reordered(vector, net.layout, Group(rest, group.blocks), order)
            assert (net(other, x).logits - before).abs().max() > 1e-9, (place.name, place.axis)


class Odd(nn.Module):
    def __init__(self, mixes):
        super().__init__()
        self.first, self.head, self.mixes = nn.Linear(4, 6), nn.Linear(6, 3), mixes
        self.scale = nn.Parameter(torch.rand(6))
        self.unused = nn.Parameter(torch.rand(5, 5))

    def forward(self, x):
        return self.head(self.mixes(torch.relu(self.first(x)) * self.scale))


def test_a_network_of_your_own_is_followed_or_refused_with_the_operation_named():
    x = torch.zeros(2, 4)
    assert [g.size for g in permutations(Odd(lambda h: h), x)] == [6]
    whole = [
        lambda h: h - h.mean(1, keepdim=True),
        lambda h: torch.cat([h[:, :6]], 1),
        lambda h: h.unsqueeze(1).transpose(1, 2).squeeze(2),
        lambda h: functional.gelu(h).reshape(2, 6),
    ]
    for mixes in whole:
        assert [g.size for g in permutations(Odd(mixes), x)] == [6]
    # halves that are treated unlike stay apart; a unit that is picked out stays put
    halves = permutations(Odd(lambda h: torch.cat([h[:, :3] + h[:, 3:], h[:, 3:]], 1)), x)
    assert [(g.size, len(g.places[0].index[0])) for g in halves] == [(3, 2)]
    assert [g.size for g in permutations(Odd(lambda h: h + h[:, :1]), x)] == [5]
    # and so do those that a mean is taken of
    parts = permutations(Odd(lambda h: h * h[:, :2].mean(1, keepdim=True)), x)
    assert [g.size for g in parts] == [2, 4]
    for mixes, word in (
        (lambda h: h.roll(1, 1), "roll"),
        (lambda h: h.cumsum(1), "cumsum"),
        (lambda h: h.softmax(1), "softmax"),
        (lambda h: h.reshape(2, 2, 3).transpose(1, 2).reshape(2, 6), "mixes neurons"),
    ):
        with pytest.raises(SymmetryError, match=word):
            permutations(Odd(mixes), x)


@pytest.mark.parametrize("conv", [nn.Conv2d(4, 8, 3, groups=2), nn.ConvTranspose2d(4, 8, 3)])
def test_convolutions_that_are_not_understood_are_refused(conv):
    class Network(nn.Sequential):
        pass

    network = Network(nn.Conv2d(1, 4, 3), conv, nn.Flatten(), nn.LazyLinear(3))
    network(torch.zeros(1, 1, 8, 8))
    with pytest.raises(SymmetryError, match="groups"):
        permutations(network, torch.zeros(2, 1, 8, 8))


def test_the_odd_networks_are_the_same_functions():
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for mixes in (lambda h: h - h.mean(1, keepdim=True), lambda h: h + h[:, :1],
                  lambda h: h * h[:, :2].mean(1, keepdim=True),
                  lambda h: torch.cat([h[:, :3] + h[:, 3:], h[:, 3:]], 1)):  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(0)
            network = Odd(mixes)
        groups = permutations(network, torch.zeros(2, 4))
        net, vector = shaken(network)
        other = shuffled(vector, net.layout, groups)
        assert not torch.equal(other, vector)
        torch.testing.assert_close(
            net(other, x).logits, net(vector, x).logits, rtol=1e-9, atol=1e-9
        )
