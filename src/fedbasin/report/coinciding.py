"""Curves that lie on each other: from which round on two methods differ."""

from __future__ import annotations

from collections.abc import Sequence

from fedbasin.report.runs import Run
from fedbasin.report.table import by_label


def coinciding(runs: Sequence[Run]) -> list[str]:
    """Return a sentence for each method whose first scored rounds equal another method's.

    Equal means that training loss and all metrics are the same in all common seeds.
    """
    groups = list(by_label(runs).items())
    said = []
    for number, (label, members) in enumerate(groups):
        longest = 0
        sentence = ""
        for other, theirs in groups[:number]:
            until, always = _equal_until(members, theirs)
            if until > longest:
                longest = until
                when = "in every round" if always else f"until round {until}"
                sentence = f"{label} equals {other} {when}."
        if sentence:
            said.append(sentence)
    return said


def _equal_until(ours: Sequence[Run], theirs: Sequence[Run]) -> tuple[int, bool]:
    """Return the last scored round before the first difference; whether there is none."""
    partners = {run.seed: run for run in theirs}
    pairs = [(run, partners[run.seed]) for run in ours if run.seed in partners]
    lengths = {len(run.records) for pair in pairs for run in pair}
    if not pairs:
        return 0, False
    until = 0
    for number in range(min(lengths)):
        for a, b in pairs:
            mine = a.records[number]
            yours = b.records[number]
            if mine.metrics != yours.metrics or mine.train_loss != yours.train_loss:
                return until, False
        if any(value is not None for value in pairs[0][0].records[number].metrics.values()):
            until = number + 1
    return until, len(lengths) == 1
