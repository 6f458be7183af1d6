"""make_parallel: a function of batched arrays, run on every device."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from multitower.checks.problems import FIRST
from multitower.engines.job import Job, Shared, TowerResult
from multitower.errors import ArgumentError, OutputError, refuse_foreign
from multitower.functions.arguments import Arguments
from multitower.functions.calls import Axes, Leaves, TowerFunction
from multitower.functions.outputs import check_arrays, shapes_with_more_rows
from multitower.hardware.devices import DeviceSpec, hashable_spec
from multitower.models.callables import as_function
from multitower.models.closures import Contents, UsedByArguments, call_opened
from multitower.models.modules import Call, call_tower, take_call
from multitower.models.state import Changed, as_leaf, only_first
from multitower.stages.options import StageOptions, stage_options
from multitower.towers.rows import Split, Tower, axes_of_leaves
from multitower.towers.surroundings import is_inside_a_tower

_P = ParamSpec("_P")
_R = TypeVar("_R")


@refuse_foreign(
    "Arguments of fn go to the function that it returns, make_parallel(fn)(x, y=y), and the number "
    "of GPUs is devices=.",
    gpu_count="Say devices=.",
    gpus="Say devices=.",
    num_gpus="Say devices=.",
    fn="A decorator with arguments is @functools.partial(mt.make_parallel, towers=8).",
    axis_name="Inside the function, the axis is always called 'towers'.",
    mesh="Say devices=.",
    in_specs="Say in_axes=, as for jax.vmap.",
    out_specs="Say out_axes=, as for jax.vmap.",
)
def make_parallel(
    fn: Callable[_P, _R],
    in_axes: Any = 0,
    out_axes: Any = 0,
    *,
    devices: DeviceSpec | None = None,
    towers: int | None = None,
    stages: int | None = None,
    layout: tuple[int, int] | None = None,
    interleave: bool = False,
) -> Callable[_P, _R]:
    """Runs a function of batched arrays on all devices, each on its share of the rows.

    `make_parallel(f)(batch) == f(batch)` for every `f` that treats rows one by one, for any number
    of rows and any number of devices. Uneven rows are padded with copies of rows, whose results are
    cut off again.

    Args:
        fn: a function of pytrees of arrays, which gets many rows at once; or a Flax NNX or Equinox
            module. Modules, and what `fn` closes over, are whole on every device. Changes that an
            NNX module makes in itself are combined as by `value_and_grad`.
        in_axes: the axis of the rows, as in `jax.vmap`: an int, None for arguments that every
            device gets whole, or a tuple with one entry (or pytree prefix) per positional argument.
            Keyword arguments are split on axis 0. Numbers and 0-d arrays are always whole. Each
            tower gets a different PRNG key from a 0-d typed key; tower 0 gets the key unchanged.
            Flags, strings, functions, and settings in a frozen dataclass or an Enum, are passed on
            like static arguments of `jax.jit`.
        out_axes: the axis of the rows in the results; None for a result that does not depend on
            the rows (it is taken from the first tower; a warning names one that does depend).
        devices: as for `multitower.devices`; all by default.
        towers: split the batch into this many towers. Called outside of `jax.jit`, the result has
            the same bits on any number of devices. Inside `jax.jit`, `jax.grad`, `jax.vmap` or
            `jax.lax.scan`, rows and keys of the towers stay the same, and the result is equal up to
            rounding. Inside a function that runs on towers already it calls `fn` itself.
        stages: cut the model into this many stages, each on its own device, for a model that does
            not fit on one. `fn` is cut at its marks `mt.cut(h)`, or into parts of equal work. What
            every tower gets whole (modules, arguments with `in_axes=None`, what `fn` closes over)
            is copied to the stages that use it at the first call, and stays there as long as the
            caller keeps these arrays. NumPy arrays may change, and are copied at every call. The
            bits are the same for any `devices`, `layout` and `interleave`, if `towers` is given.
        layout: (replicas of the model, devices of each), for `stages`. By default a device for each
            stage, or all devices if there are fewer; and as many replicas as there is room for,
            with one tower each if `towers` is None.
        interleave: for `stages`: stage s runs on device s mod P of the P devices of its replica; by
            default neighbours share a device.

    Returns:
        A function with the arguments of `fn`. Its results stay on their devices, split over them
        where the rows divide evenly. What JAX adds up over such rows afterwards has other bits on
        another number of devices; `np.asarray` of them has not.

    Raises:
        ArgumentError: an argument that can be neither split nor shared, such as a list of strings.
            With `stages`: `fn` cannot be cut into so many, or it is called inside `jax.jit`.
        BatchError: no rows, or different row counts.
        OutputError: a result without an axis of rows; with `stages` a changed BatchNorm average,
            or, with several processes, a result with `out_axes=None`.
        DeviceError: more devices than there are, or an unknown name.

    Example:
        >>> import jax.numpy as jnp
        >>> import multitower as mt
        >>> double = mt.make_parallel(lambda x: 2 * x)
        >>> double(jnp.arange(5))
        Array([0, 2, 4, 6, 8], dtype=int32)

    Source: `make_parallel` of the classic TensorFlow tower tutorials, with `jax.vmap`'s arguments.
    """
    where = hashable_spec(devices), towers
    cut = stage_options(stages, layout, interleave)
    return _parallel(fn, _Options(Axes.of(in_axes), Axes.of(out_axes), where, cut))


def score_in_parallel(
    fn: Callable[_P, _R],
    *,
    devices: DeviceSpec | None,
    towers: int | None,
    stages: int | None,
    layout: tuple[int, int] | None,
    interleave: bool,
) -> Callable[_P, _R]:
    """`make_parallel` for the functions that `evaluate` and `predict` make of a user's.

    They have the arguments (params, model_state, batch) and no out_axes, and get copies of modules:
    it is of no use to write into these, and no mistake of theirs.
    """
    cut = stage_options(stages, layout, interleave)
    axes = Axes.of((None, None, 0)), Axes.of(0)
    return _parallel(fn, _Options(*axes, (devices, towers), cut, scores=True))


class _Options(NamedTuple):
    in_axes: Axes
    out_axes: Axes
    where: tuple[DeviceSpec | None, int | None]
    stages: StageOptions | None
    scores: bool = False  # for `evaluate` or `predict`


def _parallel(fn: Callable[_P, _R], options: _Options) -> Callable[_P, _R]:
    arguments = Arguments(fn)
    fn = as_function(fn)
    own = _tower_function(fn, options)  # refuses wrong options right away
    used = UsedByArguments()

    @functools.wraps(fn)
    def parallel(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if is_inside_a_tower():  # its rows are all rows, so the result is that of `fn`
            return fn(*args, **kwargs)

        def run_opened(opened: Any, closed: Contents) -> tuple[Call, Any]:
            try:
                run = own if opened is fn else _remembered(used.of(args, kwargs), opened, options)
            except TypeError:  # unhashable, so it cannot be cached
                run = _tower_function(opened, options)
            call = take_call(args, kwargs, closed)
            return call, run.call(call, arguments)

        call, (result, changed) = call_opened(fn, (), run_opened)
        call.hand_on(changed)
        return result

    return parallel


def _tower_function(fn: Any, options: _Options) -> TowerFunction:
    kind = _Parallel(fn, options.in_axes.tree, options.out_axes.tree, options.scores)
    if options.stages is None:
        return TowerFunction(kind, *options.where)
    from multitower.functions.in_stages import StagedFunction  # noqa: PLC0415 (importing stays quick)

    return StagedFunction(kind, *options.where, options.stages)


@functools.lru_cache(maxsize=128)
def _remembered(_used: Any, fn: Any, options: _Options) -> TowerFunction:
    """Cached: a loop may call make_parallel in every turn, and must not compile anew."""
    return _tower_function(fn, options)


_OR_OUT_AXES = ", or say out_axes=None for a result that does not depend on the rows"


class _Parallel(NamedTuple):
    fn: Any  # a function, or an OpenFunction
    in_axes: Any
    out_axes: Any
    scores: bool
    averages: bool = False

    def axes(self, call: Call, arguments: Arguments) -> tuple[Any, Any, Any]:
        axes, args = self.in_axes, call.args
        if isinstance(axes, list):
            axes = tuple(axes)
        if isinstance(axes, tuple) and len(axes) != len(args):
            raise ArgumentError(
                f"in_axes={self.in_axes!r} has {len(axes)} entries for {len(args)} positional "
                "arguments: give one entry each, or a single int for all."
            )
        return axes, 0, 0

    def job(self, split: Split, tower_rows: int, ragged: tuple[int, int] | None) -> Job:
        def tower(shared: Shared, rows: list[Any], here: Tower) -> TowerResult:
            call = Call(*split.rebuild(shared.rest, rows, here))
            outputs, changed = call_tower(self.fn, call, here, tower_rows)
            outputs_of = lambda rows: self._outputs(split, shared.rest, rows, here)
            more_rows, more = shapes_with_more_rows(outputs_of, rows, outputs, "result")
            by_row, whole = self._sort_outputs(outputs, tower_rows, more_rows, more)
            first = {number: only_first(leaf, here) for number, leaf in whole.items()}
            return TowerResult(
                means=[changes.averaged for changes in changed],
                sums=(first, [changes.first for changes in changed]),
                rows=by_row,
            )

        return Job(tower, finish=lambda state, means, sums: (means, sums))

    def weights_job(
        self, split: Split, shared: list[Any], rows: list[Any], *, num_towers: int
    ) -> None:
        return None

    def outputs(self, split: Split, shared: list[Any], rows: list[Any], here: Tower) -> Any:
        from multitower.models.writes import noting_writes  # noqa: PLC0415 (importing stays quick)

        with noting_writes() if self.scores else nullcontext():
            outputs = self._outputs(split, shared, rows, here)
        flat, treedef = jax.tree.flatten(outputs)
        axes = axes_of_leaves(self.out_axes, outputs, "out_axes")
        by_row = [
            None if axis is None else jnp.moveaxis(leaf, axis, 0)
            for leaf, axis in zip(flat, axes, strict=True)
        ]
        first = [leaf if axis is None else None for leaf, axis in zip(flat, axes, strict=True)]
        return {"result": treedef.unflatten(by_row), FIRST: treedef.unflatten(first)}

    def _outputs(self, split: Split, shared: list[Any], rows: list[Any], here: Tower) -> Any:
        call = Call(*split.rebuild(shared, rows, here))
        return call_tower(self.fn, call, here, rows[0].shape[0])[0]

    def _sort_outputs(
        self, outputs: Any, tower_rows: int, more_rows: int, more: list[tuple[int, ...]] | None
    ) -> tuple[Leaves, dict[int, Any]]:
        check_arrays(outputs, "result")
        flat, treedef = jax.tree_util.tree_flatten_with_path(outputs)
        axes = axes_of_leaves(self.out_axes, outputs, "out_axes")
        by_row: dict[int, Any] = {}
        whole: dict[int, Any] = {}
        for number, ((path, leaf), axis) in enumerate(zip(flat, axes, strict=True)):
            leaf = jnp.asarray(leaf)
            if axis is None:
                whole[number] = leaf
                continue
            has_axis = -leaf.ndim <= axis < leaf.ndim and leaf.shape[axis] == tower_rows
            if has_axis and more is not None:  # a shape alone cannot tell rows from classes
                has_axis = more[number][axis] == more_rows
            if not has_axis:
                raise OutputError(
                    f"result{jax.tree_util.keystr(path)} has shape {leaf.shape} for a tower of "
                    f"{tower_rows} rows: axis {axis} does not hold one entry per row, so the "
                    "towers cannot be put together. Return something per row and combine it "
                    f"outside{'' if self.scores else _OR_OUT_AXES}."
                )
            by_row[number] = jnp.moveaxis(leaf, axis, 0)
        return Leaves(by_row, treedef), whole

    def result(self, finished: Any, rows: Leaves) -> tuple[Any, list[Changed]]:
        # It is empty if there was nothing to add up.
        averaged, (whole, first) = finished or ([], ({}, []))
        changed = [Changed(*pair) for pair in zip(averaged, first, strict=True)]
        leaves = [
            as_leaf(whole[number]) if number in whole else rows.by_number[number]
            for number in range(rows.treedef.num_leaves)
        ]
        tree = jax.tree.unflatten(rows.treedef, leaves)
        axes = axes_of_leaves(self.out_axes, tree, "out_axes")
        placed = [
            jnp.moveaxis(leaf, 0, axis) if axis else leaf
            for leaf, axis in zip(leaves, axes, strict=True)
        ]
        return jax.tree.unflatten(rows.treedef, placed), changed
