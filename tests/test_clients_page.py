"""The tables of docs/methods/clients.md are those of the stored lines, and these of the runs."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "methods" / "clients.md").read_text(encoding="utf-8")
SPEC = importlib.util.spec_from_file_location("r", ROOT / "benchmarks" / "evidence" / "clients.py")
EVIDENCE = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(EVIDENCE)
RUN = [setting for setting in EVIDENCE.SETTINGS if EVIDENCE.read(setting)]


def test_heart_disease_and_persons_have_run():
    assert {"heart", "wisdm"} <= set(RUN)


@pytest.mark.parametrize("setting", RUN)
def test_the_page_has_the_tables_of_the_lines(setting):
    found = EVIDENCE.read(setting)
    assert EVIDENCE.methods_table(found) in PAGE
    assert EVIDENCE.ways_table(found["fedavg"]) in PAGE
    if setting in EVIDENCE.NAMES:
        assert EVIDENCE.clients_table(found["fedavg"], EVIDENCE.NAMES[setting]) in PAGE


@pytest.mark.parametrize("setting", RUN)
def test_every_method_has_five_seeds_and_scores_that_are_summed_up_right(setting):
    """Mean and 10th percentile of the clients' rounded scores, from the file alone."""
    path = ROOT / "benchmarks" / "evidence" / "results" / f"clients_{setting}.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    seeds = {}
    for line in lines:
        seeds.setdefault(line["method"], []).append(line["seed"])
        own = sorted(v for v in line["clients"]["accuracy"] if v is not None)
        assert line["mean"] == pytest.approx(np.mean(own), abs=1e-4)
        assert line["p10"] == pytest.approx(np.percentile(own, 10), abs=1e-4)
        if line["method"] == "fedavg":
            assert {"accuracy_home", "accuracy_alone", "accuracy_pooled"} < line["clients"].keys()
    assert seeds["fedavg"] == [0, 1, 2, 3, 4]
    assert all(each == seeds["fedavg"] for each in seeds.values())


def test_an_interval_is_that_of_scipy():
    values = [0.61, 0.72, 0.7, 0.66, 0.69]
    low, high = stats.t.interval(0.95, 4, np.mean(values), stats.sem(values))
    assert EVIDENCE.interval(values) == f"{50 * (low + high):.1f} ± {50 * (high - low):.1f}"
    assert EVIDENCE.over([-v for v in values]) == f"-67.6 ± {50 * (high - low):.1f}"


def test_the_value_of_training_alone_is_counted_by_client():
    base = EVIDENCE.read("heart")["fedavg"]
    won = [
        np.mean([a > f for a, f in zip(c["accuracy_alone"], c["accuracy"], strict=True)])
        for c in (line["clients"] for line in base.values())
    ]
    gaps = [
        np.mean(c["accuracy_alone"]) - np.mean(c["accuracy"])
        for c in (line["clients"] for line in base.values())
    ]
    (row,) = [x for x in EVIDENCE.ways_table(base).splitlines() if x.startswith("| alone")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert float(cells[5].split(" ±")[0]) == pytest.approx(100 * np.mean(won), abs=0.05)
    assert float(cells[3].split(" ±")[0]) == pytest.approx(100 * np.mean(gaps), abs=0.06)
