"""value_and_grad and grad: derivatives of the mean over all rows, on all devices."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from multitower.devices import DeviceSpec
from multitower.errors import ArgumentError, GradientError, OutputError
from multitower.job import Job, Shared, TowerResult
from multitower.outputs import find_row_leaves, is_per_example, refuse_ragged, row_sum
from multitower.rows import Split, Tower, is_traced
from multitower.tower_function import Leaves, TowerFunction


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    in_axes: Any = None,
    devices: DeviceSpec | None = None,
    towers: int | None = None,
) -> Callable[..., Any]:
    """`jax.value_and_grad` of the mean over all rows, computed on all devices.

    The law: it equals `jax.value_and_grad(lambda *args: jnp.mean(fun(*args)))` on one device, up
    to rounding. The `argnums` arguments are shared; every array of the others is split on axis 0
    and cut into towers; numbers and 0-d arrays are shared; a typed key (`jax.random.key`) is
    folded with the tower's index, so that every tower draws its own numbers. Gradients are
    averaged over towers once.

    Args:
        fun: a loss. It returns the losses of its rows, shape (rows,) - the better contract: the
            mean over all real rows is then exact for any number of rows - or their mean, shape ().
        argnums: which positional arguments to differentiate, as in `jax.value_and_grad`.
        has_aux: whether `fun` returns `(loss, aux)`. Leaves of `aux` with one entry per row are
            laid side by side; other float leaves are averaged over towers.
        in_axes: where the rows are, for every positional argument; None for `argnums` and for what
            every tower gets whole. By default axis 0 for all that is not in `argnums`.
        devices: as for `multitower.devices`; all by default.
        towers: cut the batch into this many towers. Called eagerly, values and gradients then have
            the same bits on any number of devices. Inside `jax.jit` and the like it keeps the
            towers' rows and keys, and equals that up to rounding.

    Returns:
        A function with the arguments of `fun`, which returns `(loss, gradients)`, or
        `((loss, aux), gradients)`: the mean loss, shape (), in the loss's dtype; gradients like
        the arguments. They lie on every device, or where the parameter is bound to one device.

    Raises:
        ArgumentError: an argument that can be neither split nor shared, such as a string.
        BatchError: no rows, or row counts that differ.
        OutputError: a loss that is no scalar and no vector over rows; a mean that would be wrong
            because rows do not fill the towers evenly; an `aux` leaf that cannot be put together.
        GradientError: an argument to differentiate with leaves that are no floats.
        DeviceError: devices that are not there.

    Example:
        >>> import jax.numpy as jnp
        >>> import multitower as mt
        >>> def losses(w, x, y):
        ...     return (w * x - y) ** 2
        >>> loss, gradient = mt.value_and_grad(losses)(1.0, jnp.arange(6.0), jnp.ones(6))
        >>> round(float(loss), 4), round(float(gradient), 4)
        (5.1667, 13.3333)

    Source: the tower scheme of TensorFlow's CIFAR-10 multi-GPU tutorial (`average_gradients`).
    """
    options = (fun, argnums, has_aux, in_axes, devices, towers)
    try:
        run = _remembered(*options)
    except TypeError:  # an unhashable option: nothing to remember it by
        run = _tower_function(*options)

    @functools.wraps(fun)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        return _bring_home(run.call(args, kwargs), args, argnums)

    return differentiated


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    in_axes: Any = None,
    devices: DeviceSpec | None = None,
    towers: int | None = None,
) -> Callable[..., Any]:
    """`jax.grad` of the mean over all rows, computed on all devices; see `value_and_grad`.

    Args:
        fun: a loss, as for `value_and_grad`.
        argnums: as for `value_and_grad`.
        has_aux: as for `value_and_grad`.
        in_axes: as for `value_and_grad`.
        devices: as for `value_and_grad`.
        towers: as for `value_and_grad`.

    Returns:
        A function that returns the gradients, or `(gradients, aux)`.

    Raises:
        MultitowerError: as `value_and_grad`.

    Example:
        >>> import jax.numpy as jnp
        >>> import multitower as mt
        >>> mt.grad(lambda w, x: w * x)(2.0, jnp.arange(3.0))
        Array(1., dtype=float32)
    """
    run = value_and_grad(fun, argnums, has_aux, in_axes=in_axes, devices=devices, towers=towers)

    @functools.wraps(fun)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        value, gradients = run(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return differentiated


class _ValueAndGrad(NamedTuple):
    fun: Callable[..., Any]
    argnums: tuple[int, ...]
    single: bool
    has_aux: bool
    in_axes: Any
    name: str = "arguments"

    def axes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        argnums = _positive(self.argnums, len(args))
        for argnum in argnums:
            check_differentiable(args[argnum], f"argument {argnum}")
        given = self.in_axes
        if given is None:
            given = tuple(None if i in argnums else 0 for i in range(len(args)))
        elif isinstance(given, int):
            given = tuple(None if i in argnums else given for i in range(len(args)))
        if len(given) != len(args):
            raise ArgumentError(
                f"in_axes={self.in_axes!r} has {len(given)} entries for {len(args)} positional "
                "arguments: give one entry each, None for the ones to differentiate."
            )
        for argnum in argnums:
            if jax.tree.leaves(given[argnum]):
                raise ArgumentError(
                    f"in_axes={self.in_axes!r} splits argument {argnum}, which is to be "
                    "differentiated: parameters are shared by all towers. Put None there."
                )
        return (tuple(given), 0)

    def job(self, split: Split, tower_rows: int, ragged: tuple[int, int] | None) -> Job:
        def forward(shared: Shared, rows: list[Any], here: Tower, wanted: Any) -> tuple[Any, Any]:
            args, kwargs = split.rebuild(shared.rest, rows, here)
            full_args = list(args)
            for argnum, value in zip(_positive(self.argnums, len(args)), wanted, strict=True):
                full_args[argnum] = value
            return self._loss_and_aux(self.fun(*full_args, **kwargs))

        def tower(shared: Shared, rows: list[Any], here: Tower) -> TowerResult:
            def objective(wanted: Any) -> tuple[Any, tuple[Any, Any]]:
                loss, aux = forward(shared, rows, here, wanted)
                if is_per_example(loss, tower_rows):
                    return row_sum(loss, here) / tower_rows, (loss, aux)
                if ragged:
                    raise refuse_ragged("a scalar loss", *ragged)
                return loss, (loss, aux)

            args, _ = split.rebuild(shared.rest, rows, here)
            wanted = tuple(args[i] for i in _positive(self.argnums, len(args)))
            (mean, (_, aux)), gradients = jax.value_and_grad(objective, has_aux=True)(wanted)
            gradients = gradients[0] if self.single else gradients

            def aux_of(rows: list[Any]) -> Any:
                return forward(shared, rows, here, wanted)[1]

            by_row, averaged = _sort_aux(aux, aux_of, rows, ragged)
            return TowerResult(means=(mean, gradients, averaged), rows=by_row)

        return Job(tower, finish=lambda state, means, sums: means)

    def result(self, finished: Any, rows: Leaves) -> Any:
        value, gradients, averaged = finished
        if not self.has_aux:
            return value, gradients
        leaves = [
            averaged[number] if number in averaged else rows.by_number[number]
            for number in range(rows.treedef.num_leaves)
        ]
        return (value, jax.tree.unflatten(rows.treedef, leaves)), gradients

    def _loss_and_aux(self, output: Any) -> tuple[Any, Any]:
        if not self.has_aux:
            return output, ()
        if not isinstance(output, tuple) or len(output) != 2:
            raise OutputError(
                f"with has_aux=True the loss must return (loss, aux), and it returned "
                f"{type(output).__name__}. Return a pair, or drop has_aux."
            )
        return output


def check_differentiable(tree: Any, name: str) -> None:
    """Refuses parameters that have no gradient.

    Raises:
        GradientError: a leaf that is no float; the message names its path.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        is_number = isinstance(leaf, int | float | complex)
        dtype = jnp.result_type(leaf) if is_number else getattr(leaf, "dtype", type(leaf).__name__)
        if isinstance(dtype, str) or not jnp.issubdtype(dtype, jnp.inexact):
            raise GradientError(
                f"{name}{jax.tree_util.keystr(path)} has dtype {dtype}: only floats can be "
                "differentiated. Convert it with .astype(jnp.float32), or take it out of the "
                "parameters (close over it, or pass it as another argument)."
            )


def _sort_aux(
    aux: Any, aux_of: Any, rows: list[Any], ragged: tuple[int, int] | None
) -> tuple[Leaves, dict[int, Any]]:
    flat, treedef = jax.tree.flatten(jax.tree.map(jnp.asarray, aux))
    is_row = find_row_leaves(aux_of, rows, jax.tree.unflatten(treedef, flat), "aux")
    if ragged and not all(is_row):
        path = jax.tree_util.tree_flatten_with_path(aux)[0][is_row.index(False)][0]
        raise refuse_ragged(f"aux{jax.tree_util.keystr(path)} is not per example", *ragged)
    by_row = {i: leaf for i, leaf in enumerate(flat) if is_row[i]}
    averaged = {i: leaf for i, leaf in enumerate(flat) if not is_row[i]}
    return Leaves(by_row, treedef), averaged


def _positive(argnums: tuple[int, ...], num_args: int) -> tuple[int, ...]:
    for argnum in argnums:
        if isinstance(argnum, bool) or not isinstance(argnum, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(
                f"argnums={argnum!r}: it must be a position, such as 0, or several."
            )
        if not -num_args <= argnum < num_args:
            raise ArgumentError(
                f"argnums={argnum} needs at least {abs(argnum + (argnum >= 0))} positional "
                f"arguments, and {num_args} were given. Pass what is differentiated by position."
            )
    positive = tuple(argnum % num_args for argnum in argnums)
    if len(set(positive)) < len(positive):
        raise ArgumentError(f"argnums={argnums} names an argument twice: name it once.")
    return positive


def _tower_function(  # noqa: PLR0917 (all of them positional, for lru_cache)
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    in_axes: Any,
    devices: DeviceSpec | None,
    towers: int | None,
) -> TowerFunction:
    single = isinstance(argnums, int)
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    kind = _ValueAndGrad(fun, positions, single, has_aux, in_axes)
    return TowerFunction(kind, devices, towers)


# A loop without jit calls value_and_grad anew at every step: it must not compile anew.
_remembered = functools.lru_cache(maxsize=128)(_tower_function)


def _bring_home(result: Any, args: tuple[Any, ...], argnums: int | Sequence[int]) -> Any:
    """Gradients of parameters that are bound to one device go to that device."""
    value, gradients = result
    if isinstance(argnums, int):
        return value, jax.tree.map(_like, gradients, args[argnums])
    homes = tuple(args[i] for i in argnums)
    return value, jax.tree.map(_like, tuple(gradients), homes)


def _like(gradient: Any, parameter: Any) -> Any:
    is_array = isinstance(parameter, jax.Array) and not is_traced(parameter)
    if not is_array or is_traced(gradient):
        return gradient
    if not parameter.committed or len(parameter.sharding.device_set) > 1:
        return gradient
    (home,) = parameter.sharding.device_set
    for shard in gradient.addressable_shards:
        if shard.device == home:
            return shard.data
    return jax.device_put(gradient, home)
