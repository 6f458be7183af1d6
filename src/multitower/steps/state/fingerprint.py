"""fingerprint: one line that tells whether two trees of arrays hold the same bits."""

import hashlib
from typing import Any

import jax
import numpy as np

from multitower.processes.together import whole_on_host
from multitower.towers.leaves import is_key, is_traced
from multitower.towers.surroundings import refuse_traced


def fingerprint(tree: Any) -> str:
    """Returns a hash of all dtypes, shapes and bytes of a pytree.

    Two trees have the same fingerprint if their leaves, in `jax.tree.leaves` order, have the same
    dtypes, shapes and bytes. The devices of the arrays and the kinds of containers do not matter.

    Args:
        tree: any pytree of arrays, numbers and typed keys.

    Returns:
        The SHA-256 of dtype, shape and bytes (little-endian, C order) of each leaf, in hex.

    Raises:
        ArgumentError: it is called inside `jax.jit` or the like.
        TypeError: a leaf is neither a number nor an array.

    Example:
        >>> import jax.numpy as jnp
        >>> import multitower as mt
        >>> mt.fingerprint({"w": jnp.zeros(3)})[:12]
        '951cd8cbb637'
        >>> mt.fingerprint({"w": jnp.zeros(3)}) == mt.fingerprint({"w": -jnp.zeros(3)})
        False
    """
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        value = _on_host(leaf)
        digest.update(f"{value.dtype.name}{value.shape}".encode())
        little = (
            value.astype(value.dtype.newbyteorder("<")) if value.dtype.kind in "iufc" else value
        )
        digest.update(little.tobytes())  # in C order, wherever its elements lie
    return digest.hexdigest()


def _on_host(leaf: Any) -> np.ndarray[Any, Any]:
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if is_traced(leaf):
        refuse_traced("multitower.fingerprint", leaf)
    value = whole_on_host(leaf)  # host-device sync
    if value.dtype.kind in "OSU":
        raise TypeError(
            f"fingerprint: {leaf!r} ({type(leaf).__name__}) is neither a number nor an array."
        )
    return value
