import json

import pandas
import pytest

from fedbasin.core.record import (
    Headline,
    RecordError,
    RoundRecord,
    RunFolder,
    mean_of_last,
    rounds_to_target,
    scores_of,
    write_atomically,
)


def record(number, accuracy=0.5, **more):
    return RoundRecord(round=number, metrics={"accuracy": accuracy}, **more)


def test_lines_come_back_and_pandas_opens_them(tmp_path):
    folder = RunFolder(tmp_path)
    written = [
        record(1, notes={"gamma": 0.9, "shares": [0.5, 0.5]}),
        RoundRecord(2, {"accuracy": None, "loss": float("nan")}),
    ]
    for line in written:
        folder.append(line)
    first, second = folder.read_rounds()
    assert (
        first == written[0] and second.metric("loss") is None and second.metric("accuracy") is None
    )
    table = pandas.read_json(folder.rounds, lines=True)
    assert table["round"].tolist() == [1, 2] and table["note_gamma"][0] == 0.9
    assert all(json.loads(line) for line in folder.rounds.read_text().splitlines())


def test_a_line_cut_short_is_left_out_and_resuming_drops_later_rounds(tmp_path):
    folder = RunFolder(tmp_path)
    for number in (1, 2, 3):
        folder.append(record(number))
    with folder.rounds.open("a") as file:
        file.write('{"round": 4, "acc')
    assert [r.round for r in folder.read_rounds()] == [1, 2, 3]
    assert [r.round for r in folder.keep_rounds(2)] == [1, 2]
    folder.append(record(3))
    assert [r.round for r in folder.read_rounds()] == [1, 2, 3]


def test_missing_or_broken_lines_are_named(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.keep_rounds(0) == []
    folder.append(record(2))
    with pytest.raises(RecordError, match="rounds 1 to 2"):
        folder.keep_rounds(2)
    folder.rounds.write_text('{"round": 1}\n[]\n')
    with pytest.raises(RecordError, match="line 2"):
        folder.read_rounds()


def test_a_line_whose_number_is_text_is_named(tmp_path):
    folder = RunFolder(tmp_path)
    folder.rounds.write_text('{"round": 1}\n{"round": 2, "seconds": "<b>"}\n')
    with pytest.raises(RecordError, match=r"line 2: seconds is '<b>', which is no number"):
        folder.read_rounds()


def test_summaries_are_json_without_nan(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(RecordError, match="fedbasin resume"):
        folder.read_summary()
    folder.write_summary({"a": float("inf"), "b": [float("nan"), 1.5]})
    assert folder.read_summary() == {"a": None, "b": [None, 1.5]}
    folder.summary.write_text("{")
    with pytest.raises(RecordError, match="not JSON"):
        folder.read_summary()


def test_headline_numbers_use_the_last_rounds_never_the_best():
    records = [record(n, accuracy=n / 20) for n in range(1, 16)]
    assert mean_of_last(records) == pytest.approx(sum(range(6, 16)) / 10 / 20)
    sparse = [record(n, accuracy=0.9 if n == 1 else None if n % 2 else 0.3) for n in range(1, 16)]
    assert mean_of_last(sparse) == pytest.approx(0.3)
    assert mean_of_last([record(1, None)]) is None
    assert rounds_to_target(records, 0.5) == 10 and rounds_to_target(records, 0.9) is None


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "f"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "old"


def test_numbers_are_the_single_numbers_of_the_line():
    record = RoundRecord(
        round=3,
        lr=0.5,
        train_loss=float("nan"),
        replies=7,
        notes={"gamma": 0.25, "weights": [1.0]},
    )
    numbers = record.numbers()
    assert numbers["lr"] == 0.5 and numbers["replies"] == 7 and numbers["note_gamma"] == 0.25
    assert not {"round", "train_loss", "note_weights"} & set(numbers)
    flat = json.loads(record.line())
    assert all(flat[name] == value for name, value in numbers.items())


def test_a_summary_has_the_last_value_that_was_measured_of_each_metric():
    rmse = Headline("rmse", False, "")
    records = [
        RoundRecord(1, {"rmse": 2.0, "r2": 0.1, "loss": 4.0}),
        RoundRecord(2, {"rmse": 1.0, "r2": None, "loss": 1.0}),
        RoundRecord(3, {"rmse": None, "r2": None, "loss": None}),
    ]
    said = scores_of(records, rmse)
    assert (said["headline"], said["headline_unit"], said["higher_is_better"]) == (
        "rmse",
        "",
        False,
    )
    assert (said["rmse_last"], said["r2_last"], said["loss_last"]) == (1.0, 0.1, 1.0)
    assert said["rmse_mean_last10"] == 1.5
