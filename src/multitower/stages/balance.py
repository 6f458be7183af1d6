"""Balance: a row of pieces of work cut into parts that are as equal as can be."""

import functools
import itertools
from collections.abc import Sequence


def equal_groups(work: Sequence[int], num_groups: int) -> list[int]:
    """Puts neighbours into groups so that the largest group has as little work as can be.

    Args:
        work: of each piece, in their order.
        num_groups: how many; none is empty.

    Returns:
        For each piece its group.
    """
    sums = [0, *itertools.accumulate(work)]

    @functools.cache
    def best(first: int, groups: int) -> tuple[int, tuple[int, ...]]:
        """The largest group of pieces `first ...`, and where the groups begin."""
        if groups == 1:
            return sums[-1] - sums[first], (first,)
        found: list[tuple[int, tuple[int, ...]]] = []
        for end in range(first + 1, len(work) - groups + 2):
            rest, starts = best(end, groups - 1)
            found.append((max(sums[end] - sums[first], rest), (first, *starts)))
        return min(found)

    _, starts = best(0, num_groups)
    return [sum(start <= piece for start in starts) - 1 for piece in range(len(work))]


def equal_positions(work: Sequence[int], across: Sequence[int], num_parts: int) -> list[int]:
    """Chooses where to cut a row of steps: equal shares of the work, few bytes across.

    Args:
        work: of each step.
        across: for each position, the number of steps before it, the bytes that would cross there.
        num_parts: how many; none is empty.

    Returns:
        The positions, in ascending order; for each share the one with the fewest bytes that is at
        most a quarter of a share away from where the shares would be equal, or else the nearest.
    """
    sums = [0, *itertools.accumulate(work)]
    share = sums[-1] / num_parts
    positions: list[int] = []
    for part in range(1, num_parts):
        first = positions[-1] + 1 if positions else 1
        allowed = range(first, len(work) - (num_parts - part) + 1)
        target = part * share
        distance = {position: abs(sums[position] - target) for position in allowed}
        near = [position for position in allowed if distance[position] <= share / 4]
        if near:
            positions.append(min(near, key=lambda at: (across[at], distance[at], at)))
        else:
            positions.append(min(allowed, key=lambda at: (distance[at], across[at], at)))
    return positions
