"""Same data: of several processes, all score the same rows together."""

from typing import Any

from multitower.towers.placement import place
from multitower.towers.same_call import check_alike
from multitower.training.scoring.chunks import num_rows_of_all


def check_same_data(call: str, data: Any, global_batch: int, devices: Any, towers: Any) -> None:
    """Compares the numbers of rows; call it on every process.

    A process with more rows than another one would wait for it for ever.

    Args:
        call: the name of the function that scores.
        data: as for `chunks`. How many batches an iterator has is not known.
        global_batch: as for `chunks`.
        devices: as for `multitower.devices`.
        towers: the number of towers, or None.

    Raises:
        ArgumentError: in every process, if they have different numbers of rows.
        BatchError: arrays with different numbers of rows.
    """
    placement = place(devices, towers)
    if placement.spans_processes:
        settings = {"global_batch": str(global_batch), "the number of rows": num_rows_of_all(data)}
        advice = "Each of them passes all rows, not a part of them."
        check_alike(call, settings, placement, advice)
