"""What a user says of shards, and what shards do not go together with."""

from typing import Any, NamedTuple

from multitower.errors import ArgumentError


class ShardOptions(NamedTuple):
    """What is split over the devices beside the optimizer's state and the moving average.

    Attributes:
        params: the parameters too.
    """

    params: bool


def check_shards(
    shard_update: bool,
    shard_params: bool,
    towers: int | None,
    stages: Any,
    skip_nonfinite: bool,
) -> ShardOptions | None:
    """What a user says of shards; None for a state that is not split, or split by towers.

    Raises:
        ArgumentError: options exclude each other.
    """
    if shard_params and (towers is not None or stages is not None):
        given = f"towers={towers}" if stages is None else f"stages={stages}"
        raise ArgumentError(
            f"shard_params=True and {given} exclude each other: the order of sums over parts "
            "depends on the number of devices, and with towers= the bits must not. Leave "
            f"{given.partition('=')[0]} out; or keep it, leave shard_params out, and cut the model "
            "with stages= or split the optimizer state with shard_update=True."
        )
    if shard_update and towers is not None and skip_nonfinite:
        raise ArgumentError(
            "shard_update=True with towers= cannot take back a block's update, as skip_nonfinite "
            "would: leave skip_nonfinite out, or towers."
        )
    if towers is None and stages is None and (shard_params or shard_update):
        return ShardOptions(shard_params)
    return None
