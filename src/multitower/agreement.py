"""Agreement: one decision for all processes, made on the devices, read a step late.

A signal reaches one process, or all at different moments. If each one stopped by itself, the others
would wait for its gradients for ever. So every process votes after every step, and all of them read
the same result one step later: nothing waits for the vote.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from multitower.placement import Placement


class StopVote:
    """Whether to stop, and because of which signal.

    Args:
        caught: signals of this process; it may grow at any time.
        placement: where the steps run.
    """

    def __init__(self, caught: Sequence[int], placement: Placement) -> None:
        self._caught = caught
        self._placement = placement
        self._several = placement.spans_processes
        self._cast: jax.Array | None = None
        self._on_devices: dict[int, list[jax.Array]] = {}
        self._largest = jax.jit(jnp.max, out_shardings=placement.shared) if self._several else None

    def after_step(self) -> int | None:
        """The signal to stop for, the same in every process; to be called once after every step."""
        mine = self._caught[0] if self._caught else 0
        if self._largest is None:
            return mine or None
        before, self._cast = self._cast, self._largest(self._votes(mine))
        # host-device sync, but for a program that was started before this step
        return (int(before) or None) if before is not None else None

    def _votes(self, mine: int) -> jax.Array:
        """One vote a device."""
        if mine not in self._on_devices:
            here = [self._placement.devices[d] for d in self._placement.local]
            vote = np.array([mine], np.int32)
            self._on_devices[mine] = [jax.device_put(vote, one) for one in here]
        return jax.make_array_from_single_device_arrays(
            (len(self._placement.devices),), self._placement.split, self._on_devices[mine]
        )
