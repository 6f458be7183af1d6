"""Work: how much an equation computes, from its shapes only."""

import math
from typing import Any

from jax.extend import core

# Equations that take almost no time: every stage that needs one computes it itself.
_CHEAP = frozenset({
    "convert_element_type", "transpose", "reshape", "broadcast_in_dim", "slice", "squeeze",
    "expand_dims", "iota", "stop_gradient", "copy",
})  # fmt: skip


def is_cheap(equation: Any) -> bool:
    """Whether an equation only casts or moves elements."""
    return equation.primitive.name in _CHEAP


def work_of(equation: Any) -> int:
    """Floating-point operations of an equation: exact for products, else one per element."""
    name = equation.primitive.name
    inner = [work_of_program(one) for one in core.jaxprs_in_params(equation.params)]
    if name == "scan":
        return equation.params["length"] * sum(inner)
    if name == "cond":
        return max(inner, default=0)
    if inner:
        return sum(inner)
    elements = sum(math.prod(atom.aval.shape) for atom in equation.outvars)
    return 2 * elements * _terms(equation) if is_product(equation) else elements


def work_of_program(jaxpr: Any) -> int:
    """Floating-point operations of a jaxpr."""
    return sum(work_of(equation) for equation in jaxpr.eqns)


def is_product(equation: Any) -> bool:
    """Whether an equation is a product of matrices or a convolution."""
    return equation.primitive.name in ("dot_general", "conv_general_dilated")


def is_heavy(equation: Any) -> bool:
    """Whether an equation contains a product of matrices or a convolution, at any depth."""
    if is_product(equation):
        return True
    inner = core.jaxprs_in_params(equation.params)
    return any(is_heavy(one) for jaxpr in inner for one in jaxpr.eqns)


def _terms(equation: Any) -> int:
    """How many products are summed in every element of the result."""
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return math.prod(shape[axis] for axis in contracted)
    kernel = equation.invars[1].aval.shape
    return math.prod(kernel) // kernel[equation.params["dimension_numbers"].rhs_spec[0]]
