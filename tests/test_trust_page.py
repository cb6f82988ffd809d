"""docs/methods/trust.md against the lines of the runs it speaks of."""

import importlib.util
import json
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "methods" / "trust.md").read_text(encoding="utf-8")


def loaded():
    spec = importlib.util.spec_from_file_location(
        "trust_evidence", ROOT / "benchmarks" / "evidence" / "trust.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TRUST = loaded()


def accuracy(setting, method, attack="none", case=""):
    """The mean over the seeds, in percent."""
    found = [
        line["accuracy"]
        for line in TRUST.lines(setting)
        if (line["method"], line["attack"], line["case"]) == (method, attack, case)
    ]
    assert found, (setting, method, attack, case)
    return 100 * mean(found)


@pytest.mark.parametrize("setting", TRUST.SETTINGS)
def test_the_tables_on_the_page_are_those_of_the_lines(setting):
    assert "\n".join(["", *TRUST.table(setting), ""]) in PAGE


@pytest.mark.parametrize("setting", TRUST.SETTINGS)
def test_lines_are_those_of_the_script(setting):
    """Same settings as written there, each run once."""
    planned = {(c.method, c.attack, c.case, c.seed): c for c in TRUST.SETTINGS[setting]()}
    found = [TRUST.key(line) for line in TRUST.lines(setting)]
    assert len(found) == len(set(found)) and set(found) <= set(planned)
    for line in TRUST.lines(setting):
        assert line["expression"] == planned[TRUST.key(line)].experiment["method"]


def robust(method, attack, momentum):
    return accuracy("robust", method, attack, f"momentum {momentum}")


def test_momentum_lets_median_and_rfa_stand_ipm_and_not_krum():
    for rule in ("median", "rfa"):
        assert robust(rule, "ipm", 0) < 30 and robust(rule, "ipm", 0.9) > 60
    assert robust("krum", "ipm", 0) < 15 and robust("krum", "ipm", 0.9) < 15
    assert robust("krum", "none", 0.9) < robust("mean", "none", 0.9) - 4


def test_the_attacked_mean_is_the_line_to_beat():
    for momentum in (0, 0.9):
        assert robust("mean", "ipm", momentum) > robust("mean", "none", momentum) - 5
        assert robust("mean", "sign_flip", momentum) > robust("mean", "none", momentum) - 5
        for rule in ("median", "krum", "rfa"):
            assert robust("mean", "ipm", momentum) > robust(rule, "ipm", momentum) + 3
        for attack in TRUST.ATTACKS:
            same = robust("mean", attack, momentum) - robust("centered_clipping", attack, momentum)
            assert abs(same) < 0.15
        for rule in ("mean", "median", "rfa"):
            assert robust(rule, "alie", momentum) > robust(rule, "none", momentum) - 2


def test_alie_costs_little_at_the_papers_z_and_a_point_or_two_at_more():
    def cost(case, method, attack):
        return accuracy("alie", method, "none", case) - accuracy("alie", method, attack, case)

    sorted_labels, iid = "MNIST, sorted labels, momentum 0.9", "Fashion-MNIST, IID, momentum 0"
    for method in ("mean", "median", "krum", "rfa", "centered_clipping"):
        assert cost(sorted_labels, method, "alie") < 0.5
    for method in ("median", "krum"):
        assert cost(sorted_labels, method, "alie") < -25
    for method in ("mean", "median", "rfa"):
        assert cost(iid, method, "alie") < 0.7
        assert 0.8 < cost(iid, method, "alie(z=1.5)") < 2.2


def test_ways_to_merge_fall_alone_and_stand_over_a_rule():
    flip = "sign_flip(scale=5.0)"
    for method in ("fedavg", "ima", "wima", "fedcda", "scaffold"):
        assert accuracy("methods", method) > 60 and accuracy("methods", method, flip) < 15
    alone = [
        one["accuracy"] for one in TRUST.lines("methods") if TRUST.key(one)[:2] == ("fedlaw", flip)
    ]
    assert max(alone) > 0.3 and min(alone) < 0.15
    for method in ("norm_bound(fedlaw)", "norm_bound(scaffold)", "fedcda(merge=median)", "median"):
        assert accuracy("methods", method, flip) > 25
    lost = {
        method: accuracy("methods", method) - accuracy("methods", method, flip)
        for method in TRUST.METHODS
    }
    assert min(lost, key=lost.get) == "norm_bound(fedlaw)"
    assert 7 < accuracy("methods", "fedavg") - accuracy("methods", "median") < 13
    for method in ("fedlaw", "scaffold"):
        price = accuracy("methods", method) - accuracy("methods", f"norm_bound({method})")
        assert -0.5 < price < 1.5


def test_more_noise_costs_more_and_averages_around_it_nothing():
    by_noise = [accuracy("tff", "dp(fedavgm)", case=f"z {z}") for z in ("0", "0.5", "0.75", "1")]
    assert by_noise == sorted(by_noise, reverse=True) and by_noise[0] - by_noise[3] > 2
    assert accuracy("tff", "wima(dp(fedavgm))", case="z 1") > by_noise[3] + 0.3
    assert abs(accuracy("tff", "ima(dp(fedavgm))", case="z 1") - by_noise[3]) < 0.3
    spent = {line["case"]: line.get("epsilon") for line in TRUST.lines("tff")}
    assert spent["z 0.5"] > spent["z 0.75"] > spent["z 1"]


def test_noise_costs_little_and_helps_the_median():
    for method in ("fedavg", "ima", "wima", "fedlaw", "fedcda", "scaffold"):
        cost = accuracy("noise", method, case="z 0") - accuracy("noise", method, case="z 0.2")
        assert -0.3 < cost < 1.0
    gain = accuracy("noise", "median", case="z 0.2") - accuracy("noise", "median", case="z 0")
    assert gain > 5


def test_non_iid_rows_alone_look_like_an_attack_and_buckets_help():
    def one(method, size):
        return accuracy("bucketing", method, case=f"buckets of {size}")

    for rule in ("median", "krum"):
        assert one(rule, 1) < one("mean", 1) - 40
        assert one(rule, 1) + 3 < one(rule, 2) < one("mean", 1) - 20
    for rule in ("mean", "rfa"):
        assert one(rule, 2) < one(rule, 1)


def test_what_secure_aggregation_costs_is_what_was_measured():
    """docs/secure_aggregation.md against the output of its benchmark."""
    page = (ROOT / "docs" / "secure_aggregation.md").read_text(encoding="utf-8")
    measured = (ROOT / "benchmarks" / "deploy" / "results" / "secure.json").read_text()
    secure, plain = map(json.loads, measured.splitlines())
    assert (secure["clients"], secure["lost"], secure["parameters"]) == (20, 3, 11_173_962)
    for ends in (
        f"| {secure['client_seconds']:.2f} | {plain['client_seconds']:.2f} |",
        f"| {secure['server_seconds']:.2f} | {plain['server_seconds']:.2f} |",
        f"| {secure['opening_seconds']:.2f} | - |",
        f"| {secure['up_bytes_a_client'] / 1e6} MB | {plain['up_bytes_a_client'] / 1e6} MB |",
        f"| {secure['down_bytes_a_client_without_model'] / 1e3:.1f} kB | - |",
        f"| {secure['server_models']:.1f} | {plain['server_models']:.1f} |",
        f"| {secure['error_rms']:.1e} | - |",
    ):
        assert f"{ends}\n" in page, ends
