"""How large the house is: code lines by room, and the measures of its shape.

    python tests/house_measures.py [folder of the package]

A code line has code on it: blank lines, comments and docstrings do not count, and neither do stubs
(`.pyi`). Generated Python counts. All is read from the syntax tree; nothing is imported.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
ODD_WORDS = {"found", "told", "said", "mine"}
# What a generator yields, or the alias of its type, if it asks whoever runs it for training.
REQUESTS = {"Request", "Round", "Course", "Asked", "Work", "Works"}


def code_lines(text: str, tree: ast.Module) -> int:
    """The lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for docstring in docstrings(tree):
        lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


def docstrings(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements that are docstrings, those of fields among them."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)):
            for statement in node.body:
                if isinstance(statement, ast.Expr) and is_text(statement.value):
                    yield statement


def is_text(node: ast.expr) -> bool:
    """Whether an expression is a plain string."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """The names of a function's parameters, but `self` and `cls`."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return [one.arg for one in every if one.arg not in ("self", "cls")]


def fields(kind: ast.ClassDef) -> int:
    """How many annotated fields a class has of its own."""
    annotated = [node for node in kind.body if isinstance(node, ast.AnnAssign)]
    return sum("ClassVar" not in ast.unparse(node.annotation) for node in annotated)


def only_passes_on(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is one call, of at most three lines, with what it was given."""
    if function.decorator_list or not parameters(function):
        return False
    body = [
        node for node in function.body if not (isinstance(node, ast.Expr) and is_text(node.value))
    ]
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr):
        return False
    call = body[0].value
    if not isinstance(call, ast.Call) or (call.end_lineno or 0) - call.lineno > 2:
        return False
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    return all(isinstance(node, ast.Name | ast.Attribute | ast.Starred) for node in given)


def asks(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is a generator of requests, by the type that it says it returns."""
    if function.returns is None:
        return False
    names = {node.id for node in ast.walk(function.returns) if isinstance(node, ast.Name)}
    return bool(names & REQUESTS) and any(
        isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function)
    )


def bound_names(tree: ast.Module) -> Iterator[str]:
    """Every name that the code binds: variables, parameters, fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def imported(tree: ast.Module, modules: set[str]) -> set[str]:
    """The modules of the package that a module imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names & modules


def module_name(path: Path, package: Path) -> str:
    """What a file is imported as."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_once(trees: dict[str, ast.Module]) -> int:
    """How many modules, packages aside, exactly one other module imports."""
    users: Counter[str] = Counter()
    packages = {name for name in trees if any(other.startswith(f"{name}.") for other in trees)}
    for name, tree in trees.items():
        users.update(imported(tree, set(trees)) - {name})
    return sum(users[name] == 1 for name in trees if name not in packages)


def measures(package: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Code lines by room, and the measures of the shape."""
    rooms: Counter[str] = Counter()
    trees: dict[str, ast.Module] = {}
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        inside = path.relative_to(package).parts
        rooms[inside[0] if len(inside) > 1 else "rest"] += code_lines(text, tree)
        trees[module_name(path, package)] = tree
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, FUNCTIONS)]
    shape = {
        "modules": len(trees),
        "functions": len(functions),
        "modules imported by one other": imported_once(trees),
        "functions of more than 7 parameters": sum(len(parameters(f)) > 7 for f in functions),
        "types of more than 12 fields": sum(
            fields(node) > 12 for node in nodes if isinstance(node, ast.ClassDef)
        ),
        "functions that only pass on": sum(map(only_passes_on, functions)),
        "generators of requests": sum(map(asks, functions)),
        "bindings named found, told, said, mine": sum(
            name in ODD_WORDS for tree in trees.values() for name in bound_names(tree)
        ),
    }
    return dict(rooms), shape


def main(package: Path) -> None:
    """Print both as one table."""
    rooms, shape = measures(package)
    for name, count in [
        *sorted(rooms.items()),
        ("code lines", sum(rooms.values())),
        *shape.items(),
    ]:
        print(f"{count:>7,}  {name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE / "fedbasin")
