"""The rows of a run: which the server and each client have, and how they become inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedbasin import data, partition
from fedbasin.core.expressions import Choice, parse
from fedbasin.core.rng import Key, root
from fedbasin.data.transform import Transform
from fedbasin.experiment.config import ConfigError, DataConfig, Experiment
from fedbasin.experiment.one_copy import ONE_COPY
from fedbasin.sim.attacks import Attack, draw_hostile

if TYPE_CHECKING:
    from fedbasin.data.encoding import Encoding

# Mean and standard deviation of `data.normalise`, for pixels in [0, 1].
_SCALES = {"symmetric": (0.5, 0.5), "unit": (0.0, 1.0)}


@dataclass(frozen=True)
class Rows:
    """The rows of a run: who trains on what, what the server holds, what is scored.

    Args:
        splits: rows to train on, of the server, and to score.
        parts: which of the rows to train on each client has; unseen clients have none.
        held: which of these rows each client holds out. They are scored, never trained on.
        home: which rows each client may train on at home: `parts`, and what unseen clients have.
        classes: number of classes; 0 where targets have none.
        unseen: clients that never take part, rising.
        encoding: how the columns of a table became numbers; fitted on no row that is held out.
        corrupted: clients with exchanged labels.
    """

    splits: data.Splits
    parts: partition.Partition
    held: partition.Partition
    home: partition.Partition
    classes: int
    unseen: np.ndarray
    encoding: Encoding | None = None
    corrupted: frozenset[int] = frozenset()  # clients with exchanged labels
    hostile: frozenset[int] = frozenset()  # clients that attack

    @property
    def held_out(self) -> data.Rows:
        """The rows that clients who take part hold out, each once."""
        return self.splits.train.take(np.unique(self.held.without(self.unseen).order))


def dataset_of(experiment: Experiment, data_dir: Path | None) -> data.Dataset:
    """Return the data of a run: in memory, from a table file, or by its name."""
    one_copy = ONE_COPY.get()
    if one_copy is None:
        return _dataset_of(experiment, data_dir)
    return one_copy.dataset(experiment, lambda: _dataset_of(experiment, data_dir))


def _dataset_of(experiment: Experiment, data_dir: Path | None) -> data.Dataset:
    given = experiment.objects.data
    if given is not None and given.name == experiment.data.name:
        return given
    table = experiment.table
    if not table.target:
        return data.load(experiment.data.name, data_dir=data_dir)
    try:
        return data.from_table(
            Path(experiment.data.name),
            table.target if len(table.target) > 1 else table.target[0],
            table.client or None,
            features=table.features or None,
            drop=table.drop,
            categories=table.categories,
            missing=table.missing,
            missing_target=table.missing_target,
            most_categories=table.most_categories,
            classes={"auto": None, "yes": True, "no": False}[table.classes],
            test=Path(table.test) if table.test else table.test_share,
            test_by=table.test_by,
            time=table.time or None,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def cut_rows(experiment: Experiment, dataset: data.Dataset) -> Rows:
    """Take out the proxy set, make long tails, divide the rows among clients, corrupt labels."""
    seed = experiment.partition.seed
    key = root(seed if seed >= 0 else experiment.seed)
    settings = experiment.data
    if not dataset.classes:
        _refuse_class_settings(experiment, dataset)
    splits = data.split(
        dataset,
        proxy_per_class=settings.proxy_per_class,
        proxy_rows=settings.proxy_rows,
        proxy_from=settings.proxy_from,
        rng=key.fold("proxy").numpy(),
    )
    classes = len(dataset.classes)
    train = splits.train
    if settings.imbalance < 1:
        draws = key.fold("longtail").numpy()
        train = train.take(partition.longtail(train.labels, classes, settings.imbalance, draws))
    proxy = splits.proxy
    if proxy is not None:
        proxy = _thin_proxy(proxy, settings, classes, key)
    how: Choice = parse(experiment.partition.how, "partition")
    pool = partition.Pool(train.labels, classes, train.groups)  # 0 classes: targets without any
    clients = experiment.partition.clients or _named_clients(train)
    if not clients:
        raise ConfigError(
            "partition.clients is 0, which is every client that the data names, and "
            f"{dataset.name} names none: give a number, or a client column (table.client)"
        )
    try:
        parts = how(pool, clients, key.fold("partition").numpy())
    except ValueError as error:
        raise ConfigError(f"partition.how, {how}: {error}") from error
    home, held = _hold_out(experiment, parts, train.labels, classes, key)
    unseen = _draw_unseen(experiment, parts, key)
    parts = home.without(unseen)
    encoding = dataset.encoding
    if encoding is not None and dataset.fitted and (held.order.size or unseen.size):
        from fedbasin.data.fitting import refitted  # pyarrow takes time to import

        used = np.zeros(len(train), dtype=np.bool_)
        used[parts.order] = True
        encoding, again = refitted(encoding, data.Splits(train, proxy, splits.test), used)
        train, proxy, splits = again.train, again.proxy, again
    corrupted: frozenset[int] = frozenset()
    if experiment.partition.corrupted:
        share = experiment.partition.corrupted
        draws = key.fold("corrupted").numpy()
        try:
            labels = partition.exchange_labels(train.labels, parts, classes, share, draws)
        except ValueError as error:
            raise ConfigError(f"partition.corrupted: {error}") from error
        changed = labels != train.labels
        corrupted = frozenset(i for i, mine in enumerate(parts.clients) if changed[mine].any())
        train = replace(train, labels=labels)
    hostile: frozenset[int] = frozenset()
    if experiment.partition.hostile:
        eligible = np.flatnonzero(parts.sizes() > 0)
        hostile = draw_hostile(experiment.partition.hostile, eligible, key)
        train = _poisoned(experiment, train, parts, classes, hostile, key)
    splits = data.Splits(train, proxy, splits.test)
    return Rows(splits, parts, held, home, classes, unseen, encoding, corrupted, hostile)


def _hold_out(
    experiment: Experiment,
    parts: partition.Partition,
    labels: np.ndarray,
    classes: int,
    key: Key,
) -> tuple[partition.Partition, partition.Partition]:
    """Return the rows that clients train on, and those that they hold out."""
    settings = experiment.partition
    if not settings.hold_out:
        return parts, parts.without(np.arange(len(parts.clients)))
    by_class = settings.hold_out_by == "classes"
    if by_class and not classes:
        raise ConfigError(
            "partition.hold_out_by is 'classes', and the targets have no classes: write 'rows'"
        )
    draws = key.fold("hold out").numpy()
    try:
        return parts.hold_out(settings.hold_out, draws, labels if by_class else None)
    except ValueError as error:
        raise ConfigError(f"partition.hold_out: {error}") from error


def _draw_unseen(experiment: Experiment, parts: partition.Partition, key: Key) -> np.ndarray:
    """Draw the clients that never take part, among those that hold rows; at least one."""
    share = experiment.partition.unseen
    if not share:
        return np.empty(0, np.int64)
    holders = np.flatnonzero(parts.sizes() > 0)
    count = max(int(share * len(holders) + 1e-9), 1)
    if count >= len(holders):
        raise ConfigError(
            f"partition.unseen is {share}, which leaves no client to train with: {len(holders)} "
            "clients hold rows; use a smaller share, or more clients"
        )
    drawn = key.fold("unseen").numpy().permutation(holders)[:count]
    return np.sort(drawn)


def _poisoned(
    experiment: Experiment,
    train: data.Rows,
    parts: partition.Partition,
    classes: int,
    hostile: frozenset[int],
    key: Key,
) -> data.Rows:
    """Return the training rows with those of hostile clients as the attack wants them."""
    attack: Attack = parse(experiment.attack, "attack")
    if type(attack).poison is Attack.poison:
        return train
    if parts.again:
        raise ConfigError(
            f"attack = {attack} changes rows of hostile clients, and partition.how = "
            f"{experiment.partition.how} deals rows to several clients: take one that does not"
        )
    inputs = np.array(train.inputs)
    labels = np.array(train.labels)
    for client in sorted(hostile):
        mine = parts.clients[client]
        draws = key.fold("poison", client).numpy()
        try:
            inputs[mine], labels[mine] = attack.poison(inputs[mine], labels[mine], classes, draws)
        except ValueError as error:
            raise ConfigError(f"attack: {error}") from error
    return replace(train, inputs=inputs, labels=labels, origin=None)


def _named_clients(rows: data.Rows) -> int:
    """Count the clients that the rows name; 0 where they name none."""
    return 0 if rows.groups is None else len(np.unique(rows.groups))


def _thin_proxy(proxy: data.Rows, settings: DataConfig, classes: int, key: Key) -> data.Rows:
    """Give the server's rows a long tail, or equally many of each class, if asked for."""
    if settings.proxy_imbalance < 1:
        draws = key.fold("proxy longtail").numpy()
        tail = partition.longtail(proxy.labels, classes, settings.proxy_imbalance, draws)
        proxy = proxy.take(tail)
    if settings.proxy_evened:
        proxy = proxy.take(partition.evened(proxy.labels, classes))
    return proxy


def _refuse_class_settings(experiment: Experiment, dataset: data.Dataset) -> None:
    """Refuse settings about classes if the targets have none."""
    settings = experiment.data
    if settings.proxy_per_class:
        raise ConfigError(
            f"data.proxy_per_class is {settings.proxy_per_class}, and the targets of "
            f"{dataset.name} have no classes: set data.proxy_rows to the number of rows the server "
            "holds"
        )
    usual = (
        ("data.imbalance", settings.imbalance, 1.0),
        ("data.proxy_imbalance", settings.proxy_imbalance, 1.0),
        ("data.proxy_evened", settings.proxy_evened, False),
        ("partition.corrupted", experiment.partition.corrupted, 0.0),
    )
    for name, value, default in usual:
        if value != default:
            raise ConfigError(
                f"{name} is {value}, and the targets of {dataset.name} have no classes: leave it "
                f"at {default}"
            )


def transform_of(dataset: data.Dataset, settings: DataConfig, dtype: torch.dtype) -> Any:
    """Return what turns stored rows into the network's inputs."""
    mean = dataset.mean
    std = dataset.std
    if dataset.kind != "image":
        _refuse_pixel_settings(dataset, settings)
    elif settings.normalise != "dataset":
        middle, spread = _SCALES[settings.normalise]
        mean = (middle,) * len(mean)
        std = (spread,) * len(std)
    transform = Transform(mean, std, augment=settings.augment, kind=dataset.kind)
    return partial(transform, dtype=dtype)


def _refuse_pixel_settings(dataset: data.Dataset, settings: DataConfig) -> None:
    """Refuse settings about pixels if the inputs are not images."""
    if settings.normalise != "dataset":
        raise ConfigError(
            f"data.normalise is {settings.normalise!r}, which scales pixels, and {dataset.name} is "
            f"{dataset.kind}: leave it at 'dataset' and scale the numbers beforehand"
        )
    if settings.augment:
        raise ConfigError(
            f"data.augment crops and flips images, and {dataset.name} is {dataset.kind}: leave it "
            "at false"
        )
