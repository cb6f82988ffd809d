"""`fedbasin paper`: the papers' tables, the runs that repeat them, and ours beside theirs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table as Grid
from rich.text import Text

from fedbasin.api.progress import run_with_progress, wide_console
from fedbasin.cli.seeds import read_seeds

if TYPE_CHECKING:
    from fedbasin.papers import Compared, Result, Table
    from fedbasin.papers.tables import Axis

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Run the published tables and see ours beside theirs.\n\n"
    "[bold]fedbasin paper list[/bold] names the tables, [bold]fedbasin paper list "
    "ima/table1[/bold] the rows and columns of one. [bold]fedbasin paper run ima/table1 --rows "
    "'fedavg*' --columns 'fmnist*' --rounds 0.1[/bold] runs some cells at a tenth of the rounds; "
    "[bold]fedbasin paper show ima/table1[/bold] compares.",
)
console = wide_console()
OUT = Path("runs/papers")

Name = Annotated[str, typer.Argument(help="A table or figure, such as ima/table1.")]
Rows = Annotated[
    str, typer.Option(help="Rows, separated by commas; * stands for anything. All by default.")
]
Columns = Annotated[str, typer.Option(help="Columns, likewise.")]
Trials = Annotated[
    str | None,
    typer.Option(
        help="Run these trials instead of rows: rows with something changed, as the table's "
        "findings name them; * for all."
    ),
]
Out = Annotated[Path, typer.Option(help="Where run folders and results.jsonl lie.")]
Results = Annotated[
    Path | None, typer.Option(help="File of result lines; results.jsonl in --out by default.")
]
Some = Annotated[str | None, typer.Argument(help="A table or figure; all if left out.")]
OwnResults = Annotated[
    Path | None,
    typer.Option(help="Result lines of your own runs, beside those that ship with fedbasin."),
]


@app.command("list")
def list_(
    name: Annotated[str | None, typer.Argument(help="One table, to see all about it.")] = None,
) -> None:
    """List the tables and figures, or the rows and columns of one with what they run.

    The tables that can be run come first. Below them are the tables and figures of the papers that
    other commands make, or that are not made, with the reason.
    """
    from fedbasin.papers import load_table, reason, table_names
    from fedbasin.papers.page import counts_of_table
    from fedbasin.papers.results import shipped

    if name is not None:
        _describe(load_table(name))
        return
    grid = Grid("table", "what", "cells", "can run", "have results", "why not")
    for each in table_names():
        table = load_table(each)
        reasons = [reason(table, row, column) for row in table.rows for column in table.columns]
        counted = counts_of_table(table, shipped())
        ran = counted["run at full length"] + counted["reduced"]
        why = "; ".join(dict.fromkeys(filter(None, reasons)))
        counts = (counted["cells"], counted["can run"], ran or "-")
        grid.add_row(Text(each), Text(table.title), *map(str, counts), Text(why))
    console.print(grid)
    console.print(_others())


def _others() -> Grid:
    """Return the tables and figures that no file of the same name repeats."""
    from fedbasin.papers.index import indexed_papers, load_index
    from fedbasin.papers.tables import table_names

    grid = Grid("other tables and figures", "what", "state", "how", "why")
    for paper in indexed_papers():
        for item in load_index(paper):
            name = f"{paper}/{item.name.lower().replace(' ', '')}"
            if item.is_shown and name not in table_names():
                state = f"by {item.table}" if item.table else item.state
                grid.add_row(*map(Text, (name, item.what, state, item.how, item.why)))
    return grid


@app.command()
def index(
    paper: Annotated[str | None, typer.Argument(help="ima, fedlaw, wima, fedcda, fedwcm.")] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="All papers, as docs/papers_index.md.")
    ] = False,
) -> None:
    """Say where each numbered table, figure, equation and theorem of a paper is, and its state.

    For instance: [bold]fedbasin paper index fedlaw[/bold]
    """
    from fedbasin.papers.index import indexed_papers, load_index, page, state_of
    from fedbasin.papers.results import shipped

    if markdown:
        typer.echo(page(shipped()), nl=False)
        return
    for each in [paper] if paper else indexed_papers():
        grid = Grid("", "what", "how", "code", "state", title=each)
        for item in load_index(each):
            state = state_of(item, shipped())
            told = f"{state}: {item.why}" if item.why else state
            grid.add_row(*map(Text, (item.name, item.what, item.how, item.code, told)))
        console.print(grid)


@app.command()
def run(
    name: Name,
    rows: Rows = "*",
    columns: Columns = "*",
    trials: Trials = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds, as in 0,1,2 or 0..9; the table's by default.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    rounds: Annotated[
        float, typer.Option(help="Share of the paper's rounds; below 1 results are marked reduced.")
    ] = 1.0,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at once; one on a GPU, else one a core.")
    ] = None,
    out: Out = OUT,
    results: Results = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder that holds OWNER/NAME/...; else FEDBASIN_DATA.")
    ] = None,
) -> None:
    """Run cells of a table. Finished cells are kept, stopped ones are resumed.

    Every cell and seed has a run folder in --out and one line in results.jsonl; a cell that has its
    line is not run again. Repeat the command after a crash or Ctrl-C. A cell that fails does not
    stop the others. Cells whose first rounds are equal (a method with and without late averaging)
    share these rounds.
    """
    from fedbasin.experiment.executors import pick_device
    from fedbasin.papers import load_table
    from fedbasin.papers.grid import cells_asked, runs_of
    from fedbasin.papers.run import Grid as Runs

    table = load_table(name)
    asked = cells_asked(table, rows, columns, trials)
    numbers = list(dict.fromkeys(read_seeds(seeds))) if seeds else list(table.seeds)
    cell_runs, reasons = runs_of(table, asked, numbers, share=rounds, device=device)
    for why, cells in reasons.items():
        shown = ", ".join(cells[:3]) + (f" and {len(cells) - 3} more" if len(cells) > 3 else "")
        console.print(Text(f"cannot run {shown}: {why}", style="yellow"), soft_wrap=True)
    if not cell_runs:
        raise ValueError(f"{name}: none of the cells asked for can be run here")
    grid = Runs(tuple(cell_runs), out, results or out / "results.jsonl", data_dir)
    grid.collect()
    left = [run.rounds for run in grid.unfinished().values()]
    console.print(
        Text(f"{len(cell_runs)} results asked for, {len(left)} runs to do, in {out}"),
        soft_wrap=True,
    )
    if jobs is None:
        on_cpu = pick_device(device).type == "cpu"
        jobs = max(min(os.cpu_count() or 1, len(left)), 1) if on_cpu else 1
    if left:
        run_with_progress(
            grid.waiting(),
            console,
            data_dir,
            jobs,
            on_cell=grid.ended,
            more=grid.waiting,
            rounds=sum(left),
            again="the same command",
        )
    _print_beside(table, grid.lines(), *_picked(table, rows, columns), only_ours=True)
    if grid.failures:
        told = "\n".join(f"  {command}\n    {why}" for command, why in grid.failures.items())
        raise RuntimeError(f"{len(grid.failures)} cells failed; the others are done:\n{told}")


@app.command()
def config(
    name: Name,
    row: Annotated[str, typer.Option(help="One row.")],
    column: Annotated[str, typer.Option(help="One column.")],
    seed: Annotated[
        int | None, typer.Option(help="The seed; the table's first by default.")
    ] = None,
    rounds: Annotated[float, typer.Option(help="Share of the paper's rounds.")] = 1.0,
) -> None:
    """Print a cell as a config file, to run it with something changed.

    What does a paper's number depend on? For instance: [bold]fedbasin paper config ima/table1 --row
    fedavg --column 'cifar10 cnn dir0.1' >cell.toml; fedbasin run cell.toml --set
    local.weight_decay=0[/bold]
    """
    from fedbasin.papers import cell_runs_of, load_table
    from fedbasin.papers.tables import select

    table = load_table(name)
    rows = select(table.rows, row, "--row")
    columns = select(table.columns, column, "--column")
    for option, axes in (("--row", rows), ("--column", columns)):
        if len(axes) > 1:
            raise ValueError(f"{option} names {', '.join(axis.name for axis in axes)}: name one")
    seed = table.seeds[0] if seed is None else seed
    cell_runs, reasons = cell_runs_of(table, rows, columns, [seed], share=rounds)
    if not cell_runs:
        raise ValueError(f"{name}: that cell cannot be run: {', '.join(reasons)}")
    typer.echo(cell_runs[0].experiment.to_toml())


@app.command()
def show(
    name: Some = None,
    rows: Rows = "*",
    columns: Columns = "*",
    results: OwnResults = None,
    ours: Annotated[bool, typer.Option("--ours", help="Only cells that were run.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="As Markdown; without a table all of docs/papers.md.")
    ] = False,
    csv: Annotated[
        bool, typer.Option("--csv", help="As CSV, numbers with all their digits, for pandas.")
    ] = False,
) -> None:
    """Show paper and ours side by side: difference, and gain over the baseline of both.

    Cells with a verdict come first.
    A verdict is near (within 3 points), gain (the direction and at least half of the gain) or
    missed, with what its reason rests on; reasons are printed below. The direction says whether
    our gain has the sign of the paper's. Runs of fewer rounds than the paper's, or on a part of its
    data, are marked and get no verdict.
    """
    from fedbasin.papers.page import page, section, sheet
    from fedbasin.papers.results import shipped

    if markdown and csv:
        raise ValueError("--markdown and --csv are two forms: give one of them")
    if markdown and name is None:
        if (rows, columns, results, ours) != ("*", "*", None, False):
            raise ValueError("--markdown without a table is docs/papers.md as it is: name a table")
        typer.echo(page(shipped()), nl=False)
        return
    lines = _all_lines(results)
    if csv:
        typer.echo(sheet(_compared(name, rows, columns, lines), only_ours=ours), nl=False)
        return
    for table in _tables(name):
        picked = _picked(table, rows, columns)
        if markdown:
            typer.echo(section(table, lines, *picked), nl=False)
        else:
            _print_beside(table, lines, *picked, only_ours=ours or name is None)


@app.command()
def plot(
    name: Some = None,
    rows: Rows = "*",
    columns: Columns = "*",
    results: OwnResults = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The picture: .png, .svg or .pdf; named after the table by default."),
    ] = None,
) -> None:
    """Draw ours beside theirs: one table cell by cell, or all papers at a glance.

    For instance: [bold]fedbasin paper plot fedcda/table1 --columns 'fmnist*' --out
    fedcda.svg[/bold]
    """
    from fedbasin.papers.picture import draw_all, draw_table

    path = out or Path(f"{name.replace('/', '-') if name else 'papers'}.png")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--out is {str(path)!r}: end it in .png, .svg or .pdf")
    cells = _compared(name, rows, columns, _all_lines(results))
    if name is None:
        draw_all(cells, path)
    else:
        draw_table(cells[0].table, cells, path)
    console.print(Text(f"written: {path}"), soft_wrap=True)


def _tables(name: str | None) -> list[Table]:
    from fedbasin.papers import load_table, table_names

    return [load_table(each) for each in ([name] if name else table_names())]


def _all_lines(results: Path | None) -> list[Result]:
    """Return the lines that ship with fedbasin, then those of the user's own runs."""
    from fedbasin.papers.results import read, shipped

    if results is not None and not results.exists():
        raise ValueError(f"--results: {results} does not exist")
    local = results or OUT / "results.jsonl"
    return [*shipped(), *(read(local) if local.exists() else [])]


def _compared(name: str | None, rows: str, columns: str, lines: list[Result]) -> list[Compared]:
    from fedbasin.papers import compare

    return [
        cell
        for table in _tables(name)
        for cell in compare(table, lines, *_picked(table, rows, columns))
    ]


def _picked(table: Table, rows: str, columns: str) -> tuple[list[Axis], list[Axis]]:
    from fedbasin.papers.tables import select

    return select(table.rows, rows, "--rows"), select(table.columns, columns, "--columns")


def _print_beside(
    table: Table, results: list[Result], rows: list[Axis], columns: list[Axis], *, only_ours: bool
) -> None:
    from fedbasin.papers.beside import HEADER, basis, compare_lines
    from fedbasin.papers.page import findings_of, trials_of
    from fedbasin.papers.results import served
    from fedbasin.papers.tables import MARKS

    lines = served(table, results)
    cells = compare_lines(table, lines, [(row, col) for col in columns for row in rows])
    if only_ours:
        cells = [cell for cell in cells if cell.ours]
    cells.sort(key=lambda cell: not cell.judged)  # those with a verdict first
    trials = trials_of(table, lines, rows, columns)
    if not cells and not trials:
        return
    grid = Grid(*HEADER, title=f"{table.name}: {table.title}", caption=table.score.text)
    for cell in (*cells, *trials):
        grid.add_row(*(Text(text) for text in cell.line.cells))
    console.print(grid)
    for mark in dict.fromkeys(cell.published.mark for cell in cells if cell.published.mark):
        console.print(Text(f"{mark}: {MARKS[mark]}"), soft_wrap=True)
    missed = {(c.row.name, c.column.name) for c in cells if c.verdict == "missed"}
    for finding in findings_of(table, missed):
        told = f"why ({finding.cells}; {basis(finding, lines)}): {finding.text}"
        console.print(Text(told), soft_wrap=True)


def _describe(table: Table) -> None:
    from fedbasin.papers import reason
    from fedbasin.papers.grid import method_of

    console.print(Text(f"{table.name}: {table.title}\n{table.score.text}"), soft_wrap=True)
    for label, texts in (("paper says", table.claims), ("here", table.notes)):
        for text in texts:
            console.print(Text(f"{label}: {text}"), soft_wrap=True)
    grid = Grid("row", "column", "method", "paper", "why not")
    for column in table.columns:
        for row in table.rows:
            printed = table.printed(row, column)
            number = printed.mark or f"{printed.value:g}"
            why = reason(table, row, column)
            method = "" if why else method_of(table, row, column)
            grid.add_row(*map(Text, (row.name, column.name, method, number, why)))
    console.print(grid)
    if table.trials:
        trials = Grid("trial", "of row", "column", "method")
        for row, column in table.trial_cells():
            texts = (row.name, row.trial_of, column.name, method_of(table, row, column))
            trials.add_row(*map(Text, texts))
        console.print(trials)
