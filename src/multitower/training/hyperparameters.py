"""Hyperparameters that were edited before a resume, where the optimizer keeps them in its state.

`optax.inject_hyperparams` keeps a learning rate in the state, which a checkpoint holds. A resume
that may change it would go on with the old one.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multitower.steps.optimizing.optimizer import holders
from multitower.steps.state.train_state import TrainState


def first_values(optimizer: Any, shapes: Any, name: str) -> dict[str, Any]:
    """The hyperparameters in an optimizer's first state, as JSON values.

    Args:
        optimizer: an optax optimizer.
        shapes: the shapes and dtypes of the parameters.
        name: what the optimizer is called in the settings of a run.

    Returns:
        By its place in the state, such as `optimizer.hyperparams['learning_rate']`, each number, or
        list of numbers; None in place of NaN, which equals nothing.
    """
    if not any(holders(jax.eval_shape(optimizer.init, shapes))):
        return {}

    def first() -> dict[str, Any]:
        zeros = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes)
        places = _places(optimizer.init(zeros), name)
        return {place: holder.hyperparams[key] for place, holder, key in places}

    # Nothing else is computed: what a compiled program does not return, it leaves out.
    return {place: _for_json(value) for place, value in jax.jit(first)().items()}


def use_edited(
    state: TrainState, new: TrainState, saved: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    """Writes the hyperparameters that were edited into the state of a checkpoint.

    Schedules are not written: the optimizer computes them from its count. What the run began with
    and begins with now keeps the checkpoint's value, which a loop of the user's own may have
    changed.

    Args:
        state: the state of the checkpoint; it is changed.
        new: a new state of this run.
        saved: the settings of the checkpoint's run, with its `first_values`.
        now: those of this run.
    """
    edited = {name for name, value in now.items() if name not in saved or saved[name] != value}
    if hasattr(new.local, "opt_state"):  # local updates: every tower has its own
        _use(state.local.opt_state, new.local.opt_state, "optimizer", edited)
        _use(state.opt_state, new.opt_state, "outer_optimizer", edited)
    else:
        _use(state.opt_state, new.opt_state, "optimizer", edited)


def _use(before: Any, after: Any, optimizer: str, edited: set[str]) -> None:
    pairs = zip(_places(before, optimizer), _places(after, optimizer), strict=True)
    for (_, old, _), (place, fresh, name) in pairs:
        if place in edited:
            old.hyperparams[name] = fresh.hyperparams[name]


def _places(opt_state: Any, optimizer: str) -> Iterator[tuple[str, Any, str]]:
    """Every hyperparameter but schedules: its place, what holds it, and its name."""
    for where, holder in holders(opt_state, optimizer):
        for name in holder.hyperparams:
            if name not in getattr(holder, "hyperparams_states", ()):
                yield f"{where}.hyperparams[{name!r}]", holder, name


def _for_json(value: Any) -> Any:
    numbers = np.asarray(value)
    if numbers.dtype.kind not in "biu":  # 0.1, and not all digits of the float32 nearest to it
        numbers = np.array([float(str(x)) for x in numbers.ravel()]).reshape(numbers.shape)
    return np.where(np.isnan(numbers), np.array(None), numbers).tolist()
