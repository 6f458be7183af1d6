"""The fast engine: a tower job as one program over all devices, traceable inside any other.

Works eagerly, under `jax.jit`, `jax.grad`, `jax.vmap` and `jax.lax.scan`. The result equals the
one-device result up to rounding; for the same bits on any number of devices see `same_bits`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from multitower.engines.job import Job, Shared, TowerResult
from multitower.engines.packing import SMALL, pack, unpack
from multitower.engines.rounds import Rounds, Sent
from multitower.engines.segments import constants_in
from multitower.engines.tracing import PASS_IT, Traced, refuse_filled, trace
from multitower.errors import ArgumentError
from multitower.towers.leaves import is_traced, shape_of, wide_dtype
from multitower.towers.placement import AXIS, Placement
from multitower.towers.rows import Tower, pad_rows, real_rows


class DeviceTowers(NamedTuple):
    """The towers of one device.

    Attributes:
        numbers: their numbers, int32, shape (slots,).
        exist: which of them exist, bool, shape (slots,); None if all do, on every device.
        num_towers: how many towers exist, on all devices.
    """

    numbers: jax.Array
    exist: jax.Array | None
    num_towers: int


def run(
    job: Job,
    placement: Placement,
    shared: Shared,
    rows: list[Any],
    num_rows: jax.Array,
    *,
    axes: tuple[int | None, ...] = (),
) -> tuple[Any, Any]:
    """Runs a job on traced or concrete arrays.

    On JAX's default device alone it uses no mesh, unless towers meet: inside the user's `jax.jit`,
    results on a mesh, even of one device, have another type than the user's arrays, and if they are
    its next arguments, it would be compiled anew.

    Args:
        job: the job.
        placement: which device runs which towers. If devices cannot share them evenly, the last
            devices run towers without rows beside them, whose results count for nothing.
        shared: what every tower gets whole.
        rows: arrays with rows on axis 0; `run` pads them to full towers.
        num_rows: how many of the rows are real, int32, shape ().
        axes: for each leaf of `shared.rest` the axis along which it is split over the devices, None
            if it is whole; `()` if all are whole. Only with one tower on every device.

    Returns:
        What `finish` returns, on every device; and the rows of all towers on axis 0, padding
        included, split over the devices.
    """
    num_towers, num_devices = placement.num_towers, len(placement.devices)
    slots = -(-num_towers // num_devices)
    num_given = rows[0].shape[0]
    tower_rows = placement.tower_rows(num_given)
    size = tower_rows * slots * num_devices

    own = [shape_of(x).update(shape=(tower_rows, *x.shape[1:])) for x in map(jax.typeof, rows)]
    traced = trace_in_mesh(job.tower, (shared, own, Tower.shapes()), num_towers)
    refuse_filled(traced.meets, num_given, tower_rows, placement)
    rounds = traced.rounds(final=slots == 1)

    def on_device(
        first: Any, shared: Shared, rows: list[Any], num_rows: jax.Array, total: Any
    ) -> tuple[Any, Any]:
        numbers = first + jnp.arange(slots, dtype=first.dtype)
        exist = None if slots * num_devices == num_towers else numbers < num_towers

        def tower(index: jax.Array) -> Tower:
            return Tower(index, real_rows(index, tower_rows, num_rows), num_rows)

        if axes:
            result = _on_shards(traced, shared, axes, (rows, tower(first)))
        elif slots == 1:
            result = traced(shared, rows, tower(first))
        elif rounds is None:
            one = lambda index, rows: traced(shared, rows, tower(index))
            result = _in_turn(one, numbers, rows)
        else:
            result = _together(
                rounds, shared, tower, DeviceTowers(numbers, exist, num_towers), rows
            )
        if slots > 1:
            result = _joined(result, exist)
        means, sums = _over_towers(result, tower_rows, num_rows, total)
        return job.finish(shared.state, means, sums), result.rows

    def in_mesh(shared: Shared, rows: list[Any], num_rows: jax.Array) -> tuple[Any, Any]:
        first = lax.axis_index(AXIS) * slots
        return on_device(first, shared, rows, num_rows, sum_over_devices)

    padded = [pad_rows(leaf, size) for leaf in rows]
    if rounds is None and not axes and placement.is_default:
        finished, joined = on_device(jnp.int32(0), shared, padded, num_rows, lambda tree: tree)
    else:
        # check_vma=False: every value is this device's own, so jax.grad inside a tower stays inside
        # it (with the check on, JAX would already have summed gradients over the devices).
        finished, joined = jax.shard_map(
            in_mesh,
            mesh=placement.mesh,
            in_specs=(_specs(axes), PartitionSpec(AXIS), PartitionSpec()),
            out_specs=(PartitionSpec(), PartitionSpec(AXIS)),
            check_vma=False,
        )(shared, padded, num_rows)
    if slots * num_devices > num_towers:
        joined = jax.tree.map(lambda leaf: leaf[: num_towers * tower_rows], joined)
    return finished, joined


def _on_shards(
    traced: Traced, shared: Shared, axes: tuple[int | None, ...], rest: tuple[Any, ...]
) -> TowerResult:
    """Runs a tower that gathers each split leaf where it uses it."""
    from multitower.engines.gathering import run_program  # noqa: PLC0415 (importing stays quick)

    found = run_program(traced.program, (_with_shards(shared, axes), *rest))
    return jax.tree.unflatten(traced.treedef, found)


def _with_shards(shared: Shared, axes: tuple[int | None, ...]) -> Shared:
    from multitower.engines.gathering import Shard  # noqa: PLC0415 (importing stays quick)

    rest = [
        leaf if axis is None else Shard(leaf, None, axis, leaf.dtype)
        for leaf, axis in zip(shared.rest, axes, strict=True)
    ]
    return shared._replace(rest=rest)


def _specs(axes: tuple[int | None, ...]) -> Any:
    if not axes:
        return PartitionSpec()
    names = [[] if axis is None else [*[None] * axis, AXIS] for axis in axes]
    return Shared(PartitionSpec(), [PartitionSpec(*each) for each in names])


def run_on_shards(
    tower: Callable[[Any, list[Any], Tower], TowerResult],
    placement: Placement,
    shared: tuple[Any, Any],
    rows: list[Any],
    num_rows: jax.Array,
    *,
    block_specs: Any,
) -> tuple[Any, Any, Any]:
    """Runs one tower on each device, on arrays that may be split over the devices.

    Args:
        tower: (shared, rows, tower) -> TowerResult; its blocks are parts of sums over devices.
        placement: one tower on every device.
        shared: what a tower gets, and the `PartitionSpec` of each leaf of it.
        rows: as for `run`; if towers meet, the caller makes sure that no padding is needed.
        num_rows: as for `run`.
        block_specs: the `PartitionSpec`s of the blocks.

    Returns:
        Means and sums, on every device; and global arrays that are made of the devices' blocks.
    """
    num_towers = placement.num_towers
    tower_rows = placement.tower_rows(rows[0].shape[0])
    values, specs = shared

    def on_device(values: Any, rows: list[Any], num_rows: jax.Array) -> tuple[Any, Any, Any]:
        index = lax.axis_index(AXIS)
        here = Tower(index, real_rows(index, tower_rows, num_rows), num_rows)
        traced = trace_in_mesh(tower, (values, rows, here), num_towers)
        result = traced(values, rows, here)
        means, sums = _over_towers(result, tower_rows, num_rows, sum_over_devices)
        return means, sums, result.blocks

    return jax.shard_map(
        on_device,
        mesh=placement.mesh,
        in_specs=(specs, PartitionSpec(AXIS), PartitionSpec()),
        out_specs=(PartitionSpec(), PartitionSpec(), block_specs),
        check_vma=False,  # as in `run`
    )(values, [pad_rows(leaf, tower_rows * num_towers) for leaf in rows], num_rows)


def _over_towers(
    result: TowerResult, tower_rows: int, num_rows: jax.Array, total: Callable[[Any], Any]
) -> tuple[Any, Any]:
    """Means and sums over towers; `total` adds up over devices."""
    given = jax.tree.map(jnp.asarray, result.means)
    # The sum over many rows may be larger than float16 can hold, and the mean is not.
    wide = jax.tree.map(lambda x: x.astype(wide_dtype(x.dtype)), given)
    means, sums = total((wide, result.sums))
    # XLA fuses a product with a number into whatever uses it, but would store a quotient first.
    scale = tower_rows / num_rows.astype(float)
    with jax.numpy_dtype_promotion("standard"):  # the scale has 64 bits with jax_enable_x64
        return jax.tree.map(lambda x, own: (x * scale).astype(own.dtype), means, given), sums


def trace_in_mesh(fn: Any, args: tuple[Any, ...], num_towers: int) -> Traced:
    """Traces a function where the axis of towers exists, but no mesh.

    Inside `shard_map` the type of a traced value names the mesh, and that of a constant does not.
    Code that compares types, such as Equinox's BatchNorm, would find that `jnp.array(False)` has
    another type than the flag that it replaces. So the function is traced by itself.

    Raises:
        ArgumentError: the function uses an array on several devices that is not an argument, such
            as an attribute of an object.
    """
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        traced = trace(fn, args, num_towers)
    for held in constants_in(traced.program):
        if is_traced(held) or not isinstance(held, jax.Array):
            continue
        if isinstance(held.sharding, NamedSharding) and len(held.sharding.device_set) > 1:
            raise ArgumentError(
                f"the function uses an array of shape {held.shape} that lies on "
                f"{len(held.sharding.device_set)} devices, and is no argument of it: JAX refuses "
                f"that. {PASS_IT}"
            )
    from multitower.engines.held import lifted  # noqa: PLC0415 (importing stays quick)

    return replace(traced, program=lifted(traced.program, num_towers))


def sum_over_devices(tree: Any) -> Any:
    """The sums over devices. Small leaves are sent together: not all compilers join exchanges."""
    leaves, treedef = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))  # Python numbers too
    small = {i: leaf for i, leaf in enumerate(leaves) if leaf.size <= SMALL}
    together = unpack(jax.tree.map(_psum, pack(small)))
    return treedef.unflatten(
        together[i] if i in together else _psum(leaf) for i, leaf in enumerate(leaves)
    )


def _psum(value: jax.Array) -> jax.Array:
    if value.dtype == jnp.bool_:  # flags that are False in all towers but one
        return lax.psum(value.astype(jnp.int32), AXIS).astype(jnp.bool_)
    if jnp.iscomplexobj(value):  # XLA aborts the process where such a sum stands beside another
        return lax.complex(_psum(value.real), _psum(value.imag))
    return lax.psum(value, AXIS)


def _in_turn(one: Any, numbers: jax.Array, rows: list[Any]) -> TowerResult:
    """Several towers on one device, one after another; their results on a new axis."""
    return lax.map(lambda at: one(*at), (numbers, [_in_slots(leaf, len(numbers)) for leaf in rows]))


def _together(
    rounds: Rounds, shared: Shared, tower: Any, here: DeviceTowers, rows: list[Any]
) -> TowerResult:
    """Several towers on one device that meet: each round is one program for all of them."""
    blocks = [_in_slots(leaf, len(here.numbers)) for leaf in rows]
    own = jax.tree.leaves((blocks, jax.vmap(tower)(here.numbers)))
    values = dict(zip(rounds.inputs, [*jax.tree.leaves(shared), *own], strict=True))
    whole = set(rounds.inputs[: -len(own)])  # what all towers share
    arrived = Sent(pack([]), [])

    def run(fn: Any, inputs: list[int]) -> Any:
        axes = ([None if x in whole else 0 for x in inputs], None, 0)
        return jax.vmap(fn, axes)([values[x] for x in inputs], arrived, here.numbers)

    for one in rounds.rounds[:-1]:
        found, left = run(one, one.inputs)
        values.update(zip(one.outputs, found, strict=True))
        sums = jax.tree.map(lambda x: _psum(_added(x, here.exist)), left.sums)
        every = [lax.all_gather(x, AXIS, tiled=True) for x in left.every]
        arrived = Sent(sums, [x if here.exist is None else x[: here.num_towers] for x in every])
    last = rounds.rounds[-1]
    return jax.tree.unflatten(rounds.treedef, run(last.last, last.inputs))


def _in_slots(leaf: jax.Array, slots: int) -> jax.Array:
    """A device's rows, one block for each of its towers; -1 for a size fails on empty arrays."""
    return leaf.reshape(slots, leaf.shape[0] // slots, *leaf.shape[1:])


def _joined(stacked: TowerResult, exist: jax.Array | None) -> TowerResult:
    """The results of several towers as one: means and sums added up, rows concatenated."""
    means, sums = jax.tree.map(lambda x: _added(x, exist), (stacked.means, stacked.sums))
    joined = jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), stacked.rows)
    return TowerResult(means, sums, joined)


def _added(values: jax.Array, exist: jax.Array | None) -> jax.Array:
    """The sum over a device's towers: over those that exist, or over all if `exist` is None."""
    if exist is not None:
        some = exist.reshape(-1, *[1] * (values.ndim - 1))
        values = jnp.where(some, values, jnp.zeros_like(values))
    return values.sum(0, dtype=values.dtype)
