"""No means: where a value without rows stopped being a sum or a mean over rows, and how.

A state or a metric that is such a value is a tower's own: the mean over towers is another number.
"""

from collections.abc import Sequence
from typing import Any

from multitower.checks.reading import operations
from multitower.checks.reading.flow import Flow, Word, worst_of
from multitower.checks.reading.loops import Reader


def held(name: str, word: Word, mixing: str | None, inputs: list[Flow]) -> str | None:
    """Where a mixed value got hold of rows, or of their largest."""
    if word != "mixed":
        return None
    is_now = name in operations.HOLDS and worst_of(inputs).word == "by row"
    return mixing if is_now else next((flow.held for flow in inputs if flow.held), None)


def bent(equation: Any, word: Word, inputs: list[Flow], reader: Reader) -> str | None:
    """Where sums over rows were made something that is neither their mean nor a variance."""
    name, words = equation.primitive.name, [flow.word for flow in inputs]
    if word != "mixed":
        return None
    is_variance = name in operations.CLIPS and any(flow.mixed for flow in inputs)
    worst = worst_of(inputs).word
    is_now = name in operations.BENDS and worst == "linear" and not is_variance
    is_now |= name in operations.BENDS_VARIANCES and worst == "mixed"
    power = equation.params["y"] if name == "integer_pow" else 2  # a square is in a variance
    is_now |= power < 0 or (power > 2 and worst == "linear")
    is_now |= name in operations.DECIDES and worst == "by row"
    is_now |= name == "sqrt" and inputs[0].is_sum  # of a mean it is a deviation
    divisor = operations.DIVISORS.get(name)
    if is_now or (divisor is not None and words[divisor] != "free"):
        return reader.where(equation)
    return next((flow.bent for flow in inputs if flow.bent), None)


def no_norm(equation: Any, inputs: list[Flow], reader: Reader) -> str | None:
    """Where a sum over rows was used as normalising rows does not: it divides by a root."""
    name, words = equation.primitive.name, [flow.word for flow in inputs]
    are_sums = [word in ("linear", "mixed") for word in words]
    divisor = operations.DIVISORS.get(name)
    if divisor is None:
        is_now = name in operations.BENDS_NO_NORM and are_sums[0]
        is_now |= _adds_products_up(equation, words)
    else:
        is_bent = words[divisor] == "mixed" and inputs[divisor].bent is not None
        is_now = words[divisor] == "linear" or (is_bent and are_sums[1 - divisor])
    if is_now:
        return reader.where(equation)
    return next((flow.no_norm for flow in inputs if flow.no_norm), None)


def summed(name: str, inputs: list[Flow]) -> str | None:
    """Where a mixed value was summed over rows, if it is still that sum, at least in part."""
    if name == "select_n":
        return next((flow.a_sum for flow in inputs[1:] if flow.a_sum), None)
    written = operations.WRITTEN.get(name, (0,) if name in operations.LINEAR_ALONE else ())
    return inputs[0].a_sum if 0 in written else None


def _adds_products_up(equation: Any, words: Sequence[str]) -> bool:
    """Whether products of sums over rows are added up, as in a penalty on an uneven load.

    Normalising rows takes the statistics of each feature for themselves.
    """
    are_sums = [word in ("linear", "mixed") for word in words]
    if equation.primitive.name not in operations.ADD_UP or not all(are_sums):
        return False
    (made,) = equation.outvars
    has_fewer_axes = all(made.aval.ndim < atom.aval.ndim for atom in equation.invars)
    return has_fewer_axes and (len(words) > 1 or words[0] == "mixed")
