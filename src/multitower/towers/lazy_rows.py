"""Lazy rows: a batch that knows how many rows it has, and reads only those that are needed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from multitower.errors import BatchError, whole_number


@dataclass(frozen=True, eq=False)
class LazyRows:
    """A batch of which each process reads only the rows of its own towers.

    `multitower.shard`, `multitower.prefetch` and `Trainer.fit` take it in place of arrays. With
    arrays, every process makes the whole batch.

    Args:
        num_rows: rows of the whole batch, 1 or more, the same in every process.
        read: `read(places)` returns the batch's rows at these places, as a pytree of arrays with
            rows on axis 0. `places` is an integer array, shape (rows,), of numbers from 0 to
            `num_rows - 1` in ascending order. If the batch does not fill the towers, the places
            begin again at 0, as often as needed, as padding. `multitower.prefetch` calls it in its
            thread.

    Raises:
        BatchError: no rows, or `read` is no function.

    Example:
        >>> import numpy as np
        >>> import multitower as mt
        >>> table = np.arange(100.0)  # or np.memmap, a database, a random-access data source
        >>> batch = mt.LazyRows(8, lambda places: {"x": table[40 + places]})
        >>> mt.shard(batch, devices=4)["x"].tolist()
        [40.0, 41.0, 42.0, 43.0, 44.0, 45.0, 46.0, 47.0]
    """

    num_rows: int
    read: Callable[[np.ndarray[Any, Any]], Any]

    def __post_init__(self) -> None:
        whole_number("num_rows", self.num_rows, 1, BatchError, ", the rows of LazyRows")
        if not callable(self.read):
            raise BatchError(
                f"LazyRows got {type(self.read).__name__} for read: pass a function that returns "
                'the rows at places, such as lambda places: {"x": table[places]}.'
            )
