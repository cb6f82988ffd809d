import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbasin.core.rng import (
    Key,
    bits,
    fold_in,
    keys_tensor,
    normal,
    root,
    torch_draws_from,
    uniform,
)

WORD = 0xFFFFFFFF


def mix(x):
    """The published hash on Python integers, an independent oracle for the tensor version."""
    x ^= x >> 16
    x = x * 0x21F0AAAD & WORD
    x ^= x >> 15
    x = x * 0x735A2D97 & WORD
    return x ^ x >> 15


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_bits_equal_integer_arithmetic(key, counter):
    low, high = key & WORD, key >> 32
    expected = mix(mix(counter + high & WORD) ^ low)
    assert int(bits(Key(key).tensor(), torch.tensor([counter]))[0]) == expected


def test_words_and_their_types_and_borders_make_different_keys():
    key = root(0)
    names = [
        ("cohort", 1),
        ("cohort", 2),
        ("cohort", "1"),
        ("cohort1",),
        ("c", "ohort", 1),
        (1, "cohort"),
    ]
    assert len({key.fold(*name).bits for name in names}) == len(names)
    assert key.fold("a").fold("b") == key.fold("a").fold("b")


def test_seeds_share_no_client_key():
    keys = {
        root(s).fold("client", t, c).bits for s in range(20) for t in range(20) for c in range(20)
    }
    assert len(keys) == 20**3


def test_draws_look_uniform_and_independent():
    n = 200_000
    key = root(7).tensor()
    u = uniform(key, torch.arange(n)).numpy()
    assert u.min() >= 0 and u.max() < 1
    counts = np.histogram(u, bins=100, range=(0, 1))[0]
    chi2 = ((counts - n / 100) ** 2 / (n / 100)).sum()
    assert 60 < chi2 < 150  # 99 degrees of freedom
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.01
    other = uniform(fold_in(key, 1), torch.arange(n)).numpy()
    assert abs(np.corrcoef(u, other)[0, 1]) < 0.01
    near = uniform(root(8).tensor(), torch.arange(n)).numpy()
    assert abs(np.corrcoef(u, near)[0, 1]) < 0.01


def test_single_bits_are_fair():
    words = bits(root(1).tensor(), torch.arange(100_000))
    for bit in range(32):
        assert abs(((words >> bit) & 1).double().mean() - 0.5) < 0.01


def test_a_batch_of_keys_draws_what_each_key_draws_alone():
    keys = [root(0).fold(i) for i in range(4)]
    counter = torch.arange(12).reshape(3, 4)
    stacked = bits(keys_tensor(keys)[:, :], counter.expand(4, 3, 4))
    mapped = torch.func.vmap(bits, in_dims=(0, None))(keys_tensor(keys), counter)
    for i, key in enumerate(keys):
        alone = bits(key.tensor(), counter)
        assert torch.equal(stacked[i], alone) and torch.equal(mapped[i], alone)
        assert torch.equal(fold_in(keys_tensor(keys), 3)[i], fold_in(key.tensor(), 3))


def test_fold_in_gives_distinct_keys():
    key = root(0).tensor()
    found = {tuple(fold_in(key, i).tolist()) for i in range(5000)}
    assert len(found) == 5000


def test_torch_draws_from_a_key_and_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    with torch_draws_from(root(0)):
        a = torch.rand(3)
    with torch_draws_from(root(0)):
        b = torch.rand(3)
    with torch_draws_from(root(1)):
        c = torch.rand(3)
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(before, torch.get_rng_state())


def test_numpy_generators_follow_the_key():
    assert root(3).numpy().random() == root(3).numpy().random() != root(4).numpy().random()


def test_normal_draws_have_the_moments_and_tails_of_a_gaussian():
    key, counter = root(0).tensor(), torch.arange(200_000)
    drawn = normal(key, counter).double()
    assert drawn.mean().abs() < 0.01 and (drawn.std() - 1).abs() < 0.01
    assert (drawn.abs() > 1.96).double().mean() == pytest.approx(0.05, abs=0.003)
    assert torch.isfinite(drawn).all()
    pairs = torch.stack([drawn[:-1], drawn[1:]])
    assert torch.corrcoef(pairs)[0, 1].abs() < 0.01
    keys = torch.stack([key, key + 1])
    assert torch.equal(normal(keys, counter[:5].expand(2, 5))[0], normal(key, counter[:5]))
