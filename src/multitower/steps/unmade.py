"""Parameters that a function makes: each array alone, on the device where it will live."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from multitower.engines.segments import Program, is_call, open_calls, slice_of
from multitower.errors import ArgumentError
from multitower.models.modules import Model, is_model, take_model
from multitower.steps.runner import own_copy


class Unmade(jax.ShapeDtypeStruct):
    """One result of a function that has not been called, but traced.

    Attributes:
        program: what the function computes.
        number: of this result in the program, or a literal.
    """

    __slots__ = ("number", "program")

    def __init__(self, shape: jax.ShapeDtypeStruct, program: Program, number: Any) -> None:
        super().__init__(shape.shape, shape.dtype)
        self.program = program
        self.number = number

    def made(self, device: jax.Device) -> jax.Array:
        """Makes it on a device, and nothing else: the steps of the function that it needs.

        They run one after the other, as in a call on that device, so the bits are the same.
        """
        segment = slice_of(self.program, [self.number])
        with jax.default_device(device):
            consts = jax.device_put(dict(segment.consts), device)
            (found,) = replace(segment, consts=consts)([])
            return jax.device_put(own_copy(found), device)


def take_params(params: Any, *, in_parts: bool) -> Any:
    """What `init` was given: parameters, or a `Model`.

    Args:
        params: a pytree, a module, or a function without arguments that returns one of these.
        in_parts: whether the weights that a function returns shall be `Unmade`.

    Raises:
        ArgumentError: a function that takes arguments.
    """
    if not is_model(params) and _is_function(params):
        if in_parts:
            return _unmade(params)
        params = params()
    return take_model(params) if is_model(params) else params


def made_in_parts(leaves: Sequence[Unmade], shardings: Sequence[Any]) -> list[jax.Array]:
    """Makes arrays that span devices, each device its own parts of them."""
    segment = slice_of(leaves[0].program, [leaf.number for leaf in leaves])
    make = jax.jit(lambda: [own_copy(x) for x in segment([])], out_shardings=list(shardings))
    return make()


def _unmade(make: Callable[[], Any]) -> Any:
    """The results of a function as `Unmade`; of a module only the weights."""
    traced = lambda: take_params(make, in_parts=False)
    closed, shapes = jax.make_jaxpr(traced, return_shape=True)()
    # Calls of one result are taken as they are, such as those that draw random numbers.
    program = open_calls(closed, lambda one: is_call(one) and len(one.outvars) > 1)
    leaves, treedef = jax.tree.flatten(shapes)
    found = treedef.unflatten(
        Unmade(shape, program, number)
        for shape, number in zip(leaves, program.outputs, strict=True)
    )
    if not isinstance(found, Model):
        return found
    host = jax.local_devices(backend="cpu")[0]
    fixed, state = jax.tree.map(lambda leaf: leaf.made(host), (found.fixed, found.state))
    return replace(found, fixed=fixed, state=state)


def _is_function(value: Any) -> bool:
    if not callable(value) or not jax.tree_util.all_leaves([value]):
        return False
    try:
        arguments = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):  # some builtins tell nothing
        return False
    wanted = [
        one.name
        for one in arguments
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if wanted:
        name = getattr(value, "__name__", type(value).__name__)
        raise ArgumentError(
            f"init got {name}, which takes {', '.join(wanted)}: pass parameters, or a function "
            f"without arguments that makes them, such as lambda: {name}(...)."
        )
    return True
