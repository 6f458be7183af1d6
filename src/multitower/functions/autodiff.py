"""value_and_grad and grad: derivatives of the mean over all rows, on all devices."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

import jax

from multitower.errors import refuse_foreign
from multitower.functions.arguments import Arguments
from multitower.functions.calls import Axes, TowerFunction
from multitower.functions.gradient_job import Finished, ValueAndGrad
from multitower.functions.objective import Reduction, check_reduction
from multitower.hardware.devices import DeviceSpec, hashable_spec
from multitower.models.callables import as_function
from multitower.models.closures import Contents, UsedByArguments, call_opened
from multitower.models.modules import Call, fill, take_call
from multitower.models.nnx import diff_state
from multitower.towers.leaves import is_traced
from multitower.towers.surroundings import refuse_inside_a_tower

_P = ParamSpec("_P")


@refuse_foreign(
    fun="A decorator with arguments is @functools.partial(mt.value_and_grad, has_aux=True).",
    axis_name="Inside the function, the axis is always called 'towers'.",
    holomorphic="Gradients are those of real functions.",
    allow_int="Gradients are taken of floats.",
)
def value_and_grad(
    fun: Callable[_P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    in_axes: Any = None,
    devices: DeviceSpec | None = None,
    towers: int | None = None,
    reduction: Reduction = "mean",
) -> Callable[_P, tuple[Any, Any]]:
    """Computes loss and gradients of the mean over all rows, on all devices.

    The result equals `jax.value_and_grad(lambda *args: jnp.mean(fun(*args)))` on one device, up to
    rounding. Every tower gets the `argnums` arguments whole, and its slice of every other array
    along axis 0. Numbers and 0-d arrays are whole in every tower. Flags, strings, functions, and
    settings in a frozen dataclass or an Enum, are passed on like static arguments of `jax.jit`.
    Each tower gets a different PRNG key: tower 0 gets your key (`jax.random.key`, or a
    `jax.random.PRNGKey` beside rows) unchanged, and the other towers get keys made from it. Called
    outside of `jax.jit`, `fun` is compiled like a `jax.jit` function, so apart from what it closes
    over it must depend on its arguments alone.

    It also replaces `nnx.value_and_grad` and `eqx.filter_value_and_grad`. Modules, in any argument,
    are whole in every tower, and gradients have the framework's own form. Changes that an NNX
    module makes in itself are combined over towers and written back: floats (BatchNorm) are
    averaged, everything else comes from tower 0, and random streams advance as on one device. A
    state that is an argument with `in_axes` None and is returned in `aux` (Haiku, Keras) is
    combined in the same way, and so is `eqx.nn.State`.

    Args:
        fun: a loss. It returns one loss per row, shape (rows,), or their mean, shape (). One loss
            per row is recommended, because the mean is then exact for any number of rows.
        argnums: which positional arguments to differentiate, as in `jax.value_and_grad`; an
            `nnx.DiffState` selects Variables of a module.
        has_aux: whether `fun` returns `(loss, aux)`. Leaves of `aux` with one entry per row are
            concatenated; other float leaves are averaged over towers. Integers and flags without
            rows must be constants, or states that are also arguments with `in_axes` None. For a
            count over all rows return `jax.lax.psum(count, "towers") * 1.0`.
        in_axes: the axis of the rows for every positional argument; None for `argnums` and for
            arguments that every tower gets whole. By default axis 0 for all arguments that are not
            in `argnums`. Or a dict with the axes of variables that `fun` closes over, such as
            `{"batch": 0}`, for a loss that takes its parameters only.
        devices: as for `multitower.devices`; all by default.
        towers: split the batch into this many towers. Called outside of `jax.jit`, values and
            gradients then have the same bits on any number of devices. Inside `jax.jit` and the
            like, rows and keys of the towers stay the same, and results are equal up to rounding.
        reduction: how the losses of rows are combined: `"mean"`, or `"sum"` for summed losses and
            log densities; a loss of shape () is then the sum over its rows. For the mean over
            tokens or weights return `mt.ratio(total, weight)` instead.

    Returns:
        A function with the arguments of `fun`, which returns `(loss, gradients)`, or
        `((loss, aux), gradients)`: the mean loss, shape (), in the loss's dtype; gradients like
        the arguments. They are on every device, or on that of a parameter that is committed to one.

    Raises:
        ArgumentError: an argument that can be neither split nor shared, such as a list of strings;
            or the call is inside a function that runs on towers already.
        BatchError: no rows, or different row counts.
        ConfigurationError: `jax.set_mesh` is active; or `jax.disable_jit`, with `towers`.
        OutputError: a loss that is neither a scalar nor a vector over rows; a mean that would be
            wrong because rows do not fill the towers evenly; an `aux` leaf, or a change in a
            module, that cannot be combined over towers.
        GradientError: an argument to differentiate has leaves that are not floats.
        DeviceError: more devices than there are, or an unknown name.

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
    arguments = Arguments(fun)
    names = tuple(in_axes) if isinstance(in_axes, Mapping) else ()
    fun = as_function(fun, names)
    single = not isinstance(argnums, Sequence)
    positions, filters = _positions([argnums] if single else argnums)
    where = hashable_spec(devices)
    check_reduction(reduction)
    options = (positions, has_aux, Axes.of(in_axes), where, towers, reduction)
    own = _tower_function(fun, *options)  # refuses wrong options right away
    used = UsedByArguments()

    @functools.wraps(fun)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        refuse_inside_a_tower("value_and_grad")

        def run_opened(opened: Any, closed: Contents) -> tuple[ValueAndGrad, Call, Finished]:
            try:
                kind, run = _remembered(used.of(args, kwargs), opened, *options)
            except TypeError:  # unhashable, so it cannot be cached
                kind, run = own if opened is fun else _tower_function(opened, *options)
            call = take_call(args, kwargs, closed, filters)
            return kind, call, run.call(call, arguments)

        kind, call, finished = call_opened(fun, names, run_opened)
        call.hand_on(finished.changed)
        wanted = kind.wanted(call)
        gradients = jax.tree.map(_at_home, finished.gradients, wanted)
        filled = fill(gradients.args, gradients.weights)
        return finished.value, filled[0] if single else filled

    return differentiated


@refuse_foreign(
    fun="A decorator with arguments is @functools.partial(mt.grad, has_aux=True).",
    axis_name="Inside the function, the axis is always called 'towers'.",
    holomorphic="Gradients are those of real functions.",
    allow_int="Gradients are taken of floats.",
)
def grad(
    fun: Callable[_P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    in_axes: Any = None,
    devices: DeviceSpec | None = None,
    towers: int | None = None,
    reduction: Reduction = "mean",
) -> Callable[_P, Any]:
    """Computes gradients of the mean over all rows, on all devices; see `value_and_grad`.

    Args:
        fun: a loss, as for `value_and_grad`.
        argnums: as for `value_and_grad`.
        has_aux: as for `value_and_grad`.
        in_axes: as for `value_and_grad`.
        devices: as for `value_and_grad`.
        towers: as for `value_and_grad`.
        reduction: as for `value_and_grad`.

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
    run = value_and_grad(
        fun,
        argnums,
        has_aux,
        in_axes=in_axes,
        devices=devices,
        towers=towers,
        reduction=reduction,
    )

    @functools.wraps(fun)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        value, gradients = run(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return differentiated


def _positions(argnums: Sequence[Any]) -> tuple[tuple[int, ...], dict[int, Any]]:
    """The positions, and the NNX filters of those that are given as `nnx.DiffState`."""
    found = [diff_state(argnum) or (argnum, None) for argnum in argnums]
    return tuple(n for n, _ in found), {n: wanted for n, wanted in found if wanted is not None}


def _tower_function(  # noqa: PLR0917 (all of them positional, for lru_cache)
    fun: Any,
    argnums: tuple[int, ...],
    has_aux: bool,
    in_axes: Axes,
    devices: DeviceSpec | None,
    towers: int | None,
    reduction: Reduction,
) -> tuple[ValueAndGrad, TowerFunction]:
    kind = ValueAndGrad(fun, argnums, has_aux, in_axes.tree, reduction)
    return kind, TowerFunction(kind, devices, towers)


@functools.lru_cache(maxsize=128)
def _remembered(_used: Any, *function: Any) -> tuple[ValueAndGrad, TowerFunction]:
    """Cached: a loop without jit calls value_and_grad at every step, and must not compile anew."""
    return _tower_function(*function)


def _at_home(gradient: Any, parameter: Any) -> Any:
    """A gradient; on the parameter's device, if the parameter is committed to one device."""
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
