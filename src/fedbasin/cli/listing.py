"""The catalogue for people and for programs."""

from __future__ import annotations

import inspect
import json
import math
import sys

from rich.table import Table

from fedbasin.core.catalogue import Card, Kind, cards, needs_of
from fedbasin.core.expressions import parse, text, title
from fedbasin.core.needs import missing_of

# What is listed beside methods.
_BESIDE: tuple[Kind, ...] = (
    "rule",
    "optimiser",
    "schedule",
    "task",
    "metric",
    "personalisation",
    "attack",
)


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
        f"schedules, local.schedule: {named['schedule']}\n"
        f"tasks, task: {named['task']}\n"
        f"metrics, sim.metrics: {named['metric']}\n"
        f"attacks of hostile clients, attack: {named['attack']}"
    )
    return table


def card_text(name: str) -> str:
    """Return one method with its arguments, its file's equations and its cost.

    What is listed beside methods is shown with its arguments and how it is used.
    """
    card = _find(name)
    if card.kind != "method":
        return _beside_text(card)
    module = inspect.getdoc(sys.modules[card.make.__module__]) or ""
    arguments = _indented(_arguments(card)) or "    none"
    return "\n".join(
        [
            f"{card.name}: {card.summary}",
            "",
            module,
            "",
            f"arguments (with their defaults)\n{arguments}",
            "",
            f"tuned by fedbasin tune\n{_indented(_tunable(card))}",
            "",
            f"paper      {card.paper}  {card.url}",
            f"needs      {', '.join(card.needs) or 'nothing beyond the replies'}",
            f"payload    {card.down:g} models down, {card.up:g} up",
            f"is FedAvg  {_neutral(card).replace('`', '')}",
        ]
    )


def _beside_text(card: Card) -> str:
    arguments = ", ".join(
        f"{p.name}=..." if p.required else f"{p.name}={text(p.default)}" for p in card.parameters
    )
    call = f"{card.name}({arguments})" if arguments else card.name
    what, use = {
        "rule": ("a rule for clients", f"fedavg(local={call}), and so with every method"),
        "optimiser": (
            "an optimiser of clients",
            f'local.optimiser = "{call}", most often with local.lr = {_usual_lr(card):g}',
        ),
        "schedule": ("a schedule of the learning rate", f'local.schedule = "{call}"'),
        "task": ("a task", f'task = "{call}"'),
        "personalisation": ("fine-tuning at home", f'sim.personalise = "{call}"'),
        "metric": ("a metric", f'sim.metrics = ["{call}"], beside those of the task'),
        "attack": ("an attack", f'attack = "{call}", with partition.hostile = 0.2'),
    }[card.kind]
    lines = [f"{card.name}, {what}: {inspect.getdoc(card.make)}", "", f"use        {use}"]
    lines += [f"{name:<10} {value}" for name, value in _facts(card).items()]
    return "\n".join([*lines, f"paper      {card.paper}  {card.url}"] if card.paper else lines)


def _facts(card: Card) -> dict[str, str]:
    """Return what a reader wants to know about a task or a metric; nothing about other things."""
    if card.kind == "task":
        metrics: tuple[str, ...] = getattr(card.make, "usual_metrics", ())
        refused = [c.name for kind in ("method", "rule") for c in cards(kind) if _lacks(c, card)]
        return {
            "headline": metrics[0],
            "metrics": ", ".join(metrics),
            "refused": ", ".join(refused) or "nothing",
        }
    if card.kind == "metric":
        fits: frozenset[str] = getattr(card.make, "fits", frozenset())
        kinds = {c.name: getattr(c.make, "kind", "") for c in cards("task")}
        fitting = [name for name, kind in kinds.items() if not fits or kind in fits]
        return {"better": _better(card), "tasks": ", ".join(fitting)}
    return {}


def _better(card: Card) -> str:
    """Return the direction of a metric, with its unit where it has one."""
    better = "higher" if getattr(card.make, "higher_is_better", True) else "lower"
    unit = getattr(card.make, "unit", "")
    return f"{better}, in {unit}" if unit else better


def _lacks(card: Card, task: Card) -> bool:
    """Return whether a method or rule, at its defaults, needs what a task does not provide."""
    whole = not any(p.required for p in card.parameters)
    needs = needs_of(card.make()) if whole else set(card.needs)
    return bool(missing_of(needs, getattr(task.make, "provides", frozenset())))


def _usual_lr(card: Card) -> float:
    """Return the learning rate that an optimiser is most often run at."""
    return getattr(card.make, "default_lr", math.nan)


def cards_markdown() -> str:
    """Return all methods as the table of ``docs/methods.md``."""
    lines = [
        "<!-- Written by `make generated`; a test fails when it is out of date. -->",
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
    lines += ["", "Tasks, `task` ([tasks](tasks.md)):", ""]
    lines += [f"- `{card.name}`: {card.summary}" for card in cards("task")]
    lines += ["", "Metrics, `sim.metrics` (what is better, and the unit):", ""]
    lines += [f"- `{card.name}` ({_better(card)}): {card.summary}" for card in cards("metric")]
    lines += ["", "Attacks of hostile clients, `attack` ([trust](methods/trust.md)):", ""]
    lines += [f"- `{card.name}`: {card.summary}" for card in cards("attack")]
    lines += ["", "Fine-tuning at home, `sim.personalise` ([clients](methods/clients.md)):", ""]
    lines += [f"- `{card.name}`: {card.summary}" for card in cards("personalisation")]
    return "\n".join(lines) + "\n"


def _neutral(card: Card) -> str:
    if isinstance(card.is_fedavg_when, str):
        return card.is_fedavg_when
    setting = ", ".join(f"`{k}={text(v)}`" for k, v in card.is_fedavg_when.items())
    wraps = any(p.name == "inner" for p in card.parameters)
    return f"{setting} (is its inner method)" if wraps else setting or "as it stands"


def cards_json(name: str | None) -> str:
    """Return the methods, or one thing of the catalogue, as JSON."""
    chosen = [_find(name)] if name else cards("method")
    return json.dumps([_plain(card) for card in chosen], indent=2)


def _find(name: str) -> Card:
    beside = {card.name: card for kind in _BESIDE for card in cards(kind)}
    if name in beside:
        return beside[name]
    known = {c.name: c for c in cards("method")}
    if name not in known:
        parse(name, "method")  # says which names are near; imports what a dotted one needs
        known = {title(c): c for c in cards("method")}
    if name not in known:
        raise ValueError(f"{name!r} is an expression; give the name of one method")
    return known[name]


def _arguments(card: Card) -> list[str]:
    return [p.name if p.required else f"{p.name} = {text(p.default)}" for p in card.parameters]


def _indented(lines: list[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)


def _tunable(card: Card) -> list[str]:
    """Say where each tunable argument may lie, or why there is none."""
    if isinstance(card.tunable, str):
        return [card.tunable]
    if not card.tunable:
        return ["nothing: its card names no space (tunable=)"]
    return [f"{name} in {space}" for name, space in card.tunable.items()]


def _plain(card: Card) -> dict[str, object]:
    return {
        "name": card.name,
        "kind": card.kind,
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
        "tunable": card.tunable
        if isinstance(card.tunable, str)
        else {name: str(space) for name, space in card.tunable.items()},
        **_facts(card),
    }
