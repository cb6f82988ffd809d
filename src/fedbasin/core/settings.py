"""Settings as text: nested values to TOML, and to flat names such as ``local.lr``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Value = str | bool | int | float | list[Any] | tuple[Any, ...]


def write_toml(settings: Mapping[str, Any]) -> str:
    """Write settings and one level of sections as TOML."""
    sections = {name: found for name, found in settings.items() if isinstance(found, Mapping)}
    lines = [f"{k} = {write_value(v)}" for k, v in settings.items() if k not in sections]
    for name, section in sections.items():
        lines += ["", f"[{name}]"]
        lines += [f"{key} = {write_value(value)}" for key, value in section.items()]
    return "\n".join(lines) + "\n"


def write_value(value: Value) -> str:
    """Write a scalar or a list as TOML.

    JSON's strings are TOML's as long as nothing outside ASCII is escaped.
    """
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def flatten(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``{"local.lr": 0.1}`` for ``{"local": {"lr": 0.1}}``."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{key}": inner for key, inner in flatten(value).items()}
        else:
            flat[name] = value
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `flatten`, for one level of sections."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        section, dot, key = name.partition(".")
        if dot:
            nested.setdefault(section, {})[key] = value
        else:
            nested[section] = value
    return nested
