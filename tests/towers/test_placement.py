"""Placement: towers on devices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import multitower as mt
from multitower.towers.placement import contiguous, place


@given(num_devices=st.integers(1, 8), num_towers=st.integers(1, 40))
def test_every_tower_has_one_device_and_devices_are_evenly_loaded(num_devices, num_towers):
    """Lie: a tower that is run twice, or never; a device with all the work."""
    placement = contiguous(mt.devices(num_devices), num_towers)
    towers = [tower for on_device in placement.towers_on for tower in on_device]
    assert towers == list(range(num_towers))
    loads = [len(on_device) for on_device in placement.towers_on]
    assert max(loads) - min(loads) <= 1


def test_one_tower_per_device_without_a_number_of_towers():
    placement = place(3, None)
    assert placement.owners == (0, 1, 2)
    assert placement.devices == tuple(mt.devices(3))


def test_devices_without_a_tower_are_left_out_with_a_warning():
    with pytest.warns(
        mt.MultitowerWarning, match="towers=2 keep 2 of 5 devices busy and leave 3 idle"
    ):
        placement = place(5, 2)
    assert placement.devices == tuple(mt.devices(2))


def test_placements_are_equal_if_they_place_alike():
    """Lie: the same placement compiles, or cuts, anew."""
    assert place(4, 8) == place(mt.devices(4), 8)
    assert hash(place(4, 8)) == hash(place(4, 8))
    assert place(4, 8) != place(mt.devices(4)[::-1], 8)
