"""A network that was given as a Python object; its expression is a name without content."""

from __future__ import annotations

from torch import nn

from fedbasin.core.catalogue import entry
from fedbasin.models.parts import Shape


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
