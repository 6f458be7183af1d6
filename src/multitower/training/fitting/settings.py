"""The settings of a run that determine its bits, apart from its data and its first state."""

from collections.abc import Mapping
from typing import Any

import jax

from multitower.processes.together import are_several
from multitower.steps.local.options import default_outer_optimizer
from multitower.steps.precision import check_compute_dtype

_ALWAYS = (
    "towers",
    "global_batch",
    "ema_decay",
    "model_state_from",
    "clip_norm",
    "reduction",
)
# Of local updates over several processes, where the user says nothing.
MOST_STEPS_PER_CALL = 16
_ASYNCHRONOUS = ("updates", "max_staleness", "stale_scale", "momentum_correction")


def settings_that_decide(options: Mapping[str, Any], on_nonfinite: str) -> dict[str, Any]:
    """What is saved with checkpoints, and compared at a resume.

    Args:
        options: of the step, by the names of `train_step`'s arguments.
        on_nonfinite: as for `Trainer`.
    """
    narrow = check_compute_dtype(options["compute_dtype"])
    settings: dict[str, Any] = {
        **{name: options[name] for name in _ALWAYS},
        "on_nonfinite": on_nonfinite,
        "compute_dtype": None if narrow is None else str(narrow),
    }
    if options["stages"] is not None:
        settings |= {name: options[name] for name in ("stages", "remat")}
    if options["sync_every"] is not None:
        settings |= {name: options[name] for name in ("sync_every", "local_state")}
        settings["outer_optimizer"] = options["outer_optimizer"] or default_outer_optimizer()
    if options["updates"] != "synchronous":
        order = options["rotation"]
        settings |= {name: options[name] for name in _ASYNCHRONOUS}
        settings["rotation"] = None if order is None else list(order)  # as JSON has it
    return settings


def steps_per_call_of(said: int | None, sync_every: int | None) -> int | None:
    """How many updates a call makes at most.

    With local updates over several processes it is those from one meeting to the next, unless the
    user says otherwise: metrics are exchanged after a call, and a signal stops a run there. It is
    a few at most, as their batches lie on the devices together.
    """
    if said is not None or sync_every is None:
        return said
    # Asked first, as it leaves alone what `configure` may still set.
    is_joined = jax.distributed.is_initialized()
    return min(sync_every, MOST_STEPS_PER_CALL) if is_joined and are_several() else None
