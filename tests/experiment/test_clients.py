"""What each client gets: scores on held-out rows, at home, alone and pooled, in whole runs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score

from fedbasin.core.method import Plan
from fedbasin.core.record import RunFolder
from fedbasin.core.rng import root
from fedbasin.core.served import ClientTable, columns_of
from fedbasin.data import Dataset, Rows, load
from fedbasin.experiment import build, from_mapping, resume, run
from fedbasin.experiment.config import ConfigError
from fedbasin.experiment.rows import cut_rows
from fedbasin.local.train import Received
from fedbasin.sim.loop import client_key

# Ray leaves files of its own open while it starts.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SETTINGS = {
    "rounds": 4,
    "model": "mlp(widths=(8,))",
    "partition": {"how": "dirichlet(alpha=0.5)", "clients": 9, "hold_out": 0.3, "unseen": 0.2},
    "local": {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.001},
    "sim": {
        "participation": "count(clients=3)",
        "evaluate_clients": 2,
        "personalise": "epochs(2)",
        "baselines": True,
        "metrics": ["macro_f1", "auroc"],
        "executor": "loop",
        "precision": "fp64",
        "device": "cpu",
    },
}


def changed(**sections):
    merged = {k: dict(v) if isinstance(v, dict) else v for k, v in SETTINGS.items()}
    for name, more in sections.items():
        merged[name] = merged[name] | more if isinstance(more, dict) else more
    return from_mapping(merged)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("clients") / "run"
    run(changed(), out)
    return out


def outputs_of(federation, vector, inputs):
    with torch.no_grad():
        ready = federation.trainer.transform(torch.from_numpy(inputs), None)
        return federation.net(vector, ready).logits.softmax(1).numpy()


def auroc(truth, said):
    columns = [(truth == c, said[:, c]) for c in range(10) if 0 < (truth == c).sum() < len(truth)]
    return np.mean([roc_auc_score(t, s) for t, s in columns]) if columns else np.nan


def test_scores_are_those_of_a_loop_over_clients_with_scikit_learn(finished):
    table = ClientTable.read(finished / "clients.csv")
    federation = build(changed())
    vector = federation.net.layout.flat(load_file(finished / "model.safetensors"))
    rows = cut_rows(changed().resolved(), load("digits"))
    train = rows.splits.train
    for client, held in enumerate(rows.held.clients):
        truth = train.labels[held]
        said = outputs_of(federation, vector, train.inputs[held])
        answers = said.argmax(1)
        f1 = f1_score(truth, answers, average="macro", labels=np.union1d(truth, answers))
        expected = [accuracy_score(truth, answers), f1, auroc(truth, said)]
        ours = [table.numbers(name)[client] for name in ("accuracy", "macro_f1", "auroc")]
        assert ours == pytest.approx(expected, nan_ok=True)
    assert table.columns["held_out"] == rows.held.sizes().tolist()
    assert [c for c, seen in enumerate(table.columns["seen"]) if not seen] == rows.unseen.tolist()


def test_the_records_sum_the_table_up(finished):
    table = ClientTable.read(finished / "clients.csv")
    records = RunFolder(finished).read_rounds()
    seen = np.array(table.columns["seen"])
    held = np.array(table.columns["held_out"])
    last = records[-1]
    for way in ("", "_home", "_alone", "_pooled"):
        accuracy = table.numbers(f"accuracy{way}")
        name = f"clients_accuracy{way}"
        assert last.metric(f"{name}_mean") == pytest.approx(accuracy[seen].mean())
        weighted = np.average(accuracy[seen], weights=held[seen])
        assert last.metric(f"{name}_mean_by_rows") == pytest.approx(weighted)
        assert last.metric(f"{name}_worst") == accuracy[seen].min()
        assert last.metric(f"{name}_p10") == pytest.approx(np.percentile(accuracy[seen], 10))
        assert last.metric(f"unseen_accuracy{way}_mean") == pytest.approx(accuracy[~seen].mean())
    loss = table.numbers("loss")
    assert last.metric("clients_loss_worst") == loss[seen].max()
    worse = (table.numbers("accuracy") < table.numbers("accuracy_alone")).mean()
    assert last.metric("clients_accuracy_worse_than_alone") == pytest.approx(worse)
    scored = ["clients_accuracy_mean" in record.metrics for record in records]
    assert scored == [False, True, False, True]
    federation = build(changed())
    times = np.bincount(np.concatenate([federation.cohort(r)[1] for r in range(4)]), minlength=9)
    assert table.columns["took_part"] == times.tolist()


def trained_by_hand(federation, rows, client, start, plan, name):
    """One client's training by the reference trainer, without a cohort."""
    trainer = replace(federation.trainer, rules=())
    train = rows.splits.train
    mine = rows.home.clients[client]
    shard = (torch.from_numpy(train.inputs[mine]), torch.from_numpy(train.labels[mine]))
    key = client_key(root(0).fold(name), 0, client).tensor("cpu")
    received = Received(start[0], start[1], (), (), 0, key)
    return trainer.train(type(federation.population.shard(0))(*shard), received, plan)


@pytest.mark.parametrize(
    ("way", "name", "plan"), [("home", "home", Plan(0.05, 2)), ("alone", "alone", Plan(0.05, 4))]
)
def test_models_at_home_are_those_of_clients_trained_one_by_one(finished, way, name, plan):
    table = ClientTable.read(finished / "clients.csv")
    federation = build(changed())
    rows = cut_rows(changed().resolved(), load("digits"))
    start = federation.net.initial()
    if way == "home":
        vector = federation.net.layout.flat(load_file(finished / "model.safetensors"))
        start = (vector, start[1])
    for client in (0, int(rows.unseen[0])):
        held = rows.held.clients[client]
        trained = trained_by_hand(federation, rows, client, start, plan, name)
        said = outputs_of(federation, trained.vector, rows.splits.train.inputs[held])
        right = (said.argmax(1) == rows.splits.train.labels[held]).mean()
        assert table.numbers(f"accuracy_{way}")[client] == pytest.approx(right)


@pytest.mark.parametrize("engine", ["cohort", "workers", "ray"])
def test_every_engine_gives_the_scores_of_a_loop(finished, tmp_path, engine, request):
    settings = {"executor": "loop", "workers": 2} if engine == "workers" else {"executor": engine}
    if engine == "ray":
        ray = pytest.importorskip("ray", reason="needs the extra ray: pip install 'fedbasin[ray]'")
        request.addfinalizer(ray.shutdown)
        settings["workers"] = 1
    run(changed(sim=settings), tmp_path / "run")
    ours, theirs = (ClientTable.read(p / "clients.csv") for p in (tmp_path / "run", finished))
    assert ours.columns.keys() == theirs.columns.keys()
    for name in ours.columns:
        if name != "group":
            assert ours.numbers(name) == pytest.approx(theirs.numbers(name), nan_ok=True), name


def test_a_resumed_run_ends_with_the_same_table(finished, tmp_path):
    experiment = changed(sim={"checkpoint_every": 1})
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "run", on_round=stop_after_three)
    resume(tmp_path / "run")
    same = (tmp_path / "run" / "clients.csv").read_text() == (finished / "clients.csv").read_text()
    assert same


def stop_after_three(record):
    if record.round == 3:
        raise KeyboardInterrupt


def test_the_head_alone_is_trained_where_that_is_asked_for():
    experiment = changed(sim={"personalise": "steps(3, head=True)", "executor": "cohort"})
    home = build(experiment).home.home
    vector, buffers = home.trainer.net.initial()
    ((_, models, _),) = home.models(np.arange(9), vector, buffers)
    moved = {
        name: not torch.equal(part, home.trainer.net.layout.views(vector)[name])
        for name, part in home.trainer.net.layout.views(models[0]).items()
    }
    assert [name for name, new in moved.items() if new] == ["head.weight", "head.bias"]


def sites(classes=2):
    rng = np.random.default_rng(1)
    site = np.repeat(np.arange(3), [60, 30, 10])
    numbers = rng.normal(size=(100, 4)).astype(np.float32)
    labels = (numbers[:, 0] > 0).astype(np.int64)
    labels[site == 2] = 1  # one class alone: no AUROC there
    rows = Rows(numbers, labels, site)
    return Dataset("sites", "table", rows, rows, ("no", "yes"), ("north", "south", "west"))


def test_groups_and_undefined_scores(tmp_path):
    experiment = changed(
        partition={"how": "natural", "clients": 3, "unseen": 0.0, "hold_out_by": "classes"},
        sim={"participation": "fraction(rate=1.0)", "metrics": ["auroc"], "baselines": False},
    )
    run(experiment, tmp_path / "run", data=sites())
    table = ClientTable.read(tmp_path / "run" / "clients.csv")
    last = RunFolder(tmp_path / "run").read_rounds()[-1]
    assert table.texts("group") == ["north", "south", "west"]
    assert table.columns["classes"] == [2, 2, 1]
    area = table.numbers("auroc")
    assert np.isnan(area).tolist() == [False, False, True]
    assert last.metric("clients_auroc_undefined") == 1
    assert last.metric("clients_auroc_mean") == pytest.approx(area[:2].mean())
    accuracy = table.numbers("accuracy")
    assert last.metric("clients_accuracy_group_mean") == pytest.approx(accuracy.mean())


def test_lambdas_become_a_column(tmp_path):
    experiment = changed(
        method="fedlaw(epochs=1)",
        sim={"baselines": False, "personalise": ""},
    )
    experiment = replace(experiment, data=replace(experiment.data, proxy_per_class=2))
    run(experiment, tmp_path / "run")
    table = ClientTable.read(tmp_path / "run" / "clients.csv")
    records = RunFolder(tmp_path / "run").read_rounds()
    total = np.nansum(table.numbers("lambdas") * table.numbers("took_part"))
    assert total == pytest.approx(sum(sum(record.notes["lambdas"]) for record in records))


@pytest.mark.parametrize(
    ("method", "columns"),
    [("fedcda(warmup=1)", ["picked_age"]), ("fedwcm", ["client_scores", "shares"])],
)
def test_what_a_method_notes_of_single_clients_becomes_columns(tmp_path, method, columns):
    run(changed(method=method, sim={"baselines": False, "personalise": ""}), tmp_path / "run")
    table = ClientTable.read(tmp_path / "run" / "clients.csv")
    federation = build(changed(method=method))
    cohorts = [federation.cohort(r)[1].tolist() for r in range(4)]
    records = RunFolder(tmp_path / "run").read_rounds()
    for name in columns:
        for client in range(9):
            own = [
                record.notes[name][cohort.index(client)]
                for record, cohort in zip(records, cohorts, strict=True)
                if client in cohort
            ]
            expected = np.mean(own) if own else np.nan
            assert table.numbers(name)[client] == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"partition": {"hold_out": 0.0}}, r"sim\.evaluate_clients = 2 scores .*hold_out"),
        ({"sim": {"personalise": "epoch(1)"}}, r"sim\.personalise: .*epochs"),
        ({"sim": {"personalise": "epochs(0)"}}, r"sim\.personalise: .*count must be"),
        ({"sim": {"evaluate_clients": -1}}, r"sim\.evaluate_clients must be at least 0"),
    ],
)
def test_bad_settings_name_the_field(settings, message):
    with pytest.raises(ConfigError, match=message):
        changed(**settings)


def test_no_client_with_rows_to_hold_out_is_an_error(tmp_path):
    data = sites()
    few = Dataset("few", "table", data.train.take(slice(0, 3)), data.test, data.classes)
    experiment = changed(partition={"how": "iid", "clients": 3, "unseen": 0.0})
    with pytest.raises(ConfigError, match="no client has two rows"):
        build(experiment, data=few)


def test_columns_of_nobody_say_so():
    from fedbasin.core.record import Headline

    found = columns_of("clients_", Headline("auroc"), np.array([np.nan, 0.5]), np.array([3, 0]))
    assert found == {"clients_auroc_undefined": 1.0}
