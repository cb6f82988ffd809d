"""Analyses of what a cohort sends back: decomposition, averaging, CKA, locality, coherence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fedbasin.analyze.coherence import (
    accumulate,
    correlate_weights,
    critical_round,
    gradient_coherence,
    group_coherence,
    heterogeneity_coherence,
)
from fedbasin.analyze.decomposition import (
    Factors,
    cka_matrix,
    decompose,
    ensemble_by_count,
    ensemble_gap,
    error_by_count,
    locality,
    mean_of_pairs,
    squared_error,
)
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
    rows_note,
    sampled,
    table,
)
from fedbasin.core.evaluator import Evaluator, Tick
from fedbasin.core.figure_data import (
    Bars,
    BarSeries,
    Grid,
    Mark,
    Panel,
    Table,
)
from fedbasin.core.rng import root
from fedbasin.core.snapshot import Snapshot
from fedbasin.core.vectors import shares


def _cohort(snapshot: Snapshot) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return start, models, weights and ids of a snapshot that holds clients' models."""
    start = snapshot.start
    models = snapshot.models
    weights = snapshot.weights
    clients = snapshot.clients
    assert start is not None and models is not None
    assert weights is not None and clients is not None
    return start, models, weights, clients


@analysis(
    "decomposition",
    "The loss of the averaged model in five factors",
    "Zhou et al. (IMA), Theorem 1 and Figures 2-3",
    uses=("rows", "draws"),
    needs=("classes",),
)
def show_decomposition(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Take the squared error of each kept round apart; draws are seeds, or late rounds of a run.

    Runs of different settings, such as schedules, are never draws of one another: each setting has
    its own lines, beside the test score of its first run.
    """
    tick = watch("decomposition", sum(len(s.snapshots.stored()) for s in subjects))
    headline = subjects[0].headline.name
    bias = Curves("bias of client models", "mean |y - E f|")
    away = Curves("locality", "max |w_k - w|")
    test = Curves(f"test {headline}", headline)
    bound = Curves("covariance and its lower bound", "sum")
    factors = []
    notes = []
    groups = _settings(subjects)
    for runs in groups:
        name = label(runs[0], [group[0] for group in groups])
        x, found, averaged, far, told = _decomposed(runs, options, tick)
        names = ("train_bias", "heter_bias", "cross", "variance", "covariance", "ensemble_loss")
        title = "factors of the squared error"
        parts = Curves(title + (f": {name}" if len(groups) > 1 else ""), "mean over rows")
        for n in names:
            parts.line(n.replace("_", " "), x, [getattr(f, n) for f in found])
        parts.line("averaged model's loss", x, averaged)
        factors.append(parts)
        bias.line(f"{name}, own rows (TrainBias)", x, [f.own_rows for f in found])
        bias.line(f"{name}, others' rows (HeterBias)", x, [f.other_rows for f in found])
        away.line(name, x, far)
        bound.line(f"{name}, covariance", x, [f.covariance for f in found])
        bound.line(f"{name}, least pair", x, [f.covariance_bound for f in found])
        scores = {r.round: r.metric(runs[0].headline.name) for r in runs[0].records}
        scored = [round for round, value in scores.items() if value is not None]
        test.line(name, scored, [scores[round] for round in scored])
        notes += [f"{name}: {one}" for one in told]
    return Found(
        [*factors, bias, away, test, bound],
        [
            *notes,
            "train bias + heter bias + cross + variance + covariance = ensemble loss, exactly",
            "lower bound: Corollary 1, the pair of clients with the least covariance, row by row",
        ],
    )


def _settings(subjects: Sequence[Subject]) -> list[list[Subject]]:
    """Group runs that differ in their seed alone."""
    groups: dict[str, list[Subject]] = {}
    for subject in subjects:
        groups.setdefault(subject.setting or subject.method, []).append(subject)
    return list(groups.values())


def _decomposed(
    runs: Sequence[Subject], options: Options, tick: Tick
) -> tuple[list[int], list[Factors], list[float], list[float], list[str]]:
    """Return rounds, factors, losses of the averaged model, locality and notes of one setting."""
    first = runs[0]
    whole = first.data.train
    rounds = []
    factors = []
    averaged = []
    far = []
    for window in _windows(runs, options.draws):
        _, models, weights, clients = _cohort(window[-1])
        evaluator, rows = sampled(whole, first, options, window[-1].buffers, 2000)
        own = first.data.owner.cpu()[rows] == clients[:, None]
        outputs = torch.stack([_probabilities(evaluator, _cohort(s)[1]) for s in window])
        labels = evaluator.labels.cpu()
        factors.append(decompose(outputs, labels, weights, own))
        mean = shares(weights).to(models.dtype) @ models
        averaged.append(squared_error(_probabilities(evaluator, mean[None])[0], labels))
        far.append(locality(models, mean, weights).farthest)
        rounds.append(window[-1].round)
        tick(1)
    count = len(window)
    what = "seeds" if len(runs) > 1 else "late rounds"
    few = "; with one draw variance and covariance are 0" if count == 1 else ""
    notes = [
        rows_note(evaluator, whole, "training"),
        f"expectation over {count} draws of each client's model ({what}){few}",
    ]
    return rounds, factors, averaged, far, notes


def _windows(subjects: Sequence[Subject], draws: int) -> Iterator[list[Snapshot]]:
    """Yield, for each kept round, the snapshots that are draws of the same clients' models."""
    rounds = [subject.snapshots.stored() for subject in subjects]
    if len(subjects) == 1:
        late = [rounds[0][i - draws + 1 : i + 1] for i in range(draws - 1, len(rounds[0]))]
        places = [[(subjects[0], round) for round in window] for window in late]
    else:
        common = sorted(set.intersection(*(set(found) for found in rounds)))
        places = [[(subject, round) for subject in subjects] for round in common]
    found = False
    for window in places:
        shots = [subject.snapshots.get(round) for subject, round in window]
        ids = [None if s.clients is None else s.clients.tolist() for s in shots]
        if ids[0] is not None and all(one == ids[0] for one in ids):
            found = True
            yield shots
    if not found:
        raise AnalysisError(
            "no kept round has the same clients in all draws; let all clients take part "
            "(sim.participation = 'fraction(rate=1)'), keep them (snapshots.clients) and keep the "
            "same rounds in all runs"
        )


@analysis(
    "averaging",
    "Error against the number of averaged client models, of their ensemble, and Lemma 1's gap",
    "Zhou et al. (IMA), Figure 4 and Lemma 1",
    uses=("count", "rows"),
    needs=("classes",),
)
def show_averaging(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Average random subsets of an early, a middle and the last kept cohort of each run."""
    means = Curves("averaged model", "test error", "averaged models")
    ensembles = Curves("ensemble of the same models", "test error", "models")
    gap_axis = "log10 of max |w_k - w| as deviations are halved"
    gaps = Curves("Lemma 1", "log10 of |ensemble - average|", gap_axis)
    notes = []
    for subject in subjects:
        name = label(subject, subjects)
        key = root(subject.seed).fold("averaging")
        for snapshot in subject.stages():
            _, models, weights, _ = _cohort(snapshot)
            evaluator = ground_for(subject.data.test, subject, options, snapshot.buffers, 2000)
            at = f"{name}, round {snapshot.round}"
            tick = watch(f"averaging, {at}", len(models) * (options.count + 6))
            mean = error_by_count(evaluator, models, weights, key, options.count, tick)
            ensemble = ensemble_by_count(evaluator, models, weights, key, options.count)
            gap = ensemble_gap(evaluator, models, weights, tick=tick)
            for curves, curve in ((means, mean), (ensembles, ensemble)):
                curves.line(at, curve.averaged, curve.mean, curve.low, curve.high)
            gaps.line(at, gap.distance.log10(), gap.gap.log10())
            notes += [
                f"{at}: {rows_note(evaluator, subject.data.test)}; error of one model "
                f"{float(mean.mean[0]):.3g}, of all averaged {float(mean.mean[-1]):.3g}",
                f"{at}: the gap falls as the distance to the power {gap.order:.2f}",
            ]
    last = gaps.lines[-1]
    gaps.line("slope 2", last.x, [last.y[-1] + 2 * (place - last.x[-1]) for place in last.x])
    return Found(
        [means, ensembles, gaps],
        [*notes, f"{options.count} random subsets of each size; the band is their range"],
    )


@analysis(
    "cka",
    "How alike the outputs of client models are",
    "Zhou et al. (IMA), Figure 4",
    uses=("rows",),
    needs=("classes",),
)
def show_cka(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Draw the mean linear CKA of client models over rounds, and each run's last matrix."""
    curves = Curves("mean CKA of pairs", "linear CKA")
    last = []
    notes = []
    for subject in subjects:
        name = label(subject, subjects)
        tick = watch(f"cka, {name}", len(subject.snapshots.stored()))
        for snapshot in subject.kept():
            evaluator = ground_for(subject.data.test, subject, options, snapshot.buffers, 1000)
            matrix = cka_matrix(_probabilities(evaluator, _cohort(snapshot)[1]))
            curves.point(name, snapshot.round, mean_of_pairs(matrix))
            tick(1)
        notes.append(f"{name}: {rows_note(evaluator, subject.data.test)}")
        ids = numbers(torch.arange(len(matrix)))
        title = f"linear CKA at round {snapshot.round}, {name}"
        last.append(Grid(title, "client of the cohort", "client", "CKA", ids, ids, table(matrix)))
    return Found([curves, *last], notes)


@analysis(
    "locality", "Distance of client models from the global one", "Zhou et al. (IMA), Figure 3"
)
def show_locality(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Draw the largest and the mean distance, and the cohort's divergence, over rounds."""
    far = Curves("locality", "|w_k - w|")
    spread = Curves("divergence of the newest models", "V")
    for subject in subjects:
        name = label(subject, subjects)
        for snapshot in subject.kept():
            _, models, weights, _ = _cohort(snapshot)
            distance = locality(models, snapshot.sent.to(models), weights)
            far.point(f"{name}, farthest", snapshot.round, distance.farthest)
            far.point(f"{name}, mean", snapshot.round, distance.mean)
            spread.point(name, snapshot.round, distance.divergence)
    return Found([far, spread])


@analysis(
    "selection",
    "Divergence and age of the models FedCDA picks",
    "Wang et al. (FedCDA), eq. 5-8",
)
def show_selection(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Draw what FedCDA recorded: V picked against V newest, age, share of older models."""
    spread = Curves("divergence", "V")
    ratio = Curves("V of the picked over V of the newest", "ratio")
    age = Curves("age of the picked models", "rounds")
    older = Curves("older than the newest", "share of the cohort")
    for subject in subjects:
        x, noted = subject.notes("divergence_newest", "divergence", "age", "older")
        name = label(subject, subjects)
        spread.line(f"{name}, newest models", x, noted[0])
        spread.line(f"{name}, picked models", x, noted[1])
        ratio.line(name, x, [b / a if a else 1.0 for a, b in zip(*noted[:2], strict=True)])
        age.line(name, x, noted[2])
        older.line(name, x, noted[3])
    return Found([spread, ratio, age, older])


@analysis(
    "coherence",
    "Do clients' updates and class mixes agree?",
    "Li et al. (FedLAW), Definitions 5.1-5.2 and Figures 5-7",
    uses=("groups",),
)
def show_coherence(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Draw gradient and heterogeneity coherence over the kept rounds."""
    cohort = Curves("coherence of the cohort", "c_cohort")
    mean = Curves("mean of pairs", "mean cos(g_i, g_j)")
    mixes = Curves("heterogeneity coherence", "similarity")
    groups = Curves("groups", "mean cos(g_i, g_j)")
    notes = []
    held: list[BarSeries] = []
    for subject in subjects:
        name = label(subject, subjects)
        learnt = {r.round: r.notes["lambdas"] for r in subject.records if "lambdas" in r.notes}
        rounds = []
        coherences = []
        grouped = []
        for snapshot in subject.kept():
            start, models, weights, clients = _cohort(snapshot)
            share = shares(weights)
            weighed = torch.tensor(learnt.get(snapshot.round, []), dtype=torch.float64)
            if weighed.shape == share.shape:  # fedcda(merge=fedlaw) weighs other clients too
                share = weighed
            coherences.append(gradient_coherence(start, models, share))
            cohort.point(name, snapshot.round, coherences[-1].cohort)
            mean.point(name, snapshot.round, coherences[-1].mean)
            if "class_labels" in subject.task.provides:
                overlap = heterogeneity_coherence(subject.data.counts, clients, share)
                mixes.point(f"{name}, 1 - TV", snapshot.round, overlap.one_minus_tv)
                mixes.point(f"{name}, cosine", snapshot.round, overlap.cosine)
            grouped.append(group_coherence(coherences[-1].pairs, clients.tolist(), options.groups))
            rounds.append(snapshot.round)
        for a, b in grouped[-1]:
            where = f"{name}, group {a + 1}" + ("" if a == b else f" with {b + 1}")
            groups.line(where, rounds, [one[a, b] for one in grouped])
        crossed = critical_round(rounds, [one.cohort for one in coherences])
        notes.append(f"{subject.name}: critical round {crossed or 'not reached'} (of those kept)")
        if crossed is not None:
            on_curve = coherences[rounds.index(crossed)].cohort
            cohort.marks.append(Mark(f"critical round, {name}", float(crossed), on_curve))
        if "class_labels" in subject.task.provides:
            held += _mixes(subject, name, clients, share, shares(weights))
    size = numbers(torch.arange(len(coherences[-1].pairs)))
    title = f"cos(g_i, g_j) at round {rounds[-1]}, {name}"
    panels: list[Panel | Curves] = [
        cohort,
        mean,
        *(curves for curves in (groups, mixes) if curves.lines),
        Grid(
            title, "client of the cohort", "client", "cos", size, size, table(coherences[-1].pairs)
        ),
    ]
    if held:
        everyone = shares(subject.data.counts.sum(0).cpu())
        every = (*held, BarSeries("all data", numbers(everyone)))
        classes = subject.data.class_names
        panels.append(Bars("class mix of the last cohort", "class", "share", classes, every))
    weights_note = "lambda: as learnt where the method records the cohort's, else by samples"
    return Found(panels, [*notes, weights_note])


def _mixes(
    subject: Subject, name: str, clients: Tensor, weighed: Tensor, by_samples: Tensor
) -> list[BarSeries]:
    """Return the class mix of a cohort by its weights, and by samples where these are others."""
    counts = subject.data.counts.double().cpu()[clients.cpu()]
    mixes = counts / counts.sum(1, keepdim=True).clamp(min=1)
    series = [BarSeries(f"{name}, as weighed", numbers(weighed.double().cpu() @ mixes))]
    if not torch.allclose(weighed.double().cpu(), by_samples.double().cpu()):
        series.append(BarSeries(f"{name}, by samples", numbers(by_samples.double().cpu() @ mixes)))
    return series


@analysis(
    "lambdas",
    "Learnt weights of clients, and their sum gamma, over rounds",
    "Li et al. (FedLAW), Figure 5 right",
    uses=("groups",),
)
def show_lambdas(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Draw gamma, and each client's lambda or the mean of each group, over rounds."""
    gammas = Curves("gamma", "gamma")
    panels = []
    notes = []
    for subject in subjects:
        name = label(subject, subjects)
        records = subject.noted("lambdas")
        cohorts = [subject.data.cohort(r.round).tolist() for r in records]
        lambdas = [np.atleast_1d(r.notes["lambdas"]).tolist() for r in records]
        told = [dict(zip(c, w, strict=True)) for c, w in zip(cohorts, lambdas, strict=True)]
        if any("gamma" in r.notes for r in records):
            at, (values,) = subject.notes("gamma")
            gammas.line(name, at, values)
        every = sorted({client for one in told for client in one})
        groups = options.groups or tuple(frozenset({client}) for client in every)
        title = "mean lambda of each group" if options.groups else "lambda of each client"
        curves = Curves(f"{title}: {name}", "lambda")
        for place, group in enumerate(groups, start=1):
            which = f"group {place}" if options.groups else f"client {min(group)}"
            curves.line(which, [r.round for r in records], [_mean_of(one, group) for one in told])
        panels.append(curves)
        count = sum(len(one) for one in told) / len(told)
        notes.append(f"{name}: an even share is 1 / {count:.3g} = {1 / count:.3g}")
    return Found([*([gammas] if gammas.lines else []), *panels], notes)


def _mean_of(told: dict[int, float], group: frozenset[int]) -> float:
    """Return the mean weight of a group's clients in a round; NaN where none took part."""
    values = [weight for client, weight in told.items() if client in group]
    return float(np.mean(values)) if values else float("nan")


@analysis(
    "pearson",
    "Learnt weights against size and balance of clients",
    "Li et al. (FedLAW), Table 11",
    needs=("class_labels",),
)
def show_pearson(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Correlate each run's accumulated weights, and those of all runs together."""
    rows = []
    every = []
    for subject in subjects:
        records = subject.noted("lambdas")
        counts = subject.data.counts.cpu().numpy()
        cohorts = [subject.data.cohort(r.round) for r in records]
        lambdas = [np.atleast_1d(r.notes["lambdas"]).tolist() for r in records]
        total = accumulate(len(counts), cohorts, lambdas)
        every.append((total, counts))
        rows.append((label(subject, subjects), *correlate_weights(total, counts)))
    if len({counts.shape[1] for _, counts in every}) == 1 and len(every) > 1:
        pooled = [np.concatenate(part) for part in zip(*every, strict=True)]
        rows.append(("all runs together", *correlate_weights(pooled[0], pooled[1])))
    columns = ("run", "size n_i", "balance 1/var(p_i)", "product", "clients")
    return Found(
        [Table("Pearson's r of the accumulated weight", columns, tuple(rows))],
        ["clients that never took part or hold all classes equally are left out"],
    )


def _probabilities(evaluator: Evaluator, models: Tensor) -> Tensor:
    """Return class probabilities [M, n, classes] in float64 on the host."""
    return evaluator.outputs(models).double().softmax(-1).cpu()
