"""The network of a run: from the catalogue, or given as an object; its start from a file."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from fedbasin.core.expressions import Choice, parse
from fedbasin.core.rng import Key, torch_draws_from
from fedbasin.experiment.config import ConfigError, Experiment
from fedbasin.experiment.objects import model_name
from fedbasin.models import given, number_sites
from fedbasin.models.custom import made_by


def network_of(experiment: Experiment, shape: tuple[int, ...], outputs: int, key: Key) -> nn.Module:
    """Make the network that a run starts from.

    Args:
        experiment: the settings.
        shape: of one input, without the batch axis.
        outputs: how many outputs the task needs.
        key: draws the initial weights.
    """
    try:
        with torch_draws_from(key):
            module = _made(experiment, shape, outputs)
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error
    _refuse_unready(module)
    if experiment.init:
        _load(module, Path(experiment.init))
    return module


def _made(experiment: Experiment, shape: tuple[int, ...], outputs: int) -> nn.Module:
    choice: Choice = parse(experiment.model, "model")
    source = experiment.objects.model
    if choice.name != given.__name__ or source is None:
        module: nn.Module = choice(shape, outputs)
        return module
    if isinstance(source, nn.Module):
        number_sites(source)
        return source  # `Net` copies it
    return made_by(source, shape, outputs, model_name(source))


def _refuse_unready(module: nn.Module) -> None:
    """Refuse a module whose weights have no values yet."""
    for name, tensor in module.named_parameters():
        if isinstance(tensor, nn.parameter.UninitializedParameter):
            raise ConfigError(
                f"model: {name} of {type(module).__name__} has no shape yet: run the module on a "
                "batch before you give it, or use layers that are not lazy"
            )
        if tensor.is_meta:
            raise ConfigError(
                f"model: {name} of {type(module).__name__} is on the device 'meta' and has no "
                "values: make the module on 'cpu'"
            )


def _load(module: nn.Module, path: Path) -> None:
    """Load weights into a module; names and shapes must be the module's own."""
    try:
        with safe_open(path, framework="pt") as file:
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise ConfigError(f"init: {path} does not exist") from error
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"init: {path} is not a readable safetensors file ({error})") from error
    own = module.state_dict()
    missing = sorted(own.keys() - stored.keys())
    unknown = sorted(stored.keys() - own.keys())
    if missing or unknown:
        told = [f"lacks {missing[0]!r}"] if missing else []
        told += [f"holds {unknown[0]!r}"] if unknown else []
        raise ConfigError(
            f"init: {path} {' and '.join(told)}, which does not fit {type(module).__name__}: give "
            f"the weights of the same network ({len(own)} tensors)"
        )
    for name, tensor in own.items():
        if stored[name].shape != tensor.shape:
            raise ConfigError(
                f"init: {name!r} of {path} has the shape {list(stored[name].shape)}, the network's "
                f"has {list(tensor.shape)}"
            )
        if not bool(torch.isfinite(stored[name].float()).all()):
            raise ConfigError(f"init: {name!r} of {path} holds NaN or infinity")
    module.load_state_dict(stored)
