"""Residuals: what a stage's forward program keeps for its backward one, to compute nothing twice.

They are those of `jax.vjp`. What depends on parameters alone is the same for every tower: it is
computed again, or is a parameter, and is not kept for each of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from multitower.engines.segments import Segment, is_call, needs_of, numbers_in, open_calls, slice_of
from multitower.stages.passes.stage import Backward, Linearized, Stage


@dataclass(frozen=True)
class Residuals:
    """A stage as a forward program that keeps residuals, and a backward one that takes them.

    Attributes:
        stage: of a chain.
        forward: the forward program: what is sent, then what else is kept.
        shapes: of what the backward program takes.
        from_inputs: which of the stage's inputs it takes.
        from_made: which results of the forward program it takes.
        again: what is computed again, from those of the inputs that are parameters.
        pattern: shapes of the ends, the structures of pull and results, and for each of their
            leaves its number in `forward`, or a literal.
    """

    stage: Stage
    forward: Segment
    shapes: list[Any]
    from_inputs: tuple[int, ...]
    from_made: tuple[int, ...]
    again: Segment
    pattern: tuple[Sequence[Any], Any, Sequence[Any]]

    def take(self, values: Sequence[Any], made: Sequence[Any]) -> list[Any]:
        """What is held until the backward program runs, of inputs and what `forward` returned."""
        return [*(values[i] for i in self.from_inputs), *(made[i] for i in self.from_made)]

    def backward(
        self, held: Sequence[Any], cotangents: Sequence[Sequence[Any]], params: frozenset[int]
    ) -> Backward:
        """As `Stage.backward`, from what is held."""
        known = dict(zip(self._numbers, held, strict=True))
        computed = self.again([known[number] for number in self.again.inputs])
        known.update(zip(self.again.outputs, computed, strict=True))
        ends, treedef, leaves = self.pattern
        found = [
            known[x] if isinstance(x, int) else jnp.asarray(x.val, x.aval.dtype) for x in leaves
        ]
        pull, results = jax.tree.unflatten(treedef, found)
        return self.stage.pull(Linearized(ends, pull, results, []), cotangents, params)

    @property
    def names(self) -> list[int | None]:
        """The numbers that the chain has for what is held; None for what `forward` makes."""
        made = [None] * len(self.from_made)
        return [*(self.stage.inputs[i] for i in self.from_inputs), *made]

    @property
    def _numbers(self) -> list[int]:
        """The numbers of what is held."""
        made, inputs = self.forward.outputs, self.forward.inputs
        return [*(inputs[i] for i in self.from_inputs), *(made[i] for i in self.from_made)]


def keep_residuals(stage: Stage, shapes: Sequence[Any], params: frozenset[int]) -> Residuals:
    """Splits the differentiation of a stage into two programs.

    Args:
        stage: of a chain.
        shapes: of its inputs.
        params: numbers of the parameters.
    """
    structures: list[Any] = []

    def run(*values: Any) -> tuple[list[Any], list[Any]]:
        found = stage.linearized(values)
        leaves, treedef = jax.tree.flatten((found.pull, found.results))
        structures[:] = treedef, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in found.ends]
        return found.sent, leaves

    program = open_calls(jax.make_jaxpr(run)(*shapes), is_call)
    treedef, ends = structures
    sent = program.outputs[: len(stage.sent)]
    leaves = program.outputs[len(stage.sent) :]
    wanted = list(dict.fromkeys(numbers_in(leaves)))
    places = {number: i for i, number in enumerate(program.inputs)}
    alike = {n for n, name in zip(program.inputs, stage.inputs, strict=True) if name in params}
    needs = needs_of(program)
    again = slice_of(program, [x for x in wanted if needs[x] <= alike])
    own = [x for x in wanted if not needs[x] <= alike]
    outputs = [*sent, *(x for x in own if x not in places and x not in sent)]
    # A program takes all inputs of its stage, also those that nothing needs.
    forward = slice_of(program, outputs)
    forward = Segment(forward.steps, tuple(program.inputs), forward.outputs, forward.consts)
    from_inputs = [places[x] for x in (*again.inputs, *(x for x in own if x in places))]
    from_made = [outputs.index(x) for x in own if x not in places]
    made = jax.eval_shape(forward, list(shapes))
    taken = [*(shapes[i] for i in from_inputs), *(made[i] for i in from_made)]
    pattern = (ends, treedef, leaves)
    return Residuals(stage, forward, taken, tuple(from_inputs), tuple(from_made), again, pattern)
