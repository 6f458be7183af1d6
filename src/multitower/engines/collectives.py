"""JAX's collectives between towers, each split into an exchange and a one-device function.

An *exchange* moves values between towers: their sum, or all of them side by side. The function then
computes the collective's result from what has arrived and from the tower's number.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from multitower.engines.source_lines import line_of
from multitower.errors import OutputError
from multitower.towers.placement import AXIS

_LOOPS = {"scan": "a loop", "while": "a loop", "cond": "a branch"}


def axis_of(num_towers: int) -> list[tuple[str, int]]:
    """The axis that exists inside a tower, as `jax.make_jaxpr` takes it."""
    return [(AXIS, num_towers)]


def is_axis_index(equation: Any) -> bool:
    """Whether an equation asks for the tower's number."""
    return equation.primitive.name == "axis_index" and equation.params["axis_name"] == AXIS


def is_collective(equation: Any) -> bool:
    """Whether an equation needs values of other towers."""
    return not is_axis_index(equation) and AXIS in _axes(equation)


def is_sum(equation: Any) -> bool:
    """Whether a collective needs the sum over towers, and not the values of each."""
    return equation.primitive.name in _OF_SUMS


def needs_axis(equation: Any) -> bool:
    """Whether an equation works only where the axis of towers exists."""
    return is_collective(equation) or is_axis_index(equation)


def first_collective(program: Any, wanted: Callable[[Any], bool] = is_collective) -> Any:
    """The first collective of a jaxpr or of the jaxprs inside of it; None without a collective."""
    for equation in getattr(program, "jaxpr", program).eqns:
        if wanted(equation):
            return equation
        for inner in core.jaxprs_in_params(equation.params):
            found = first_collective(inner, wanted)
            if found is not None:
                return found
    return None


def place_of(equation: Any) -> str:
    """A collective and its line, such as `psum at model.py:30: y = lax.psum(x, "towers")`."""
    line = line_of(equation)
    return equation.primitive.name + (f" at {line}" if line else "")


def check(equation: Any) -> None:
    """Refuses a collective that towers do not have.

    Raises:
        OutputError: it is for some of the towers only, it is not one of those that towers have, or
            it sends keys.
    """
    name, params = equation.primitive.name, equation.params
    if name not in _OF_SUMS and name not in _OF_ALL:
        raise OutputError(
            f'{place_of(equation)} runs over the axis "{AXIS}", and towers do not have {name}. Use '
            "psum, pmean, pmax, pmin, all_gather, psum_scatter, ppermute or all_to_all of jax.lax."
        )
    if params.get("axis_index_groups") is not None:
        raise OutputError(
            f"{place_of(equation)} has axis_index_groups, and a collective between towers is for "
            "all of them. Leave it out, or use lax.all_gather and select what a tower needs."
        )
    if any(jnp.issubdtype(atom.aval.dtype, jax.dtypes.prng_key) for atom in equation.invars):
        raise OutputError(
            f"{place_of(equation)} sends keys, and towers send numbers. Send "
            "jax.random.key_data(key), and make keys of what arrives by jax.random.wrap_key_data."
        )


def refuse_inside(equation: Any, mark: Any) -> OutputError:
    """The error for a collective inside a loop, a branch or a rule, where towers cannot meet."""
    name = equation.primitive.name
    where = f"{_LOOPS.get(name, 'a function')} ({name})"
    return OutputError(
        f'{place_of(mark)} runs over the axis "{AXIS}" inside {where}. Towers are single-device '
        "programs that meet between these, so a collective cannot stand there. Move it in front of "
        f"the {name} or after it, or write the loop as a Python for loop. jax.lax.axis_index and "
        "multitower.row_index are collectives too: call them outside, and use their value inside."
    )


def sent(equation: Any, value: jax.Array) -> jax.Array:
    """What a tower sends: the value for a sum, otherwise shape (1, ...), to put side by side."""
    # Under `jax.vmap`, a collective over both axes also works along an axis of the array.
    along = tuple(axis for axis in _axes(equation) if isinstance(axis, int))
    if along:
        value = _ALONG[equation.primitive.name](value, along)
    return value if is_sum(equation) else value[None]


def received(equation: Any, arrived: jax.Array, number: jax.Array) -> jax.Array:
    """The value of a collective in a tower.

    Args:
        equation: the collective.
        arrived: the sum over towers; or the values of all towers, (towers, 1, ...).
        number: the number of the tower, int32, shape ().
    """
    name, params = equation.primitive.name, equation.params
    if is_sum(equation):
        return _OF_SUMS[name](arrived, number, params)
    return _OF_ALL[name](arrived.reshape(arrived.shape[0], *arrived.shape[2:]), number, params)


def _axes(equation: Any) -> tuple[Any, ...]:
    axes = equation.params.get("axes", equation.params.get("axis_name", ()))
    return axes if isinstance(axes, tuple) else (axes,)


def _own_part(total: jax.Array, number: jax.Array, params: Mapping[str, Any]) -> jax.Array:
    """`psum_scatter`: the tower's part of the sum."""
    axis = params["scatter_dimension"]
    if not params["tiled"]:
        return lax.dynamic_index_in_dim(total, number, axis, keepdims=False)
    size = total.shape[axis] // params["axis_size"]
    return lax.dynamic_slice_in_dim(total, number * size, size, axis)


def _side_by_side(every: jax.Array, axis: int, *, tiled: bool) -> jax.Array:
    """The towers' values, (towers, ...), stacked along a new axis, or if `tiled` concatenated."""
    found = jnp.moveaxis(every, 0, axis)
    if not tiled:
        return found
    shape = every.shape[1:]
    size = shape[axis] * every.shape[0]
    return found.reshape(*shape[:axis], size, *shape[axis + 1 :])


def _gathered(every: jax.Array, number: jax.Array, params: Mapping[str, Any]) -> jax.Array:
    return _side_by_side(every, params["all_gather_dimension"], tiled=params["tiled"])


def _permuted(every: jax.Array, number: jax.Array, params: Mapping[str, Any]) -> jax.Array:
    """`ppermute`: the value of the tower that sends to this one; zeros where none does."""
    sources = [-1] * every.shape[0]
    for source, target in params["perm"]:
        sources[target] = source
    source = jnp.asarray(sources, jnp.int32)[number]
    value = lax.dynamic_index_in_dim(every, jnp.maximum(source, 0), 0, keepdims=False)
    return jnp.where(source < 0, jnp.zeros_like(value), value)


def _exchanged(every: jax.Array, number: jax.Array, params: Mapping[str, Any]) -> jax.Array:
    """`all_to_all`: the parts for this tower of the values of all towers.

    Without `tiled` JAX adds and removes the axes in equations of their own.
    """
    split, concat = params["split_axis"], params["concat_axis"]
    size = every.shape[split + 1] // every.shape[0]
    own = lax.dynamic_slice_in_dim(every, number * size, size, split + 1)
    return _side_by_side(own, concat, tiled=True)


_Rule = Callable[[jax.Array, jax.Array, Mapping[str, Any]], jax.Array]
_OF_SUMS: Mapping[str, _Rule] = {
    "psum": lambda total, number, params: total,
    "reduce_scatter": _own_part,
}
_OF_ALL: Mapping[str, _Rule] = {
    "pmax": lambda every, number, params: every.max(0),
    "pmin": lambda every, number, params: every.min(0),
    "all_gather": _gathered,
    "ppermute": _permuted,
    "all_to_all": _exchanged,
}
_ALONG: Mapping[str, Callable[[jax.Array, tuple[int, ...]], jax.Array]] = {
    "psum": lambda value, axes: value.sum(axes, dtype=value.dtype),
    "pmax": lambda value, axes: value.max(axes),
    "pmin": lambda value, axes: value.min(axes),
}
