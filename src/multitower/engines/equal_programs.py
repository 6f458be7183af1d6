"""Compiles programs once that are equal except for the structure of arguments and results."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from multitower.engines.executable import Compiled, Holding, compile_for_each

# What the text of a program does not show: which Python function a callback calls, and the arrays
# that a program closes over, if JAX passes them beside the arguments, as it does with
# jax_use_simplified_jaxpr_constants.
_NOT_SHOWN = ("callback", "jax.const")


@dataclass(frozen=True)
class Executable:
    """A compiled program of leaves, called with trees.

    Attributes:
        compiled: takes leaves, and returns a list of them.
        treedef: the structure of what the program returns.
    """

    compiled: Compiled
    treedef: Any

    def __call__(self, *args: Any) -> Any:
        """Runs the program."""
        return jax.tree.unflatten(self.treedef, self.compiled(*jax.tree.leaves(args)))

    @property
    def out_info(self) -> Any:
        """Shapes and dtypes of what it returns."""
        return jax.tree.unflatten(self.treedef, self.compiled.out_info)

    @property
    def held(self) -> list[jax.Array]:
        """The large arrays that it closes over."""
        return self.compiled.arrays if isinstance(self.compiled, Holding) else []

    def memory_analysis(self) -> Any:
        """As `jax.stages.Compiled.memory_analysis`."""
        return self.compiled.memory_analysis()


class EqualPrograms:
    """Compiles programs for devices; a program that equals an earlier one is not compiled again.

    Stages with equal layers differ only in the numbers of their values. These numbers are in the
    structure of arguments and results, and not in the program, which takes and returns leaves.
    """

    def __init__(self) -> None:
        self._known: dict[Any, jax.stages.Compiled] = {}

    def compile_for_each(
        self,
        fn: Callable[..., Any],
        arguments: Sequence[Any],
        devices: Sequence[jax.Device],
        *,
        donate: tuple[int, ...] = (),
    ) -> list[Executable]:
        """As `executable.compile_for_each`."""
        leaves, in_tree = jax.tree.flatten(tuple(arguments))
        numbers = jax.tree.leaves(
            [jax.tree.map(lambda _, i=i: i, tree) for i, tree in enumerate(arguments)]
        )
        treedefs: list[Any] = []

        def flat(*leaves: Any) -> list[Any]:
            found, treedef = jax.tree.flatten(fn(*jax.tree.unflatten(in_tree, leaves)))
            treedefs.append(treedef)
            return found

        flat.__name__ = getattr(fn, "__name__", "program")  # as profiles show it
        donated = tuple(place for place, i in enumerate(numbers) if i in donate)
        # If all arguments are kept, the text of a program also shows which of them it needs.
        how: dict[str, Any] = {"donate": donated, "keep_unused": True, "compile": self._compile}
        compiled = compile_for_each(flat, leaves, devices, **how)
        return [Executable(one, treedefs[0]) for one in compiled]

    def _compile(
        self, traced: jax.stages.Traced, lowered: jax.stages.Lowered, device: jax.Device
    ) -> jax.stages.Compiled:
        avals = [*traced.jaxpr.in_avals, *traced.jaxpr.out_avals]
        # The text does not show weak types: that a Python number adapts to the dtypes around it.
        weak = tuple(getattr(aval, "weak_type", False) for aval in avals)
        text = lowered.as_text()
        if any(mark in text for mark in _NOT_SHOWN):
            return lowered.compile()
        key = (hashlib.sha256(text.encode()).digest(), weak, device)
        if key not in self._known:
            self._known[key] = lowered.compile()
        return self._known[key]
