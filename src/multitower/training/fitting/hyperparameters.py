"""Hyperparameters that were edited before a resume, where the optimizer keeps them in its state.

`optax.inject_hyperparams` keeps a learning rate in the state, which a checkpoint holds. A resume
that may change it would go on with the old one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from multitower.processes.together import whole_on_host
from multitower.steps.optimizing.optimizer import holders
from multitower.steps.state.train_state import TrainState


def use_edited(state: TrainState, new: TrainState, edited: Callable[[str], list[float]]) -> None:
    """Writes the hyperparameters that were edited into the state of a checkpoint.

    Schedules are not written: the optimizer computes them from its count. Other numbers keep the
    checkpoint's value, which a loop of the user's own may have changed.

    Args:
        state: the state of the checkpoint; it is changed.
        new: a new state of this run.
        edited: for an optimizer by its name, the sizes of the numbers that only a new state of this
            run has.
    """
    if hasattr(new.local, "opt_state"):  # local updates: every tower has its own
        _use(state.local.opt_state, new.local.opt_state, edited("optimizer"))
        _use(state.opt_state, new.opt_state, edited("outer_optimizer"))
    else:
        _use(state.opt_state, new.opt_state, edited("optimizer"))


def _use(before: Any, after: Any, edited: list[float]) -> None:
    if not edited:
        return
    for old, fresh in zip(holders(before), holders(after), strict=True):
        for name, value in fresh.hyperparams.items():
            is_schedule = name in getattr(fresh, "hyperparams_states", ())
            if not is_schedule and _is_one_of(value, edited):
                old.hyperparams[name] = value


def _is_one_of(value: Any, numbers: Sequence[float]) -> bool:
    """Whether a number, or one for each tower, has one of these sizes."""
    sizes = np.abs(whole_on_host(value)).astype(np.float32).ravel()
    return bool(np.isclose(sizes[:1], np.asarray(numbers, np.float32)).any())
