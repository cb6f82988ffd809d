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
from fedbasin.core.evaluator import Evaluator
from fedbasin.core.figure_data import Grid, Line, Lines, Mark, Panel, Table
from fedbasin.core.rng import root
from fedbasin.core.snapshot import Snapshot
from fedbasin.core.vectors import shares


def _cohort(snapshot: Snapshot) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return start, models, weights and ids of a snapshot that holds clients' models."""
    start, models, weights, clients = (
        snapshot.start, snapshot.models, snapshot.weights, snapshot.clients,
    )  # fmt: skip
    assert start is not None and models is not None
    assert weights is not None and clients is not None
    return start, models, weights, clients


@analysis(
    "decomposition",
    "The loss of the averaged model in five factors",
    "Zhou et al. (IMA), Theorem 1 and Figures 2-3",
    uses=("rows", "draws"),
    needs="classes",
)
def show_decomposition(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Take the squared error of each kept round apart; draws are runs, or late rounds of one."""
    first = subjects[0]
    tick = watch("decomposition", len(first.snapshots.stored()))
    rounds, factors, averaged, far = [], list[Factors](), [], []
    whole = first.data.train
    for window in _windows(subjects, options.draws):
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
    x = tuple(rounds)
    names = ("train_bias", "heter_bias", "cross", "variance", "covariance", "ensemble_loss")
    parts = [Line(n.replace("_", " "), x, tuple(getattr(f, n) for f in factors)) for n in names]
    parts.append(Line("averaged model's loss", x, tuple(averaged)))
    bias = (
        Line("own rows (TrainBias)", x, tuple(f.own_rows for f in factors)),
        Line("others' rows (HeterBias)", x, tuple(f.other_rows for f in factors)),
    )
    count = len(window)
    what = "runs" if len(subjects) > 1 else "late rounds"
    few = "; with one draw variance and covariance are 0" if count == 1 else ""
    return Found(
        [
            Lines("factors of the squared error", "round", "mean over rows", tuple(parts)),
            Lines("bias of client models", "round", "mean |y - E f|", bias),
            Lines("locality", "round", "max |w_k - w|", (Line("farthest", x, tuple(far)),)),
        ],
        [
            rows_note(evaluator, whole, "training"),
            f"expectation over {count} draws of each client's model ({what}){few}",
            "train bias + heter bias + cross + variance + covariance = ensemble loss, exactly",
        ],
    )


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
    needs="classes",
)
def show_averaging(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Average random subsets of the last kept cohort of each run."""
    curves, gaps, notes = [], [], []
    for subject in subjects:
        snapshot, name = subject.last_cohort(), label(subject, subjects)
        _, models, weights, _ = _cohort(snapshot)
        evaluator = ground_for(subject.data.test, subject, options, snapshot.buffers, 2000)
        tick = watch(f"averaging, {name}", len(models) * (options.count + 6))
        key = root(subject.seed).fold("averaging")
        mean = error_by_count(evaluator, models, weights, key, options.count, tick)
        ensemble = ensemble_by_count(evaluator, models, weights, key, options.count)
        gap = ensemble_gap(evaluator, models, weights, tick=tick)
        for what, found in ((name, mean), (f"{name}, ensemble", ensemble)):
            band = (numbers(found.low), numbers(found.high))
            curves.append(Line(what, numbers(found.averaged), numbers(found.mean), *band))
        gaps.append(Line(name, numbers(gap.distance), numbers(gap.gap)))
        notes += [
            f"{subject.name}: round {snapshot.round}, {rows_note(evaluator, subject.data.test)}",
            f"{subject.name}: the gap falls as the distance to the power {gap.order:.2f}",
        ]
    gap_axis = "max |w_k - w| as deviations are halved"
    return Found(
        [
            Lines("test error", "averaged models", "test error", tuple(curves)),
            Lines("Lemma 1", gap_axis, "|ensemble - average|", tuple(gaps), log_y=True),
        ],
        [*notes, f"{options.count} random subsets of each size; the band is their range"],
    )


@analysis(
    "cka",
    "How alike the outputs of client models are",
    "Zhou et al. (IMA), Figure 4",
    uses=("rows",),
    needs="classes",
)
def show_cka(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Draw the mean linear CKA of client models over rounds, and the last matrix."""
    curves, notes = [], []
    for subject in subjects:
        tick = watch(f"cka, {label(subject, subjects)}", len(subject.snapshots.stored()))
        rounds, means = [], []
        for snapshot in subject.kept():
            evaluator = ground_for(subject.data.test, subject, options, snapshot.buffers, 1000)
            matrix = cka_matrix(_probabilities(evaluator, _cohort(snapshot)[1]))
            rounds.append(float(snapshot.round))
            means.append(mean_of_pairs(matrix))
            tick(1)
        curves.append(Line(label(subject, subjects), tuple(rounds), tuple(means)))
        notes.append(f"{subject.name}: {rows_note(evaluator, subject.data.test)}")
    ids = numbers(torch.arange(len(matrix)))
    title = f"linear CKA at round {snapshot.round}, {label(subject, subjects)}"
    return Found(
        [
            Lines("mean CKA of pairs", "round", "linear CKA", tuple(curves)),
            Grid(title, "client of the cohort", "client", "CKA", ids, ids, table(matrix)),
        ],
        notes,
    )


@analysis(
    "locality", "Distance of client models from the global one", "Zhou et al. (IMA), Figure 3"
)
def show_locality(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Draw the largest and the mean distance, and the cohort's divergence, over rounds."""
    far, spread = [], []
    for subject in subjects:
        found = [
            (float(s.round), locality(_cohort(s)[1], s.sent.to(_cohort(s)[1]), _cohort(s)[2]))
            for s in subject.kept()
        ]
        x, name = tuple(r for r, _ in found), label(subject, subjects)
        far.append(Line(f"{name}, farthest", x, tuple(one.farthest for _, one in found)))
        far.append(Line(f"{name}, mean", x, tuple(one.mean for _, one in found)))
        spread.append(Line(name, x, tuple(one.divergence for _, one in found)))
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
    spread, age, older = [], [], []
    for subject in subjects:
        x, noted = subject.notes("divergence_newest", "divergence", "age", "older")
        name = label(subject, subjects)
        spread.append(Line(f"{name}, newest models", x, noted[0]))
        spread.append(Line(f"{name}, picked models", x, noted[1]))
        age.append(Line(name, x, noted[2]))
        older.append(Line(name, x, noted[3]))
    return Found(
        [
            Lines("divergence", "round", "V", tuple(spread)),
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
    cohort, mean, mixes, groups, notes = [], [], [], [], []
    marks = []
    for subject in subjects:
        name = label(subject, subjects)
        learnt = {r.round: r.notes["lambdas"] for r in subject.records if "lambdas" in r.notes}
        rounds, found, overlap, grouped = [], [], [], []
        for snapshot in subject.kept():
            start, models, weights, clients = _cohort(snapshot)
            share = shares(weights)
            weighed = torch.tensor(learnt.get(snapshot.round, []), dtype=torch.float64)
            if weighed.shape == share.shape:  # fedcda(merge=fedlaw) weighs other clients too
                share = weighed
            found.append(gradient_coherence(start, models, share))
            overlap.append(heterogeneity_coherence(subject.data.counts, clients, share))
            grouped.append(group_coherence(found[-1].pairs, clients.tolist(), options.groups))
            rounds.append(snapshot.round)
        x = numbers(rounds)
        cohort.append(Line(name, x, tuple(one.cohort for one in found)))
        mean.append(Line(name, x, tuple(one.mean for one in found)))
        mixes.append(Line(f"{name}, 1 - TV", x, tuple(one.one_minus_tv for one in overlap)))
        mixes.append(Line(f"{name}, cosine", x, tuple(one.cosine for one in overlap)))
        for a, b in grouped[-1]:
            where = f"{name}, group {a + 1}" + ("" if a == b else f" with {b + 1}")
            groups.append(Line(where, x, tuple(one[a, b] for one in grouped)))
        crossed = critical_round(rounds, [one.cohort for one in found])
        notes.append(f"{subject.name}: critical round {crossed or 'not reached'} (of those kept)")
        if crossed is not None:
            marks.append(Mark(f"critical round, {name}", float(crossed), 0.0))
    size = numbers(torch.arange(len(found[-1].pairs)))
    title = f"cos(g_i, g_j) at round {rounds[-1]}, {name}"
    panels: list[Panel] = [
        Lines("coherence of the cohort", "round", "c_cohort", tuple(cohort), tuple(marks)),
        Lines("mean of pairs", "round", "mean cos(g_i, g_j)", tuple(mean)),
        *([Lines("groups", "round", "mean cos(g_i, g_j)", tuple(groups))] if groups else []),
        Lines("heterogeneity coherence", "round", "similarity", tuple(mixes)),
        Grid(title, "client of the cohort", "client", "cos", size, size, table(found[-1].pairs)),
    ]
    weights_note = "lambda: as learnt where the method records the cohort's, else by samples"
    return Found(panels, [*notes, weights_note])


@analysis(
    "pearson",
    "Learnt weights against size and balance of clients",
    "Li et al. (FedLAW), Table 11",
    needs="class_labels",
)
def show_pearson(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Correlate each run's accumulated weights, and those of all runs together."""
    rows, every = [], []
    for subject in subjects:
        records, counts = subject.noted("lambdas"), subject.data.counts.cpu().numpy()
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
