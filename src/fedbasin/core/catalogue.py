"""The catalogue: every method, rule, optimiser, partition, model and schedule by its name.

A card stands beside the thing it describes, so adding something touches one file.
What is listed is either a frozen dataclass (its fields are the hyper-parameters) or a
function whose keyword-only parameters are the hyper-parameters and whose positional
parameters are what the caller supplies later (labels, a round number, an input shape).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar, get_type_hints

from fedbasin.core.space import Space

Kind = Literal[
    "method",
    "rule",
    "optimiser",
    "task",
    "metric",
    "partition",
    "model",
    "schedule",
    "participation",
    "personalisation",
    "attack",
]
T = TypeVar("T", bound=Callable[..., Any])
_MISSING = inspect.Parameter.empty


@dataclass(frozen=True)
class Parameter:
    """One hyper-parameter: its name, its type and its default (absent when required)."""

    name: str
    type: Any
    default: Any = _MISSING

    @property
    def required(self) -> bool:
        """Whether the expression must give a value."""
        return self.default is _MISSING


@dataclass(frozen=True)
class Card:
    """What the catalogue knows about one entry.

    Args:
        name: the word used in expressions.
        kind: which family the entry belongs to.
        make: the dataclass or function itself.
        paper: authors, venue and year.
        url: where to read it.
        needs: what the entry asks of the outside world, such as ``"proxy"``.
        is_fedavg_when: arguments at which a method equals FedAvg, or the reason it never does.
        exempt: laws of `fedbasin.testing` the method does not obey, each with its reason.
        down: models a client receives in a round (1 for FedAvg).
        up: models a client sends back in a round (1 for FedAvg).
        tunable: where each argument that is worth tuning may lie, or why there is none.
    """

    name: str
    kind: Kind
    make: Callable[..., Any]
    paper: str = ""
    url: str = ""
    needs: tuple[str, ...] = ()
    is_fedavg_when: Mapping[str, Any] | str = field(default_factory=dict)
    exempt: Mapping[str, str] = field(default_factory=dict)
    down: float = 1.0
    up: float = 1.0
    tunable: Mapping[str, Space] | str = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(self.make) or "").split("\n", 1)[0]

    @property
    def is_function(self) -> bool:
        """Whether the entry is a function rather than a dataclass."""
        return not is_dataclass(self.make)

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The hyper-parameters, in the order they may be given without a name."""
        hints = get_type_hints(self.make)
        signature = inspect.signature(self.make).parameters.values()
        if not self.is_function:
            visible = {f.name for f in fields(self.make) if f.init}  # type: ignore[arg-type]
            chosen = [p for p in signature if p.name in visible]
        else:
            chosen = [p for p in signature if p.kind is inspect.Parameter.KEYWORD_ONLY]
        return tuple(
            Parameter(p.name, hints.get(p.name, Any), _default(self.make, p)) for p in chosen
        )


def _default(make: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Return a parameter's default, calling the factory of a dataclass field where it has one."""
    if is_dataclass(make):
        for f in fields(make):
            if f.name == parameter.name and callable(f.default_factory):
                return f.default_factory()
    return parameter.default


CATALOGUE: dict[str, Card] = {}


def entry(
    kind: Kind,
    *,
    name: str | None = None,
    paper: str = "",
    url: str = "",
    needs: tuple[str, ...] = (),
    is_fedavg_when: Mapping[str, Any] | str | None = None,
    exempt: Mapping[str, str] | None = None,
    down: float = 1.0,
    up: float = 1.0,
    tunable: Mapping[str, Space] | str | None = None,
) -> Callable[[T], T]:
    """Enter a frozen dataclass or a function in the catalogue.

    A name that is taken already is an error. The same definition executed again, as in a notebook
    cell that is run twice, replaces the earlier one.
    """

    def enter(make: T) -> T:
        title = name or make.__name__.lower()
        if title in CATALOGUE and not _is_redefined(CATALOGUE[title], kind, make):
            taken = CATALOGUE[title].make
            raise ValueError(
                f"the name {title!r} is taken by {taken.__module__}.{taken.__qualname__}; "
                f"choose another name for {make.__module__}.{make.__qualname__}"
            )
        CATALOGUE[title] = Card(
            name=title,
            kind=kind,
            make=make,
            paper=paper,
            url=url,
            needs=needs,
            is_fedavg_when=is_fedavg_when or {},
            exempt=exempt or {},
            down=down,
            up=up,
            tunable=tunable or {},
        )
        return make

    return enter


def _is_redefined(card: Card, kind: Kind, make: Callable[..., Any]) -> bool:
    """Whether a definition is that of the card, executed again."""
    before = (card.kind, card.make.__module__, card.make.__qualname__)
    return before == (kind, make.__module__, make.__qualname__)


def cards(kind: Kind) -> list[Card]:
    """All cards of one kind, in the order they were entered."""
    return [card for card in CATALOGUE.values() if card.kind == kind]


def card_of(thing: object) -> Card:
    """Return the card of an object built from the catalogue."""
    for card in CATALOGUE.values():
        if card.make is type(thing):
            return card
    raise KeyError(
        f"{type(thing).__name__} is not in the catalogue: mark it with @entry, as "
        "examples/new_method.py does"
    )


def needs_of(thing: object) -> set[str]:
    """Return what a method, those inside it and their clients' rules ask of the outside world.

    An object that is not in the catalogue has no needs.
    """
    card = next((card for card in CATALOGUE.values() if card.make is type(thing)), None)
    if card is None:
        return set()
    needs = set(card.needs)
    inside = [getattr(thing, p.name) for p in card.parameters]
    if card.kind == "method":
        needs -= thing.optional_needs  # type: ignore[attr-defined]
        inside += thing.rules()  # type: ignore[attr-defined]
    return needs.union(*map(needs_of, inside))
