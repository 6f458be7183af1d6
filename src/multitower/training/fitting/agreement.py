"""Agreement: all processes decide together whether to stop; the result is read a step late.

A signal may reach one process, or several at different moments. If one process stopped alone, the
others would wait for its gradients for ever. So all processes vote after the same steps, on the
devices, and read the result one step later, so that no step waits for it. The vote also decides
when to vote again, because the clocks of the processes differ.
"""

import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from multitower.processes.together import gathered
from multitower.towers.global_arrays import stacked
from multitower.towers.placement import Placement

# A signal takes effect within about twice this time, or within two calls.
VOTE_EVERY_S = 0.5
_MOST_STEPS = 1000


class StopVote:
    """Whether to stop, and because of which signal.

    Args:
        caught: the signals that this process received; it may grow at any time.
        placement: of the steps.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        caught: Sequence[int],
        placement: Placement,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._caught = caught
        self._placement = placement
        self._clock = clock
        self._cast: jax.Array | None = None
        self._cast_at = clock()
        self._interval = 1  # calls from the last vote to the next
        self._since = 0  # calls since the last vote
        self._largest = None
        if placement.spans_processes:
            self._largest = jax.jit(lambda votes: votes.max(0), out_shardings=placement.shared)

    def after_step(self) -> int | None:
        """The signal to stop for, the same in every process; call it once after every call."""
        mine = self._caught[0] if self._caught else 0
        if self._largest is None:
            return mine or None
        self._since += 1
        if self._cast is not None:
            # host-device sync, for a program that was started before this step
            signal, next_vote = (int(number) for number in np.asarray(self._cast))
            self._cast = None
            if signal:
                return signal
            self._interval = -next_vote
        if self._since >= self._interval:
            now = self._clock()
            step_s = (now - self._cast_at) / self._since
            steps = int(min(max(VOTE_EVERY_S / max(step_s, 1e-9), 1), _MOST_STEPS))
            # The largest of each: any signal, and the fewest steps that a process asks for.
            self._cast = self._largest(self._votes([mine, -steps]))
            self._cast_at, self._since = now, 0
        return None

    def at_end(self) -> int | None:
        """As `after_step`, after the last step; waits for all processes."""
        mine = self._caught[0] if self._caught else 0
        if self._largest is None:
            return mine or None
        return int(gathered(np.int32(mine)).max()) or None

    def _votes(self, mine: list[int]) -> jax.Array:
        """The vote of this process on each of its devices."""
        vote = np.array([mine], np.int32)
        here = [self._placement.devices[d] for d in self._placement.local]
        return stacked([jax.device_put(vote, one) for one in here], self._placement)
