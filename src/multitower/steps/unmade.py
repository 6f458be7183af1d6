"""Parameters that a function makes: each array by itself, on the device where it will live."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from multitower.engines.segments import Program, is_call, open_calls, slice_of
from multitower.errors import ArgumentError
from multitower.hardware.devices import host_device
from multitower.models.modules import Model, is_model, take_model
from multitower.steps.runner import own_copy
from multitower.towers.leaf_shards import shardings_of
from multitower.towers.placement import Placement
from multitower.towers.split import copy_to


class Unmade(jax.ShapeDtypeStruct):
    """One result of a function that has been traced, not called.

    Attributes:
        program: the traced function.
        number: the number of this result in the program, or a literal.
    """

    __slots__ = ("number", "program")

    def __init__(self, shape: jax.ShapeDtypeStruct, program: Program, number: Any) -> None:
        super().__init__(shape.shape, shape.dtype)
        self.program = program
        self.number = number

    def given(self) -> Any:
        """The array, if the function closes over it or read it while it was traced; else self."""
        is_given = isinstance(self.number, int) and self.number in self.program.consts
        return _as_array(self.program.consts[self.number]) if is_given else self

    def made(self, device: jax.Device) -> jax.Array:
        """Makes this result alone on a device, by the operations of the function that it needs.

        They run one after the other, as in a call on that device, so the bits are the same.
        """
        segment = slice_of(self.program, [self.number])
        with jax.default_device(device):
            consts = jax.device_put(dict(segment.consts), device)
            (found,) = replace(segment, consts=consts)([])
            return jax.device_put(own_copy(found), device)


def take_params(params: Any, *, in_parts: bool) -> Any:
    """Takes what `init` was given: returns parameters, or a `Model` for a module.

    Args:
        params: a pytree, a module, or a function without arguments that returns one of these.
        in_parts: whether a function is traced, so that its weights are `Unmade`, or called.

    Raises:
        ArgumentError: `params` is a function that takes arguments.
    """
    if not is_model(params) and _is_function(params):
        if in_parts:
            return _unmade(params)
        params = params()
    return take_model(params) if is_model(params) else params


def refuse_shapes(params: Any) -> None:
    """Refuses parameters with shapes in place of arrays.

    Raises:
        ArgumentError: a leaf is a `jax.ShapeDtypeStruct` and not `Unmade`.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if isinstance(leaf, jax.ShapeDtypeStruct) and not isinstance(leaf, Unmade):
            raise ArgumentError(
                f"params{jax.tree_util.keystr(path)} is {leaf}, a shape without values. Pass "
                "arrays, or a function without arguments that makes them: init(make_params)."
            )


def made_in_parts(
    leaves: Sequence[Unmade], shardings: Sequence[Any], placement: Placement
) -> list[jax.Array]:
    """Makes arrays that span devices; each device makes its own parts of them.

    Args:
        leaves: results of one function, at least one.
        shardings: the sharding of each of them.
        placement: the devices, with one tower on each. Large arrays that the function uses are
            split over them, too: as constants of the program they would be whole on each.
    """
    segment = slice_of(leaves[0].program, [leaf.number for leaf in leaves])
    used = [_as_array(value) for value in segment.consts.values()]
    placed = [copy_to([x], [shardings_of(x, placement)])[0] for x in used]
    of_used = replace(segment, inputs=tuple(segment.consts), consts={})
    make = jax.jit(lambda x: [own_copy(one) for one in of_used(x)], out_shardings=list(shardings))
    return make(placed)


def _unmade(make: Callable[[], Any]) -> Any:
    """The results of a function as `Unmade`; of a module only the weights."""
    traced = lambda: take_params(make, in_parts=False)
    closed, shapes = jax.make_jaxpr(traced, return_shape=True)()
    # Calls with one result stay calls, such as those that draw random numbers.
    program = open_calls(closed, lambda one: is_call(one) and len(one.outvars) > 1)
    leaves, treedef = jax.tree.flatten(shapes)
    found = treedef.unflatten(
        Unmade(shape, program, number)
        for shape, number in zip(leaves, program.outputs, strict=True)
    )
    if not isinstance(found, Model):
        return found
    host = host_device()
    fixed, state = jax.tree.map(lambda leaf: leaf.made(host), (found.fixed, found.state))
    return replace(found, fixed=fixed, state=state)


def _as_array(value: Any) -> Any:
    """A constant of a traced program as a JAX or NumPy array; JAX may hold it in another type."""
    return value if isinstance(value, jax.Array) else np.asarray(value)


def _is_function(value: Any) -> bool:
    if not callable(value) or not jax.tree_util.all_leaves([value]):
        return False
    try:
        arguments = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    wanted = [
        one.name
        for one in arguments
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if wanted:
        name = getattr(value, "__name__", type(value).__name__)
        raise ArgumentError(
            f"params is {name}, which takes {', '.join(wanted)}: pass parameters, or a function "
            f"without arguments that makes them, such as lambda: {name}(...)."
        )
    return True
