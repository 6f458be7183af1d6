"""Global arrays: makes one array over all devices from those of devices or towers, and back."""

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec, SingleDeviceSharding

from multitower.processes.together import spread, whole_on_host
from multitower.towers.leaves import device_dtype, is_key
from multitower.towers.placement import AXIS, Placement
from multitower.towers.split import copy_to

# Leaves of up to so many elements, over all towers, are joined in one program: less to compile.
_SMALL_SIZE = 1 << 18


class KeptCopies:
    """Copies of arrays, by the identity of the originals; they are forgotten with these.

    A `jax.Array` never changes, so its copies stay valid.
    """

    def __init__(self) -> None:
        self._all: dict[int, tuple[Any, dict[Any, jax.Array]]] = {}

    def of(self, leaf: jax.Array) -> dict[Any, jax.Array]:
        """The copies of an array, by where they are; new ones may be written there."""
        known = self._all.get(id(leaf))
        if known is not None and known[0]() is leaf:
            return known[1]
        kept, number = self._all, id(leaf)

        def forget(gone: Any) -> None:
            if number in kept and kept[number][0] is gone:
                del kept[number]

        copies: dict[Any, jax.Array] = {}
        kept[number] = (weakref.ref(leaf, forget), copies)
        return copies


# Where one of these devices has the array, so that no other has to keep more.
_copies = KeptCopies()


def on_all_devices(leaves: Sequence[Any], placement: Placement) -> list[jax.Array]:
    """Copies leaves to all devices; a `jax.Array` on one of them is copied only once.

    Frozen weights and a model that predicts stay where they are from call to call. What is
    returned must not be donated.
    """
    where = placement.shared
    known = [_known_copies(leaf, placement) for leaf in leaves]
    missing = [n for n, copies in enumerate(known) if where not in copies]
    made = copy_to([leaves[n] for n in missing], [where] * len(missing))
    for n, copy in zip(missing, made, strict=True):
        known[n][where] = copy
    return [copies[where] for copies in known]


def _known_copies(leaf: Any, placement: Placement) -> dict[Any, jax.Array]:
    if not isinstance(leaf, jax.Array):
        return {}
    if leaf.sharding == placement.shared:
        return {placement.shared: leaf}
    if not isinstance(leaf.sharding, SingleDeviceSharding) or len(placement.devices) == 1:
        return {}
    (device,) = leaf.devices()
    is_here = device in placement.devices
    is_here &= leaf.sharding.memory_kind == device.default_memory().kind
    return _copies.of(leaf) if is_here else {}


def replicate(tree: Any, placement: Placement) -> list[Any]:
    """Copies a tree to every local device; leaves that already lie there are not copied again.

    Returns:
        The tree, once per local device, with single-device arrays.
    """
    leaves, treedef = jax.tree.flatten(tree)
    if not leaves:
        return [tree] * len(placement.local)
    devices = [placement.devices[d] for d in placement.local]
    if placement.spans_processes:
        per_leaf = [_local_copies(leaf, placement, devices) for leaf in leaves]
    else:
        copies = copy_to(leaves, [placement.shared] * len(leaves))
        per_leaf = [on_each_device(copy, devices) for copy in copies]
    return [
        jax.tree.unflatten(treedef, [leaf[i] for leaf in per_leaf]) for i in range(len(devices))
    ]


def _local_copies(leaf: Any, placement: Placement, devices: Sequence[jax.Device]) -> list[Any]:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return on_each_device(spread(leaf, placement.shared), devices)
    # One by one: a Python number has a weak type, which a global array would not keep.
    return copy_to([leaf] * len(devices), devices)


def on_each_device(leaf: jax.Array, devices: Sequence[jax.Device]) -> list[jax.Array]:
    """This array's block on each of the given devices; every device must hold one."""
    blocks = {shard.device: shard.data for shard in leaf.addressable_shards}
    return [blocks[device] for device in devices]


def as_global(replicas: Sequence[Any], placement: Placement) -> Any:
    """One tree of arrays that lie whole on every device, from one tree per local device."""
    if not replicas:
        return None

    def join(*copies: jax.Array) -> jax.Array:
        return jax.make_array_from_single_device_arrays(
            copies[0].shape, placement.shared, list(copies)
        )

    return jax.tree.map(join, *replicas)


def stacked(blocks: Iterable[jax.Array], placement: Placement) -> jax.Array:
    """A global array, the blocks of all devices along axis 0, from those of local devices."""
    blocks = list(blocks)
    shape = (len(placement.devices) * blocks[0].shape[0], *blocks[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, placement.split, blocks)


def join_rows(returned: Mapping[int, Any], placement: Placement, num_rows: int) -> Any:
    """Joins the rows of all towers along axis 0, without padding rows.

    Rows stay on their devices if every device has equally many and all are real. Otherwise all of
    them are copied to every device, where the rest of the results is, too.

    Args:
        returned: for each tower of this process, by its number, a tree of arrays with rows on axis
            0, on the tower's device.
        placement: which device runs which tower.
        num_rows: the number of real rows; rows after them are padding.

    Returns:
        The tree, with the first `num_rows` rows of all towers on axis 0.
    """
    pieces = [returned[tower] for tower in sorted(returned)]
    slots = len(placement.towers_on[0])
    even = all(len(towers) == slots for towers in placement.towers_on)
    contiguous = list(placement.owners) == sorted(placement.owners)

    sizes = {placement.num_towers * leaf.shape[0] for leaf in jax.tree.leaves(pieces[0])}
    stay = even and contiguous and sizes <= {num_rows}
    if not stay and placement.spans_processes:
        gather = lambda *towers: gather_rows(towers, placement, num_rows)
        return jax.tree.map(gather, *pieces)
    if not stay:
        rows = _on_one(pieces, placement.devices[0], num_rows)
        return jax.device_put(rows, placement.shared) if len(placement.devices) > 1 else rows
    if slots > 1 and sizes:
        starts = range(0, len(pieces), slots)
        pieces = [_one_after_another(pieces[i : i + slots], num_rows) for i in starts]
    return jax.tree.map(lambda *blocks: stacked(blocks, placement), *pieces)


def _on_one(pieces: list[Any], device: jax.Device, num_rows: int) -> Any:
    """The rows of several trees on one device; large leaves are moved and joined one by one."""
    trees = [jax.tree.flatten(piece) for piece in pieces]
    first, treedef = trees[0]
    small = [i for i, leaf in enumerate(first) if leaf.size * len(pieces) <= _SMALL_SIZE]
    found: dict[int, jax.Array] = {}
    together = set(small)
    large = [[i] for i in range(len(first)) if i not in together]
    for group in [small, *large] if small else large:  # no program for an empty group
        here = jax.device_put([[leaves[i] for i in group] for leaves, _ in trees], device)
        found.update(zip(group, _one_after_another(here, num_rows), strict=True))
    return jax.tree.unflatten(treedef, [found[i] for i in range(len(first))])


@functools.partial(jax.jit, static_argnums=1)
def _one_after_another(pieces: list[Any], num_rows: int) -> Any:
    """The rows of several trees, in this order, and not more than `num_rows`.

    This is one program for all leaves. Joined one by one, each leaf would compile its own program.
    """
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[:num_rows], *pieces)


def stack_on_host(leaves: Sequence[jax.Array], placement: Placement | None = None) -> Any:
    """One leaf from several, stacked along a new first axis, on the host; a key on a device.

    Args:
        leaves: leaves of one shape, such as those of this process's towers in ascending order.
        placement: with several processes, which device runs which tower.
    """
    if is_key(leaves[0]):
        data = stack_on_host([jax.random.key_data(leaf) for leaf in leaves], placement)
        return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(leaves[0]))
    if placement is not None and placement.spans_processes:
        rows = [leaf[None] for leaf in leaves]
        whole = whole_on_host(gather_rows(rows, placement, placement.num_towers))
    else:
        whole = np.stack([np.asarray(leaf) for leaf in leaves])  # host-device sync
    whole.flags.writeable = False  # what a user wrote into it would be lost
    return whole


def host_leaf(leaf: Any) -> Any:
    """A leaf on the host, with the dtype that it has on a device; a typed key stays a JAX array."""
    if is_key(leaf):
        return leaf
    leaf = whole_on_host(leaf)
    return leaf.astype(device_dtype(leaf), copy=False)


def rows_at(array: jax.Array, numbers: Any) -> jax.Array:
    """`array[numbers]` inside a program, of numbers that are known: slices, which are copied whole.

    A gather copies element by element: on CPUs it takes several times as long.
    """
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return jnp.concatenate([lax.slice_in_dim(array, run[0], run[-1] + 1) for run in runs])


def gather_rows(towers: Sequence[jax.Array], placement: Placement, num_rows: int) -> jax.Array:
    """The first `num_rows` rows of all towers, whole on every device; call it on every process.

    One process cannot copy another's rows, so all devices gather them in one program, which only
    moves data. It calls `lax.all_gather` explicitly. If it indexed a split array, XLA might compute
    each row as a sum over devices, and -0.0 + 0.0 is 0.0.

    Args:
        towers: the rows of this process's towers, in ascending order, each on its tower's device.
        placement: which device runs which tower.
        num_rows: the number of real rows; rows after them are padding.
    """
    own = sorted(t for d in placement.local for t in placement.towers_on[d])
    rows = dict(zip(own, towers, strict=True))
    blocks = [jnp.concatenate([rows[slot[d]] for slot in placement.slots]) for d in placement.local]
    return _gather(placement, towers[0].shape[0], num_rows)(stacked(blocks, placement))


@functools.lru_cache(maxsize=32)
def _gather(
    placement: Placement, tower_rows: int, num_rows: int
) -> Callable[[jax.Array], jax.Array]:
    order = np.add.outer(np.array(placement.places) * tower_rows, np.arange(tower_rows)).reshape(-1)
    gather = jax.shard_map(
        lambda rows: rows_at(lax.all_gather(rows, AXIS, tiled=True), order[:num_rows]),
        mesh=placement.mesh,
        in_specs=PartitionSpec(AXIS),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return jax.jit(gather)
