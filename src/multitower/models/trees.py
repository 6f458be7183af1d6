"""Trees that a function closes over: their nodes, users' classes, and the order of their keys."""

import collections
from collections.abc import Iterable
from typing import Any

import jax

from multitower.models.dependencies import of_users
from multitower.models.nnx import classes_of_nnx, is_nnx

_DICTS = (dict, collections.defaultdict)


def nodes_of(tree: Any) -> tuple[list[Any], list[Any], Any]:
    """All nodes of a tree, the root first; its leaves; its structure. An NNX module is a leaf."""
    nodes: list[Any] = []

    def look(node: Any) -> bool:
        nodes.append(node)
        return is_nnx(node)

    return nodes, *jax.tree.flatten(tree, is_leaf=look)


def classes_in(nodes: list[Any], leaves: list[Any]) -> tuple[type, ...]:
    """The users' own classes among nodes, and in the NNX modules among leaves, each once."""
    modules = [leaf for leaf in leaves if is_nnx(leaf)]
    return of_users([*map(type, nodes), *(cls for one in modules for cls in classes_of_nnx(one))])


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
