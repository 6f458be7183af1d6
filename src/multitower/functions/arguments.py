"""For messages: what the user calls the arguments of a function, and how to share one whole.

Nothing is read from a signature until a message needs it.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax


class Arguments(NamedTuple):
    """The names of a call's leaves, by their paths in `(args, kwargs, rows, models, arrays)`.

    Attributes:
        fun: the user's function.
    """

    fun: Callable[..., Any]

    def positional(self, number: int) -> str:
        """A positional argument's name in the signature, or else its position."""
        try:
            parameters = inspect.signature(self.fun).parameters.values()
        except (TypeError, ValueError):  # some builtins and C functions have no signature
            return f"argument {number}"
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, _BY_POSITION)]
        return names[number] if number < len(names) else f"argument {number}"

    def of(self, path: Sequence[Any]) -> str:
        """What the user calls a leaf: `weights`, `batch['x']`."""
        part, *rest = path
        if not rest:
            return "the call"
        first, inner = rest[0], jax.tree_util.keystr(tuple(rest[1:]))
        if part.idx == _ARGS:
            return f"{self.positional(first.idx)}{inner}"
        if part.idx in (_KWARGS, _ROWS):
            return f"{first.key}{inner}"
        return f"the model's {inner}" if part.idx == _MODELS else "an array that is closed over"

    def whole(self, paths: Sequence[Sequence[Any]], tree: Any, axes: Any) -> str:
        """What to write so that every tower gets the whole of leaves, or of arguments.

        Args:
            paths: their paths in `tree`; one `in_axes` for all that it can name.
            tree: the call, `(args, kwargs, rows, models, arrays)`.
            axes: the axes along which it is cut, a prefix of the tree.
        """
        said: dict[Any, Any] = {}
        others: dict[str, None] = {}  # several leaves of one argument are taken out of it together
        for part, *rest in paths:
            try:
                if (part.idx != _ARGS or axes[_ROWS]) and part.idx != _ROWS:
                    raise LookupError
                so_far = said.get(part.idx, axes[part.idx])
                said[part.idx] = _with_none(so_far, tree[part.idx], rest)
            except LookupError:  # no in_axes for it, or a container of the user's own
                others[self._without_axes((part, *rest))] = None
        return " and ".join([*(f"in_axes={one!r}" for one in said.values()), *others])

    def _without_axes(self, path: Sequence[Any]) -> str:
        name = self.of(path)
        if len(path) > 2:  # inside an argument
            return f"take it out of {self.of(path[:2])} and close over it"
        called = getattr(self.fun, "__name__", "fn")
        called = called if called.isidentifier() else "fn"
        return f"functools.partial({called}, {name}={name})"


def _with_none(axes: Any, tree: Any, path: Sequence[Any]) -> Any:
    """Axes, a prefix of a tree, with None at a path.

    Raises:
        LookupError: the path leads through a container other than a dict, a list or a tuple.
    """
    if not path or axes is None:
        return None
    if type(tree) not in (dict, list, tuple):
        raise LookupError
    keys = sorted(tree) if isinstance(tree, dict) else range(len(tree))  # as jax.tree sorts them
    here = getattr(path[0], "key", getattr(path[0], "idx", None))
    of = lambda key: axes if isinstance(axes, int) else axes[key]
    found = {k: _with_none(of(k), tree[k], path[1:]) if k == here else of(k) for k in keys}
    return found if isinstance(tree, dict) else type(tree)(found.values())


_BY_POSITION = inspect.Parameter.POSITIONAL_OR_KEYWORD
_ARGS, _KWARGS, _ROWS, _MODELS = range(4)
