"""Apps with tables of the sites' own, and `fedbasin flower check`, which a site runs before."""

from __future__ import annotations

import json
import socket
import ssl
import sys
import threading

import numpy as np
import pandas
import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")

from deploy.grids import LocalGrid
from flwr.app import Context, RecordDict

from fedbasin.cli.app import app as command
from fedbasin.core.record import RunFolder
from fedbasin.deploy.app import read_app
from fedbasin.deploy.certificates import make_certificates, make_node_key
from fedbasin.deploy.check import check_client, check_connection, check_key, compare_facts

SITES = {"north": 60, "south": 80}


def invoke(*words):
    result = CliRunner().invoke(command, ["flower", *map(str, words)], env={"COLUMNS": "300"})
    return result.exit_code, " ".join(result.output.split()), result.exception


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Tables of a sample and two sites, and an app made for them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    for seed, (name, rows) in enumerate({"sample": 100, **SITES}.items()):
        rng = np.random.default_rng(seed)
        frame = pandas.DataFrame(
            {"age": rng.normal(60, 10, rows), "pulse": rng.normal(70, 9, rows)}
        )
        frame["died"] = np.where(frame["age"] + rng.normal(0, 5, rows) > 60, "yes", "no")
        frame.to_csv(f"{name}.csv", index=False)
    code, output, error = invoke(
        "new", "site_app", "--data", "sample.csv", "--target", "died", "--set", "task=binary",
        "--set", "rounds=2", "--set", "local.lr=0.02", "--seed", 5,
    )  # fmt: skip
    assert code == 0, error
    assert "site_app/encoding.json" in output
    yield tmp_path
    for name in [n for n in sys.modules if n.startswith("site_app")]:
        del sys.modules[name]


def config_of(site, number):
    return f"partition-id={number} num-partitions=2 data='{site}'"


def test_sites_train_on_their_own_tables_and_the_server_scores_on_the_sample(folder):
    settings = read_app(folder / "site_app")
    assert settings["task"] == "binary" and settings["seed"] == 5 and settings["rounds"] == 2
    assert settings["local.lr"] == 0.02 and settings["local.batch"] == 16
    settings |= {"federation.folder": str(folder / "run"), "partition.clients": 2}
    sys.path.insert(0, str(folder / "site_app"))
    from site_app import client_app, server_app

    grid = LocalGrid(client_app.app, 2)
    for context in grid.contexts.values():
        context.run_config = settings
        name = list(SITES)[context.node_config["partition-id"]]
        context.node_config["data"] = str(folder / f"{name}.csv")
    server_app.main(grid, Context(1, 1, {}, RecordDict(), settings))
    run = RunFolder(folder / "run")
    records = run.read_rounds()
    assert len(records) == 2 and records[-1].metric("auroc") > 0.5
    setups = [client_app.setup(context) for context in grid.contexts.values()]
    held = {setup.client: setup.examples + len(setup.held_out.labels) for setup in setups}
    assert held == {0: 60, 1: 80}


def test_a_bad_setting_is_told_before_anything_is_written(folder):
    for words, told in (
        (["--set", "local.lrr=1"], "did you mean"),
        (["--set", "table.target=['a','b']"], "settings are text, numbers, true or false"),
        (["--data", "sample.csv"], "belong together"),
        (["--data", "sample.csv", "--target", "dyed"], "did you mean died"),
    ):
        code, _, error = invoke("new", "other", *words)
        assert code == 1 and told in str(error), error
        assert not (folder / "other").exists()


def test_up_tells_a_mistake_before_any_process_starts(folder):
    for words, told in (
        (["--data", "north.csv"], "flower new my_app --data"),
        (["site_app", "--data", "nowhere.csv"], "there is no nowhere.csv"),
        (["site_app", "--data", "north.csv", "--nodes", "2"], "give each node one"),
        (["site_app", "--data", "north.csv", "--simulate"], "no files of their own"),
        (["site_app", "--set", "local.lrr=1"], "did you mean local.lr"),
        (["site_app", "--set", "local.lr=[1]"], "settings are text"),
    ):
        code, _, error = invoke("up", *words, "--out", "out")
        assert code == 1 and told in str(error), (words, error)
        assert not (folder / "out").exists()


def test_a_site_that_fits_is_told_so(folder):
    code, _, error = invoke("check", "site_app", "--write", "facts.json")
    assert code == 0, error
    make_node_key(folder / "node")
    code, output, error = invoke(
        "check", "site_app", "--facts", "facts.json", "--key", "node",
        "--node-config", config_of("south.csv", 1),
    )  # fmt: skip
    assert code == 0, (output, error)
    assert "data fits: client 1 of 2: 65 rows, 15 held out" in output
    assert "takes rows of shape [2]; method ima" in output
    assert "DOES NOT FIT" not in output and "register node.pub" in output


def test_what_does_not_fit_is_named(folder):
    invoke("check", "site_app", "--write", "facts.json")
    facts = json.loads((folder / "facts.json").read_text())
    (folder / "facts.json").write_text(json.dumps(facts | {"torch": "1.0"}))
    code, output, _ = invoke("check", "site_app", "--facts", "facts.json")
    assert code == 1 and "1.0 on the server: install the same" in output
    assert output.count("DOES NOT FIT") == 1
    task = folder / "site_app" / "site_app" / "task.py"
    task.write_text(task.read_text() + "# changed\n")
    code, output, _ = invoke("check", "site_app", "--facts", "facts.json")
    assert "copy the app again" in output
    for bad in ("[]", "{", '{"torch": 1}', " " * 200_000):
        (folder / "facts.json").write_text(bad)
        code, _, error = invoke("check", "site_app", "--facts", "facts.json")
        assert code == 1 and "facts.json" in str(error)


def test_data_that_the_run_would_refuse_is_refused_now(folder):
    app = folder / "site_app"
    table = pandas.read_csv("north.csv")
    table.rename(columns={"pulse": "puls"}).to_csv("other.csv", index=False)
    table.assign(died="maybe").to_csv("classes.csv", index=False)
    for config, told in (
        (config_of("other.csv", 0), "pulse"),
        (config_of("classes.csv", 0), "maybe"),
        (config_of("nowhere.csv", 0), "nowhere.csv"),
        ("partition-id=2 num-partitions=2 data='north.csv'", "partition-id 2 is not below"),
        ("partition-id=0 num-partitions=2", "the node does not say where its table is"),
        ("partition-id=", ""),
    ):
        (finding,) = check_client(app, config)
        assert not finding.fits and told in finding.told, finding


def test_a_key_that_others_read_or_that_is_another_is_refused(tmp_path):
    make_node_key(tmp_path / "a")
    make_node_key(tmp_path / "b")
    assert [f.fits for f in check_key(tmp_path / "a")] == [True]
    (tmp_path / "a.pub").write_bytes((tmp_path / "b.pub").read_bytes())
    assert "does not belong" in next(check_key(tmp_path / "a")).told
    (tmp_path / "b").chmod(0o644)
    assert "chmod 600" in next(check_key(tmp_path / "b")).told
    assert not next(check_key(tmp_path / "c")).fits
    (tmp_path / "c").write_text("no key")
    assert not next(check_key(tmp_path / "c")).fits


def test_the_server_s_certificate_must_fit(tmp_path):
    ours = make_certificates(tmp_path / "ours", ["127.0.0.1"])
    other = make_certificates(tmp_path / "other", ["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ours.server, ours.key)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        place = f"127.0.0.1:{listening.getsockname()[1]}"

        def serve():
            for _ in range(2):
                plain, _ = listening.accept()
                try:
                    context.wrap_socket(plain, server_side=True).close()
                except OSError:
                    plain.close()

        thread = threading.Thread(target=serve)
        thread.start()
        fitting = list(check_connection(place, ours.authority))
        refused = list(check_connection(place, other.authority))
        thread.join(10)
    assert [f.fits for f in fitting] == [True, True]
    assert [f.fits for f in refused] == [True, False] and "verify failed" in refused[1].told
    assert not next(check_connection(place, None)).fits  # nobody listens any more
    assert "is no HOST:PORT" in next(check_connection("nowhere", None)).told


def test_facts_that_the_server_lacks_do_not_fit():
    found = list(compare_facts({"torch": "2", "flwr": "1"}, {"torch": "2"}))
    assert [f.fits for f in found] == [True, False]
