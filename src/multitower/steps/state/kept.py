"""KeptState: a training state in the form in which a step keeps it, and what users see of it."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from multitower.errors import StateError
from multitower.steps.state.changes import Changes, Shown, in_every_tower, with_changes
from multitower.steps.state.fields import Fields, shapes_of
from multitower.towers.leaves import are_traced

_T = TypeVar("_T")


class KeptState:
    """What is behind a `TrainState`: its fields, or the parts that a step makes them of.

    A same-bits step works on one copy per device, with many small leaves in `bundles`. The arrays
    that span all devices, which a user sees, are made of those copies when the user reads them.
    With eight devices that costs the host 10 to 20 us per leaf; `step` is read without the others.

    Attributes:
        is_spent: whether a step has overwritten it.
        maker: the `Maker` of the step that takes this form; None if no step has made it.
        origin: the maker of the state that this one was made from: it knows the model.
        made_by: the programs of the maker that returned the parts; it reads them at the next step.
    """

    __slots__ = (
        "_apart",
        "_count",
        "_fields",
        "_join",
        "_join_shared",
        "_join_step",
        "_parts",
        "_shared",
        "_shown",
        "is_spent",
        "made_by",
        "maker",
        "origin",
    )

    def __init__(self, fields: Fields | None, maker: object = None, origin: object = None) -> None:
        self._fields = fields
        self._shared: Fields | None = None
        self._count: jax.Array | None = None
        self._parts: Any = None
        self._join: Callable[[Any], Fields] | None = None
        self._join_shared: Callable[[Any], Fields] | None = None
        self._join_step: Callable[[Any], jax.Array] | None = None
        self._apart: Collection[str] = ()
        self.is_spent = False
        self._shown: dict[str, Shown] = {}
        self.maker = maker
        self.origin = origin if maker is None else maker
        self.made_by: Any = None

    @classmethod
    def of_parts(
        cls,
        parts: Any,
        join: Callable[[Any], Fields],
        maker: object,
        *,
        join_shared: Callable[[Any], Fields] | None = None,
        join_step: Callable[[Any], jax.Array] | None = None,
        apart: Collection[str] = (),
    ) -> "KeptState":
        """A state in the form in which its maker keeps it, such as one copy per local device.

        Args:
            parts: the form that the maker's next step takes.
            join: makes Fields of the parts, for users and other steps.
            maker: the `Maker` of the step.
            join_shared: like `join`, but with None for fields that are expensive to join; None if
                no field is.
            join_step: makes the count of steps alone of the parts; None if that saves nothing.
            apart: the names of the fields that are expensive to join.
        """
        state = cls(None, maker)
        state._parts = parts
        state._join = join
        state._join_shared = join_shared
        state._join_step = join_step
        state._apart = apart
        return state

    def show(self, name: str) -> Any:
        """A field, for a user. Its leaves are remembered, so that a step finds what was changed."""
        if name == "step" and self._join_step is not None and self._fields is None:
            self._check_not_spent()
            if self._count is None:
                self._count = _joined(self._join_step, self._parts)
            return self._count  # an array, in which nobody can write
        value = getattr(self.fields() if name in self._apart else self.shared(), name)
        if name not in self._shown:
            self._shown[name] = Shown.of(value)
        return value

    def replaced(self, changes: Mapping[str, Any]) -> "KeptState":
        """A state of the same model with some fields replaced; see `TrainState.replace`."""
        new = self.contents(without=changes)._replace(**jax.tree.map(_array_of, dict(changes)))
        if "local" not in changes:
            new = in_every_tower(new, self._left())
        return KeptState(new, origin=self.origin)

    def fields(self) -> Fields:
        """The contents, as arrays that span all devices."""
        self._check_not_spent()
        if self._fields is None:
            assert self._join is not None
            joined = _joined(self._join, self._parts)
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
            self._shared = _joined(self._join_shared, self._parts)
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

    def spend(self) -> None:
        """Marks the state as overwritten."""
        self.is_spent = True

    def _check_not_spent(self) -> None:
        if self.is_spent:
            raise StateError(
                "this state was given to a step already, and the step has overwritten it. "
                "Continue with the state that the step returned: state, metrics = "
                "step(state, batch). To keep the old one, copy it first: "
                "jax.tree.map(jnp.copy, state)."
            )


def _joined(join: Callable[[Any], _T], parts: Any) -> _T:
    """What users see of the parts, also inside a user's `jax.jit`, whose trace it outlives."""
    if not are_traced(()):
        return join(parts)
    with jax.ensure_compile_time_eval():
        return join(parts)


def _array_of(leaf: Any) -> Any:
    """A Python number as the array that `init` would make of it."""
    is_number = isinstance(leaf, int | float | complex) and not hasattr(leaf, "dtype")
    return np.asarray(leaf, jax.dtypes.result_type(leaf)) if is_number else leaf
