"""FedMA at fixed width and GAMF: planted permutations, oracles by enumeration, and what is kept."""

from dataclasses import replace
from itertools import permutations as every

import numpy as np
import pytest
import torch
from models.test_symmetries import random_order, shaken, shuffled
from torch import nn

from fedbasin.core.expressions import parse
from fedbasin.core.method import Context
from fedbasin.core.net import Net
from fedbasin.core.permutations import Group, Orders, Place, best_order, reorder
from fedbasin.core.rng import root
from fedbasin.core.rule import Setting
from fedbasin.methods import GAMF, FedAvg, FedMA
from fedbasin.methods.fedma import _similarity, matched
from fedbasin.methods.gamf import Matching, sinkhorn
from fedbasin.models import mlp, resnet8, shakespeare_lstm
from fedbasin.models.symmetries import permutations
from fedbasin.testing import replies_of, toy_federation, trajectory

IMAGE = (1, 6, 6)


def world(name):
    """A network, a model of it, and a context that knows its permutations."""
    make = {
        "mlp": lambda: mlp(IMAGE, 3, widths=(12, 9)),
        "norm": lambda: nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.GroupNorm(3, 6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3)
        ),
        "resnet": lambda: resnet8(IMAGE, 3),
        "lstm": lambda: shakespeare_lstm((5,), 3, hidden=7),
    }[name]
    example = torch.zeros(2, 5, dtype=torch.int64) if name == "lstm" else torch.zeros(2, *IMAGE)
    network = make()
    groups = permutations(network, example)
    net, model = shaken(network)
    return net, model, Context(net.layout, 9, 5, root(0), permutations=groups)


def inputs(name):
    draw = torch.Generator().manual_seed(1)
    if name == "lstm":
        return torch.randint(0, 3, (4, 5), generator=draw)
    return torch.randn(4, *IMAGE, generator=draw, dtype=torch.float64)


def merge(method, server, models, context, weights=None, clients=None):
    state = method.init(server, context)
    return method.aggregate(state, server, replies_of(models, weights, clients), context)[0]


def note(served):
    return served.notes[0]


METHODS = [FedMA(), FedMA(reference="client"), GAMF(), GAMF(joint=False)]


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("name", ["mlp", "norm"])
def test_permuted_copies_of_a_model_are_recognised(name, method):
    """A planted permutation is undone: the mean of permuted copies is the model itself."""
    _, model, context = world(name)
    copies = [shuffled(model, context.layout, context.permutations, seed) for seed in range(3)]
    noise = torch.randn(4, len(model), generator=torch.Generator().manual_seed(0)).double()
    models = torch.stack([model, *copies])
    plain = models.mean(0)
    assert (plain - model).norm() > 0.3 * model.norm()
    assert method.streams() is None, "of an average nothing can be matched"
    found = merge(method, model, models, context)
    torch.testing.assert_close(found.send, model, rtol=1e-9, atol=1e-9)
    assert note(found).moved > 0.4
    assert note(found).units == sum(g.size for g in context.permutations)
    # and among models that are no longer the same
    near = merge(method, model, models + 0.02 * model.std() * noise, context)
    assert (near.send - model).norm() < 0.05 * model.norm()


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("name", ["mlp", "norm", "resnet", "lstm"])
def test_a_matched_client_is_the_same_function_and_not_further_from_the_others(name, method):
    net, model, context = world(name)
    noise = torch.randn(3, len(model), generator=torch.Generator().manual_seed(2)).double()
    models = model + 0.3 * model.std() * noise
    models[1] = shuffled(models[1], context.layout, context.permutations, 5)
    x = inputs(name)
    seen = {}

    class Spy(FedAvg):
        def aggregate(self, state, server, replies, context):
            seen.update(models=replies.models, server=server)
            return super().aggregate(state, server, replies, context)

    merge(replace(method, inner=Spy()), model, models, context)
    for before, after in zip(models, seen["models"], strict=True):
        torch.testing.assert_close(
            net(after, x).logits, net(before, x).logits, rtol=1e-8, atol=1e-9
        )
        assert sorted(after.tolist()) == sorted(before.tolist())
        if isinstance(method, FedMA) and method.reference == "server":
            assert after @ model >= before @ model - 1e-9
    if isinstance(method, GAMF):
        assert seen["models"].sum(0).norm() >= models.sum(0).norm() - 1e-9
    assert not torch.equal(seen["models"][1], models[1])
    assert seen["server"] is model  # the one that was sent, whosever order is taken


def test_fedma_finds_the_best_of_all_orders():
    """One hidden layer of four units, by enumeration in NumPy."""
    network = mlp((3,), 2, widths=(4,))
    groups = permutations(network, torch.zeros(2, 3))
    layout = Net(network).layout
    context = Context(layout, 9, 5, root(0), permutations=groups)
    rng = np.random.default_rng(0)
    for _ in range(8):
        server, client = rng.normal(size=(2, layout.size))
        found = merge(FedMA(), torch.from_numpy(server), torch.from_numpy(client)[None], context)
        parts = layout.views(torch.from_numpy(client))
        best, value = None, -np.inf
        for order in every(range(4)):
            candidate = np.concatenate([
                parts[n].numpy()[:, list(order)].ravel() if n == "head.weight"
                else parts[n].numpy() if n == "head.bias"
                else parts[n].numpy()[list(order)].ravel()
                for n in layout.names
            ])  # fmt: skip
            if candidate @ server > value:
                best, value = candidate, candidate @ server
        np.testing.assert_allclose(found.send, best, rtol=1e-12)


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_an_order_with_blocks_is_the_best_of_all_that_keep_them(blocks):
    rng = np.random.default_rng(blocks)
    width = 6 // blocks
    places = np.arange(6)
    for _ in range(10):
        similarity = rng.normal(size=(6, 6))
        order = best_order(similarity, blocks)
        kept = [
            o for o in every(range(6))
            if all(len({v // width for v in o[b * width:(b + 1) * width]}) == 1
                   for b in range(blocks))
        ]  # fmt: skip
        assert tuple(order) in kept
        assert similarity[places, order].sum() == pytest.approx(
            max(similarity[places, list(o)].sum() for o in kept)
        )
    assert (best_order(np.ones((6, 6)), blocks) == places).all()  # nothing to gain: as it stands


def test_another_order_of_the_same_worth_is_left_as_it_is():
    similarity = np.array([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    assert similarity[[0, 1, 2], [2, 0, 1]].sum() == np.trace(similarity)
    assert best_order(similarity).tolist() == [0, 1, 2]


def test_a_unit_that_is_back_in_its_place_has_not_moved():
    group = Group((Place("w", 0, torch.arange(4)[:, None]),))
    orders, swap = Orders(2, [group]), np.array([1, 0, 2, 3])
    orders.change(0, 0, swap)
    assert orders.moved() == 2 / 8
    orders.change(0, 0, swap)
    assert orders.moved() == Orders(2, []).moved() == 0


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_clients_near_one_model_keep_their_order_and_are_averaged(method):
    _, model, context = world("resnet")
    noise = torch.randn(4, len(model), generator=torch.Generator().manual_seed(3)).double()
    models = model + 0.01 * model.std() * noise
    found = merge(method, model, models, context, weights=[1, 2, 3, 4])
    plain = merge(method.inner, model, models, context, weights=[1, 2, 3, 4])
    assert note(found).moved == 0 and torch.equal(found.send, plain.send)


def test_annealing_agrees_where_it_is_left_out():
    _, model, context = world("mlp")
    noise = torch.randn(4, len(model), generator=torch.Generator().manual_seed(3)).double()
    models = model + 0.05 * model.std() * noise
    matching = Matching(GAMF(), models, context.layout, context.permutations)
    matching.anneal()
    found, orders = matching.harden()
    assert orders.moved() == 0 and torch.equal(found, models)


def test_sinkhorn_scales_to_rows_and_columns_of_one():
    scores = torch.randn(6, 6, generator=torch.Generator().manual_seed(0)).double() * 3
    found = sinkhorn(scores, 200)
    ones = torch.ones(6, dtype=torch.float64)
    torch.testing.assert_close(found.sum(0), ones, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.sum(1), ones, rtol=1e-6, atol=1e-6)
    # plain scaling by NumPy reaches the same matrix
    plain = np.exp(scores.numpy())
    for _ in range(200):
        plain /= plain.sum(1, keepdims=True)
        plain /= plain.sum(0, keepdims=True)
    np.testing.assert_allclose(found, plain, rtol=1e-9)


def numpy_gamf(a, b, taus, extra=10):
    """Two clients of one hidden layer: units of b into a's places, in plain NumPy."""

    def near(rows_b, rows_a):
        square = ((rows_b[:, None] - rows_a[None]) ** 2).sum(2)
        return np.exp(-square / square.mean())

    below = near(b[0], a[0])
    above = near(b[1].T, a[1].T)
    affinity = below + above
    for level, tau in enumerate(taus):
        soft = np.exp(affinity / tau - (affinity / tau).max())
        for _ in range(extra + level):
            soft /= soft.sum(1, keepdims=True)
            soft /= soft.sum(0, keepdims=True)
    return soft, affinity


def test_gamf_equals_a_plain_numpy_version_for_two_clients():
    network = mlp((3,), 2, widths=(5,))
    groups = permutations(network, torch.zeros(2, 3))
    layout = Net(network).layout
    rng = np.random.default_rng(0)
    models = rng.normal(size=(2, layout.size))
    method = GAMF(tau=0.5, tau_end=0.2)
    matching = Matching(method, torch.from_numpy(models), layout, groups)
    matching.anneal()

    def sides(model):
        v = {k: t.numpy() for k, t in layout.views(torch.from_numpy(model)).items()}
        first = np.concatenate([v["body.fc1.weight"], v["body.fc1.bias"][:, None]], 1)
        return first, v["head.weight"]

    soft, affinity = numpy_gamf(sides(models[0]), sides(models[1]), method.levels())
    np.testing.assert_allclose(matching.soft[0][1], soft, rtol=1e-7, atol=1e-10)
    matching.harden()
    hard = matching.soft[0][1].numpy()
    best = max(every(range(5)), key=lambda o: sum(affinity[o[p], p] for p in range(5)))
    assert [int(hard[:, p].argmax()) for p in range(5)] == list(best)
    assert torch.equal(matching.soft[0][0], torch.eye(5, dtype=torch.float64))
    assert GAMF().levels()[0] == 0.05 and 0.005 <= GAMF().levels()[-1] < 0.0056
    assert GAMF(tau=0.5, decay=0.5, tau_end=0.125).levels() == [0.5, 0.25, 0.125]
    assert GAMF(tau=0.1, tau_end=0.1).levels() == [0.1]


def test_the_first_client_is_the_one_of_lowest_id_and_has_weight():
    _, model, context = world("mlp")
    models = torch.stack(
        [shuffled(model, context.layout, context.permutations, seed) for seed in range(3)]
    )
    for method in (FedMA(reference="client"), GAMF()):
        found = merge(method, model, models, context, clients=[7, 2, 5])
        torch.testing.assert_close(found.send, models[1], rtol=1e-9, atol=1e-9)
        ghost = merge(method, model, models, context, [1, 0, 1], clients=[7, 2, 5])
        torch.testing.assert_close(ghost.send, models[2], rtol=1e-9, atol=1e-9)
        alone = merge(method, model, models[:2], context, [0, 1], clients=[2, 7])
        torch.testing.assert_close(alone.send, models[1], rtol=1e-9, atol=1e-9)


def test_matching_works_around_other_methods_and_inside_averaging():
    for source in ("wima(fedma(scaffold))", "ima(gamf(fednova))", "fedma(fedavgm(fedprox))"):
        last = trajectory(parse(source, "method"))[-1]
        assert torch.isfinite(last.send).all() and torch.isfinite(last.score).all()


def test_the_share_of_units_that_moved_is_recorded():
    federation = toy_federation(FedMA())
    for _, record in federation.rounds_from(*federation.begin()):
        assert record.notes["units"] == 5 and 0 <= record.notes["moved"] <= 1


def test_a_context_without_permutations_says_how_to_get_them():
    _, model, context = world("mlp")
    for method in (FedMA(), GAMF()):
        with pytest.raises(ValueError, match="symmetries"):
            merge(method, model, model[None], replace(context, permutations=None))


def test_batchnorm_statistics_are_named_as_a_caution():
    calm = Setting(momentum=0, weight_decay=0, clip=None, ragged=False, statistics=False)
    for method in (FedMA(), GAMF()):
        assert not list(method.cautions(calm))
        found = list(method.cautions(calm._replace(statistics=True)))
        assert len(found) == 1 and "recalibrate" in found[0]


def test_cautions_of_the_inner_method_are_passed_on():
    rough = Setting(momentum=0.9, weight_decay=0, clip=None, ragged=True, statistics=False)
    expected = list(parse("scaffold", "method").cautions(rough))
    assert expected
    for source in ("fedma(scaffold)", "gamf(scaffold)"):
        assert list(parse(source, "method").cautions(rough)) == expected


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("fedma(sweeps=-1)", "sweeps"),
        ("fedma(reference='mean')", "reference"),
        ("gamf(sweeps=-1)", "sweeps"),
        ("gamf(tau_end=0.1)", "tau_end"),
        ("gamf(decay=1)", "decay"),
    ],
)
def test_bad_settings_are_named(source, word):
    with pytest.raises(ValueError, match=word):
        parse(source, "method")


def test_random_orders_of_blocks_keep_them():
    group = world("norm")[2].permutations[0]
    assert (group.size, group.blocks) == (6, 3)
    order = random_order(group, np.random.default_rng(0)).reshape(3, 2) // 2
    assert (order[:, 0] == order[:, 1]).all()


def unlike(network, example, count, seed):
    """Models that have nothing to do with each other, and the network's layout and groups."""
    layout = Net(network).layout
    draw = torch.Generator().manual_seed(seed)
    models = torch.randn(count, layout.size, generator=draw).double()
    return models, layout, permutations(network, example)


def test_fedma_goes_on_until_a_further_sweep_changes_nothing():
    network, longer = mlp((3,), 2, widths=(6, 5)), 0
    for seed in range(6):
        models, layout, groups = unlike(network, torch.zeros(2, 3), 2, seed)
        once, _ = matched(models[1:], models[0], layout, groups, 1)
        found, _ = matched(models[1:], models[0], layout, groups, 20)
        again, orders = matched(found, models[0], layout, groups, 1)
        assert torch.equal(again, found) and orders.moved() == 0
        longer += bool(found[0] @ models[0] > once[0] @ models[0])
    assert longer


def test_a_recurrent_guess_that_is_worse_is_not_taken():
    """The cells of an LSTM own both axes of its recurrent weight: an assignment is only a guess."""
    network = shakespeare_lstm((5,), 3, embedding=2, hidden=6, layers=1)
    tokens, refused = torch.zeros(2, 5, dtype=torch.int64), 0
    for seed in range(12):
        models, layout, groups = unlike(network, tokens, 2, seed)
        models = models * (0.01 + layout.mask(["body.lstm1.recurrent.weight"], models))
        for sweeps in (1, 20):
            found, _ = matched(models[1:], models[0], layout, groups, sweeps)
            assert found[0] @ models[0] >= models[1] @ models[0]
        refused += _guess_is_worse(models, layout, groups)
    assert refused


def _guess_is_worse(models, layout, groups):
    """Whether the assignment of a coupled group alone makes the models less alike."""
    for group in (g for g in groups if g.coupled):
        similarity = _similarity(models[1:], models[0], layout, group)[0].numpy()
        guess = models[1].clone()
        reorder(guess, layout, group, torch.from_numpy(best_order(similarity)))
        if guess @ models[0] < models[1] @ models[0]:
            return True
    return False


def test_gamf_keeps_models_that_matching_would_make_less_alike():
    """Affinities are not similarities; for models that share nothing the two may disagree."""
    network = mlp((3,), 2, widths=(4, 3))
    refused = 0
    for seed in range(12):
        models, layout, groups = unlike(network, torch.zeros(2, 3), 3, seed)
        models = models * (1 + 50 * layout.mask(["head.weight"], models))
        matching = Matching(GAMF(), models, layout, groups)
        found, orders = matching.run()
        assert found.sum(0).norm() >= models.sum(0).norm() - 1e-12
        placed = any(not torch.equal(s[i], s[0]) for s in matching.soft for i in (1, 2))
        refused += placed and orders.moved() == 0
    assert refused


def test_without_joint_each_client_is_matched_with_the_first_alone():
    models, layout, groups = unlike(mlp((3,), 2, widths=(5,)), torch.zeros(2, 3), 4, 0)

    def places(method, some):
        matching = Matching(method, models[some], layout, groups)
        matching.anneal()
        matching.harden()
        return matching.soft[0]

    found = places(GAMF(joint=False), [0, 1, 2, 3])
    for i in (1, 2, 3):
        assert torch.equal(found[i], places(GAMF(), [0, i])[1])
    assert not torch.equal(found, places(GAMF(), [0, 1, 2, 3]))


def test_units_that_are_all_alike_stay_in_their_places():
    _, model, context = world("mlp")
    models = torch.zeros(3, len(model), dtype=torch.float64)
    found = merge(GAMF(), model, models, context)
    assert torch.equal(found.send, models[0]) and note(found).moved == 0


def test_gamf_merges_uniformly_as_the_paper_does():
    _, model, context = world("mlp")
    models = torch.stack([model * 1.01, model * 0.97])
    found = merge(GAMF(), model, models, context, weights=[1, 9])
    torch.testing.assert_close(found.send, models.mean(0), rtol=1e-12, atol=1e-14)
