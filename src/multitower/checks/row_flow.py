"""Row flow: what becomes of a batch's rows inside a function, read off its program.

A function can be cut into towers when every row of a result depends on the same row of the batch,
and what has no rows is a mean over them. Every value of the program gets one word:

- free: does not depend on rows.
- by row: row i of it depends on row i alone.
- linear: a sum or a mean over rows, added to or multiplied by what is free.
- mixed: anything else, and where it came about.

The program is traced with a number of rows that appears nowhere else, so that an axis of rows is
known by its size. What the reader does not know it takes for harmless: it may miss a mistake, and
should not invent one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from jax.extend import core

from multitower.checks.equations import computed, line_of, num_same, program_inside, small_constant

Word = Literal["free", "by row", "linear", "mixed"]

# Sums over rows, and what keeps a sum a sum.
_SUMS = {"reduce_sum", "dot_general", "add_any", "psum", "psum_invariant"}
_LINEAR_ALONE = {
    "broadcast_in_dim", "convert_element_type", "copy", "copy_p", "expand_dims", "neg", "pad",
    "pvary", "reduce_precision", "reduce_sum", "reshape", "real", "imag", "rev", "slice", "squeeze",
    "stop_gradient", "transpose", "concatenate", "dynamic_slice", "gather", "optimization_barrier",
    "dynamic_update_slice", "scatter", "scatter-add", "cumsum", "name", "sharding_constraint",
}  # fmt: skip
_LINEAR_TOGETHER = {"add", "add_any", "sub", "concatenate", "select_n", "pad"}
_LINEAR_WITH_FREE = {"mul", "dot_general", "conv_general_dilated"}
_ALONG_AXIS = {"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "rev", "argsort"}
_DRAWS = {"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"}


@dataclass(frozen=True)
class Flow:
    """What is known of one value.

    Attributes:
        word: see the module.
        origin: the operation that summed over rows, or that mixed them, and its line.
        is_mean: whether a linear one was divided by the number of rows.
        varies: whether it differs from tower to tower by its rows or keys.
        is_drawn: whether random numbers went into it.
        value: what it is, where that is a constant: Keras computes the number of rows in the
            program, as the product of a shape.
    """

    word: Word = "free"
    origin: str | None = None
    is_mean: bool = False
    varies: bool = False
    is_drawn: bool = False
    value: Any = field(default=None, compare=False)


class Reading(NamedTuple):
    """What a program does with rows.

    Attributes:
        outputs: for each output what is known of it.
        draws: operations that draw the same random numbers in every tower.
        baked: operations that multiply or divide a sum over rows by the batch's number of rows,
            although that is not the number of rows here.
    """

    outputs: list[Flow]
    draws: list[str]
    baked: list[str]


def read(program: Any, inputs: Sequence[Flow], num_rows: int, batch_rows: int = 0) -> Reading:
    """Reads a program.

    Args:
        program: a closed jaxpr, from `jax.make_jaxpr`.
        inputs: what its arguments are: rows are `Flow("by row", varies=True)`.
        num_rows: the size of every axis of rows, which no other axis has.
        batch_rows: the number of rows of the real batch, to look for among constants.

    Returns:
        The reading.
    """
    reader = _Reader(num_rows, batch_rows)
    outputs = reader.run(program, list(inputs))
    return Reading(outputs, reader.draws, reader.baked)


class _Reader:
    def __init__(self, num_rows: int, batch_rows: int) -> None:
        self._num_rows = num_rows
        self._batch_rows = batch_rows
        self._calls: list[Any] = []
        self.draws: list[str] = []
        self.baked: list[str] = []

    def run(self, program: Any, inputs: Sequence[Flow]) -> list[Flow]:
        jaxpr = getattr(program, "jaxpr", program)
        known: dict[Any, Flow] = dict(zip(jaxpr.invars, inputs, strict=True))
        for atom, value in zip(jaxpr.constvars, getattr(program, "consts", ()), strict=False):
            known[atom] = Flow(value=small_constant(value))

        def flow_of(atom: Any) -> Flow:
            if isinstance(atom, core.Literal):
                return Flow(value=small_constant(atom.val))
            return known.get(atom, Flow())

        for equation in jaxpr.eqns:
            flows = self._equation(equation, [flow_of(atom) for atom in equation.invars])
            known.update(zip(equation.outvars, flows, strict=True))
        return [flow_of(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Any, inputs: list[Flow]) -> list[Flow]:
        name = equation.primitive.name
        inner, program = _INNER.get(name), program_inside(equation.params, len(inputs))
        if inner is not None or program is not None:
            self._calls.append(equation)
            found = inner(self, equation, inputs) if inner else self.run(program, inputs)
            self._calls.pop()
            return found
        varies = any(flow.varies for flow in inputs)
        is_drawn = any(flow.is_drawn for flow in inputs)
        if name in _DRAWS:
            is_drawn = True
            if not varies:
                self.draws.append(self._where(equation))
        word, origin = self._word(equation, name, inputs)
        is_mean = word == "linear" and self._is_mean(equation, name, inputs)
        value = computed(equation, [flow.value for flow in inputs])
        return [Flow(word, origin, is_mean, varies, is_drawn, value)] * len(equation.outvars)

    def _is_mean(self, equation: Any, name: str, inputs: list[Flow]) -> bool:
        linear = [flow.is_mean for flow in inputs if flow.word == "linear"]
        if linear and all(linear):
            return True
        return name in ("mul", "div") and any(
            number and (number % self._num_rows == 0 or _divides(self._num_rows, 1 / number))
            for number in _numbers(inputs)
        )

    def _word(self, equation: Any, name: str, inputs: list[Flow]) -> tuple[Word, str | None]:
        worst = max(inputs, key=lambda flow: _ORDER.index(flow.word), default=Flow())
        if worst.word in ("free", "mixed"):
            return worst.word, worst.origin
        if worst.word == "linear":
            return self._from_linear(equation, name, inputs)
        return self._from_rows(equation, name)

    def _from_rows(self, equation: Any, name: str) -> tuple[Word, str | None]:
        """What becomes of rows: still by row, summed up, or mixed."""
        rows_in = max(self._row_axes(atom) for atom in equation.invars)
        rows_out = max((self._row_axes(atom) for atom in equation.outvars), default=0)
        if rows_out > rows_in:
            return "mixed", self._where(equation)  # every row with every row
        if rows_out == 0 and rows_in > 0:
            return ("linear" if name in _SUMS else "mixed"), self._where(equation)
        if name in _ALONG_AXIS and self._is_row_axis(equation):
            return "mixed", self._where(equation)
        return "by row", None

    def _from_linear(self, equation: Any, name: str, inputs: list[Flow]) -> tuple[Word, str | None]:
        """What becomes of sums over rows: still one, or mixed."""
        origin = next(flow.origin for flow in inputs if flow.word == "linear")
        words = [flow.word for flow in inputs]
        if "by row" in words:
            return "mixed", origin  # a sum over rows goes back into the rows
        is_first_alone = words.count("linear") == 1 and words[0] == "linear"
        scaled = words.count("linear") == 1 and name in _LINEAR_WITH_FREE
        scaled = scaled or (is_first_alone and name == "div")
        if scaled:
            self._look_for_baked(equation, inputs)
        together = name in _LINEAR_TOGETHER and not (name == "select_n" and words[0] == "linear")
        if scaled or together or (is_first_alone and name in _LINEAR_ALONE):
            return "linear", origin
        return "mixed", self._where(equation)

    def _look_for_baked(self, equation: Any, inputs: list[Flow]) -> None:
        if self._batch_rows < 2 or self._batch_rows == self._num_rows:
            return
        for number in _numbers(inputs):
            if number == self._batch_rows or _divides(self._batch_rows, 1 / number, exact=True):
                self.baked.append(self._where(equation))

    def _where(self, equation: Any) -> str:
        """The operation and its line: `reduce_sum at model.py:30: y = x - x.mean(0)`."""
        # What a library's jitted function holds was traced when it was called first, perhaps by
        # another line; the call itself is this one's.
        for one in [*self._calls, equation]:
            line = line_of(one)
            if line is not None:
                return f"{equation.primitive.name} at {line}"
        return equation.primitive.name

    def _row_axes(self, atom: Any) -> int:
        shape = getattr(atom.aval, "shape", ())
        return sum(1 for size in shape if size and size % self._num_rows == 0)

    def _is_row_axis(self, equation: Any) -> bool:
        params = equation.params
        axes = params.get("dimensions", (params.get("axis", params.get("dimension", 0)),))
        shape = equation.invars[0].aval.shape
        return any(shape[axis] % self._num_rows == 0 for axis in axes if shape)

    def scan(self, equation: Any, inputs: list[Flow]) -> list[Flow]:
        program = equation.params["jaxpr"]
        inner = getattr(program, "jaxpr", program)
        # By their axes, as JAX's names for these counts differ: what is scanned, and what is
        # stacked, has one axis more outside.
        num_carried = num_same(equation.outvars, inner.outvars)
        num_shared = num_same(equation.invars, inner.invars) - num_carried
        xs = equation.invars[num_shared + num_carried :]
        over_rows = any(atom.aval.shape and atom.aval.shape[0] % self._num_rows == 0 for atom in xs)
        outputs = self._loop(program, inputs, num_shared, num_carried)
        is_carried = any(flow.word != "free" for flow in outputs[:num_carried])
        if not (over_rows and is_carried):
            return outputs
        # One row after another: what is carried on brings rows together.
        mixed = Flow("mixed", self._where(equation), varies=True)
        return [mixed if flow.word != "free" else flow for flow in outputs]

    def _loop(
        self, program: Any, inputs: list[Flow], num_shared: int, num_carried: int
    ) -> list[Flow]:
        # What is carried, or comes slice by slice, is another value in every turn.
        shared, turning = inputs[:num_shared], [replace(x, value=None) for x in inputs[num_shared:]]
        carried, rest = turning[:num_carried], turning[num_carried:]
        outputs: list[Flow] = []
        for _ in range(4):  # words only get worse, and there are four of them
            outputs = self.run(program, [*shared, *carried, *rest])
            joined = [_join(a, b) for a, b in zip(carried, outputs, strict=False)]
            if joined == carried:
                break
            carried = joined
        return [*carried, *outputs[num_carried:]]

    def loop_while(self, equation: Any, inputs: list[Flow]) -> list[Flow]:
        # Under vmap a loop goes on until every row is done, and leaves the rows that are alone: so
        # a decision over all rows says nothing of what is carried.
        params = equation.params
        rest, num_shared = inputs[params["cond_nconsts"] :], params["body_nconsts"]
        return self._loop(params["body_jaxpr"], rest, num_shared, len(rest) - num_shared)

    def cond(self, equation: Any, inputs: list[Flow]) -> list[Flow]:
        decision, *rest = inputs
        branches = [self.run(branch, rest) for branch in equation.params["branches"]]
        joined = [_join_all(flows) for flows in zip(*branches, strict=True)]
        if decision.word in ("free", "by row"):
            return joined
        return [Flow("mixed", decision.origin, varies=True) for _ in joined]


_INNER: Mapping[str, Callable[[_Reader, Any, list[Flow]], list[Flow]]] = {
    "scan": _Reader.scan,
    "while": _Reader.loop_while,
    "cond": _Reader.cond,
}

_ORDER: tuple[Word, ...] = ("free", "by row", "linear", "mixed")


def _numbers(inputs: Sequence[Flow]) -> list[float]:
    """The constants among the inputs of an equation, without zero."""
    values = [flow.value for flow in inputs if np.ndim(flow.value) == 0 and flow.value]
    return [float(value) for value in values]


def _join(a: Flow, b: Flow) -> Flow:
    worse = max(a, b, key=lambda flow: _ORDER.index(flow.word))
    if {a.word, b.word} == {"by row", "linear"}:
        worse = Flow("mixed", worse.origin)
    both_mean = a.is_mean and b.is_mean
    is_mean = both_mean or (worse.is_mean and "free" in (a.word, b.word))
    varies, is_drawn = a.varies or b.varies, a.is_drawn or b.is_drawn
    return Flow(worse.word, worse.origin, is_mean, varies, is_drawn)


def _join_all(flows: Sequence[Flow]) -> Flow:
    joined = flows[0]
    for flow in flows[1:]:
        joined = _join(joined, flow)
    return joined


def _divides(rows: int, number: float, *, exact: bool = False) -> bool:
    """Whether a number, known to float32's precision, is `rows` or a multiple of it."""
    times = number / rows
    return round(times) >= 1 and abs(times - (1 if exact else round(times))) < 1e-5 * times


def unused_size(sizes: Sequence[int]) -> int:
    """A number of rows that no axis has or divides: a prime, small, for loops over rows in Python.

    Args:
        sizes: of all axes that are not rows.

    Returns:
        The number.
    """
    primes = (211, 223, 227, 229, 233, 239, 241, 251, 257, 263, 269, 271, 277, 281, 283, 293)
    return next(p for p in primes if all(size % p for size in sizes if size))
