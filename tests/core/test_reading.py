"""Mappings read into dataclasses, and the names that errors suggest."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest

import fedbasin as fb
from fedbasin.core.bounds import at_least, within
from fedbasin.core.reading import COMMAND, PYTHON, TOML, Reader
from fedbasin.core.suggest import nearest


class Refused(ValueError):
    pass


@dataclass(frozen=True)
class Circle:
    radius: float
    kind: Literal["circle"] = "circle"

    def __post_init__(self):
        if self.radius < 0:
            raise Refused(f"radius is {self.radius}")


@dataclass(frozen=True)
class Square:
    side: float
    kind: Literal["square"] = "square"


@dataclass(frozen=True)
class Pen:
    width: int = 1
    colours: tuple[str, ...] = ()


@dataclass(frozen=True)
class Drawing:
    title: str
    pen: Pen = field(default_factory=Pen)
    second: Pen | None = None
    shapes: tuple[Circle | Square, ...] = ()
    layers: tuple[Pen, ...] = ()
    free: Mapping[str, Any] = field(default_factory=dict)


READER = Reader(Refused, "a.toml")


def test_dataclasses_nest_alone_in_tuples_and_in_unions():
    drawing = READER.read(
        Drawing,
        {
            "title": "t",
            "pen": {"width": 2, "colours": ["red"]},
            "second": None,
            "shapes": [{"kind": "square", "side": 2}, {"kind": "circle", "radius": 1.5}],
            "layers": [{"width": 3}, {}],
            "free": {"any": [1, {"thing": 2}]},
        },
    )
    assert drawing == Drawing(
        "t",
        Pen(2, ("red",)),
        None,
        (Square(2.0), Circle(1.5)),
        (Pen(3), Pen()),
        {"any": [1, {"thing": 2}]},
    )
    assert isinstance(drawing.shapes[0].side, float)  # an int may stand for a float
    assert READER.read(Drawing, {"title": "t", "second": {"width": 4}}).second == Pen(4)
    assert READER.read(Drawing, {"title": "t"}) == Drawing("t")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"title": 3}, "a.toml: title is 3, it must be a quoted string"),
        (
            {"pen": {"width": True}},
            "a.toml: pen.width is True, it must be a whole number up to 2^53",
        ),
        (
            {"pen": {"colours": [1]}},
            "a.toml: pen.colours is (1,), it must be a tuple of a quoted string",
        ),
        (
            {"pen": 3},
            "a.toml: pen is 3, it must be a section: write [pen] and its fields below",
        ),
        (
            {"layers": {"width": 1}},
            "a.toml: layers is {'width': 1}, it must be a section: write [[layers]] and its "
            "fields below",
        ),
        (
            {"layers": [{}, 7]},
            "a.toml: layers[1] is 7, it must be a section: write [[layers]] and its fields below",
        ),
        ({"tilte": "t"}, "a.toml: unknown field 'tilte'; did you mean title?"),
        ({"width": 1}, "a.toml: unknown field 'width'; did you mean pen.width?"),
        ({"pen": {"widht": 1}}, "a.toml: unknown field 'pen.widht'; did you mean pen.width?"),
        (
            {"pen": {"zzz": 1}},
            "a.toml: unknown field 'pen.zzz'; available: pen.width, pen.colours",
        ),
        (
            {"shapes": [{"kind": "cirle", "radius": 1}]},
            "a.toml: shapes[0].kind is 'cirle'; did you mean circle?",
        ),
        ({"shapes": [7]}, "a.toml: shapes[0].kind is None; available: circle, square"),
        (
            {"shapes": [{"kind": ["x"]}]},
            "a.toml: shapes[0].kind is ['x']; available: circle, square",
        ),
        ({"shapes": [{"kind": "circle"}]}, "a.toml: shapes[0].radius is missing"),
        (
            {"shapes": [{"kind": "circle", "radius": -1}]},
            "a.toml: shapes[0]: radius is -1.0",
        ),
    ],
)
def test_errors_name_the_file_the_field_the_value_and_the_fix(change, told):
    with pytest.raises(Refused) as refused:
        READER.read(Drawing, {"title": "t"} | change)
    assert str(refused.value) == told


def test_a_missing_field_and_what_is_no_mapping_are_refused():
    with pytest.raises(Refused, match=r"^a\.toml: title is missing$"):
        READER.read(Drawing, {})
    for file, told in (("a.toml", "a.toml: 3 holds no fields"), ("", "3 holds no fields")):
        with pytest.raises(Refused, match=f"^{told}$"):
            Reader(Refused, file).read(Drawing, 3)


def test_without_a_file_places_begin_with_the_path_and_own_refusals_stay_as_they_are():
    with pytest.raises(Refused, match=r"^unknown setting 'sid'; did you mean side"):
        Reader(Refused, noun="setting").read(Square, {"sid": 1})
    with pytest.raises(Refused, match=r"^radius is -1\.0$"):
        Reader(Refused).read(Circle, {"radius": -1})
    with pytest.raises(Refused, match=r"^shape: radius is -1\.0$"):
        Reader(Refused).read(Circle, {"radius": -1}, "shape")


def test_a_complete_reader_wants_every_field():
    reader = Reader(Refused, complete=True)
    assert reader.read(Pen, {"width": 2, "colours": []}, "pen") == Pen(2)
    for value in ({"width": 2}, {"width": 2, "colours": [], "more": 1}, 3):
        with pytest.raises(
            Refused, match=r"^pen must be an object with width, colours and no more"
        ):
            reader.read(Pen, value, "pen")


def test_plain_values_may_be_read_in_another_way():
    def read_plain(value, wanted, place):
        return math.inf if value is None else (wanted, place)

    reader = Reader(Refused, "f", read_plain=read_plain)
    assert reader.read(Square, {"side": None}).side == math.inf
    assert reader.read(Pen, {"width": 2}, "pen").width == (int, "f: pen.width")


@dataclass(frozen=True)
class Brush:
    bristles: int = at_least(1, default=9)
    wear: float | None = within("[0, 1]", default=None)
    fade: str = field(default="constant", metadata={"kind": "schedule"})
    fades: tuple[str, ...] = field(default=(), metadata={"kind": "schedule"})
    handle: Any = field(default="constant", metadata={"object": callable, "kind": "schedule"})


@dataclass(frozen=True)
class Box:
    brush: Brush = field(default_factory=Brush)


def test_bounds_are_read_with_the_field_in_its_section():
    assert READER.read(Box, {"brush": {"bristles": 1, "wear": 1}}).brush == Brush(1, 1.0)
    assert READER.read(Brush, {"wear": None}) == Brush()
    with pytest.raises(Refused, match=r"^a\.toml: brush\.bristles must be at least 1, got 0$"):
        READER.read(Box, {"brush": {"bristles": 0}})
    with pytest.raises(Refused, match=r"^a\.toml: brush\.wear must be in \[0, 1\], got nan$"):
        READER.read(Box, {"brush": {"wear": math.nan}})


def test_a_dataclass_that_python_made_is_checked_as_a_mapping_is():
    assert READER.read(Box, {"brush": Brush(bristles=2)}) == Box(Brush(bristles=2))
    with pytest.raises(Refused, match=r"^a\.toml: brush\.bristles is 1\.5, it must be a whole"):
        READER.read(Box, {"brush": Brush(bristles=1.5)})
    with pytest.raises(Refused, match=r"^a\.toml: brush\.bristles must be at least 1, got 0"):
        READER.read(Box, Box(Brush(bristles=0)))


def test_expressions_are_read_as_text_and_objects_alike():
    read = READER.read(Brush, {"fade": fb.cosine(), "fades": [fb.cosine(), "exponential(0.5)"]})
    assert read == Brush(fade="cosine", fades=("cosine", "exponential(0.5)"))
    with pytest.raises(Refused, match=r"^a\.toml: brush\.fade: no schedule is called 'cosin'"):
        READER.read(Box, {"brush": {"fade": "cosin"}})
    with pytest.raises(Refused, match=r"^a\.toml: fades: 'fedavg' is a method, not a schedule"):
        READER.read(Brush, {"fades": ["cosine", "fedavg"]})
    with pytest.raises(Refused, match=r"fades is 'cosine', .* quoted string: write \('cosine',\)$"):
        READER.read(Brush, {"fades": "cosine"})
    assert READER.read(Brush, {"handle": print}).handle is print


@pytest.mark.parametrize(
    ("form", "section", "inside"),
    [
        (TOML, "write [brush] and its fields below", "did you mean brush.wear?"),
        (COMMAND, "write --set brush.bristles=..., or [brush] in a", "did you mean brush.wear?"),
        (PYTHON, "write brush={'bristles': ...}", "did you mean brush={'wear': ...}?"),
    ],
)
def test_advice_has_the_form_of_the_caller(form, section, inside):
    reader = Reader(Refused, form=form)
    for given, told in (({"brush": 3}, section), ({"wear": 1}, inside)):
        with pytest.raises(Refused) as refused:
            reader.read(Box, given)
        assert told in str(refused.value)


def test_numbers_of_numpy_stand_for_those_of_python():
    read = READER.read(Brush, {"bristles": np.int64(3), "wear": np.float32(0.5)})
    assert (type(read.bristles), type(read.wear)) == (int, float)
    with pytest.raises(Refused, match=r"bristles is np\.True_, it must be a whole number"):
        READER.read(Brush, {"bristles": np.bool_(True)})


def test_similar_names_are_suggested_and_else_all_are_listed():
    names = ["fedavg", "fedavgm", "scaffold"]
    assert nearest("fedavgg", names) == "did you mean fedavg or fedavgm?"
    assert nearest("zzz", names) == "available: fedavg, fedavgm, scaffold"
    assert nearest("scafold", names, section="x.") == "did you mean x.scaffold?"
    assert nearest("zzz", iter(names), section="x.") == "available: x.fedavg, x.fedavgm, x.scaffold"
