"""What is tuned: arguments of a method and of those inside it, and settings common to all.

A method's card says where its arguments may lie. An argument that is written in the expression,
such as mu of ``fedprox(mu=0.1)``, keeps its value. `over` adds settings of clients, which all
methods share, and replaces the ranges of methods.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args, get_type_hints

from fedbasin.core.catalogue import CATALOGUE, Card, Parameter, card_of, cards
from fedbasin.core.expressions import is_fit, parse, text, type_name
from fedbasin.core.method import Method
from fedbasin.core.space import Options, Range, Scale, Space, SpaceError
from fedbasin.core.suggest import nearest
from fedbasin.experiment.config import ConfigError, Experiment, LocalConfig

Over = Mapping[str, Space]
# Settings that differ by orders of magnitude.
_LOG = ("lr", "weight_decay", "clip", "batch", "epochs", "steps")
# Settings that change how many steps a client takes.
STEP_SETTINGS = ("local.epochs", "local.steps", "local.batch")


class TuneError(ConfigError):
    """Something that cannot be tuned: what, and what to write instead."""


@dataclass(frozen=True)
class Argument:
    """One thing that is tuned.

    Args:
        name: what tables and ``--over`` call it: ``local.lr``, ``fedprox.mu``.
        place: where it stands: the field of the section `local`, or the fields that lead from the
            outermost method to the argument.
        space: where its values lie.
        default: its value without tuning.
        common: whether all methods share it.
    """

    name: str
    place: tuple[str, ...]
    space: Space
    default: Any
    common: bool = False


def read_over(assignments: Sequence[str]) -> dict[str, Space]:
    """Read ``--over``: ``local.lr=0.01..1``, ``ima.window=2..9:linear``, ``local.epochs=1,2,5``."""
    over: dict[str, Space] = {}
    for assignment in assignments:
        name, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals or not name or not value:
            raise TuneError(
                f"--over {assignment!r}: write a range such as local.lr=0.01..1, or choices such "
                "as local.epochs=1,2,5"
            )
        if name in over:
            raise TuneError(f"--over names {name} twice")
        over[name] = _read_space(name, value)
    return over


def _read_space(name: str, value: str) -> Space:
    if ".." not in value:
        return space_of(name, [_read_value(name, part) for part in value.split(",")])
    span, _, scale = value.partition(":")
    low, _, high = span.partition("..")
    ends = [_read_value(name, end) for end in (low, high)]
    return space_of(name, (*ends, scale) if scale else tuple(ends))


def _read_value(name: str, word: str) -> Any:
    word = word.strip()
    for read in (int, float):
        try:
            return read(word)
        except ValueError:
            continue
    if word in ("True", "False", "true", "false"):
        return word in ("True", "true")
    if not word:
        raise TuneError(f"--over {name}: an end or a choice is missing; write {name}=0.01..1")
    return word.strip("'\"")


def space_of(name: str, given: Any) -> Space:
    """Read a space from Python: (low, high), (low, high, "log"), a list of choices, a Space.

    Without a scale, rates and counts are on a log scale, and so is what spans a factor of 100.
    """
    if isinstance(given, Range | Options):
        return given
    try:
        if isinstance(given, list):
            return Options(*given)
        if isinstance(given, tuple) and len(given) in (2, 3):
            return _range(name, *given)
    except SpaceError as error:
        raise TuneError(f"over {name}: {error}") from error
    raise TuneError(
        f"over {name} is {given!r:.60}: give (low, high), (low, high, 'log') or a list of choices"
    )


def _range(name: str, low: Any, high: Any, scale: Scale | None = None) -> Range:
    for end in (low, high):
        if isinstance(end, bool) or not isinstance(end, int | float):
            raise TuneError(f"over {name}: {end!r} is no number; write {name}=0.01..1")
    if scale is None:
        rate = name.rpartition(".")[2] in _LOG
        wide = low > 0 and high / low >= 100
        scale = "log" if low > 0 and (rate or wide) else "linear"
    if scale not in get_args(Scale):
        raise TuneError(f"over {name}: the scale is {scale!r}; write log or linear")
    return Range(low, high, scale, whole=isinstance(low, int) and isinstance(high, int))


def arguments_of(method: str, base: Experiment, over: Over) -> list[Argument]:
    """Return what is tuned for a method: the common settings first, in the order of `over`."""
    settings = [
        Argument(name, (name.removeprefix("local."),), space, _default(base, name), common=True)
        for name, space in over.items()
        if name.startswith("local.")
    ]
    return settings + list(_of_method(parse(method, "method"), over))


def _of_method(method: Method, over: Over) -> Iterator[Argument]:
    seen: dict[str, int] = {}
    for place, inner in _nested(method):
        card = card_of(inner)
        own = dict(card.tunable) if isinstance(card.tunable, Mapping) else {}
        prefix = f"{card.name}."
        asked = {n.removeprefix(prefix): s for n, s in over.items() if n.startswith(prefix)}
        for parameter in card.parameters:
            space = asked.get(parameter.name, own.get(parameter.name))
            value = getattr(inner, parameter.name)
            written = value != parameter.default and parameter.name not in asked
            if space is None or written:
                continue
            name = f"{prefix}{parameter.name}"
            seen[name] = seen.get(name, 0) + 1
            if seen[name] > 1:  # a method inside one of its own kind
                name = f"{name} ({seen[name]})"
            yield Argument(name, (*place, parameter.name), _fitting(name, parameter, space), value)


def _nested(method: Method, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield a method and those inside it, with the fields that lead there."""
    yield place, method
    for parameter in card_of(method).parameters:
        value = getattr(method, parameter.name)
        if isinstance(value, Method):
            yield from _nested(value, (*place, parameter.name))


def _fitting(name: str, parameter: Parameter, space: Space) -> Space:
    """Return a space whose values the argument takes: whole numbers for whole arguments."""
    if parameter.type is int and isinstance(space, Range):
        space = replace(space, whole=True)
    elif parameter.type is float and isinstance(space, Range):
        space = replace(space, whole=False)
    for share in (0.0, 1.0):
        if not is_fit(space.at(share), parameter.type):
            raise TuneError(
                f"over {name}: {space.at(share)!r} does not fit, it must be "
                f"{type_name(parameter.type)}"
            )
    return space


def check_over(methods: Sequence[str], base: Experiment, over: Over) -> None:
    """Refuse names that are no setting of clients and no argument of a method that is tuned."""
    inside: dict[str, Card] = {}
    for method in methods:
        for _, inner in _nested(parse(method, "method")):
            card = card_of(inner)
            inside[card.name] = card
    for name, space in over.items():
        section, _, field = name.rpartition(".")
        if section == "local":
            _check_setting(name, field, space)
            _default(base, name)
        elif section in inside:
            known = [parameter.name for parameter in inside[section].parameters]
            if field not in known:
                raise TuneError(
                    f"over {name}: {section} has no argument {field!r}; {nearest(field, known)}"
                )
        elif section in CATALOGUE and CATALOGUE[section].kind == "method":
            raise TuneError(
                f"over {name}: {section} is not among the methods; add it, or leave the range out"
            )
        else:
            known = [f"local.{one.name}" for one in fields(LocalConfig)]
            known += [f"{card.name}." for card in cards("method")]
            raise TuneError(
                f"over {name}: write a setting of clients (local.lr) or an argument of a method "
                f"(fedprox.mu); {nearest(name, known)}"
            )


def _check_setting(name: str, field: str, space: Space) -> None:
    hints = get_type_hints(LocalConfig)
    if field not in hints:
        raise TuneError(f"over {name}: {nearest(name, [f'local.{each}' for each in hints])}")
    kind = hints[field]
    for share in (0.0, 1.0):
        value = space.at(share)
        number_for_number = kind is float and isinstance(value, int | float)
        if not is_fit(value, kind) and not number_for_number:
            raise TuneError(f"over {name}: {value!r} does not fit, it must be {type_name(kind)}")
    if isinstance(kind, types.UnionType):
        raise TuneError(f"over {name}: this setting cannot be tuned")


def _default(base: Experiment, name: str) -> Any:
    return getattr(base.local, name.removeprefix("local."))


def with_values(
    base: Experiment, method: str, arguments: Sequence[Argument], values: Sequence[Any]
) -> Experiment:
    """Return the run of a method with these values of its arguments."""
    chosen: Method = parse(method, "method")
    local = base.local
    for argument, value in zip(arguments, values, strict=True):
        if argument.common:
            local = replace(local, **{argument.place[0]: _as_default(value, argument.default)})
        else:
            chosen = _replaced(chosen, argument.place, value)
    return replace(base, method=text(chosen), local=local).resolved()


def _as_default(value: Any, default: Any) -> Any:
    """Return a whole number as a float where the setting is one."""
    return float(value) if isinstance(default, float) and isinstance(value, int) else value


def _replaced(method: Any, place: tuple[str, ...], value: Any) -> Any:
    first, *rest = place
    if rest:
        value = _replaced(getattr(method, first), tuple(rest), value)
    return replace(method, **{first: value})
