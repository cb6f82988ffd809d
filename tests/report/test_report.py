import pytest

from fedbasin.core.record import RecordError, RoundRecord, RunFolder
from fedbasin.report.curves import draw_curves
from fedbasin.report.table import Curve, cells, read_curves, summarise


def curve(method, seed, accuracies, status="finished"):
    records = tuple(RoundRecord(round=n, accuracy=a) for n, a in enumerate(accuracies, start=1))
    return Curve(method, seed, records, seconds=seed + 1.0, status=status)


CURVES = [
    curve("fedavg", 0, [0.1] * 5 + [0.5] * 10),
    curve("fedavg", 1, [0.1] * 5 + [0.7] * 10),
    curve("ima", 0, [0.9] * 15),
    curve("ima", 1, [0.2, None, 0.4], status="diverged"),
    curve("never", 0, [None, None]),
]


def test_rows_are_means_over_seeds_of_the_last_rounds():
    fedavg, ima, never = summarise(CURVES, target=0.6)
    assert fedavg.accuracy == pytest.approx(0.6) and fedavg.spread == pytest.approx(
        0.1414, abs=1e-4
    )
    assert (
        fedavg.rounds == 6 and fedavg.reached == 1 and fedavg.seconds == 1.5 and fedavg.seeds == 2
    )
    assert ima.accuracy == pytest.approx((0.9 + 0.3) / 2) and ima.diverged == 1 and ima.rounds == 1
    assert never.accuracy is None and never.rounds is None


def test_rows_are_written_for_people():
    fedavg, ima, never = (cells(row) for row in summarise(CURVES, target=0.6))
    assert fedavg == ("fedavg", "60.00 ± 14.14", "6 (1 of 2 seeds)", "1.5", "2")
    assert ima[1] == "60.00 ± 42.43 (1 diverged)"
    assert never == ("never", "-", "not reached", "1.0", "1")


def test_folders_are_read_and_an_unfinished_one_is_named(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append(RoundRecord(round=1, accuracy=0.5))
    with pytest.raises(RecordError, match="fedbasin resume"):
        read_curves([tmp_path])
    folder.write_summary({"method": "wima", "seed": 3, "seconds": 2.0})
    (found,) = read_curves([tmp_path])
    assert (found.method, found.seed, found.seconds, found.records[0].accuracy) == (
        "wima",
        3,
        2.0,
        0.5,
    )


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_figures_are_drawn_whatever_broke_off(tmp_path, ending):
    path = draw_curves(CURVES, tmp_path / "deep" / f"figure.{ending}", title="a < b & [c]")
    assert path.stat().st_size > 5000
    if ending == "svg":
        assert "a &lt; b &amp; [c]" in path.read_text() or "<path" in path.read_text()
