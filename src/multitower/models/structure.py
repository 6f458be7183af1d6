"""The structure of a tree: its nodes, the code in it, and what else it holds beside its leaves."""

import collections
import functools
import types
from collections.abc import Iterable
from typing import Any

import jax

from multitower.models.dependencies import settings_in
from multitower.models.nnx import code_of_nnx, is_nnx
from multitower.models.values import METHOD, code_within

_DICTS = (dict, collections.defaultdict)
_CONTAINERS = (None, type(None), tuple, list, dict)
_PLAIN_NODES = {types.NoneType, tuple, list, dict}  # none of them has anything beside its leaves
_NUMBERS, _TEXTS = {bool, int, float, complex}, {str, bytes, types.NoneType}
# What is equal in two structures only if it is the same; what it uses besides counts as code.
_CODE: Any = (types.FunctionType, METHOD, type, functools.partial, jax.custom_jvp, jax.custom_vjp)


def nodes_of(tree: Any) -> tuple[list[Any], list[Any], Any]:
    """All nodes of a tree, the root first; its leaves; its structure. An NNX module is a leaf."""
    nodes: list[Any] = []

    def look(node: Any) -> bool:
        nodes.append(node)
        return is_nnx(node)

    return nodes, *jax.tree.flatten(tree, is_leaf=look)


def code_of(tree: Any) -> list[Any]:
    """The code in a tree: users' own classes, functions among its leaves and in static fields."""
    nodes, leaves, treedef = nodes_of(tree)
    functions = [leaf for leaf in leaves if callable(leaf) and not is_nnx(leaf)]
    return [*code_around(nodes, leaves, treedef), *functions]


def code_around(nodes: list[Any], leaves: list[Any], treedef: Any) -> list[Any]:
    """As `code_of`, but without the leaves of the tree that are no NNX modules."""
    modules = [leaf for leaf in leaves if is_nnx(leaf)]
    in_modules = (one for module in modules for one in code_of_nnx(module))
    classes = dict.fromkeys(map(type, nodes))
    return [*code_within([*classes, *in_modules]), *_code_in_structure(treedef)]


def _code_in_structure(treedef: Any) -> tuple[Any, ...]:
    """The code that a structure holds beside the leaves of its tree, such as in static fields."""
    try:
        return _code_in_hashable(treedef)
    except Exception:  # what it holds has no hash or no ==, and so hardly shares its program
        return ()


@functools.lru_cache(maxsize=256)
def _code_in_hashable(treedef: Any) -> tuple[Any, ...]:
    kind, fixed = treedef.node_data() or (None, None)
    found = {id(one): one for one in code_within([fixed] if kind not in _CONTAINERS else ())}
    inner = (one for child in treedef.children() for one in _code_in_hashable(child))
    return (*found.values(), *inner)


def fixed_in(nodes: list[Any], leaves: list[Any], treedef: Any) -> Any:
    """What a structure holds beside the leaves of its tree and beside code, hashable.

    The `==` of two structures does not see all of it: a dict of settings in a static field is equal
    to itself after a change, and 1 is equal to 1.0 and True.
    """
    if {*map(type, nodes)} - {*map(type, leaves)} <= _PLAIN_NODES:
        return None
    numbers: list[Any] = []
    others: dict[int, Any] = {}
    left = [treedef]
    while left:
        inner = left.pop()
        left += inner.children()
        kind, data = inner.node_data() or (None, None)
        held = [] if kind in _CONTAINERS else [data]
        while held:
            one = held.pop()
            of = type(one)  # looked up, since a large model has thousands of them
            if of in _NUMBERS:
                numbers.append(of if one else repr(one))  # 0.0 and -0.0 are equal
            elif isinstance(one, tuple):
                held += one
            elif of not in _TEXTS and id(one) not in others and not isinstance(one, _CODE):
                others[id(one)] = one
    return tuple(numbers), settings_in([*others.values()]) if others else None


def orders_of(nodes: Iterable[Any]) -> tuple[tuple[Any, ...], ...]:
    """The keys of each dict among nodes, in their order. JAX sorts them."""
    return tuple(tuple(node) for node in nodes if type(node) in _DICTS)


def in_order(tree: Any, orders: tuple[tuple[Any, ...], ...]) -> Any:
    """Gives the keys of each dict in a tree their order again; the dicts are changed."""
    if orders:
        dicts = [node for node in nodes_of(tree)[0] if type(node) in _DICTS]
        for node, keys in zip(dicts, orders, strict=True):
            held = {key: node[key] for key in keys}
            node.clear()
            node.update(held)
    return tree
