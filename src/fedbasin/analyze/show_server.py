r"""Analyses of what the server does in a round: FedLAW's fit, steps beside the full gradient.

How soon a fit settles, Li et al. (FedLAW), Figure 14:

    left(e) = |v_e - v_E|_1 / |v_0 - v_E|_1

for numbers v_e after epoch e of E: 1 at the start, 0 at the end. A fit that passes its end and
comes back is above 0 while it does so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedbasin.analyze.following import follow, full_gradient
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
    on_device,
    rows_note,
)
from fedbasin.core.record import RoundRecord

_STAGES = 3
_SETTLED = 0.05
_ALIKE = 1e-6  # steps that differ by rounding alone


@analysis(
    "fit",
    "Learnt weights of clients, and their sum gamma, over the server's epochs",
    "Li et al. (FedLAW), Figure 14",
    uses=("groups",),
)
def show_fit(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Draw gamma in an early, a middle and the last round of each run, and lambda in the last."""
    gammas = Curves("gamma", "gamma", "server epoch")
    left = Curves("share of the way left", "share", "server epoch")
    panels = []
    notes = []
    for subject in subjects:
        name = label(subject, subjects)
        stages = _stages(subject)
        for record in stages:
            at = f"{name}, round {record.round}"
            path = _path(record)
            epochs = range(len(path))
            gammas.line(at, epochs, path[:, -1])
            told = []
            for what, part in (("gamma", path[:, -1:]), ("lambda", path[:, :-1])):
                share = way_left(part)
                if bool(share.isnan().any()):
                    told.append(f"{what} does not move")
                    continue
                left.line(f"{at}, {what}", epochs, share)
                told.append(f"{what} has 5 % of its way left from epoch {settled(share)} on")
            notes.append(f"{at}: {', '.join(told)} (of {len(path) - 1})")
        last = stages[-1]
        cohort = subject.data.cohort(last.round).tolist()
        title = f"lambda: {name}, round {last.round}"
        panels.append(_weights(title, _path(last), cohort, options))
    return Found([gammas, *panels, left], notes)


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


def _weights(title: str, path: Tensor, cohort: Sequence[int], options: Options) -> Curves:
    """Draw each client's lambda, or the mean of each group, by epoch."""
    groups = options.groups or tuple(frozenset({client}) for client in cohort)
    curves = Curves(title, "lambda", "server epoch")
    for number, group in enumerate(groups, start=1):
        places = [place for place, client in enumerate(cohort) if client in group]
        if places:
            name = f"group {number}" if options.groups else f"client {min(group)}"
            curves.line(name, range(len(path)), path[:, places].mean(1))
    return curves


def way_left(path: Tensor) -> Tensor:
    """Return the share of the way that is left, [E + 1]; NaN where a path [E + 1, k] ends at its
    start."""
    far = (path - path[-1]).abs().sum(1)
    return far / far[0] if float(far[0]) > 0 else torch.full_like(far, torch.nan)


def settled(left: Tensor) -> int | None:
    """Return the first epoch from which at most 5 % of the way is left; None where none was."""
    if bool(left.isnan().any()):
        return None
    beyond = (left > _SETTLED).nonzero()
    return int(beyond[-1]) + 1 if len(beyond) else 0


@analysis(
    "gradient",
    "The server's step beside the full gradient",
    "Li et al. (FedWCM), Appendix E: epsilon_r, U_r and Lemma 3",
    uses=("rows",),
    needs=("row_losses",),
)
def show_gradient(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Draw how well each round's step, and the plain mean of its clients, follow the gradient."""
    cosines = Curves("cosine of step and steepest descent", "cosine")
    errors = Curves("epsilon_r / |grad f|^2, least over gamma", "share")
    drift = Curves("last term of U_r", "mean |y_i - x|^2")
    notes = []
    for subject in subjects:
        name = label(subject, subjects)
        tick = watch(f"gradient, {name}", len(subject.snapshots.stored()))
        taken = []
        even = []
        for snapshot in subject.kept():
            assert snapshot.start is not None and snapshot.models is not None
            whole = subject.data.train
            evaluator = ground_for(whole, subject, options, snapshot.buffers, 0)
            slope = full_gradient(evaluator, on_device(snapshot.start, evaluator)).cpu()
            updates = (snapshot.models - snapshot.start).cpu()
            taken.append(follow(slope, (snapshot.sent - snapshot.start).cpu()))
            even.append(follow(slope, updates.mean(0)))
            for which, step in ((name, taken[-1]), (f"{name}, clients alike", even[-1])):
                cosines.point(which, snapshot.round, step.cosine)
                errors.point(which, snapshot.round, step.error)
            drift.point(name, snapshot.round, updates.double().square().sum(1).mean())
            tick(1)
        closer = sum(a.error < b.error - _ALIKE for a, b in zip(taken, even, strict=True))
        notes.append(
            f"{name}: {rows_note(evaluator, whole, 'training')}; mean cosine "
            f"{np.mean([one.cosine for one in taken]):.3f}, of clients alike "
            f"{np.mean([one.cosine for one in even]):.3f}; the step taken is closer in {closer} "
            f"of {len(taken)} rounds"
        )
    alike = "clients alike: the plain mean of the clients' updates (Lemma 3)"
    return Found([cosines, errors, drift], [*notes, alike])
