"""A user's own network: given as a Python object, or named by the path of what makes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from fedbasin.core.catalogue import entry
from fedbasin.core.expressions import ExpressionError, load_module
from fedbasin.models.dropout import number_sites
from fedbasin.models.parts import Shape


def _load(path: str) -> Callable[..., Any]:
    """Import what a path "package.module:factory" names."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"path must look like 'package.module:factory', got {path!r}")
    try:
        module = load_module(module_name)
    except ExpressionError as error:
        raise ValueError(f"path={path!r}: {error}") from None
    if not hasattr(module, attribute):
        raise ValueError(f"path={path!r}: the module {module_name} has no {attribute!r}")
    factory = getattr(module, attribute)
    if isinstance(factory, nn.Module) or not callable(factory):
        raise ValueError(
            f"path={path!r} is a {type(factory).__name__}; "
            "it must be a function (shape, outputs) -> torch.nn.Module"
        )
    return factory  # type: ignore[no-any-return]


@entry("model")
def custom(shape: Shape, classes: int, *, path: str) -> nn.Module:
    """A network of your own: ``path="package.module:factory"`` names a function that makes it.

    The function is called as ``factory(shape, classes)``, shape without the batch axis. The module
    must be free of in-place updates and of randomness other than dropout;
    `head` and `features`, as a `Network` has, are needed only by methods that work on features.

    Args:
        path: import path of the function, or of a class whose constructor takes the same.
    """
    return made_by(_load(path), shape, classes, f"path={path!r}")


def made_by(factory: Callable[..., Any], shape: Shape, classes: int, what: str) -> nn.Module:
    """Call a user's function for a network; whatever is not a network is refused.

    Args:
        factory: the function.
        shape: of one input, without the batch axis.
        classes: how many outputs the network shall have.
        what: how errors call the function.
    """
    try:
        inspect.signature(factory).bind(shape, classes)
    except TypeError as error:
        raise ValueError(f"{what} cannot be called with (shape, outputs): {error}") from None
    try:
        network = factory(shape, classes)
    except TypeError as error:
        if not (isinstance(factory, type) and issubclass(factory, nn.Module)):
            raise
        raise ValueError(
            f"{what}({shape}, {classes}) failed ({error}): a class is called with the shape of a "
            "row and the number of outputs; give a module, or a function (shape, outputs) -> module"
        ) from error
    if not isinstance(network, nn.Module):
        raise ValueError(f"{what} returned a {type(network).__name__}, not a torch.nn.Module")
    number_sites(network)
    return network


@entry("model")
def given(shape: Shape, classes: int, *, name: str) -> nn.Module:
    """A network given as a Python object: ``Experiment(model=module_or_function)``.

    Args:
        name: its class or function, for the records.
    """
    raise ValueError(
        f"the network {name} was given as a Python object; give it again with "
        "model=, as in fedbasin.resume(folder, model=...), or name a function that makes it: "
        "custom(path='my_module:factory')"
    )
