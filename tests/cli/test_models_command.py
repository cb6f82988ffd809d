"""`fedbasin models` lists every network, as `fedbasin methods` lists methods."""

import json

import pytest
from typer.testing import CliRunner

from fedbasin.cli.app import app
from fedbasin.cli.networks import _size
from fedbasin.core.catalogue import CATALOGUE, cards


def invoke(*arguments):
    return CliRunner().invoke(app, ["models", *arguments], env={"COLUMNS": "250"})


def test_every_network_is_listed():
    listing = " ".join(invoke().output.split())
    for card in cards("model"):
        assert card.name in listing and card.summary.split()[0] in listing
    listed = json.loads(invoke("--json").output)
    assert [one["name"] for one in listed] == [card.name for card in cards("model")]
    (resnet,) = [one for one in listed if one["name"] == "resnet18"]
    assert resnet["arguments"]["projector"] == "0" and "He et al." in resnet["paper"]


def test_one_network_is_shown_with_its_arguments_and_its_size():
    page = invoke("mlp", "--data", "digits").output
    assert "widths = (200, 200)" in page and "--set model=mlp" in page
    assert f"{64 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10:,} for digits" in page


def test_a_network_that_cannot_take_the_rows_says_why():
    (lstm,) = json.loads(invoke("shakespeare_lstm", "--data", "digits", "--json").output)
    assert lstm["parameters"].startswith("cannot: ")
    (own,) = json.loads(invoke("custom", "--data", "digits", "--json").output)
    assert own["parameters"] == "depends on its arguments"


@pytest.mark.parametrize("name", ["logistic", "fmnist_cnn", "lenet", "fedcda_cnn"])
def test_sizes_are_those_of_the_page(name):
    page = {  # docs/models.md, counted by hand in tests/models/test_counts.py
        "logistic": "7,850", "fmnist_cnn": "274,026", "lenet": "28,938", "fedcda_cnn": "1,663,370"
    }  # fmt: skip
    assert _size(CATALOGUE[name], (1, 28, 28), 10) == page[name]


def test_an_unknown_network_names_the_nearest():
    shown = invoke("resnet19")
    assert shown.exit_code != 0 and "resnet18" in str(shown.exception or shown.output)
