"""Analyses of landscapes: lines, planes, rescaling, curvature, weights of three clients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedbasin.analyze.hessian import hessian_product, slice_along, top_eigenvalues
from fedbasin.analyze.landscape import Plane, Slice, line, plane
from fedbasin.analyze.shrinking import Rescaled, rescale
from fedbasin.analyze.simplex import weight_plane
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
    resolve,
    rows_note,
    table,
)
from fedbasin.core.evaluator import Evaluator
from fedbasin.core.figure_data import Grid, Line, Lines, Mark
from fedbasin.core.rng import root
from fedbasin.core.snapshot import Snapshot
from fedbasin.core.vectors import shares


@analysis(
    "line",
    "Loss and error between two models",
    "Zhou et al. (IMA), Figures 5 and 7c",
    uses=("models", "points", "margin", "rows"),
    needs=("row_losses",),
)
def show_line(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Draw the line through two models."""
    first = subjects[0]
    named = options.models or _ends(subjects)
    if len(named) != 2:
        raise AnalysisError(f"a line needs two --models, got {len(named)}")
    ends = [resolve(subjects, name) for name in named]
    evaluator = ground_for(first.data.test, first, options, ends[1].buffers, 2000)
    positions = torch.linspace(-options.margin, 1 + options.margin, options.points)
    tick = watch("line", len(positions))
    found = line(evaluator, ends[0].vector, ends[1].vector, positions, tick)
    place = f"position: 0 is {ends[0].name}, 1 is {ends[1].name}"
    x = numbers(found.position)
    panels = [
        Lines(title, place, title, (Line(title, x, numbers(values)),))
        for title, values in _measures(evaluator, found)
    ]
    return Found(panels, [rows_note(evaluator, first.data.test)])


def _measures(evaluator: Evaluator, found: Slice | Plane | Rescaled) -> list[tuple[str, Tensor]]:
    """Name what was measured: the loss, and the error where the task has one beside its loss."""
    measures = [("test loss", found.loss)]
    if evaluator.error_name != "loss":
        measures.append((f"test {evaluator.error_name}", found.error))
    return measures


def _ends(subjects: Sequence[Subject]) -> tuple[str, ...]:
    """Choose the ends of a line: two runs' last models, or a run's first and last one."""
    if len(subjects) > 1:
        kept = [bool(subject.snapshots.stored()) for subject in subjects]
        return tuple(f"{i}/{'score:last' if kept[i - 1] else 'final'}" for i in (1, 2))
    stored = subjects[0].snapshots.stored()
    if len(stored) < 2:
        raise AnalysisError(
            f"{subjects[0].name} keeps models of {len(stored)} rounds; a line needs two: set "
            "snapshots.rounds, or give two runs or --models"
        )
    return f"score:{stored[0]}", f"score:{stored[-1]}"


@analysis(
    "plane",
    "Loss and error on the plane through three models",
    "Zhou et al. (IMA), Figures 1 and 8-10",
    uses=("models", "points", "margin", "rows"),
    needs=("row_losses",),
)
def show_plane(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Draw the plane through the first three models; others are projected and marked."""
    first = subjects[0]
    models = [resolve(subjects, name) for name in options.models or _three(first)]
    if len(models) < 3:
        raise AnalysisError(f"a plane needs at least three --models, got {len(models)}")
    vectors = torch.stack([model.vector for model in models])
    evaluator = ground_for(first.data.test, first, options, models[-1].buffers, 2000)
    tick = watch("plane", options.points**2)
    surface = plane(
        evaluator, vectors[:3], vectors[3:], points=options.points, margin=options.margin, tick=tick
    )
    places = torch.cat([surface.corners, surface.others]).tolist()
    marks = tuple(Mark(m.name, *place) for m, place in zip(models, places, strict=True))
    axes = ("distance along the first axis", "distance along the second axis")
    x = numbers(surface.x)
    y = numbers(surface.y)
    panels = [
        Grid(title, *axes, title, x, y, table(values), marks)
        for title, values in _measures(evaluator, surface)
    ]
    row, column = divmod(int(surface.loss.argmin()), options.points)
    least = f"{float(surface.loss.min()):.4g} at ({x[column]:.3g}, {y[row]:.3g})"
    notes = [
        rows_note(evaluator, first.data.test),
        f"smallest loss of the grid {least}",
    ]
    notes += [
        f"{model.name} lies {float(away):.3g} off the plane"
        for model, away in zip(models[3:], surface.off_plane, strict=True)
    ]
    return Found(panels, notes)


def _three(subject: Subject) -> tuple[str, ...]:
    """Choose three clients of the last round that kept them, and their mean; or global models."""
    stored = subject.snapshots.stored()
    for round in reversed(stored):
        snapshot = subject.snapshots.get(round)
        clients = snapshot.clients
        mean = f"mean:{round}"
        if clients is not None and len(clients) >= 3:
            named = [*(f"client{client}:{round}" for client in clients.tolist()[:3]), mean]
            same = torch.allclose(resolve([subject], mean).vector, snapshot.score)
            return tuple(named if same else [*named, f"score:{round}"])
    if len(stored) < 3:
        raise AnalysisError(
            f"{subject.name} keeps models of {len(stored)} rounds and no clients; a plane needs "
            "three models: set snapshots.rounds or snapshots.clients"
        )
    return tuple(f"score:{round}" for round in stored[-3:])


@analysis(
    "rescaling",
    "Loss of a rescaled model",
    "Li et al. (FedLAW), Figure 4 left",
    uses=("points", "rows"),
    needs=("row_losses",),
)
def show_rescaling(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Draw the loss of gamma w for gamma from 0.9 to 1.1."""
    gammas = torch.linspace(0.9, 1.1, options.points)
    tick = watch("rescaling", len(gammas) * len(subjects))
    lines: dict[str, list[Line]] = {}
    notes = []
    x = numbers(gammas)
    for subject in subjects:
        model = subject.last_model()
        evaluator = ground_for(subject.data.test, subject, options, model.buffers, 2000)
        curve = rescale(evaluator, model.vector, gammas, tick)
        for title, values in _measures(evaluator, curve):
            one = Line(label(subject, subjects), x, numbers(values))
            lines.setdefault(title, []).append(one)
        notes.append(f"{subject.name}: {model.name}, {rows_note(evaluator, subject.data.test)}")
    panels = [
        Lines(title, "gamma", f"{title} of gamma w", tuple(curves))
        for title, curves in lines.items()
    ]
    return Found(panels, notes)


@analysis(
    "hessian",
    "Curvature: the largest eigenvalues of the training loss's Hessian",
    "Li et al. (FedLAW), Figures 4 right and 10",
    uses=("count", "points", "rows"),
    needs=("row_losses",),
)
def show_hessian(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Draw top eigenvalues over rounds and the slice along the last model's sharpest direction."""
    tops = []
    ratios = []
    slices = []
    notes = []
    for subject in subjects:
        name = label(subject, subjects)
        tick = watch(f"hessian of {name}", 0)
        rounds = []
        top = []
        ratio = []
        for model in subject.models():
            evaluator = ground_for(subject.data.train, subject, options, model.buffers, 1000)
            vector = on_device(model.vector, evaluator)
            product = hessian_product(evaluator, vector)
            key = root(subject.seed).fold("hessian", model.round)
            eigen = top_eigenvalues(product, vector, key, count=options.count, tick=tick)
            rounds.append(float(model.round))
            top.append(float(eigen.values[0]))
            ratio.append(eigen.ratio)
        steps = torch.linspace(-1, 1, options.points)
        along = slice_along(evaluator, vector, eigen.vectors[0], steps, tick)
        tops.append(Line(name, tuple(rounds), tuple(top)))
        ratios.append(Line(name, tuple(rounds), tuple(ratio)))
        slices.append(Line(name, numbers(steps), numbers(along.loss)))
        values = ", ".join(f"{v:.4g}" for v in eigen.values.tolist())
        notes.append(
            f"{subject.name}, {model.name}: eigenvalues {values}; |H v - lambda v| = "
            f"{eigen.residual:.2g}; {rows_note(evaluator, subject.data.train, 'training')}"
        )
    top_name = f"lambda_1 / lambda_{options.count}"
    return Found(
        [
            Lines("largest eigenvalue", "round", "lambda_1", tuple(tops)),
            Lines("ratio of eigenvalues", "round", top_name, tuple(ratios)),
            Lines("slice along v_1", "step along v_1", "training loss", tuple(slices)),
        ],
        notes,
    )


@analysis(
    "weights",
    "Loss over all weights of three clients, and the optimum's path",
    "Li et al. (FedLAW), Figure 12",
    uses=("models", "points", "rows"),
    needs=("row_losses",),
)
def show_weights(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Draw the triangle of three clients' weights at the last kept round."""
    subject = subjects[0]
    chosen = _clients(options.models) or _ids(subject.last_cohort())[:3]
    kept = [s.round for s in subject.kept() if set(chosen) <= set(_ids(s))]
    if len(set(chosen)) != 3 or not kept:
        raise AnalysisError(
            f"{subject.name} keeps no round in which clients {chosen} took part; name three "
            "that did, as in --models client0 --models client1 --models client2"
        )
    tick = watch("weights", len(kept) * options.points * (options.points + 1) // 2)
    best = []
    for round in kept:
        snapshot = subject.snapshots.get(round)
        assert snapshot.models is not None and snapshot.weights is not None
        places = [_ids(snapshot).index(client) for client in chosen]
        evaluator = ground_for(subject.data.test, subject, options, snapshot.buffers, 2000)
        found = weight_plane(evaluator, snapshot.models[places], options.points, tick)
        best.append(found.best)
        average = shares(snapshot.weights[places]).tolist()
    path = torch.stack(best)
    a, b, _ = (f"client {client}" for client in chosen)
    position = numbers(found.position)
    marks = (Mark("FedAvg", average[0], average[1]), Mark("best", *path[-1, :2].tolist()))
    line_ = Line("optimum by round", numbers(path[:, 0]), numbers(path[:, 1]))
    rounds = numbers(kept)
    curves = tuple(
        Line(f"client {client}", rounds, numbers(path[:, i])) for i, client in enumerate(chosen)
    )
    title = f"test loss at round {kept[-1]}"
    values = table(found.loss)
    grid = Grid(
        title, f"weight of {a}", f"weight of {b}", "test loss", position, position, values, marks,
        (line_,),
    )  # fmt: skip
    return Found(
        [grid, Lines("best weights", "round", "weight of least test loss", curves)],
        [
            rows_note(evaluator, subject.data.test),
            f"the rest of the weight is client {chosen[2]}'s",
        ],
    )


def _clients(names: Sequence[str]) -> list[int]:
    for name in names:
        if not name.removeprefix("client").isdecimal():
            raise AnalysisError(f"weights takes clients, as in --models client7, got {name!r}")
    return [int(name.removeprefix("client")) for name in names]


def _ids(snapshot: Snapshot) -> list[int]:
    """Return the clients of a round."""
    return [] if snapshot.clients is None else [int(client) for client in snapshot.clients]
