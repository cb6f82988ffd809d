"""Write the files that come from the catalogue: `make generated`, after an entry is added.

python tests/generated.py
"""

from __future__ import annotations

import inspect
from pathlib import Path

import fedbasin
from fedbasin.cli.listing import cards_markdown

ROOT = Path(__file__).parents[1]
HEAD = '''"""Types of the names of `fedbasin`, which are fetched when they are first used."""

from collections.abc import Callable
'''


def stub() -> str:
    """Return what type checkers read about the names of the package."""
    imports = [("fedbasin.core.expressions", "Choice")]
    imports += [("fedbasin", f"{room} as {room}") for room in fedbasin._ROOMS]
    imports += [(f"fedbasin.{home}", f"{n} as {n}") for n, home in fedbasin._HOMES.items()]
    classes = []
    functions = []
    for name, card in sorted(fedbasin._entries().items()):
        make = card.make
        if inspect.isclass(make):
            imports.append((make.__module__, f"{make.__name__} as _{make.__name__}"))
            classes.append(f"{name} = _{make.__name__}")
        else:
            functions.append(f"{name}: Callable[..., Choice]")
    lines = [f"from {home} import {what}" for home, what in sorted(imports, key=place)]
    return "\n".join([HEAD, *lines, "", *classes, "", *functions]) + "\n"


def place(line: tuple[str, str]) -> tuple[str, int, str]:
    """Return where an import stands in the linter's order: constants, classes, functions."""
    home, what = line
    name = what.partition(" ")[0]
    return home, 0 if name.isupper() else 1 if name[0].isupper() else 2, name


def contents() -> dict[Path, str]:
    """Return what each file should hold, by its path."""
    return {
        ROOT / "src" / "fedbasin" / "__init__.pyi": stub(),
        ROOT / "docs" / "methods.md": cards_markdown(),
    }


def main() -> None:
    """Write the files, and the golden models of methods that have none."""
    from golden.make import add_models

    for path, text in contents().items():
        path.write_text(text, encoding="utf-8")
    add_models()


if __name__ == "__main__":
    main()
