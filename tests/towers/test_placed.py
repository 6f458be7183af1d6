"""Copies of a caller's arrays on devices."""

import jax
import numpy as np
import pytest

import multitower as mt
from multitower.towers.placed import Placed


@pytest.mark.parametrize("as_array", [np.asarray, jax.numpy.asarray])
def test_some_rows_of_an_array_are_these_rows_wherever_it_is(as_array):
    # The lies: all rows, where the array is on the device already; the rows of an earlier call.
    leaf, placed = as_array(np.arange(6.0, dtype=np.float32)), Placed()
    for device in mt.devices(2):
        for rows in ((1, 3), (3, 6), None):
            found = placed.on(leaf, device, rows)
            assert found.devices() == {device}
            np.testing.assert_array_equal(found, leaf if rows is None else leaf[slice(*rows)])
