"""Models among the arguments of a function: taken apart into arrays and the rest, and back.

An NNX or Equinox module is not a pytree of arrays alone. Before a call each module is replaced by a
`Hole`, and its arrays are passed beside the arguments. Inside a tower it is put together again.
Whether a framework is in use is read from `sys.modules`: nothing is imported.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from multitower.errors import ArgumentError, OutputError
from multitower.models.closures import Contents, close_function
from multitower.models.equinox import equinox_in_evaluation_mode, is_equinox, take_equinox
from multitower.models.nnx import is_nnx, nnx_in_evaluation_mode, take_nnx, variables_of
from multitower.models.state import Changed, enter, join, sort_changes
from multitower.towers.rows import Tower
from multitower.towers.surroundings import inside_a_tower

_FRAMEWORKS = ("flax.nnx", "equinox")


class HowBuilt(Protocol):
    """How one framework's module is put together; hashable."""

    @property
    def changes_in_place(self) -> bool:
        """Whether a call changes the module's own state."""
        ...

    def build(self, weights: Any, fixed: Any, state: Any) -> Any:
        """Makes a module of these arrays."""
        ...

    def parameters_of(self, module: Any) -> Any:
        """The weights of a module and its other arrays that stay as they are."""
        ...

    def state_after(self, module: Any, state: Any) -> Any:
        """The state of a module after a call that began with `state`."""
        ...

    def write(self, module: Any, state: Any) -> None:
        """Puts a new state into the user's module."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Model:
    """A module, taken apart.

    Attributes:
        weights: its floats that are differentiated, in the form of the framework's gradients.
        fixed: arrays that stay as they are.
        state: arrays that a call may change.
        how: how to put it together.
        name: the name of the module's class.
    """

    weights: Any
    fixed: Any
    state: Any
    how: HowBuilt = field(metadata={"static": True})
    name: str = field(metadata={"static": True})

    def build(self) -> Any:
        """Puts the module together."""
        return self.how.build(self.weights, self.fixed, self.state)

    def in_tower(self, here: Tower) -> "Model":
        """The model as one tower gets it: each tower has its own keys."""
        own = lambda tree: jax.tree.map(lambda leaf: enter(leaf, here), tree)
        return replace(self, fixed=own(self.fixed), state=own(self.state))

    def state_after(self, module: Any) -> Any:
        """The state of a module that `build` made and that was then called.

        Raises:
            OutputError: the call changed something that cannot be combined over towers.
        """
        after = self.how.state_after(module, self.state)
        if self.how.changes_in_place:
            from multitower.models.writes import note_writes  # noqa: PLC0415 (importing stays quick)

            now = self.how.parameters_of(module)
            note_writes(self.name, (self.weights, self.fixed), now)
        after = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), after)
        before, _ = jax.tree_util.tree_flatten_with_path(self.state)
        for (path, old), new in zip(before, jax.tree.leaves(after), strict=True):
            if old.shape != new.shape or old.dtype != new.dtype:
                raise OutputError(
                    f"the model's {jax.tree_util.keystr(path)} is {old.dtype}{list(old.shape)} "
                    f"before the call and {new.dtype}{list(new.shape)} after it: model state must "
                    "keep its shape and dtype. If only this call needs the new one, as a cache for "
                    "decoding, let the function begin with a copy, model = nnx.clone(model)."
                )
        return after


@jax.tree_util.register_static
@dataclass(frozen=True)
class Hole:
    """Where a module stood among the arguments."""

    number: int


class Call(NamedTuple):
    """The arguments of a call, with a hole for each module.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
        rows: what the function closes over and is to be cut, by name.
        models: the modules, taken apart: those of the holes in their order, then those that the
            function closes over.
        arrays: arrays that the function closes over.
        modules: the user's own modules.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: Mapping[str, Any]
    models: Sequence[Model] = ()
    arrays: Sequence[Any] = ()
    modules: Sequence[Any] = ()

    def hand_on(self, changed: Sequence[Changed]) -> None:
        """Writes into the user's modules what the call has changed."""
        # If nothing has changed, `changed` may be empty.
        for module, model, changes in zip(self.modules, self.models, changed, strict=False):
            if changes.averaged or changes.first:
                model.how.write(module, join(model.state, changes))


def is_model(value: Any) -> bool:
    """Whether a value is a module of Flax NNX or Equinox."""
    return is_nnx(value) or is_equinox(value)


def in_evaluation_mode(tree: Any) -> Any:
    """The tree with a copy in evaluation mode in place of every module.

    This is the mode of `model.eval()` (NNX) and `eqx.nn.inference_mode` (Equinox): dropout is off,
    and BatchNorm uses its moving averages. Everything else in the tree is unchanged.
    """

    def copied(value: Any) -> Any:
        if is_nnx(value):
            return nnx_in_evaluation_mode(value)
        return equinox_in_evaluation_mode(value) if is_equinox(value) else value

    return jax.tree.map(copied, tree, is_leaf=is_model)


def take_model(module: Any, wanted: Any = None) -> Model:
    """Takes a module apart.

    Args:
        module: a value for which `is_model` is true.
        wanted: an NNX filter for the Variables to differentiate; by default `nnx.Param`.
    """
    taken = take_nnx(module, wanted) if is_nnx(module) else take_equinox(module)
    how, weights, fixed, state = taken
    return Model(weights, fixed, state, how, type(module).__name__)


def refuse_modules_inside(params: Any) -> None:
    """Refuses modules inside of a tree of parameters if they have more than weights.

    Raises:
        ArgumentError: a module has more; the message names it.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_model)
    for path, value in flat:
        if is_nnx(value):
            others: Any = take_model(value).state
            what, whole = "Variables that are no nnx.Param", "nnx.Dict(...) or nnx.List(...)"
        elif is_equinox(value):
            others = [leaf for leaf in jax.tree.leaves(value) if not _is_float(leaf)]
            what, whole = "arrays or functions that are not trained", "an eqx.Module of yours"
        else:
            continue
        if jax.tree.leaves(others):
            raise ArgumentError(
                f"params{jax.tree_util.keystr(path)} is a {type(value).__name__} with {what}, "
                f"inside of a {type(params).__name__}. Pass one module that holds all of them, "
                f"such as {whole}."
            )


def take_call(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    closed: Contents,
    wanted: Mapping[int, Any] | None = None,
) -> Call:
    """Takes the modules out of a call's arguments.

    Args:
        args: positional arguments, pytrees with modules in any place.
        kwargs: keyword arguments.
        closed: what the function closes over.
        wanted: NNX filters for the Variables to differentiate, by the argument's position.

    Raises:
        ArgumentError: two NNX modules share a Variable.
    """
    if not any(name in sys.modules for name in _FRAMEWORKS):
        return Call(args, kwargs, closed.rows, (), closed.arrays)  # the quick way for plain pytrees
    modules: list[Any] = []
    models: list[Model] = []

    def take(value: Any, wanted: Any = None) -> Any:
        if not is_model(value):
            return value
        modules.append(value)
        models.append(take_model(value, wanted))
        return Hole(len(modules) - 1)

    def without_modules(tree: Any, wanted: Any = None) -> Any:
        return jax.tree.map(lambda value: take(value, wanted), tree, is_leaf=is_model)

    wanted = wanted or {}
    holed = tuple(without_modules(arg, wanted.get(i)) for i, arg in enumerate(args))
    holed_kwargs = without_modules(kwargs)
    for module in closed.modules:
        take(module)
    _refuse_shared_variables([module for module in modules if is_nnx(module)])
    return Call(holed, holed_kwargs, closed.rows, models, closed.arrays, modules)


def _is_float(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def fill(tree: Any, values: Sequence[Any] | Mapping[int, Any]) -> Any:
    """A tree with values in place of its holes."""
    return jax.tree.map(
        lambda x: values[x.number] if isinstance(x, Hole) else x,
        tree,
        is_leaf=lambda x: isinstance(x, Hole),
    )


def holes_in(tree: Any) -> list[int]:
    """The numbers of a tree's holes."""
    found = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Hole))
    return [x.number for x in found if isinstance(x, Hole)]


def call_tower(fun: Any, call: Call, here: Tower, tower_rows: int) -> tuple[Any, list[Changed]]:
    """Calls a function in one tower, with the modules in their places.

    Args:
        fun: a function, or an `OpenFunction` whose contents are in the call.
        call: the tower's arguments.
        here: the tower.
        tower_rows: rows of a full tower.

    Returns:
        What the function returns; and for every module what it has changed.

    Raises:
        OutputError: a change that cannot be combined over towers.
    """
    entered = [model.in_tower(here) for model in call.models]
    modules = [model.build() for model in entered]
    args, kwargs = fill((call.args, call.kwargs), modules)
    arrays = [enter(leaf, here) for leaf in call.arrays]  # each tower has its own keys
    closed = Contents(arrays, modules[len(holes_in((call.args, call.kwargs))) :], call.rows)
    with inside_a_tower(tower_rows):
        output = close_function(fun, closed)(*args, **kwargs)
    changed = [
        sort_changes(
            jax.tree.leaves(model.state),
            jax.tree.leaves(model.state_after(module)),
            here,
            tower_rows,
        )
        for model, module in zip(entered, modules, strict=True)
    ]
    return output, changed


def _refuse_shared_variables(modules: Sequence[Any]) -> None:
    if len(modules) < 2:
        return
    seen: dict[int, str] = {}
    for module in modules:
        variables = {i: f"{type(module).__name__}.{p}" for i, p in variables_of(module).items()}
        for identity in variables.keys() & seen.keys():
            raise ArgumentError(
                f"two modules share a Variable: {seen[identity]} and {variables[identity]}. They "
                "are arguments of the loss, or it closes over them, and each is taken apart by "
                "itself: pass one module that holds both."
            )
        seen.update(variables)
