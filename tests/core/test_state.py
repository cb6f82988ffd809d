from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbasin.core.state import StateError, load, read, same, save, write
from fedbasin.core.tree import count_bytes, flatten, rebuild, restore, row, stack, tensors


class Pair(NamedTuple):
    left: torch.Tensor
    right: float


@dataclass(frozen=True)
class Inner:
    window: torch.Tensor
    name: str


@dataclass(frozen=True)
class Outer:
    inner: Inner
    pair: Pair
    many: tuple[Inner, ...]
    nothing: None = None
    count: int = 3
    flag: bool = True


def tree(scale=1.0, rows=2):
    inner = Inner(torch.arange(rows * 3.0).reshape(rows, 3) * scale, "a\nb")
    return Outer(
        inner,
        Pair(torch.tensor(scale, dtype=torch.float64), 0.1),
        (inner, Inner(torch.ones(1, dtype=torch.int64), "")),
    )


def test_a_tree_comes_back_bit_for_bit(tmp_path):
    path = tmp_path / "state.safetensors"
    save(path, tree(1 / 3, rows=5))
    found = load(path, tree())
    assert same(found, tree(1 / 3, rows=5))
    assert isinstance(found.pair, Pair) and isinstance(found.many[1], Inner)
    assert (
        found.inner.window.dtype == torch.float32 and found.flag is True and found.nothing is None
    )
    assert not list(tmp_path.glob("*.part"))


@given(st.floats(allow_nan=False), st.integers(-(2**70), 2**70), st.text(max_size=20))
def test_scalars_are_exact(tmp_path_factory, number, whole, words):
    path = tmp_path_factory.mktemp("s") / "s"
    save(path, (number, whole, words))
    assert load(path, (0.0, 0, "")) == (number, whole, words)


def test_one_tensor_under_two_names_is_saved_twice(tmp_path):
    shared = torch.arange(4.0)
    save(tmp_path / "s", (shared, shared, shared[1:3]))
    a, b, c = load(tmp_path / "s", (shared, shared, shared))
    assert torch.equal(a, shared) and torch.equal(b, shared) and c.tolist() == [1, 2]


def test_a_truncated_or_foreign_file_is_refused(tmp_path):
    path = tmp_path / "s"
    save(path, tree())
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"\x80\x04pickle", whole[:-1]):
        path.write_bytes(content)
        with pytest.raises(StateError, match="not a whole state file"):
            read(path)
    with pytest.raises(StateError, match="does not exist"):
        read(tmp_path / "absent")


def test_equal_trees_make_equal_files(tmp_path):
    for name in "abcdefgh":
        save(tmp_path / name, tree())
    assert len({file.read_bytes() for file in tmp_path.iterdir()}) == 1


def test_altered_bytes_are_noticed(tmp_path):
    path = tmp_path / "s"
    save(path, tree())
    whole = bytearray(path.read_bytes())
    whole[-3] ^= 1  # within a number: the file is still one of its format
    path.write_bytes(whole)
    with pytest.raises(StateError, match="not those that were written"):
        read(path)


def test_a_file_from_before_checksums_is_read(tmp_path):
    write(tmp_path / "s", {"left": torch.ones(2)}, {"scalars": '{"right": 2.0}'})
    found = load(tmp_path / "s", Pair(torch.zeros(2), 0.0))
    assert found.left.tolist() == [1, 1] and found.right == 2.0


def test_whoever_may_read_other_files_may_read_these(tmp_path):
    (tmp_path / "plain").touch()
    save(tmp_path / "s", tree())
    assert (tmp_path / "s").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_state_of_another_shape_is_refused_by_name(tmp_path):
    save(tmp_path / "s", Pair(torch.ones(1), 2.0))
    with pytest.raises(StateError, match=r"inner\.window"):
        load(tmp_path / "s", tree())


def test_same_notices_every_difference():
    assert same(tree(), tree())
    assert not same(tree(), tree(2.0))
    assert not same((1.0,), (1.0, 2.0))
    assert not same((torch.ones(1),), (torch.ones(1, dtype=torch.float64),))
    assert not same((torch.ones(1),), (1.0,))
    assert not same(("a",), ("b",))


def test_paths_bytes_stack_and_row():
    names = [name for name, _ in flatten(tree())]
    assert names[:4] == ["inner.window", "inner.name", "pair.left", "pair.right"]
    assert (
        count_bytes((torch.zeros(3), torch.zeros(2, dtype=torch.float64), 5, None)) == 12 + 16 + 8
    )
    both = stack([tree(1.0), tree(2.0)])
    assert both.inner.window.shape == (2, 2, 3)
    assert same(row(both, 1), tree(2.0))
    assert len(tensors(tree())) == 4
    doubled = rebuild(tree(), lambda _, leaf: leaf * 2 if isinstance(leaf, torch.Tensor) else leaf)
    assert torch.equal(doubled.inner.window, tree().inner.window * 2)
    assert restore((1, 2), {"0": 5, "1": 6}) == (5, 6)


def test_what_is_no_state_is_refused():
    with pytest.raises(TypeError, match=r"'0.inner'.*dict"):
        list(flatten((Outer({}, None, ()),)))
