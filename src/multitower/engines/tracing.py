"""Traces a tower's function where the axis of towers exists, and finds where towers meet."""

import functools
import re
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax.extend.core import jaxpr_as_fun

from multitower.engines.collectives import axis_of, first_collective, place_of
from multitower.engines.rounds import Rounds, cut_into_rounds
from multitower.engines.segments import constants_in
from multitower.errors import ArgumentError, OutputError
from multitower.towers.leaves import explicit_axes, is_key, is_traced, shape_of
from multitower.towers.placement import AXIS, Placement
from multitower.towers.surroundings import KEEPS_VALUES

_T = TypeVar("_T")

# Part of the key of JAX's traces: if some rows are there twice, a function is traced anew.
_repeats = jax.make_user_context(default_value=False)


PASS_IT = (
    "Pass it to mt.value_and_grad as an argument which every tower gets whole, such as target in "
    "loss(params, target, batch) with in_axes=(None, None, 0), and to mt.train_step as "
    "model_state, which the loss returns as it is; or keep jax.device_get of it there."
)
_ON_EXPLICIT_AXES = (
    "the function uses an array on a mesh with explicit axes, as jax.make_mesh makes them, that is "
    f"no argument of it: JAX refuses that. {PASS_IT} If the function itself puts it there, by "
    "jax.sharding.reshard, leave that out: multitower puts rows on devices itself."
)
# What JAX says if such an array meets others.
_MESHES_DIFFER = "Mesh for all inputs should be equal"
# Parameters of operations that may put arrays on several devices: meshes, and shardings of meshes.
_PLACES = {
    "sharding_constraint": ["sharding"],
    "reshard": ["dst_sharding"],
    "device_put": ["devices"],
    "shard_map": ["mesh"],
    "jit": ["in_shardings", "out_shardings"],
}


@dataclass(frozen=True)
class Traced:
    """A program, and a function that runs it.

    Attributes:
        program: a closed jaxpr.
        treedef: the structure of what it returns.
        number: the position of the tower's number among its arguments.
    """

    program: Any
    treedef: Any
    number: int

    def __call__(self, *args: Any) -> Any:
        """Runs the program on the arguments of the function."""
        try:
            found = jaxpr_as_fun(self.program)(*jax.tree.leaves(args))
        except ValueError:  # what JAX says of such values is about meshes
            refuse_kept_values(self.program)
            raise
        return jax.tree.unflatten(self.treedef, found)

    def tower(self, *args: Any) -> Any:
        """The same, by the name that a tower's program has in profiles."""
        return self(*args)

    @property
    def shapes(self) -> Any:
        """Shapes and dtypes of what it returns."""
        found = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.program.out_avals]
        return jax.tree.unflatten(self.treedef, found)

    @functools.cached_property
    def meets(self) -> str | None:
        """The first collective and its line, for messages; None if towers do not meet."""
        found = first_collective(self.program)
        return None if found is None else place_of(found)

    @property
    def checksum(self) -> int:
        """The checksum of the program's text, which is the same in every process."""
        # The text shows addresses of functions, which differ from process to process.
        return zlib.crc32(re.sub(r"0x[0-9a-f]+", "", str(self.program)).encode())

    def rounds(self, *, final: bool) -> Rounds | None:
        """The program, cut where towers meet; see `cut_into_rounds`."""
        return cut_into_rounds(self.program, self.number, self.treedef, final=final)


def trace(fn: Callable[..., Any], args: tuple[Any, ...], num_towers: int) -> Traced:
    """Traces a function on arrays, or on their shapes and dtypes.

    Its last argument is a `Tower`, whose first leaf is the number of the tower.
    """
    leaves = jax.tree.leaves(args)
    number = len(leaves) - len(jax.tree.leaves(args[-1]))
    shapes = jax.tree.map(_shape, args)
    make = jax.make_jaxpr(fn, axis_env=axis_of(num_towers), return_shape=True)
    with _explaining_meshes():
        program, result = make(*shapes)
    refuse_other_places(program)
    return Traced(program, jax.tree.structure(result), number)


def refuse_kept_values(program: Any) -> None:
    """Refuses a function that uses traced values which it did not get, such as those it kept.

    Args:
        program: its closed jaxpr.

    Raises:
        ArgumentError: it does.
    """
    if any(map(is_traced, program.consts)):
        raise ArgumentError(KEEPS_VALUES)


def refuse_other_places(program: Any) -> None:
    """Refuses a function with a `jax.new_ref` made outside of it, or with a mesh of its own.

    Also one that uses an array on a mesh with explicit axes.

    Args:
        program: its closed jaxpr.

    Raises:
        ArgumentError: it does.
    """
    if any(isinstance(const, jax.Ref) for const in program.consts):
        raise ArgumentError(
            "this function reads or writes a jax.new_ref that was made outside of it. It is on one "
            "device, and towers run on all of them, each with values of its own. Pass what it "
            "holds, ref[...], as an argument (mt.train_step takes it as model_state=), and return "
            "the new value."
        )
    if any(map(_is_on_explicit_axes, constants_in(program))):
        raise ArgumentError(_ON_EXPLICIT_AXES)
    found = first_collective(program, _is_on_several_devices)
    if found is not None:
        raise ArgumentError(
            f"{place_of(found)} puts arrays on several devices, and a tower runs on one. Leave it "
            "out of this function: multitower puts rows on devices itself, and splits parameters "
            "with shard_params=True."
        )


def look_by_shapes(look: Callable[..., _T], *shapes: Any, num_towers: int | None = None) -> _T:
    """Calls `look`, which only traces functions, with stand-ins for arrays of these shapes.

    With `num_towers` it is called where the axis of towers exists.
    """
    found: list[_T] = []

    def body(*stand_ins: Any) -> tuple[()]:
        found.append(look(*stand_ins))
        return ()

    axis = None if num_towers is None else axis_of(num_towers)
    with _explaining_meshes():
        jax.make_jaxpr(body, axis_env=axis)(*shapes)
    return found[0]


@contextmanager
def _explaining_meshes() -> Generator[None]:
    """Says what to do where JAX says that meshes differ."""
    try:
        yield
    except ValueError as error:
        if _MESHES_DIFFER not in str(error):
            raise
        raise ArgumentError(_ON_EXPLICIT_AXES) from error


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return shape_of(leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf))


def _is_on_explicit_axes(const: Any) -> bool:
    if not isinstance(const, jax.Array) or is_traced(const) or is_key(const):
        return False
    return len(const.sharding.device_set) > 1 and bool(explicit_axes(const))


def _is_on_several_devices(equation: Any) -> bool:
    where = _PLACES.get(equation.primitive.name, ())
    flat = jax.tree.leaves([equation.params.get(name) for name in where])
    meshes = [getattr(x, "mesh", x) for x in flat]
    kinds = jax.sharding.Mesh | jax.sharding.AbstractMesh
    # JAX itself may put constants on the mesh of the call that it is tracing, which is ours.
    return any(isinstance(x, kinds) and x.size > 1 and x.axis_names != (AXIS,) for x in meshes)


@contextmanager
def some_rows_repeat() -> Generator[None]:
    """Marks a batch that was filled up with repeated rows before, so that rows must not meet."""
    with _repeats(True):
        yield


def refuse_filled(meets: str | None, num_rows: int, tower_rows: int, placement: Placement) -> None:
    """Refuses padding rows if towers exchange values, and so would see them.

    Raises:
        OutputError: towers meet, and the rows do not fill them evenly; or some are there twice.
    """
    if meets is None:
        return
    if _repeats.value:
        raise OutputError(
            f'the function exchanges values between towers over the axis "{AXIS}" ({meets}), and '
            "the last batch is filled up with examples that were there before. Use a global_batch "
            "that divides the number of examples, or a function of each row alone."
        )
    if num_rows != tower_rows * placement.num_towers:
        raise uneven(meets, num_rows, placement.num_towers)


def uneven(meets: str, num_rows: int, num_towers: int) -> OutputError:
    """The error for rows that do not fill the towers evenly, where towers meet."""
    low = num_rows // num_towers * num_towers
    nearest = f"{low} or {low + num_towers}" if low else str(num_towers)
    return OutputError(
        f"the batch has {num_rows} rows, which do not fill {num_towers} towers evenly, and towers "
        f'exchange values over the axis "{AXIS}" ({meets}): they would see rows that only fill up. '
        f"Use {nearest} rows, or drop the last rows of the batch."
    )
