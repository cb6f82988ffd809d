"""Scoring several models in one pass gives what scoring each alone gives."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedbasin.core.evaluator import Evaluator
from fedbasin.core.net import Net
from fedbasin.core.task import Classification
from fedbasin.methods import FedAvg
from fedbasin.testing import toy_federation


def test_several_models_in_one_pass_score_as_each_does_alone():
    examiner = replace(toy_federation(FedAvg()).evaluator, rows_at_once=4)
    vector = examiner.net.initial()[0]
    models = [vector, vector + 0.3, -vector]
    together = examiner.scores(models, last=True)
    for model, score in zip(models, together, strict=True):
        assert examiner.score(model, last=True) == score
        logits = examiner.net(model, examiner.inputs.double() / 255).logits.numpy()
        labels = examiner.labels.numpy()
        assert score["accuracy"] == np.mean(logits.argmax(1) == labels)
        shifted = logits - logits.max(1, keepdims=True)
        chosen = shifted[np.arange(len(labels)), labels]
        loss = np.mean(np.log(np.exp(shifted).sum(1)) - chosen)
        np.testing.assert_allclose(score["loss"], loss, rtol=1e-12)
        for c, accuracy in enumerate(score["accuracy_per_class"]):
            assert accuracy == np.mean(logits.argmax(1)[labels == c] == c)


def test_a_class_without_rows_has_no_accuracy():
    examiner = toy_federation(FedAvg()).evaluator
    held = examiner.labels != 1
    examiner = replace(examiner, inputs=examiner.inputs[held], labels=examiner.labels[held])
    per_class = examiner.score(examiner.net.initial()[0], last=True)["accuracy_per_class"]
    assert np.isnan(per_class).tolist() == [False, True, False]


def test_models_are_seen_with_the_statistics_given_and_with_the_rows_asked_for():
    net = Net(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4)), dtype=torch.float64)
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.integers(0, 256, (9, 3)).astype(np.uint8))
    labels = torch.from_numpy(rng.integers(0, 4, 9))
    vector, buffers = net.initial()
    given = buffers + 0.5
    rows = torch.tensor([7, 2, 5])
    examiner = Evaluator(
        net, inputs, labels, lambda raw, key=None: raw.double(), Classification(), (), given
    )
    shown = net(vector, inputs.double(), given).logits
    torch.testing.assert_close(examiner.logits(vector), shown)
    torch.testing.assert_close(examiner.logits(vector, rows), shown[rows])
    wanted = nn.functional.cross_entropy(shown[rows], labels[rows])
    torch.testing.assert_close(examiner.loss(vector, rows), wanted)
    for statistics, used in ((given, given), (None, buffers)):
        loss = nn.functional.cross_entropy(net(vector, inputs.double(), used).logits, labels)
        assert examiner.score(vector, statistics)["loss"] == pytest.approx(loss.item())


def test_the_servers_rows_lie_in_memory_as_the_network_runs_fastest():
    seen = []

    class Watched(nn.Sequential):
        def forward(self, images):
            seen.append(images.is_contiguous(memory_format=torch.channels_last))
            return super().forward(images)

    net = Net(Watched(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 2)), dtype=torch.float64)
    inputs = torch.from_numpy(np.random.default_rng(0).random((5, 3, 5, 5)))
    examiner = Evaluator(
        net, inputs, torch.zeros(5).long(), lambda raw, key: raw, Classification(), rows_at_once=2
    )
    net.arranged(inputs)  # the network is tried once
    seen.clear()
    vector = net.initial()[0].requires_grad_()
    as_stored = nn.functional.cross_entropy(net(vector, inputs).logits, examiner.labels)
    found = examiner.loss(vector)
    assert seen == [False, True, True, True]  # three chunks
    torch.testing.assert_close(found, as_stored)
    torch.testing.assert_close(*(torch.autograd.grad(loss, vector) for loss in (found, as_stored)))
