"""Analyses of what the server does in a round: FedLAW's fit, steps beside the full gradient."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedbasin.analyze.fitting import settled, way_left
from fedbasin.analyze.following import follow, full_gradient
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
from fedbasin.core.figure_data import Line, Lines, Panel
from fedbasin.core.record import RoundRecord

_STAGES = 3
_ALIKE = 1e-6  # steps that differ by rounding alone


@analysis(
    "fit",
    "Learnt weights of clients, and their sum gamma, over the server's epochs",
    "Li et al. (FedLAW), Figure 14",
    uses=("groups",),
)
def show_fit(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Draw gamma in an early, a middle and the last round of each run, and lambda in the last."""
    gammas = []
    left = []
    panels: list[Panel] = []
    notes = []
    for subject in subjects:
        name = label(subject, subjects)
        stages = _stages(subject)
        for record in stages:
            at = f"{name}, round {record.round}"
            path = _path(record)
            epochs = numbers(torch.arange(len(path)))
            gammas.append(Line(at, epochs, numbers(path[:, -1])))
            told = []
            for what, part in (("gamma", path[:, -1:]), ("lambda", path[:, :-1])):
                share = way_left(part)
                if bool(share.isnan().any()):
                    told.append(f"{what} does not move")
                    continue
                left.append(Line(f"{at}, {what}", epochs, numbers(share)))
                told.append(f"{what} has 5 % of its way left from epoch {settled(share)} on")
            notes.append(f"{at}: {', '.join(told)} (of {len(path) - 1})")
        last = stages[-1]
        cohort = subject.data.cohort(last.round).tolist()
        lines = _weights(_path(last), cohort, options)
        title = f"lambda: {name}, round {last.round}"
        panels.append(Lines(title, "server epoch", "lambda", lines))
    return Found(
        [
            Lines("gamma", "server epoch", "gamma", tuple(gammas)),
            *panels,
            Lines("share of the way left", "server epoch", "share", tuple(left)),
        ],
        notes,
    )


def _stages(subject: Subject) -> list[RoundRecord]:
    """Return an early, a middle and the last round whose fit was recorded and took epochs."""
    found = [r for r in subject.records if len(np.atleast_1d(r.notes.get("fit_path", 0.0))) > 1]
    found = [r for r in found if len(_path(r)) > 1]
    if not found:
        raise AnalysisError(
            f"{subject.name} recorded no path of a fit; run fedlaw(trace=True), which must fit "
            "lambda or gamma"
        )
    places = {round((len(found) - 1) * i / (_STAGES - 1)) for i in range(_STAGES)}
    return [found[place] for place in sorted(places)]


def _path(record: RoundRecord) -> Tensor:
    """Return lambda and gamma of a round by epoch, [E + 1, C + 1]."""
    clients = len(np.atleast_1d(record.notes["lambdas"]))
    flat = torch.tensor(record.notes["fit_path"], dtype=torch.float64)
    return flat.reshape(-1, clients + 1)


def _weights(path: Tensor, cohort: Sequence[int], options: Options) -> tuple[Line, ...]:
    """Return each client's lambda, or the mean of each group, by epoch."""
    epochs = numbers(torch.arange(len(path)))
    groups = options.groups or tuple(frozenset({client}) for client in cohort)
    lines = []
    for number, group in enumerate(groups, start=1):
        places = [place for place, client in enumerate(cohort) if client in group]
        if places:
            said = f"group {number}" if options.groups else f"client {min(group)}"
            lines.append(Line(said, epochs, numbers(path[:, places].mean(1))))
    return tuple(lines)


@analysis(
    "gradient",
    "The server's step beside the full gradient",
    "Li et al. (FedWCM), Appendix E: epsilon_r, U_r and Lemma 3",
    uses=("rows",),
    needs=("row_losses",),
)
def show_gradient(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Draw how well each round's step, and the plain mean of its clients, follow the gradient."""
    cosines = []
    errors = []
    drift = []
    notes = []
    for subject in subjects:
        name = label(subject, subjects)
        tick = watch(f"gradient, {name}", len(subject.snapshots.stored()))
        rounds = []
        taken = []
        even = []
        far = []
        for snapshot in subject.kept():
            assert snapshot.start is not None and snapshot.models is not None
            whole = subject.data.train
            evaluator = ground_for(whole, subject, options, snapshot.buffers, 0)
            slope = full_gradient(evaluator, on_device(snapshot.start, evaluator)).cpu()
            updates = (snapshot.models - snapshot.start).cpu()
            taken.append(follow(slope, (snapshot.sent - snapshot.start).cpu()))
            even.append(follow(slope, updates.mean(0)))
            far.append(float(updates.double().square().sum(1).mean()))
            rounds.append(float(snapshot.round))
            tick(1)
        x = tuple(rounds)
        cosines += [
            Line(name, x, tuple(one.cosine for one in taken)),
            Line(f"{name}, clients alike", x, tuple(one.cosine for one in even)),
        ]
        errors += [
            Line(name, x, tuple(one.error for one in taken)),
            Line(f"{name}, clients alike", x, tuple(one.error for one in even)),
        ]
        drift.append(Line(name, x, tuple(far)))
        closer = sum(a.error < b.error - _ALIKE for a, b in zip(taken, even, strict=True))
        notes.append(
            f"{name}: {rows_note(evaluator, whole, 'training')}; mean cosine "
            f"{np.mean([one.cosine for one in taken]):.3f}, of clients alike "
            f"{np.mean([one.cosine for one in even]):.3f}; the step taken is closer in {closer} "
            f"of {len(taken)} rounds"
        )
    return Found(
        [
            Lines("cosine of step and steepest descent", "round", "cosine", tuple(cosines)),
            Lines("epsilon_r / |grad f|^2, least over gamma", "round", "share", tuple(errors)),
            Lines("last term of U_r", "round", "mean |y_i - x|^2", tuple(drift)),
        ],
        [*notes, "clients alike: the plain mean of the clients' updates (Lemma 3)"],
    )
