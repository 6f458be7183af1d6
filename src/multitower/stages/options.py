"""The options for a model in stages."""

from typing import Any, NamedTuple

from multitower.errors import ArgumentError
from multitower.hardware.configuration import warn_if_bits_depend_on_threads
from multitower.hardware.devices import DeviceSpec
from multitower.stages.layout import Layout, check_layout, lay_out
from multitower.towers.placement import find_all


class StageOptions(NamedTuple):
    """How a model is cut over devices.

    Attributes:
        num_stages: the number of stages.
        layout: (replicas, devices of each), or None to choose it.
        interleave: whether neighbouring stages are on different devices.
        remat: whether backward programs compute their stage's forward part again.
    """

    num_stages: int
    layout: tuple[int, int] | None
    interleave: bool = False
    remat: bool = True

    def on(self, devices: DeviceSpec | None, towers: int | None) -> Layout:
        """Puts the stages on devices.

        Raises:
            DeviceError: fewer devices or towers than the layout needs, or a replica that is not
                in one process.
        """
        found = find_all(devices)
        warn_if_bits_depend_on_threads(found)
        layout = lay_out(found, towers, self.num_stages, self.layout, interleave=self.interleave)
        layout.towers.check_all_take_part()
        return layout


def stage_options(
    stages: Any, layout: Any, interleave: Any = False, remat: Any = True
) -> StageOptions | None:
    """The options for stages; None for a model that is not cut.

    Raises:
        ArgumentError: a value is out of range or of the wrong kind, or `stages` is missing.
    """
    if stages is not None:
        return StageOptions(*check_layout(stages, layout), bool(interleave), bool(remat))
    if layout is not None or interleave:
        raise ArgumentError(
            "layout= and interleave= place the stages of a model on devices, and stages= is "
            "missing: say how many, such as stages=4, or leave them out."
        )
    if not remat:
        raise ArgumentError(
            "remat=False is for stages=, which compute their forward part again in the backward "
            "pass. Leave it out: without stages nothing is computed again, unless the loss says "
            "jax.checkpoint."
        )
    return None
