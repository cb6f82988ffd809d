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
    mean_of_pairs,
    squared_error,
)
from fedbasin.analyze.distance import locality
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
    rows_note,
    sampled,
    table,
)
from fedbasin.core.evaluator import Evaluator, Tick
from fedbasin.core.figure_data import (
    Bars,
    BarSeries,
    Grid,
    Line,
    Lines,
    Mark,
    Numbers,
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
    panels: dict[str, list[Line]] = {title: [] for title in ("bias", "locality", "test", "bound")}
    factors: list[Panel] = []
    notes = []
    groups = _settings(subjects)
    for runs in groups:
        name = label(runs[0], [group[0] for group in groups])
        x, found, averaged, far, told = _decomposed(runs, options, tick)
        names = ("train_bias", "heter_bias", "cross", "variance", "covariance", "ensemble_loss")
        parts = [Line(n.replace("_", " "), x, tuple(getattr(f, n) for f in found)) for n in names]
        parts.append(Line("averaged model's loss", x, averaged))
        title = "factors of the squared error"
        title += f": {name}" if len(groups) > 1 else ""
        factors.append(Lines(title, "round", "mean over rows", tuple(parts)))
        panels["bias"] += [
            Line(f"{name}, own rows (TrainBias)", x, tuple(f.own_rows for f in found)),
            Line(f"{name}, others' rows (HeterBias)", x, tuple(f.other_rows for f in found)),
        ]
        panels["locality"].append(Line(name, x, far))
        panels["bound"] += [
            Line(f"{name}, covariance", x, tuple(f.covariance for f in found)),
            Line(f"{name}, least pair", x, tuple(f.covariance_bound for f in found)),
        ]
        scored = [(r.round, r.metric(runs[0].headline.name)) for r in runs[0].records]
        kept = [(float(round), float(value)) for round, value in scored if value is not None]
        panels["test"].append(Line(name, tuple(r for r, _ in kept), tuple(v for _, v in kept)))
        notes += [f"{name}: {one}" for one in told]
    headline = subjects[0].headline.name
    return Found(
        [
            *factors,
            Lines("bias of client models", "round", "mean |y - E f|", tuple(panels["bias"])),
            Lines("locality", "round", "max |w_k - w|", tuple(panels["locality"])),
            Lines(f"test {headline}", "round", headline, tuple(panels["test"])),
            Lines("covariance and its lower bound", "round", "sum", tuple(panels["bound"])),
        ],
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
) -> tuple[Numbers, list[Factors], Numbers, Numbers, list[str]]:
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
        rounds.append(float(window[-1].round))
        tick(1)
    count = len(window)
    what = "seeds" if len(runs) > 1 else "late rounds"
    few = "; with one draw variance and covariance are 0" if count == 1 else ""
    notes = [
        rows_note(evaluator, whole, "training"),
        f"expectation over {count} draws of each client's model ({what}){few}",
    ]
    return tuple(rounds), factors, tuple(averaged), tuple(far), notes


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
    means: list[Line] = []
    ensembles: list[Line] = []
    gaps = []
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
                band = (numbers(curve.low), numbers(curve.high))
                curves.append(Line(at, numbers(curve.averaged), numbers(curve.mean), *band))
            gaps.append(Line(at, numbers(gap.distance.log10()), numbers(gap.gap.log10())))
            notes += [
                f"{at}: {rows_note(evaluator, subject.data.test)}; error of one model "
                f"{float(mean.mean[0]):.3g}, of all averaged {float(mean.mean[-1]):.3g}",
                f"{at}: the gap falls as the distance to the power {gap.order:.2f}",
            ]
    last = gaps[-1]
    straight = tuple(last.y[-1] + 2 * (place - last.x[-1]) for place in last.x)
    square = Line("slope 2", last.x, straight)
    gap_axis = "log10 of max |w_k - w| as deviations are halved"
    return Found(
        [
            Lines("averaged model", "averaged models", "test error", tuple(means)),
            Lines("ensemble of the same models", "models", "test error", tuple(ensembles)),
            Lines("Lemma 1", gap_axis, "log10 of |ensemble - average|", (*gaps, square)),
        ],
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
    curves = []
    last = []
    notes = []
    for subject in subjects:
        tick = watch(f"cka, {label(subject, subjects)}", len(subject.snapshots.stored()))
        rounds = []
        means = []
        for snapshot in subject.kept():
            evaluator = ground_for(subject.data.test, subject, options, snapshot.buffers, 1000)
            matrix = cka_matrix(_probabilities(evaluator, _cohort(snapshot)[1]))
            rounds.append(float(snapshot.round))
            means.append(mean_of_pairs(matrix))
            tick(1)
        name = label(subject, subjects)
        curves.append(Line(name, tuple(rounds), tuple(means)))
        notes.append(f"{name}: {rows_note(evaluator, subject.data.test)}")
        ids = numbers(torch.arange(len(matrix)))
        title = f"linear CKA at round {snapshot.round}, {name}"
        last.append(Grid(title, "client of the cohort", "client", "CKA", ids, ids, table(matrix)))
    return Found([Lines("mean CKA of pairs", "round", "linear CKA", tuple(curves)), *last], notes)


@analysis(
    "locality", "Distance of client models from the global one", "Zhou et al. (IMA), Figure 3"
)
def show_locality(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Draw the largest and the mean distance, and the cohort's divergence, over rounds."""
    far = []
    spread = []
    for subject in subjects:
        distances = [
            (float(s.round), locality(_cohort(s)[1], s.sent.to(_cohort(s)[1]), _cohort(s)[2]))
            for s in subject.kept()
        ]
        x = tuple(r for r, _ in distances)
        name = label(subject, subjects)
        far.append(Line(f"{name}, farthest", x, tuple(one.farthest for _, one in distances)))
        far.append(Line(f"{name}, mean", x, tuple(one.mean for _, one in distances)))
        spread.append(Line(name, x, tuple(one.divergence for _, one in distances)))
    return Found(
        [
            Lines("locality", "round", "|w_k - w|", tuple(far)),
            Lines("divergence of the newest models", "round", "V", tuple(spread)),
        ]
    )


@analysis(
    "selection",
    "Divergence and age of the models FedCDA picks",
    "Wang et al. (FedCDA), eq. 5-8",
)
def show_selection(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Draw what FedCDA recorded: V picked against V newest, age, share of older models."""
    spread = []
    ratio = []
    age = []
    older = []
    for subject in subjects:
        x, noted = subject.notes("divergence_newest", "divergence", "age", "older")
        name = label(subject, subjects)
        spread.append(Line(f"{name}, newest models", x, noted[0]))
        spread.append(Line(f"{name}, picked models", x, noted[1]))
        ratio.append(
            Line(name, x, tuple(b / a if a else 1.0 for a, b in zip(*noted[:2], strict=True)))
        )
        age.append(Line(name, x, noted[2]))
        older.append(Line(name, x, noted[3]))
    return Found(
        [
            Lines("divergence", "round", "V", tuple(spread)),
            Lines("V of the picked over V of the newest", "round", "ratio", tuple(ratio)),
            Lines("age of the picked models", "round", "rounds", tuple(age)),
            Lines("older than the newest", "round", "share of the cohort", tuple(older)),
        ]
    )


@analysis(
    "coherence",
    "Do clients' updates and class mixes agree?",
    "Li et al. (FedLAW), Definitions 5.1-5.2 and Figures 5-7",
    uses=("groups",),
)
def show_coherence(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Draw gradient and heterogeneity coherence over the kept rounds."""
    cohort = []
    mean = []
    mixes = []
    groups = []
    notes = []
    marks = []
    held: list[BarSeries] = []
    for subject in subjects:
        name = label(subject, subjects)
        learnt = {r.round: r.notes["lambdas"] for r in subject.records if "lambdas" in r.notes}
        rounds = []
        coherences = []
        overlap = []
        grouped = []
        for snapshot in subject.kept():
            start, models, weights, clients = _cohort(snapshot)
            share = shares(weights)
            weighed = torch.tensor(learnt.get(snapshot.round, []), dtype=torch.float64)
            if weighed.shape == share.shape:  # fedcda(merge=fedlaw) weighs other clients too
                share = weighed
            coherences.append(gradient_coherence(start, models, share))
            if "class_labels" in subject.task.provides:
                overlap.append(heterogeneity_coherence(subject.data.counts, clients, share))
            grouped.append(group_coherence(coherences[-1].pairs, clients.tolist(), options.groups))
            rounds.append(snapshot.round)
        x = numbers(rounds)
        cohort.append(Line(name, x, tuple(one.cohort for one in coherences)))
        mean.append(Line(name, x, tuple(one.mean for one in coherences)))
        if overlap:
            mixes.append(Line(f"{name}, 1 - TV", x, tuple(one.one_minus_tv for one in overlap)))
            mixes.append(Line(f"{name}, cosine", x, tuple(one.cosine for one in overlap)))
        for a, b in grouped[-1]:
            where = f"{name}, group {a + 1}" + ("" if a == b else f" with {b + 1}")
            groups.append(Line(where, x, tuple(one[a, b] for one in grouped)))
        crossed = critical_round(rounds, [one.cohort for one in coherences])
        notes.append(f"{subject.name}: critical round {crossed or 'not reached'} (of those kept)")
        if crossed is not None:
            on_curve = coherences[rounds.index(crossed)].cohort
            marks.append(Mark(f"critical round, {name}", float(crossed), on_curve))
        if overlap:
            held += _mixes(subject, name, clients, share, shares(weights))
    size = numbers(torch.arange(len(coherences[-1].pairs)))
    title = f"cos(g_i, g_j) at round {rounds[-1]}, {name}"
    panels: list[Panel] = [
        Lines("coherence of the cohort", "round", "c_cohort", tuple(cohort), tuple(marks)),
        Lines("mean of pairs", "round", "mean cos(g_i, g_j)", tuple(mean)),
        *([Lines("groups", "round", "mean cos(g_i, g_j)", tuple(groups))] if groups else []),
        *([Lines("heterogeneity coherence", "round", "similarity", tuple(mixes))] if mixes else []),
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
    gammas = []
    panels: list[Panel] = []
    notes = []
    for subject in subjects:
        name = label(subject, subjects)
        records = subject.noted("lambdas")
        cohorts = [subject.data.cohort(r.round).tolist() for r in records]
        lambdas = [np.atleast_1d(r.notes["lambdas"]).tolist() for r in records]
        told = [dict(zip(c, w, strict=True)) for c, w in zip(cohorts, lambdas, strict=True)]
        x = numbers([r.round for r in records])
        if any("gamma" in r.notes for r in records):
            at, (values,) = subject.notes("gamma")
            gammas.append(Line(name, at, values))
        every = sorted({client for one in told for client in one})
        groups = options.groups or tuple(frozenset({client}) for client in every)
        lines = []
        for place, group in enumerate(groups, start=1):
            said = f"group {place}" if options.groups else f"client {min(group)}"
            lines.append(Line(said, x, tuple(_mean_of(one, group) for one in told)))
        title = "mean lambda of each group" if options.groups else "lambda of each client"
        panels.append(Lines(f"{title}: {name}", "round", "lambda", tuple(lines)))
        count = sum(len(one) for one in told) / len(told)
        notes.append(f"{name}: an even share is 1 / {count:.3g} = {1 / count:.3g}")
    if gammas:
        panels.insert(0, Lines("gamma", "round", "gamma", tuple(gammas)))
    return Found(panels, notes)


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
