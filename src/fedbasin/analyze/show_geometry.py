"""Analyses of landscapes: lines, planes, rescaling, curvature, weights of three clients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedbasin.analyze.hessian import hessian_product, slice_along, top_eigenvalues
from fedbasin.analyze.landscape import Plane, Slice, line, plane, weight_plane
from fedbasin.analyze.shrinking import Rescaled, rescale
from fedbasin.analyze.subject import (
    AnalysisError,
    Curves,
    Found,
    Model,
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
from fedbasin.core.evaluator import Evaluator, Tick
from fedbasin.core.figure_data import Grid, Line, Mark, Panel
from fedbasin.core.rng import root
from fedbasin.core.snapshot import Snapshot
from fedbasin.core.vectors import shares


@analysis(
    "line",
    "Loss and error between two models, pair by pair",
    "Zhou et al. (IMA), Figures 5 and 7c",
    uses=("models", "points", "margin", "rows"),
    needs=("row_losses",),
)
def show_line(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Draw the line through each pair of models, with the two models marked."""
    first = subjects[0]
    named = options.models or _ends(subjects)
    if len(named) < 2 or len(named) % 2:
        raise AnalysisError(f"lines need --models in pairs, got {len(named)}")
    positions = torch.linspace(-options.margin, 1 + options.margin, options.grid())
    tick = watch("line", len(positions) * len(named) // 2)
    panels: dict[str, Curves] = {}
    notes = []
    for pair in zip(named[::2], named[1::2], strict=True):
        ends = [resolve(subjects, name) for name in pair]
        name = f"{_called(subjects, ends[0].name)} to {_called(subjects, ends[1].name)}"
        evaluator = ground_for(first.data.test, first, options, ends[1].buffers, 2000)
        found = line(evaluator, ends[0].vector, ends[1].vector, positions, tick)
        both = line(evaluator, ends[0].vector, ends[1].vector, torch.tensor([0.0, 1.0]))
        for title, values in _measures(evaluator, found):
            axis = "position: 0 is the first model, 1 the second"
            panels.setdefault(title, Curves(title, title, axis)).line(name, positions, values)
        for title, values in _measures(evaluator, both):
            panels[title].marks += [
                Mark(f"{_called(subjects, end.name)}", float(at), float(value))
                for at, end, value in zip((0, 1), ends, values, strict=True)
            ]
        notes.append(_told(name, ends, found))
    return Found([*panels.values()], [rows_note(evaluator, first.data.test), *notes])


def _called(subjects: Sequence[Subject], reference: str) -> str:
    """Name a model in a legend: with its run's label where there are several runs."""
    number, slash, model = reference.rpartition("/")
    if len(subjects) == 1:
        return model
    return f"{label(subjects[int(number) - 1 if slash else 0], subjects)} {model}"


def _told(name: str, ends: Sequence[Model], found: Slice) -> str:
    """Say how far apart two models are and where the least loss between them lies."""
    apart = float((ends[0].vector.double() - ends[1].vector.double()).norm())
    if apart == 0:
        return f"{name}: the two models are identical, so the line is flat"
    least = int(found.loss.argmin())
    return (
        f"{name}: {apart:.4g} apart, least loss {float(found.loss[least]):.4g} at position "
        f"{float(found.position[least]):.3g}"
    )


def _measures(evaluator: Evaluator, found: Slice | Plane | Rescaled) -> list[tuple[str, Tensor]]:
    """Name what was measured: the loss, and the error where the task has one beside its loss."""
    measures = [("test loss", found.loss)]
    if evaluator.error_name != "loss":
        measures.append((f"test {evaluator.error_name}", found.error))
    return measures


def _ends(subjects: Sequence[Subject]) -> tuple[str, ...]:
    """Choose pairs: the first run's last model with each other run's, or a run's first and last."""
    if len(subjects) > 1:
        kept = [bool(subject.snapshots.stored()) for subject in subjects]
        last = [f"{i}/{'score:last' if one else 'final'}" for i, one in enumerate(kept, start=1)]
        return tuple(name for other in last[1:] for name in (last[0], other))
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
    """Draw the plane through the first three models; others are projected and marked.

    Without models a run's stages are drawn: three clients of an early, a middle and a late round,
    and the last three global models.
    """
    first = subjects[0]
    stages = [("", options.models)] if options.models else _stages(first)
    points = options.grid()
    tick = watch("plane", points**2 * len(stages))
    panels: list[Panel] = []
    notes: list[str] = []
    for stage, named in stages:
        models = [resolve(subjects, name) for name in named]
        if len(models) < 3:
            raise AnalysisError(f"a plane needs at least three --models, got {len(models)}")
        drawn, told = _plane(first, stage, models, options, tick)
        panels += drawn
        notes += told
    return Found(panels, notes)


def _plane(
    subject: Subject, stage: str, models: Sequence[Model], options: Options, tick: Tick
) -> tuple[list[Panel], list[str]]:
    """Draw one plane, with the mean of its three models and where that lies to the minimum."""
    vectors = torch.stack([model.vector for model in models])
    three = vectors[:3].double().mean(0).to(vectors)
    evaluator = ground_for(subject.data.test, subject, options, models[-1].buffers, 2000)
    surface = plane(
        evaluator, vectors[:3], torch.cat([vectors[3:], three[None]]), points=options.grid(),
        margin=options.margin, tick=tick,
    )  # fmt: skip
    names = [*(model.name for model in models), "mean of the three"]
    places = torch.cat([surface.corners, surface.others])
    axes = ("distance along the first axis", "distance along the second axis")
    x = numbers(surface.x)
    y = numbers(surface.y)
    row, column = divmod(int(surface.loss.argmin()), options.grid())
    lowest = torch.tensor([x[column], y[row]], dtype=places.dtype)
    marks = (
        *(Mark(name, *place) for name, place in zip(names, places.tolist(), strict=True)),
        Mark("smallest loss", *lowest.tolist()),
    )
    said = f"{stage}: " if stage else ""
    panels: list[Panel] = [
        Grid(f"{said}{title}", *axes, title, x, y, table(values), marks)
        for title, values in _measures(evaluator, surface)
    ]
    eye = torch.eye(len(vectors) + 1, dtype=torch.float64)
    own = evaluator.measure(eye, torch.cat([vectors, three[None]])).loss.tolist()
    away = (places - lowest).norm(dim=1).tolist()
    notes = [
        f"{said}{rows_note(evaluator, subject.data.test)}; smallest loss of the grid "
        f"{float(surface.loss.min()):.4g} at ({x[column]:.3g}, {y[row]:.3g})",
        f"{said}the three models have losses {', '.join(f'{v:.4g}' for v in own[:3])} and lie "
        f"{', '.join(f'{v:.3g}' for v in away[:3])} from it; their mean has {own[-1]:.4g} and lies "
        f"{away[-1]:.3g} from it",
    ]
    notes += [
        f"{said}{model.name} has {loss:.4g} and lies {float(off):.3g} off the plane"
        for model, loss, off in zip(models[3:], own[3:], surface.off_plane[:-1], strict=False)
    ]
    return panels, notes


def _stages(subject: Subject) -> list[tuple[str, tuple[str, ...]]]:
    """Choose the planes of a run: clients of early to late rounds, and its last global models."""
    stored = subject.snapshots.stored()
    planes = []
    cohorts = [s for s in map(subject.snapshots.get, stored) if s.clients is not None]
    cohorts = [s for s in cohorts if len(_ids(s)) >= 3]
    places = sorted({0, (len(cohorts) - 1) // 2, len(cohorts) - 1}) if cohorts else []
    for snapshot in (cohorts[place] for place in places):
        mean = f"mean:{snapshot.round}"
        named = [*(f"client{client}:{snapshot.round}" for client in _ids(snapshot)[:3]), mean]
        if not torch.allclose(resolve([subject], mean).vector, snapshot.score):
            named.append(f"score:{snapshot.round}")
        planes.append((f"round {snapshot.round}", tuple(named)))
    if len(stored) >= 3:
        planes.append(("global models", tuple(f"score:{round}" for round in stored[-3:])))
    if not planes:
        raise AnalysisError(
            f"{subject.name} keeps models of {len(stored)} rounds and no clients; a plane needs "
            "three models: set snapshots.rounds or snapshots.clients"
        )
    return planes


@analysis(
    "rescaling",
    "Loss of a rescaled model",
    "Li et al. (FedLAW), Figure 4 left",
    uses=("points", "rows"),
    needs=("row_losses",),
)
def show_rescaling(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Draw the loss of gamma w for gamma from 0.9 to 1.1."""
    gammas = torch.linspace(0.9, 1.1, options.grid())
    tick = watch("rescaling", len(gammas) * len(subjects))
    panels: dict[str, Curves] = {}
    notes = []
    for subject in subjects:
        model = subject.last_model()
        evaluator = ground_for(subject.data.test, subject, options, model.buffers, 2000)
        curve = rescale(evaluator, model.vector, gammas, tick)
        for title, values in _measures(evaluator, curve):
            curves = panels.setdefault(title, Curves(title, f"{title} of gamma w", "gamma"))
            curves.line(label(subject, subjects), gammas, values)
        notes.append(f"{subject.name}: {model.name}, {rows_note(evaluator, subject.data.test)}")
    return Found([*panels.values()], notes)


@analysis(
    "hessian",
    "Curvature: the largest eigenvalues of the training loss's Hessian",
    "Li et al. (FedLAW), Figures 4 right and 10",
    uses=("count", "points", "rows"),
    needs=("row_losses",),
)
def show_hessian(subjects: Sequence[Subject], options: Options, watch: Watch) -> Found:
    """Draw top eigenvalues over rounds and the slice along the last model's sharpest direction."""
    tops = Curves("largest eigenvalue", "lambda_1")
    ratios = Curves("ratio of eigenvalues", f"lambda_1 / lambda_{options.count}")
    slices = Curves("slice along v_1", "training loss", "step along v_1")
    notes = []
    for subject in subjects:
        name = label(subject, subjects)
        tick = watch(f"hessian of {name}", 0)
        for model in subject.models():
            evaluator = ground_for(subject.data.train, subject, options, model.buffers, 1000)
            vector = on_device(model.vector, evaluator)
            product = hessian_product(evaluator, vector)
            key = root(subject.seed).fold("hessian", model.round)
            eigen = top_eigenvalues(product, vector, key, count=options.count, tick=tick)
            tops.point(name, model.round, eigen.values[0])
            ratios.point(name, model.round, eigen.ratio)
        steps = torch.linspace(-1, 1, options.grid())
        along = slice_along(evaluator, vector, eigen.vectors[0], steps, tick)
        slices.line(name, steps, along.loss)
        values = ", ".join(f"{v:.4g}" for v in eigen.values.tolist())
        notes.append(
            f"{subject.name}, {model.name}: eigenvalues {values}; |H v - lambda v| = "
            f"{eigen.residual:.2g}; {rows_note(evaluator, subject.data.train, 'training')}"
        )
    return Found([tops, ratios, slices], notes)


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
    points = options.grid(51)
    tick = watch("weights", len(kept) * points * (points + 1) // 2)
    best = []
    for round in kept:
        snapshot = subject.snapshots.get(round)
        assert snapshot.models is not None and snapshot.weights is not None
        places = [_ids(snapshot).index(client) for client in chosen]
        evaluator = ground_for(subject.data.test, subject, options, snapshot.buffers, 2000)
        found = weight_plane(evaluator, snapshot.models[places], points, tick)
        best.append(found.best)
        average = shares(snapshot.weights[places]).tolist()
    path = torch.stack(best)
    a, b, _ = (f"client {client}" for client in chosen)
    position = numbers(found.position)
    marks = (Mark("FedAvg", average[0], average[1]), Mark("best", *path[-1, :2].tolist()))
    line_ = Line("optimum by round", numbers(path[:, 0]), numbers(path[:, 1]))
    curves = Curves("best weights", "weight of least test loss")
    for i, client in enumerate(chosen):
        curves.line(f"client {client}", kept, path[:, i])
    title = f"test loss at round {kept[-1]}"
    values = table(found.loss)
    grid = Grid(
        title, f"weight of {a}", f"weight of {b}", "test loss", position, position, values, marks,
        (line_,),
    )  # fmt: skip
    return Found(
        [grid, curves],
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
