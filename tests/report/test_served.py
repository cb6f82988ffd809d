"""Who is served: tables, counts with intervals, the page and the comparison's lines."""

import numpy as np
import pytest
from report.chromium import Browser, needs_chromium
from report.making import HOSTILE, make_run

from fedbasin.core.record import RecordError, RunFolder
from fedbasin.core.served import ClientTable
from fedbasin.report.page import render, write_page
from fedbasin.report.paired import client_gains
from fedbasin.report.runs import find_runs, read_runs
from fedbasin.report.served import served_data, served_lines, served_text

GROUPS = ("north", HOSTILE, "west")


def add_clients(path, shift=0.0, count=30, baselines=False):
    """Give a run a table of clients whose scores are 0.3 to 0.9, moved by `shift`."""
    scores = np.clip(np.linspace(0.3, 0.9, count) + shift, 0, 1)
    columns = {
        "client": list(range(count)),
        "group": [GROUPS[i % 3] for i in range(count)],
        "seen": [i != 1 for i in range(count)],
        "rows": [10 + i for i in range(count)],
        "held_out": [3] * count,
        "took_part": [i % 4 for i in range(count)],
        "accuracy": [None if i == 2 else float(s) for i, s in enumerate(scores)],
        "accuracy_home": [float(s) for s in np.clip(scores + 0.05, 0, 1)],
    }
    if baselines:
        columns["accuracy_alone"] = [0.5] * count
        columns["accuracy_pooled"] = [0.95] * count
    RunFolder(path).client_table.write_text(ClientTable(columns).to_csv(), encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("served")
    for method, shift in (("fedavg", 0.0), ("ima", 0.02), ("wima(window=5)", -0.01)):
        for seed in (0, 1):
            path = out / method[:4] / str(seed)
            make_run(path, method, seed)
            add_clients(path, shift, baselines=method == "fedavg")
    write_page(read_runs(find_runs([out])), out / "report.html")
    return out


def test_a_table_is_read_as_it_was_written(tmp_path):
    make_run(tmp_path / "run")
    add_clients(tmp_path / "run", baselines=True)
    table = ClientTable.read(tmp_path / "run" / "clients.csv")
    assert table.texts("group")[:2] == ["north", HOSTILE]
    assert table.columns["seen"][:2] == [True, False]
    assert table.columns["accuracy"][2] is None and table.columns["rows"][0] == 10
    assert table.columns["accuracy"][0] == 0.3


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "client,rows\n1\n", "client,rows\n1,x\n"])
def test_what_is_no_table_is_named(tmp_path, text):
    path = tmp_path / "clients.csv"
    path.write_text(text)
    with pytest.raises(RecordError, match=r"clients\.csv is no table of clients"):
        ClientTable.read(path)


def test_lines_are_means_over_seeds_of_the_clients_that_take_part(folder):
    first, ima, wima = served_lines(read_runs(find_runs([folder])), "fedavg")
    seen = np.delete(np.linspace(0.3, 0.9, 30), [1, 2])
    assert first.mean == pytest.approx(seen.mean())
    assert first.decile == pytest.approx(np.quantile(seen, 0.1))
    assert first.gains is None and first.ways.keys() == {"home", "alone", "pooled"}
    assert (ima.gains.gain, ima.gains.lose, ima.gains.clients) == (56, 0, 56)
    assert (wima.gains.gain, wima.gains.lose) == (0, 56)
    assert ima.worse_alone == pytest.approx((seen + 0.02 < 0.5).mean())


def test_the_interval_draws_whole_seeds():
    """Against a plain bootstrap over seeds, written as a loop."""
    rng = np.random.default_rng(4)
    theirs = {seed: rng.random(20) for seed in range(5)}
    ours = {seed: values + rng.normal(0.02, 0.1, 20) for seed, values in theirs.items()}
    found = client_gains(ours, theirs, draws=4000)
    signs = [np.sign(ours[s] - theirs[s]) for s in range(5)]
    other = np.random.default_rng(9)
    means = [
        np.concatenate([signs[s] for s in other.integers(0, 5, 5)]).mean() for _ in range(4000)
    ]
    low, high = np.quantile(means, (0.025, 0.975))
    assert found.balance == pytest.approx(np.concatenate(signs).mean())
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.03)
    flipped = client_gains(ours, theirs, higher_is_better=False)
    assert (flipped.gain, flipped.lose) == (found.lose, found.gain)
    assert flipped.mean == pytest.approx(found.mean)


def test_one_seed_has_no_interval_and_other_clients_no_pairs():
    one = client_gains({0: np.array([0.5, np.nan])}, {0: np.array([0.4, 0.3])})
    assert (one.clients, one.gain, one.low) == (1, 1, None)
    assert client_gains({0: np.zeros(2)}, {0: np.zeros(3)}) is None
    assert client_gains({0: np.zeros(2)}, {1: np.zeros(2)}) is None


def test_a_comparison_says_mean_and_worst_decile(folder):
    said = served_text(read_runs(find_runs([folder])))
    assert "fedavg: mean 61.92 %, worst decile 39.72 %" in said
    assert "against fedavg 56 of 56 clients gain, 0 lose (gain - lose +100 %" in said


def test_runs_without_clients_have_no_section(tmp_path):
    make_run(tmp_path / "run")
    runs = read_runs([tmp_path / "run"])
    assert served_data(runs, "fedavg") is None and served_text(runs) == ""
    assert 'id="served"' not in render(runs, target=None, baseline="fedavg")


@needs_chromium
def test_the_page_shows_who_is_served(folder):
    browser = Browser()
    try:
        page = browser.page()
        page.look()
        page.open(folder / "report.html")
        dots = "document.querySelectorAll('#served-chart [aria-label=dot] circle').length"
        assert page.evaluate(dots) == 3 * 29
        caption = "document.getElementById('paired-caption').textContent"
        assert "Seed 0: 29 of 29 clients gain, 0 lose" in page.evaluate(caption)
        assert page.evaluate("document.querySelectorAll('#served-clients tbody tr').length") == 30
        page.evaluate(
            "(() => { const e = document.getElementById('served-search'); e.value = 'west';"
            " e.dispatchEvent(new Event('input')); })()"
        )
        assert page.evaluate("document.querySelectorAll('#served-clients tbody tr').length") == 10
        assert page.complaints == []
    finally:
        browser.close()
