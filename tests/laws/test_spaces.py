"""Every method says where its arguments may be tuned, or why not."""

from dataclasses import replace

import pytest

import fedbasin.methods  # noqa: F401  (fills the catalogue)
from fedbasin.core.catalogue import cards
from fedbasin.core.expressions import is_fit, parse, text
from fedbasin.core.space import Options, Range, SpaceError

CARDS = [card for card in cards("method") if card.make.__module__.startswith("fedbasin.")]


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_a_method_has_a_space_or_says_why_not(card):
    assert card.tunable, f"{card.name}: give entry(tunable=...) spaces, or say why there are none"
    if isinstance(card.tunable, str):
        assert card.tunable.startswith("nothing: ")
        return
    known = {p.name: p for p in card.parameters}
    usual = card.make()
    for name, space in card.tunable.items():
        assert name in known, f"{card.name} has no argument {name}"
        assert space.holds(known[name].default), f"{card.name}.{name}: the default is outside"
        # The ends and the middle of each range are valid, and written as text that is read back.
        for share in (0.0, 0.5, 1.0):
            value = space.at(share)
            assert is_fit(value, known[name].type)
            changed = replace(usual, **{name: value})
            assert parse(text(changed), "method") == changed
            assert space.holds(value)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Range(0.1, 0.1), "empty"),
        (lambda: Range(1.0, 0.1), "reversed"),
        (lambda: Range(0.0, 1.0, "log"), "begin above 0"),
        (lambda: Range(0.0, float("inf")), "finite"),
        (lambda: Options(), "nothing to choose"),
        (lambda: Options(1, 1), "twice"),
    ],
)
def test_spaces_that_hold_nothing_are_refused(make, says):
    with pytest.raises(SpaceError, match=says):
        make()


def test_scales_spread_as_they_say():
    assert [Range(0.01, 1.0, "log").at(share) for share in (0, 0.5, 1)] == [0.01, 0.1, 1.0]
    assert [Range(0.0, 1.0).at(share) for share in (0, 0.5, 1)] == [0.0, 0.5, 1.0]
    assert [Range(2, 6, whole=True).at(share) for share in (0, 0.5, 1)] == [2, 4, 6]
    assert [Options("a", "b").at(share) for share in (0, 0.4, 0.5, 1)] == ["a", "a", "b", "b"]
    assert not Options(False, True).holds(0)
