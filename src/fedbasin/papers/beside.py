"""Our results beside the paper's: both numbers of each cell, and both gains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Literal

from fedbasin.papers.results import Result, served
from fedbasin.papers.tables import Axis, Finding, Published, Score, Table, matches

NEAR = 3.0  # points
HEADER = (
    "row",
    "column",
    "paper",
    "ours",
    "difference",
    "gain: paper",
    "gain: ours",
    "direction",
    "verdict",
)
Direction = Literal["", "confirmed", "not confirmed", "too small to tell"]
Basis = Literal["shown", "argued", "open"]
Lines = Mapping[tuple[str, str], Sequence[Result]]  # by row and column


@dataclass(frozen=True)
class Ours:
    """The results of a cell: those of its longest runs."""

    results: tuple[Result, ...]

    @property
    def scores(self) -> dict[int, float]:
        """The scores by seed; diverged runs and runs without a score are left out."""
        kept = (r for r in self.results if r.status != "diverged")
        return {r.seed: r.score for r in kept if r.score is not None}

    @property
    def mean(self) -> float | None:
        """The mean over seeds."""
        return fmean(self.scores.values()) if self.scores else None

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds, of two or more."""
        return stdev(self.scores.values()) if len(self.scores) > 1 else None

    @property
    def reduced(self) -> bool:
        """Whether the runs are shorter than the paper's."""
        return self.results[0].reduced

    @property
    def data_share(self) -> float:
        """The share of the published rows that every run had."""
        return min(result.data_share for result in self.results)


@dataclass(frozen=True)
class Line:
    """One cell for people: texts in the order of `HEADER`."""

    row: str
    column: str
    paper: str
    ours: str
    difference: str
    gain_paper: str
    gain_ours: str
    direction: str
    verdict: str

    @property
    def cells(self) -> tuple[str, ...]:
        """The texts."""
        return tuple(vars(self).values())


@dataclass(frozen=True)
class Compared:
    """One cell in numbers: the paper's, ours, and the comparison.

    Args:
        table: the table.
        row: its row.
        column: its column.
        published: what the paper prints.
        ours: our results, if there are any.
        gain_paper: the paper's gain over its baseline.
        gain_ours: our gain over ours.
        gain_spread: the standard deviation of our gain over seeds, of two or more.
        verdict: near, gain or missed; ``"-"`` if nothing is printed to compare with.
        basis: what the reason of a miss rests on.
    """

    table: Table
    row: Axis
    column: Axis
    published: Published
    ours: Ours | None
    gain_paper: float | None
    gain_ours: float | None
    gain_spread: float | None = None
    verdict: str = "-"
    basis: Basis = "open"

    @property
    def score(self) -> Score:
        """What the cell's numbers are."""
        return self.table.score_of(self.row, self.column)

    @property
    def judged(self) -> bool:
        """Whether it has a verdict on the paper's number or gain."""
        return self.verdict in ("near", "gain", "missed")

    @property
    def direction(self) -> Direction:
        """Whether our gain has the sign of the paper's.

        A gain within its standard deviation over seeds tells nothing. With one seed there is no
        deviation, and the sign alone counts.
        """
        paper = self.gain_paper
        ours = self.gain_ours
        if not self.judged or paper is None or ours is None:
            return ""
        if paper == 0 or abs(ours) <= (self.gain_spread or 0):
            return "too small to tell"
        return "confirmed" if paper * ours > 0 else "not confirmed"

    @property
    def borrowed(self) -> str:
        """The other table whose line serves this cell; empty if it has its own."""
        first = self.ours.results[0].table if self.ours else self.table.name
        return "" if first == self.table.name else first

    @property
    def difference(self) -> float | None:
        """Ours minus theirs."""
        return _minus(self.ours.mean if self.ours else None, self.published.value)

    @property
    def values(self) -> dict[str, str | float | bool | None]:
        """The cell for programs: names, numbers, and None for a number that does not exist."""
        ours = self.ours
        return {
            "table": self.table.name,
            "row": self.row.name,
            "column": self.column.name,
            "score": self.score.text,
            "paper": self.published.value,
            "paper_spread": self.published.spread,
            "paper_mark": self.published.mark or None,
            "paper_doubted": self.published.doubted,
            "ours": ours.mean if ours else None,
            "ours_spread": ours.spread if ours else None,
            "seeds": len(ours.results) if ours else None,
            "seeds_scored": len(ours.scores) if ours else None,
            "difference": self.difference,
            "gain_paper": self.gain_paper,
            "gain_ours": self.gain_ours,
            "gain_spread": self.gain_spread,
            "direction": self.direction or None,
            "verdict": None if self.verdict == "-" else self.verdict,
            "reason": self.basis if self.verdict == "missed" else None,
            "rounds": ours.results[0].rounds if ours else None,
            "full_rounds": ours.results[0].full_rounds if ours else None,
            "data_share": ours.data_share if ours else None,
        }

    @property
    def line(self) -> Line:
        """The cell for people."""
        digits = {"rounds_to_target": 0, "note": 4}.get(self.score.kind, 2)
        ours = _ours(self.ours, digits)
        if self.borrowed:
            ours += f", run of {self.borrowed}"
        gain_ours = _signed(self.gain_ours, digits)
        if self.gain_ours is not None and self.gain_spread is not None:
            gain_ours += f" ± {self.gain_spread:.{digits}f}"
        missed = self.verdict == "missed"
        return Line(
            row=self.row.name,
            column=self.column.name,
            paper=_printed(self.published, digits),
            ours=ours,
            difference=_signed(self.difference, digits),
            gain_paper=_signed(self.gain_paper, digits),
            gain_ours=gain_ours,
            direction=self.direction or "-",
            verdict=f"missed, reason {self.basis}" if missed else self.verdict,
        )


def compare(
    table: Table, results: Iterable[Result], rows: Sequence[Axis], columns: Sequence[Axis]
) -> list[Compared]:
    """Return the cells of some rows and columns; results of older settings are left out."""
    lines = served(table, results)
    return compare_lines(table, lines, [(row, column) for column in columns for row in rows])


def compare_lines(table: Table, lines: Lines, cells: Iterable[tuple[Axis, Axis]]) -> list[Compared]:
    """Return cells with their lines, those of `served`."""
    gathered = {cell: _longest(some) for cell, some in lines.items()}
    return [_compared(table, row, column, gathered) for row, column in cells]


def lines_of(
    table: Table, results: Iterable[Result], rows: Sequence[Axis], columns: Sequence[Axis]
) -> list[Line]:
    """Return the cells of `compare` as texts."""
    return [cell.line for cell in compare(table, results, rows, columns)]


def _longest(results: Sequence[Result]) -> Ours:
    rounds = max(result.rounds for result in results)
    # the last line of a seed counts
    by_seed = {result.seed: result for result in results if result.rounds == rounds}
    return Ours(tuple(by_seed[seed] for seed in sorted(by_seed)))


def _compared(
    table: Table, row: Axis, column: Axis, gathered: Mapping[tuple[str, str], Ours]
) -> Compared:
    published = table.printed(row, column)
    ours = gathered.get((row.name, column.name))
    base = table.baseline(row, column)
    base_published = table.printed(*base) if base else None
    base_ours = gathered.get((base[0].name, base[1].name)) if base else None
    gain_paper = _minus(published.value, base_published.value if base_published else None)
    gains = _paired_gains(ours, base_ours)
    cell = Compared(
        table,
        row,
        column,
        published,
        ours,
        gain_paper,
        gain_ours=fmean(gains) if gains else None,
        gain_spread=stdev(gains) if len(gains) > 1 else None,
    )
    cell = replace(cell, verdict=_verdict(cell))
    bases = [basis(finding, gathered) for finding in why(table, row, column)]
    return replace(cell, basis=_strongest(bases))


def _strongest(bases: Sequence[Basis]) -> Basis:
    order: tuple[Basis, ...] = ("shown", "argued", "open")
    return min(bases, key=order.index, default="open")


def basis(finding: Finding, gathered: Iterable[tuple[str, str]]) -> Basis:
    """Return what a finding rests on.

    It is shown if each row or trial that it names has a line in one of its columns.
    """
    ran = {row for row, column in gathered if matches(finding.columns, column)}
    if finding.shown_by and ran.issuperset(finding.shown_by):
        return "shown"
    return finding.basis


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def _paired_gains(ours: Ours | None, base: Ours | None) -> list[float]:
    """Return the gains of the seeds that both have, of runs of the same length."""
    if ours is None or base is None or ours.results[0].rounds != base.results[0].rounds:
        return []
    both = ours.scores.keys() & base.scores.keys()
    return [ours.scores[seed] - base.scores[seed] for seed in sorted(both)]


def _printed(published: Published, digits: int) -> str:
    if published.value is None:
        return published.mark
    text = f"{published.value:.{digits}f}"
    if published.spread is not None:
        text += f" ± {published.spread:.{digits}f}"
    return f"{text} (in doubt)" if published.doubted else text


def _ours(ours: Ours | None, digits: int) -> str:
    if ours is None:
        return "-"
    text = "no score" if ours.mean is None else f"{ours.mean:.{digits}f}"
    if ours.spread is not None:
        text += f" ± {ours.spread:.{digits}f}"
    count = len(ours.results)
    text += f" ({count} seed{'s' if count > 1 else ''})"
    diverged = sum(result.status == "diverged" for result in ours.results)
    missing = count - len(ours.scores) - diverged
    if diverged:
        text += f", {diverged} diverged"
    if missing > 0 and ours.scores:
        text += f", {missing} without a score"
    first = ours.results[0]
    if any(result.partial for result in ours.results):
        text += f", on {ours.data_share:.0%} of the data"
    if ours.reduced:
        text += f", reduced: {first.rounds} of {first.full_rounds} rounds"
    return text


def _signed(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:+.{digits}f}"


def _verdict(cell: Compared) -> str:
    """Hold a full-length result against the bar: near, or at least half of the gain.

    Rounds have no points to be near by: what counts is how many are saved.
    """
    ours = cell.ours
    kind = cell.score.kind
    rounds = kind == "rounds_to_target"
    if ours is None or kind == "note" or (rounds and cell.gain_paper is None):
        return "-"
    if cell.row.trial_of:
        return "-"  # another experiment than the paper's
    if ours.reduced:
        return "reduced"
    if any(result.partial for result in ours.results):
        return "other data"
    if cell.published.value is None:
        return "-"
    whole = all(result.status != "diverged" for result in ours.results)
    if whole and not rounds and cell.difference is not None and abs(cell.difference) <= NEAR:
        return "near"
    if whole and _reproduced(cell.gain_paper, cell.gain_ours, better=-1 if rounds else 1):
        return "gain"
    return "missed"


def _reproduced(paper: float | None, ours: float | None, better: int) -> bool:
    """Whether a gain is at least half of the paper's; a loss is at most double as well."""
    if paper is None or ours is None or paper * ours <= 0 or abs(ours) < abs(paper) / 2:
        return False
    return paper * better > 0 or abs(ours) <= 2 * abs(paper)


def why(table: Table, row: Axis, column: Axis) -> list[Finding]:
    """Return the findings about a cell."""
    return [finding for finding in table.findings if finding.covers(row, column)]
