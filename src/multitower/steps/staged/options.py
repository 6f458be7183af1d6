"""The options for stages in a training step, and the options that exclude them."""

from typing import Any

from multitower.errors import ArgumentError
from multitower.stages.options import StageOptions, stage_options


def check_stages(
    stages: Any,
    layout: Any,
    interleave: Any,
    remat: Any,
    *,
    towers: int | None,
    shard_update: bool,
) -> StageOptions | None:
    """The options for stages; None for a model that is not cut.

    Raises:
        ArgumentError: a value is out of range or of the wrong kind, or options exclude each other.
    """
    options = stage_options(stages, layout, interleave, remat)
    if options is None:
        return None
    if towers is None:
        raise ArgumentError(
            f"stages={stages} needs towers=, the microbatches that pass through the stages: say "
            f"how many, such as towers={max(8, 2 * stages)}."
        )
    if shard_update:
        raise ArgumentError(
            "stages= and shard_update=True exclude each other: with stages, every device keeps the "
            "optimizer state of its own stages alone. Leave shard_update out."
        )
    return options
