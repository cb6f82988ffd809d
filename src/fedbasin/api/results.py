"""Results that display themselves: a run, and a comparison of runs."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from fedbasin.api.network import predict, trained_network
from fedbasin.core.record import Headline, RoundRecord, RunFolder, headline_of
from fedbasin.experiment.objects import Factory
from fedbasin.report.curves import write_curves
from fedbasin.report.page import write_page
from fedbasin.report.runs import Run, headline_of_runs, read_runs, title_of
from fedbasin.report.served import served_text
from fedbasin.report.table import Row, cells, summarise
from fedbasin.report.verdict import verdict

if TYPE_CHECKING:
    import numpy as np
    import pandas


class RunResult(Mapping[str, Any]):
    """A run: its summary as a mapping, its records, and the network it trained.

    Args:
        path: the run's folder.
        summary: what the run measured, as in ``summary.json``.
        network: the module or function that the run was started with; None for an expression.
    """

    def __init__(
        self, path: Path, summary: Mapping[str, Any], network: nn.Module | Factory | None = None
    ) -> None:
        self.path = path
        self.summary = summary
        self._network = network

    def __getitem__(self, name: str) -> Any:
        return self.summary[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.summary)

    def __len__(self) -> int:
        return len(self.summary)

    def __repr__(self) -> str:
        headline = headline_of(self.summary)
        score = headline.shown(self.summary.get(f"{headline.name}_mean_last10"))
        unit = f" {headline.unit}" if headline.unit else ""
        return (
            f"{self.summary.get('method')}, seed {self.summary.get('seed')}: {headline.name} "
            f"{score}{unit} after {self.summary.get('rounds')} rounds "
            f"({self.summary.get('status')}; {self.path})"
        )

    @property
    def records(self) -> list[RoundRecord]:
        """One record a round."""
        return RunFolder(self.path).read_rounds()

    @property
    def rounds(self) -> pandas.DataFrame:
        """One line a round."""
        return _pandas().read_json(RunFolder(self.path).rounds, lines=True)

    def model(self) -> nn.Module:
        """Return the network with its trained weights, ready to score."""
        return trained_network(self.path, self._network)

    def predict(self, rows: Any, *, probabilities: bool = False) -> np.ndarray:
        """Apply the network to new rows, as `fedbasin.predict` does."""
        return predict(self.path, rows, model=self._network, probabilities=probabilities)

    def report(self, path: Path | str = "report.html") -> Path:
        """Write a page about the run."""
        return write_page(read_runs([self.path]), Path(path))


class Comparison(Sequence[RunResult]):
    """The runs of a comparison, in the order they were asked for.

    Args:
        runs: one result a run.
        path: the folder that holds them.
    """

    def __init__(self, runs: Sequence[RunResult], path: Path) -> None:
        self._runs = list(runs)
        self.path = path

    def __getitem__(self, index: Any) -> Any:
        return self._runs[index]

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def frame(self) -> pandas.DataFrame:
        """One line a run: what ``summary.json`` holds, and the folder."""
        lines = [{**run.summary, "path": str(run.path)} for run in self._runs]
        return _pandas().DataFrame(lines)

    @property
    def rounds(self) -> pandas.DataFrame:
        """One line a round of every run, with its method and seed."""
        pandas = _pandas()
        parts = []
        for run in self._runs:
            part = run.rounds
            part.insert(0, "method", run["method"])
            part.insert(1, "seed", run["seed"])
            parts.append(part)
        return pandas.concat(parts, ignore_index=True)

    @property
    def best(self) -> RunResult:
        """The best run of the method whose mean over seeds is best."""
        runs = self._read()
        headline = headline_of_runs(runs)
        rows = [row for row in summarise(runs, None) if row.score is not None]
        if not rows:
            raise ValueError(f"no run of {self.path} was scored: all of them diverged at once")
        sign = 1 if headline.higher_is_better else -1
        chosen = max(rows, key=lambda row: sign * (row.score or 0.0)).method
        labels = {run.path: run.label for run in runs}
        name = f"{headline.name}_mean_last10"
        own = [run for run in self._runs if labels[run.path] == chosen and run[name] is not None]
        return max(own, key=lambda run: sign * run[name])

    @property
    def verdict(self) -> str:
        """Which method has the best mean, and whether the seeds can tell."""
        return verdict(self._read())

    def report(self, path: Path | str = "report.html") -> Path:
        """Write a page about the comparison."""
        return write_page(self._read(), Path(path))

    def __repr__(self) -> str:
        runs = self._read()
        headline = headline_of_runs(runs)
        console = Console(file=io.StringIO(), width=100, force_jupyter=False, force_terminal=False)
        console.print(table_of(summarise(runs, None), headline, title_of(runs)))
        assert isinstance(console.file, io.StringIO)
        clients = served_text(runs)
        said = f"{verdict(runs)}\n{clients}" if clients else verdict(runs)
        return f"{console.file.getvalue()}{said}\nrecords: {self.path}"

    def _repr_html_(self) -> str:
        runs = self._read()
        headline = headline_of_runs(runs)
        lines = [cells(row, headline) for row in summarise(runs, None)]
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(line[i])}</td>" for i in (0, 1, 3, 4)) + "</tr>"
            for line in lines
        )
        titles = ("method", headline.title, "seconds", "seeds")
        head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
        picture = io.BytesIO()
        write_curves(runs, picture, title=title_of(runs), dpi=90)
        encoded = base64.b64encode(picture.getvalue()).decode()
        return (
            f"<p>{html.escape(verdict(runs))}</p><table><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table>"
            f'<img alt="scores by round" src="data:image/png;base64,{encoded}"/>'
        )

    def _read(self) -> list[Run]:
        return read_runs([run.path for run in self._runs])


def table_of(
    rows: Sequence[Row], headline: Headline, title: str, target: float | None = None
) -> Table:
    """Return the table of a comparison; a column for rounds to a target where there is one."""
    lines: list[tuple[str, ...]] = [cells(row, headline) for row in rows]
    table = Table(
        title=Text(title),
        caption=f"{headline.words}: mean of the last 10 rounds, ± standard deviation over seeds",
    )
    table.add_column("method", overflow="fold", min_width=min(max(len(r[0]) for r in lines), 20))
    columns = [headline.title, headline.target_title(target), "seconds", "seeds"]
    if target is None:
        columns.remove(headline.target_title(target))
        lines = [(method, score, *others) for method, score, _, *others in lines]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(*(Text(cell) for cell in line))
    return table


def _pandas() -> Any:
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "data frames need pandas: pip install pandas (the records are JSON and open without it)"
        ) from error
    return pandas
