"""Equations: what can be read off an equation of a jaxpr: its constants and its inner program."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend import core

from multitower.towers.leaves import is_key, is_traced

_T = TypeVar("_T")

LOOPS = ("scan", "while", "cond")
# The program inside jax.lax.reduce and reduce_window is one of two elements, not of the arrays.
_FOLDS = {"dimensions", "window_dimensions"}
# Where JAX 0.12 has the operations that it calls high, such as jnp.nonzero and jnp.searchsorted.
_HIGH = "_prim"
# Enough for the numbers that a loss is divided by.
_SMALL = 16
# They do not change a value; a number that stands for equal elements is one in any shape.
SAME = {"convert_element_type", "copy", "reshape", "squeeze", "stop_gradient"}
_ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "floor": np.floor,
    "ceil": np.ceil,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "tanh": np.tanh,
    "sqrt": np.sqrt,
    "rsqrt": lambda value: 1 / np.sqrt(value),
    "square": np.square,
    "pow": np.power,
    "integer_pow": np.power,
    "eq": np.equal,
    "ne": np.not_equal,
    "reduce_prod": np.prod,
    "reduce_sum": np.sum,
    **dict.fromkeys((*SAME, "reshard"), np.asarray),
    "broadcast_in_dim": lambda value, *_: value if np.ndim(value) == 0 else np.empty((0, 0, 0)),
    "select_n": lambda which, *cases: np.choose(which, cases),
}


def small_constant(value: Any) -> Any:
    """A number, or a few of them, that a program holds; None if it is anything else."""
    return np.asarray(value) if _is_known(value) and np.size(value) <= _SMALL else None


def number_of(value: Any) -> Any:
    """The number that all elements of a constant array are; None if they differ, or for no array.

    `numpy.full(len(x), 1 / len(x))` is such an array.
    """
    if not _is_known(value) or np.size(value) == 0:
        return None
    elements = np.ravel(value)
    return elements[0] if (elements == elements[0]).all() else None


def shapes_of_constants(program: Any) -> Iterator[tuple[int, ...]]:
    """The shapes of the arrays that a program holds, however deep."""
    yield from (np.shape(value) for value in getattr(program, "consts", ()))
    for equation in getattr(program, "jaxpr", program).eqns:
        literals = (atom for atom in equation.invars if isinstance(atom, core.Literal))
        yield from (np.shape(atom.val) for atom in literals)
        for inner in programs_in(equation.params):
            yield from shapes_of_constants(inner)


def programs_in(params: Mapping[str, Any]) -> Iterator[Any]:
    """The programs among an equation's parameters, closed or open."""
    for param in params.values():
        for one in param if isinstance(param, list | tuple) else (param,):
            if hasattr(getattr(one, "jaxpr", one), "eqns"):
                yield one


def is_empty(atom: Any) -> bool:
    """Whether an input or a result of an equation is an array without elements."""
    return 0 in getattr(atom.aval, "shape", ())


def steps_of(value: Any, size: int) -> int:
    """How far the integers of a constant are apart: 1 for 0, 1, 2 ..., and 3 for 1, 4, 7 ...

    Args:
        value: the constant.
        size: how many elements it has.

    Returns:
        0 if they are not evenly apart, or begin with a number that is not below their distance.
    """
    if not _is_known(value) or size < 2 or not np.issubdtype(np.asarray(value).dtype, np.integer):
        return 0
    first, second = np.ravel(value)[:2].tolist()
    step = second - first
    is_even = 0 <= first < step and np.array_equal(np.ravel(value), first + step * np.arange(size))
    return step if is_even else 0


def differs_along(value: Any, axis: int, rows: int = 0) -> bool:
    """Whether a constant's entries along an axis differ.

    Args:
        value: the constant.
        axis: which axis.
        rows: entries that repeat after a number of places which goes into this one do not count.
    """
    if not _is_known(value):
        return False
    entries = np.moveaxis(np.asarray(value), axis, 0)  # JAX would trace the comparison
    periods = [n for n in range(1, len(entries) // 2 + 1) if n == 1 or (rows and rows % n == 0)]
    return not any(np.array_equal(entries[n:], entries[:-n]) for n in periods)


def _is_known(value: Any) -> bool:
    if isinstance(value, jax.Array):
        return not is_traced(value) and not is_key(value) and value.is_fully_addressable
    return isinstance(value, np.ndarray | np.generic | bool | int | float)


def computed(equation: Any, inputs: Sequence[Any]) -> Any:
    """The result of an equation on constants; None if that is not known.

    A scalar also stands for an array whose elements all have that value.
    """
    name, compute = equation.primitive.name, _ARITHMETIC.get(equation.primitive.name)
    if compute is None or not inputs or any(value is None for value in inputs):
        return None
    if name == "integer_pow":
        inputs = [*inputs, equation.params["y"]]
    (wanted,) = (atom.aval for atom in equation.outvars)
    given = [atom.aval.shape for atom in equation.invars]
    with np.errstate(all="ignore"):
        found = np.asarray(compute(*inputs))
        if name == "reduce_sum" and np.ndim(inputs[0]) == 0:  # all elements are this number
            found = found * (math.prod(given[0]) // max(math.prod(wanted.shape), 1))
    is_uniform = all(np.ndim(value) == 0 for value in inputs) and name != "reduce_prod"
    fits = found.shape == wanted.shape or (is_uniform and found.ndim == 0)
    return found.astype(wanted.dtype) if fits else None


def program_inside(params: Mapping[str, Any], num_inputs: int) -> Any:
    """The program inside a call such as jit, checkpoint or a custom derivative, or None."""
    if not _FOLDS.isdisjoint(params):
        return None
    if _HIGH in params:
        return _program_of_high(params[_HIGH])
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        program: Any = params.get(name)
        inner: Any = getattr(program, "jaxpr", program)
        if not hasattr(inner, "invars") or len(inner.invars) != num_inputs:
            continue
        if len(inner.constvars) == len(getattr(program, "consts", ())):  # all of it is known
            return program
    return None


def _program_of_high(operation: Any) -> Any:
    """The program of a hijax operation, or None: JAX makes it no sooner than it compiles."""

    def run(*flat: Any) -> Any:
        return operation.expand(*jax.tree.unflatten(operation.in_tree, flat))

    try:
        return jax.make_jaxpr(run)(*operation.in_avals_flat)
    except Exception:  # such as one that needs the axis of towers
        return None


def follow(
    program: Any,
    inputs: Sequence[_T],
    constant: Callable[[Any, Any], _T],
    results: Callable[[Any, list[_T]], Sequence[_T]],
) -> list[_T]:
    """Goes through a program from its arguments to its outputs, with what is known of each value.

    Args:
        program: a jaxpr, closed or open.
        inputs: what is known of its arguments.
        constant: what is known of a constant with this value and of this type.
        results: what is known of the results of an equation, from what is known of its inputs.

    Returns:
        What is known of each output.
    """
    jaxpr = getattr(program, "jaxpr", program)
    known: dict[Any, _T] = dict(zip(jaxpr.invars, inputs, strict=True))
    consts = getattr(program, "consts", [None] * len(jaxpr.constvars))  # an open one has none
    for atom, value in zip(jaxpr.constvars, consts, strict=True):
        known[atom] = constant(value, atom.aval)

    def of(atom: Any) -> _T:
        return constant(atom.val, atom.aval) if isinstance(atom, core.Literal) else known[atom]

    for equation in jaxpr.eqns:
        found = results(equation, [of(atom) for atom in equation.invars])
        known.update(zip(equation.outvars, found, strict=True))
    return [of(atom) for atom in jaxpr.outvars]


# The numbers given so far, by what a value is computed from.
Numbering = dict[Any, int]


def number_values(
    program: Any, numbering: Numbering, inputs: Sequence[int | None]
) -> list[int | None]:
    """Numbers what a program computes: equal numbers are equal values, in other programs too.

    Args:
        program: a closed jaxpr.
        numbering: the numbers given so far; it grows.
        inputs: the numbers of its arguments; None for those that may have any value.

    Returns:
        For each output its number; None if it may depend on an argument that has none.
    """

    def number_of(*what: Any) -> int:
        return numbering.setdefault(what, len(numbering))

    def of_constant(value: Any, _: Any) -> int:
        small = small_constant(value)
        if small is None:
            return number_of(id(value))
        return number_of(small.tobytes(), small.shape, str(small.dtype))

    def of_results(equation: Any, given: list[int | None]) -> Sequence[int | None]:
        name, params = equation.primitive.name, equation.params
        num_results = len(equation.outvars)
        inside = program_inside(params, len(given))
        if inside is not None and name not in LOOPS:
            return number_values(inside, numbering, given)
        if None in given or name in LOOPS:
            return [None] * num_results
        return [number_of(name, str(params), *given, n) for n in range(num_results)]

    return follow(program, inputs, of_constant, of_results)
