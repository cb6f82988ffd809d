"""Bounds are declared with the field and hold however the object is made."""

import ast
import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import fedbasin
from fedbasin.core.bounds import Bounded, above, at_least, within

SOURCE = Path(fedbasin.__file__).parent


@dataclass(frozen=True)
class Example(Bounded):
    count: int = at_least(1, default=5)
    scale: float = above(0, default=1.0)
    share: float = within("[0, 1)", default=0.5)
    rest: float = within("(0, inf)", words="must be above 0 and finite", default=1.0)
    limit: float | None = at_least(2, default=None)
    free: float = -1.0


@dataclass(frozen=True)
class Anew(Example):
    count: int = 7

    def __post_init__(self):
        super().__post_init__()


@pytest.mark.parametrize("kind", [Example, Anew])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "count must be at least 1, got 0"),
        ({"count": math.nan}, "count must be at least 1, got nan"),
        ({"scale": 0.0}, "scale must be above 0, got 0.0"),
        ({"share": -0.1}, r"share must be in \[0, 1\), got -0.1"),
        ({"share": 1.0}, r"share must be in \[0, 1\), got 1.0"),
        ({"share": math.nan}, r"share must be in \[0, 1\), got nan"),
        ({"rest": 0.0}, "rest must be above 0 and finite, got 0.0"),
        ({"rest": math.inf}, "rest must be above 0 and finite, got inf"),
        ({"limit": 1}, "limit must be at least 2, got 1"),
    ],
)
def test_a_value_out_of_bounds_is_refused(kind, values, message):
    with pytest.raises(ValueError, match=message):
        kind(**values)
    with pytest.raises(ValueError, match=message):
        replace(kind(), **values)


def test_what_lies_in_bounds_is_taken():
    least = Example(count=1, scale=1e-9, share=0.0, rest=1e-9, limit=2, free=-5.0)
    assert (least.count, least.share, least.limit) == (1, 0.0, 2)
    assert Example().limit is None and Anew().count == 7


def test_none_is_no_number_where_it_is_not_the_default():
    with pytest.raises(TypeError):
        Example(count=None)


def declares_bounds(kind: ast.ClassDef) -> bool:
    values = [node.value for node in kind.body if isinstance(node, ast.AnnAssign)]
    calls = [ast.unparse(value.func) for value in values if isinstance(value, ast.Call)]
    return bool({"above", "at_least", "within"} & set(calls))


def test_bounds_are_declared_in_dataclasses_alone():
    """In another class the declaration would stand where the value should."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")]
    kinds = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    declaring = [kind for kind in kinds if declares_bounds(kind)]
    assert len(declaring) > 50
    for kind in declaring:
        assert any("dataclass" in ast.unparse(one) for one in kind.decorator_list), kind.name
