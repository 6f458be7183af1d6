"""Proves from an optimizer's traced programs that it works element by element."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from multitower.checks.element_wise import Value, read_elements
from multitower.checks.equations import Numbering
from multitower.errors import ArgumentError
from multitower.steps.optimizing.optimizer import call_update
from multitower.towers.blocks import BlockLayout

if TYPE_CHECKING:
    import optax


def refuse_mixing(
    optimizer: "optax.GradientTransformation",
    params: Any,
    block: Any,
    is_cut: Sequence[bool],
    of_params: Sequence[bool] | None = None,
) -> None:
    """Refuses an optimizer that cannot be proved to work element by element.

    Its programs are read, for `init` and for `update`: every element of an update may depend on the
    same element of gradients, parameters and state, and on numbers that are the same for all, such
    as a count. And the program for blocks must be the program for whole leaves.

    Args:
        optimizer: an optax optimizer.
        params: the parameters, or their shapes and dtypes.
        block: shapes and dtypes of a tower's block of them.
        is_cut: for each leaf of the optimizer's state, whether it is kept in blocks.
        of_params: for each leaf of the parameters, whether it is; None if all are.

    Raises:
        ArgumentError: elements are mixed, or this cannot be proved; the message names the leaf and
            the reason.
    """
    # Only shapes: the device of an array would become part of the program.
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    own = of_params or [True] * len(jax.tree.leaves(params))
    _compare(optimizer.init, ((params,), (block,)), own, is_cut)
    update = functools.partial(call_update, optimizer)
    given = lambda p: (p, jax.eval_shape(optimizer.init, p), p, loss)
    elements = [*own, *is_cut, *own, False]
    _compare(update, (given(params), given(block)), elements, [*own, *is_cut])


def is_element_wise(
    optimizer: "optax.GradientTransformation", params: Any, pieces: Sequence[Any] = ()
) -> bool:
    """Whether an optimizer is proved to work element by element, for these parameters.

    Args:
        optimizer: an optax optimizer.
        params: the parameters, or their shapes and dtypes.
        pieces: the parts in which they will be kept: trees of shapes and dtypes like `params`, in
            which some leaves are smaller. Leaves of the same size may be treated in any way. By
            default every leaf is flattened and cut in halves.
    """
    state, treedef = jax.tree.flatten(jax.eval_shape(optimizer.init, params))
    for part in pieces or [BlockLayout.of(params, 2).shapes_of_block()]:
        of_params = _differ(jax.tree.leaves(params), jax.tree.leaves(part)) if pieces else None
        try:
            own, of_part = jax.tree.flatten(jax.eval_shape(optimizer.init, part))
            if of_part != treedef:  # a mask by shape
                return False
            refuse_mixing(optimizer, params, part, _differ(state, own), of_params)
        except Exception:  # also of an optimizer that adds whole arrays of its own
            return False
    return True


def _differ(leaves: Sequence[Any], others: Sequence[Any]) -> list[bool]:
    return [a.shape != b.shape for a, b in zip(leaves, others, strict=True)]


def _compare(
    fn: Callable[..., Any],
    arguments: tuple[Any, Any],
    elements: Sequence[bool],
    cut: Sequence[bool],
) -> None:
    """Traces a function for whole leaves and for blocks, and refuses it if the programs differ."""
    numbering: Numbering = {}
    wholes, names = _read(fn, arguments[0], elements, numbering)
    try:
        blocks, _ = _read(fn, arguments[1], elements, numbering)
    except Exception as error:
        raise fails(error) from error
    for name, whole, block, is_cut in zip(names, wholes, blocks, cut, strict=True):
        for value in (whole, block):
            if value.word == "mixed":
                raise mixes(f"{name} puts elements together ({value.origin})")
        allowed = ("element", "same") if is_cut else ("same", "free")
        if whole.word not in allowed or whole.number != block.number:
            raise mixes(
                f"{name} is computed in another way for a block than for a whole leaf: by its "
                "shape or size, or by random numbers"
            )


def _read(
    fn: Callable[..., Any], arguments: Any, elements: Sequence[bool], numbering: Numbering
) -> tuple[list[Value], list[str]]:
    program, results = jax.make_jaxpr(fn, return_shape=True)(*arguments)
    flat, _ = jax.tree_util.tree_flatten_with_path(results)
    names = [_name(path, len(arguments) == 1) for path, _ in flat]
    return read_elements(program, elements, numbering), names


def _name(path: tuple[Any, ...], is_init: bool) -> str:
    if is_init:
        return f"the first state{jax.tree_util.keystr(path)}"
    which, *rest = path
    where = jax.tree_util.keystr(tuple(rest))
    return f"the new state{where}" if which.idx else f"the update of params{where}"


def fails(error: Exception) -> ArgumentError:
    """The error for an optimizer that raises one of its own where it gets blocks."""
    text = str(error).splitlines()[0] if str(error) else ""
    return mixes(f"it fails on a block: {type(error).__name__}: {text[:200].rstrip('.:')}")


def mixes(why: str) -> ArgumentError:
    """The error for an optimizer that cannot be cut into blocks."""
    return ArgumentError(
        f"shard_update=True needs an optimizer that works element by element, and {why}. Norms "
        "over parameters (clip_by_global_norm, lamb, lars, adafactor, prodigy), masks by shape, "
        "decisions over all gradients (apply_if_finite), matrix factors and noise do not: leave "
        "shard_update out, or take them out of the optimizer. To clip by the global norm write "
        "train_step(clip_norm=...)."
    )
