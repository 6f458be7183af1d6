"""Large arrays that a program closes over: arguments of the executable, not constants in it.

The compiler copies a constant several times, computes with it, and puts it into every executable.
An array of JAX is on a device once, for all programs that use it; one of NumPy once for each.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from multitower.engines.collectives import axis_of
from multitower.engines.segments import (
    Program,
    Segment,
    constants_in,
    constants_of_call,
    open_calls,
)
from multitower.towers.global_arrays import on_all_devices
from multitower.towers.leaves import is_key, is_packed, is_traced, shape_of
from multitower.towers.placed import Placed
from multitower.towers.placement import Placement
from multitower.towers.refusals import refuse_overwritten

# Smaller arrays stay constants, so that the compiler knows the numbers of a mask or a table.
_LARGE = 1 << 20  # bytes

_placed = Placed()


class HeldArrays:
    """The large arrays that a program closes over, each once.

    Args:
        closed: a closed jaxpr.
    """

    def __init__(self, closed: Any) -> None:
        found = {_identity(one): one for one in constants_in(closed) if _is_large(one)}
        self._found = list(found.values())  # an identity lasts as long as its array
        self._places = {identity: place for place, identity in enumerate(found)}

    def __len__(self) -> int:
        return len(self._found)

    @property
    def originals(self) -> list[jax.Array]:
        """The arrays of JAX among them."""
        return [one for one in self._found if isinstance(one, jax.Array)]

    @property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Their shapes and dtypes, as on a device."""
        types = map(jax.typeof, self._found)
        return [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in types]

    def on_device(self, device: jax.Device) -> list[jax.Array]:
        """The arrays on a device; those of JAX are copied there once for all programs."""
        return [_placed.on(_as_array(one), device) for one in self._found]

    def on_all_devices(self, placement: Placement) -> list[jax.Array]:
        """The arrays, whole on every device; those of JAX are copied once for all programs."""
        return on_all_devices([_as_array(one) for one in self._found], placement)

    def call(
        self, traced: jax.stages.Traced, held: Sequence[jax.Array], args: Sequence[Any]
    ) -> Any:
        """The results of a function that closes over these arrays, with others in their place.

        Args:
            traced: the function, traced; what it closes over and is not among the arrays stays.
            held: what takes the place of the arrays.
            args: its arguments.
        """
        program = open_calls(traced.jaxpr, _has_large)
        of_number = {number: _identity(value) for number, value in program.consts.items()}
        places = {n: self._places[one] for n, one in of_number.items() if one in self._places}
        rest = {number: x for number, x in program.consts.items() if number not in places}
        run = _as_segment(program._replace(inputs=[*program.inputs, *places], consts=rest))
        found = run([*jax.tree.leaves(args), *(held[place] for place in places.values())])
        return jax.tree.unflatten(jax.tree.structure(traced.out_info), found)


class HoldingJit:
    """`jax.jit` of a function for all devices; large arrays that it closes over are arguments.

    Args:
        fn: the function.
        placement: the devices, each of which gets the whole of these arrays.
        donate: the position of the argument whose memory the results may take, if there is one.
        options: those of `jax.jit`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        placement: Placement,
        *,
        donate: int | None = None,
        **options: Any,
    ) -> None:
        self._name = getattr(getattr(fn, "func", fn), "__name__", "run")  # that of a partial, too
        self._placement = placement
        self._jitted = jax.jit(fn, donate_argnums=donate, **options)
        after_arrays = None if donate is None else donate + 1
        self._options: dict[str, Any] = {"donate_argnums": after_arrays, **options}
        self._held: HeldArrays | None = None  # not known before the first call
        self._arrays: list[jax.Array] | None = None

    def __call__(self, *args: Any) -> Any:
        """Calls the function."""
        if self._arrays is None:
            self._arrays = self._find(args).on_all_devices(self._placement)
        if not self._arrays:
            return self._jitted(*args)
        refuse_overwritten(self._originals)  # JAX may wait forever if one device lacks its copy
        return self._jitted(self._arrays, *args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """As `lower` of what `jax.jit` returns."""
        shapes = [shape_of(one, self._placement.shared) for one in self._find(args).shapes]
        return self._jitted.lower(*([shapes] if shapes else []), *args)

    def _find(self, args: tuple[Any, ...]) -> HeldArrays:
        if self._held is not None:
            return self._held
        trace = self._jitted.trace  # once for arguments of one kind: JAX remembers it
        self._held = held = HeldArrays(trace(*args).jaxpr)
        self._originals = held.originals
        if not held:
            return held

        def run(arrays: list[jax.Array], *args: Any) -> Any:
            return held.call(trace(*args), arrays, args)

        run.__name__ = self._name  # as profiles show it
        self._jitted = jax.jit(run, **self._options)
        return held


def lifted(closed: Any, num_towers: int) -> Any:
    """A program that itself holds the large constants of what it calls by name.

    Inside of `jax.shard_map` these are part of a program that no argument of `jax.jit` reaches.
    """
    if not any(map(_has_large, closed.eqns)):
        return closed
    run = _as_segment(open_calls(closed, _has_large))
    make = jax.make_jaxpr(lambda *args: run(args), axis_env=axis_of(num_towers))
    return make(*map(shape_of, closed.in_avals))


def _as_segment(program: Program) -> Segment:
    return Segment(
        tuple(program.steps), tuple(program.inputs), tuple(program.outputs), program.consts
    )


def _has_large(equation: Any) -> bool:
    """Whether an equation calls a program by name which holds large constants, however deep."""
    return any(map(_is_large, constants_of_call(equation)))


def _is_large(value: Any) -> bool:
    if not hasattr(value, "dtype") or is_traced(value) or is_key(value) or is_packed(value.dtype):
        return False
    return not isinstance(value, jax.Ref) and value.size * value.dtype.itemsize >= _LARGE


def _identity(value: Any) -> Any:
    """What tells a constant from others; JAX may wrap NumPy's arrays anew each time it traces."""
    if is_traced(value) or isinstance(value, jax.Array | jax.Ref):
        return id(value)
    value = np.asarray(value)
    return value.ctypes.data, value.shape, value.strides, value.dtype


def _as_array(value: Any) -> Any:
    """A constant as an array that may be copied; NumPy's has the dtype that it has on a device."""
    return value if isinstance(value, jax.Array) else np.asarray(value, jax.typeof(value).dtype)
