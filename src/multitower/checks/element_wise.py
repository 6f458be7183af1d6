"""Element-wise programs: does an element of a result depend on the inputs' same element alone?

Every value of a program gets one word:

- same: one number for all elements, such as a count or a rate; a scalar, or one that was broadcast.
- free: any other array that does not depend on elements of the inputs.
- element: element i of it depends on element i of the inputs, and on what is the same.
- mixed: anything else; the operation that mixed the elements is kept, too.

It also gets a number. Equal numbers are equal computations whatever the shapes, so that a program
traced for whole arrays can be compared with one traced for blocks of them. The result of an unknown
operation is mixed: only what is proved counts as element-wise.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from multitower.checks.equations import Numbering, follow, program_inside
from multitower.towers.leaves import is_key, is_traced

_ELEMENT_WISE = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "complex", "conj", "convert_element_type",
    "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp",
    "exp2", "expm1", "floor", "ge", "gt", "igamma", "igammac", "imag", "integer_pow", "is_finite",
    "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter",
    "not", "or", "population_count", "pow", "real", "reduce_precision", "rem", "round", "rsqrt",
    "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin",
    "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
})  # fmt: skip


class Value(NamedTuple):
    """What is known of one value.

    Attributes:
        word: same, free, element or mixed, as above.
        number: the number of the computation; equal computations have equal numbers.
        origin: the operation that mixed elements, for a mixed value.
    """

    word: Literal["same", "free", "element", "mixed"]
    number: int
    origin: str | None = None


def read_elements(program: Any, is_element: Sequence[bool], numbering: Numbering) -> list[Value]:
    """Reads which results of a program are element-wise.

    Args:
        program: a closed jaxpr, from `jax.make_jaxpr`.
        is_element: for each argument whether its elements must not be mixed.
        numbering: the numbers given so far, also to other programs; it grows.

    Returns:
        For each output what is known of it.
    """
    reader = _Reader(numbering)
    inputs = [
        Value("element", reader.number("input", number))
        if mark
        else Value("free" if atom.aval.shape else "same", reader.number("input", number))
        for number, (mark, atom) in enumerate(zip(is_element, program.jaxpr.invars, strict=True))
    ]
    return reader.run(program, inputs)


class _Reader:
    def __init__(self, numbering: Numbering) -> None:
        self._numbering = numbering

    def number(self, *what: Any) -> int:
        return self._numbering.setdefault(what, len(self._numbering))

    def run(self, program: Any, inputs: Sequence[Value]) -> list[Value]:
        return follow(program, inputs, self._constant, self._equation)

    def _constant(self, value: Any, aval: Any) -> Value:
        if is_traced(value) or is_key(value):
            return Value("free", self.number("object", id(value)))
        array = np.asarray(value, dtype=aval.dtype)  # a literal may be a Python number
        first = array.reshape(-1)[:1]
        if array.size and array.tobytes() == first.tobytes() * array.size:
            return Value("same", self.number(first.tobytes(), str(array.dtype)))
        return Value("free", self.number(array.tobytes(), array.shape, str(array.dtype)))

    def _equation(self, equation: Any, inputs: list[Value]) -> list[Value]:
        name, params = equation.primitive.name, equation.params
        inside = program_inside(params, len(inputs))
        if inside is not None and name not in ("scan", "while", "cond"):
            return self.run(inside, inputs)
        if name == "optimization_barrier":
            return inputs
        if name == "cond":
            return self._cond(equation, inputs)
        if name in _ELEMENT_WISE:
            return [self._element_wise(equation, inputs)]
        if name == "broadcast_in_dim" and inputs[0].word == "same":
            return [inputs[0]]
        return self._other(equation, inputs)

    def _element_wise(self, equation: Any, inputs: list[Value]) -> Value:
        (out,) = equation.outvars
        # Such as an exponent or a dtype; no shape is among them.
        params = sorted((k, str(v)) for k, v in equation.params.items() if k != "sharding")
        number = self.number(
            equation.primitive.name, str(params), str(out.aval.dtype), *(v.number for v in inputs)
        )
        words = {value.word for value in inputs}
        if "mixed" in words:
            return _first_mixed(inputs)
        if words == {"same"}:
            return Value("same", number)
        if "element" not in words:
            return Value("free", number)
        shapes = {
            atom.aval.shape
            for atom, value in zip(equation.invars, inputs, strict=True)
            if value.word == "element"
        }
        if "free" in words or shapes != {out.aval.shape}:
            return Value("mixed", number, equation.primitive.name)
        return Value("element", number)

    def _cond(self, equation: Any, inputs: list[Value]) -> list[Value]:
        which, *rest = inputs
        branches = [self.run(branch, rest) for branch in equation.params["branches"]]
        found: list[Value] = []
        for atom, outputs in zip(equation.outvars, zip(*branches, strict=True), strict=True):
            numbers = [value.number for value in outputs]
            words = {which.word, *(value.word for value in outputs)}
            if "mixed" in words:
                found.append(_first_mixed([which, *outputs]))
                continue
            number = self.number("cond", which.number, *numbers)
            if which.word == "element" or {"free", "element"} <= words:
                found.append(Value("mixed", number, "cond"))
            elif "element" in words:
                found.append(Value("element", number))
            else:
                is_same = words == {"same"} or not atom.aval.shape
                found.append(Value("same" if is_same else "free", number))
        return found

    def _other(self, equation: Any, inputs: list[Value]) -> list[Value]:
        """The results of an operation that combines elements, moves them or draws them."""
        name = equation.primitive.name
        if any(value.word == "mixed" for value in inputs):
            return [_first_mixed(inputs)] * len(equation.outvars)
        # A sum over ones counts them: it depends on the shape although all elements are equal.
        text = str((equation.params, [atom.aval.shape for atom in equation.invars]))
        found: list[Value] = []
        for place, atom in enumerate(equation.outvars):
            number = self.number(name, text, place, *(value.number for value in inputs))
            if any(value.word == "element" for value in inputs):
                found.append(Value("mixed", number, name))
            else:
                found.append(Value("free" if atom.aval.shape else "same", number))
        return found


def _first_mixed(values: Sequence[Value]) -> Value:
    return next(value for value in values if value.word == "mixed")
