"""Our results beside the paper's: both numbers of each cell, and both gains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from statistics import fmean, stdev

from fedbasin.papers.results import Result, fresh
from fedbasin.papers.tables import Axis, Finding, Published, Score, Table

NEAR = 3.0  # points
HEADER = ("row", "column", "paper", "ours", "difference", "gain: paper", "gain: ours", "verdict")


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
        verdict: near, gain or missed; ``"-"`` if nothing is printed to compare with.
    """

    table: Table
    row: Axis
    column: Axis
    published: Published
    ours: Ours | None
    gain_paper: float | None
    gain_ours: float | None
    verdict: str

    @property
    def score(self) -> Score:
        """What the cell's numbers are."""
        return self.table.score_of(self.row, self.column)

    @property
    def judged(self) -> bool:
        """Whether it has a verdict on the paper's number or gain."""
        return self.verdict.startswith(("near", "gain", "missed"))

    @property
    def difference(self) -> float | None:
        """Ours minus theirs."""
        return _minus(self.ours.mean if self.ours else None, self.published.value)

    @property
    def values(self) -> dict[str, str | float | None]:
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
            "ours": ours.mean if ours else None,
            "ours_spread": ours.spread if ours else None,
            "seeds": len(ours.results) if ours else None,
            "seeds_scored": len(ours.scores) if ours else None,
            "difference": self.difference,
            "gain_paper": self.gain_paper,
            "gain_ours": self.gain_ours,
            "verdict": None if self.verdict == "-" else self.verdict,
            "rounds": ours.results[0].rounds if ours else None,
            "full_rounds": ours.results[0].full_rounds if ours else None,
            "data_share": ours.data_share if ours else None,
        }

    @property
    def line(self) -> Line:
        """The cell for people."""
        digits = {"rounds_to_target": 0, "note": 4}.get(self.score.kind, 2)
        return Line(
            row=self.row.name,
            column=self.column.name,
            paper=_printed(self.published, digits),
            ours=_ours(self.ours, digits),
            difference=_signed(self.difference, digits),
            gain_paper=_signed(self.gain_paper, digits),
            gain_ours=_signed(self.gain_ours, digits),
            verdict=self.verdict,
        )


def compare(
    table: Table, results: Iterable[Result], rows: Sequence[Axis], columns: Sequence[Axis]
) -> list[Compared]:
    """Return the cells of some rows and columns; results of older settings are left out."""
    gathered = _gather(fresh(table, results))
    return [_compared(table, row, column, gathered) for column in columns for row in rows]


def lines_of(
    table: Table, results: Iterable[Result], rows: Sequence[Axis], columns: Sequence[Axis]
) -> list[Line]:
    """Return the cells of `compare` as texts."""
    return [cell.line for cell in compare(table, results, rows, columns)]


def _gather(results: Iterable[Result]) -> dict[tuple[str, str], Ours]:
    by_cell: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        by_cell.setdefault((result.row, result.column), []).append(result)
    gathered = {}
    for cell, of_cell in by_cell.items():
        longest = max(result.rounds for result in of_cell)
        by_seed = {
            r.seed: r for r in of_cell if r.rounds == longest
        }  # the last line of a seed counts
        gathered[cell] = Ours(tuple(by_seed[seed] for seed in sorted(by_seed)))
    return gathered


def _compared(
    table: Table, row: Axis, column: Axis, gathered: dict[tuple[str, str], Ours]
) -> Compared:
    published = table.printed(row, column)
    ours = gathered.get((row.name, column.name))
    base = table.baseline(row, column)
    base_published = table.printed(*base) if base else None
    base_ours = gathered.get((base[0].name, base[1].name)) if base else None
    gain_paper = _minus(published.value, base_published.value if base_published else None)
    gain_ours = _paired_gain(ours, base_ours)
    unjudged = Compared(table, row, column, published, ours, gain_paper, gain_ours, "-")
    return replace(unjudged, verdict=_verdict(unjudged))


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def _paired_gain(ours: Ours | None, base: Ours | None) -> float | None:
    """Return the mean gain over the seeds that both have, of runs of the same length."""
    if ours is None or base is None or ours.results[0].rounds != base.results[0].rounds:
        return None
    both = ours.scores.keys() & base.scores.keys()
    return fmean(ours.scores[s] - base.scores[s] for s in both) if both else None


def _printed(published: Published, digits: int) -> str:
    if published.value is None:
        return published.mark
    text = f"{published.value:.{digits}f}"
    return text if published.spread is None else f"{text} ± {published.spread:.{digits}f}"


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
    return "missed" if why(cell.table, cell.row, cell.column) else "missed, no reason yet"


def _reproduced(paper: float | None, ours: float | None, better: int) -> bool:
    """Whether a gain is at least half of the paper's; a loss is at most double as well."""
    if paper is None or ours is None or paper * ours <= 0 or abs(ours) < abs(paper) / 2:
        return False
    return paper * better > 0 or abs(ours) <= 2 * abs(paper)


def why(table: Table, row: Axis, column: Axis) -> list[Finding]:
    """Return the findings about a cell."""

    def covers(patterns: tuple[str, ...], axis: Axis) -> bool:
        return not patterns or any(fnmatchcase(axis.name, pattern) for pattern in patterns)

    return [f for f in table.findings if covers(f.rows, row) and covers(f.columns, column)]
