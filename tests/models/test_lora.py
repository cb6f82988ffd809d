"""LoRA: the start, the merged weights, what trains and what travels."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedbasin.methods
import fedbasin.models
from fedbasin import Experiment
from fedbasin.core.expressions import ExpressionError, parse, text
from fedbasin.core.net import Net
from fedbasin.core.rng import root, torch_draws_from
from fedbasin.data import Dataset, Rows
from fedbasin.experiment import build
from fedbasin.experiment.config import LocalConfig, PartitionConfig, SimConfig
from fedbasin.models import with_lora
from fedbasin.sim import LoopExecutor

assert fedbasin.methods and fedbasin.models  # importing the rooms fills the catalogue
EXPRESSION = "lora(mlp(widths=(7, 6)), rank=2, alpha=3.0, targets=('fc1', 'fc2'))"


def made(expression=EXPRESSION, shape=(5,), classes=3):
    with torch_draws_from(root(1).fold("lora")):
        return parse(expression, "model")(shape, classes)


def rows(count, seed):
    draws = np.random.default_rng(seed)
    return Rows(draws.normal(size=(count, 5)).astype(np.float32), draws.integers(0, 3, count))


def experiment(**settings):
    return Experiment(
        model=EXPRESSION,
        rounds=3,
        partition=PartitionConfig(how="iid", clients=4),
        local=LocalConfig(lr=0.1, batch=8),
        sim=SimConfig(participation="count(clients=2)", **settings),
    )


def federation(method="fedavg", **settings):
    data = Dataset("made", "table", rows(60, 0), rows(20, 1), ("a", "b", "c"))
    return build(replace(experiment(**settings), method=method), data=data)


def records(run):
    return list(run.rounds_from(*run.begin()))


def test_an_expression_survives_its_text():
    choice = parse(EXPRESSION, "model")
    assert parse(text(choice), "model") == choice
    assert text(choice).startswith("lora(mlp(")


def test_the_start_equals_the_inner_network():
    with torch_draws_from(root(2)):
        plain = parse("mlp(widths=(7, 6))", "model")(shape := (5,), 3)
    adapted = with_lora(plain, rank=2, targets=("fc1", "fc2"))
    inputs = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(adapted(inputs), plain(inputs))
    assert all(p.requires_grad for p in plain.parameters())  # the network itself is not changed
    assert not any("lora" in name for name, _ in plain.named_parameters())


def test_a_pair_acts_as_a_merged_weight():
    """W + alpha / r B A in NumPy gives what the pair gives."""
    net = Net(made(), dtype=torch.float64)
    draws = torch.Generator().manual_seed(3)
    vector = torch.randn(net.layout.size, generator=draws, dtype=torch.float64)
    inputs = torch.randn(4, 5, generator=draws, dtype=torch.float64)
    parts = {n: t.numpy() for n, t in net.state_dict(vector, torch.zeros(0)).items()}
    hidden = inputs.numpy()
    for layer in ("body.fc1", "body.fc2"):
        pair = parts[f"{layer}.lora_B"] @ parts[f"{layer}.lora_A"]
        weight = parts[f"{layer}.base.weight"] + 3.0 / 2 * pair
        hidden = np.maximum(hidden @ weight.T + parts[f"{layer}.base.bias"], 0)
    wanted = hidden @ parts["head.weight"].T + parts["head.bias"]
    np.testing.assert_allclose(net(vector, inputs).logits.numpy(), wanted, rtol=1e-12)


def test_a_starts_like_a_linear_layer_and_b_at_zero():
    parts = dict(made().named_parameters())
    bound = 5**-0.5
    first = parts["body.fc1.lora_A"]
    assert 0.5 * bound < first.abs().max() <= bound
    assert not parts["body.fc1.lora_B"].any()
    assert first.shape == (2, 5) and parts["body.fc1.lora_B"].shape == (7, 2)


def test_the_layout_names_the_pairs_and_the_head():
    layout = Net(made()).layout
    assert layout.pairs == (
        ("body.fc1.lora_A", "body.fc1.lora_B"),
        ("body.fc2.lora_A", "body.fc2.lora_B"),
    )
    assert layout.head == ("head.weight", "head.bias")
    assert set(layout.names) == {name for pair in layout.pairs for name in pair} | set(layout.head)
    assert Net(made("mlp")).layout.pairs == ()


class Own(nn.Module):
    """A user's network, without a head of that name."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4))
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.first(x))


def test_a_users_module_keeps_its_last_layer_trainable():
    net = Net(with_lora(Own(), rank=1, targets=("first.0",)))
    assert set(net.layout.names) == {
        "first.0.lora_A",
        "first.0.lora_B",
        "last.weight",
        "last.bias",
    }
    assert net.frozen_size == 5 * 4 + 4 + 4 * 4 + 4


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "ima(fedavg, window=2, start=0.3)"])
def test_engines_agree_and_frozen_parts_stay(method):
    loop = federation(method, executor="loop", precision="fp64")
    found = records(loop)
    cohort = records(federation(method, executor="cohort", precision="fp64"))
    for (ours, _), (theirs, _) in zip(cohort, found, strict=True):
        torch.testing.assert_close(ours.score, theirs.score, rtol=1e-8, atol=1e-10)
    server = found[-1][0]
    first = loop.net.state_dict(*loop.net.initial())
    last = loop.net.state_dict(server.score, server.buffers)
    for name, tensor in last.items():
        assert torch.equal(tensor, first[name]) == (name not in loop.net.layout.names), name


def test_frozen_bytes_go_down_once_a_client_and_never_up():
    run = federation(executor="loop")
    vector = 4 * run.net.layout.size
    frozen = 4 * (5 * 7 + 7 + 7 * 6 + 6)
    assert run.net.frozen_bytes == frozen
    seen = set()
    for now, (_, record) in enumerate(records(run)):
        drawn = set(run.cohort(now)[0].tolist())
        assert record.bytes_down == 2 * vector + len(drawn - seen) * frozen
        assert record.bytes_up == 2 * (vector + 24)
        seen |= drawn
    servers = list(run.rounds_from(*run.begin()))
    again = list(run.rounds_from(servers[0][0], run.begin()[1]))  # as after a checkpoint
    assert [r.bytes_down for _, r in again] == [r.bytes_down for _, r in servers[1:]]


def test_auto_counts_frozen_weights():
    small = federation()
    assert type(small.executor) is not LoopExecutor
    large = replace(experiment(), model="lora(mlp(widths=(600, 600)), targets=('fc2',))")
    data = Dataset("made", "table", rows(60, 0), rows(20, 1), ("a", "b", "c"))
    run = build(large, data=data)
    assert run.net.layout.size < 200_000 and type(run.executor) is LoopExecutor


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("lora(mlp, targets=('query',))", "called 'query'; this network has fc1, fc2"),
        ("lora(mlp, targets=('head',))", "no linear layer but the head is called 'head'"),
        ("lora(mlp, rank=0, targets=('fc1',))", "rank must be at least 1, got 0"),
        ("lora(mlp, alpha=0.0, targets=('fc1',))", "alpha must be above 0, got 0.0"),
        ("lora(cosine, targets=('fc1',))", "inner is the schedule cosine; name a model"),
    ],
)
def test_bad_settings_are_named(expression, message):
    with pytest.raises(ValueError, match="^.*" + message.replace("(", r"\(")):
        made(expression)


def test_an_inner_network_must_be_given():
    with pytest.raises(ExpressionError, match="lora needs 'inner'"):
        parse("lora(rank=2)", "model")
    with pytest.raises(ExpressionError, match="'inner' is 3"):
        parse("lora(3)", "model")
    with pytest.raises(ValueError, match=r"Flatten has no nn\.Linear"):
        with_lora(nn.Flatten())


# --- on Flower -----------------------------------------------------------------------------------


def deployed(run, **settings):
    pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")
    from deploy.grids import LocalGrid, app_for, strategy_for
    from flwr.app import ArrayRecord

    strategy = strategy_for(run, run.method, **settings)
    grid = LocalGrid(app_for(run), 4)
    arrays = ArrayRecord(run.net.state_dict(*run.net.initial()))
    strategy.start(grid, arrays, num_rounds=3, timeout=5)
    return strategy, grid


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "mime"])
def test_flower_gives_the_simulators_model_and_sends_frozen_parts_once(method):
    run = federation(method, executor="loop", precision="fp64")
    found = records(run)
    strategy, grid = deployed(run, fraction_evaluate=1.0)
    torch.testing.assert_close(strategy._server.score, found[-1][0].score, rtol=1e-9, atol=1e-11)
    confirmed = set()
    for message in grid.sent:
        if "arrays" not in message.content:
            continue
        node = message.metadata.dst_node_id
        whole = "body.fc1.base.weight" in message.content["arrays"]
        assert whole == (node not in confirmed)
        assert ("frozen" in message.content) == (not whole)
        if message.metadata.message_type == "train":
            confirmed.add(node)
    down = [record.bytes_down for record in strategy.journal.records]
    drawn = [set(run.cohort(now)[0].tolist()) for now in range(3)]
    new = [len(drawn[0]), len(drawn[1] - drawn[0]), len(drawn[2] - drawn[1] - drawn[0])]
    lean = min(down)
    for sent, fresh in zip(down, new, strict=True):
        assert abs(sent - lean - (fresh - min(new)) * run.net.frozen_bytes) < 2000  # headers, names


def test_a_node_whose_frozen_parts_changed_refuses_the_hash(caplog):
    pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")
    from deploy.grids import LocalGrid, app_for, strategy_for
    from flwr.app import ArrayRecord

    run = federation(executor="loop")
    run = replace(run, participation=parse("fraction(rate=1.0)"))
    with torch_draws_from(root(9)):
        other = Net(parse(EXPRESSION, "model")((5,), 3))
    elsewhere = replace(run, net=other, trainer=replace(run.trainer, net=other))
    right, wrong = app_for(run), app_for(elsewhere)

    class Restarted(LocalGrid):
        """In the second round all nodes but three have a network of other frozen weights."""

        def push_messages(self, messages):
            ids = []
            for message in messages:
                trained = sum(m.metadata.message_type == "train" for m in self.sent)
                self.app = right if trained < 7 else wrong
                ids += LocalGrid.push_messages(self, [message])
            return ids

    strategy = strategy_for(run, run.method, min_train_nodes=1)
    grid = Restarted(right, 4)
    arrays = ArrayRecord(run.net.state_dict(*run.net.initial()))
    strategy.start(grid, arrays, num_rounds=2, timeout=1)
    said = [record.getMessage() for record in caplog.records]
    assert any("the hash of the frozen parts is not the server's" in line for line in said)
    assert strategy.journal.records[1].replies < 4
