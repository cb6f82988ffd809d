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
    Curves,
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
from fedbasin.core.figure_data import Bars, BarSeries, Cell, Numbers, Table

_FEW = 12  # at most so many layers are drawn one by one


@analysis(
    "shrinking",
    "Global weight shrinking: gamma, the two pulls, norms and parameters",
    "Li et al. (FedLAW), Figures 2-4 and 9-11",
)
def show_shrinking(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Draw what FedLAW recorded, and the norm and spread of parameters of any run."""
    gamma = Curves("gamma", "gamma")
    terms = Curves("the two pulls", "norm")
    ratio = Curves("ratio r", "|gamma g| / |(1 - gamma) w|", log_y=True)
    norms = Curves("norm of the model", "|w|")
    spread = Curves("parameters", "share of parameters", "value", log_y=True)
    models = [subject.last_model() for subject in subjects]
    reach = max(float(model.vector.abs().max()) for model in models)
    notes = []
    ratios: dict[str, Tensor] = {}
    for subject, model in zip(subjects, models, strict=True):
        name = label(subject, subjects)
        every = {r.round: r.model_norm for r in subject.records if r.model_norm is not None}
        norms.line(name, [*every], [*every.values()])
        distribution = histogram(model.vector, reach=reach)
        middle = (distribution.edges[:-1] + distribution.edges[1:]) / 2
        spread.line(name, middle, distribution.share)
        near = (
            f"{100 * distribution.near_zero:.1f} % of parameters within {reach / 100:.2g} of zero"
        )
        notes.append(f"{subject.name}, {model.name}: norm {distribution.norm:.4g}, {near}")
        if not any("gamma" in r.notes for r in subject.records):
            continue
        x, (gammas, gradients, recorded) = subject.notes("gamma", "gradient_norm", "ratio")
        before = numbers([every.get(int(round) - 1) for round in x])
        parts = pulls(*(torch.tensor(v, dtype=torch.float64) for v in (gammas, gradients, before)))
        gamma.line(name, x, gammas)
        terms.line(f"{name}, |gamma g|", x, parts.step)
        terms.line(f"{name}, |(1 - gamma) w|", x, parts.pull)
        ratio.line(name, x, recorded)
        notes.append(f"{name}: {_bounds(gammas, recorded)}")
        ratios[name] = torch.tensor([r for r in recorded if np.isfinite(r)], dtype=torch.float64)
    fitted = [gamma, terms, ratio, _distribution_of(ratios)] if ratios else []
    return Found([*fitted, norms, spread], notes)


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


def _distribution_of(ratios: dict[str, Tensor]) -> Curves:
    """Draw the distribution of r of each run over bins they share, up to the 95 % quantile."""
    curves = Curves("distribution of r", "share of rounds", "r")
    pooled = torch.cat([*ratios.values()])
    if len(pooled):
        edges = np.linspace(0, float(pooled.quantile(0.95)), 21)
        middle = (edges[:-1] + edges[1:]) / 2
        for name, one in ratios.items():
            curves.line(name, middle, np.histogram(one, edges)[0] / max(len(one), 1))
    return curves


@analysis(
    "neurons",
    "Neuron concentration (two reconstructions)",
    "Li et al. (FedWCM), Figures 3-7",
    uses=("rows",),
    needs=("class_labels",),
)
def show_neurons(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Draw both definitions over rounds, and every layer of each run."""
    means = {
        which: Curves(f"mean concentration {which} (reconstruction)", "concentration")
        for which in ("by class", "by mass")
    }
    panels = []
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
        for which, mean in means.items():
            layers = torch.stack(
                [one.by_class if which == "by class" else one.by_mass for one in concentrations]
            )
            mean.line(name, rounds, layers.nanmean(1))
            title = f"{name}: concentration {which}, layers (reconstruction)"
            curves = Curves(title, "concentration")
            for i, layer in enumerate(concentrations[0].layers[:_FEW]):
                curves.line(layer, rounds, layers[:, i])
            if len(curves.lines) > 1:  # one layer is its own mean
                panels.append(curves)
        notes.append(f"{subject.name}: {rows_note(evaluator, subject.data.test)}")
    return Found([*means.values(), *panels], notes)


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
    thirds = Curves("thirds", "mean accuracy of the classes")
    rows = []
    notes = []
    for subject in subjects:
        name = label(subject, subjects)
        counts = subject.data.counts.sum(0)
        tick = watch(f"classes, {name}", len(subject.snapshots.stored()) or 1)
        for model in subject.models():
            evaluator = ground_for(subject.data.test, subject, options, model.buffers, 0)
            answers = evaluator.task.answers(evaluator.outputs(model.vector[None])[0])
            accuracy = accuracy_by_class(answers, evaluator.labels, counts)
            for third, value in zip(THIRDS, accuracy.thirds, strict=True):
                thirds.point(f"{name}, {third}", model.round, value)
            tick(1)
        bars.append(BarSeries(name, numbers(accuracy.accuracy)))
        rows.append((name, *accuracy.thirds.tolist()))
        notes.append(
            f"{subject.name}, round {model.round}: {rows_note(evaluator, subject.data.test)}"
        )
    names = subjects[0].data.class_names
    return Found(
        [
            Bars("accuracy by class", "class", "accuracy", names, tuple(bars)),
            thirds,
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
    rows = Curves("cosine between classifier rows within a third", "mean cos(a_c, a_d)")
    align = Curves("classifier row and mean feature (NC3)", "mean cos")
    other = Curves("spread of class means", "NC1, NC2", log_y=True)
    for subject in subjects:
        name = label(subject, subjects)
        counts = subject.data.counts.sum(0)
        tick = watch(f"collapse, {name}", len(subject.snapshots.stored()) or 1)
        for model in subject.models():
            evaluator = ground_for(subject.data.test, subject, options, model.buffers, 0)
            vector = on_device(model.vector, evaluator)
            head = _head(evaluator, vector)
            features = _features(evaluator, vector)
            geometry = collapse(head, features, evaluator.labels, counts)
            for i, third in enumerate(THIRDS):
                rows.point(f"{name}, {third}", model.round, geometry.rows[i])
                align.point(f"{name}, {third}", model.round, geometry.align[i])
            other.point(f"{name}, spread (NC2)", model.round, geometry.spread)
            other.point(f"{name}, within (NC1)", model.round, geometry.within)
            tick(1)
    note = "towards 1 in the first panel: scarce classes collapse onto each other"
    return Found([rows, align, other], [note])


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
    raw = Curves(f"test {headline.name}", headline.name)
    smoothed = Curves("smoothed (Savitzky-Golay, 11, 2)", headline.name)
    rows: list[tuple[Cell, ...]] = []
    for subject, one in zip(subjects, statistics, strict=True):
        name = label(subject, subjects)
        raw.line(name, one.rounds, one.values)
        smoothed.line(name, one.rounds, one.smoothed)
        rows.append((name, one.final, one.rounds_to_target, one.roughness, one.drop, one.area))
    reached = "rounds to target" if target is None else f"rounds to {target:g}"
    worst = "largest drop" if headline.higher_is_better else "largest rise"
    columns = ("run", "final", reached, "roughness", worst, "area")
    panels: list[Curves | Table] = [raw, smoothed, Table("learning curves", columns, tuple(rows))]
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
