"""A function of towers: takes a call apart, picks the engine that fits it, joins the results."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from multitower.engines import spmd
from multitower.engines.job import Job, Shared
from multitower.engines.same_bits import SameBits
from multitower.engines.totals import on_each_device
from multitower.errors import warn
from multitower.functions.arguments import Arguments
from multitower.hardware.devices import DeviceSpec
from multitower.models.modules import Call
from multitower.processes.together import spread
from multitower.towers.gather import gather_rows
from multitower.towers.leaf_shards import axis_of_parts
from multitower.towers.placement import Placement, check_towers, place
from multitower.towers.rows import (
    SHARED,
    Parts,
    Split,
    Tower,
    are_traced,
    device_dtype,
    is_key,
    is_legacy_key,
    key_of_tower,
    take_apart,
)
from multitower.towers.same_call import check_same_call
from multitower.towers.split import copy_to, ready_or_cut, refuse_tower_rows
from multitower.towers.surroundings import refuse_a_mesh, refuse_disabled_jit

# Leaves of fewer elements, over all towers, are joined in one program: less is compiled for them.
_SMALL_SIZE = 1 << 18


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Leaves:
    """Some leaves of a tree, by number, with the tree's structure as static data."""

    by_number: dict[int, Any]
    treedef: Any = field(metadata={"static": True})


class Axes(NamedTuple):
    """A tree of axes, hashable; None is a leaf."""

    treedef: Any
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, tree: Any) -> "Axes":
        """Of a tree of axes."""
        leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda x: x is None)
        return cls(treedef, tuple(leaves))

    @property
    def tree(self) -> Any:
        """The tree of axes again."""
        return jax.tree.unflatten(self.treedef, self.leaves)


class Kind(Protocol):
    """What tells `make_parallel` from `value_and_grad`."""

    @property
    def name(self) -> str:
        """What the user calls it, for messages."""
        ...

    @property
    def averages(self) -> bool:
        """Whether results without rows are averaged over towers."""
        ...

    def outputs(self, split: Split, shared: list[Any], rows: list[Any], here: Tower) -> Any:
        """What the function itself gives in one tower, by name; only for a first look at it."""
        ...

    def axes(self, call: Call, arguments: Arguments) -> tuple[Any, Any, Any]:
        """The row axes of `(args, kwargs, rows)`, None for shared; raises on wrong arguments."""
        ...

    def job(self, split: Split, tower_rows: int, ragged: tuple[int, int] | None) -> Job:
        """The work; its rows are `Leaves`. `ragged` is (rows, towers) where some rows only fill.

        The tree that was split is `(args, kwargs, rows, models, arrays)`.
        """
        ...

    def weights_job(
        self,
        split: Split,
        shared: list[Any],
        rows: list[Any],
        *,
        tower_rows: int,
        num_towers: int,
    ) -> Job | None:
        """What must be known of all towers first; its sums follow the shared leaves of `job`."""
        ...

    def result(self, finished: Any, rows: Leaves) -> Any:
        """What the caller gets, from the finished sums and the joined rows."""
        ...


class TowerFunction:
    """Calls `kind` on towers, eagerly or inside another transformation."""

    def __init__(self, kind: Kind, devices: DeviceSpec | None, towers: int | None) -> None:
        check_towers(towers)
        self._kind = kind
        self._devices = devices
        self._towers = towers
        self._placement: Placement | None = None
        if devices is not None:
            self.placement()
        self._engines: dict[Any, tuple[SameBits | None, SameBits]] = {}
        self._looked_at: set[Split] = set()
        self._jitted = jax.jit(self._traced, static_argnums=(0, 1))

    def call(self, call: Call, arguments: Arguments) -> Any:
        """Calls the function with what the user gave."""
        refuse_a_mesh()
        if self._towers is not None:
            refuse_disabled_jit()
        placement = self.placement()
        # Models, and arrays that the function closes over, are whole in every tower.
        axes = (*self._kind.axes(call, arguments), None, None)
        tree = (call.args, call.kwargs, call.rows, call.models, call.arrays)
        parts = take_apart(tree, axes, name=arguments, constants=True)
        result = self._call(parts, placement)
        if parts.split not in self._looked_at:  # afterwards: an error says more than a warning
            self._looked_at.add(parts.split)
            self._look(parts, tree, axes, arguments)
        return result

    def _call(self, parts: Parts, placement: Placement) -> Any:
        if are_traced((*parts.shared, *parts.rows)):
            refuse_tower_rows(parts.rows)
            return self._jitted(parts.split, (), parts.shared, parts.rows)
        if not self._looked_at:
            check_same_call(self._kind.name, [*parts.shared, *parts.rows], placement)
        if self._towers is not None:
            return self._same_bits(parts, placement)
        refuse_tower_rows(parts.rows)
        even = parts.num_rows % len(placement.devices) == 0
        # What lies in parts on these devices is gathered where the function uses it.
        axes = tuple(axis_of_parts(leaf, placement) for leaf in parts.shared)
        shared = copy_to(
            parts.shared,
            [
                placement.shared if axis is None else leaf.sharding
                for leaf, axis in zip(parts.shared, axes, strict=True)
            ],
        )
        axes = axes if any(axis is not None for axis in axes) else ()
        target = placement.split if even else placement.shared
        rows = copy_to(parts.rows, [target] * len(parts.rows))
        return self._jitted(parts.split, axes, shared, rows)

    def placement(self) -> Placement:
        """Which device runs which towers; starts JAX at the first call, not before."""
        if self._placement is None:
            self._placement = place(self._devices, self._towers)
        return self._placement

    def _look(self, parts: Parts, tree: Any, axes: Any, arguments: Arguments) -> None:
        from multitower.checks.first_look import look, look_at_key  # noqa: PLC0415 (at the first call: importing stays quick)

        def outputs_with(alike: int | None) -> Any:
            """What a tower computes if it has its own keys, but for one of the shared leaves."""

            def outputs(rows: list[Any], here: Tower) -> Any:
                shared = [
                    key_of_tower(leaf, here) if number != alike and _is_one_key(leaf) else leaf
                    for number, leaf in enumerate(parts.shared)
                ]
                return self._kind.outputs(parts.split, shared, rows, here)

            return outputs

        def named(number: int) -> tuple[str, str]:
            path = parts.split.row_paths()[number]
            return arguments.of(path), arguments.whole(path, tree, axes)

        averages = self._kind.averages
        look(
            outputs_with(None),
            parts.rows,
            parts.shared,
            averages=averages,
            num_devices=0 if self._towers else self.placement().num_towers,
            named=named,
        )
        for number, name in _shared_keys(parts, arguments).items():
            look_at_key(outputs_with(number), outputs_with(None), parts.rows, parts.shared, name)

    def _traced(
        self, split: Split, axes: tuple[int | None, ...], shared: list[Any], rows: list[Any]
    ) -> Any:
        placement = self._evenly_placed()
        num_rows = rows[0].shape[0]
        tower_rows = -(-num_rows // placement.num_towers)
        ragged = ragged_of(num_rows, placement.num_towers)
        job = self._kind.job(split, tower_rows, ragged)
        before = self._weights_job(split, shared, rows, tower_rows)
        if before is not None:
            given = (placement, Shared((), shared), rows, jnp.int32(num_rows))
            weights = spmd.run(before, *given, axes=axes)[0]
            shared, axes = [*shared, *weights], (*axes, *[None] * len(weights)) if axes else ()
        given = (placement, Shared((), shared), rows, jnp.int32(num_rows))
        finished, joined = spmd.run(job, *given, axes=axes)
        if ragged:
            joined = jax.tree.map(lambda leaf: leaf[:num_rows], joined)
        return self._kind.result(finished, joined)

    def _weights_job(
        self, split: Split, shared: list[Any], rows: list[Any], tower_rows: int
    ) -> Job | None:
        shapes = [jax.ShapeDtypeStruct((tower_rows, *x.shape[1:]), device_dtype(x)) for x in rows]
        num_towers = self.placement().num_towers
        return self._kind.weights_job(
            split, shared, shapes, tower_rows=tower_rows, num_towers=num_towers
        )

    def _evenly_placed(self) -> Placement:
        whole = self.placement()
        placement, given = whole.divided(), len(whole.devices)
        placement.check_all_take_part()
        if len(placement.devices) < given:
            warn(
                f"towers={self._towers} inside another transformation (jax.jit and the like): all "
                f"devices have equally many there, so that {len(placement.devices)} of {given} are "
                f"used. Use a multiple of {given}, or call the function outside."
            )
        return placement

    def _same_bits(self, parts: Parts, placement: Placement) -> Any:
        tower_rows = -(-parts.num_rows // placement.num_towers)
        rows = ready_or_cut(parts.rows, parts.num_rows, placement, tower_rows)
        ragged = ragged_of(parts.num_rows, placement.num_towers)
        key = (parts.split, tower_rows, ragged is None)
        engines = self._engines.get(key)
        if engines is None:
            job = self._kind.job(parts.split, tower_rows, ragged)
            before = self._weights_job(parts.split, parts.shared, parts.rows, tower_rows)
            first = None if before is None else SameBits(before, placement)
            engines = first, SameBits(job, placement)
        replicas = replicate(Shared((), parts.shared), placement)
        if engines[0] is not None:
            weights = engines[0].run(replicas, rows).results
            pairs = zip(replicas, weights, strict=True)
            replicas = [Shared((), [*shared.rest, *more]) for shared, more in pairs]
        finished = engines[1].run(replicas, rows)
        self._engines[key] = engines  # only now: one that failed to compile is not kept
        joined = join_rows(finished.rows, placement, parts.num_rows)
        return self._kind.result(as_global(finished.results, placement), joined)


def replicate(tree: Any, placement: Placement) -> list[Any]:
    """Copies a tree to every local device; leaves that already lie there are not copied again.

    Returns:
        The tree, once per local device, with single-device arrays.
    """
    leaves, treedef = jax.tree.flatten(tree)
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
    # One by one: an array of all processes has no weak type, and a Python number has.
    return copy_to([leaf] * len(devices), devices)


def as_global(replicas: Sequence[Any], placement: Placement) -> Any:
    """One tree of arrays that lie whole on every device, from one tree per local device."""
    if not replicas:
        return None

    def join(*copies: jax.Array) -> jax.Array:
        return jax.make_array_from_single_device_arrays(
            copies[0].shape, placement.shared, list(copies)
        )

    return jax.tree.map(join, *replicas)


def join_rows(returned: dict[int, Any], placement: Placement, num_rows: int) -> Any:
    """Lays the rows of all towers side by side, without the rows that only filled up.

    Rows stay on their devices if every device has equally many and all are real; otherwise they
    are gathered on the first device, or on all of them where several processes have them.
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
        return _gathered(pieces, placement.devices[placement.local[0]], num_rows)
    if slots > 1 and sizes:
        starts = range(0, len(pieces), slots)
        pieces = [_one_after_another(pieces[i : i + slots], num_rows) for i in starts]

    def side_by_side(*blocks: jax.Array) -> jax.Array:
        shape = (num_rows, *blocks[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, placement.split, list(blocks))

    return jax.tree.map(side_by_side, *pieces)


def _gathered(pieces: list[Any], device: jax.Device, num_rows: int) -> Any:
    """The rows of several trees on one device; large leaves are moved and joined one by one."""
    trees = [jax.tree.flatten(piece) for piece in pieces]
    first, treedef = trees[0]
    small = [i for i, leaf in enumerate(first) if leaf.size * len(pieces) <= _SMALL_SIZE]
    found: dict[int, jax.Array] = {}
    large = [[i] for i in range(len(first)) if i not in small]
    for group in [small, *large] if small else large:  # no program of nothing
        here = jax.device_put([[leaves[i] for i in group] for leaves, _ in trees], device)
        found.update(zip(group, _one_after_another(here, num_rows), strict=True))
    return jax.tree.unflatten(treedef, [found[i] for i in range(len(first))])


@functools.partial(jax.jit, static_argnums=1)
def _one_after_another(pieces: list[Any], num_rows: int) -> Any:
    """The rows of several trees, in this order, and not more than `num_rows`.

    In one program for all leaves: one by one each of them would compile its own.
    """
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[:num_rows], *pieces)


def ragged_of(num_rows: int, num_towers: int) -> tuple[int, int] | None:
    """(rows, towers) where some rows only fill up."""
    return (num_rows, num_towers) if num_rows % num_towers else None


def _is_one_key(leaf: Any) -> bool:
    return (is_key(leaf) and not leaf.ndim) or is_legacy_key(leaf)


def _shared_keys(parts: Parts, arguments: Arguments) -> dict[int, str]:
    """Keys in arguments that in_axes shares as a whole, by their number among the shared leaves.

    A key that is an argument by itself is none of them: None for it alone is meant.
    """
    treedef, kinds = parts.split.treedef, parts.split.kinds
    paths = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(treedef, range(len(kinds))))[0]
    found: dict[int, str] = {}
    number = 0
    for (path, _), kind in zip(paths, kinds, strict=True):
        if not isinstance(kind, str):
            continue
        of_args, *rest = path
        is_within = kind == SHARED and of_args.idx == 0 and len(rest) > 1
        if is_within and _is_one_key(parts.shared[number]):
            found[number] = f"in_axes[{rest[0].idx}] is None and shares {arguments.of(path)}"
        number += 1
    return found
