"""Networks that call `view`: they run everywhere, with the numbers of those that `flatten`."""

import logging

import numpy as np
import pytest
import torch
from torch import nn

import fedbasin as fb
from fedbasin.core import net as nets
from fedbasin.core.evaluator import Evaluator
from fedbasin.core.net import Net
from fedbasin.core.task import Classification
from fedbasin.experiment.config import DataConfig, PartitionConfig, SimConfig


class Viewing(nn.Module):
    """The network of PyTorch's tutorial and Flower's quickstart, smaller."""

    def __init__(self, channels: int = 3):
        super().__init__()
        self.first = nn.Conv2d(channels, 6, 3)
        self.second = nn.Conv2d(6, 4, 3)
        self.last = nn.Linear(4 * 4, 5)

    def flat(self, images):
        return images.view(-1, 16)

    def forward(self, images):
        images = nn.functional.max_pool2d(torch.relu(self.first(images)), 2)
        return self.last(self.flat(torch.relu(self.second(images))))


class Flattening(Viewing):
    def flat(self, images):
        return images.flatten(1)


class ViewingInTraining(Viewing):
    """As networks with a second head for training have it."""

    def flat(self, images):
        return images.view(-1, 16) if self.training else images.flatten(1)


class Broken(Viewing):
    def flat(self, images):
        return images.view(-1, 17)


@pytest.fixture(autouse=True)
def first_network():
    nets._log_usual_order.cache_clear()


def pictures(channels, rows=120):
    draw = np.random.default_rng(0)
    inputs = draw.normal(size=(rows, channels, 10, 10)).astype("float32")
    return inputs, draw.integers(0, 5, rows)


def made(kind, channels):
    torch.manual_seed(0)
    return kind(channels)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", [Viewing, ViewingInTraining])
@pytest.mark.parametrize("channels_innermost", [False, True])
def test_a_network_that_views_gets_images_in_the_usual_order(channels, kind, channels_innermost):
    net = Net(made(kind, channels))
    inputs = torch.from_numpy(pictures(channels)[0])
    if channels_innermost:  # as pictures that were decoded row by row lie in memory
        inputs = inputs.to(memory_format=torch.channels_last)
    given = net.arranged(inputs)
    assert given.stride() == (channels * 100, 100, 10, 1)
    assert torch.equal(given, inputs)
    plain = Net(made(Flattening, channels))
    for training in (False, True):
        outputs = net(net.initial()[0], given, training=training).logits
        wanted = plain(plain.initial()[0], plain.arranged(inputs), training=training).logits
        torch.testing.assert_close(outputs, wanted)


def test_images_that_lie_right_are_not_copied():
    net = Net(Viewing())
    inputs = torch.from_numpy(pictures(3)[0])
    assert net.arranged(inputs) is inputs


def test_other_convolutions_keep_the_fast_order_without_a_word(caplog):
    net = Net(Flattening())
    given = net.arranged(torch.from_numpy(pictures(3)[0]))
    assert given.is_contiguous(memory_format=torch.channels_last)
    assert not caplog.records


def test_the_network_is_tried_once(monkeypatch):
    net = Net(Viewing())
    inputs = torch.from_numpy(pictures(3)[0])
    net.arranged(inputs)
    monkeypatch.setattr(net, "run", None)
    net.arranged(inputs)


@pytest.mark.parametrize("executor", ["loop", "cohort"])
@pytest.mark.parametrize("channels", [1, 3])
def test_runs_train_it_to_the_scores_of_a_network_that_flattens(
    tmp_path, executor, channels, caplog
):
    data = fb.data.from_arrays(*pictures(channels), test=0.2)
    experiment = fb.Experiment(
        method="serverft(epochs=1)",  # trains on the server's rows, too
        rounds=2,
        data=DataConfig(proxy_rows=10),
        partition=PartitionConfig(how="iid", clients=4),
        sim=SimConfig(executor=executor),
    )
    losses = []
    with caplog.at_level(logging.WARNING, "fedbasin"):
        for kind in (Viewing, Flattening):
            result = fb.run(
                experiment, tmp_path / kind.__name__, data=data, model=made(kind, channels)
            )
            losses.append([record.metrics["loss"] for record in result.records])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    said = [r.message for r in caplog.records if "channels innermost" in r.message]
    assert len(said) == 1 and said[0].startswith("Viewing cannot take images")


def test_the_evaluator_scores_it():
    inputs, labels = pictures(3)
    scores = []
    for kind in (Viewing, Flattening):
        net = Net(made(kind, 3))
        rows = torch.from_numpy(inputs), torch.from_numpy(labels)
        scores.append(Evaluator(net, *rows, lambda raw, key: raw, Classification()))
    vector = net.initial()[0]
    assert scores[0].score(vector) == pytest.approx(scores[1].score(vector), rel=1e-5)


def test_a_network_that_fails_in_any_order_says_why(tmp_path, caplog):
    data = fb.data.from_arrays(*pictures(3), test=0.2)
    with pytest.raises(ValueError, match=r"shape '\[-1, 17\]' is invalid"):
        fb.run(data, model=Broken(), method="fedavg", rounds=1, out=tmp_path / "r")
    assert "channels innermost" not in caplog.text


def test_clients_of_a_federation_train_it(tmp_path):
    pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")
    from deploy.grids import LocalGrid
    from flwr.app import ArrayRecord, ConfigRecord

    from fedbasin.deploy import FedbasinStrategy, Records, ServerSide, client_app
    from fedbasin.local import Shard

    inputs, labels = (torch.from_numpy(part) for part in pictures(3))
    models = []
    for kind in (Viewing, Flattening):
        app = client_app(lambda k=kind: made(k, 3), lambda *_: Shard(inputs, labels), classes=5)
        strategy = FedbasinStrategy(
            "fedavg",
            server=ServerSide(net=Net(made(kind, 3))),
            records=Records(folder=tmp_path / kind.__name__),
        )
        first = ArrayRecord(made(kind, 3).state_dict())
        strategy.start(LocalGrid(app, 2), first, 2, 5, ConfigRecord({"lr": 0.05}))
        models.append(strategy._server.send)
    torch.testing.assert_close(models[0], models[1])
