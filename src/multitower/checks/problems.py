"""The ways in which a function may not be safe to run data parallel, and their messages."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from multitower.errors import OutputError

Kind = Literal[
    "mixed rows",
    "sum",
    "mean",
    "gradient",
    "row count",
    "same numbers",
    "not repeatable",
    "not a number",
    "table",
    "written",
]


class Problem(NamedTuple):
    """Why a function is not safe to run data parallel.

    Attributes:
        kind: the kind of problem, one of `Kind`.
        output: the result that is wrong, such as `output[0]['loss']`.
        where: the operation and the line that it comes from, if they were found.
        message: what is wrong, and what to do.

    Example:
        >>> import jax.numpy as jnp
        >>> import multitower as mt
        >>> check = mt.check_parallel(lambda w, x: jnp.sum((x * w) ** 2), 1.0, jnp.arange(4.0))
        >>> check.problems[0].kind, check.problems[0].output
        ('sum', 'output')
    """

    kind: Kind
    output: str
    where: str | None
    message: str

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        return f"{self.output}{place}: {self.message}"


@dataclass(frozen=True)
class ParallelCheck:
    """What `check_parallel` found; true if nothing is wrong.

    Attributes:
        problems: the problems that were found.
        num_rows: the number of rows that the function was tried with.
        num_towers: the number of towers that these were cut into.

    Example:
        >>> import jax.numpy as jnp
        >>> import multitower as mt
        >>> check = mt.check_parallel(lambda w, x: (x * w) ** 2, 1.0, jnp.arange(4.0), towers=2)
        >>> bool(check), check.problems, check.num_rows, check.num_towers
        (True, (), 4, 2)
        >>> check.raise_if_wrong()
    """

    problems: tuple[Problem, ...]
    num_rows: int
    num_towers: int

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        if self:
            tried = f"{self.num_rows} rows in {self.num_towers} towers"
            return f"safe to run data parallel (tried with {tried})"
        lines = [f"{n}. {problem}" for n, problem in enumerate(self.problems, start=1)]
        return "\n".join(["not safe to run data parallel:", *lines])

    def raise_if_wrong(self) -> None:
        """Raises an error with all problems, if there are any.

        Raises:
            OutputError: there are problems.
        """
        if not self:
            raise OutputError(f"the function {self}")


# The kind of results that are taken from the first tower, as out_axes=None says.
FIRST = "first"
# The kind of results that are pairs of a total and a weight, the terms of mt.ratio.
TERMS = "terms"
# The kind of a loss that towers add up, as reduction="sum" says, if it has no rows.
ADDED = "added"
# The name of the mark on a weight of mt.ratio.
WEIGHT = "multitower.weight"
# The name of the mark on the array without rows that mt.row_index cuts from its argument.
NO_ROWS = "multitower.no_rows"

MIXED = (
    "rows are brought together and then used again, as with in-batch negatives, batch statistics "
    "or a function of the batch's mean. A tower has only its own rows, so the result would differ "
    "from one device's. Compare with the rows of all towers, mt.all_rows(x), or take the mean over "
    'all of them, jax.lax.pmean(x.mean(0), "towers"). To a loss for each row add the terms of a '
    "mean, not the mean. For a mean with weights or a mask return mt.ratio(total, weight); or, if "
    "statistics of each tower's own rows are what you mean (BatchNorm), keep the function as it is "
    "and fix the number of towers with towers=."
)
QUOTIENT = (
    "it is a division by a sum or a mean over rows, as in a mean with weights or a mask. A tower "
    "has only its own rows, and the mean of the towers' quotients is not that of the whole batch. "
    "As a loss or metric return mt.ratio(total, weight): towers add up both, and then divide. If "
    "more is computed from the quotient, take the sums or means over all towers first, "
    'jax.lax.psum(x.sum(0), "towers") or jax.lax.pmean(x.mean(0), "towers").'
)
BOUNDED = (
    "a sum or a mean over rows gets a bound, as in jnp.maximum(mask.sum(), 1). A tower has only "
    "its own rows, so the bound meets another number than on one device. For a mean with a mask "
    "return mt.ratio(total, mask), which needs no bound: for 0 instead of 0 / 0 where no row of "
    "any tower counts, add a tiny number, mask + 1e-9. Else bound what all towers have together, "
    'jnp.maximum(jax.lax.pmean(x.mean(), "towers"), 0).'
)
DRAWN_TOGETHER = (
    'keys of "rbg" or "unsafe_rbg", one for each row, are drawn from together: jax.vmap draws the '
    "numbers of all rows that it is given from the first key, so they depend on the rows of a "
    'tower. Make the keys of the rows with impl="threefry2x32", or use one key for all of them.'
)
LARGEST = (
    "rows are brought together in a maximum or a minimum, as in a softmax over rows. A tower "
    "has only its own rows, so the result would differ from one device's. Compare with the rows of "
    "all towers, mt.all_rows(x); or take the maximum over all of them, "
    'jax.lax.pmax(jax.lax.stop_gradient(x.max()), "towers"), or the minimum with pmin.'
)
PARTS = (
    "a part of the rows is taken, such as the first half. A tower has one slice of the batch, and "
    "the first half of its rows is not the first half of the batch. Give what belongs together the "
    "same row, for example two views as batch['view1'] and batch['view2']; or take the part of all "
    "rows, mt.all_rows(x). If axis 0 is not that of the rows, as in sequences with time first, put "
    "the rows first, or say where they are, as in in_axes=(None, 1)."
)
LAID_OUT = (
    "values of different rows stand where those of one row belong, or are paired. Which rows these "
    "are depends on the number of rows, and a tower has fewer of them. jnp.concatenate([a, b]) and "
    "jnp.tile have all rows once, and then all rows again: take them apart with .reshape(2, -1), "
    "not with .reshape(-1, 2); jnp.repeat has the values of a row side by side. Move an axis with "
    "jnp.swapaxes(x, 0, 1), which x.reshape(len(x), -1) does not do."
)
TOO_LATE = (
    "towers add up what each has made of its own rows alone, such as a standard deviation, a "
    "quotient or a comparison of rows. The mean of these is not that of the whole batch. Add up "
    'sums or means over rows, mean = jax.lax.pmean(x.mean(), "towers") and then '
    'jax.lax.pmean(((x - mean) ** 2).mean(), "towers"), and compute the rest from these; or '
    "compare with the rows of all towers, mt.all_rows(x)."
)
SAME_IN_ALL = (
    "it is the same number in every tower, such as a sum that jax.lax.psum has made or a function "
    "of mt.all_rows(x), and reduction='sum' adds towers up: with T towers it would be T times too "
    "large. Leave reduction out."
)
# The operations in which towers add up.
MEETINGS = ("psum", "psum_invariant")
# By the operation that brought rows together.
WHY_MIXED = {
    **dict.fromkeys(("split", "slice", "chunks"), PARTS),
    **dict.fromkeys(("reduce_max", "reduce_min"), LARGEST),
    **dict.fromkeys(MEETINGS, TOO_LATE),
    **dict.fromkeys(("max", "min", "clamp"), BOUNDED),
    "div": QUOTIENT,
    "random_bits": DRAWN_TOGETHER,
    "layout": LAID_OUT,
}
STATISTICS = (
    "rows are normalised with statistics of their own tower's rows alone, as BatchNorm does, and "
    "without towers= the number of devices decides how many rows these are. Fix the number of "
    "towers: towers={num} gives the same on any number of devices. For statistics over the rows of "
    'all towers say axis_name="towers" to BatchNorm (Haiku: cross_replica_axis), or take '
    'jax.lax.pmean(x.mean(0), "towers") in code of your own.'
)
WRITTEN = (
    "the call writes into a parameter of the module. Only the optimizer changes parameters: the "
    "new value is used in this call and then dropped, while on one device it would stay. If it is "
    "a state, make it an nnx.Variable other than nnx.Param; or write it after the call. "
    "nnx.SpectralNorm and nnx.WeightNorm write the weights that they have normalised: here the "
    "weights stay as the optimizer made them, as in Flax Linen, and are normalised in every call."
)
APART = (
    "an mt.ratio was taken apart. As a pytree it consists of its totals and weights, which "
    "jax.tree.leaves, jax.tree.map and optax.tree.sum compute with as if each were a loss. Add "
    "ratios to each other: sum(losses.values()) for a dict of them; or say "
    "is_leaf=lambda x: not isinstance(x, dict)."
)
RATIO = (
    "towers add up the totals and the weights of mt.ratio, and these are not sums over rows: their "
    "quotient is not that of the whole batch. Give totals and weights with one entry for every "
    "row, or their sums."
)
MIXED_WEIGHT = (
    "the weight is made of rows that are brought together, such as the lower bound in "
    "jnp.maximum(mask.sum(), 1). Towers add up their weights, so that a tower whose mask is empty "
    "would count as 1. Give the weight by row, mt.ratio(total, mask), or its plain sum. For 0 "
    "instead of 0 / 0 where no row of any tower counts, add a tiny number: mask + 1e-9."
)
STEADY = (
    "one of its total and its weight is a sum over rows, and the other the same number in every "
    "tower. Towers add up both, so that with T towers this number would count T times. Give both "
    "by row, or their sums over rows. To divide by a number of your own return one loss per row, "
    "divided by it, and say reduction='sum'."
)
BESIDE = (
    "a number that is the same in every tower, such as a penalty on the parameters, or a mean is "
    "added to a sum over rows. Every tower adds it, so that with T towers it counts T times. "
    'Divide it by the number of towers, penalty / jax.lax.axis_size("towers"); or, where the sum '
    "is divided, add it to the quotient."
)
MEAN = (
    "it is a mean over rows, and reduction='sum' adds towers up: with T towers it would be T times "
    "too large. Return one value per row, or their sum; or leave reduction out."
)
GRADIENT = (
    "the loss is the same when the batch is cut into {num} towers, and its gradient is not. A "
    "backward rule (jax.custom_vjp) that looks over the rows, or a number made of all rows that "
    "jax.lax.stop_gradient holds, sees only a tower's own rows. Make what a row adds to the "
    "gradient depend on that row alone. (If a rule returns the sum of a weight's gradient over "
    'the towers, divide it by jax.lax.axis_size("towers"): towers add up what each returns.)'
)
COMPILED = (
    "as one compiled program, the loss has another gradient when the batch is cut into {num} "
    "towers; computed operation by operation, it has not. That is XLA's rounding, not your "
    "function: jnp.max and jnp.min pass their gradient to the numbers that equal the result, and a "
    "compiled program may compute such a number twice, with other last bits, and find none that "
    "does. Write jnp.max(jax.lax.optimization_barrier(x)) in place of jnp.max(x)."
)
BACKWARD = (
    "a backward rule (jax.custom_vjp) brings rows together, as a norm of the gradients of all rows "
    "does, or changes a sum over them otherwise than by a factor, as clipping the gradient of a "
    "weight does. A tower has the gradients of its own rows alone, so the result would differ from "
    "one device's. Make what a row adds to the gradient depend on that row alone. Or add up over "
    "the towers in the rule: for a norm over rows, their squares, with "
    'jax.lax.psum(x, "towers"); for a weight, its gradient, and then divide what the rule returns '
    'by jax.lax.axis_size("towers"), because the towers add up what each of them returns.'
)
COUNTING_RULE = (
    "a backward rule (jax.custom_vjp) divides by the number of rows, or multiplies by it, and its "
    "function does not; or the function is a mean over rows, and the rule returns the gradient of "
    "their sum. The number is that of a tower's rows, so the result would differ from one "
    "device's. Where the function returns one value per row, let the rule return what each row "
    "adds to the gradient, with no such factor; where it returns their mean, the gradient of that "
    "mean."
)
WHOLE = (
    "it has as many entries as the batch has rows, so it is cut into towers, and the result is "
    "that of one device if every tower gets the whole of it: {whole}."
)
OF_ONE_TOWER = (
    "it depends on the rows, and with out_axes=None it is the first tower's, which has only its "
    "own rows. Return one value per row, with out_axes=0, and combine them outside; or combine "
    'them over the towers, such as jax.lax.psum(x.sum(), "towers").'
)
TABLE = (
    "it has as many entries as the batch has rows, so it is cut into towers, and the function "
    "looks things up in it like in a table. A tower has only a part of it, and JAX clamps an index "
    "that is too large. Give every tower the whole table: {whole}. (If the numbers that it is "
    "looked up by choose the rows of a batch, as in x[idx], cut these numbers and nothing else. "
    "If they choose a partner for each row of this batch, look it up in mt.all_rows(x).)"
)
SUM = (
    "it is a sum over rows, and towers are averaged: with T towers it would be T times too small. "
    "Return one value per row, or the mean; or, if the sum is what you mean, {way_out}."
)
SUMMED_STATE = "it is kept for the next step, and it adds up rows. {way_out}"
SUM_ALL = (
    "Every tower has the sum over its own rows, and the state gets the mean of these, or tower 0's "
    'if they are integers. For the sum over all rows add jax.lax.psum(x.sum(0), "towers") to the '
    'old value (a layer of a library may have an argument for it: cross_replica_axis="towers" in '
    "Haiku); or keep a mean. If it is a metric, return the predictions and update the metric after "
    "the gradient."
)
HELD_IN_STATE = (
    "it is kept for the next step, and it holds rows, or what some of them decide: their largest, "
    "their smallest, a quantile, x.any() or x.all(). {way_out}"
)
HOLD_ALL = (
    "Every tower has its own rows, and the state gets the mean of what towers keep, or what tower "
    "0 keeps if they are no floats. Make it of the rows of the whole batch, mt.all_rows(x); for a "
    'maximum jax.lax.pmax(x.max(), "towers") is enough.'
)
BENT_STATE = (
    "it is kept for the next step, and it is no mean over rows: this line makes it of sums or "
    "means over rows, as a quotient, a logarithm, a maximum or a decision does. {way_out}"
)
SUM_PARTS = (
    "Every tower has that of its own rows, and the mean of the towers' is not that of all rows. "
    'Make it of sums over all towers, jax.lax.psum(x.sum(0), "towers"), or of means, '
    'jax.lax.pmean(x.mean(0), "towers").'
)
# With sync_every and asynchronous updates, which refuse a psum.
KEEP_A_MEAN = (
    "Towers exchange no values in this step, so each has its own rows alone, and no state has the "
    "sum over all rows, or all rows. Keep a mean instead."
)
OF_NO_ROW = (
    "{what} has {rows} entries on its first axis, whatever the number of rows is, and a tower "
    "happens to have {rows} rows: they would be taken for one entry per row. Return the loss of "
    "every example, such as error.mean(axis=1) and not error.mean(axis=0); or, if the batch fills "
    "all towers evenly, the mean of all, loss.mean()."
)
NOT_READ = (
    "this function runs without a look at what it does with rows: it takes the {rows} rows of a "
    "tower and fails with other numbers of rows. If a number of rows is written into it, say "
    "x.shape[0] there. mt.check_parallel compares its results with those of one device."
)
FAILED = (
    "this function runs without a look at its rows, which failed: {kind}: {error}. Please report "
    "it with the function."
)
ONE_BY_ONE = (
    "this function goes through its rows one by one in Python ({place}), and runs without a look "
    "at what it does with them. jax.vmap(f)(x) in place of the loop is looked at, and compiles in "
    "a fraction of the time. mt.check_parallel compares its results with those of one device."
)
WHOLE_BESIDE_ONE_ROW = (
    "this function works with one row per tower and not with more, and it closes over an array of "
    "shape {shape}, with one entry per row of the batch. Every tower has the whole of that array, "
    "which broadcasts against its one row. Make it an argument, or name its variable too, as in "
    "in_axes={{'x': 0, 'y': 0}}; None there says that every tower needs the whole."
)
BAKED = (
    "the number of rows of the whole batch is written into it, and a tower has fewer rows. Divide "
    "by x.shape[0], or return one value per row."
)
COUNTED = (
    "it depends on the number of rows: inside a tower x.shape[0], len(x) and jnp.arange(len(x)) "
    "are those of the tower, so the result differs from one device's. For the mean over all rows "
    "return one value per row, undivided. Where you need the number of rows of the batch, pass it "
    "as a 0-d array of the batch; mt.row_index(x) is the place of each row, so write "
    "table[mt.row_index(x)] and not table[:len(x)]."
)
ROW_COUNT = (
    "it works on {whole} rows and fails on {half}, which a tower would have: {error}. Take the "
    "number of rows from the argument, x.shape[0], not from a constant; or use fewer towers."
)
SHAPES = (
    "it has shape {whole} for all {rows} rows and {part} for {few} of them. Results by row need "
    "their rows on the first axis, exactly one for each row of the batch."
)
SAME_NUMBERS = (
    "they come from a key that is the same in every tower, so all towers would draw the same ones, "
    "dropout masks for example. Pass a typed key, jax.random.key(...), as an argument of its own. "
    "For several keys split it in the function, jax.random.split(key, n)."
)
UNREAD = (
    "rows are written into it, and what is read from it is not followed here: if the function "
    "brings rows together through it, no other message says so."
)
OF_ONE_ROW = (
    "{name} is called inside jax.vmap over the rows. Its argument is one row there, so it takes "
    "the entries of that row for rows. Map what is done to each row, and call {name} outside of "
    "jax.vmap."
)
HIDDEN = (
    "(With the rows that you passed the numbers agree, as with a mask that keeps every row. With "
    "other numbers in rows of the same shapes they do not.)"
)
COUNTED_CALLS = (
    "this function changes {names} and reads it, as self.step += 1 does. It is traced several "
    "times at the first call, and then runs as a compiled program, which keeps the number that it "
    "was traced with. Count outside of it, and pass the number as an argument, or as a 0-d array "
    "of the batch."
)
NOT_A_NUMBER = (
    "it is NaN for the whole batch, so there is nothing to compare. Pass arguments for which it is "
    "a number."
)
NOT_REPEATABLE = (
    "two calls with the same arguments differ: something in it changes from call to call, such as "
    "np.random or a counter. Pass what is random as an argument."
)


def table(name: str, whole: str, place: str | None) -> Problem:
    """The problem that an argument is cut, and every tower needs the whole of it.

    Args:
        name: what the user calls it.
        whole: what to write so that every tower gets the whole of it.
        place: the operation that needs the whole of it, and its line.
    """
    return Problem("table", name, place, TABLE.format(whole=whole))


def needed_whole(name: str, whole: str, place: str | None) -> Problem:
    """The problem that an argument is cut, and results are right if it is not; see `table`."""
    return Problem("table", name, place, WHOLE.format(whole=whole))


def summed(name: str, place: str | None, *, is_loss: bool) -> Problem:
    """The problem that a result is a sum over rows, and towers are averaged."""
    way_out = "say reduction='sum'" if is_loss else 'write jax.lax.psum(x, "towers") * 1.0 for x'
    return Problem("sum", name, place, SUM.format(way_out=way_out))


def summed_state(name: str, place: str | None, way_out: str) -> Problem:
    """The problem that a state for the next step adds up the rows of a tower."""
    return Problem("sum", name, place, SUMMED_STATE.format(way_out=way_out))


def held_in_state(name: str, place: str, way_out: str) -> Problem:
    """The problem that a state for the next step holds rows of a tower."""
    return Problem("mixed rows", name, place, HELD_IN_STATE.format(way_out=way_out))


def bent_state(name: str, place: str, way_out: str) -> Problem:
    """The problem that a state for the next step is made of a tower's sums, and is no mean."""
    return Problem("mixed rows", name, place, BENT_STATE.format(way_out=way_out))


def same_numbers(draws: Iterable[str]) -> list[Problem]:
    """The problem of equal random numbers in all towers, once for each place that draws some."""
    places = dict.fromkeys(draws)
    return [Problem("same numbers", "random numbers", place, SAME_NUMBERS) for place in places]


def backward(places: Iterable[str]) -> list[Problem]:
    """The problem that a backward rule brings rows together, once for all places."""
    return [Problem("gradient", "gradients", place, BACKWARD) for place in [*places][:1]]


def counting_rules(places: Iterable[str]) -> list[Problem]:
    """The problem that a backward rule counts rows, once for all places."""
    return [Problem("gradient", "gradients", place, COUNTING_RULE) for place in [*places][:1]]


def of_one_row(places: Iterable[tuple[str, str]]) -> list[Problem]:
    """The problem that functions of all rows are called on one row: their names, and where."""
    return [
        Problem("mixed rows", name, place, OF_ONE_ROW.format(name=name))
        for name, place in dict.fromkeys(places)
    ]


def unread(places: Iterable[str]) -> list[Problem]:
    """The problem that nothing is known of rows in a reference, once for all places."""
    return [Problem("mixed rows", "jax.new_ref", place, UNREAD) for place in [*places][:1]]
