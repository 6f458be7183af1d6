"""Constants: arguments of a function that are not data, such as a flag, a string or a function.

They are passed on unchanged. Like static arguments of `jax.jit` they are part of the program: two
calls share a program if their constants are equal.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True)
class Constant:
    """An argument that is no data: a flag, a string, a function.

    Attributes:
        key: type and value (1, 1.0 and True are equal), or the identity of what has no hash.
        value: what it is; kept alive, so that no other object can have its identity.
    """

    key: tuple[type, Any]
    value: Any = field(compare=False)

    @classmethod
    def of(cls, value: Any) -> "Constant":
        """The constant of a value."""
        try:
            hash(value)
        except TypeError:
            return cls((type(value), id(value)), value)
        return cls((type(value), value), value)


def is_constant(leaf: Any) -> bool:
    """Whether a leaf is a flag, a string or a function, and no data."""
    if isinstance(leaf, jax.Array | np.ndarray) or hasattr(leaf, "__jax_array__"):
        return False
    return isinstance(leaf, bool | str | bytes) or callable(leaf)


def leaves_in_lists(tree: Any) -> set[int]:
    """The numbers of the leaves that lie in a list, the form of rows in plain Python."""
    is_list = lambda sub: isinstance(sub, list)
    marked = jax.tree.map(
        lambda sub: jax.tree.map(lambda _: is_list(sub), sub), tree, is_leaf=is_list
    )
    return {number for number, mark in enumerate(jax.tree.leaves(marked)) if mark}
