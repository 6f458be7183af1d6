"""Placement: towers on devices."""

from typing import NamedTuple

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


class Device(NamedTuple):
    """What a placement reads of a device."""

    process_index: int
    device_kind: str
    platform: str = "gpu"


@pytest.mark.parametrize("towers", [None, 2])
def test_a_process_without_a_tower_is_told(towers, monkeypatch):
    """Lie: it waits for sums of the others for ever, or goes on without them."""
    there = [Device(1, "H100"), Device(1, "H100")]
    monkeypatch.setattr("multitower.towers.placement.find_all", lambda _: there)
    with pytest.raises(mt.DeviceError, match=r"2 towers run on .* process 0 has none of them"):
        place(None, towers)


def test_devices_of_several_kinds_are_told_if_they_have_towers(monkeypatch):
    """Lie: the same bits, on kernels that round differently."""
    found = [Device(0, "H100"), Device(0, "A100")]
    monkeypatch.setattr("multitower.towers.placement.find_all", lambda _: found)
    with pytest.warns(mt.MultitowerWarning, match="several kinds, H100 and A100, whose kernels"):
        place(None, 2)
    with pytest.warns(mt.MultitowerWarning) as told:
        place(None, 1)
    assert ["kinds" in str(one.message) for one in told] == [False]  # but for an idle device
