"""Tell a site before a run whether its versions, app, data, keys and connection fit the server's.

The server writes its facts to a file. Each site compares its own with them, sets up its client as
a run would, and tries the connection. Nothing is trained and nothing is sent but a TLS greeting.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib
import json
import platform
import socket
import ssl
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from flwr.app import Context, RecordDict
from flwr.common.config import parse_config_args

from fedbasin.data import DataError
from fedbasin.deploy.app import read_app
from fedbasin.deploy.client import ClientSetup
from fedbasin.deploy.wire import Refused

_PACKAGES = ("fedbasin", "flwr", "torch")
_PARTS = ("*.py", "*.toml", "*.json")  # of an app, as they travel to the nodes
_LARGEST_FACTS = 100_000  # bytes


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    fits: bool
    what: str
    told: str


def facts_of(app: Path) -> dict[str, str]:
    """Return what must be the same on the server and at every site."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python, **{name: version(name) for name in _PACKAGES}, "app": _hash(app)}


def read_facts(path: Path) -> dict[str, str]:
    """Read the server's facts from the file that it wrote."""
    text = path.read_bytes()[: _LARGEST_FACTS + 1]
    if len(text) > _LARGEST_FACTS:
        raise ValueError(f"{path} is too large to be the server's facts")
    try:
        facts = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} does not hold the server's facts: {error}") from None
    if not isinstance(facts, dict) or not all(isinstance(value, str) for value in facts.values()):
        raise ValueError(f"{path} does not hold the server's facts, which are texts by name")
    return facts


def compare_facts(ours: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[Finding]:
    """Compare a site with its server."""
    for name, value in ours.items():
        wanted = theirs.get(name)
        if wanted == value:
            yield Finding(True, name, f"{value[:12]}, as on the server")
        elif name == "app":
            yield Finding(False, name, "its files differ from the server's: copy the app again")
        else:
            yield Finding(False, name, f"{value} here, {wanted} on the server: install the same")


def check_client(app: Path, node_config: str) -> Iterator[Finding]:
    """Set up the client of a node as a run would: settings, rows, network and method."""
    try:
        facts = parse_config_args([node_config])
        module = _client_module(app)
        make = getattr(module, "setup", None)
        if make is None:
            yield Finding(True, "client", "imported; it has no setup(context) to try")
            return
        context = Context(1, 1, dict(facts), RecordDict(), read_app(app))
        setup: ClientSetup = make(context)
    except (DataError, Refused, ValueError, OSError, ImportError) as error:
        yield Finding(False, "client", str(error))
        return
    held = "" if setup.held_out is None else f", {len(setup.held_out.labels)} held out"
    yield Finding(
        True, "data", f"client {setup.client} of {setup.clients}: {setup.examples} rows{held}"
    )
    shape = list(setup.rows.inputs.shape[1:])
    network = setup.net
    yield Finding(
        True,
        "model",
        f"{network.layout.size:,} parameters, takes rows of shape {shape}; method {setup.method}",
    )


def check_key(path: Path) -> Iterator[Finding]:
    """Check a node's private key: that it can be read, and by nobody else."""
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
        public = key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        stored = path.with_name(path.name + ".pub").read_bytes()
    except (OSError, ValueError) as error:
        yield Finding(False, "key", f"{path}: {error}")
        return
    if path.stat().st_mode & 0o077:
        yield Finding(False, "key", f"others can read {path}: chmod 600 {path}")
    elif stored.split()[:2] != public.split()[:2]:
        yield Finding(False, "key", f"{path}.pub does not belong to {path}: send the right one")
    else:
        yield Finding(True, "key", f"register {path}.pub on the server")


def check_connection(superlink: str, authority: Path | None) -> Iterator[Finding]:
    """Try the SuperLink's port, with TLS where an authority is given."""
    host, colon, port = superlink.rpartition(":")
    if not colon or not port.isdigit():
        yield Finding(False, "server", f"{superlink!r} is no HOST:PORT")
        return
    if authority is not None:
        try:
            found = x509.load_pem_x509_certificate(authority.read_bytes())
        except (OSError, ValueError) as error:
            yield Finding(False, "certificate", f"{authority}: {error}")
            return
        left = found.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
        if left.total_seconds() < 0:
            yield Finding(False, "certificate", f"{authority} expired: ask the server for a new")
            return
        yield Finding(True, "certificate", f"{authority} is valid for {left.days} more days")
    try:
        with socket.create_connection((host, int(port)), timeout=10) as plain:
            if authority is None:
                yield Finding(True, "server", f"{superlink} answers, without TLS")
                return
            trust = ssl.create_default_context(cafile=str(authority))
            with trust.wrap_socket(plain, server_hostname=host):
                yield Finding(True, "server", f"{superlink} shows a certificate that fits")
    except OSError as error:
        yield Finding(False, "server", f"{superlink}: {error}")


def _client_module(app: Path) -> Any:
    """Import the module of an app's ClientApp."""
    described: Any = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))
    try:
        where = described["tool"]["flwr"]["app"]["components"]["clientapp"]
    except (KeyError, TypeError):
        raise ValueError(f"{app}/pyproject.toml names no clientapp: it is no Flower app") from None
    if str(app.resolve()) not in sys.path:
        sys.path.insert(0, str(app.resolve()))
    return importlib.import_module(str(where).partition(":")[0])


def _hash(app: Path) -> str:
    """Return a hash of the app's files, by name and content."""
    digest = hashlib.sha256()
    files = {file for part in _PARTS for file in app.rglob(part)}
    for file in sorted(files):
        name = file.relative_to(app)
        if not any(part.startswith(".") for part in name.parts):
            digest.update(f"{name.as_posix()}\0".encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
