import numpy as np
import pytest

from fedbasin.analyze.learning import curve_statistics, participation_equivalent, smooth
from fedbasin.core.record import RoundRecord


def records(accuracies):
    return [RoundRecord(round=i + 1, metrics={"accuracy": a}) for i, a in enumerate(accuracies)]


def test_smoothing_keeps_parabolas_and_calms_noise():
    rounds = np.arange(30.0)
    parabola = 0.5 + 0.1 * rounds - 0.002 * rounds**2
    np.testing.assert_allclose(smooth(parabola), parabola)
    jagged = parabola + 0.1 * (-1) ** rounds
    assert np.abs(smooth(jagged) - parabola).max() < 0.1
    assert np.abs(np.diff(smooth(jagged), 2)).mean() < 0.15 * np.abs(np.diff(jagged, 2)).mean()
    short = np.array([0.1, 0.9, 0.2])
    np.testing.assert_array_equal(smooth(short), short)


def test_a_known_curve_in_numbers():
    found = curve_statistics(records([0.2, 0.6, None, 0.5, 1.0]), target=0.55)
    assert found.rounds.tolist() == [1, 2, 4, 5]
    assert found.rounds_to_target == 2
    assert found.final == pytest.approx(0.575)
    assert found.roughness == pytest.approx((0.4 + 0.1 + 0.5) / 3)
    assert found.drop == pytest.approx(0.1)
    assert found.area == pytest.approx((0.4 * 1 + 0.55 * 2 + 0.75 * 1) / 4)
    rising = curve_statistics(records([0.1, 0.2]), target=0.9)
    assert rising.drop == 0 and rising.rounds_to_target is None
    single = curve_statistics(records([0.4, None]), target=0.5)
    assert (single.roughness, single.drop, single.area, single.final) == (None, None, None, 0.4)
    assert curve_statistics(records([None]), target=0.5).final is None


def test_participation_that_ends_as_high():
    clients, accuracy = [20, 5, 10], [0.8, 0.5, 0.7]
    assert participation_equivalent(clients, accuracy, 0.75) == pytest.approx(15)
    assert participation_equivalent(clients, accuracy, 0.7) == pytest.approx(10)
    assert participation_equivalent(clients, accuracy, 0.8) == pytest.approx(20)
    assert participation_equivalent(clients, accuracy, 0.3) == 5
    assert participation_equivalent(clients, accuracy, 0.81) is None
    assert participation_equivalent([5, 10, 20], [0.5, 0.4, 0.6], 0.55) == pytest.approx(17.5)
