"""What was refused is refused in the same words."""

from __future__ import annotations

from golden.refusals import STORED, refusals


def test_every_argument_that_was_refused_is_refused_in_the_same_words():
    stored = STORED.read_text(encoding="utf-8").splitlines()
    assert len(stored) >= 700
    assert not set(stored) - set(refusals())
