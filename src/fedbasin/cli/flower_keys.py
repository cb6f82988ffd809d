"""``fedbasin flower keys``: the certificate of a server, and the key of a node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

app = typer.Typer(
    no_args_is_help=True,
    help="Make the certificate of a server, and the key of a node (needs the extra flower).",
)


@app.command()
def server(
    folder: Annotated[
        Path, typer.Argument(help="A new folder for ca.crt, server.pem, server.key.")
    ],
    host: Annotated[
        list[str], typer.Option(help="A name or address by which nodes reach it. May be repeated.")
    ],
    days: Annotated[int, typer.Option(min=1, help="How long it is valid.")] = 365,
) -> None:
    """Make a certificate for a server, and the authority that nodes trust.

    Copy ca.crt to every node. server.key stays on the server.
    """
    from fedbasin.deploy.certificates import make_certificates

    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: name a new folder, so that no key is replaced")
    files = make_certificates(folder, host, days)
    _say(files.authority, files.server, files.key)


@app.command()
def node(
    path: Annotated[Path, typer.Argument(help="The private key; the public one gets .pub.")],
) -> None:
    """Make a node's key on that node. Send the .pub file to the server, never the other."""
    from fedbasin.deploy.certificates import make_node_key

    if path.exists():
        raise ValueError(f"{path} exists: a new key would shut this node out; name another file")
    _say(path, make_node_key(path))


def _say(*paths: Path) -> None:
    Console().print(Text("\n".join(str(path) for path in paths)), soft_wrap=True)
