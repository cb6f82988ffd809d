"""A new Flower app, and the bridge from a simulated federation to a real one."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from flwr.app import ArrayRecord

from fedbasin.core.rng import root
from fedbasin.core.settings import flatten, write_value
from fedbasin.deploy.settings import ServerSide
from fedbasin.deploy.strategy import FedbasinStrategy
from fedbasin.sim import Federation

_OUTSIDE = ("pyproject.toml", "README.md")  # the rest goes into the package


def write_app(
    folder: Path, settings: Mapping[str, Any] | None = None, encoding: str = ""
) -> list[Path]:
    """Write a complete Flower app into a new folder; return its files.

    Args:
        folder: the new folder; its name is the app's.
        settings: settings of its own by dotted name, such as ``{"local.lr": 0.05}``.
        encoding: how every node's own table becomes numbers, as JSON; without one, the nodes share
            out a public dataset.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; name a new folder")
    package = re.sub(r"[^a-z0-9_]+", "_", folder.resolve().name.lower()).strip("_")
    if not package or not package[0].isalpha() or len(package) > 32:
        raise ValueError(
            f"{folder.name!r} makes no app name: begin it with a letter, use at most 32 letters, "
            "digits and hyphens"
        )
    names = {"package": package, "project": package.replace("_", "-")}
    written = []
    files = (resources.files("fedbasin.deploy") / "template").iterdir()
    for source in sorted((f for f in files if f.name.endswith(".in")), key=lambda file: file.name):
        name = source.name.removesuffix(".in")
        path = folder / name if name in _OUTSIDE else folder / package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = Template(source.read_text(encoding="utf-8")).substitute(names)
        if name == "pyproject.toml":
            text = _with_settings(text, settings or {})
        path.write_text(text, encoding="utf-8")
        written.append(path)
    if encoding:
        written.append(folder / package / "encoding.json")
        written[-1].write_text(encoding, encoding="utf-8")
    return written


def read_app(folder: Path) -> dict[str, Any]:
    """Return the settings of an app, flat: ``{"local.lr": 0.1}``."""
    described: Any = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    for key in ("tool", "flwr", "app", "config"):
        described = described.get(key) if isinstance(described, dict) else None
    return flatten(described) if isinstance(described, dict) else {}


def check_setting(key: str, value: Any) -> None:
    """Refuse a value that Flower's run configuration cannot carry."""
    if not isinstance(value, str | int | float | bool):
        raise ValueError(
            f"{key}={value!r}: a federation's settings are text, numbers, true or false"
        )


def _with_settings(text: str, settings: Mapping[str, Any]) -> str:
    """Write settings into the app's configuration, keeping its comments."""
    lines = text.splitlines()
    for name, value in settings.items():
        check_setting(name, value)
        section, _, key = name.rpartition(".")
        head = f"[tool.flwr.app.config{'.' + section if section else ''}]"
        said = f"{key} = {write_value(value)}"
        if head not in lines:
            lines += ["", head]
        start = lines.index(head) + 1
        end = next((n for n in range(start, len(lines)) if lines[n].startswith("[")), len(lines))
        for number in range(start, end):
            if re.match(rf"{re.escape(key)}\s*=", lines[number]):
                comment = re.search(r"\s+# [^\"]*$", lines[number])
                lines[number] = said + (comment[0] if comment else "")
                break
        else:
            lines.insert(start, said)
    return "\n".join(lines) + "\n"


def nested(run_config: Mapping[str, Any]) -> dict[str, Any]:
    """Turn Flower's flat ``{"local.lr": 0.1}`` into ``{"local": {"lr": 0.1}}``."""
    settings: dict[str, Any] = {}
    for key, value in run_config.items():
        *parents, leaf = key.split(".")
        section = settings
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    return settings


def strategy_of(federation: Federation, *, seed: int, **settings: Any) -> FedbasinStrategy:
    """Return the strategy that does what a simulated federation does.

    Args:
        federation: what was simulated.
        seed: with which seed.
        settings: further arguments of `FedbasinStrategy`, which override the federation's.
            ``server`` replaces `ServerSide.of(federation)`.
    """
    if root(seed) != federation.key:
        raise ValueError(f"the federation was built with another seed than {seed}")
    same: dict[str, Any] = dict(
        participation=str(federation.participation),
        seed=seed,
        server=ServerSide.of(federation),
    )
    return FedbasinStrategy(federation.method, **(same | settings))


def first_arrays(federation: Federation) -> ArrayRecord:
    """Return the initial model of a simulated federation as Flower takes it."""
    net = federation.net
    return ArrayRecord(net.state_dict(*net.initial()))
