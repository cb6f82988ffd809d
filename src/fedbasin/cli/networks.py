"""`fedbasin models`: the networks that a run can be given."""

from __future__ import annotations

import inspect
import json
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from fedbasin.api.progress import wide_console
from fedbasin.core.catalogue import Card, cards
from fedbasin.core.expressions import text
from fedbasin.core.suggest import nearest

console = wide_console()


def models(
    name: Annotated[str | None, typer.Argument(help="One of them, to see all about it.")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="A data set, as in fedbasin data list: say how large each network is."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List the networks, or show one with its arguments.

    A network takes its input's shape and its number of outputs from the data. With
    [bold]--data cifar10[/bold] the list says how many parameters each then has, or why it cannot
    take these rows.
    """
    import fedbasin.experiment  # noqa: F401  (fills the catalogue)

    chosen = [_find(name)] if name else cards("model")
    sizes = _sizes(chosen, data) if data else {}
    if as_json:
        typer.echo(json.dumps([_plain(card, sizes) for card in chosen], indent=2))
    elif name is None:
        console.print(_table(chosen, sizes, data))
    else:
        console.print(_page(chosen[0], sizes, data), highlight=False, markup=False)


def _find(name: str) -> Card:
    known = {card.name: card for card in cards("model")}
    if name not in known:
        raise ValueError(f"no network is called {name!r}; {nearest(name, sorted(known))}")
    return known[name]


def _table(chosen: list[Card], sizes: dict[str, str], data: str | None) -> Table:
    table = Table(title="fedbasin models NAME shows one with its arguments")
    columns = ["name", "what it is", "arguments", "paper"]
    for column in columns + ([f"parameters for {data}"] if data else []):
        table.add_column(column, no_wrap=column == "name")
    for card in chosen:
        arguments = ", ".join(p.name for p in card.parameters) or "-"
        cells = [card.name, card.summary, arguments, card.paper or "-"]
        table.add_row(*map(Text, cells + ([sizes[card.name]] if data else [])))
    table.caption = 'model = "NAME(argument=...)" in a config; docs/models.md has the choices'
    return table


def _page(card: Card, sizes: dict[str, str], data: str | None) -> str:
    arguments = [
        f"    {p.name}" if p.required else f"    {p.name} = {text(p.default)}"
        for p in card.parameters
    ]
    lines = [f"{card.name}: {inspect.getdoc(card.make)}", ""]
    lines += ["arguments (with their defaults)", *(arguments or ["    none"]), ""]
    lines += [f"use        --set model={card.name}"]
    lines += [f"size       {sizes[card.name]} for {data}"] if data else []
    return "\n".join([*lines, f"paper      {card.paper}  {card.url}"] if card.paper else lines)


def _sizes(chosen: list[Card], data: str) -> dict[str, str]:
    """Say how many parameters each network has for a data set, at its defaults."""
    from fedbasin.data.catalogue import describe

    listing = describe(data)
    if not listing.shape:
        raise ValueError(f"--data {data}: its rows have no shape before they are decoded")
    return {card.name: _size(card, listing.shape, listing.classes or 1) for card in chosen}


def _size(card: Card, shape: tuple[int, ...], outputs: int) -> str:
    if any(p.required for p in card.parameters):
        return "depends on its arguments"
    try:
        network = card.make(shape, outputs)
    except (ValueError, RuntimeError, ImportError) as error:
        return f"cannot: {error}"
    return f"{sum(p.numel() for p in network.parameters()):,}"


def _plain(card: Card, sizes: dict[str, str]) -> dict[str, object]:
    size = {"parameters": sizes[card.name]} if sizes else {}
    return {
        "name": card.name,
        "summary": card.summary,
        "paper": card.paper,
        "url": card.url,
        "arguments": {p.name: None if p.required else text(p.default) for p in card.parameters},
        **size,
    }
