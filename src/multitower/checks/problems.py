"""What can be wrong with a function that is to be cut into towers, in words."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from multitower.errors import OutputError

Kind = Literal["mixed rows", "sum", "row count", "same numbers", "not repeatable", "table"]


class Problem(NamedTuple):
    """Why a function cannot be cut into towers.

    Attributes:
        kind: in a word.
        output: which of its results, such as `output[0]['loss']`.
        where: the operation and the line that it comes from, if they were found.
        message: what is wrong, and what to do.
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
        problems: what was found.
        num_rows: rows of the examples that it was tried with.
    """

    problems: tuple[Problem, ...]
    num_rows: int

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        if self:
            return f"can be cut into towers (tried with {self.num_rows} rows)"
        lines = [f"{n}. {problem}" for n, problem in enumerate(self.problems, start=1)]
        return "\n".join(["cannot be cut into towers as it is:", *lines])

    def raise_if_wrong(self) -> None:
        """Raises what was found.

        Raises:
            OutputError: there are problems.
        """
        if not self:
            raise OutputError(f"the function {self}")


MIXED = (
    "rows are brought together and then used again, as in-batch negatives, batch statistics or a "
    "function of a batch's mean are. A tower has only its own rows, so the result would differ "
    "from one device's. Make each row's result depend on that row alone, and leave the mean over "
    "rows to multitower; or, if statistics of each tower's own rows are what you mean (BatchNorm), "
    "go on and fix the number of towers with towers=."
)


def table(name: str, whole: str, place: str | None) -> Problem:
    """An argument that is cut, and that every tower needs whole.

    Args:
        name: what the user calls it.
        whole: what to write so that every tower gets the whole of it.
        place: the operation that needs the whole of it, and its line.
    """
    return Problem("table", name, place, TABLE.format(whole=whole))


TABLE = (
    "it has as many entries as the batch has rows, so it is cut into towers, and the function "
    "looks things up in it like in a table. A tower has only a part of it, and JAX clamps an index "
    "that is too large. Give every tower the whole table: {whole}."
)
SUM = (
    "it is a sum over rows, and towers are averaged: with T towers it would be T times too small. "
    "Return one value per row, or the mean."
)
BAKED = (
    "the number of rows of the whole batch is written into it, and a tower has fewer rows. Divide "
    "by x.shape[0], or return one value per row."
)
ROW_COUNT = (
    "it works on {whole} rows and fails on {half}, which a tower would have: {error}. Take the "
    "number of rows from the argument, x.shape[0], not from a constant."
)
SHAPES = (
    "it has shape {whole} for all rows and {half} for half of them. Results by row need their rows "
    "on the first axis, exactly one for each row of the batch."
)
SAME_NUMBERS = (
    "they come from a key that every tower has alike, so all towers would draw the same ones, "
    "dropout masks for example. Pass a typed key, jax.random.key(...), as an argument of its own."
)
NOT_REPEATABLE = (
    "two calls with the same arguments differ: something in it changes from call to call, such as "
    "np.random or a counter. Pass what is random as an argument."
)
