"""Runs to one page that holds everything it needs, so it opens anywhere without a network."""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from fedbasin.core.figure_data import Analysis
from fedbasin.core.record import Headline, write_atomically
from fedbasin.core.settings import nest, write_toml, write_value
from fedbasin.report.chart_data import chart_data
from fedbasin.report.curves import COLOURS
from fedbasin.report.paired import Difference, least_ratio
from fedbasin.report.runs import (
    Run,
    headline_of_runs,
    is_federated,
    partition_follows_seed,
    shared_facts,
    telling_settings,
    title_of,
)
from fedbasin.report.served import say_gains, served_lines
from fedbasin.report.table import Row, by_label, cells, differences, summarise
from fedbasin.report.verdict import coinciding, verdict

_SCRIPTS = ("d3-7.9.0.min.js", "plot-0.6.17.umd.min.js", "page.js")
_MADE_WITH = ("python", "device", "executor", "commit")
_WAYS = {  # models that clients are scored with beside the federated one
    "home": "after fine-tuning at home",
    "alone": "trained alone",
    "pooled": "all rows pooled",
}
_DASHES = ("", "6 3", "8 3 2 3", "2 3")  # curves.STYLES, as SVG writes them


@dataclass(frozen=True)
class Line:
    """One line of the table of methods, written for people."""

    row: Row
    score: str
    rounds: str
    difference: str
    p: str
    better: str
    moved: str
    colour: str
    dash: str


@dataclass(frozen=True)
class Found:
    """An analysis, and the folder it was found in."""

    place: str
    analysis: Analysis


@dataclass(frozen=True)
class Recipe:
    """A settings file and the commands that read it."""

    file: str
    settings: str
    commands: tuple[str, ...]


def write_page(
    runs: Sequence[Run],
    path: Path,
    *,
    target: float | None = None,
    baseline: str = "fedavg",
    tuning: Analysis | None = None,
) -> Path:
    """Write the report of some runs.

    Args:
        runs: what `read_runs` gives.
        path: the page.
        target: value of the headline for the column "rounds to target"; None is 0.8 for accuracy.
        baseline: the method the others are compared with.
        tuning: how the settings of the runs were chosen, where they were.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, render(runs, target=target, baseline=baseline, tuning=tuning))
    return path


def render(
    runs: Sequence[Run],
    *,
    target: float | None,
    baseline: str,
    tuning: Analysis | None = None,
) -> str:
    """Return the page; every text from a run folder is escaped by the template engine."""
    headline = headline_of_runs(runs)
    target = headline.usual_target if target is None else target
    lines = _lines(runs, target, baseline)
    tuned = [] if tuning is None else [Found("all methods", tuning)]
    analyses = [*tuned, *_analyses(runs)]
    scripts = [_asset(name) for name in _SCRIPTS]
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(_asset),
    )
    environment.filters |= {
        "size": say_bytes,
        "count": count,
        "breakable": breakable,
        "gains": say_gains,
        "score": lambda value: _score(value, headline),
        "cell": _cell,
        "number": _cell,
    }
    pairs = _pairs(runs, baseline)
    differing = telling_settings(runs)
    served = served_lines(runs, baseline)
    return environment.get_template("page.html").render(
        title=title_of(runs),
        facts=shared_facts(runs),
        runs=runs,
        lines=lines,
        headline=headline,
        target_title="" if target is None else headline.target_title(target),
        baseline=baseline,
        compared=sum(line.difference != "" for line in lines),
        pairs=pairs,
        ratio=least_ratio(pairs[0]) if pairs and pairs[0] > 1 else None,
        analyses=analyses,
        tuned=len(tuned),
        verdict=verdict(runs, baseline),
        federated=sum(is_federated(run) for run in runs),
        coinciding=coinciding(runs),
        differing=differing,
        settings=_settings(runs, differing),
        environment=_environment(runs),
        recipes=[(recipe, _download(recipe.settings)) for recipe in recipes(runs)],
        problems=[problem for run in runs for problem in run.problems],
        data=chart_data(
            runs,
            [(line.row.method, line.colour, line.dash) for line in lines],
            [found.analysis for found in analyses],
            baseline,
        ),
        served=served,
        ways={
            way: title for way, title in _WAYS.items() if any(way in line.ways for line in served)
        },
        smoothest=max(2, min(50, max(len(run.records) for run in runs) // 2)),
        style=Markup(_asset("page.css")),
        scripts=[Markup(script) for script in scripts],
        policy=_policy(scripts),
        licences=Markup(_asset("LICENSES.txt")),
    )


def _asset(name: str) -> str:
    return (resources.files("fedbasin.report") / "assets" / name).read_text(encoding="utf-8")


def _policy(scripts: Sequence[str]) -> str:
    """Let the browser run the page's own scripts, by their hashes, and fetch nothing at all."""
    digests = [hashlib.sha256(script.encode()).digest() for script in scripts]
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _download(text: str) -> str:
    return "data:application/toml;base64," + base64.b64encode(text.encode()).decode()


def _lines(runs: Sequence[Run], target: float | None, baseline: str) -> list[Line]:
    headline = headline_of_runs(runs)
    gaps = differences(runs, baseline)
    lines = []
    for number, row in enumerate(summarise(runs, target)):
        _, score, rounds, _, _ = cells(row, headline)
        gap = gaps[row.method]
        lines.append(
            Line(
                row=row,
                score=score,
                rounds=rounds,
                difference=say_difference(gap, headline),
                p="" if gap is None or gap.holm is None else say_p(gap.holm),
                better="" if gap is None else f"{gap.better} of {gap.pairs}",
                moved=say_bytes(row.bytes_moved),
                colour=COLOURS[number % len(COLOURS)],
                dash=_DASHES[number // len(COLOURS) % len(_DASHES)],
            )
        )
    return lines


def say_difference(gap: Difference | None, headline: Headline) -> str:
    """Write a difference in the headline's unit, with its 95 % interval."""
    if gap is None:
        return ""
    digits = headline.digits
    scale = headline.scale
    said = f"{scale * gap.mean:+.{digits}f}"
    if gap.low is not None and gap.high is not None:
        said += f" [{scale * gap.low:+.{digits}f}, {scale * gap.high:+.{digits}f}]"
    return said.replace("-", "\N{MINUS SIGN}")


def breakable(text: str) -> Markup:
    """Let a browser break a long name after commas and opening brackets."""
    safe = str(escape(text))
    return Markup(safe.replace("(", "(<wbr>").replace(",", ",<wbr>"))


def count(amount: int | str, thing: str) -> str:
    """Write an amount with its noun: 1 run, 2 runs."""
    return f"{amount} {thing}" if str(amount) == "1" else f"{amount} {thing}s"


def say_p(p: float) -> str:
    """Write a p-value with as many digits as matter."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def _pairs(runs: Sequence[Run], baseline: str) -> list[int]:
    """Return the numbers of pairs that differences are made of."""
    found = differences(runs, baseline).values()
    return sorted({gap.pairs for gap in found if gap is not None})


def _score(value: Any, headline: Headline) -> str:
    return headline.shown(value if isinstance(value, int | float) else None)


def _cell(value: Any) -> str:
    if value is None or value != value:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def say_bytes(amount: Any) -> str:
    """Write an amount of data with three digits: 15.4 MB."""
    if not isinstance(amount, int | float):
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 999.5:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} TB"


def _analyses(runs: Sequence[Run]) -> list[Found]:
    """Return the analyses, each once; one made from several runs may lie in all of them."""
    found: dict[str, Found] = {}
    for run in runs:
        for analysis in run.analyses:
            text = analysis.to_json()
            before = found.get(text)
            place = f"{run.label}, seed {run.seed}"
            found[text] = (
                replace(before, place=f"{before.place}; {place}")
                if before
                else Found(place, analysis)
            )
    return list(found.values())


def _settings(runs: Sequence[Run], names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each method with its values of some settings."""
    return [
        (label, [_say_setting(members[0].settings.get(name)) for name in names])
        for label, members in by_label(runs).items()
    ]


def _say_setting(value: Any) -> str:
    return "not set" if value is None else write_value(value)


def _environment(runs: Sequence[Run]) -> list[tuple[str, list[tuple[str, int]]]]:
    """Return what the runs were made with: each fact's values, and how many runs have them."""
    table: dict[str, dict[str, int]] = {}
    for run in runs:
        versions = run.summary.get("versions")
        facts = dict(versions) if isinstance(versions, dict) else {}
        facts |= {name: run.summary.get(name) for name in _MADE_WITH}
        for name, value in facts.items():
            if value is not None:
                counts = table.setdefault(str(name), {})
                counts[str(value)] = counts.get(str(value), 0) + 1
    memory = [run.summary.get("peak_memory_bytes") for run in runs]
    if known := [size for size in memory if isinstance(size, int)]:
        table["peak memory"] = {f"{say_bytes(max(known))} at most": len(known)}
    return [(name, list(counts.items())) for name, counts in table.items()]


def recipes(runs: Sequence[Run]) -> list[Recipe]:
    """Return what makes the runs again; those without settings on record are left out.

    Runs that differ in method and seed alone share a settings file; methods that ran with the
    same seeds share a command.
    """
    shared: dict[str, list[Run]] = {}
    follows = partition_follows_seed(runs)
    for run in runs:
        if run.settings:
            shared.setdefault(write_toml(nest(_common(run, follows))), []).append(run)
    found = []
    for number, (settings, members) in enumerate(shared.items(), start=1):
        file = "settings.toml" if len(shared) == 1 else f"settings{number}.toml"
        found.append(Recipe(file, settings, tuple(_commands(members, file))))
    return found


def _common(run: Run, follows: bool) -> dict[str, Any]:
    """Return the settings without what the command line gives."""
    kept = {k: v for k, v in run.settings.items() if k not in ("method", "seed")}
    return kept | ({"partition.seed": -1} if follows and "partition.seed" in kept else {})


def _commands(runs: Sequence[Run], file: str) -> list[str]:
    seeds: dict[str, list[int]] = {}
    for run in runs:
        seeds.setdefault(str(run.settings.get("method", run.method)), []).append(run.seed)
    methods: dict[tuple[int, ...], list[str]] = {}
    for method, of_method in seeds.items():
        methods.setdefault(tuple(sorted(of_method)), []).append(method)
    return [
        shlex.join(["fedbasin", "compare", *named, "--seeds", _listed(given), "--config", file])
        for given, named in methods.items()
    ]


def _listed(seeds: Sequence[int]) -> str:
    return ",".join(map(str, seeds))
