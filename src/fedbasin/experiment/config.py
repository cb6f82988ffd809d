"""One frozen configuration, from TOML and back.

Every setting of a run stands here. Unknown keys are errors that name the nearest valid
ones; values are checked when the configuration is made, so a bad one costs no time.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from fedbasin.core.bounds import at_least, within
from fedbasin.core.catalogue import CATALOGUE, Kind, card_of
from fedbasin.core.expressions import Choice, ExpressionError, parse, text, title
from fedbasin.core.files import read_toml
from fedbasin.core.reading import PYTHON, TOML, Form, Reader
from fedbasin.core.settings import write_toml
from fedbasin.core.suggest import nearest
from fedbasin.experiment.objects import Objects, model_name
from fedbasin.local.optimisers import SGD


class ConfigError(ValueError):
    """A setting that cannot be used: the field, the value and what to write instead."""


def _expression(default: str | tuple[str, ...], kind: Kind) -> Any:
    """A setting that is an expression of one kind, or several; objects of that kind stand for it.

    Objects are replaced by their text, so a configuration compares, hashes and writes as text.
    """
    return field(default=default, metadata={"kind": kind})


def _is_object(model: object) -> bool:
    """Whether a network is given as an object, and not as an expression of the catalogue."""
    entered = any(card.make is model for card in CATALOGUE.values())
    return not entered and not isinstance(model, str | Choice)


@dataclass(frozen=True)
class DataConfig:
    """Which data, and how it is cut.

    Args:
        name: a dataset of ``fedbasin data list``, ``hf:owner/name``, or with `table.target` the
            path of a CSV or parquet file.
        imbalance: long tail of the training classes, smallest over largest (1 keeps all rows).
        proxy_per_class: rows of each class set aside for the server.
        proxy_rows: rows set aside for the server, drawn from all alike whatever their class: for
            targets without classes. At most one of the two may be set.
        proxy_from: where they come from; rows taken from ``"test"`` are no longer scored.
        proxy_imbalance: long tail of the server's classes, likewise.
        proxy_evened: repeat the server's rows until its classes are of one size again.
        augment: random crop and flip in local training.
        normalise: ``"dataset"`` (its papers' mean and spread), ``"symmetric"`` (to [-1, 1], like
            FedLAW's CIFAR) or ``"unit"`` (to [0, 1]); the last two are for images alone.
    """

    name: str = "digits"
    imbalance: float = within("(0, 1]", default=1.0)
    proxy_per_class: int = at_least(0, default=0)
    proxy_rows: int = at_least(0, default=0)
    proxy_from: Literal["train", "test"] = "train"
    proxy_imbalance: float = within("(0, 1]", default=1.0)
    proxy_evened: bool = False
    augment: bool = False
    normalise: Literal["dataset", "symmetric", "unit"] = "dataset"


@dataclass(frozen=True)
class TableConfig:
    """How a table file becomes inputs, targets and clients; used where `target` is set.

    Args:
        target: the columns to predict.
        client: the column that names each row's client; empty deals rows by `partition.how`.
        features: the columns to predict from; empty takes all others.
        drop: columns to leave out.
        categories: text columns as 0/1 columns (``"onehot"``) or as numbers to embed.
        missing: missing numbers become the training rows' ``"mean"``, also get a 0/1 column
            (``"indicator"``), or are refused.
        missing_target: rows without a target are refused or dropped.
        most_categories: a text column with more values is refused.
        classes: whether the target's values are classes; ``"auto"`` decides by the column's type.
        test: another file that holds the rows to score; empty holds out `test_share`.
        test_share: share of the rows to score.
        test_by: which rows these are: ``"rows"`` drawn at random, all rows of some ``"clients"``,
            or the latest by `time`.
        time: the column that `test_by = "time"` orders rows by.
    """

    target: tuple[str, ...] = ()
    client: str = ""
    features: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    categories: Literal["onehot", "index"] = "onehot"
    missing: Literal["mean", "indicator", "refuse"] = "mean"
    missing_target: Literal["refuse", "drop"] = "refuse"
    most_categories: int = 100
    classes: Literal["auto", "yes", "no"] = "auto"
    test: str = ""
    test_share: float = within("[0, 1)", default=0.2)
    test_by: Literal["rows", "clients", "time"] = "rows"
    time: str = ""


@dataclass(frozen=True)
class PartitionConfig:
    """Who holds which rows.

    Args:
        how: a partition, such as ``"dirichlet(alpha=0.1)"``.
        clients: number of clients, N; 0 with ``"natural"`` is every client that the data names.
        seed: fixes the partition apart from the run's seed; -1 follows the run's seed.
        hold_out: share of every client's rows that it does not train on; `sim.evaluate_clients`
            scores models on them. At least one row is held out of two or more.
        hold_out_by: which rows these are: ``"rows"`` drawn from all alike, or ``"classes"``, where
            each class gives its share.
        unseen: share of the clients that never take part; models are scored on them as newcomers.
        corrupted: share of clients that have two labels exchanged, a class they hold and another.
        hostile: share of clients that do what `attack` says.
    """

    how: str = _expression("dirichlet(alpha=0.1)", "partition")
    clients: int = at_least(0, default=50)
    seed: int = at_least(-1, default=-1)
    hold_out: float = within("[0, 1)", default=0.0)
    hold_out_by: Literal["rows", "classes"] = "rows"
    unseen: float = within("[0, 1)", default=0.0)
    corrupted: float = within("[0, 1]", default=0.0)
    hostile: float = within("[0, 1]", default=0.0)


@dataclass(frozen=True)
class LocalConfig:
    """How clients train.

    Args:
        lr: learning rate.
        epochs: passes over the client's data.
        steps: mini-batches instead of epochs; 0 means epochs count.
        batch: batch size.
        momentum: of the optimiser ``"sgd"``; others take it as an argument.
        weight_decay: of the optimiser ``"sgd"``; others take it as an argument.
        clip: largest gradient norm; 0 means no clipping.
        schedule: a schedule, such as ``"exponential(decay=0.99)"``.
        optimiser: how clients step, such as ``"adamw(weight_decay=0.01)"``; set `lr` with it.
        keep_optimiser: whether each client keeps the optimiser's state (momentum, Adam's means)
            between rounds; by default it starts afresh in every round.
    """

    lr: float = at_least(0, default=0.1)
    epochs: int = at_least(1, default=1)
    steps: int = at_least(0, default=0)
    batch: int = at_least(1, default=32)
    momentum: float = within("[0, 1)", default=0.0)
    weight_decay: float = at_least(0, default=0.0)
    clip: float = at_least(0, default=0.0)
    schedule: str = _expression("constant", "schedule")
    optimiser: str = _expression("sgd", "optimiser")
    keep_optimiser: bool = False


# Settings of `SimConfig` that change no result: they may be edited before a run is resumed.
RESULT_NEUTRAL = (
    "device",
    "workers",
    "address",
    "chunk",
    "memory",
    "together",
    "client_memory",
    "checkpoint_every",
)


@dataclass(frozen=True)
class SimConfig:
    """How the federation is simulated.

    Args:
        participation: who takes part, such as ``"fraction(rate=0.1)"``.
        dropout: chance that a drawn client does not answer.
        executor: how a cohort is trained: ``"loop"`` (one client after another), ``"cohort"`` (all
            as one matrix), ``"auto"`` (the faster of the two for the device and the model), or
            ``"ray"`` (shards of the cohort on Ray workers, each of which is on ``"auto"``).
        workers: processes that share a cohort, with one thread each: of a loop on a CPU, or of Ray;
            0 is one process for a loop, and for Ray one for each GPU, or for each core.
        address: a running Ray cluster, ``"auto"`` or ``"host:port"``; empty starts one here.
        compile: whether the cohort's step is compiled; ``"auto"`` compiles on CUDA in runs of at
            least 300 rounds or 7.5 million rows trained on, and on a CPU with a C++ compiler in
            those of 20,000 steps or more.
        chunk: most clients that advance together; 0 is as many as the memory holds.
        memory: GiB that they may take; 0 is a share of what is free.
        together: runs of a comparison whose clients advance as one matrix, on a CPU; 0 is as many
            as pay and fit in memory, 1 is one run after another.
        device: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:1"``.
        precision: floating type of models and training: ``"fp32"``, ``"tf32"`` (fp32 with faster,
            coarser products on CUDA), ``"bf16"`` (mixed: models in fp32, layers in bfloat16),
            ``"fp64"``, or ``"auto"``: tf32 on CUDA, else fp32.
        buffers: what happens to BatchNorm statistics on the server.
        evaluate_every: score the model every k rounds.
        evaluate_last: and in each of the last rounds.
        evaluate_train: score it on all clients' rows too.
        evaluate_clients: score the model on the rows that each client holds out
            (`partition.hold_out`) every k rounds and after the last; 0 scores no clients.
        personalise: also score what each client makes of the final model at home, such as
            ``"epochs(1)"`` or ``"steps(20, head=True)"``; empty leaves it out.
        baselines: also score models that each client trains alone, and one that is trained on all
            rows in one place. This takes as long as N / C further runs.
        score_on: the rows that records score: ``"test"``, or ``"held_out"``, those that clients
            hold out (`partition.hold_out`); settings are then chosen without a look at test rows.
        metrics: further metrics to record, such as ``["macro_f1", "ece"]``.
        checkpoint_every: save every k rounds.
        client_memory: most main memory, in GiB, for what all clients keep between rounds (SCAFFOLD,
            FedDyn, ...); where they need more it lies in the run's folder.
    """

    participation: str = _expression("fraction(rate=0.1)", "participation")
    dropout: float = within("[0, 1)", default=0.0)
    executor: Literal["auto", "loop", "cohort", "ray"] = "auto"
    workers: int = at_least(0, default=0)
    address: str = ""
    compile: Literal["auto", "on", "off"] = "auto"
    chunk: int = at_least(0, default=0)
    memory: float = at_least(0, default=0.0)
    together: int = at_least(0, default=0)
    device: str = "auto"
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp64"] = "auto"
    buffers: Literal["mean", "keep", "recalibrate"] = "mean"
    evaluate_every: int = at_least(1, default=1)
    evaluate_last: int = at_least(0, default=10)
    evaluate_train: bool = False
    evaluate_clients: int = at_least(0, default=0)
    personalise: str = ""
    baselines: bool = False
    score_on: Literal["test", "held_out"] = "test"
    metrics: tuple[str, ...] = _expression((), "metric")
    checkpoint_every: int = at_least(1, default=10)
    client_memory: float = at_least(0, default=2.0)


@dataclass(frozen=True)
class SnapshotConfig:
    """Which models are kept for analyses; none by default.

    Args:
        rounds: the rounds whose models are kept, counted from 1.
        every: keep those of every k-th round too; 0 keeps none.
        clients: keep what each client of these rounds sent back, beside the server's models.
    """

    rounds: tuple[int, ...] = ()
    every: int = at_least(0, default=0)
    clients: bool = False

    def chosen(self, rounds: int) -> frozenset[int]:
        """Return the rounds to keep in a run of `rounds` rounds."""
        regular = range(self.every, rounds + 1, self.every) if self.every else ()
        return frozenset(self.rounds).union(regular)


@dataclass(frozen=True)
class Experiment:
    """A whole run.

    An expression may be given as text or as an object: ``"ima(window=3)"`` or ``fb.ima(window=3)``.
    A section may be given as a mapping: ``local={"lr": 0.05}``.

    Args:
        method: how the server merges, such as ``"fedavg"`` or ``"scaffold(server_lr=0.5)"``.
        model: the network, such as ``"mlp(widths=(64,))"``; or a module, whose weights are the
            start; or a function ``(shape, outputs) -> torch.nn.Module``.
        task: what its outputs mean, such as ``"classification"`` or ``"regression"``.
        seed: the randomness of everything.
        rounds: how many rounds.
        attack: what hostile clients do (`partition.hostile`), such as ``"alie"`` or
            ``"backdoor(target=1)"``.
        init: a safetensors file with the weights to start from; empty for the network's own.
        data: which data.
        table: how a table becomes inputs, targets and clients.
        partition: who holds it.
        local: how clients train.
        sim: how the federation is simulated.
        snapshots: which models are kept for analyses.
        objects: data and network in memory; the file of settings holds their names alone.
    """

    method: str = _expression("fedavg", "method")
    model: str = field(default="mlp", metadata={"kind": "model", "object": _is_object})
    task: str = _expression("classification", "task")
    seed: int = at_least(0, default=0)
    rounds: int = at_least(1, default=100)
    attack: str = _expression("sign_flip", "attack")
    init: str = ""
    data: DataConfig = field(default_factory=DataConfig)
    table: TableConfig = field(default_factory=TableConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    local: LocalConfig = field(default_factory=LocalConfig)
    sim: SimConfig = field(default_factory=SimConfig)
    snapshots: SnapshotConfig = field(default_factory=SnapshotConfig)
    objects: Objects = field(
        default_factory=Objects, repr=False, compare=False, metadata={"in_memory": True}
    )

    def __post_init__(self) -> None:
        for name, value in _reader(PYTHON).values(Experiment, self).items():
            object.__setattr__(self, name, value)
        _keep_objects(self)
        for check in _CHECKS:
            check(self)

    def resolved(self) -> Experiment:
        """Return the same run with expressions in canonical form and a fixed partition seed."""
        changes: dict[str, dict[str, Any]] = {"": {}, "partition": {}}
        if self.partition.seed < 0:
            changes["partition"]["seed"] = self.seed
        for path, value, kind in _expressions(self):
            if isinstance(value, tuple):  # metrics, whose texts result lines are hashed with
                continue
            section, _, name = path.rpartition(".")
            changes.setdefault(section, {})[name] = text(parse(value, kind))
        top: dict[str, Any] = changes.pop("")
        sections = {name: replace(getattr(self, name), **some) for name, some in changes.items()}
        return replace(self, **top, **sections)

    def settings(self) -> dict[str, Any]:
        """Return every setting, nested by section."""
        everything = asdict(replace(self, objects=Objects()))
        del everything["objects"]
        return everything

    def to_toml(self) -> str:
        """Write every setting as TOML."""
        return write_toml(self.settings())

    def using(self, objects: Objects) -> Experiment:
        """Return the same run with these objects; the settings hold their names."""
        data = self.data
        if objects.data is not None:
            data = replace(data, name=objects.data.name)
        model: Any = self.model if objects.model is None else objects.model
        return replace(self, objects=objects, data=data, model=model)


def _keep_objects(experiment: Experiment) -> None:
    """Keep a network that is given as an object; forget objects that the settings do not name."""
    objects = experiment.objects
    if objects.data is not None and objects.data.name != experiment.data.name:
        objects = replace(objects, data=None)
    model: object = experiment.model
    if not _is_object(model):
        if objects.model is not None and str(model) != _given(objects.model):
            objects = replace(objects, model=None)
    elif callable(model):  # a module is callable too
        objects = replace(objects, model=model)
        object.__setattr__(experiment, "model", _given(model))
    else:
        raise ConfigError(
            f"model is {model!r:.80}: give an expression such as 'mlp', a torch.nn.Module, or a "
            "function (shape, outputs) -> torch.nn.Module"
        )
    object.__setattr__(experiment, "objects", objects)


def _given(model: object) -> str:
    """Return the expression that stands for a network given as an object."""
    return text(Choice("given", (("name", model_name(model)),)))


def _expressions(experiment: Experiment) -> Iterator[tuple[str, Any, Kind]]:
    """Yield every setting that is an expression: where it stands, its value and its kind."""
    places = [("", experiment)]
    places += [(f"{name}.", getattr(experiment, name)) for name in _SECTIONS]
    for before, section in places:
        for each in fields(section):
            if "kind" in each.metadata:
                yield f"{before}{each.name}", getattr(section, each.name), each.metadata["kind"]


_SECTIONS: dict[str, type[Any]] = {
    "data": DataConfig,
    "table": TableConfig,
    "partition": PartitionConfig,
    "local": LocalConfig,
    "sim": SimConfig,
    "snapshots": SnapshotConfig,
}


def _check_proxy(experiment: Experiment) -> None:
    data = experiment.data
    if data.proxy_per_class and data.proxy_rows:
        raise ConfigError(
            f"data.proxy_per_class is {data.proxy_per_class} and data.proxy_rows is "
            f"{data.proxy_rows}: set one of them"
        )
    without = not data.proxy_per_class and not data.proxy_rows
    if without and (data.proxy_imbalance < 1 or data.proxy_evened):
        raise ConfigError(
            "data.proxy_imbalance and data.proxy_evened are about the server's rows: set "
            "data.proxy_per_class"
        )


def _check_snapshots(experiment: Experiment) -> None:
    for round in experiment.snapshots.rounds:
        if not 1 <= round <= experiment.rounds:
            raise ConfigError(
                f"snapshots.rounds must lie in 1 to {experiment.rounds} (rounds), got {round}"
            )


def _check_optimiser(experiment: Experiment) -> None:
    """Refuse a momentum or weight decay that is given twice, or to another optimiser than SGD."""
    local = experiment.local
    optimiser = parse(local.optimiser, "optimiser")
    for name in ("momentum", "weight_decay"):
        value = getattr(local, name)
        if not value:
            continue
        if type(optimiser) is not SGD:
            known = any(parameter.name == name for parameter in card_of(optimiser).parameters)
            other = f", or write local.optimiser = '{title(card_of(optimiser))}({name}={value})'"
            raise ConfigError(
                f"local.{name} = {value} is for the optimiser sgd, and local.optimiser is "
                f"{optimiser}: set local.{name} = 0{other if known else ''}"
            )
        if getattr(optimiser, name):
            raise ConfigError(
                f"{name} is given twice, as local.{name} = {value} and in local.optimiser = "
                f"{optimiser}: keep one of the two"
            )


def _check_clients(experiment: Experiment) -> None:
    """Refuse scores by client where clients hold nothing out."""
    sim = experiment.sim
    if sim.personalise:
        try:
            parse(sim.personalise, "personalisation")
        except ExpressionError as error:
            raise ConfigError(f"sim.personalise: {error}") from error
    asked = {
        "sim.evaluate_clients": sim.evaluate_clients,
        "sim.personalise": sim.personalise,
        "sim.baselines": sim.baselines,
    }
    for name, value in asked.items():
        if value and not experiment.partition.hold_out:
            raise ConfigError(
                f"{name} = {value} scores models on rows that clients hold out: set "
                "partition.hold_out, such as 0.2"
            )


def _check_ray(experiment: Experiment) -> None:
    sim = experiment.sim
    if sim.address and sim.executor != "ray":
        raise ConfigError("sim.address is for Ray: set sim.executor=ray, or leave it out")
    if sim.workers > 1 and sim.executor == "cohort":
        raise ConfigError("sim.workers share a loop or a Ray cluster: the cohort is one matrix")
    host, _, port = sim.address.rpartition(":")
    if sim.address not in ("", "auto") and ("/" in host or not host or not port.isdecimal()):
        raise ConfigError(
            f"sim.address is {sim.address!r}: start the run on a machine of the cluster and write "
            "auto, or host:port as ray start prints it"
        )


def _check_scored_rows(experiment: Experiment) -> None:
    if experiment.sim.score_on == "held_out" and not experiment.partition.hold_out:
        raise ConfigError(
            "sim.score_on is 'held_out', and no rows are held out: set partition.hold_out, as 0.2"
        )


_CHECKS = (
    _check_proxy,
    _check_snapshots,
    _check_optimiser,
    _check_clients,
    _check_ray,
    _check_scored_rows,
)


def _reader(form: Form) -> Reader:
    return Reader(ConfigError, noun="setting", form=form)


def from_mapping(
    settings: Mapping[str, Any], base: Experiment | None = None, form: Form = TOML
) -> Experiment:
    """Build a configuration from what somebody gave: a file, a command, or arguments in Python.

    Unknown names, wrong types and values out of bounds are errors.

    Args:
        settings: by name; sections are mappings, or whole.
        base: where all other settings come from; by default they have their defaults.
        form: how the settings were given, for the advice of errors.
    """
    base = Experiment() if base is None else base
    sections = {
        name: {**vars(getattr(base, name)), **settings[name]}
        for name in _SECTIONS
        if isinstance(settings.get(name), Mapping)
    }
    return replace(base, **_reader(form).values(Experiment, {**settings, **sections}))


def read_experiment(path: Path) -> Experiment:
    """Read a run's config file; errors name it."""
    settings = read_config(path)
    try:
        return from_mapping(settings)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_config(path: Path) -> dict[str, Any]:
    """Read a TOML file into nested settings."""
    try:
        return read_toml(path)
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def read_preset(name: str) -> dict[str, Any]:
    """Read one of the presets that ship with fedbasin."""
    folder = resources.files("fedbasin.experiment") / "presets"
    files = [file for file in folder.iterdir() if file.name.endswith(".toml")]
    presets = {file.name.removesuffix(".toml"): file for file in files}
    if name not in presets:
        raise ConfigError(f"no preset is called {name!r}; {nearest(name, sorted(presets))}")
    return tomllib.loads(presets[name].read_text(encoding="utf-8"))


def override(settings: dict[str, Any], assignments: list[str]) -> dict[str, Any]:
    """Apply ``a.b=c`` assignments; c is read as TOML if it is valid TOML, else as text."""
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"cannot read {assignment!r}; write it like local.lr=0.05")
        *parents, leaf = key.strip().split(".")
        section = settings
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise ConfigError(f"{key.strip()!r}: {parent!r} is not a section")
        section[leaf] = _read_value(value.strip())
    return settings


def _read_value(value: str) -> Any:
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value
