"""One way to write seeds, for every command."""

import logging

import pytest
from typer.testing import CliRunner

from fedbasin.cli import app
from fedbasin.cli.seeds import read_seeds


def test_seeds_are_numbers_and_ranges(caplog):
    assert read_seeds("3, 0..2,7..7") == [3, 0, 1, 2, 7]
    assert not caplog.records


def test_the_former_range_is_read_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert read_seeds("3,0-2") == [3, 0, 1, 2]
    (record,) = caplog.records
    assert "--seeds 0-2 is the former way" in record.getMessage()
    assert record.getMessage().endswith("write 0..2")


@pytest.mark.parametrize("wrong", ["a", "", "1,", "-1", "1-", "1..", "0-1-2", "0..1..2", "1.5"])
def test_what_is_no_seed_is_refused(wrong):
    with pytest.raises(ValueError, match=r"numbers with commas, as in 0,1,2, or a range, as in 0"):
        read_seeds(wrong)


@pytest.mark.parametrize("wrong", ["3..1", "0,3-1"])
def test_a_range_that_is_written_backwards_is_refused(wrong):
    with pytest.raises(ValueError, match=r"names no seed; write the smaller one first"):
        read_seeds(wrong)


@pytest.mark.parametrize(
    "command",
    [
        ["compare", "fedavg", "--preset", "demo"],
        ["demo"],
        ["paper", "run", "ima/table1", "--rows", "fedavg"],
    ],
    ids=lambda words: words[0],
)
def test_every_command_reads_both(command):
    result = CliRunner().invoke(app, [*command, "--seeds", "0..x"])
    assert "as in 0..9" in str(result.exception)
    result = CliRunner().invoke(app, [*command, "--seeds", "0,2..1"])
    assert "2..1 names no seed" in str(result.exception)
