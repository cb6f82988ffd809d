"""Trees: nested frozen dataclasses, named tuples and tuples with tensors and scalars as leaves.

Server state is a frozen dataclass, what crosses `vmap` is a named tuple. Both are walked
here by path, for checkpoints, for counting bytes and for the store of client states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

Leaf = Tensor | int | float | bool | str | None
Tree = TypeVar("Tree")


def parts_of(tree: Any) -> list[tuple[str, Any]] | None:
    """Return the named parts of a node, or None for a leaf."""
    if is_dataclass(tree) and not isinstance(tree, type):
        return [(f.name, getattr(tree, f.name)) for f in fields(tree)]
    if isinstance(tree, tuple):
        names = getattr(tree, "_fields", range(len(tree)))
        return [(str(name), part) for name, part in zip(names, tree, strict=True)]
    return None


def flatten(tree: Any, path: str = "") -> Iterator[tuple[str, Leaf]]:
    """Yield every leaf with its path, such as ``("inner.momentum", tensor)``."""
    children = parts_of(tree)
    if children is not None:
        for name, part in children:
            yield from flatten(part, f"{path}.{name}" if path else name)
    elif tree is None or isinstance(tree, Tensor | bool | int | float | str):
        yield path, tree
    else:
        raise TypeError(
            f"state at {path or 'its root'!r} is a {type(tree).__name__}; "
            "keep tensors, numbers, strings, tuples and frozen dataclasses"
        )


def rebuild(template: Any, leaf_at: Callable[[str, Any], Any], path: str = "") -> Any:
    """Return a tree of the template's shape whose leaves are ``leaf_at(path, old leaf)``."""
    children = parts_of(template)
    if children is None:
        return leaf_at(path, template)
    parts = {
        name: rebuild(part, leaf_at, f"{path}.{name}" if path else name) for name, part in children
    }
    if isinstance(template, tuple) and not hasattr(template, "_fields"):
        return tuple(parts.values())
    return type(template)(**parts)


def mapped(change: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Return a tree whose tensors are changed; other leaves stay as they are."""
    changed: Tree = rebuild(tree, lambda _, at: change(at) if isinstance(at, Tensor) else at)
    return changed


def restore(template: Any, leaves: Mapping[str, Leaf]) -> Any:
    """Return the template's tree with the leaves given by path; a missing path is an error."""

    def leaf_at(path: str, old: Leaf) -> Leaf:
        if path not in leaves:
            raise KeyError(f"state has no {path!r}; it was written by another method or version")
        new = leaves[path]
        if isinstance(old, Tensor) and isinstance(new, Tensor):
            return new.to(device=old.device, dtype=old.dtype)
        if not _alike(old, new):
            kinds = f"a {type(new).__name__}, expected a {type(old).__name__}"
            raise KeyError(f"state at {path!r} is {kinds}; it was written by another version")
        return new

    return rebuild(template, leaf_at)


def _alike(old: Leaf, new: Leaf) -> bool:
    """Whether a leaf may stand where another was; a whole number may stand for a float."""
    if old is None or new is None:
        return True
    return type(old) is type(new) or (type(old) is float and type(new) is int)


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensor leaves in order."""
    return [leaf for _, leaf in flatten(tree) if isinstance(leaf, Tensor)]


def count_bytes(tree: Any) -> int:
    """Count the bytes of a payload: its tensors, and 8 for every number beside them."""
    total = 0
    for _, leaf in flatten(tree):
        if isinstance(leaf, Tensor):
            total += leaf.numel() * leaf.element_size()
        elif leaf is not None:
            total += 8
    return total


def stack(trees: list[Any]) -> Any:
    """Stack equal trees leaf by leaf into one whose tensors have a leading axis [C]."""
    columns = [dict(flatten(tree)) for tree in trees]

    def leaf_at(path: str, old: Leaf) -> Leaf:
        if not isinstance(old, Tensor):
            return old
        return torch.stack([column[path] for column in columns])  # type: ignore[misc]

    return rebuild(trees[0], leaf_at)


def concatenated(trees: list[Tree]) -> Tree:
    """Join equal trees whose tensors have one row a client, one after another."""
    if len(trees) == 1:
        return trees[0]
    columns = [iter(tensors(tree)) for tree in trees]
    return mapped(lambda _: torch.cat([next(each) for each in columns]), trees[0])


def row(tree: Any, index: int) -> Any:
    """Return one row of a stacked tree."""
    return mapped(lambda leaf: leaf[index], tree)


def added(trees: list[Any]) -> Any:
    """Add equal trees of tensors leaf by leaf."""
    columns = [dict(flatten(tree)) for tree in trees]
    return rebuild(trees[0], lambda path, _: sum(column[path] for column in columns))
