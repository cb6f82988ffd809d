"""Expressions: the text that names a method, a partition, a model or a schedule.

``ima(fedadam(lr=0.01), window=5)`` is what Python constructors nest, what a config file
holds, what the command line takes and what a run is called. Text is read with Python's own
parser but only names from the catalogue, calls and literals are accepted: nothing is
evaluated. `text` writes the canonical form, and `parse(text(x)) == x`.

What a module outside fedbasin enters is called by that module too: ``my_rules.median`` imports
``my_rules``, which has to enter ``median``, so a config file holds all that it takes to run it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin

from fedbasin.core.catalogue import CATALOGUE, Card, Kind, Parameter, cards
from fedbasin.core.suggest import nearest

_LONGEST = 4000


class ExpressionError(ValueError):
    """An expression that cannot be read, with the name or argument at fault."""


@dataclass(frozen=True)
class Choice:
    """A function of the catalogue with its hyper-parameters filled in.

    Calling it supplies the positional arguments: ``parse("iid")(pool, clients, rng)``.
    """

    name: str
    arguments: tuple[tuple[str, Any], ...] = ()  # only those that differ from the default

    def __call__(self, *supplied: Any) -> Any:
        """Call the function with what only the caller knows."""
        return CATALOGUE[self.name].make(*supplied, **dict(self.arguments))

    def __str__(self) -> str:
        return text(self)


def parse(source: str, kind: Kind | None = None) -> Any:
    """Read an expression; `kind` says what it must turn out to be.

    Args:
        source: the text, such as ``"dirichlet(alpha=0.1)"``.
        kind: the family the result must belong to, or None for any.
    """
    if len(source) > _LONGEST:
        raise ExpressionError(f"expression of {len(source)} characters; the limit is {_LONGEST}")
    try:
        tree = ast.parse(source.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ExpressionError(
            f"cannot read {source!r}: write it like name or name(argument=value, ...)"
        ) from error
    try:
        if not isinstance(tree, ast.Call) and not _named(tree):
            raise ExpressionError(
                f"{source!r} is not a name or a call such as name(argument=value)"
            )
        return _build(tree, kind)
    except RecursionError:
        raise ExpressionError(f"{source[:60]!r}... is nested too deeply") from None


def text(thing: object) -> str:
    """Write the canonical expression of an object built from the catalogue."""
    if isinstance(thing, Choice):
        return _call(CATALOGUE[thing.name], dict(thing.arguments))
    for card in CATALOGUE.values():
        if card.make is type(thing):
            return _call(card, {p.name: getattr(thing, p.name) for p in card.parameters})
    return _literal(thing)


def written(thing: object, kind: Kind) -> str:
    """Write what may stand for an entry of one kind: text, an object, a class or a function.

    Args:
        thing: an expression, an object built from the catalogue, or what `entry` entered.
        kind: the family it must belong to; other kinds are refused when the text is parsed.
    """
    if isinstance(thing, str):
        return thing
    for card in CATALOGUE.values():
        if card.make is thing:
            return title(card)
    if isinstance(thing, Choice) or any(card.make is type(thing) for card in CATALOGUE.values()):
        return text(thing)
    first = cards(kind)[0]
    needed = ", ".join(f"{one.name}=..." for one in first.parameters if one.required)
    example = f"{first.name}({needed})" if needed else first.name
    raise ExpressionError(
        f"{thing!r:.80} is not in the catalogue: give an expression such as {example!r}, or enter "
        f"your own with @entry({kind!r})"
    )


def constructor(card: Card) -> Callable[..., Any]:
    """Return what Python code calls to make an entry: ``fb.ima(fb.scaffold(), window=5)``.

    It is the class itself. For a function of the catalogue it is a function that takes the
    hyper-parameters alone and returns a `Choice`.
    """
    if not card.is_function:
        return card.make
    parameters = [
        inspect.Parameter(
            p.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=p.default, annotation=p.type
        )
        for p in sorted(card.parameters, key=lambda p: not p.required)
    ]
    signature = inspect.Signature(parameters, return_annotation=Choice)

    def make(*args: Any, **kwargs: Any) -> Choice:
        given = signature.bind(*args, **kwargs).arguments
        for parameter in card.parameters:
            if parameter.name in given:
                given[parameter.name] = _fitted(card, parameter, given[parameter.name])
        choice: Choice = _make(card, given)
        return choice

    make.__name__ = card.name
    make.__qualname__ = card.name
    make.__doc__ = inspect.getdoc(card.make)
    make.__module__ = card.make.__module__
    make.__signature__ = signature  # type: ignore[attr-defined]
    return make


def _call(card: Card, given: dict[str, Any]) -> str:
    parts = []
    for position, parameter in enumerate(card.parameters):
        value = given.get(parameter.name, parameter.default)
        if not parameter.required and _same(value, parameter.default):
            continue
        nested = type(value) is Choice or any(c.make is type(value) for c in CATALOGUE.values())
        written = text(value)
        parts.append(written if nested and position == 0 else f"{parameter.name}={written}")
    return f"{title(card)}({', '.join(parts)})" if parts else title(card)


def title(card: Card) -> str:
    """Return what to call a card: by its module too where another process has to import one."""
    module = card.make.__module__
    known = module.partition(".")[0] in ("fedbasin", "__main__", "__mp_main__")
    return card.name if known or module not in sys.modules else f"{module}.{card.name}"


def _same(a: object, b: object) -> bool:
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def _literal(value: object) -> str:
    if isinstance(value, tuple):
        inner = ", ".join(text(item) for item in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, float) and math.isinf(value):
        return "1e999" if value > 0 else "-1e999"
    if value is None or (isinstance(value, bool | int | float | str) and value == value):
        return repr(value)
    raise ExpressionError(f"{value!r} has no text: use numbers, strings, tuples or listed names")


def _build(node: ast.expr, kind: Kind | None) -> Any:
    call = node if isinstance(node, ast.Call) else None
    name = _named(call.func if call else node)
    if not name:
        raise ExpressionError(f"{ast.unparse(node)!r}: only names from the catalogue can be called")
    card = _find(name, kind)
    given: dict[str, Any] = {}
    known = {p.name: p for p in card.parameters}
    if call:
        if len(call.args) > len(known):
            raise ExpressionError(
                f"{card.name} takes at most {len(known)} arguments ({_names(known)}), "
                f"got {len(call.args)}"
            )
        for parameter, argument in zip(known.values(), call.args, strict=False):
            given[parameter.name] = _value(card, parameter, argument)
        for keyword in call.keywords:
            if keyword.arg is None or keyword.arg not in known:
                raise ExpressionError(_unknown_argument(card, keyword.arg, list(known)))
            if keyword.arg in given:
                raise ExpressionError(f"{card.name}: argument {keyword.arg!r} is given twice")
            given[keyword.arg] = _value(card, known[keyword.arg], keyword.value)
    missing = [p.name for p in known.values() if p.required and p.name not in given]
    if missing:
        raise ExpressionError(
            f"{card.name} needs {missing[0]!r}: write {card.name}({missing[0]}=...)"
        )
    return _make(card, given)


def _named(node: ast.expr) -> str:
    """Return a name, with the dots it may have; nothing for anything else."""
    if isinstance(node, ast.Attribute):
        before = _named(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def _make(card: Card, given: dict[str, Any]) -> Any:
    if card.is_function:
        changed = [
            (p.name, given[p.name])
            for p in card.parameters
            if p.name in given and (p.required or not _same(given[p.name], p.default))
        ]
        return Choice(card.name, tuple(changed))
    try:
        return card.make(**given)
    except ValueError as error:
        raise ExpressionError(f"{card.name}: {error}") from error


_imports: ContextVar[str] = ContextVar("imports", default="")  # why modules are not imported


@contextmanager
def no_imports(why: str) -> Iterator[None]:
    """Refuse to import modules that texts name, such as those of a folder that somebody sent."""
    before = _imports.set(why)
    try:
        yield
    finally:
        _imports.reset(before)


def load_module(name: str) -> types.ModuleType:
    """Import a module that a user named; one that is missing is a mistake of the text."""
    known = name.partition(".")[0] == "fedbasin" or name in sys.modules
    if _imports.get() and not known:
        raise ExpressionError(f"the module {name!r} would be imported and run; {_imports.get()}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # found, but something it imports is missing
        raise ExpressionError(
            f"there is no module {name!r}; install it, or add its folder to PYTHONPATH"
        ) from None


def _find(name: str, kind: Kind | None) -> Card:
    module, _, last = name.rpartition(".")
    if module:
        load_module(module)
    card = CATALOGUE.get(last)
    if module and not (card and f"{card.make.__module__}.".startswith(f"{module}.")):
        raise ExpressionError(
            f"the module {module} enters nothing called {last!r}; mark it there with @entry "
            "(examples/new_method.py)"
        )
    if card is not None and kind in (None, card.kind):
        return card
    valid = [c.name for c in cards(kind)] if kind else list(CATALOGUE)
    what = f"no {kind} is called {name!r}" if kind else f"nothing is called {name!r}"
    if card is not None:
        what = f"{name!r} is {_with_article(card.kind)}, not {_with_article(str(kind))}"
    raise ExpressionError(f"{what}; {nearest(name, sorted(valid))}")


def _with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _names(known: dict[str, Parameter]) -> str:
    return ", ".join(known) or "none"


def _unknown_argument(card: Card, name: str | None, valid: list[str]) -> str:
    if name is None:
        return f"{card.name}: ** is not allowed; name the arguments"
    if not valid:
        return f"{card.name} has no argument {name!r}; it takes none"
    return f"{card.name} has no argument {name!r}; {nearest(name, valid)}"


def _value(card: Card, parameter: Parameter, node: ast.expr) -> Any:
    return _fitted(card, parameter, _read(node))


def _fitted(card: Card, parameter: Parameter, value: Any) -> Any:
    fitted = fit(value, parameter.type)
    if fitted is _NO_FIT:
        raise ExpressionError(
            f"{card.name}: argument {parameter.name!r} is {_shown(value)}, "
            f"it must be {advice_for(value, parameter.type)}"
        )
    return fitted


def _read(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) or _named(node):
        return _build(node, None)
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(_read(item) for item in node.elts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _read(node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value
    if isinstance(node, ast.Constant) and isinstance(
        node.value, bool | int | float | str | types.NoneType
    ):
        return node.value
    raise ExpressionError(f"{ast.unparse(node)!r} is not a literal; nothing is computed in text")


_NO_FIT = object()
_LARGEST_INT = 2**53  # beyond, neither tensors nor JSON hold all whole numbers


def fit(value: Any, wanted: Any) -> Any:
    """Return the value as the wanted type, or `_NO_FIT`.

    An int may stand for a float, and NumPy's numbers for Python's.
    """
    origin = get_origin(wanted)
    if wanted is Any:
        return value
    if origin in (Union, types.UnionType):
        exact = [t for t in get_args(wanted) if isinstance(t, type) and type(value) is t]
        for option in exact or get_args(wanted):
            fitted = fit(value, option)
            if fitted is not _NO_FIT:
                return fitted
        return _NO_FIT
    if origin is Literal:
        return value if any(_same(value, option) for option in get_args(wanted)) else _NO_FIT
    if origin is tuple:
        return _fit_tuple(value, get_args(wanted))
    if wanted is float:
        number = isinstance(value, Real) and not isinstance(value, bool)
        return float(value) if number else _NO_FIT
    if wanted is int:
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        return int(value) if whole and abs(value) <= _LARGEST_INT else _NO_FIT
    if wanted in (None, types.NoneType):
        return value if value is None else _NO_FIT
    return value if isinstance(value, origin or wanted) else _NO_FIT


def _fit_tuple(value: Any, item_types: tuple[Any, ...]) -> Any:
    if not isinstance(value, tuple):
        return _NO_FIT
    if len(item_types) == 2 and item_types[1] is Ellipsis:
        item_types = (item_types[0],) * len(value)
    if len(item_types) != len(value):
        return _NO_FIT
    fitted = tuple(fit(v, t) for v, t in zip(value, item_types, strict=True))
    return _NO_FIT if any(item is _NO_FIT for item in fitted) else fitted


def is_fit(value: Any, wanted: Any) -> bool:
    """Whether a value can stand where the wanted type is asked for."""
    return fit(value, wanted) is not _NO_FIT


def advice_for(value: Any, wanted: Any) -> str:
    """Say what a type asks for, and how to write one value where several are wanted."""
    one = get_origin(wanted) is tuple and is_fit((value,), wanted)
    return f"{type_name(wanted)}: write {(value,)!r}" if one else type_name(wanted)


def _shown(value: Any) -> str:
    try:
        return text(value)
    except ExpressionError:
        return repr(value)


def type_name(wanted: Any) -> str:
    """Say what a type asks for, in words."""
    if wanted is types.NoneType:
        return "None"
    if get_origin(wanted) is Literal:
        return " or ".join(repr(option) for option in get_args(wanted))
    if get_origin(wanted) in (Union, types.UnionType):
        return " or ".join(type_name(option) for option in get_args(wanted))
    if get_origin(wanted) is tuple:
        return f"a tuple of {type_name(get_args(wanted)[0])}" if get_args(wanted) else "a tuple"
    names = {
        float: "a number",
        int: "a whole number up to 2^53",
        str: "a quoted string",
        bool: "True or False",
        os.PathLike[str]: "a path",
        Choice: "a name or a call, such as cosine",
    }
    return names.get(wanted, getattr(wanted, "__name__", str(wanted)).lower())
