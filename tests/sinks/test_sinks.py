"""Every sink gets every round and the summary of a real run, once, however often it is resumed."""

import json
import os
import shutil
import time
from contextlib import closing, suppress
from dataclasses import replace

import pytest

from fedbasin.core.record import RoundRecord, RunFolder
from fedbasin.core.sink import Sink, SinkError
from fedbasin.experiment import Experiment, LocalConfig, PartitionConfig, SimConfig
from fedbasin.experiment.comparison import cells, compare, run_cells
from fedbasin.experiment.runs import resume, run
from fedbasin.sim import Diverged
from fedbasin.sinks import SINKS, sinks_of
from fedbasin.sinks.mlflow import MLflow
from fedbasin.sinks.tensorboard import TensorBoard

TINY = Experiment(
    model="mlp(widths=(4,))",
    rounds=6,
    partition=PartitionConfig(clients=6),
    local=LocalConfig(epochs=1),
    sim=SimConfig(participation="count(clients=2)", checkpoint_every=2),
)
# of the packages themselves or what they need
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def no_settings_of_the_machine(monkeypatch, tmp_path):
    for name in tuple(os.environ):
        if name.startswith(("MLFLOW_", "WANDB_")):
            monkeypatch.delenv(name)
    for name in ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_ALLOW_FILE_STORE"):  # set by the sink
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "of-wandb"))


class Notebook(Sink):
    """Writes down what it is told."""

    def __init__(self):
        self.told = []

    def open(self, run):
        self.told.append(("open", run))

    def record(self, record):
        self.told.append(("record", record.round))

    def finish(self, summary):
        self.told.append(("finish", summary))

    def close(self):
        self.told.append(("close", None))

    def of(self, kind):
        return [what for name, what in self.told if name == kind]


def killed_at(round):
    """A function that ends the process as a signal would: nothing more is saved."""

    def end(record):
        if record.round == round:
            raise KeyboardInterrupt

    return end


def columns(folder):
    """The numbers of rounds.jsonl as pandas would read them, by column."""
    found = {}
    for line in (folder / "rounds.jsonl").read_text().splitlines():
        flat = json.loads(line)
        for name, value in flat.items():
            if name != "round" and isinstance(value, int | float):
                found.setdefault(name, []).append((flat["round"], value))
    return found


def assert_same_numbers(found, folder, timed=True):
    """What a sink holds, by name and as (step, value), is what the run's folder holds.

    A round that is made again takes another time; else its numbers are the same.
    """
    expected = columns(folder)
    if not timed:
        expected = {name: value for name, value in expected.items() if "seconds" not in name}
    assert expected["accuracy"] and [step for step, _ in expected["lr"]] == [1, 2, 3, 4, 5, 6]
    for name, points in expected.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points], name
        values = [value for _, value in found[name]]
        assert values == pytest.approx([value for _, value in points], rel=1e-6), name


# --- what every sink is told ---------------------------------------------------------------------


def test_a_sink_is_told_all_of_a_run(tmp_path):
    notebook = Notebook()
    summary = run(TINY, tmp_path / "first", log=[notebook])
    assert [kind for kind, _ in notebook.told] == ["open", *["record"] * 6, "finish", "close"]
    assert notebook.of("record") == [1, 2, 3, 4, 5, 6]
    assert notebook.of("finish") == [summary]
    (start,) = notebook.of("open")
    assert (start.folder, start.root) == (tmp_path / "first", tmp_path / "first")
    assert start.name == "first" and start.records == ()
    assert start.settings["local.epochs"] == 1 and start.settings["method"] == "fedavg"


def test_one_sink_is_opened_for_each_run_of_a_comparison(tmp_path):
    notebook = Notebook()
    compare(TINY, ["fedavg", "scaffold"], [0], tmp_path / "both", log=[notebook])
    assert [start.name for start in notebook.of("open")] == [
        "both/fedavg/seed0",
        "both/scaffold/seed0",
    ]
    assert {start.root for start in notebook.of("open")} == {tmp_path / "both"}
    assert notebook.of("record") == [1, 2, 3, 4, 5, 6] * 2
    assert [summary["method"] for summary in notebook.of("finish")] == ["fedavg", "scaffold"]
    assert len(notebook.of("close")) == 2


def test_a_function_gets_each_record(tmp_path):
    seen = []
    run(TINY, tmp_path, log=[seen.append])
    assert seen == RunFolder(tmp_path).read_rounds()


def test_a_resumed_run_tells_the_rounds_it_has_and_goes_on(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(TINY, tmp_path, log=[killed_at(5)])
    notebook = Notebook()
    resume(tmp_path, log=[notebook])
    (start,) = notebook.of("open")
    assert [record.round for record in start.records] == [1, 2, 3, 4]
    assert notebook.of("record") == [5, 6]


def test_a_run_that_diverges_tells_its_summary(tmp_path):
    notebook = Notebook()
    wild = replace(TINY, local=LocalConfig(epochs=1, lr=1e30))
    with pytest.raises(Diverged):
        run(wild, tmp_path, log=[notebook])
    (summary,) = notebook.of("finish")
    assert summary["status"] == "diverged" and len(notebook.of("close")) == 1


# --- a sink that fails ---------------------------------------------------------------------------


def broken_at(round):
    def broken(record):
        if record.round == round:
            raise ZeroDivisionError("the disk is gone")

    return broken


def test_a_function_that_fails_ends_the_run_and_loses_nothing(tmp_path):
    whole = run(TINY, tmp_path / "whole")
    folder, notebook = tmp_path / "broken", Notebook()
    told = (
        r"broken failed at round 3: ZeroDivisionError: the disk is gone.*fedbasin resume \S*broken"
    )
    with pytest.raises(SinkError, match=told):
        run(TINY, folder, log=[broken_at(3), notebook])
    assert notebook.of("record") == [1, 2, 3]  # the other sink has the round too
    assert [kind for kind, _ in notebook.told][-1] == "close"
    seen = []
    summary = resume(folder, log=[seen.append])
    assert [record.round for record in seen] == [4, 5, 6]  # round 3 was saved at once
    assert summary["accuracy_last"] == whole["accuracy_last"]
    model = (folder / "model.safetensors").read_bytes()
    assert model == (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_a_sink_that_fails_at_the_last_round_leaves_a_run_that_resumes(tmp_path):
    with pytest.raises(SinkError, match="at round 6"):
        run(TINY, tmp_path, log=[broken_at(6)])
    assert resume(tmp_path)["status"] == "finished"
    assert (tmp_path / "model.safetensors").exists()


def test_a_sink_that_cannot_be_opened_is_told_before_the_first_round(tmp_path):
    class Shut(Notebook):
        def open(self, run):
            raise OSError("no route to host")

    first, shut = Notebook(), Shut()
    with pytest.raises(SinkError, match="Shut failed when the run started: OSError: no route"):
        run(TINY, tmp_path, log=[first, shut])
    assert not (tmp_path / "rounds.jsonl").read_text()
    assert len(first.of("close")) == 1 and shut.told == []  # what was not opened is not closed
    assert resume(tmp_path)["rounds"] == 6


def test_a_sink_that_fails_at_the_summary_leaves_a_complete_run(tmp_path):
    class Full(Notebook):
        def finish(self, summary):
            raise OSError("no space left")

    full = Full()
    with pytest.raises(SinkError, match=r"Full failed at the summary: OSError: no space left.*"):
        run(TINY, tmp_path, log=[full])
    assert len(full.of("close")) == 1
    assert (tmp_path / "model.safetensors").exists()
    assert RunFolder(tmp_path).read_summary()["status"] == "finished"


def test_what_ended_a_run_is_not_hidden_by_a_sink_that_fails_too(tmp_path, caplog):
    class Full(Sink):
        def finish(self, summary):
            raise OSError("no space left")

        def close(self):
            raise OSError("nothing to close")

    with pytest.raises(Diverged):
        run(replace(TINY, local=LocalConfig(epochs=1, lr=1e30)), tmp_path, log=[Full()])
    assert "no space left" in caplog.text and "nothing to close" in caplog.text


# --- what `log` takes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "told"),
    [
        ("tensorboard", r"write a list: log=\['tensorboard'\]"),
        (["tensorbord"], "'tensorbord' is no sink; did you mean tensorboard?"),
        (["csv"], "'csv' is no sink; available: mlflow, tensorboard, wandb"),
        ([3], "3 must be a name"),
        ([Notebook], "must be a name .* a Sink object"),
    ],
)
def test_what_is_no_sink_is_refused(log, told):
    with pytest.raises(SinkError, match=told):
        sinks_of(log)


@pytest.mark.parametrize("name", sorted(SINKS))
def test_without_the_package_the_fix_is_named_before_any_work(name, tmp_path, monkeypatch):
    monkeypatch.setattr("fedbasin.sinks.find_spec", lambda package: None)
    for start in (run, lambda e, out, log: compare(e, ["fedavg"], [0], out, log=log)):
        with pytest.raises(SinkError, match=rf"pip install 'fedbasin\[{name}\]'"):
            start(TINY, tmp_path / "out", log=[name])
    assert not (tmp_path / "out").exists()


def test_what_only_this_process_has_is_refused_with_worker_processes(tmp_path):
    for target in (print, Notebook()):
        with pytest.raises(SinkError, match=r"(print|Notebook) cannot be used with jobs=2.*jobs=1"):
            compare(TINY, ["fedavg"], [0, 1], tmp_path / "out", jobs=2, log=[target])
    assert not (tmp_path / "out").exists()


def test_a_name_that_is_given_twice_is_one_sink(monkeypatch):
    monkeypatch.setattr("fedbasin.sinks.find_spec", lambda package: "there")
    found = sinks_of(["tensorboard", "mlflow", "tensorboard"])
    assert [type(sink) for sink in found] == [TensorBoard, MLflow]


# --- TensorBoard ---------------------------------------------------------------------------------


def events(folder):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return found


def scalars(folder):
    found = events(folder)
    return {
        name.replace("note/", "note_"): [(event.step, event.value) for event in found.Scalars(name)]
        for name in found.Tags()["scalars"]
    }


def test_tensorboard_has_every_round_and_the_summary(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    summary = run(replace(TINY, method="ima(fedavg)"), tmp_path, log=["tensorboard"])
    assert_same_numbers(scalars(tmp_path), tmp_path)
    (event,) = events(tmp_path).Tensors("summary/text_summary")
    assert json.loads(event.tensor_proto.string_val[0]) == json.loads(json.dumps(summary))


def test_tensorboard_shows_a_resumed_run_once(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    with pytest.raises(KeyboardInterrupt):
        run(TINY, tmp_path, log=["tensorboard", killed_at(3)])
    with pytest.raises(KeyboardInterrupt):
        resume(tmp_path, log=[killed_at(5)])  # rounds 3 and 4 are logged by nobody
    resume(tmp_path, log=["tensorboard"])
    assert_same_numbers(scalars(tmp_path), tmp_path)


def test_tensorboard_takes_columns_and_notes_of_any_name(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from fedbasin.core.sink import RunStart

    sink = TensorBoard()
    sink.open(RunStart(tmp_path, tmp_path, {}, ()))
    notes = {"gamma": 0.5, "weights": [0.5, 0.5]}
    sink.record(RoundRecord(round=1, update_norm=float("nan"), notes=notes))
    sink.close()
    tags = events(tmp_path).Tags()["scalars"]
    assert "note/gamma" in tags and "lr" in tags
    assert not {"note/weights", "update_norm", "model_norm", "round"} & set(tags)


# --- MLflow --------------------------------------------------------------------------------------


def mlflow_client(store):
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    from mlflow.tracking import MlflowClient

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    return MlflowClient(tracking_uri=store.as_uri())


def mlflow_runs(store):
    client = mlflow_client(store)
    experiment = client.get_experiment_by_name("fedbasin")
    return {found.info.run_name: found for found in client.search_runs([experiment.experiment_id])}


def histories(store, found):
    client = mlflow_client(store)
    return {
        name: [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, name)]
        for name in found.data.metrics
    }


def test_mlflow_has_every_round_the_settings_and_the_summary(tmp_path):
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    out = tmp_path / "both"
    summaries = compare(TINY, ["fedavg", "ima(fedavg)"], [0], out, jobs=2, log=["mlflow"])
    found = mlflow_runs(out / "mlruns")
    layout = cells(TINY, ["fedavg", "ima(fedavg)"], [0], out)
    assert set(found) == {f"both/{cell.path.relative_to(out).as_posix()}" for cell in layout}
    for cell, summary in zip(layout, summaries, strict=True):
        logged = found[f"both/{cell.path.relative_to(out).as_posix()}"]
        assert_same_numbers(histories(out / "mlruns", logged), cell.path)
        assert logged.data.params["method"] == summary["method"]
        assert logged.data.params["local.epochs"] == "1"
        assert logged.data.metrics["summary/accuracy_last"] == summary["accuracy_last"]
        assert logged.data.tags["status"] == "finished" and logged.info.status == "FINISHED"


def test_mlflow_goes_on_in_the_same_run_and_logs_no_round_twice(tmp_path):
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    layout = cells(TINY, ["fedavg"], [0], tmp_path / "there")
    with pytest.raises(KeyboardInterrupt):
        run_cells(layout, log=["mlflow", killed_at(3)])
    (failed,) = mlflow_runs(tmp_path / "there" / "mlruns").values()
    assert failed.info.status == "FAILED" and failed.data.metrics["round"] == 3
    shutil.move(tmp_path / "there", tmp_path / "elsewhere")
    folder = tmp_path / "elsewhere" / layout[0].path.relative_to(tmp_path / "there")
    with pytest.raises(KeyboardInterrupt):
        resume(folder, log=[killed_at(5)])  # rounds 3 and 4 are made by a run that does not log
    resume(folder, log=["mlflow"])  # alone: it still finds the store of the comparison
    (finished,) = mlflow_runs(tmp_path / "elsewhere" / "mlruns").values()
    assert finished.info.run_id == failed.info.run_id and finished.info.status == "FINISHED"
    found = histories(tmp_path / "elsewhere" / "mlruns", finished)
    assert_same_numbers(found, folder, timed=False)


def test_mlflow_logs_where_the_user_says(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "of-all").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run(TINY, tmp_path / "a", log=["mlflow"])
    run(TINY, tmp_path / "b", log=[MLflow(tracking_uri=(tmp_path / "other").as_uri())])
    assert set(mlflow_runs(tmp_path / "of-all")) == {"a"}
    assert set(mlflow_runs(tmp_path / "other")) == {"b"}
    assert not (tmp_path / "a" / "mlruns").exists()


# --- Weights & Biases ----------------------------------------------------------------------------


def whole_file(path):
    """The records of one offline file. W&B's process may still be writing it, up to an exit."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    while True:
        found = []
        store = DataStore()
        store.open_for_scan(str(path))
        with closing(store._fp), suppress(AssertionError):  # which a cut record raises
            while (data := store.scan_data()) is not None:
                found.append(Record.FromString(data))
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            return found
        time.sleep(0.1)


def offline_records(folder):
    """The history and the summary that W&B's offline files of a run hold, and the run's ids."""
    history, summary, ids = {}, {}, set()
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in whole_file(path):
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            row = {_key(item): json.loads(item.value_json) for item in record.history.item}
            for name in row.keys() - {"_step"}:
                history.setdefault(name, []).append((row["_step"], row[name]))
            for item in record.summary.update:
                summary[_key(item)] = json.loads(item.value_json)
    return history, summary, ids


def _key(item):
    return item.key or ".".join(item.nested_key)


def test_wandb_has_every_round_and_the_summary(tmp_path):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    summary = run(replace(TINY, method="ima(fedavg)"), tmp_path, log=["wandb"])
    history, logged, _ = offline_records(tmp_path)
    assert_same_numbers(history, tmp_path)
    assert logged["summary/accuracy_last"] == summary["accuracy_last"]


def test_wandb_goes_on_in_the_same_run_and_logs_no_round_twice(tmp_path):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    with pytest.raises(KeyboardInterrupt):
        run(TINY, tmp_path, log=["wandb", killed_at(3)])
    resume(tmp_path, log=["wandb"])
    history, _, ids = offline_records(tmp_path)
    assert_same_numbers(history, tmp_path, timed=False)
    assert len(ids) == 1
