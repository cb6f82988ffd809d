"""The limit at some times the median, against Python's own medians."""

import math
from statistics import median, median_low

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbasin.core import limits
from fedbasin.core.limits import limit_of

_NUMBERS = st.floats(min_value=-1e6, max_value=1e6)


@given(
    st.lists(st.tuples(_NUMBERS, st.booleans()), max_size=9),
    st.floats(min_value=1, max_value=100),
    st.integers(min_value=1, max_value=4),
    st.sampled_from([0.0, 1.0]),
    st.booleans(),
    st.booleans(),
)
def test_it_is_some_times_the_median_of_what_counts(drawn, times, least, plus, lower, masked):
    values = torch.tensor([value for value, _ in drawn], dtype=torch.float64)
    counted = torch.tensor([counts for _, counts in drawn], dtype=torch.bool)
    limit = limit_of(
        values, times, counted if masked else None, least=least, plus=plus, lower=lower
    )
    known = [value for value, counts in drawn if (counts if masked else value > 0)]
    usual = math.inf
    if len(known) >= least:
        usual = (median_low if lower else median)(known)
    assert limit.usual.item() == usual
    assert limit.most.item() == times * (usual + plus)


@given(st.lists(st.lists(_NUMBERS, min_size=3, max_size=3), min_size=1, max_size=8))
def test_the_median_is_taken_by_columns(rows):
    found = limits.median(torch.tensor(rows, dtype=torch.float64))
    assert found.tolist() == [median(column) for column in zip(*rows, strict=True)]


def test_nan_and_zeros_do_not_count():
    values = torch.tensor([math.nan, 0.0, 2.0, 4.0])
    assert limit_of(values, 3.0).most.item() == 9.0
    assert limit_of(values, 3.0, least=3).most.item() == math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_has_the_type_of_the_values(dtype):
    limit = limit_of(torch.ones(3, dtype=dtype), 2.0)
    assert (limit.usual.dtype, limit.most.dtype) == (dtype, dtype)
