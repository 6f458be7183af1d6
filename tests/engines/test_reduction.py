"""The reduction: one order of additions, whatever the placement."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import multitower as mt
from multitower.engines.reduction import (
    SMALL_BYTES,
    Reduced,
    Sum,
    add_buffers,
    evaluate,
    make_reduction,
    plan,
    sum_tree,
)
from multitower.towers.placement import AXIS, Placement, contiguous


def text(tree):
    return evaluate(tree, str, lambda left, right: f"({left}+{right})")


@given(num_towers=st.integers(1, 64))
def test_the_tree_holds_every_tower_once_in_order(num_towers):
    """Lie: a tower left out or added twice."""
    towers = evaluate(sum_tree(0, num_towers), lambda t: [t], lambda a, b: a + b)
    assert towers == list(range(num_towers))


def test_the_tree_depends_on_the_number_of_towers_only():
    """The order is part of the promise: another one gives other bits to every finished run."""
    assert text(sum_tree(0, 3)) == "((0+1)+2)"
    assert text(sum_tree(0, 5)) == "(((0+1)+2)+(3+4))"
    assert text(sum_tree(0, 8)) == "(((0+1)+(2+3))+((4+5)+(6+7)))"


@given(data=st.data(), num_towers=st.integers(1, 16), num_devices=st.integers(1, 8))
def test_a_plan_is_the_tree_for_any_placement(data, num_towers, num_devices):
    """Lie: partial sums of a device that the tree does not have."""
    owners = data.draw(
        st.lists(st.integers(0, num_devices - 1), min_size=num_towers, max_size=num_towers)
    )
    how = plan(Placement(tuple(mt.devices(num_devices)), tuple(owners)))
    for device, parts in enumerate(how.parts):
        for part in parts:
            towers = evaluate(part, lambda t: [t], lambda a, b: a + b)
            assert {owners[tower] for tower in towers} == {device}
    whole = evaluate(how.rest, lambda at: text(how.parts[at[0]][at[1]]), lambda a, b: f"({a}+{b})")
    assert whole == text(sum_tree(0, num_towers))


def test_whole_subtrees_send_one_partial_sum():
    """Lie: four towers on a device send four times the gradients."""
    assert plan(contiguous(mt.devices(2), 8)).num_parts == 1
    assert plan(contiguous(mt.devices(4), 4)).num_parts == 1
    assert plan(contiguous(mt.devices(3), 6)).num_parts <= 2


def partial_sums(values, placement):
    """What the engine's devices have added up alone: for each part a global array."""
    how = plan(placement)
    spare = jnp.zeros_like(values[0])
    sums = []
    for device, parts in enumerate(how.parts):
        home = placement.devices[device]
        part_sums = [
            evaluate(part, lambda tower: values[tower], lambda a, b: add_buffers([a], [b])[0])
            for part in parts
        ]
        part_sums += [spare] * (how.num_parts - len(part_sums))
        sums.append([jax.device_put(part, home) for part in part_sums])
    shape = (len(sums) * values[0].shape[0], *values[0].shape[1:])
    return [
        [jax.make_array_from_single_device_arrays(shape, placement.split, list(blocks))]
        for blocks in zip(*sums, strict=True)
    ]


def total_of(values, placement, reduce=None):
    """Runs the additions of a placement as the engine does; returns every device's total."""
    lists = partial_sums(values, placement)
    (total,) = (reduce or make_reduction(placement))(lists, [[]] * len(lists)).buffers
    return [np.asarray(shard.data) for shard in total.addressable_shards]


def values_in_doubt(num_towers, size):
    """Float32 numbers whose sum depends on the order of additions."""
    scales = np.random.default_rng(0).choice([1e-8, 1, 1e8], (num_towers, size))
    values = scales * np.random.default_rng(1).normal(size=(num_towers, size))
    return [jnp.asarray(row, jnp.float32) for row in values]


@settings(max_examples=6)
@given(
    num_devices=st.integers(2, 8),
    size=st.sampled_from([1, 257, 16 * 1024 + 3]),  # the last one travels in chunks
    seed=st.integers(0, 99),
)
def test_any_placement_any_size_same_bits_on_every_device(num_devices, size, seed):
    """Lie: chunks, padding or the order of devices change a sum."""
    values = values_in_doubt(8, size)
    expected = evaluate(sum_tree(0, 8), lambda t: np.asarray(values[t]), np.add)
    owners = np.random.default_rng(seed).integers(0, num_devices, 8)
    owners = tuple(int(o) for o in np.unique(owners, return_inverse=True)[1])
    placement = Placement(tuple(mt.devices(max(owners) + 1)), owners)
    for total in total_of(values, placement):
        assert total.tobytes() == expected.tobytes()


@pytest.mark.parametrize("owners", [(0, 0, 1, 1, 2), (1, 0, 0, 2, 1, 0)])
def test_every_device_gets_the_block_rows_of_its_own_towers(owners):
    """Lie: a device with several towers, or fewer than others, gets a row of somebody else."""
    num_towers = len(owners)
    flat = values_in_doubt(num_towers, num_towers * 7)
    values = [value.reshape(num_towers, 7) for value in flat]
    placement = Placement(tuple(mt.devices(max(owners) + 1)), owners)
    expected = evaluate(sum_tree(0, num_towers), lambda t: np.asarray(values[t]), np.add)
    lists = partial_sums(values, placement)
    (rows,) = make_reduction(placement)([[]] * len(lists), lists).blocks
    for device, towers in enumerate(placement.towers_on):
        for slot, tower in enumerate(towers):
            (found,) = [
                s.data
                for s in rows[slot].addressable_shards
                if s.index[0].start in (7 * device, None)
            ]
            assert np.asarray(found).tobytes() == expected[tower].tobytes()


@pytest.mark.parametrize(
    ("more", "exchanges"), [(0, ["all_gather"]), (4, ["all_to_all", "all_gather"])]
)
def test_small_sums_need_one_exchange_and_large_ones_send_less(more, exchanges):
    """Lies: a wait more for every small sum; all devices send all of a large one to all."""
    buffer = jax.ShapeDtypeStruct((4, (SMALL_BYTES + more) // 4), np.float32)  # of 4 devices
    program = jax.make_jaxpr(make_reduction(contiguous(mt.devices(4), 4)))([[buffer]], [[]])
    assert re.findall(r" (all_\w+)\[", str(program)) == exchanges


def test_integers_are_added_without_rounding():
    values = [jnp.full(3, 2**24 + tower, jnp.int32) for tower in range(4)]
    for total in total_of(values, contiguous(mt.devices(3), 4)):
        np.testing.assert_array_equal(total, 4 * 2**24 + 6)


@pytest.mark.parametrize("size", [256, 20_000])
def test_mutation_psum_is_noticed(size):
    """If this stays equal, the numbers above are too tame to prove anything."""
    values = values_in_doubt(8, size)
    placement = contiguous(mt.devices(8), 8)
    expected = evaluate(sum_tree(0, 8), lambda t: np.asarray(values[t]), np.add)
    psum = jax.jit(
        jax.shard_map(
            lambda parts, _: Reduced([jax.lax.psum(own, AXIS) for own in parts[0]], []),
            mesh=placement.mesh,
            in_specs=jax.sharding.PartitionSpec(AXIS),
            out_specs=jax.sharding.PartitionSpec(AXIS),
            check_vma=False,
        )
    )
    totals = total_of(values, placement, psum)
    assert any(total.tobytes() != expected.tobytes() for total in totals)


def test_mutation_another_tree_is_noticed():
    values = values_in_doubt(8, 256)
    expected = evaluate(sum_tree(0, 8), lambda t: np.asarray(values[t]), np.add)
    loop = 0
    for tower in range(8):
        loop = tower if tower == 0 else Sum((loop, tower))
    assert evaluate(loop, lambda t: np.asarray(values[t]), np.add).tobytes() != expected.tobytes()
