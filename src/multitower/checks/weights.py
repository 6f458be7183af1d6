"""Weights: which results a function has made of the leaves of a `mt.ratio`, and not of its value.

To JAX a ratio is a pytree of totals and weights, so that it can leave a jitted function. What takes
trees apart, such as `jax.tree.leaves`, finds these in it, and no number. The weights are marked.
"""

from collections.abc import Sequence
from typing import Any

from multitower.checks.equations import follow, program_inside
from multitower.checks.problems import WEIGHT

_UNCHANGED = ("copy", "copy_p", "name", "optimization_barrier", "stop_gradient")


def uses_of_weights(program: Any, inputs: Sequence[str] = ()) -> list[str]:
    """What each output of a program has of the weights of ratios.

    Args:
        program: a jaxpr, closed or open.
        inputs: what its arguments have; by default nothing.

    Returns:
        "is" for a weight, "made of" for what was computed from one, "" for anything else.
    """
    jaxpr = getattr(program, "jaxpr", program)

    def results(equation: Any, given: list[str]) -> list[str]:
        name, params = equation.primitive.name, equation.params
        if name == "name" and params["name"] == WEIGHT:
            return ["is"]
        if name in _UNCHANGED:
            return given
        inside = program_inside(params, len(given))
        if inside is not None:
            return uses_of_weights(inside, given)
        return ["made of" if any(given) else ""] * len(equation.outvars)

    return follow(program, inputs or [""] * len(jaxpr.invars), lambda *_: "", results)
