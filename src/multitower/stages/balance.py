"""Balance: divides a sequence of pieces of work into parts that are as equal as possible."""

import functools
import itertools
from collections.abc import Sequence


def equal_groups(work: Sequence[int], num_groups: int) -> list[int]:
    """Groups neighbouring pieces so that the largest group has as little work as possible.

    Args:
        work: the work of each piece, in their order.
        num_groups: the number of groups; none is empty.

    Returns:
        The number of the group of each piece.
    """
    sums = [0, *itertools.accumulate(work)]

    @functools.cache
    def best(first: int, groups: int) -> tuple[int, tuple[int, ...]]:
        """The work of the largest group of the pieces from `first` on, and where groups begin."""
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
    """Chooses where to cut a sequence of steps: equal shares of the work, few bytes across.

    Args:
        work: the work of each step.
        across: the bytes that would cross a cut, for each position; a position is the number of
            steps before it.
        num_parts: the number of parts; none is empty.

    Returns:
        The positions, in ascending order. Each is the one with the fewest bytes among those that
        are at most a quarter of a share away from where the shares would be equal; or else the
        nearest.
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
