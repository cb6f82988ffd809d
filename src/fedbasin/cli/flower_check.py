"""``fedbasin flower check``: whether a site fits its server, before the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text


def check(
    folder: Annotated[Path, typer.Argument(help="The Flower app, as the server runs it.")],
    write: Annotated[
        Path | None, typer.Option(help="On the server: write its facts here, for the sites.")
    ] = None,
    facts: Annotated[
        Path | None, typer.Option(help="At a site: the server's facts to compare with.")
    ] = None,
    node_config: Annotated[
        str | None,
        typer.Option(
            help="What flower-supernode gets: partition-id=0 num-partitions=2 data='rows.csv'. "
            "Data, model and method are then set up as in a run."
        ),
    ] = None,
    key: Annotated[Path | None, typer.Option(help="The node's private key.")] = None,
    superlink: Annotated[str | None, typer.Option(help="HOST:PORT to reach.")] = None,
    root_certificates: Annotated[
        Path | None, typer.Option(help="The authority that the server's certificate must fit.")
    ] = None,
) -> None:
    """Check before a run whether a site's versions, app, data, model, keys and connection fit.

    The server runs it with --write and sends the file; each site runs it with --facts. It exits
    with 1 if anything does not fit. It imports the app, so check only an app that you trust.
    """
    from fedbasin.cli.flower import check_installed

    check_installed()
    if not (folder / "pyproject.toml").is_file():
        raise ValueError(f"{folder} is no Flower app, it has no pyproject.toml")
    from fedbasin.deploy import check as checks

    found: list[checks.Finding] = []
    ours = checks.facts_of(folder)
    if write is not None:
        write.write_text(json.dumps(ours, indent=1) + "\n", encoding="utf-8")
    if facts is not None:
        found += checks.compare_facts(ours, checks.read_facts(facts))
    else:
        found += [checks.Finding(True, name, value[:12]) for name, value in ours.items()]
    if node_config is not None:
        found += checks.check_client(folder, node_config)
    if key is not None:
        found += checks.check_key(key)
    if superlink is not None:
        found += checks.check_connection(superlink, root_certificates)
    console = Console()
    for finding in found:
        style = "green" if finding.fits else "red"
        told = "fits" if finding.fits else "DOES NOT FIT"
        line = Text.assemble(f"  {finding.what:12}", (f"{told}: ", style), finding.told)
        console.print(line, soft_wrap=True)
    if not all(finding.fits for finding in found):
        raise typer.Exit(1)
