"""The display of long work: how far, how good, how long still, with a terminal and without."""

import io

import pytest
from counting import Clock
from rich.console import Console
from rich.progress import TimeRemainingColumn

from fedbasin.api import progress as display
from fedbasin.core.record import RoundRecord
from fedbasin.experiment.comparison import Cell
from fedbasin.experiment.config import Experiment


class Ticks:
    """Stands for the end of the runs: before each look, some rounds are recorded."""

    def __init__(self, *steps):
        self.steps = list(steps)

    def wait(self, seconds):
        if not self.steps:
            return True
        self.steps.pop(0)()
        return False


@pytest.fixture
def watch(tmp_path):
    """Watch two runs of ten rounds; return the task that the bar shows."""
    layout = [Cell(Experiment(rounds=10, seed=seed), tmp_path / str(seed)) for seed in (0, 1)]
    clock = [0.0]

    def record(seconds, *rounds):
        clock[0] += seconds
        for cell, count in zip(layout, rounds, strict=True):
            cell.path.mkdir(exist_ok=True)
            lines = (RoundRecord(i + 1, {"accuracy": 0.5}).line() for i in range(count))
            (cell.path / "rounds.jsonl").write_text("".join(f"{line}\n" for line in lines))

    def watched(*looks):
        bar = display.bar(Console(file=io.StringIO()), TimeRemainingColumn())
        bar.get_time = lambda: clock[0]
        task = bar.add_task("starting", total=20, score="")
        steps = [lambda look=look: record(*look) for look in looks]
        display._watch(layout, bar, task, Ticks(*steps))
        return bar.tasks[task]

    return watched


def test_rounds_that_a_stopped_run_had_are_no_sign_of_speed(watch):
    shown = watch((1, 5, 5))
    assert shown.completed == 10 and shown.time_remaining is None
    shown = watch((1, 5, 5), (4, 6, 5), (4, 6, 6))
    assert shown.time_remaining == 8 / 2 * 8


def test_the_time_left_is_told_where_rounds_take_minutes(watch):
    assert watch((200, 1, 0), (200, 1, 1), (200, 2, 1)).time_remaining == 17 * 200


def test_a_log_is_told_now_and_then_how_far_the_runs_are(watch, monkeypatch, capsys):
    watch((1, 5, 5), (4, 6, 5))
    assert not capsys.readouterr().err
    monkeypatch.setattr(display, "_QUIET_SECONDS", -1)
    watch((1, 0, 0), (1, 5, 5), (4, 6, 5))
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.endswith("; starting") and "10 of 20 rounds" in second
    assert "11 of 20 rounds" in third and third.endswith("0:00:36 left; fedavg seed 0 50.0 %")


def test_rounds_without_an_end_are_told_too(capsys, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(display, "time", clock)
    bar = display.bar(Console(file=io.StringIO()))
    task = bar.add_task("round", total=None, completed=3, score="")
    told = clock.now
    assert display.tell_a_log(bar, task, told) == told
    clock.sleep(61)
    assert display.tell_a_log(bar, task, told) == clock.now
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("3 rounds in ") and line.endswith("; round")
    shown = display.bar(Console(file=io.StringIO(), force_terminal=True))
    assert display.tell_a_log(shown, shown.add_task("", score=""), told) == told
