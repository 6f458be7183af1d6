"""check_parallel: can this function be cut into towers? Said before any training, and why not."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from multitower.checks.flow import Flow, rows_of
from multitower.checks.problems import (
    BAKED,
    MIXED,
    NOT_REPEATABLE,
    ROW_COUNT,
    SAME_NUMBERS,
    SHAPES,
    SUM,
    ParallelCheck,
    Problem,
)
from multitower.errors import BatchError
from multitower.models.closures import Contents
from multitower.models.modules import Model, fill, take_call
from multitower.towers.constants import Constant, is_constant
from multitower.towers.rows import KEY, SHARED, Kind, Parts, device_dtype, is_key, take_apart

if TYPE_CHECKING:
    from multitower.checks.row_flow import Reading

# Of the largest value; sums in another order differ by far less. The second is for 16-bit floats.
_TOLERANCE, _COARSE = 1e-4, 2e-2


def check_parallel(
    fn: Callable[..., Any], *example_args: Any, in_axes: Any = None, **extras: Any
) -> ParallelCheck:
    """Says whether a function can be cut into towers, and if not, which result and which line.

    It runs `fn` on the whole batch and on its two halves, and reads its program. By row: the halves
    joined must be the whole. Without rows: their mean must be the whole's. Results that random
    numbers went into are judged by the program alone.

    Args:
        fn: a loss, a metric, a model: what is to go to `value_and_grad`, `train_step` or
            `make_parallel`.
        *example_args: real inputs, two rows or more.
        in_axes: as in `jax.vmap`; by default the first of several arguments is shared, as the
            parameters of a loss are, and the others are cut along axis 0.
        **extras: keyword arguments such as `rng` and `model_state`, which are shared; a typed key
            is another one in every tower. Flags, strings and functions are handed on as they are.

    Returns:
        What was found; print it.

    Raises:
        BatchError: fewer than two rows, or row counts that differ.
        ArgumentError: an argument that can neither be split nor shared.

    Example:
        >>> import jax.numpy as jnp
        >>> import multitower as mt
        >>> x = jnp.arange(12.0).reshape(6, 2)
        >>> print(mt.check_parallel(lambda w, x: (x @ w - 1) ** 2, jnp.ones(2), x))
        can be cut into towers (tried with 6 rows)
        >>> check = mt.check_parallel(lambda w, x: jnp.sum((x @ w - 1) ** 2), jnp.ones(2), x)
        >>> bool(check), check.problems[0].kind
        (False, 'sum')
    """
    axes = in_axes
    if in_axes is None:
        axes = (None, *(0 for _ in example_args[1:])) if len(example_args) > 1 else 0
    taken = take_call(example_args, extras, Contents([], [], {}))
    if taken.models:
        fn = _with_modules(fn)
        axes = (None, *(axes if isinstance(axes, tuple | list) else [axes] * len(example_args)))
        example_args, extras = (taken.models, *taken.args), taken.kwargs
    parts = take_apart(example_args, axes, name="example_args", constants=True)
    if parts.num_rows < 2:
        raise BatchError("check_parallel needs two rows or more: one row cannot be cut.")
    call = _Call(fn, example_args, extras, parts)
    try:
        reading = call.reading()
    except Exception:  # a fixed row count, which the run will report
        reading = None
    problems = [*_run_apart(call, reading), *_of_program(reading)]
    seen: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        seen.setdefault((problem.kind, problem.output), problem)
    return ParallelCheck(tuple(seen.values()), parts.num_rows)


def _with_modules(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function of NNX and Equinox modules as one of their arrays, which come first."""

    def on_arrays(models: Sequence[Model], *args: Any, **extras: Any) -> Any:
        args, extras = fill((args, extras), [model.build() for model in models])
        return fn(*args, **extras)

    return on_arrays


class _Call(NamedTuple):
    """A function with its example arguments."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    extras: dict[str, Any]
    parts: Parts

    def on_rows(self, numbers: range) -> Any:
        """The function on some of the rows."""
        leaves = [
            jnp.asarray(leaf).take(np.asarray(numbers), axis=kind)
            if isinstance(kind, int)
            else leaf
            for leaf, kind in zip(jax.tree.leaves(self.args), self._kinds, strict=True)
        ]
        return self.fn(*jax.tree.unflatten(self.parts.split.treedef, leaves), **self.extras)

    def reading(self) -> "tuple[Reading, list[str]]":
        """What the program does with rows, and the names of its outputs."""
        leaves, treedef = jax.tree.flatten((self.args, self.extras))
        kinds = [*self._kinds, *(_kind_of_extra(leaf) for leaf in jax.tree.leaves(self.extras))]
        constants = {n: k.value for n, k in enumerate(kinds) if isinstance(k, Constant)}
        data = {n: (leaf, kinds[n]) for n, leaf in enumerate(leaves) if n not in constants}
        other_sizes = [
            size
            for leaf, kind in data.values()
            for axis, size in enumerate(np.shape(leaf))
            if axis != kind
        ]
        from multitower.checks.row_flow import read, unused_size  # noqa: PLC0415 (at the first call: importing stays quick)

        num_rows = unused_size(other_sizes)
        shapes = {
            number: jax.ShapeDtypeStruct(_with_size(leaf.shape, kind, num_rows), device_dtype(leaf))
            if isinstance(kind, int)
            else leaf
            for number, (leaf, kind) in data.items()
        }

        def flat(given: dict[int, Any]) -> Any:
            every = {**given, **constants}
            args, extras = jax.tree.unflatten(treedef, [every[n] for n in range(len(every))])
            return self.fn(*args, **extras)

        program, outputs = jax.make_jaxpr(flat, return_shape=True)(shapes)
        flows = [_flow(kind, number) for number, (_, kind) in data.items()]
        return read(program, flows, num_rows, self.parts.num_rows), output_names(outputs)

    @property
    def _kinds(self) -> tuple[Kind, ...]:
        return self.parts.split.kinds


def output_names(outputs: Any) -> list[str]:
    """What the leaves of a result are called in messages."""
    flat, _ = jax.tree_util.tree_flatten_with_path(outputs)
    return [f"output{jax.tree_util.keystr(path)}" for path, _ in flat]


def _kind_of_extra(leaf: Any) -> Kind:
    if is_constant(leaf):
        return Constant.of(leaf)
    return KEY if is_key(leaf) else SHARED


def _flow(kind: Kind, number: int) -> Flow:
    if kind == SHARED:
        return Flow()
    return Flow(varies=True) if kind == KEY else rows_of(number)


def _with_size(shape: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _of_program(read: "tuple[Reading, list[str]] | None") -> list[Problem]:
    """What can be read off the program: of results that are drawn, and of the drawing itself."""
    if read is None:
        return []
    reading, names = read
    problems = [
        Problem("same numbers", "random numbers", place, SAME_NUMBERS)
        for place in dict.fromkeys(reading.draws)
    ]
    for name, flow in zip(names, reading.outputs, strict=True):
        if flow.mixed and flow.is_drawn:
            problems.append(Problem("mixed rows", name, flow.mixed[0], MIXED))
    return problems


def _run_apart(call: _Call, read: "tuple[Reading, list[str]] | None") -> list[Problem]:
    """Compares the whole with its halves, on the real inputs."""
    num_rows = call.parts.num_rows // 2 * 2
    half = num_rows // 2
    whole, again = (call.on_rows(range(num_rows)) for _ in range(2))
    try:
        front, back = call.on_rows(range(half)), call.on_rows(range(half, num_rows))
        even, odd = call.on_rows(range(0, num_rows, 2)), call.on_rows(range(1, num_rows, 2))
    except Exception as error:  # whatever the user's function raises on other shapes
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        message = ROW_COUNT.format(whole=num_rows, half=half, error=text[:200])
        return [Problem("row count", "the function", None, message)]
    names = output_names(whole)
    # It may run, but not for a made-up number of rows.
    from multitower.checks.row_flow import Reading  # noqa: PLC0415 (at the first call: importing stays quick)

    reading = read[0] if read else Reading([Flow()] * len(names), [], [], {})
    problems: list[Problem] = []
    leaves = [jax.tree.leaves(tree) for tree in (whole, again, front, back, even, odd)]
    for name, flow, *values in zip(names, reading.outputs, *leaves, strict=True):
        same, repeated, *halves = (_numbers(value) for value in values)
        if not np.array_equal(same, repeated, equal_nan=same.dtype.kind == "f"):
            problems.append(Problem("not repeatable", name, None, NOT_REPEATABLE))
        elif not flow.is_drawn:
            # Two ways to halve: one alone may agree by chance.
            problems.extend(_compare(name, flow, reading, same, halves[:2]))
            if same.shape == halves[0].shape:
                problems.extend(_compare(name, flow, reading, same, halves[2:]))
    return problems


def _compare(
    name: str, flow: Flow, reading: "Reading", whole: Any, halves: Sequence[Any]
) -> list[Problem]:
    first, second = halves
    if whole.shape == first.shape:  # no rows in it
        if _is_close((first + second) / 2, whole):
            return []
        if not _is_close(first + second, whole):
            return [Problem("mixed rows", name, _place(flow), MIXED)]
        if reading.baked:
            return [Problem("row count", name, reading.baked[0], BAKED)]
        return [Problem("sum", name, flow.origin, SUM)]
    joined = np.concatenate([first, second]) if first.ndim else first
    if joined.shape != whole.shape:
        shapes = SHAPES.format(whole=whole.shape, half=first.shape)
        return [Problem("row count", name, flow.origin, shapes)]
    return [] if _is_close(joined, whole) else [Problem("mixed rows", name, _place(flow), MIXED)]


def _place(flow: Flow) -> str | None:
    return flow.places[0] if flow.places else None


def _numbers(value: Any) -> Any:
    if is_key(value):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    if jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < 4:
        return array.astype(np.float32)
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _is_close(found: Any, wanted: Any) -> bool:
    largest = np.max(np.abs(wanted), initial=0.0, where=np.isfinite(wanted))
    is_coarse = wanted.dtype == np.float32  # as `_numbers` leaves 16-bit floats
    tolerance = (_COARSE if is_coarse else _TOLERANCE) * (largest + 1e-12)
    return bool(np.allclose(found, wanted, rtol=0, atol=tolerance, equal_nan=True))
