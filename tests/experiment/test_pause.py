"""A run that pauses and goes on equals a run in one go, and no round is trained twice."""

from dataclasses import replace

import pytest

from fedbasin.core.record import RunFolder
from fedbasin.core.state import read
from fedbasin.experiment import Experiment, run
from fedbasin.experiment.comparison import Cell, run_cell
from fedbasin.experiment.config import LocalConfig, PartitionConfig, SimConfig
from fedbasin.methods import FedAvg

SMALL = Experiment(
    model="logistic",
    rounds=9,
    partition=PartitionConfig(clients=8),
    local=LocalConfig(schedule="cosine"),
    sim=SimConfig(participation="fraction(rate=0.5)", checkpoint_every=4),
).resolved()


@pytest.mark.parametrize("method", ["scaffold", "ima(fedavgm, start=0.5)"])
def test_a_paused_run_goes_on_from_its_checkpoint(method, tmp_path, monkeypatch):
    experiment = replace(SMALL, method=method).resolved()
    whole = run(experiment, tmp_path / "whole")
    merges = []
    merge = type(FedAvg()).serve

    def counted(self, state, server, mean, context):
        merges.append(context.round)
        return merge(self, state, server, mean, context)

    monkeypatch.setattr("fedbasin.core.method.Averaging.serve", counted)
    cell = Cell(experiment, tmp_path / "parts")
    for until in (2, 2, 6, 3):  # a round that is reached already trains nothing
        summary = run_cell(replace(cell, until=until))
        assert (summary["status"], summary["rounds"]) == ("paused", 6 if until == 3 else until)
        assert not RunFolder(cell.path).model.exists()
    ended = run_cell(cell)
    assert ended["status"] == "finished" and ended["accuracy_last"] == whole["accuracy_last"]
    if method != "scaffold":  # which merges by itself
        assert merges == list(range(9))
    one, other = (read(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert all((one[name] == other[name]).all() for name in one)
    lines = [record.metrics for record in RunFolder(cell.path).read_rounds()]
    assert lines == [record.metrics for record in RunFolder(tmp_path / "whole").read_rounds()]


def test_a_pause_after_the_last_round_is_the_end(tmp_path):
    summary = run_cell(Cell(SMALL, tmp_path / "run", until=50))
    assert summary["status"] == "finished" and summary["rounds"] == 9
