"""TrainState: everything that one update changes, as arrays on all devices."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from multitower.errors import ArgumentError, StateError, did_you_mean, listed
from multitower.steps.state.fields import Fields
from multitower.steps.state.kept import KeptState
from multitower.towers.refusals import is_state_of_linen, refuse_keras_model


def check_is_state(
    state: Any, call: str, remedy: str = "make one with state = step.init(params)"
) -> None:
    """Refuses a value that is not a training state, such as parameters.

    Args:
        state: what a user passed.
        call: the call that it was passed to, for the message.
        remedy: what to do instead, for the message.

    Raises:
        StateError: it is not a `TrainState`.
    """
    if isinstance(state, TrainState):
        return
    if isinstance(state, tuple) and any(isinstance(part, TrainState) for part in state):
        raise StateError(
            f"{call} got the pair that a step returns: write state, metrics = step(state, batch)."
        )
    raise StateError(f"{call} got {type(state).__name__} as state: {remedy}.")


def refuse_a_state(params: Any) -> None:
    """Refuses a training state, or a model that holds one, where parameters are expected.

    Raises:
        ArgumentError: a `TrainState` of multitower or of Flax Linen, or a Keras model.
    """
    if isinstance(params, TrainState):
        raise ArgumentError(
            "params is a TrainState: pass the parameters or the module inside it, "
            "step.model(state)."
        )
    if is_state_of_linen(params):
        raise ArgumentError(
            f"params is a {type(params).__name__}, which holds an optimizer and its state, as a "
            "training state of multitower does. Pass state.params, and the optimizer, state.tx, to "
            "train_step."
        )
    refuse_keras_model(params, lambda: "params")


class TrainState:
    """The training state, a pytree made by `TrainStep.init`.

    Its arrays are whole on every device. With `shard_update` or `shard_params` large arrays are
    split over the devices, and you see each as one array. With `stages` each array is on the
    devices of its stage. With `updates="asynchronous"` all are on the first device.

    A step overwrites the state that you pass, so continue with the state that it returns. To keep
    an older state, copy it: `jax.tree.map(jnp.copy, state)`. You may change values before a step,
    as in `state.opt_state.hyperparams["learning_rate"] = 0.01`, but not shapes or the tree.

    Attributes:
        step: number of updates made, int32, shape ().
        params: the parameters, or the weights of a module (see `TrainStep.model`).
        opt_state: the optimizer's state.
        ema_params: the moving average of the parameters, or None; 16-bit floats are kept in
            float32, where small changes are not rounded away.
        model_state: arrays that the model changes without training them, such as BatchNorm
            statistics; or None.
        rng: the PRNG key from which the keys of all steps and towers are made, or None.
        local: with `sync_every`, what every tower keeps of its own between two meetings: arrays
            with a first axis for towers. With `updates="asynchronous"`, a dict of the versions of
            the groups, with a first axis for groups: `"params"`, `"model_state"`, and `"step"`,
            int32, the number of updates after which each version was made. Else None.
        loss_scale: with `compute_dtype=jnp.float16`, a dict of `"scale"`, float32, which multiplies
            the loss of the next step, and `"good_steps"`, int32, the steps with finite gradients
            since the scale last grew or gradients last overflowed. Else None.

    Raises:
        StateError: on reading a state that a step has overwritten.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import multitower as mt
        >>> step = mt.train_step(lambda w, x: (w - x) ** 2, optax.sgd(0.1), devices=2)
        >>> state = step.init(jnp.float32(0.0))
        >>> int(state.step), float(state.params)
        (0, 0.0)
        >>> float(state.replace(params=jnp.float32(2.0)).params)
        2.0
    """

    __slots__ = ("kept",)

    def __init__(self, kept: KeptState) -> None:
        self.kept = kept  # for multitower alone: what it keeps may change

    @property
    def step(self) -> jax.Array:
        """Number of updates made, int32, shape ()."""
        return self.kept.show("step")

    @property
    def params(self) -> Any:
        """The parameters."""
        return self.kept.show("params")

    @property
    def opt_state(self) -> Any:
        """The optimizer's state."""
        return self.kept.show("opt_state")

    @property
    def ema_params(self) -> Any:
        """The moving average of the parameters, or None."""
        return self.kept.show("ema_params")

    @property
    def model_state(self) -> Any:
        """The model state that the loss returned, or None."""
        return self.kept.show("model_state")

    @property
    def rng(self) -> Any:
        """The PRNG key of the whole run, or None."""
        return self.kept.show("rng")

    @property
    def local(self) -> Any:
        """What every tower or group keeps of its own, with a first axis for them; or None."""
        return self.kept.show("local")

    @property
    def loss_scale(self) -> Any:
        """A dict of the scale that multiplies the loss and of its good steps, or None."""
        return self.kept.show("loss_scale")

    def replace(self, **changes: Any) -> "TrainState":
        """Returns a state with some attributes replaced, like `dataclasses.replace`.

        With `sync_every`, every tower gets new parameters and a new model state, too.

        Args:
            **changes: new values, by name of the attribute.

        Returns:
            A state of the same model, for the step of this one.

        Raises:
            ArgumentError: there is no such attribute.
            StateError: a step has overwritten this state.
        """
        for name in changes:
            if name not in Fields._fields:
                raise ArgumentError(
                    f"state.replace({name}=...): a TrainState has no attribute {name!r}. "
                    f"{did_you_mean(name, Fields._fields)}There are: {listed(Fields._fields)}."
                )
        return TrainState(self.kept.replaced(changes))

    def block_until_ready(self) -> "TrainState":
        """Waits until the state has been computed, and returns it, like `jax.Array`'s method.

        It copies nothing. With `shard_update`, `jax.block_until_ready(state)` would first put the
        optimizer state and the average together on every device.

        Raises:
            StateError: a step has overwritten this state.
        """
        jax.block_until_ready(self.kept.parts() or self.kept.fields())  # host-device sync
        return self

    def __reduce__(self) -> tuple[Callable[[Fields], "TrainState"], tuple[Fields]]:
        """For `pickle`: copies the values to the host."""
        return state_of, (jax.device_get(self.kept.contents()),)

    def __copy__(self) -> "TrainState":
        """A state of the same model with the values copied to the host."""
        return state_of(jax.device_get(self.kept.contents()), self.kept.origin)

    def __deepcopy__(self, _: Any) -> "TrainState":
        """As `copy.copy`."""
        return self.__copy__()

    def __repr__(self) -> str:
        if self.kept.is_spent:
            return "TrainState(overwritten)"
        fields = self.kept.fields()
        rest = [
            f"{name}={_summary(tree)}" for name, tree in fields._asdict().items() if name != "step"
        ]
        return f"TrainState(step={fields.step}, {', '.join(rest)})"


def state_of(fields: Fields, origin: object = None) -> TrainState:
    """A state that no step has made: of its fields, and of the model that `origin` knows."""
    return TrainState(KeptState(fields, origin=origin))


def _flatten(state: TrainState) -> tuple[list[tuple[Any, Any]], None]:
    fields = state.kept.contents()._asdict()
    return [(jax.tree_util.GetAttrKey(name), value) for name, value in fields.items()], None


jax.tree_util.register_pytree_with_keys(
    TrainState, _flatten, lambda _, children: state_of(Fields(*children))
)


def _summary(tree: Any) -> str:
    leaves = jax.tree.leaves(tree)
    if not leaves:
        return "None" if tree is None else "no arrays"
    arrays = "1 array" if len(leaves) == 1 else f"{len(leaves)} arrays"
    return f"<{arrays}, {sum(map(np.size, leaves)):,} elements>"
