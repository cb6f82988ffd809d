"""Mappings, as TOML, JSON and Python give them, read into dataclasses and checked.

Settings, tables, result lines and figures are all read here, so they are refused alike: an error
names the file, the field, the value and what to write instead. A field declares its type, its
bounds (`core.bounds`) and whether it holds expressions (metadata ``kind``).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from fedbasin.core.bounds import bounds_of
from fedbasin.core.catalogue import Kind
from fedbasin.core.expressions import ExpressionError, advice_for, fit, is_fit, parse, written
from fedbasin.core.suggest import did_you_mean, nearest

T = TypeVar("T")


@dataclass(frozen=True)
class Form:
    """What the advice of an error tells somebody to write.

    Args:
        section: for a value where a section must be; ``{path}`` is the section, ``{field}`` its
            first field.
        inside: for a field of a section that was given outside of it.
    """

    section: str
    inside: str


TOML = Form("write [{path}] and its {noun}s below", "{section}.{field}")
COMMAND = Form("write --set {path}.{field}=..., or [{path}] in a file", "{section}.{field}")
PYTHON = Form("write {path}={{'{field}': ...}}", "{section}={{'{field}': ...}}")


@dataclass(frozen=True)
class Reader:
    """How mappings of one kind are read.

    Args:
        error: what is raised.
        file: the file, and line, that errors begin with.
        noun: what a key is called in errors.
        complete: every field must be given, also those that have a default.
        read_plain: reads a value that holds no dataclass, from (value, type, place), and raises
            `error`; by default values are fitted to the type, and a list stands for a tuple.
        form: how the caller gives values.
    """

    error: type[ValueError]
    file: str = ""
    noun: str = "field"
    complete: bool = False
    read_plain: Callable[[Any, Any, str], Any] | None = None
    form: Form = TOML

    def read(self, cls: type[T], value: Any, path: str = "") -> T:
        """Return the dataclass that a mapping stands for.

        Args:
            cls: the dataclass.
            value: the mapping, or such a dataclass that Python made; anything else is refused.
            path: where it lies in the file, such as ``"local"``; the file itself without one.
        """
        given = self.values(cls, value, path)
        missing = [name for name in _required(cls) if name not in given]
        if missing:
            place = f"{path}." if path else ""
            raise self.error(self._in_file(f"{place}{missing[0]} is missing"))
        try:
            return cls(**given)
        except self.error as error:  # what the dataclass itself refuses does not know its place
            place = self._in_file(path)
            if not place:
                raise
            raise self.error(f"{place}: {error}") from error

    def values(self, cls: type[Any], value: Any, path: str = "") -> dict[str, Any]:
        """Return the fields that a mapping, or such a dataclass, gives; each is read and checked.

        Args:
            cls: the dataclass.
            value: as for `read`.
            path: as for `read`.
        """
        hints = _hints(cls)
        if isinstance(value, cls):
            value = {name: getattr(value, name) for name in hints}
        self._check_object(value, hints, path)
        known = {one.name: one for one in fields(cls)}
        bounds = bounds_of(cls)
        before = f"{path}." if path else ""
        given = {}
        for key, item in value.items():
            name = f"{before}{key}"
            if key not in hints:
                hint = self._suggestion(key, hints, before)
                raise self.error(self._in_file(f"unknown {self.noun} {name!r}; {hint}"))
            given[key] = self._field(known[key], hints[key], item, name)
            if key in bounds:
                bounds[key].check(self._in_file(name), given[key], self.error)
        return given

    def _in_file(self, text: str) -> str:
        """Return a text that begins with the file."""
        if not self.file:
            return text
        return f"{self.file}: {text}" if text else self.file

    def _check_object(self, value: Any, hints: Mapping[str, Any], path: str) -> None:
        """Refuse what is no mapping, or lacks fields where all must be given."""
        if self.complete:
            if not isinstance(value, Mapping) or set(value) != set(hints):
                names = ", ".join(hints)
                raise self.error(
                    f"{self._in_file(path)} must be an object with {names} and no more"
                )
        elif not isinstance(value, Mapping):
            if not path:
                raise self.error(self._in_file(f"{value!r:.40} holds no {self.noun}s"))
            array, index, _ = path.partition("[")
            header = f"[{array}]" if index else path
            raise self._no_section(value, path, header, next(iter(hints)))

    def _no_section(self, value: Any, path: str, header: str, first: str = "") -> ValueError:
        """Return the error about a value that stands where a section must be."""
        advice = self.form.section.format(path=header, noun=self.noun, field=first)
        return self.error(f"{self._in_file(path)} is {value!r:.40}, it must be a section: {advice}")

    def _field(self, one: Field[Any], wanted: Any, value: Any, path: str) -> Any:
        """Return the value of one field."""
        if "object" in one.metadata and one.metadata["object"](value):
            return value
        if "kind" in one.metadata:
            value = self._expressions(value, one.metadata["kind"], path)
        return self._value(value, wanted, path)

    def _expressions(self, value: Any, kind: Kind, path: str) -> Any:
        """Return the text of one expression, or of several, that can be read."""
        several = isinstance(value, tuple | list)
        try:
            texts = tuple(written(one, kind) for one in (value if several else [value]))
            for text in texts:
                parse(text, kind)
        except ExpressionError as error:
            raise self.error(self._in_file(f"{path}: {error}")) from error
        return texts if several else texts[0]

    def _value(self, value: Any, wanted: Any, path: str) -> Any:
        """Return a value as the wanted type, which may be a dataclass or have some inside."""
        options = _options(wanted)
        sections = [option for option in options if is_dataclass(option)]
        if sections:
            if value is None and types.NoneType in options:
                return None
            return self.read(self._section_of(value, sections, path), value, path)
        if get_origin(wanted) is tuple and any(map(is_dataclass, _options(get_args(wanted)[0]))):
            item = get_args(wanted)[0]
            if not isinstance(value, list | tuple):
                raise self._no_section(value, path, f"[{path}]")
            return tuple(self._value(one, item, f"{path}[{i}]") for i, one in enumerate(value))
        if self.read_plain is not None:
            return self.read_plain(value, wanted, self._in_file(path))
        return self._fitted(value, wanted, path)

    def _section_of(self, value: Any, sections: list[Any], path: str) -> Any:
        """Return the dataclass that a mapping is meant for: of several, by its ``kind``."""
        if len(sections) == 1:
            return sections[0]
        kinds = {get_args(_hints(section)["kind"])[0]: section for section in sections}
        kind = value.get("kind") if isinstance(value, Mapping) else None
        if not isinstance(kind, str) or kind not in kinds:
            place = self._in_file(f"{path}.kind")
            raise self.error(f"{place} is {kind!r:.40}; {nearest(str(kind), kinds)}")
        return kinds[kind]

    def _fitted(self, value: Any, wanted: Any, path: str) -> Any:
        value = tuple(value) if isinstance(value, list) else value
        if not is_fit(value, wanted):
            place = self._in_file(path)
            raise self.error(f"{place} is {value!r}, it must be {advice_for(value, wanted)}")
        return fit(value, wanted)

    def _suggestion(self, key: str, hints: Mapping[str, Any], before: str) -> str:
        """Say what may have been meant: the same name in a section, or one that is similar."""
        sections = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
        inside = [
            self.form.inside.format(section=f"{before}{name}", field=key)
            for name, kind in sections.items()
            if key in _hints(kind)
        ]
        return did_you_mean(inside) if inside else nearest(key, hints, section=before)


def _hints(cls: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields, without those that no file can give."""
    hints = _types(cls)
    return {
        field.name: hints[field.name]
        for field in fields(cls)
        if not field.metadata.get("in_memory")
    }


@cache
def _types(cls: Hashable) -> dict[str, Any]:
    return get_type_hints(cls)


def _required(cls: Any) -> list[str]:
    """Return the fields that have no default."""
    return [
        field.name
        for field in fields(cls)
        if field.default is MISSING and field.default_factory is MISSING
    ]


def _options(wanted: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the one type."""
    return get_args(wanted) if get_origin(wanted) in (Union, types.UnionType) else (wanted,)
