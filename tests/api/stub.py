"""Print what type checkers read about the names of the package.

python tests/api/stub.py > src/fedbasin/__init__.pyi
"""

import inspect

import fedbasin
import fedbasin.experiment
from fedbasin.core.catalogue import CATALOGUE

HEAD = '"""Types of the names of `fedbasin`, which are fetched when they are first used."""\n'


def stub() -> str:
    """Return the whole file."""
    imports = {
        "from collections.abc import Callable",
        "from fedbasin.core.expressions import Choice",
        *(f"from fedbasin import {room} as {room}" for room in fedbasin._ROOMS),
        *(
            f"from fedbasin.{home} import {name} as {name}"
            for name, home in fedbasin._HOMES.items()
        ),
    }
    classes = []
    functions = []
    for name in fedbasin._ENTRIES:
        make = CATALOGUE[name].make
        if inspect.isclass(make):
            imports.add(f"from {make.__module__} import {make.__name__} as _{make.__name__}")
            classes.append(f"{name} = _{make.__name__}")
        else:
            functions.append(f"{name}: Callable[..., Choice]")
    return "\n".join([HEAD, *sorted(imports), "", *classes, "", *functions]) + "\n"


if __name__ == "__main__":
    print(stub(), end="")
