"""The catalogue for people and for programs."""

from __future__ import annotations

import inspect
import json
import math
import sys

from rich.table import Table

from fedbasin.core.catalogue import Card, Kind, cards
from fedbasin.core.expressions import parse, text, title

_BESIDE: tuple[Kind, ...] = ("rule", "optimiser", "schedule")  # what is listed beside methods


def cards_table() -> Table:
    """Return all methods as a table."""
    table = Table(title="fedbasin methods NAME shows one with its equations")
    for column in ("name", "what it does", "paper", "needs", "models down/up"):
        table.add_column(column, no_wrap=column == "name")
    for card in cards("method"):
        needs = ", ".join(card.needs) or "-"
        table.add_row(card.name, card.summary, card.paper, needs, f"{card.down:g}/{card.up:g}")
    named = {kind: ", ".join(card.name for card in cards(kind)) for kind in _BESIDE}
    table.caption = (
        f"rules for clients, with local= in any of them: {named['rule']}\n"
        f"optimisers of clients, local.optimiser: {named['optimiser']}\n"
        f"schedules, local.schedule: {named['schedule']}"
    )
    return table


def card_text(name: str) -> str:
    """Return one method with its arguments, its file's equations and its cost.

    A rule, an optimiser or a schedule is shown with its arguments and how it is used.
    """
    beside = [card for kind in _BESIDE for card in cards(kind) if card.name == name]
    if beside:
        return _beside_text(beside[0])
    card = _find(name)
    module = inspect.getdoc(sys.modules[card.make.__module__]) or ""
    arguments = "\n".join(f"    {line}" for line in _arguments(card)) or "    none"
    return "\n".join(
        [
            f"{card.name}: {card.summary}",
            "",
            module,
            "",
            f"arguments (with their defaults)\n{arguments}",
            "",
            f"paper      {card.paper}  {card.url}",
            f"needs      {', '.join(card.needs) or 'nothing beyond the replies'}",
            f"payload    {card.down:g} models down, {card.up:g} up",
            f"is FedAvg  {_neutral(card).replace('`', '')}",
        ]
    )


def _beside_text(card: Card) -> str:
    arguments = ", ".join(f"{p.name}={text(p.default)}" for p in card.parameters)
    call = f"{card.name}({arguments})" if arguments else card.name
    what, use = {
        "rule": ("a rule for clients", f"fedavg(local={call}), and so with every method"),
        "optimiser": (
            "an optimiser of clients",
            f'local.optimiser = "{call}", most often with local.lr = {_usual_lr(card):g}',
        ),
        "schedule": ("a schedule of the learning rate", f'local.schedule = "{call}"'),
    }[card.kind]
    lines = [f"{card.name}, {what}: {inspect.getdoc(card.make)}", "", f"use        {use}"]
    return "\n".join([*lines, f"paper      {card.paper}  {card.url}"] if card.paper else lines)


def _usual_lr(card: Card) -> float:
    """Return the learning rate that an optimiser is most often run at."""
    return getattr(card.make, "default_lr", math.nan)


def cards_markdown() -> str:
    """Return all methods as the table of ``docs/methods.md``."""
    lines = [
        "<!-- Written by `fedbasin methods --markdown`; a test fails when it is out of date. -->",
        "# Methods",
        "",
        "| name | what it does | paper | needs | models down/up | is FedAvg when |",
        "|---|---|---|---|---|---|",
    ]
    for card in cards("method"):
        file = f"../src/{card.make.__module__.replace('.', '/')}.py"
        lines.append(
            f"| [`{card.name}`]({file}) | {card.summary} | [{card.paper}]({card.url}) "
            f"| {', '.join(card.needs) or '-'} | {card.down:g}/{card.up:g} | {_neutral(card)} |"
        )
    lines += ["", "Rules that stack on any method with `local=`:", ""]
    lines += [f"- `{card.name}`: {card.summary}" for card in cards("rule")]
    lines += ["", "Optimisers of clients, `local.optimiser` ([runs](runs.md)):", ""]
    lines += [f"- `{card.name}`: {card.summary}" for card in cards("optimiser")]
    lines += ["", "Schedules, `local.schedule`:", ""]
    lines += [f"- `{card.name}`: {card.summary}" for card in cards("schedule")]
    return "\n".join(lines) + "\n"


def _neutral(card: Card) -> str:
    if isinstance(card.is_fedavg_when, str):
        return card.is_fedavg_when
    setting = ", ".join(f"`{k}={text(v)}`" for k, v in card.is_fedavg_when.items())
    wraps = any(p.name == "inner" for p in card.parameters)
    return f"{setting} (is its inner method)" if wraps else setting or "as it stands"


def cards_json(name: str | None) -> str:
    """Return the methods, or one of them, as JSON."""
    chosen = [_find(name)] if name else cards("method")
    return json.dumps([_plain(card) for card in chosen], indent=2)


def _find(name: str) -> Card:
    known = {c.name: c for c in cards("method")}
    if name not in known:
        parse(name, "method")  # says which names are near; imports what a dotted one needs
        known = {title(c): c for c in cards("method")}
    if name not in known:
        raise ValueError(f"{name!r} is an expression; give the name of one method")
    return known[name]


def _arguments(card: Card) -> list[str]:
    return [p.name if p.required else f"{p.name} = {text(p.default)}" for p in card.parameters]


def _plain(card: Card) -> dict[str, object]:
    return {
        "name": card.name,
        "summary": card.summary,
        "paper": card.paper,
        "url": card.url,
        "needs": list(card.needs),
        "arguments": {p.name: None if p.required else text(p.default) for p in card.parameters},
        "is_fedavg_when": card.is_fedavg_when
        if isinstance(card.is_fedavg_when, str)
        else dict(card.is_fedavg_when),
        "models_down": card.down,
        "models_up": card.up,
    }
