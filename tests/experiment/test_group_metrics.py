"""Metrics over groups in whole runs: what the records hold, and what is refused."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedbasin.core.record import RunFolder
from fedbasin.data import Dataset, Rows
from fedbasin.experiment import from_mapping, run
from fedbasin.experiment.config import ConfigError

SETTINGS = {
    "task": "regression(headline='group_mean(rmse)')",
    "model": "logistic",
    "rounds": 2,
    "partition": {"how": "natural", "clients": 3},
    "sim": {
        "participation": "fraction(rate=1.0)",
        "metrics": ["by_group(rmse)"],
        "evaluate_train": True,
        "device": "cpu",
    },
}


def dataset(groups=True):
    rng = np.random.default_rng(5)

    def rows(sizes):
        count = sum(sizes)
        numbers = rng.normal(size=(count, 4)).astype(np.float32)
        site = np.repeat(np.arange(3), sizes)
        target = (numbers.sum(1) * (1 + site)).astype(np.float32)
        return Rows(numbers, target, site if groups else None)

    return Dataset("sites", "table", rows([40, 20, 5]), rows([30, 3, 9]), ())


def test_the_records_hold_the_mean_over_groups(tmp_path):
    run(from_mapping(SETTINGS), tmp_path / "run", data=dataset())
    folder = RunFolder(tmp_path / "run")
    first, last = folder.read_rounds()
    by_group = last.metrics["rmse_by_group"]
    assert len(by_group) == 3 and first.metrics["rmse_by_group"] is None
    assert last.metric("rmse_group_mean") == pytest.approx(np.mean(by_group))
    whole = np.sqrt(np.average(np.square(by_group), weights=[30, 3, 9]))
    assert last.metric("rmse") == pytest.approx(whole)
    # on clients' rows a client is a group
    weight, bias = (load_file(folder.model)[f"head.{name}"] for name in ("weight", "bias"))
    rows = dataset().train
    gap = (rows.inputs @ weight.T + bias)[:, 0] - rows.labels
    each = [np.sqrt(np.mean(gap[rows.groups == client] ** 2)) for client in range(3)]
    assert last.metric("rmse_group_mean_train") == pytest.approx(np.mean(each), rel=1e-5)
    summary = folder.read_summary()
    assert summary["headline"] == "rmse_group_mean" and not summary["higher_is_better"]


def test_data_without_groups_is_refused(tmp_path):
    settings = {**SETTINGS, "partition": {"how": "iid", "clients": 3}}
    with pytest.raises(ConfigError, match=r"rmse_group_mean is made of .* has no groups"):
        run(from_mapping(settings), tmp_path / "run", data=dataset(groups=False))
