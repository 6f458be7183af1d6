"""Leaves: whether a leaf of the arguments is a key, a constant or traced, and its dtype."""

import dataclasses
import enum
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding

# In a dataclass of settings; other callable objects may have state.
_FUNCTIONS = (
    FunctionType, BuiltinFunctionType, type, np.ufunc, type(jax.jit(abs)), jax.custom_jvp,
    jax.custom_vjp,
)  # fmt: skip


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed keys, as `jax.random.key` makes them."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def is_packed(dtype: Any) -> bool:
    """Whether a dtype takes less than a byte, such as int4; XLA may keep several in one."""
    kinds = ((jnp.integer, jnp.iinfo), (jnp.floating, jnp.finfo))
    return any(jnp.issubdtype(dtype, kind) and info(dtype).bits < 8 for kind, info in kinds)


def is_legacy_key(leaf: Any) -> bool:
    """Whether a leaf looks like a key of `jax.random.PRNGKey`: uint32, shape (2,).

    With `jax_default_prng_impl="rbg"` its shape is (4,).
    """
    if getattr(leaf, "dtype", None) != np.uint32:
        return False
    config: Any = jax.config  # its options are not in its type
    return leaf.shape == _shape_of_legacy_keys(config.jax_default_prng_impl)


@functools.lru_cache(maxsize=8)
def _shape_of_legacy_keys(impl: str) -> tuple[int, ...]:
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl))).shape


def is_traced(leaf: Any) -> bool:
    """Whether a leaf stands for a value inside jit, grad, vmap or scan."""
    return isinstance(leaf, Tracer)


def as_python(value: Any) -> Any:
    """A number or flag of NumPy or JAX as Python's, which JSON can hold; others as they are."""
    is_array = isinstance(value, np.generic | np.ndarray | jax.Array) and not is_traced(value)
    return value.item() if is_array and np.ndim(value) == 0 else value


def are_traced(leaves: Iterable[Any]) -> bool:
    """Whether what is computed from these leaves is traced.

    Inside `jax.jit` it is, even if none of the leaves is, because a function closes over all of its
    arrays. A call of a jitted function shows that, and takes 4 microseconds.
    """
    return any(is_traced(leaf) for leaf in leaves) or is_traced(_zero())


@jax.jit
def _zero() -> jax.Array:
    return jnp.int32(0)


def explicit_axes(leaf: jax.Array) -> tuple[Any, ...]:
    """The names of the axes of an array's mesh, if JAX keeps its sharding in its type."""
    mesh = jax.typeof(leaf).sharding.mesh
    return mesh.axis_names if jax.sharding.AxisType.Explicit in mesh.axis_types else ()


def without_explicit_axes(leaf: Any) -> Any:
    """The same leaf, not copied; JAX then does not ask where the results of operations lie."""
    if not isinstance(leaf, jax.Array) or is_traced(leaf) or not explicit_axes(leaf):
        return leaf
    sharding: Any = leaf.sharding
    mesh = jax.sharding.Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
    return jax.device_put(leaf, jax.NamedSharding(mesh, sharding.spec))


def device_dtype(leaf: Any) -> Any:
    """The dtype that an array has on a device (float32 for NumPy's float64, by default)."""
    if isinstance(leaf, jax.Array) or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf.dtype
    return jax.dtypes.canonicalize_dtype(leaf.dtype)


def shape_of(leaf: Any, there: Sharding | None = None) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array or of its type, and on which devices it is.

    The type also says whether it is a Python number, which adapts to the dtypes around it.
    """
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there, weak_type=weak)


def row_shapes(rows: Iterable[Any], num_rows: int) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes on a device of arrays like these, with `num_rows` rows."""
    return [jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), device_dtype(x)) for x in rows]


def wide_dtype(*dtypes: Any) -> Any:
    """The common dtype of these dtypes and float32, for sums of many numbers."""
    # Floats of 8 bits have no common dtype with any other, and float32 holds all of them.
    wide = [x for x in dtypes if not (jnp.issubdtype(x, jnp.floating) and x.itemsize < 4)]
    with jax.numpy_dtype_promotion("standard"):  # the user may have set another mode
        return functools.reduce(jnp.promote_types, wide, jnp.float32)


@dataclass(frozen=True)
class Constant:
    """An argument that is no data, such as a flag, a string, a function or a frozen dataclass.

    It is passed on unchanged.

    Like static arguments of `jax.jit` it is part of the program: two calls share a program if their
    constants are equal.

    Attributes:
        key: type and value, since 1, 1.0 and True are equal; type and `id` if it has no hash; for
            settings, all types and values in them.
        value: the argument, kept alive so that no other object can get its `id`.
    """

    key: tuple[Any, ...]
    value: Any = field(compare=False)

    @classmethod
    def of(cls, value: Any) -> "Constant":
        """The `Constant` of a value."""
        if (key := _settings_in(value)) is not None:
            return cls(key, value)
        try:
            hash(value)
        except TypeError:
            return cls((type(value), id(value)), value)
        return cls((type(value), value), value)


def is_constant(leaf: Any) -> bool:
    """Whether a leaf is a flag, a string, a function or an object of settings, and so no data."""
    if isinstance(leaf, jax.Array | np.ndarray) or hasattr(leaf, "__jax_array__"):
        return False
    is_plain = isinstance(leaf, bool | str | bytes) or callable(leaf)
    return is_plain or _settings_in(leaf) is not None


def _settings_in(leaf: Any) -> Any:
    """What an object of settings is compared by: types and values; None if it may hold data.

    An Enum, a dtype, or a frozen dataclass of such, and of numbers, strings, functions and tuples.
    What can be indexed may have rows, and what has no `==` is not what it holds, as `LazyRows`.
    """
    if isinstance(leaf, enum.Enum | np.dtype):
        return None if isinstance(leaf, int | float | complex) else (type(leaf), leaf)
    params = vars(type(leaf)).get("__dataclass_params__")  # not those of a base class
    if params is None or not (params.frozen and params.eq) or hasattr(leaf, "__getitem__"):
        return None
    parts = [_part_of_settings(getattr(leaf, one.name)) for one in dataclasses.fields(leaf)]
    return None if None in parts else (type(leaf), *parts)


def _part_of_settings(value: Any) -> Any:
    if isinstance(value, bool | int | float | complex | np.generic):
        return type(value), repr(value)  # -0.0 is equal to 0.0, and True to 1
    if value is None or isinstance(value, (str, bytes, PurePath, *_FUNCTIONS)):
        return type(value), value
    if isinstance(value, tuple):
        parts = [_part_of_settings(one) for one in cast("tuple[Any, ...]", value)]
        return None if None in parts else (type(value), *parts)
    return _settings_in(value)


def leaves_in_lists(tree: Any) -> set[int]:
    """The numbers (places in `jax.tree.leaves`) of leaves in a list, which may be meant as rows."""
    is_list = lambda sub: isinstance(sub, list)
    marked = jax.tree.map(
        lambda sub: jax.tree.map(lambda _: is_list(sub), sub), tree, is_leaf=is_list
    )
    return {number for number, mark in enumerate(jax.tree.leaves(marked)) if mark}
