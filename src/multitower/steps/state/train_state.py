"""TrainState: everything that one update changes, as arrays on all devices."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np

from multitower.errors import ArgumentError, StateError
from multitower.steps.state.changes import Changes, Shown, in_every_tower, with_changes
from multitower.steps.state.fields import Fields, shapes_of
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


@jax.tree_util.register_pytree_with_keys_class
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
    """

    # A same-bits step works on one copy per device, with many small leaves in `bundles`. The arrays
    # that span all devices, which a user sees, are made of those copies when the user reads them:
    # that costs the host 8 us per leaf.
    __slots__ = (
        "_apart",
        "_fields",
        "_join",
        "_join_shared",
        "_parts",
        "_shared",
        "_shown",
        "_spent",
        "made_by",
        "maker",
        "origin",
    )

    def __init__(self, fields: Fields | None, maker: object = None, origin: object = None) -> None:
        self._fields = fields
        self._shared: Fields | None = None
        self._parts: Any = None
        self._join: Callable[[Any], Fields] | None = None
        self._join_shared: Callable[[Any], Fields] | None = None
        self._apart: Collection[str] = ()
        self._spent = False
        self._shown: dict[str, Shown] = {}
        self.maker = maker
        # The maker of the state that this one was made from: it knows the model.
        self.origin = origin if maker is None else maker
        # The programs of the maker that returned the parts; it reads them at the next step.
        self.made_by: Any = None

    @classmethod
    def of_parts(
        cls,
        parts: Any,
        join: Callable[[Any], Fields],
        maker: object,
        *,
        join_shared: Callable[[Any], Fields] | None = None,
        apart: Collection[str] = (),
    ) -> "TrainState":
        """A state in the form in which its maker keeps it, such as one copy per local device.

        Args:
            parts: the form that the maker's next step takes.
            join: makes Fields of the parts, for users and other steps.
            maker: the `Maker` of the step.
            join_shared: like `join`, but with None for fields that are expensive to join; None if
                no field is.
            apart: the names of the fields that are expensive to join.
        """
        state = cls(None, maker)
        state._parts = parts
        state._join = join
        state._join_shared = join_shared
        state._apart = apart
        return state

    @property
    def step(self) -> jax.Array:
        """Number of updates made, int32, shape ()."""
        return self._show("step")

    @property
    def params(self) -> Any:
        """The parameters."""
        return self._show("params")

    @property
    def opt_state(self) -> Any:
        """The optimizer's state."""
        return self._show("opt_state")

    @property
    def ema_params(self) -> Any:
        """The moving average of the parameters, or None."""
        return self._show("ema_params")

    @property
    def model_state(self) -> Any:
        """The model state that the loss returned, or None."""
        return self._show("model_state")

    @property
    def rng(self) -> Any:
        """The PRNG key of the whole run, or None."""
        return self._show("rng")

    @property
    def local(self) -> Any:
        """What every tower or group keeps of its own, with a first axis for them; or None."""
        return self._show("local")

    @property
    def loss_scale(self) -> Any:
        """A dict of the scale that multiplies the loss and of its good steps, or None."""
        return self._show("loss_scale")

    def replace(self, **changes: Any) -> "TrainState":
        """Returns a state with some attributes replaced, like `dataclasses.replace`.

        With `sync_every`, every tower gets new parameters and a new model state, too.
        """
        new = self.contents(without=changes)._replace(**jax.tree.map(_array_of, changes))
        if "local" not in changes:
            new = in_every_tower(new, self._left())
        return TrainState(new, origin=self.origin)

    def block_until_ready(self) -> "TrainState":
        """Waits until the state has been computed, and returns it, like `jax.Array`'s method.

        It copies nothing. With `shard_update`, `jax.block_until_ready(state)` would first put the
        optimizer state and the average together on every device.
        """
        jax.block_until_ready(self.parts() or self.fields())  # host-device sync
        return self

    def fields(self) -> Fields:
        """The contents, as arrays that span all devices."""
        self._check_not_spent()
        if self._fields is None:
            assert self._join is not None
            joined = self._join(self._parts)
            if self._shared is not None:  # a user has read, and perhaps changed, these
                seen = self._shared._asdict()
                joined = joined._replace(**{n: v for n, v in seen.items() if v is not None})
            self._fields = joined
        return self._fields

    def contents(self, *, without: Collection[str] = ()) -> Fields:
        """The fields with what a user has written into them as the next step would take it.

        Args:
            without: names of fields that the caller replaces.

        Raises:
            StateError: a new value does not fit the old one.
        """
        fields, changes = self.fields(), dict(self.changes(without=without))
        if not changes:
            return fields
        own = {"local": changes.pop("local", {})}
        fields = in_every_tower(with_changes(fields, changes), self._left())
        return with_changes(fields, own) if own["local"] else fields

    def _left(self) -> dict[str, Shown]:
        """What towers may have of their own, as the step left it."""
        fields = self.fields()
        names = ("params", "model_state")
        return {name: self._shown.get(name) or Shown.of(getattr(fields, name)) for name in names}

    def shared(self) -> Fields:
        """The contents, with None for fields kept apart, such as optimizer state in blocks.

        It copies nothing, and sends nothing between devices or processes.
        """
        if self._fields is not None or self._join_shared is None:
            return self.fields()
        self._check_not_spent()
        if self._shared is None:
            self._shared = self._join_shared(self._parts)
        return self._shared

    def shapes(self) -> Fields:
        """Shapes and dtypes of the contents; arrays that are not made yet are not made for it."""
        self._check_not_spent()
        if self._fields is None and hasattr(self._parts, "shapes"):
            return self._parts.shapes()
        return shapes_of(self.fields())

    def params_shapes(self) -> Any:
        """Shapes and dtypes of the parameters; no other field is joined or made for it."""
        self._check_not_spent()
        if self._fields is None and hasattr(self._parts, "shapes"):
            return self._parts.shapes().params
        written = {"params": self.changes().get("params", {})}
        return shapes_of(with_changes(self.shared(), written).params)

    def parts(self) -> Any:
        """The parts that `of_parts` was given; None for a state made from Fields."""
        self._check_not_spent()
        return self._parts

    def changes(self, *, without: Collection[str] = ()) -> Changes:
        """The leaves that a user has written into the attributes, by name and number.

        Args:
            without: names of attributes that the caller replaces.

        Raises:
            StateError: a new value does not fit the old one.
        """
        fields = self._fields or self._shared
        found = {
            name: shown.changed_leaves(getattr(fields, name), name)
            for name, shown in self._shown.items()
            if name not in without
        }
        return {name: leaves for name, leaves in found.items() if leaves}

    def _show(self, name: str) -> Any:
        """An attribute. Its leaves are remembered, so that a step finds what the user changes."""
        value = getattr(self.fields() if name in self._apart else self.shared(), name)
        if name not in self._shown:
            self._shown[name] = Shown.of(value)
        return value

    def spend(self) -> None:
        """Marks the state as overwritten."""
        self._spent = True

    def _check_not_spent(self) -> None:
        if self._spent:
            raise StateError(
                "this state was given to a step already, and the step has overwritten it. "
                "Continue with the state that the step returned: state, metrics = "
                "step(state, batch). To keep the old one, copy it first: "
                "jax.tree.map(jnp.copy, state)."
            )

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], None]:
        """For JAX's pytrees."""
        fields = self.contents()
        return [
            (jax.tree_util.GetAttrKey(name), value)
            for name, value in zip(Fields._fields, fields, strict=True)
        ], None

    @classmethod
    def tree_unflatten(cls, _: None, children: Sequence[Any]) -> "TrainState":
        """For JAX's pytrees."""
        return cls(Fields(*children))

    def __reduce__(self) -> tuple[type["TrainState"], tuple[Fields]]:
        """For `pickle`: copies the values to the host."""
        return TrainState, (jax.device_get(self.contents()),)

    def __copy__(self) -> "TrainState":
        """A state of the same model with the values copied to the host."""
        return TrainState(jax.device_get(self.contents()), origin=self.origin)

    def __deepcopy__(self, _: Any) -> "TrainState":
        """As `copy.copy`."""
        return self.__copy__()

    def __repr__(self) -> str:
        if self._spent:
            return "TrainState(overwritten)"
        fields = self.fields()
        rest = [
            f"{name}={_summary(tree)}" for name, tree in fields._asdict().items() if name != "step"
        ]
        return f"TrainState(step={fields.step}, {', '.join(rest)})"


def _array_of(leaf: Any) -> Any:
    """A Python number as the array that `init` would make of it."""
    is_number = isinstance(leaf, int | float | complex) and not hasattr(leaf, "dtype")
    return np.asarray(leaf, jax.dtypes.result_type(leaf)) if is_number else leaf


def _summary(tree: Any) -> str:
    leaves = jax.tree.leaves(tree)
    if not leaves:
        return "None" if tree is None else "no arrays"
    arrays = "1 array" if len(leaves) == 1 else f"{len(leaves)} arrays"
    return f"<{arrays}, {sum(map(np.size, leaves)):,} elements>"
