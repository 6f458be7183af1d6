"""A function of towers: takes a call apart, and runs it on the engine that fits it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from multitower.engines import spmd
from multitower.engines.executable import signature
from multitower.engines.job import Job, Shared
from multitower.engines.same_bits import SameBits
from multitower.errors import ArgumentError
from multitower.functions.arguments import Arguments
from multitower.functions.outputs import warn_of_copies
from multitower.hardware.devices import DeviceSpec
from multitower.models.modules import Call
from multitower.towers.global_arrays import as_global, join_rows, on_all_devices, replicate
from multitower.towers.leaf_shards import axis_of_parts
from multitower.towers.leaves import are_traced, is_key, is_legacy_key, row_shapes
from multitower.towers.placement import Placement, check_towers, place
from multitower.towers.rows import (
    SHARED,
    BatchParts,
    Split,
    Tower,
    axes_of_leaves,
    key_of_tower,
    take_apart,
)
from multitower.towers.same_call import check_same_call
from multitower.towers.split import copy_to, cut, refuse_tower_rows
from multitower.towers.surroundings import (
    explaining,
    refuse_a_mesh,
    refuse_disabled_jit,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Leaves:
    """Some leaves of a tree, by number, with the structure of the whole tree as static data."""

    by_number: dict[int, Any]
    treedef: Any = field(metadata={"static": True})


class Axes(NamedTuple):
    """A tree of axes, hashable; None is a leaf."""

    treedef: Any
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, tree: Any) -> "Axes":
        """Takes a tree of axes apart."""
        leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda x: x is None)
        return cls(treedef, tuple(leaves))

    @property
    def tree(self) -> Any:
        """The tree of axes again."""
        return jax.tree.unflatten(self.treedef, self.leaves)


class Kind(Protocol):
    """What differs between `make_parallel` and `value_and_grad`."""

    @property
    def averages(self) -> bool:
        """Whether results without rows are averaged over towers."""
        ...

    def outputs(self, split: Split, shared: list[Any], rows: list[Any], here: Tower) -> Any:
        """What the function itself returns in one tower, by name; used for the first look only."""
        ...

    def axes(self, call: Call, arguments: Arguments) -> tuple[Any, Any, Any]:
        """The row axes of `(args, kwargs, rows)`, None for shared; raises on wrong arguments."""
        ...

    def job(self, split: Split, tower_rows: int, ragged: tuple[int, int] | None) -> Job:
        """The job that a call runs; its rows are `Leaves`.

        The tree that was split is `(args, kwargs, rows, models, arrays)`. `ragged` is as returned
        by `ragged_of`.
        """
        ...

    def weights_job(
        self, split: Split, shared: list[Any], rows: list[Any], *, num_towers: int
    ) -> Job | None:
        """A job that runs first, or None; `job` gets its sums, after the shared leaves."""
        ...

    def result(self, finished: Any, rows: Leaves) -> Any:
        """What the caller gets, from the finished sums and the joined rows."""
        ...


class TowerFunction:
    """Runs a `Kind` on towers, eagerly or inside another transformation."""

    def __init__(self, kind: Kind, devices: DeviceSpec | None, towers: int | None) -> None:
        towers = check_towers(towers)
        self._kind = kind
        self._devices = devices
        self._towers = towers
        self._placement: Placement | None = None
        if devices is not None:
            self.placement()
        self._engines: dict[Any, tuple[SameBits | None, SameBits]] = {}
        self._looked_at: dict[Split, str] = {}  # the results in which copies of rows count
        self._programs: dict[Any, Callable[..., Any]] = {}
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
        try:
            parts = take_apart(tree, axes, name=arguments, constants=True)
        except ArgumentError as error:
            raise _of_the_arguments(error, axes[0], call) from error.__cause__
        with explaining():
            result = self._call(parts, placement)
        if parts.split not in self._looked_at:  # afterwards: an error says more
            self._looked_at[parts.split] = self._look(parts, tree, axes, arguments)
        if names := self._looked_at[parts.split]:
            tower_rows = placement.tower_rows(parts.num_rows)
            if parts.num_rows % tower_rows:
                self._looked_at[parts.split] = ""
                warn_of_copies(names, parts.num_rows, tower_rows)
        return result

    def _call(self, parts: BatchParts, placement: Placement) -> Any:
        if are_traced((*parts.shared, *parts.rows)):
            refuse_tower_rows(parts.rows)
            return self._jitted(parts.split, (), parts.shared, parts.rows)
        if not self._looked_at:
            check_same_call("arguments", [*parts.shared, *parts.rows], placement)
        if self._towers is not None:
            return self._same_bits(parts, placement)
        refuse_tower_rows(parts.rows)
        even = parts.num_rows % len(placement.devices) == 0
        # A leaf that is split over these devices is gathered where the function uses it.
        axes = tuple(axis_of_parts(leaf, placement) for leaf in parts.shared)
        pairs = list(zip(parts.shared, axes, strict=True))
        whole = iter(on_all_devices([leaf for leaf, axis in pairs if axis is None], placement))
        shared = [next(whole) if axis is None else leaf for leaf, axis in pairs]
        axes = axes if any(axis is not None for axis in axes) else ()
        target = placement.split if even else placement.shared
        rows = copy_to(parts.rows, [target] * len(parts.rows))
        return self._over_devices(parts.split, axes, placement)(shared, rows)

    def placement(self) -> Placement:
        """Which device runs which towers; starts JAX at the first call, not before."""
        if self._placement is None:
            self._placement = place(self._devices, self._towers)
        return self._placement

    def _look(self, parts: BatchParts, tree: Any, axes: Any, arguments: Arguments) -> str:
        """Looks at the function; the results in which copies of rows count, as `look` says."""
        from multitower.checks.first_look import look, look_at_key  # noqa: PLC0415 (at the first call: importing stays quick)

        def outputs_with(alike: int | None) -> Any:
            """What a tower computes if all keys but the shared leaf `alike` are its own."""

            def outputs(rows: list[Any], here: Tower, shared: list[Any]) -> Any:
                shared = [
                    key_of_tower(leaf, here) if number != alike and _is_one_key(leaf) else leaf
                    for number, leaf in enumerate(shared)
                ]
                return self._kind.outputs(parts.split, shared, rows, here)

            return outputs

        def named(number: int) -> tuple[str, str]:
            path = parts.split.row_paths(tree)[number]
            return arguments.of(path), arguments.whole([path], tree, axes)

        averages, num_towers = self._kind.averages, self.placement().num_towers
        one_row = 1 < parts.num_rows <= num_towers
        closed_over = tree[-1] if one_row else ()
        copies_count_in = look(
            outputs_with(None),
            parts.rows,
            parts.shared,
            averages=averages,
            num_devices=0 if self._towers else num_towers,
            has_all=self._towers == 1,
            named=named,
            real_rows=self.placement().tower_rows(parts.num_rows),
            fun=arguments.fun,
            beside_one_row=[x for x in closed_over if jnp.shape(x)[:1] == (parts.num_rows,)],
        )
        shared_keys = _shared_keys(parts, tree, arguments) if self._towers != 1 else {}
        for number, name in shared_keys.items():
            look_at_key(outputs_with(number), outputs_with(None), parts.rows, parts.shared, name)
        return copies_count_in

    def _over_devices(self, split: Split, axes: Any, placement: Placement) -> Callable[..., Any]:
        """The program over all devices for arguments of one structure, of their leaves."""
        program = self._programs.get((split, axes))
        if program is None:
            from multitower.engines.held import HoldingJit  # noqa: PLC0415 (importing stays quick)

            run = functools.partial(self._traced, split, axes)
            program = self._programs[split, axes] = HoldingJit(run, placement)
        return program

    def _traced(
        self, split: Split, axes: tuple[int | None, ...], shared: list[Any], rows: list[Any]
    ) -> Any:
        placement = self.placement()
        num_rows = rows[0].shape[0]
        tower_rows = placement.tower_rows(num_rows)
        ragged = ragged_of(num_rows, placement.num_towers)
        job = self._kind.job(split, tower_rows, ragged)
        before = self._weights_job(split, shared, rows, tower_rows)
        run = lambda job, shared, axes: spmd.run(
            job, placement, Shared((), shared), rows, jnp.int32(num_rows), axes=axes
        )
        if before is not None:
            weights = run(before, shared, axes)[0]
            shared, axes = [*shared, *weights], (*axes, *[None] * len(weights)) if axes else ()
        finished, joined = run(job, shared, axes)
        if ragged:
            joined = jax.tree.map(lambda leaf: leaf[:num_rows], joined)
        return self._kind.result(finished, joined)

    def _weights_job(
        self, split: Split, shared: list[Any], rows: list[Any], tower_rows: int
    ) -> Job | None:
        shapes = row_shapes(rows, tower_rows)
        num_towers = self.placement().num_towers
        return self._kind.weights_job(split, shared, shapes, num_towers=num_towers)

    def _same_bits(self, parts: BatchParts, placement: Placement) -> Any:
        tower_rows = placement.tower_rows(parts.num_rows)
        rows = cut(parts.rows, parts.num_rows, placement, tower_rows)
        ragged = ragged_of(parts.num_rows, placement.num_towers)
        shared = parts.shared
        if not placement.spans_processes:
            shared = on_all_devices(shared, placement)
        replicas = replicate(Shared((), shared), placement)
        # Shapes and dtypes, too: a function may look at them and return a ratio for some alone.
        kinds = signature(
            (replicas[0].rest, [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in rows])
        )
        key = (parts.split, tower_rows, ragged is None, kinds)
        engines = self._engines.get(key)
        if engines is None:
            job = self._kind.job(parts.split, tower_rows, ragged)
            before = self._weights_job(parts.split, parts.shared, parts.rows, tower_rows)
            first = None if before is None else SameBits(before, placement)
            engines = first, SameBits(job, placement)
        if engines[0] is not None:
            weights = engines[0].run(replicas, rows).results
            pairs = zip(replicas, weights, strict=True)
            replicas = [Shared((), [*shared.rest, *more]) for shared, more in pairs]
        finished = engines[1].run(replicas, rows)
        self._engines[key] = engines  # only now: one that failed to compile is not kept
        joined = join_rows(finished.rows, placement, parts.num_rows)
        return self._kind.result(as_global(finished.results, placement), joined)


def ragged_of(num_rows: int, num_towers: int) -> tuple[int, int] | None:
    """(rows, towers) if the rows do not fill the towers evenly; else None."""
    return (num_rows, num_towers) if num_rows % num_towers else None


def _of_the_arguments(error: ArgumentError, axes: Any, call: Call) -> ArgumentError:
    """The error, about what the user wrote alone if in_axes do not fit the arguments.

    The axes of keyword arguments, models and closed-over arrays are ours.
    """
    try:
        axes_of_leaves(axes, call.args, "in_axes")
    except ArgumentError as own:
        return own
    return error


def _is_one_key(leaf: Any) -> bool:
    return (is_key(leaf) and not leaf.ndim) or is_legacy_key(leaf)


def _shared_keys(parts: BatchParts, tree: Any, arguments: Arguments) -> dict[int, str]:
    """Keys in arguments that in_axes shares as a whole, by their number among the shared leaves.

    A key that is an argument by itself is not among them: its None is on purpose.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    found: dict[int, str] = {}
    number = 0
    for (path, _), kind in zip(paths, parts.split.kinds, strict=True):
        if not isinstance(kind, str):
            continue
        of_args, *rest = path
        is_within = kind == SHARED and of_args.idx == 0 and len(rest) > 1
        if is_within and _is_one_key(parts.shared[number]):
            found[number] = f"in_axes[{rest[0].idx}] is None and shares {arguments.of(path)}"
        number += 1
    return found
