"""Clients of a federation evaluate on rows of their own: the simulator's scores, or sums alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")

from deploy.grids import LocalGrid, app_for, strategy_for
from flwr.app import ArrayRecord

from fedbasin.core.record import RunFolder
from fedbasin.core.served import ClientTable
from fedbasin.deploy import FedbasinStrategy, ServerSide
from fedbasin.experiment import build, from_mapping, run
from fedbasin.report.page import render
from fedbasin.report.runs import read_runs

EXPERIMENT = from_mapping(
    {
        "rounds": 2,
        "model": "logistic",
        "partition": {"how": "dirichlet(alpha=0.5)", "clients": 5, "hold_out": 0.3},
        "sim": {
            "participation": "count(clients=3)",
            "evaluate_clients": 1,
            "metrics": ["macro_f1", "auroc"],
            "executor": "loop",
            "precision": "fp64",
            "device": "cpu",
        },
    }
)


def deployed(folder, **settings):
    federation = build(EXPERIMENT)
    given = {"folder": folder, "fraction_evaluate": 1.0} | settings
    strategy = strategy_for(federation, federation.method, **given)
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    strategy.start(LocalGrid(app_for(federation), 5), arrays, num_rounds=2, timeout=5)
    return RunFolder(folder)


def test_scores_by_client_are_the_simulators(tmp_path):
    run(EXPERIMENT, tmp_path / "sim")
    folder = deployed(tmp_path / "flower", evaluate="per-client")
    ours, theirs = (ClientTable.read(tmp_path / n / "clients.csv") for n in ("flower", "sim"))
    for name in ("client", "held_out", "accuracy", "loss", "macro_f1", "auroc"):
        assert ours.numbers(name) == pytest.approx(theirs.numbers(name), nan_ok=True), name
    pairs = zip(folder.read_rounds(), RunFolder(tmp_path / "sim").read_rounds(), strict=True)
    for flower, simulated in pairs:
        columns = [name for name in simulated.metrics if name.startswith("clients_")]
        assert len(columns) >= 4 * 7
        for name in columns:
            assert flower.metric(name) == pytest.approx(simulated.metric(name)), name


def test_the_server_keeps_sums_alone_unless_it_is_told_otherwise(tmp_path):
    folder = deployed(tmp_path / "flower")
    assert not folder.client_table.exists()
    last = folder.read_rounds()[-1]
    kept = [name for name in last.metrics if name.startswith("clients_")]
    names = ("accuracy", "loss", "macro_f1", "auroc")
    assert sorted(kept) == sorted(f"clients_{name}_mean_by_rows" for name in names)


def test_a_run_that_clients_alone_have_scored_has_a_headline(tmp_path):
    federation = build(EXPERIMENT)
    server = replace(ServerSide.of(federation), evaluator=None, task=federation.trainer.task)
    folder = deployed(tmp_path / "flower", server=server)
    summary = folder.read_summary()
    assert summary["headline"] == "clients_accuracy_mean_by_rows"
    assert summary["headline_unit"] == "%" and summary["higher_is_better"]
    last = folder.read_rounds()[-1].metric("clients_accuracy_mean_by_rows")
    assert summary["clients_accuracy_mean_by_rows_last"] == last is not None
    page = render(read_runs([folder.path]), target=None, baseline="fedavg")
    assert f"{100 * summary['clients_accuracy_mean_by_rows_mean_last10']:.2f}" in page


def test_another_word_for_evaluate_is_refused():
    with pytest.raises(ValueError, match="evaluate is 'all': write 'sums' or 'per-client'"):
        FedbasinStrategy("fedavg", evaluate="all")
