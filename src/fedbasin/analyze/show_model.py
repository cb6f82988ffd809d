"""Analyses of single models and of records: shrinking, neurons, classes, collapse, curves."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from fedbasin.analyze.classes import THIRDS, accuracy_by_class, collapse
from fedbasin.analyze.learning import CurveStatistics, curve_statistics, participation_equivalent
from fedbasin.analyze.neurons import neuron_concentration
from fedbasin.analyze.shrinking import histogram, pulls
from fedbasin.analyze.subject import (
    AnalysisError,
    Found,
    Options,
    Subject,
    Watch,
    analysis,
    ground_for,
    label,
    numbers,
    on_device,
    rows_note,
)
from fedbasin.core.evaluator import Evaluator
from fedbasin.core.figure_data import Bars, BarSeries, Cell, Line, Lines, Numbers, Panel, Table

_FEW = 12  # at most so many layers are drawn one by one


@analysis(
    "shrinking",
    "Global weight shrinking: gamma, the two pulls, norms and parameters",
    "Li et al. (FedLAW), Figures 2-4 and 9-11",
)
def show_shrinking(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Draw what FedLAW recorded, and the norm and spread of parameters of any run."""
    gamma = []
    terms = []
    ratio = []
    norms = []
    spread = []
    models = [subject.last_model() for subject in subjects]
    reach = max(float(model.vector.abs().max()) for model in models)
    notes = []
    ratios: dict[str, Tensor] = {}
    for subject, model in zip(subjects, models, strict=True):
        name = label(subject, subjects)
        every = {r.round: r.model_norm for r in subject.records if r.model_norm is not None}
        norms.append(Line(name, numbers(list(every)), numbers(list(every.values()))))
        distribution = histogram(model.vector, reach=reach)
        middle = (distribution.edges[:-1] + distribution.edges[1:]) / 2
        spread.append(Line(name, numbers(middle), numbers(distribution.share)))
        near = (
            f"{100 * distribution.near_zero:.1f} % of parameters within {reach / 100:.2g} of zero"
        )
        notes.append(f"{subject.name}, {model.name}: norm {distribution.norm:.4g}, {near}")
        if not any("gamma" in r.notes for r in subject.records):
            continue
        x, (gammas, gradients, recorded) = subject.notes("gamma", "gradient_norm", "ratio")
        before = numbers([every.get(int(round) - 1) for round in x])
        parts = pulls(*(torch.tensor(v, dtype=torch.float64) for v in (gammas, gradients, before)))
        gamma.append(Line(name, x, gammas))
        terms.append(Line(f"{name}, |gamma g|", x, numbers(parts.step)))
        terms.append(Line(f"{name}, |(1 - gamma) w|", x, numbers(parts.pull)))
        ratio.append(Line(name, x, recorded))
        notes.append(f"{name}: {_bounds(gammas, recorded)}")
        ratios[name] = torch.tensor([r for r in recorded if np.isfinite(r)], dtype=torch.float64)
    panels: list[Panel] = []
    if gamma:
        panels = [
            Lines("gamma", "round", "gamma", tuple(gamma)),
            Lines("the two pulls", "round", "norm", tuple(terms)),
            Lines("ratio r", "round", "|gamma g| / |(1 - gamma) w|", tuple(ratio), log_y=True),
            Lines("distribution of r", "r", "share of rounds", _spread_of(ratios)),
        ]
    panels += [
        Lines("norm of the model", "round", "|w|", tuple(norms)),
        Lines("parameters", "value", "share of parameters", tuple(spread), log_y=True),
    ]
    return Found(panels, notes)


def _bounds(gammas: Numbers, ratios: Numbers) -> str:
    """Say in how many rounds gamma stays at 1, and in how many the guard holds r at its least."""
    still = sum(gamma == 1 for gamma in gammas)
    told = f"gamma is 1 in {still} of {len(gammas)} rounds (not fitted there, or not moved)"
    finite = [r for r in ratios if np.isfinite(r)]
    least = min(finite, default=0.0)
    held = sum(r <= least * (1 + 1e-3) for r in finite)
    if held > 1:
        told += f"; the guard binds in {held}, where r is {least:.3g}"
    return f"{told}; above 1 in {sum(gamma > 1 for gamma in gammas)}"


def _spread_of(ratios: dict[str, Tensor]) -> tuple[Line, ...]:
    """Return the distribution of r of each run over bins they share, up to the 95 % quantile."""
    pooled = torch.cat([*ratios.values()])
    if not len(pooled):
        return ()
    edges = np.linspace(0, float(pooled.quantile(0.95)), 21)
    middle = numbers((edges[:-1] + edges[1:]) / 2)
    return tuple(
        Line(name, middle, numbers(np.histogram(one, edges)[0] / max(len(one), 1)))
        for name, one in ratios.items()
    )


@analysis(
    "neurons",
    "Neuron concentration (two reconstructions)",
    "Li et al. (FedWCM), Figures 3-7",
    uses=("rows",),
    needs=("class_labels",),
)
def show_neurons(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Draw both definitions over rounds, and every layer of each run."""
    means: dict[str, list[Line]] = {"by class": [], "by mass": []}
    panels: list[Panel] = []
    notes = ["RECONSTRUCTION: the paper's definition is not at hand"]
    for subject in subjects:
        name = label(subject, subjects)
        rounds = []
        concentrations = []
        tick = watch(f"neurons, {name}", len(subject.snapshots.stored()) or 1)
        for model in subject.models():
            evaluator = ground_for(subject.data.test, subject, options, model.buffers, 2000)
            concentrations.append(
                neuron_concentration(evaluator, on_device(model.vector, evaluator))
            )
            rounds.append(model.round)
            tick(1)
        x = numbers(rounds)
        for which, lines in means.items():
            layers = torch.stack(
                [one.by_class if which == "by class" else one.by_mass for one in concentrations]
            )
            lines.append(Line(name, x, numbers(layers.nanmean(1))))
            shown = concentrations[0].layers[:_FEW]
            curves = [Line(n, x, numbers(layers[:, i])) for i, n in enumerate(shown)]
            title = f"{name}: concentration {which}, layers (reconstruction)"
            if len(curves) > 1:  # one layer is its own mean
                panels.append(Lines(title, "round", "concentration", tuple(curves)))
        notes.append(f"{subject.name}: {rows_note(evaluator, subject.data.test)}")
    tops = [
        Lines(
            f"mean concentration {which} (reconstruction)", "round", "concentration", tuple(lines)
        )
        for which, lines in means.items()
    ]
    return Found([*tops, *panels], notes)


@analysis(
    "classes",
    "Accuracy by class, and of head, middle and tail classes",
    "for Li et al. (FedWCM)",
    uses=("rows",),
    needs=("class_labels",),
)
def show_classes(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Draw the last accuracy of each class, and the thirds over the kept rounds."""
    bars = []
    over_rounds = []
    rows = []
    notes = []
    for subject in subjects:
        name = label(subject, subjects)
        counts = subject.data.counts.sum(0)
        tick = watch(f"classes, {name}", len(subject.snapshots.stored()) or 1)
        rounds = []
        accuracies = []
        for model in subject.models():
            evaluator = ground_for(subject.data.test, subject, options, model.buffers, 0)
            answers = evaluator.task.answers(evaluator.outputs(model.vector[None])[0])
            accuracies.append(accuracy_by_class(answers, evaluator.labels, counts))
            rounds.append(model.round)
            tick(1)
        bars.append(BarSeries(name, numbers(accuracies[-1].accuracy)))
        rows.append((name, *accuracies[-1].thirds.tolist()))
        for i, third in enumerate(THIRDS):
            values = tuple(float(one.thirds[i]) for one in accuracies)
            over_rounds.append(Line(f"{name}, {third}", numbers(rounds), values))
        notes.append(
            f"{subject.name}, round {rounds[-1]}: {rows_note(evaluator, subject.data.test)}"
        )
    names = subjects[0].data.class_names
    return Found(
        [
            Bars("accuracy by class", "class", "accuracy", names, tuple(bars)),
            Lines("thirds", "round", "mean accuracy of the classes", tuple(over_rounds)),
            Table("last kept round", ("run", *THIRDS), tuple(rows)),
        ],
        [*notes, "thirds: classes ordered by their training rows, most first"],
    )


@analysis(
    "collapse",
    "Minority collapse: how classifier rows and features are placed",
    "for Li et al. (FedWCM); neural collapse NC1-NC3",
    uses=("rows",),
    needs=("classes",),
)
def show_collapse(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Draw cosines of classifier rows and features over the kept rounds."""
    rows = []
    align = []
    other = []
    for subject in subjects:
        name = label(subject, subjects)
        counts = subject.data.counts.sum(0)
        tick = watch(f"collapse, {name}", len(subject.snapshots.stored()) or 1)
        rounds = []
        collapses = []
        for model in subject.models():
            evaluator = ground_for(subject.data.test, subject, options, model.buffers, 0)
            vector = on_device(model.vector, evaluator)
            head = _head(evaluator, vector)
            features = _features(evaluator, vector)
            collapses.append(collapse(head, features, evaluator.labels, counts))
            rounds.append(model.round)
            tick(1)
        x = numbers(rounds)
        for i, third in enumerate(THIRDS):
            rows.append(Line(f"{name}, {third}", x, tuple(float(f.rows[i]) for f in collapses)))
            align.append(Line(f"{name}, {third}", x, tuple(float(f.align[i]) for f in collapses)))
        other.append(Line(f"{name}, spread (NC2)", x, tuple(f.spread for f in collapses)))
        other.append(Line(f"{name}, within (NC1)", x, tuple(f.within for f in collapses)))
    title = "cosine between classifier rows within a third"
    return Found(
        [
            Lines(title, "round", "mean cos(a_c, a_d)", tuple(rows)),
            Lines("classifier row and mean feature (NC3)", "round", "mean cos", tuple(align)),
            Lines("spread of class means", "round", "NC1, NC2", tuple(other), log_y=True),
        ],
        ["towards 1 in the first panel: scarce classes collapse onto each other"],
    )


def _head(evaluator: Evaluator, vector: Tensor) -> Tensor:
    views = evaluator.net.layout.views(vector)
    found = [views[n] for n in evaluator.net.layout.head if views[n].dim() == 2]
    if len(found) != 1 or len(found[0]) != evaluator.classes:
        raise AnalysisError("collapse needs a network that ends in one linear layer of all classes")
    return found[0]


@torch.no_grad()
def _features(evaluator: Evaluator, vector: Tensor) -> Tensor:
    parts = []
    for cut in evaluator.cuts():
        inputs = evaluator.transform(evaluator.inputs[cut], None)
        features = evaluator.net(vector, inputs, evaluator.buffers).features
        if features is None:
            raise AnalysisError("collapse needs a network with `features` and `head`")
        parts.append(features)
    return torch.cat(parts)


@analysis(
    "curves",
    "Learning curves in numbers, and participation that ends as well",
    "Zhou et al. (IMA), Figure 7 and Table 2; Caldarola et al. (WIMA), Figures 1 and 3",
    uses=("target",),
)
def show_curves(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Describe learning curves; the first run's method is the reference for participation."""
    headline = subjects[0].headline
    target = headline.usual_target if options.target is None else options.target
    statistics = [curve_statistics(s.records, target, s.headline) for s in subjects]
    raw = []
    smoothed = []
    rows: list[tuple[Cell, ...]] = []
    for subject, one in zip(subjects, statistics, strict=True):
        name = label(subject, subjects)
        raw.append(Line(name, numbers(one.rounds), numbers(one.values)))
        smoothed.append(Line(name, numbers(one.rounds), numbers(one.smoothed)))
        rows.append((name, one.final, one.rounds_to_target, one.roughness, one.drop, one.area))
    reached = "rounds to target" if target is None else f"rounds to {target:g}"
    worst = "largest drop" if headline.higher_is_better else "largest rise"
    columns = ("run", "final", reached, "roughness", worst, "area")
    panels: list[Panel] = [
        Lines(f"test {headline.name}", "round", headline.name, tuple(raw)),
        Lines("smoothed (Savitzky-Golay, 11, 2)", "round", headline.name, tuple(smoothed)),
        Table("learning curves", columns, tuple(rows)),
    ]
    equal = _participation(subjects, statistics)
    if equal:
        needs = f"{subjects[0].method} needs"
        heads = ("method", "clients a round", "final", needs, "ratio")
        panels.append(Table("participation that ends as well", heads, tuple(equal)))
    return Found(panels, ["final: mean of the last 10 rounds"])


def _participation(
    subjects: Sequence[Subject], statistics: Sequence[CurveStatistics]
) -> list[tuple[Cell, ...]]:
    """Compare every other method with the first one over the participations that it ran with."""
    ends: dict[tuple[str, float], list[float]] = {}
    for subject, one in zip(subjects, statistics, strict=True):
        if one.final is not None:
            cohort = round(fmean(r.replies + r.dropped for r in subject.records), 1)
            ends.setdefault((subject.method, cohort), []).append(one.final)
    means = {key: fmean(values) for key, values in ends.items()}
    reference = {clients: end for (m, clients), end in means.items() if m == subjects[0].method}
    if len(reference) < 2:
        return []
    rows: list[tuple[Cell, ...]] = []
    for (method, clients), end in means.items():
        if method != subjects[0].method:
            needs = participation_equivalent(
                [*reference],
                [*reference.values()],
                end,
                higher_is_better=subjects[0].headline.higher_is_better,
            )
            more: Cell = f"more than {max(reference):g}" if needs is None else needs
            rows.append((method, clients, end, more, None if needs is None else needs / clients))
    return rows
