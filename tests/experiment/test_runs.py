import hashlib
import re
import subprocess
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pandas
import pytest
import torch

from fedbasin.core.catalogue import needs_of
from fedbasin.core.record import RecordError, RunFolder
from fedbasin.core.state import StateError, read
from fedbasin.data import load
from fedbasin.experiment import ConfigError, Experiment, build, compare, resume, run
from fedbasin.experiment.comparison import slug
from fedbasin.experiment.config import DataConfig, LocalConfig, PartitionConfig, SimConfig
from fedbasin.experiment.executors import pick_device
from fedbasin.experiment.facts import commit_of
from fedbasin.experiment.rows import cut_rows
from fedbasin.experiment.runs import Branch, _refuse_edited
from fedbasin.methods import FedAvg
from fedbasin.sim.provenance import identity

SMALL = Experiment(
    model="mlp(widths=(16,))",
    rounds=12,
    partition=PartitionConfig(how="dirichlet(alpha=0.3, minimum=2)", clients=10),
    local=LocalConfig(lr=0.2, epochs=2, batch=16),
    sim=SimConfig(participation="fraction(rate=0.5)", checkpoint_every=4),
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "r"
    return run(SMALL, out), out


def test_a_run_learns_and_leaves_files_that_pandas_opens(finished):
    summary, out = finished
    assert summary["accuracy_mean_last10"] > 0.6 and summary["status"] == "finished"
    table = pandas.read_json(out / "rounds.jsonl", lines=True)
    assert len(table) == 12
    assert table["accuracy"].iloc[-1] == pytest.approx(summary["accuracy_last"])
    assert pandas.read_json(out / "summary.json", typ="series")["method"] == "fedavg"
    assert {p.name for p in out.iterdir()} == {
        "begun.toml",
        "config.toml",
        "data.json",
        "interface.json",
        "partition.csv",
        "rounds.jsonl",
        "summary.json",
        "checkpoint.safetensors",
        "model.safetensors",
    }
    assert len(summary["accuracy_per_class"]) == 10
    held, rows = pandas.read_csv(out / "partition.csv"), cut_rows(SMALL.resolved(), load("digits"))
    for client, mine in enumerate(rows.parts.clients):
        counts = np.bincount(rows.splits.train.labels[mine], minlength=10)
        assert held.iloc[client].tolist() == [client, len(mine), *counts]
    for name in ("versions", "commit", "device", "seconds", "peak_memory_bytes", "seed", "rounds"):
        assert name in summary


def test_the_shipped_model_scores_what_the_summary_says(finished):
    summary, out = finished
    federation = build(SMALL)
    shipped = read(out / "model.safetensors")
    vector = federation.net.layout.flat({n: shipped[n] for n in federation.net.layout.names})
    assert federation.evaluator.score(vector)["accuracy"] == summary["accuracy_last"]


def test_the_same_seed_gives_the_same_bits_and_another_seed_another_run(finished, tmp_path):
    _, out = finished
    run(SMALL, tmp_path / "again")
    run(replace(SMALL, seed=1), tmp_path / "other")
    model = (out / "model.safetensors").read_bytes()
    assert (tmp_path / "again/model.safetensors").read_bytes() == model
    assert (tmp_path / "other/model.safetensors").read_bytes() != model


def test_a_folder_that_holds_a_run_is_refused_and_a_finished_run_is_left_alone(finished, tmp_path):
    summary, out = finished
    with pytest.raises(RecordError, match="resume"):
        run(SMALL, out)
    assert resume(out) == summary
    with pytest.raises(RecordError, match="no run"):
        resume(tmp_path)


def test_a_checkpoint_without_its_settings_is_not_gone_on_from(tmp_path):
    run(replace(SMALL, rounds=1), tmp_path)
    (tmp_path / "config.toml").unlink()
    with pytest.raises(RecordError, match=r"checkpoint without config.toml; choose another"):
        run(replace(SMALL, seed=5), tmp_path)


class Crash(BaseException):
    pass


def crash_at(round):
    def crash(record):
        if record.round == round:
            raise Crash

    return crash


@pytest.mark.parametrize("other", ["rows", "labels", "who holds which"])
def test_a_run_goes_on_with_the_data_it_was_begun_on_alone(other, tmp_path, monkeypatch):
    with pytest.raises(Crash):
        run(SMALL, tmp_path, on_round=crash_at(6))
    whole = load("digits")
    if other == "rows":
        changed = replace(whole, train=whole.train.take(slice(0, 600)))
    elif other == "labels":
        test = replace(whole.test, labels=whole.test.labels[::-1].copy())
        changed = replace(whole, test=test)
    else:
        changed = whole
        for name in ("begun.toml", "config.toml"):
            text = (tmp_path / name).read_text()
            (tmp_path / name).write_text(text.replace("alpha=0.3", "alpha=0.4"))
    monkeypatch.setattr("fedbasin.data.load", lambda name, data_dir: changed)
    with pytest.raises(RecordError, match=r"begun on other data: 1797 rows.*--data-dir"):
        resume(tmp_path)
    (tmp_path / "data.json").write_text("{")
    with pytest.raises(RecordError, match=r"data.json is not JSON"):
        resume(tmp_path)


def test_data_is_told_apart_by_its_labels_and_by_who_holds_which_rows():
    train, test = np.array([0, 1, 2, 0, 1]), np.array([2, 1])
    clients = [np.array([0, 3]), np.array([1, 2])]
    known = identity(train, test, clients)
    assert known == identity(train.astype(np.int32), test, clients) and known["rows"] == 7
    others = [
        identity(train[::-1], test, clients),
        identity(train, test[::-1], clients),
        identity(train, test, clients[::-1]),
        identity(train, test, [np.array([0, 4]), np.array([1, 2])]),
        identity(train, test, [np.array([0, 3, 1]), np.array([2])]),
    ]
    assert len({each["hash"] for each in (known, *others)}) == 6


def test_the_hash_of_classes_is_what_it_was_when_nothing_else_was_known():
    """A folder of an earlier version is resumed: its hash is of int64 alone."""
    train, test = np.array([0, 1, 2, 0, 1]), np.array([2, 1])
    clients = [np.array([0, 3]), np.array([1, 2, 4])]
    numbers = np.array([2, 3, *clients[0], *clients[1], *train, *test], dtype="<i8")
    wanted = hashlib.blake2b(numbers.tobytes(), digest_size=8).hexdigest()
    pixels = np.zeros((5, 1, 2, 2), np.uint8)
    assert identity(train, test, clients)["hash"] == wanted
    assert identity(train, test, clients, (pixels, pixels))["hash"] == wanted


def test_targets_and_numbers_of_any_type_are_told_apart():
    clients = [np.array([0, 1]), np.array([2])]
    target = np.array([0.2, 0.4, 0.9], np.float32)  # all 0 as int64
    table = np.array([[0.5], [0.25], [1]], np.float32)
    known = identity(target, target, clients, (table, table))
    assert known == identity(target.copy(), target, clients, (table.copy(), table))
    others = [
        identity(target + np.float32(0.05), target, clients, (table, table)),
        identity(target, target[::-1], clients, (table, table)),
        identity(target.astype(np.float64), target, clients, (table, table)),
        identity(target[:, None], target, clients, (table, table)),
        identity(target, target, clients, (table * 2, table)),
        identity(target, target, clients, (table, table[::-1])),
        identity(target, target, clients[::-1], (table, table)),
        identity(np.array([0, 1, 2]), target, clients, (table, table)),
    ]
    assert len({each["hash"] for each in (known, *others)}) == 9
    assert all(each["rows"] == 6 for each in others)


def edit(config, before, after):
    text = config.read_text()
    assert text.count(before) == 1
    config.write_text(text.replace(before, after))


def test_a_run_goes_on_with_the_settings_it_was_begun_with_alone(tmp_path):
    with pytest.raises(Crash):
        run(SMALL, tmp_path, on_round=crash_at(6))
    config = tmp_path / "config.toml"
    for before, after in (("lr = 0.2", "lr = 0.3"), ("rounds = 12", "rounds = 20")):
        edit(config, before, after)
        told = re.escape(f"edited since the run began ({before} there, {after} asked for); put")
        with pytest.raises(RecordError, match=told):
            resume(tmp_path)
        edit(config, after, before)
    edit(config, "checkpoint_every = 4", "checkpoint_every = 5")
    assert resume(tmp_path)["status"] == "finished"


def test_how_a_run_is_computed_may_change_and_what_it_computes_may_not(tmp_path):
    folder, begun = RunFolder(tmp_path), SMALL.resolved()
    folder.begun.write_text(begun.to_toml())
    free = {
        "device": "cpu", "workers": 2, "chunk": 3, "memory": 1.0, "client_memory": 1.0,
        "checkpoint_every": 7,
    }  # fmt: skip
    held = {
        "participation": "fraction(rate=0.4)", "dropout": 0.1, "executor": "loop",
        "compile": "on", "precision": "fp64", "buffers": "keep", "evaluate_every": 2,
        "evaluate_last": 3,
    }  # fmt: skip
    for name, value in (free | held).items():
        edited = replace(begun, sim=replace(begun.sim, **{name: value}))
        with pytest.raises(RecordError, match=name) if name in held else nullcontext():
            _refuse_edited(folder, edited)


def test_a_run_from_before_settings_were_kept_resumes(finished, tmp_path):
    with pytest.raises(Crash):
        run(SMALL, tmp_path, on_round=crash_at(6))
    (tmp_path / "begun.toml").unlink()
    seen = []
    resumed = resume(tmp_path, on_round=seen.append)
    assert resumed["accuracy_last"] == finished[0]["accuracy_last"]
    assert [record.round for record in seen] == list(range(5, 13))  # saved after every fourth


def test_a_run_from_before_data_was_recorded_resumes_and_claims_nothing(tmp_path):
    with pytest.raises(Crash):
        run(SMALL, tmp_path, on_round=crash_at(6))
    (tmp_path / "data.json").unlink()
    assert resume(tmp_path)["status"] == "finished"
    assert not (tmp_path / "data.json").exists()


def test_a_comparison_runs_each_cell_once(tmp_path):
    base = replace(SMALL, rounds=2)
    first = compare(base, ["fedavg", "fedprox(mu=1)"], [0, 1], tmp_path)
    assert [(s["method"], s["seed"]) for s in first] == [
        ("fedavg", 0),
        ("fedprox(mu=1.0)", 0),
        ("fedavg", 1),
        ("fedprox(mu=1.0)", 1),
    ]
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("model.safetensors")}
    assert len(stamps) == 4
    assert compare(base, ["fedavg", "fedprox(mu=1)"], [0, 1], tmp_path) == first
    assert {p: p.stat().st_mtime_ns for p in stamps} == stamps
    with pytest.raises(RecordError, match=r"rounds = 2 there, rounds = 3 asked for\);"):
        compare(replace(base, rounds=3), ["fedavg"], [0], tmp_path)
    with pytest.raises(ConfigError, match="twice"):
        compare(base, ["fedavg", "fedavg()"], [0], tmp_path)
    with pytest.raises(ConfigError, match="at least one"):
        compare(base, [], [0], tmp_path)


def test_folder_names_are_safe_and_distinct():
    texts = ["fedavg", "fedprox(mu=0.1)", "fedprox(mu=0_1)", "a/../b", "x" * 300, "FEDAVG", ".."]
    names = [slug(t) for t in texts]
    assert len(set(names)) == len(texts)
    assert all(n and "/" not in n and not n.startswith(".") and len(n) < 80 for n in names)


def test_proxy_rows_are_neither_trained_on_nor_scored():
    for source in ("train", "test"):
        settings = replace(SMALL, data=DataConfig(proxy_per_class=4, proxy_from=source))
        federation = build(settings)
        assert federation.context.proxy.size == 40
        counts = np.bincount(federation.context.proxy.labels.numpy(), minlength=10)
        assert counts.tolist() == [4] * 10
        plain = build(SMALL)
        lost_train = len(plain.executor.population.labels) - len(federation.population.labels)
        lost_test = plain.evaluator.size - federation.evaluator.size
        assert (lost_train, lost_test) == ((40, 0) if source == "train" else (0, 40))


def test_the_long_tail_is_cut_before_the_partition():
    federation = build(replace(SMALL, data=DataConfig(imbalance=0.1)))
    counts = federation.population.class_counts(10).sum(0)
    assert counts[9] / counts[0] == pytest.approx(0.1, abs=0.02)
    assert (counts[:-1] >= counts[1:]).all()


def test_inputs_are_normalised_as_asked():
    ranges = {}
    for name in ("dataset", "symmetric", "unit"):
        test = build(replace(SMALL, data=DataConfig(normalise=name))).evaluator
        inputs = test.transform(test.inputs, None)
        ranges[name] = (float(inputs.min()), float(inputs.max()))
    assert ranges["symmetric"] == (-1.0, 1.0) and ranges["unit"] == (0.0, 1.0)
    assert ranges["dataset"] not in (ranges["symmetric"],)


def test_a_run_that_diverges_is_a_result_and_the_others_go_on(tmp_path):
    base = replace(SMALL, rounds=3, local=LocalConfig(lr=1e30, batch=16))
    found = compare(base, ["fedavg", "fedprox(mu=0.1)"], [0], tmp_path)
    assert [s["status"] for s in found] == ["diverged", "diverged"]
    assert "client" in found[0]["reason"]
    assert compare(base, ["fedavg", "fedprox(mu=0.1)"], [0], tmp_path) == found


IN_PLAIN = "class counts in plain"  # what fedwcm says of every run


def test_processes_of_their_own_give_the_same_bits(tmp_path, capfd):
    base, seeds = replace(SMALL, rounds=2), [0, 1]
    one = compare(base, ["scaffold", "fedwcm"], seeds, tmp_path / "one")
    capfd.readouterr()
    two = compare(base, ["scaffold", "fedwcm"], seeds, tmp_path / "two", jobs=2)
    assert capfd.readouterr().err.count(IN_PLAIN) == 1
    assert [s["accuracy_last"] for s in one] == [s["accuracy_last"] for s in two]
    for path in sorted((tmp_path / "one").rglob("model.safetensors")):
        other = tmp_path / "two" / path.relative_to(tmp_path / "one")
        assert path.read_bytes() == other.read_bytes()


def test_a_caution_is_said_once_a_method_and_again_in_the_next_comparison(tmp_path, caplog):
    for folder in ("one", "two"):
        caplog.clear()
        compare(replace(SMALL, rounds=1), ["fedwcm", "fedwcm(tau=0.1)"], [0, 1], tmp_path / folder)
        said = [text for text in caplog.messages if IN_PLAIN in text]
        assert sorted(text.split(":")[0] for text in said) == ["fedwcm", "fedwcm(tau=0.1)"]
    for seed in (0, 1):
        caplog.clear()
        run(replace(SMALL, rounds=1, method="fedwcm", seed=seed), tmp_path / str(seed))
        assert sum(IN_PLAIN in text for text in caplog.messages) == 1


def test_settings_that_cannot_work_are_explained():
    with pytest.raises(ConfigError, match="proxy_per_class"):
        build(replace(SMALL, sim=replace(SMALL.sim, buffers="recalibrate")))
    with pytest.raises(ConfigError, match="device"):
        pick_device("quantum")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="cuda is not available"):
            pick_device("cuda")
    with pytest.raises(ValueError, match="epochs"):
        build(replace(SMALL, local=LocalConfig(steps=3, schedule="epoch_decay")))
    assert needs_of(FedAvg()) == set()


def test_recalibration_renews_batchnorm_statistics():
    """After it, a BatchNorm model sees the server's rows with the mean and spread they have."""
    settings = replace(
        SMALL,
        model="resnet8(norm='batch')",
        rounds=1,
        data=DataConfig(proxy_per_class=10),
        local=LocalConfig(lr=0.1, batch=16),
        partition=PartitionConfig(how="iid", clients=40),
        sim=replace(SMALL.sim, participation="count(clients=2)", buffers="recalibrate"),
    )
    federation = build(settings)
    server, states = federation.begin()
    after, _ = next(iter(federation.rounds_from(server, states)))
    proxy, net = federation.context.proxy, federation.net
    inputs = proxy.transform(proxy.inputs, None)
    trained = net(after.score, inputs, after.buffers, training=True).logits
    scored = net(after.score, inputs, after.buffers).logits
    stale = net(after.score, inputs, server.buffers).logits
    assert (trained - scored).abs().mean() < 0.1 * (trained - stale).abs().mean()


def test_the_commit_is_that_of_the_file_and_says_when_it_is_not_all(tmp_path):
    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        ran = subprocess.run(
            ["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True, text=True
        )
        return ran.stdout.strip()

    source = tmp_path / "source.py"
    source.write_text("one")
    assert commit_of(source) is None
    git("init", "-q")
    assert commit_of(source) is None  # in a repository, but not of it: an installed package
    git("add", "source.py")
    git("commit", "-qm", "one")
    git("tag", "-a", "v1", "-m", "one")
    assert commit_of(source) == git("rev-parse", "HEAD")
    source.write_text("two")
    assert commit_of(source) == git("rev-parse", "HEAD") + "-dirty"


LATE = replace(SMALL, method="ima(window=2, start=0.5)", sim=replace(SMALL.sim, precision="fp64"))


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """A run of FedAvg that keeps what a run with late averaging goes on from."""
    out = tmp_path_factory.mktemp("prefix") / "plain"
    run(replace(LATE, method="fedavg"), out, branching=(5,))
    return out


def test_a_run_goes_on_from_another_ones_first_rounds(prefix, tmp_path):
    run(LATE, tmp_path / "whole")
    summary = run(LATE, tmp_path / "branch", branch=Branch(prefix, 5))
    whole, part, plain = (
        pandas.read_json(out / "rounds.jsonl", lines=True)
        for out in (tmp_path / "whole", tmp_path / "branch", prefix)
    )
    assert part["round"].tolist() == list(range(1, 13))
    assert part["seconds"][:5].tolist() == plain["seconds"][:5].tolist()  # taken over, not run
    assert part["seconds"][5:].tolist() != plain["seconds"][5:].tolist()
    for column in ("accuracy", "loss", "update_norm", "model_norm", "lr"):
        np.testing.assert_allclose(part[column], whole[column], rtol=1e-9)
    assert part["loss"].iloc[-1] != plain["loss"].iloc[-1]
    shared = summary["branch"]
    assert (shared["run"], shared["rounds"]) == ("plain", 5) and "commit" in shared
    assert "branch" not in pandas.read_json(tmp_path / "whole/summary.json", typ="series")


def test_a_branch_that_is_stopped_resumes_and_still_says_where_it_came_from(prefix, tmp_path):
    whole = run(LATE, tmp_path / "whole", branch=Branch(prefix, 5))
    with pytest.raises(Crash):
        run(LATE, tmp_path / "branch", branch=Branch(prefix, 5), on_round=crash_at(9))
    said = (tmp_path / "branch/branch.json").read_text()
    (tmp_path / "branch/branch.json").write_text("[5]")
    with pytest.raises(RecordError, match=r"branch.json must hold one object"):
        resume(tmp_path / "branch")
    (tmp_path / "branch/branch.json").write_text(said)
    resumed = resume(tmp_path / "branch")
    assert resumed["branch"] == whole["branch"]
    model = (tmp_path / "whole/model.safetensors").read_bytes()
    assert (tmp_path / "branch/model.safetensors").read_bytes() == model


def test_a_branch_is_of_a_run_on_the_same_data(prefix, tmp_path, monkeypatch):
    run(LATE, tmp_path / "same", branch=Branch(prefix, 5))
    known = (prefix / "data.json").read_text()
    assert (tmp_path / "same/data.json").read_text() == known
    part = replace(load("digits"), train=load("digits").train.take(slice(0, 600)))
    monkeypatch.setattr("fedbasin.data.load", lambda name, data_dir: part)
    with pytest.raises(RecordError, match=f"{prefix} was begun on other data"):
        run(LATE, tmp_path / "other", branch=Branch(prefix, 5))
    assert not (tmp_path / "other/config.toml").exists()


def test_a_branch_too_late_or_without_a_checkpoint_leaves_no_run(prefix, tmp_path):
    early = replace(LATE, method="ima(window=3, start=0.5)")
    with pytest.raises(ValueError, match=r"parts from fedavg after round 4"):
        run(early, tmp_path / "early", branch=Branch(prefix, 5))
    with pytest.raises(StateError, match=r"round00004.safetensors does not exist"):
        run(early, tmp_path / "early", branch=Branch(prefix, 4))
    assert not (tmp_path / "early/config.toml").exists()


@pytest.mark.parametrize(
    ("method", "folder"), [("fedcda(store='disk')", "archive"), ("scaffold", "clients")]
)
def test_what_lies_in_files_is_not_branched_from(method, folder, tmp_path):
    """Files of models are swept away as a run goes on, so a checkpoint alone would not do."""
    spilling = replace(LATE.sim, client_memory=0.0)
    run(replace(LATE, method=method, sim=spilling), tmp_path / "run", branching=(5,))
    assert (tmp_path / "run" / folder).is_dir() and not (tmp_path / "run/branches").exists()
