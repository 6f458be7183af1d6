"""Residuals: values that a stage's forward program keeps for its backward one (`remat=False`).

They are those of `jax.vjp`. Values that depend on parameters only are the same for every tower:
they are parameters, or are computed again, and are not kept for each tower.
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
        stage: a stage of a chain.
        forward: the forward program; it returns what is sent, then what else is kept.
        shapes: the shapes of the values that the backward program takes.
        from_inputs: the places of the stage's inputs that the backward program takes.
        from_made: the places of the results of `forward` that it takes.
        again: the program of values that are computed again, from parameters.
        pattern: the shapes of `Linearized.ends`; the structure of `pull` and `results`; and for
            each of their leaves its number in `forward`, or a literal.
    """

    stage: Stage
    forward: Segment
    shapes: list[Any]
    from_inputs: tuple[int, ...]
    from_made: tuple[int, ...]
    again: Segment
    pattern: tuple[Sequence[Any], Any, Sequence[Any]]

    def take(self, values: Sequence[Any], made: Sequence[Any]) -> list[Any]:
        """The values to hold until the backward program runs, from inputs and `forward` results."""
        return [*(values[i] for i in self.from_inputs), *(made[i] for i in self.from_made)]

    def backward(
        self, held: Sequence[Any], cotangents: Sequence[Sequence[Any]], params: frozenset[int]
    ) -> Backward:
        """As `Stage.backward`, from the values that are held."""
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
        """The numbers of the held values in the chain; None for results of `forward`."""
        made = [None] * len(self.from_made)
        return [*(self.stage.inputs[i] for i in self.from_inputs), *made]

    @property
    def _numbers(self) -> list[int]:
        """The numbers of the held values in `forward`."""
        made, inputs = self.forward.outputs, self.forward.inputs
        return [*(inputs[i] for i in self.from_inputs), *(made[i] for i in self.from_made)]


def keep_residuals(stage: Stage, shapes: Sequence[Any], params: frozenset[int]) -> Residuals:
    """Splits the differentiation of a stage into two programs.

    Args:
        stage: a stage of a chain.
        shapes: the shapes of its inputs.
        params: the numbers of the parameters.
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
    # A program takes all inputs of its stage, also those that are not used.
    forward = slice_of(program, outputs)
    forward = Segment(forward.steps, tuple(program.inputs), forward.outputs, forward.consts)
    from_inputs = [places[x] for x in (*again.inputs, *(x for x in own if x in places))]
    from_made = [outputs.index(x) for x in own if x not in places]
    made = jax.eval_shape(forward, list(shapes))
    taken = [*(shapes[i] for i in from_inputs), *(made[i] for i in from_made)]
    pattern = (ends, treedef, leaves)
    return Residuals(stage, forward, taken, tuple(from_inputs), tuple(from_made), again, pattern)
