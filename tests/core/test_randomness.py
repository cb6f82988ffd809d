"""Dropout of a user's module: torch's, with masks from a key; other draws are refused."""

import copy
import math
import re

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from fedbasin.core.net import Net
from fedbasin.core.randomness import _ANSWERS, _RANDOM, KeyedDraws, RandomnessError, draw_kept
from fedbasin.core.rng import fold_in, keys_tensor, root, torch_draws_from

KEYS = [root(seed).fold("dropout") for seed in range(5)]
GENERATOR = torch.Generator().manual_seed(0)


def draws(*shape):
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def keyed(module, *inputs, key=KEYS[0], rows=None):
    """Run a module or function as `Net` does in training."""
    root_module = module if isinstance(module, nn.Module) else nn.Identity()
    rows = len(inputs[0]) if rows is None else rows
    with KeyedDraws(root_module, rows, key.tensor()):
        return module(*inputs)


class Over(nn.Module):
    """Sequences of 4 numbers, a layer over them, 3 classes."""

    def __init__(self, layer):
        super().__init__()
        self.up = nn.Linear(1, 4)
        self.layer = layer
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        states = self.layer(self.up(x[:, :, None]))
        return self.head((states[0] if isinstance(states, tuple) else states).mean(1))


def encoder(**settings):
    layer = nn.TransformerEncoderLayer(4, 2, 8, **{"batch_first": True, **settings})
    return Over(nn.TransformerEncoder(layer, 2))


def gru():
    return Over(nn.GRU(4, 4, 2, dropout=0.5, batch_first=True))


def dense():
    return nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Dropout(0.3), nn.Linear(9, 3))


def made(maker):
    with torch_draws_from(root(7)):
        return maker().double()


# Masks


def test_the_mask_of_a_call_is_drawn_from_the_key_and_its_number():
    def twice(x):
        return torch.stack([F.dropout(x, 0.25), F.dropout(x, 0.3)])

    x = torch.ones(3, 2, 7)
    found = keyed(twice, x, key=KEYS[2])
    for call, p in enumerate((0.25, 0.3)):
        key = fold_in(fold_in(KEYS[2].tensor(), 0x64726F70), call)
        kept, share = draw_kept(key, (3, 2, 7), p, torch.device("cpu"))
        assert share == pytest.approx(1 - p, abs=1e-5)
        assert torch.equal(found[call], kept / share)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_a_share_p_is_dropped_and_the_rest_scaled(p):
    n = 200 * 300
    y = keyed(nn.Dropout(p), torch.full((200, 300), 3.0, dtype=torch.float64))
    kept = y != 0
    assert abs(kept.sum() - n * (1 - p)) <= 5 * math.sqrt(n * p * (1 - p))
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 3 / (1 - p)), rtol=1e-4, atol=0)


def test_keys_layers_calls_rows_and_places_have_masks_of_their_own():
    class Thrice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Dropout(), nn.Dropout()

        def forward(self, x):
            return torch.stack([self.one(x), self.one(x), self.other(x)], 1)

    x = torch.ones(50, 400)
    found = torch.stack([keyed(Thrice(), x, key=key) for key in KEYS[:2]]) != 0
    masks = found.permute(0, 2, 1, 3).reshape(6, -1).double()
    together = torch.corrcoef(masks) - torch.eye(6)
    assert together.abs().max() < 5 / math.sqrt(masks.shape[1])
    rows = found[0, :, 0].double()
    assert (torch.corrcoef(rows) - torch.eye(50)).abs().max() < 5 / math.sqrt(400)
    assert (torch.corrcoef(rows.T) - torch.eye(400)).abs().max() < 6 / math.sqrt(50)
    assert torch.equal(keyed(Thrice(), x), keyed(Thrice(), x))


@pytest.mark.parametrize("layer", [nn.Dropout1d, nn.Dropout2d, nn.Dropout3d])
def test_whole_channels_are_dropped(layer):
    axes = int(layer.__name__[-2])
    y = keyed(layer(0.5), torch.ones(40, 30, *(2, 3, 4)[:axes]))
    flat = y.flatten(2)
    assert torch.equal(flat, flat[:, :, :1].expand_as(flat))
    assert set(y.unique().tolist()) == {0.0, 2.0}
    assert abs((flat[:, :, 0] == 0).double().mean() - 0.5) < 5 * 0.5 / math.sqrt(1200)


@pytest.mark.parametrize("layer", [nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_alpha_dropout_keeps_mean_and_variance_and_has_two_outcomes(layer):
    x = draws(400, 300, 3)
    y = keyed(layer(0.25), x)
    assert abs(y.mean()) < 0.02 and abs(y.var() - 1) < 0.03
    alpha, p = 1.6732632423543772 * 1.0507009873554805, 0.25
    a = ((1 - p) * (1 + p * alpha**2)) ** -0.5
    b = a * alpha * p
    kept = torch.isclose(y, a * x + b)
    torch.testing.assert_close(y[~kept], torch.full_like(y[~kept], b - a * alpha))
    assert abs(kept.double().mean() - 0.75) < 0.01
    assert (kept == kept[:, :, :1]).all() == (layer is nn.FeatureAlphaDropout)


@pytest.mark.parametrize("layer", [nn.Dropout, nn.Dropout2d, nn.AlphaDropout])
def test_zero_one_and_evaluation_are_torchs(layer):
    x = draws(3, 2, 2, 2)
    assert torch.equal(keyed(layer(0.0), x), x)
    assert torch.equal(keyed(layer(1.0), x), torch.zeros_like(x))
    assert torch.equal(keyed(layer(0.5).eval(), x), x)


@pytest.mark.parametrize("function", [F.dropout, F.dropout2d, F.alpha_dropout])
def test_in_place_writes_what_would_be_returned(function):
    x = draws(3, 5, 2, 2)
    expected = keyed(lambda x: function(x, 0.5, True), x)
    y = x.clone()
    assert keyed(lambda y: function(y, 0.5, True, inplace=True), y) is y
    assert torch.equal(y, expected) and not torch.equal(x, y)


# Attention and recurrent layers


def test_attention_drops_weights_with_torchs_definition():
    q, k = draws(2, 3, 5, 4), draws(2, 3, 6, 4)
    values = torch.eye(6, dtype=torch.float64).expand(2, 3, 6, 6)  # shows the weights
    mask = torch.ones(5, 6, dtype=torch.bool)
    mask[:, 4:] = False
    mask[1] = False  # attends to nothing
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": draws(5, 6)}):
        options = {**options, "scale": 0.7}
        plain = F.scaled_dot_product_attention(q, k, values, **options)
        dropped = keyed(
            lambda *x, o=options: F.scaled_dot_product_attention(*x, dropout_p=0.25, **o),
            *(q, k, values),
        )
        kept = dropped != 0
        torch.testing.assert_close(dropped[kept], plain[kept] / 0.75)
        share = kept.sum() / (plain != 0).sum()
        assert 0.6 < share < 0.9


def test_grouped_queries_share_keys():
    q, k = draws(2, 4, 3, 4), draws(2, 2, 3, 4)
    values = torch.eye(3, dtype=torch.float64).expand(2, 2, 3, 3)
    plain = F.scaled_dot_product_attention(q, k, values, enable_gqa=True)
    dropped = keyed(
        lambda *x: F.scaled_dot_product_attention(*x, dropout_p=0.5, enable_gqa=True), q, k, values
    )
    torch.testing.assert_close(dropped[dropped != 0], 2 * plain[dropped != 0])


@pytest.mark.parametrize("options", [{}, {"add_zero_attn": True, "add_bias_kv": True}])
def test_multihead_attention_returns_the_dropped_weights_it_used(options):
    module = made(lambda: nn.MultiheadAttention(6, 2, 0.5, batch_first=True, bias=False, **options))
    x = draws(3, 4, 6)
    plain, weights = module.eval()(x, x, x, average_attn_weights=False)
    module.train()
    out, dropped = keyed(lambda x: module(x, x, x, average_attn_weights=False), x)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], 2 * weights[kept])
    assert 0.25 < kept.double().mean() < 0.75
    if not options:  # the output is the dropped weights times the values
        values = (x @ module.in_proj_weight[12:].T).view(3, 4, 2, 3).transpose(1, 2)
        heads = (dropped @ values).transpose(1, 2).flatten(2)
        torch.testing.assert_close(out, heads @ module.out_proj.weight.T)
    alone, none = keyed(lambda x: module(x, x, x, need_weights=False), x)
    assert none is None and not torch.allclose(alone, plain)


def test_a_transformer_layer_is_its_formula_with_four_dropouts():
    layer = made(lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True))

    def formula(x):
        attention = layer.self_attn
        q, k, v = F.linear(x, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)
        q, k, v = (each.unflatten(2, (2, 3)).transpose(1, 2) for each in (q, k, v))
        weights = F.dropout((q @ k.transpose(2, 3) / math.sqrt(3)).softmax(-1), 0.3)
        mixed = attention.out_proj((weights @ v).transpose(1, 2).flatten(2))
        x = layer.norm1(x + F.dropout(mixed, 0.3))
        hidden = F.dropout(F.relu(layer.linear1(x)), 0.3)
        return layer.norm2(x + F.dropout(layer.linear2(hidden), 0.3))

    x = draws(3, 5, 6)
    torch.testing.assert_close(keyed(layer, x), keyed(formula, x))


RECURRENT = pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.GRU, {}),
        (nn.GRU, {"bidirectional": True, "bias": False}),
        (nn.LSTM, {}),
        (nn.LSTM, {"bidirectional": True, "proj_size": 2}),
        (nn.RNN, {}),
        (nn.RNN, {"nonlinearity": "relu"}),
    ],
)


@RECURRENT
def test_recurrent_layers_drop_between_their_layers(kind, options):
    settings = {"batch_first": True, **options}
    whole = made(lambda: kind(3, 5, 3, dropout=0.4, **settings))
    x = draws(4, 6, 3)
    widths = [3, *[whole(x)[0].shape[2]] * 2]
    layers = [kind(width, 5, **settings).double() for width in widths]
    for number, layer in enumerate(layers):
        layer.load_state_dict(
            {
                name.replace(f"_l{number}", "_l0"): value
                for name, value in whole.state_dict().items()
                if f"_l{number}" in name
            }
        )

    directions = 1 + whole.bidirectional
    several = kind is nn.LSTM
    shapes = [each.shape for each in (whole(x)[1] if several else [whole(x)[1]])]
    start = [draws(*shape) for shape in shapes]

    def stacked(x):
        ends = []
        for number, layer in enumerate(layers):
            begin = tuple(each.split(directions)[number] for each in start)
            x = F.dropout(x, 0.4) if number else x
            x, end = layer(x, begin if several else begin[0])
            ends.append(end if isinstance(end, tuple) else (end,))
        return x, *(torch.cat(each) for each in zip(*ends, strict=True))

    begin = tuple(start) if several else start[0]
    out, last = keyed(whole, x, begin)
    expected, *ends = keyed(stacked, x)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(list(last) if several else [last], ends)
    whole.dropout = 0.0
    torch.testing.assert_close(keyed(whole, x)[0], whole(x)[0])
    assert not torch.allclose(whole(x, begin)[0], out)


@RECURRENT
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_layers_are_torchs_own_under_vmap(kind, options, training, batch_first):
    module = made(lambda: kind(3, 5, 2, batch_first=batch_first, **options)).train(training)
    names = list(module.state_dict())
    values = [value.detach() for value in module.state_dict().values()]
    x = draws(2, 4, 6, 3)

    def outputs(scale, x):
        named = {name: value * scale for name, value in zip(names, values, strict=True)}
        with KeyedDraws(module, 4, KEYS[0].tensor()):
            states, last = functional_call(module, named, (x,))
        return torch.cat([states.flatten(), *(each.flatten() for each in last)])

    def loss(scale, x):
        return outputs(scale, x).square().sum()

    scales = torch.tensor([1.0, 1.5], dtype=torch.float64)
    expected = torch.stack([outputs(scale, row) for scale, row in zip(scales, x, strict=True)])
    slopes = torch.stack([grad(loss)(scale, row) for scale, row in zip(scales, x, strict=True)])
    if not training:
        torch.testing.assert_close(vmap(outputs)(scales, x), expected)
        alone = torch.stack([grad(loss)(scales[0], row) for row in x])
        torch.testing.assert_close(vmap(grad(loss), (None, 0))(scales[0], x), alone)
    torch.testing.assert_close(vmap(grad(loss))(scales, x), slopes)


# A network


@pytest.mark.parametrize("maker", [dense, encoder, gru])
def test_rows_added_to_a_batch_change_no_other_row(maker):
    net = Net(made(maker), dtype=torch.float64)
    vector, _ = net.initial()
    x, key = draws(5, 4), KEYS[0].tensor()
    whole = net(vector, x, key=key, training=True).logits
    torch.testing.assert_close(whole[:3], net(vector, x[:3], key=key, training=True).logits)
    other = net(vector, x, key=KEYS[1].tensor(), training=True).logits
    assert not torch.allclose(whole, other)
    net.check_draws(x)


@pytest.mark.parametrize("maker", [dense, encoder, gru])
def test_gradients_are_right_and_the_same_under_vmap(maker):
    net = Net(made(maker), dtype=torch.float64)
    vector, _ = net.initial()
    x = draws(3, 4)

    def loss(vector, key, x):
        return net(vector, x, key=key, training=True).logits.square().sum()

    for key in KEYS[:2]:
        leaf = vector.clone().requires_grad_()
        assert torch.autograd.gradcheck(
            lambda v, k=key: loss(v, k.tensor(), x), leaf, fast_mode=True
        )
    vectors = torch.stack([vector, 2 * vector, 3 * vector])
    together = vmap(grad(loss), in_dims=(0, 0, None))(vectors, keys_tensor(KEYS[:3]), x)
    for row, key, found in zip(vectors, KEYS, together, strict=False):
        torch.testing.assert_close(found, grad(loss)(row, key.tensor(), x))


@pytest.mark.parametrize("maker", [dense, encoder, gru])
def test_the_users_module_is_left_alone_and_takes_the_trained_model(maker):
    module = made(maker).float().eval()
    before = copy.deepcopy(module.state_dict())
    net = Net(module, dtype=torch.float64)
    vector, buffers = net.initial()
    x = draws(3, 4)
    net(vector, x, training=True)
    after = module.state_dict()
    assert list(before) == list(after) and not module.training
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(value.dtype is torch.float32 for value in after.values())
    fresh = made(maker).eval()
    fresh.load_state_dict(net.state_dict(vector * 2, buffers))
    torch.testing.assert_close(fresh(x), net(vector * 2, x).logits)


def test_evaluation_draws_nothing_and_is_torchs_own_under_vmap_too():
    module = made(encoder).eval()
    net = Net(module, dtype=torch.float64)
    vector, _ = net.initial()
    x = draws(3, 4)
    with torch.no_grad():  # where torch takes a path of its own that `vmap` does not know
        expected = module(x)
        torch.testing.assert_close(net(vector, x).logits, expected)
        together = vmap(lambda v: net(v, x).logits)(torch.stack([vector, vector]))
    torch.testing.assert_close(together[1], expected)


def test_recurrent_layers_are_not_compiled_unasked():
    assert not Net(made(gru)).compiles
    assert not Net(nn.Sequential(nn.Linear(2, 2), nn.LSTMCell(2, 2))).compiles
    assert Net(made(encoder)).compiles and Net(made(dense)).compiles


# Refusals


class Calls(nn.Module):
    """A layer that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("rand_like", lambda x: x + torch.rand_like(x)),
        ("randn", lambda x: x + torch.randn(4)),
        ("bernoulli_", lambda x: x * torch.empty_like(x).bernoulli_(0.5)),
        ("normal", lambda x: x + torch.distributions.Normal(0.0, 1.0).sample()),
        ("_sample_dirichlet", lambda x: x * torch.distributions.Beta(1.0, 1.0).sample()),
        ("randperm", lambda x: x[:, torch.randperm(4)]),
        ("multinomial", lambda x: x[:, torch.multinomial(x[0].abs(), 4)]),
        ("gumbel_softmax", F.gumbel_softmax),
        ("alpha_dropout", lambda x: torch.alpha_dropout(x, 0.5, True)),
        ("rrelu", lambda x: F.rrelu(x, training=True)),
    ],
)
def test_other_global_randomness_is_refused_by_name(name, function):
    net = Net(nn.Sequential(nn.Linear(4, 4), nn.Sequential(Calls(function))))
    vector, _ = net.initial()
    told = rf"layer '1.0' \(Calls\) calls torch's {name}, which draws from a global generator"
    with pytest.raises(RandomnessError, match=told):
        net(vector, torch.rand(3, 4), training=True)
    with pytest.raises(RandomnessError, match=told):
        net.check_draws(torch.rand(3, 4))


def test_layers_of_torch_that_draw_are_refused_in_training_alone():
    net = Net(nn.Sequential(nn.Linear(4, 4), nn.RReLU()))
    vector, _ = net.initial()
    with pytest.raises(RandomnessError, match=r"layer '1' \(RReLU\) calls torch's rrelu"):
        net(vector, torch.rand(3, 4), training=True)
    assert net(vector, torch.rand(3, 4)).logits.shape == (3, 4)


def test_every_drawing_function_of_torch_is_answered_or_refused():
    seeded = set()
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        packet = getattr(torch.ops.aten, name, None)
        overload = getattr(packet, schema.overload_name or "default", None)
        public = callable(getattr(torch, name, None)) or callable(getattr(torch.Tensor, name, None))
        if overload is None or not public or name.startswith("_"):
            continue
        if torch.Tag.nondeterministic_seeded in overload.tags:
            seeded.add(name)
    answered = {function.__name__ for function in _ANSWERS}
    assert {"bernoulli", "native_dropout", "randn_like"} <= seeded
    assert seeded - _RANDOM - answered == {"miopen_rnn"}  # of another device


def test_dropout_that_forgets_evaluation_is_refused():
    net = Net(nn.Sequential(nn.Linear(4, 4), Calls(lambda x: F.dropout(x, 0.5))))
    vector, _ = net.initial()
    net(vector, torch.rand(3, 4), training=True)
    with pytest.raises(RandomnessError, match=r"layer '1' .*evaluation; pass training=self.train"):
        net(vector, torch.rand(3, 4))


@pytest.mark.parametrize("reentrant", [True, False])
def test_dropout_under_checkpointing_is_refused(reentrant):
    drop = nn.Dropout()
    again = Calls(lambda x: checkpoint(drop, x, use_reentrant=reentrant))
    net = Net(nn.Sequential(nn.Linear(4, 4), again))
    leaf = net.initial()[0].requires_grad_()
    with pytest.raises(RandomnessError, match=r"layer '1' .*turn checkpointing off"):
        net(leaf, torch.rand(3, 4), training=True)


@pytest.mark.parametrize(
    ("layer", "path"),
    [
        (lambda: nn.TransformerEncoderLayer(4, 2, 8), "layer.self_attn"),
        (lambda: nn.MultiheadAttention(4, 2, dropout=0.1), "layer"),
        (lambda: nn.GRU(4, 4, 2, dropout=0.1), "layer"),
    ],
)
def test_rows_on_another_axis_are_refused_with_the_fix(layer, path):
    told = f"layer {path!r} .* has dropout=0.1 and batch_first=False.* with batch_first=True"
    with pytest.raises(RandomnessError, match=told):
        Net(Over(layer()))


def test_without_dropout_rows_may_lie_anywhere():
    Net(Over(nn.GRU(4, 4, 2)))
    Net(Over(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)))


class TimeFirst(nn.Module):
    """Drops elements of [time, rows, numbers]."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(2, 3)

    def forward(self, x):
        sequence = x[:, None].expand(-1, self.steps, -1).transpose(0, 1)
        return self.head(self.drop(sequence).mean(0))


def test_dropout_on_another_axis_than_the_rows_is_found():
    net = Net(TimeFirst(5))
    told = "layer 'drop' (Dropout) drops elements of [5, 3, 2] in a batch of 3 rows"
    with pytest.raises(RandomnessError, match=re.escape(told)):
        net(net.initial()[0], torch.rand(3, 2), training=True)
    net = Net(TimeFirst(6))  # a multiple of the rows, as rows times heads would be
    net(net.initial()[0], torch.rand(3, 2), training=True)
    with pytest.raises(RandomnessError, match="TimeFirst: in training a row added to the batch"):
        net.check_draws(torch.rand(3, 2))


def test_a_network_that_mixes_rows_itself_is_not_blamed_on_dropout():
    mixing = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), Calls(lambda x: x - x.mean(0)))
    Net(mixing).check_draws(torch.rand(3, 4))
    Net(nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.BatchNorm1d(4))).check_draws(
        torch.rand(3, 4)
    )


def test_packed_sequences_and_batches_without_channels_are_refused():
    class Packs(Over):
        def forward(self, x):
            lengths = torch.full((len(x),), 2)
            return self.layer(pack_padded_sequence(self.up(x[:, :, None]), lengths, True))[0].data

    net = Net(Packs(nn.GRU(4, 4, 2, dropout=0.5, batch_first=True)))
    with pytest.raises(RandomnessError, match=r"layer 'layer' .GRU.*padded sequences in place"):
        net(net.initial()[0], torch.rand(3, 4), training=True)
    net = Net(nn.Sequential(nn.Linear(4, 4), nn.Dropout1d()))
    with pytest.raises(RandomnessError, match=r"dropout1d on \[3, 4\]; it takes a batch with 3"):
        net(net.initial()[0], torch.rand(3, 4), training=True)
