"""Sums over rows are rounded once, in whatever parts the rows come."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multitower.training.scoring.exact_sums import ExactSums

MOST = float(np.finfo(np.float64).max)
numbers = st.lists(st.floats(-1e300, 1e300, allow_nan=False), min_size=1, max_size=20)


@given(numbers, st.integers(1, 7))
def test_parts_make_no_difference(values, size):
    # The lie: a mean that depends on global_batch.
    sums, wide = ExactSums(()), ExactSums((2,))
    for start in range(0, len(values), size):
        rows = np.array(values[start : start + size])
        sums.add(rows)
        wide.add(np.stack([rows, -rows], 1))
    assert sums.total() == math.fsum(values)
    np.testing.assert_array_equal(wide.total(), [math.fsum(values), -math.fsum(values)])


def test_whole_numbers_and_what_is_not_finite():
    sums = ExactSums((4,))
    for row in ([1.0, 2.0**52, math.inf, math.inf], [3.0, -(2.0**52), 1.0, -math.inf]):
        sums.add(np.array([row], np.float64))
    np.testing.assert_array_equal(sums.total(), [4.0, 0.0, math.inf, math.nan])


@pytest.mark.parametrize(
    ("rows", "total"),
    [
        ([MOST, MOST, -MOST], MOST),
        ([MOST, -MOST, MOST, 1.0, -MOST], 1.0),
        ([MOST, MOST], math.inf),
        ([-MOST, -MOST, 3.0], -math.inf),
        ([MOST, MOST, -math.inf], -math.inf),
        ([MOST, MOST, math.nan], math.nan),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_sums_beyond_float64(rows, total, size):
    """Lies: an OverflowError in place of scores; an infinity that depends on global_batch."""
    sums = ExactSums(())
    for start in range(0, len(rows), size):
        sums.add(np.array(rows[start : start + size]))
    np.testing.assert_equal(sums.total(), total)
