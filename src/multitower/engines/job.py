"""A tower job: what every tower does, and what is done once with the sums over all towers.

`make_parallel`, `value_and_grad` and `train_step` are each one such job. Two engines run it:
`spmd` as one program over all devices (fast), `same_bits` as one-device programs (same bits).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from multitower.towers.rows import Tower


class Shared(NamedTuple):
    """What every tower gets whole.

    Attributes:
        state: what `finish` turns into its successor, () for nothing; its memory may be reused.
        rest: anything else; never overwritten.
    """

    state: Any
    rest: Any


class TowerResult(NamedTuple):
    """What one tower returns; each a pytree of arrays, () for nothing.

    Attributes:
        means: floats, summed over towers, then divided by the number of towers' worth of rows
            (rows / tower batch: the number of towers, if all of them are full). Gradients belong to
            `sums`: a tower differentiates its share of the mean over all rows, and shares add up.
        sums: summed over towers, without a division.
        rows: concatenated along axis 0, in the order of towers.
        blocks: arrays of shape (towers, n), summed over towers; row t of the sum is left on the
            device of tower t alone. Only `same_bits` runs these.
    """

    means: Any = ()
    sums: Any = ()
    rows: Any = ()
    blocks: Any = ()


@dataclass(frozen=True)
class Job:
    """One step's work in two functions of arrays.

    Attributes:
        tower: (shared, rows, tower) -> TowerResult, the same program for every tower.
        finish: (state, means, sums) -> any pytree, from the means and sums over all towers; every
            device gets the same result.
    """

    tower: Callable[[Shared, list[Any], Tower], TowerResult]
    finish: Callable[[Any, Any, Any], Any]
