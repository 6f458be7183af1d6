"""Refuses what can neither be cut into towers nor shared, and says what to pass instead."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from multitower.errors import ArgumentError
from multitower.towers.lazy_rows import LazyRows
from multitower.towers.leaves import Constant, explicit_axes, leaves_in_lists


class Names(Protocol):
    """What the user calls the leaves of a tree, by their paths; only errors need it."""

    def of(self, path: Sequence[Any]) -> str:
        """A leaf's name, such as `batch['x']`."""
        ...

    def whole(self, paths: Sequence[Sequence[Any]], tree: Any, axes: Any) -> str:
        """What to write so that every tower gets the whole of leaves, or of arguments."""
        ...


# So many of a kind in a list are rows, not parts of a batch with a number each.
_MANY = 8


def refuse_lists_for_rows(
    tree: Any, kinds: Sequence[Any], axes: Sequence[int | None], name: str | Names, given_axes: Any
) -> None:
    """Refuses strings and flags in a list, such as labels: every tower would get all of them."""
    suspects = {
        number: kind.value
        for number, (kind, axis) in enumerate(zip(kinds, axes, strict=True))
        if isinstance(kind, Constant) and axis is not None and not callable(kind.value)
    }
    wrong = sorted(suspects.keys() & leaves_in_lists(tree)) if suspects else []
    if wrong:
        path, _ = jax.tree_util.tree_flatten_with_path(tree)[0][wrong[0]]
        raise ArgumentError(
            f"{name_of(path, name)} is {shown(suspects[wrong[0]])}, in a list, which "
            "cannot be cut into towers: pass rows as an array of numbers (numpy.asarray). If every "
            f"tower needs the whole of it: {whole_of(path[:-1], tree, name, given_axes)}."
        )


def refuse_numbers_for_rows(
    tree: Any, axes: Sequence[int | None], name: str | Names, num_rows: int, given_axes: Any
) -> None:
    """Refuses a list of as many numbers as there are rows: each would be a shared leaf.

    The same for a list that holds a list of numbers for every row, and for data that are a list of
    rows, each with its numbers and arrays: lines of its image would be taken for rows. (A batch may
    be a list of parts, each with a number of its own.)
    """
    not_users = () if isinstance(name, str) else (tree, tree[0])  # the call, and its arguments

    def is_list(sub: Any) -> bool:
        if not _is_plain_list(sub) or any(sub is one for one in not_users):
            return False
        are_numbers = len(sub) == num_rows and _holds_numbers(sub)
        return are_numbers or (name == "data" and _holds_rows(sub))

    number = 0
    for path, sub in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_list)[0]:
        num_leaves = jax.tree.structure(sub).num_leaves
        if is_list(sub) and None not in axes[number : number + num_leaves]:
            if not _holds_numbers(sub):
                raise ArgumentError(
                    f"{name_of(path, name)} is a {type(sub).__name__} of {len(sub)} rows. Put them "
                    "together, one array for each entry of a row: "
                    "jax.tree.map(lambda *rows: numpy.stack(rows), *the_list). If they are no "
                    "rows, pass a dict of them."
                )
            what = "lists" if any(map(_is_plain_list, sub)) else "numbers"
            raise ArgumentError(
                f"{name_of(path, name)} is a {type(sub).__name__} of {num_rows} {what}, and the "
                f"batch has {num_rows} rows: every tower would get all of them. Pass an array, "
                "numpy.asarray(...), to cut them into towers. If every tower needs all of them: "
                f"{whole_of(path, tree, name, given_axes)}."
            )
        number += num_leaves


def _is_plain_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")


def _holds_numbers(value: Any) -> bool:
    """Whether a list holds numbers alone, 0-d arrays of them, or lists of these."""
    if _is_plain_list(value):
        return len(value) > 0 and all(map(_holds_numbers, value))
    if isinstance(value, jax.Array | np.ndarray):
        return value.ndim == 0 and jnp.issubdtype(value.dtype, np.number)
    return is_number(value)


def _holds_rows(value: Any) -> bool:
    """Whether a list holds one dict, list or tuple after the other, all with numbers and arrays."""
    if len(value) < _MANY or not all(isinstance(one, dict | list | tuple) for one in value):
        return False
    first, *others = map(jax.tree.structure, value)
    leaves = jax.tree.leaves(value[0])
    has_both = {jnp.ndim(leaf) > 0 for leaf in leaves if is_number(leaf) or hasattr(leaf, "ndim")}
    return len(has_both) > 1 and all(one == first for one in others)


def is_number(value: Any) -> bool:
    """Whether a leaf is a number of Python or NumPy."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def refuse_what_is_no_array(leaf: Any, where: Callable[[], str]) -> None:
    """Refuses what is neither an array nor a number."""
    if isinstance(leaf, bool | str | bytes) or callable(leaf):
        raise ArgumentError(
            f"{where()} is {shown(leaf)}, a static Python value: towers take arrays and numbers. "
            "Close over it instead, e.g. functools.partial(fn, name=value), or pass an array."
        )
    if isinstance(leaf, int | float | complex | np.generic):
        return
    refuse_holder(leaf, where)
    if isinstance(leaf, jax.Ref):
        raise ArgumentError(
            f"{where()} is a jax.Ref, which is on one device, and towers run on all of them. Pass "
            "what it holds, ref[...], and return the new value."
        )
    if isinstance(leaf, LazyRows):
        raise ArgumentError(
            f"{where()} is LazyRows, which have not been read: give them to mt.prefetch or "
            "mt.shard, with the same towers= and devices=, and pass the result to the function."
        )
    if type(leaf).__module__.startswith("scipy.sparse"):
        raise ArgumentError(
            f"{where()} is a {type(leaf).__name__} of scipy, and JAX takes no such arrays. Pass "
            "its .toarray(), or an array of its entries for each row."
        )
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        refuse_mapping(leaf, where)
        refuse_foreign_array(leaf, where)  # a table of pandas has no dtype of its own
        if hasattr(leaf, "with_format"):
            raise ArgumentError(
                f"{where()} is a {type(leaf).__name__}, as Hugging Face has. Pass a dict of its "
                "arrays, dataset.with_format('numpy')[:]."
            )
        raise ArgumentError(
            f"{where()} is {shown(leaf)}: towers take arrays and numbers. If it holds settings, "
            "close over it with functools.partial; else convert it with numpy.asarray."
        )


def refuse_foreign_array(leaf: Any, where: Callable[[], str]) -> None:
    """Refuses an array of another library, such as a tensor of a PyTorch loader.

    Raises:
        ArgumentError: it could become an array of NumPy, and JAX takes it for none.
    """
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return
    if not (hasattr(leaf, "__array__") or hasattr(leaf, "__dlpack__")):
        return
    how = "numpy.asarray" if hasattr(leaf, "__array__") else "jax.numpy.from_dlpack"
    library = type(leaf).__module__.partition(".")[0]
    if library not in ("multitower", "jax", "jaxlib"):
        raise ArgumentError(
            f"{where()} is a {type(leaf).__name__} of {library}, and JAX takes arrays of NumPy or "
            f"its own. Pass {how}(...) of it: in the collate_fn of a PyTorch loader, "
            "with dataset.as_numpy_iterator() of TensorFlow, or with "
            "dataset.with_format('numpy') of Hugging Face."
        )


def refuse_mapping(leaf: Any, where: Callable[[], str]) -> None:
    """Refuses a mapping or a dataclass that JAX takes for one leaf.

    Raises:
        ArgumentError: the leaf is one; the message says how to make a pytree of it.
    """
    if isinstance(leaf, Mapping):
        how = f"Pass dict({where()})."
    elif dataclasses.is_dataclass(leaf):
        how = (
            "Register its class once, with jax.tree_util.register_dataclass, or pass a dict. If it "
            "holds settings and no arrays, close over it with functools.partial."
        )
    else:
        return
    raise ArgumentError(f"{where()} is a {type(leaf).__name__}, which is not a pytree. {how}")


def refuse_holder(leaf: Any, where: Callable[[], str]) -> None:
    """Refuses an object that JAX's functions accept as an array, but its transformations do not.

    Raises:
        ArgumentError: the leaf is such an object, like a Keras variable; or it is a Keras model.
    """
    refuse_keras_model(leaf, where)
    if hasattr(leaf, "__jax_array__") and not isinstance(leaf, jax.Array):
        raise ArgumentError(
            f"{where()} is a {type(leaf).__name__}, which holds an array but is not one. Pass the "
            "array. For Keras variables write [v.value for v in model.trainable_variables]."
        )


def refuse_keras_model(leaf: Any, where: Callable[[], str]) -> None:
    """Refuses a Keras model or layer, which holds its variables but is not a pytree of them.

    Raises:
        ArgumentError: the leaf is a Keras model or layer.
    """
    if hasattr(leaf, "stateless_call") and hasattr(leaf, "trainable_variables"):
        raise ArgumentError(
            f"{where()} is {type(leaf).__name__}, a model of Keras. Pass its arrays, [v.value for "
            "v in model.trainable_variables], and call model.stateless_call(trainable, "
            "non_trainable, x) in the loss. Pass the arrays of non_trainable_variables as "
            "model_state."
        )


def is_state_of_linen(value: Any) -> bool:
    """Whether it is the `TrainState` of Flax Linen: parameters, an optimizer and its state."""
    return all(hasattr(value, field) for field in ("params", "tx", "opt_state", "apply_fn"))


def refuse_what_is_no_number(leaf: np.ndarray[Any, Any], where: Callable[[], str]) -> None:
    """Refuses NumPy arrays that a device cannot hold, by their dtype or because of a mask."""
    if leaf.dtype.kind in "OSUMm" or leaf.dtype.names:
        raise ArgumentError(
            f"{where()} has dtype {leaf.dtype}: only numbers can go to a device. Encode it as "
            "integers or floats first, or keep it out of the batch."
        )
    if not leaf.dtype.isnative:
        raise ArgumentError(
            f"{where()} has dtype {leaf.dtype}, whose bytes are in another order than this "
            "machine's. Pass x.astype(x.dtype.newbyteorder('='))."
        )
    if leaf.dtype in (np.longdouble, np.clongdouble):
        raise ArgumentError(
            f"{where()} has dtype {leaf.dtype}, which no device has. Pass x.astype(np.float32)."
        )
    if isinstance(leaf, np.ma.MaskedArray):
        raise ArgumentError(
            f"{where()} is a masked array, and a device would get it without its mask. Pass "
            ".filled(value), and the mask as an array of its own."
        )


def refuse_sparse_rows(tree: Any, kinds: Sequence[Any]) -> None:
    """Refuses a sparse array of JAX as rows, because its entries are not one for every row.

    Args:
        tree: the arguments of a tower.
        kinds: the kind of each of its leaves, as in `Split`.

    Raises:
        ArgumentError: arrays inside a sparse array are to be cut.
    """
    is_sparse = lambda node: type(node).__module__.startswith("jax.experimental.sparse")
    left = iter(kinds)
    for node in jax.tree.leaves(tree, is_leaf=is_sparse):
        own = [next(left) for _ in jax.tree.leaves(node)]
        if is_sparse(node) and any(isinstance(kind, int) for kind in own):
            name = type(node).__name__
            raise ArgumentError(
                f"a sparse array, {name} of jax.experimental.sparse, cannot be cut into towers. "
                "Pass the entries of each row as arrays, data and indices of BCOO.fromdense(x, "
                "n_batch=1), and make the BCOO in the function; its shape is (len(data), columns). "
                f"If every tower needs the whole {name}, say None for it in in_axes."
            )


def refuse_donated(leaf: jax.Array, where: Callable[[], str]) -> None:
    """Refuses an array that was donated to a jitted call, so that its memory is gone."""
    if not isinstance(leaf, Tracer) and leaf.is_deleted():
        raise ArgumentError(
            f"{where()} is gone: it was donated to a jitted call (donate_argnums), which has "
            "reused its memory. Pass the result of that call, or an array that was not donated."
        )


def refuse_overwritten(arrays: Sequence[jax.Array]) -> None:
    """Refuses a call of a function if arrays that it closes over are gone.

    Raises:
        ArgumentError: one was donated to a jitted call or overwritten by a step.
    """
    for leaf in arrays:
        if leaf.is_deleted():
            raise ArgumentError(
                f"the function closes over an array of shape {leaf.shape} that is gone: a jitted "
                "call (donate_argnums) or a step has reused its memory. Close over a copy, "
                "jax.device_get(params), or pass the newest values at every call: as an "
                "argument of mt.value_and_grad, or as model_state of a step."
            )


def refuse_explicit_axes(leaf: jax.Array, where: Callable[[], str]) -> None:
    """Refuses a traced array on a mesh that it must not leave; an array with values may leave it.

    Raises:
        ArgumentError: the array is traced, and on such a mesh.
    """
    names = explicit_axes(leaf) if isinstance(leaf, Tracer) else ()
    if names:
        raise ArgumentError(
            f"{where()} is on a mesh with the explicit axes {names}, as jax.make_mesh makes them, "
            "and inside jax.jit it cannot leave that mesh. Make the mesh with "
            f"axis_types=(jax.sharding.AxisType.Auto,) * {len(names)}; or leave out "
            "jax.device_put: with multitower a program needs no mesh."
        )


def path_of(tree: Any, number: int, name: str | Names) -> str:
    """The name of a leaf for a message, such as `batch['x']`, from its number."""
    return name_of(jax.tree_util.tree_flatten_with_path(tree)[0][number][0], name)


def name_of(path: Sequence[Any], name: str | Names) -> str:
    """The name of a leaf for a message, such as `batch['x']`, from its path."""
    return name + jax.tree_util.keystr(tuple(path)) if isinstance(name, str) else name.of(path)


def whole_of(path: Sequence[Any], tree: Any, name: str | Names, axes: Any) -> str:
    """What to write so that every tower gets the whole of a list.

    Args:
        path: of the list.
        tree: what it is in.
        name: the name of the tree, which then has no in_axes; or the names of its leaves.
        axes: the in_axes that were given for the tree.
    """
    return taken_out_of(name) if isinstance(name, str) else name.whole([path], tree, axes)


def taken_out_of(name: str) -> str:
    """What to write for a leaf of a tree that has no in_axes."""
    text = f"take it out of {name} and let the function close over it"
    if name != "batch":
        return text
    # A step opens its loss function only once, so it would keep the first target network.
    return (
        f"{text}, or, if it changes between steps like a target network, pass it as model_state "
        "(state.replace(model_state=...))"
    )


def shown(value: Any) -> str:
    """A value and its type, short enough for a message."""
    text = " ".join(repr(value).split())
    return f"{text if len(text) <= 40 else text[:37] + '...'} ({type(value).__name__})"
