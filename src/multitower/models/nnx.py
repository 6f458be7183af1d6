"""Flax NNX: a module is a graph of Variables, and a call may change them in place."""

import sys
from typing import Any, NamedTuple

import jax

from multitower.errors import OutputError


def is_nnx(value: Any) -> bool:
    """Whether a value is an NNX module, `nnx.Rngs` or the like. Imports nothing."""
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Pytree)


def is_of_nnx(value: Any) -> bool:
    """Whether a value is an NNX module or the like, or an `nnx.Variable`. Imports nothing."""
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Pytree | nnx.Variable)


def contents_of_nnx(value: Any) -> tuple[Any, list[Any]]:
    """Everything in a module or Variable except arrays, hashable; and its arrays."""
    graphdef, state = sys.modules["flax.nnx"].split(value)
    return graphdef, jax.tree.leaves(state)


def code_of_nnx(module: Any) -> list[Any]:
    """The classes of a module and of everything in it, and what is not an array; each once."""
    nnx: Any = sys.modules["flax.nnx"]
    found = {id(node): node for _, node in nnx.iter_graph(module)}.values()
    held = (one for one in found if not isinstance(one, nnx.Pytree | nnx.Variable | jax.Array))
    return [*dict.fromkeys(map(type, found)), *held]


def diff_state(argnum: Any) -> tuple[int, Any] | None:
    """Position and filter of an `nnx.DiffState` in `argnums`; None for anything else."""
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(argnum, nnx.DiffState):
        return None
    # `nnx.split` takes these two as its last filter only.
    is_all = argnum.filter is ... or argnum.filter is True
    return argnum.argnum, nnx.Everything() if is_all else argnum.filter


class NnxParts(NamedTuple):
    """How to put a module together from its weights, its other parameters and its state.

    Attributes:
        graphdef: everything except arrays.
        wanted: which Variables are weights, as an NNX filter.
    """

    graphdef: Any
    wanted: Any

    @property
    def changes_in_place(self) -> bool:
        """True: a call may change Variables."""
        return True

    def build(self, weights: Any, fixed: Any, state: Any) -> Any:
        """Makes a module of these arrays."""
        # Copies, because a module keeps the Variables that it is made of, and changes them.
        copies = jax.tree.map(lambda leaf: leaf, (weights, fixed, state))
        return sys.modules["flax.nnx"].merge(self.graphdef, *copies)

    def parameters_of(self, module: Any) -> Any:
        """The weights and the other parameters of a module, as `take_nnx` takes them."""
        nnx: Any = sys.modules["flax.nnx"]
        _, weights, fixed, _ = nnx.split(module, self.wanted, nnx.Param, ...)
        return weights, fixed

    def state_after(self, module: Any, state: Any) -> Any:
        """The state after a call that began with `state`.

        Raises:
            OutputError: the call changed something that cannot be combined over towers.
        """
        nnx: Any = sys.modules["flax.nnx"]
        graphdef, _, _, after = nnx.split(module, self.wanted, nnx.Param, ...)
        if graphdef != self.graphdef:
            raise _other_structure(state, after)
        given = jax.tree.leaves(state)
        for path, leaf in _with_paths(nnx.state(module, nnx.metrics.MetricState)):
            if not any(leaf is old for old in given):
                raise OutputError(
                    f"the loss updates a metric of the model, {path}: every tower has a count of "
                    "its own rows, and these cannot be averaged. Return what it counts as aux "
                    "(e.g. the logits) and update the metric after value_and_grad."
                )
        return after

    def write(self, module: Any, state: Any) -> None:
        """Puts new values into the user's own module."""
        sys.modules["flax.nnx"].update(module, state)


def take_nnx(module: Any, wanted: Any) -> tuple[NnxParts, Any, Any, Any]:
    """Takes a module apart.

    Only the optimizer changes parameters: what a call writes into them is dropped, and the first
    look tells of it. (A transform such as `nnx.remat` writes all of them, with the values that they
    had.)

    Returns:
        How to put it together; its weights; other parameters; and the state that calls change.
    """
    nnx: Any = sys.modules["flax.nnx"]
    wanted = nnx.Param if wanted is None else wanted
    graphdef, weights, fixed, state = nnx.split(module, wanted, nnx.Param, ...)
    return NnxParts(graphdef, wanted), weights, fixed, state


def nnx_in_evaluation_mode(module: Any) -> Any:
    """A copy in the mode of `module.eval()`; `nnx.Rngs` and the like, without modes, are copied."""
    nnx: Any = sys.modules["flax.nnx"]
    copy = nnx.merge(*nnx.split(module))
    if isinstance(copy, nnx.Module):
        copy.eval()
    return copy


def is_in_training_mode(module: Any) -> bool:
    """Whether `module.eval()` would change anything, such as dropout that is on."""
    nnx: Any = sys.modules["flax.nnx"]
    return nnx.graphdef(module) != nnx.graphdef(nnx_in_evaluation_mode(module))


def variables_of(module: Any) -> dict[int, str]:
    """The Variables of a module, by id, with their paths."""
    nnx: Any = sys.modules["flax.nnx"]
    return {
        id(node): ".".join(str(step) for step in path)
        for path, node in nnx.iter_graph(module)
        if isinstance(node, nnx.Variable)
    }


def _with_paths(state: Any) -> list[tuple[str, Any]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    return [(jax.tree_util.keystr(path).removesuffix(".value"), leaf) for path, leaf in flat]


def _other_structure(before: Any, after: Any) -> OutputError:
    old, new = ({path for path, _ in _with_paths(state)} for state in (before, after))
    if new - old:
        return OutputError(
            f"the function adds a Variable to the model, {min(new - old)}: each tower has its own, "
            "and they cannot be put together. Return the value as aux instead of sowing it, with "
            "answers, sown = nnx.capture(model, nnx.Intermediate)(x), or make the Variable before "
            "the step. If only this call needs it, as a cache for decoding, let the function begin "
            "with a copy, model = nnx.clone(model)."
        )
    if old - new:
        return OutputError(
            f"the loss removes a Variable from the model, {min(old - new)}: do that before the "
            "step, with nnx.pop or del."
        )
    return OutputError(
        "the loss changes attributes of the model that are not arrays, such as the mode that "
        "model.train() sets. Call that before value_and_grad."
    )
