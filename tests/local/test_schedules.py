import math

import pytest

import fedbasin.local
import fedbasin.methods
import fedbasin.partition  # noqa: F401
from fedbasin.core.expressions import parse
from fedbasin.core.method import Plan

BASE = Plan(0.1, 5)


def lrs(source, rounds=40, plan=BASE):
    choice = parse(source, "schedule")
    return [choice(plan, t, rounds).lr for t in range(rounds)]


def test_closed_forms():
    assert lrs("constant") == [0.1] * 40
    assert lrs("exponential(decay=0.9)") == pytest.approx([0.1 * 0.9**t for t in range(40)])
    assert lrs("stepwise(every=3, factor=0.5)")[:7] == pytest.approx(
        [0.1] * 3 + [0.05] * 3 + [0.025]
    )
    cosine = lrs("cosine(floor=0.2)")
    assert cosine[0] == pytest.approx(0.1) and cosine[-1] == pytest.approx(0.02)
    assert cosine[13] == pytest.approx(0.02 + 0.08 * 0.5 * (1 + math.cos(math.pi * 13 / 39)))
    assert lrs("cosine", rounds=1) == [0.1]


def test_cyclic_falls_to_its_ratio_at_the_end_of_every_cycle():
    found = lrs("cyclic(period=4, ratio=0.01)")
    assert found[:4] == pytest.approx([0.1 * (1 - s + 0.01 * s) for s in (0.25, 0.5, 0.75, 1)])
    assert found[3] == pytest.approx(0.001) and found[4:8] == found[:4]
    assert lrs("cyclic(period=1)") == [0.1] * 40


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("exponential", "decay=0.99"),
        ("stepwise", "every=20, factor=0.5"),
        ("cosine", "floor=0.0"),
        ("cyclic", "period=20, ratio=0.01"),
        ("epoch_decay", "every=20, least=1"),
        ("warmup", "rounds=10, then=constant"),
    ],
)
def test_what_is_left_out_is_as_documented(name, default):
    left_out, written = parse(name, "schedule"), parse(f"{name}({default})", "schedule")
    for round in range(120):
        assert left_out(BASE, round, 120) == written(BASE, round, 120)


def test_epoch_decay_drops_epochs_not_the_learning_rate():
    choice = parse("epoch_decay(every=10, least=2)", "schedule")
    assert [choice(BASE, t, 60).epochs for t in (0, 9, 10, 25, 30, 59)] == [5, 5, 4, 3, 2, 2]
    assert choice(BASE, 59, 60).lr == 0.1
    with pytest.raises(ValueError, match="epochs"):
        choice(Plan(0.1, None, 5), 0, 10)
    assert parse("epoch_decay(least=9)", "schedule")(BASE, 0, 10).epochs == 5


@pytest.mark.parametrize(
    "source",
    [
        "exponential(decay=0)",
        "stepwise(every=0)",
        "stepwise(factor=-1)",
        "cosine(floor=2)",
        "cyclic(period=0)",
        "epoch_decay(every=0)",
        "epoch_decay(least=0)",
    ],
)
def test_bad_values_are_named(source):
    with pytest.raises(ValueError, match="must be"):
        parse(source, "schedule")(BASE, 0, 10)


def test_warmup_rises_to_the_rate_and_then_follows_the_other_schedule_from_its_start():
    assert lrs("warmup(rounds=4)")[:6] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])
    found = lrs("warmup(rounds=10, then=cosine(floor=0.2))")
    assert found[:10] == pytest.approx([0.01 * (t + 1) for t in range(10)])
    assert found[10:] == lrs("cosine(floor=0.2)", rounds=30)
    assert found[10] == pytest.approx(0.1) and found[-1] == pytest.approx(0.02)
    halved = lrs("warmup(rounds=2, then=stepwise(every=3, factor=0.5))")[:9]
    assert halved == pytest.approx([0.05, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.025])
    assert lrs("warmup(rounds=1, then=cosine)")[1:] == lrs("cosine", rounds=39)
    assert lrs("warmup(rounds=50)") == pytest.approx([0.002 * (t + 1) for t in range(40)])


def test_warmup_begins_at_the_other_schedules_plan():
    """Its first rate, and its epochs: nothing jumps where the warm-up ends."""
    cyclic = lrs("cyclic(period=4)")[0]
    rising = lrs("warmup(rounds=3, then=cyclic(period=4))")
    assert rising[:3] == pytest.approx([cyclic / 3, 2 * cyclic / 3, cyclic])
    assert rising[3] == pytest.approx(cyclic)
    choice = parse("warmup(rounds=10, then=epoch_decay(every=5))", "schedule")
    assert [choice(BASE, t, 60).epochs for t in (0, 9, 14, 15, 60)] == [5, 5, 5, 4, 1]
    with pytest.raises(ValueError, match="epochs"):
        choice(Plan(0.1, None, 5), 0, 10)


def test_schedules_nest_and_read_back():
    source = "warmup(rounds=3, then=warmup(rounds=2, then=exponential(decay=0.9)))"
    choice = parse(source, "schedule")
    assert str(choice) == source and parse(str(choice), "schedule") == choice
    assert lrs(source)[2:7] == pytest.approx([0.05, 0.05, 0.1, 0.1, 0.09])
    assert str(parse("warmup(10, constant)", "schedule")) == "warmup"


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("warmup(rounds=0)", "rounds must be at least 1"),
        ("warmup(then=iid)", "then must be a schedule, got iid"),
        ("warmup(then=3)", "it must be a name or a call, such as cosine"),
        ("warmup(then=fedavg)", "it must be a name or a call, such as cosine"),
        ("warmup(then=cosinus)", "did you mean cosine"),
    ],
)
def test_a_warmup_that_cannot_be_says_why(source, word):
    with pytest.raises(ValueError, match=word):
        lrs(source)
