"""A stage: what it computes, and its derivative.

A stage's forward program computes what later stages need. Its backward program takes the same
inputs and the cotangents of what was sent, computes the rest again, and returns the gradients of
its parameters, the cotangents of its other inputs, and those results of the tower that it makes.
With `residuals` it takes the values that the forward program has kept instead.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from multitower.engines.segments import Segment


class Linearized(NamedTuple):
    """A stage linearized at some inputs.

    Attributes:
        ends: the outputs that have a cotangent.
        pull: the function from `jax.vjp`: from cotangents of `ends` to those of the inputs.
        results: results of the tower that this stage makes, by their place among all results.
        sent: the values that later stages need.
    """

    ends: Sequence[Any]
    pull: Any
    results: dict[int, Any]
    sent: list[Any]


class Backward(NamedTuple):
    """What a stage's backward program returns.

    Attributes:
        gradients: the gradients of the parameters, by number.
        cotangents: the cotangents of the other inputs, by number.
        results: results of the tower that this stage makes, by their place among all results.
    """

    gradients: dict[int, Any]
    cotangents: dict[int, Any]
    results: dict[int, Any]


@dataclass(frozen=True)
class Stage:
    """One stage of a tower's program.

    Attributes:
        segment: the operations of the stage.
        sent: the numbers of the values that later stages need.
        results: by place among the tower's results, the number of each result that this stage
            makes, or its literal value.
        differentiated: the numbers of the inputs that get a gradient or cotangent here.
        answered: the numbers of the sent values for which later stages return a cotangent.
        share: the number of the value to differentiate, if this stage makes it; else None.
    """

    segment: Segment
    sent: tuple[int, ...]
    results: Mapping[int, Any]
    differentiated: tuple[int, ...]
    answered: tuple[int, ...]
    share: int | None

    @property
    def inputs(self) -> tuple[int, ...]:
        """The numbers of its inputs."""
        return self.segment.inputs

    def forward(self, values: Sequence[Any]) -> list[Any]:
        """The values of `sent`, from those of `inputs`."""
        known = self._compute(dict(zip(self.inputs, values, strict=True)))
        return [known[number] for number in self.sent]

    def backward(
        self, values: Sequence[Any], cotangents: Sequence[Sequence[Any]], params: frozenset[int]
    ) -> Backward:
        """The backward program.

        Args:
            values: the values of `inputs`.
            cotangents: for each of `answered` the cotangents that later stages returned, those of
                the last stage first.
            params: the numbers of the parameters.
        """
        return self.pull(self.linearized(values), cotangents, params)

    def linearized(self, values: Sequence[Any]) -> Linearized:
        """Linearizes the stage at the values of `inputs`."""
        given = dict(zip(self.inputs, values, strict=True))

        def outputs(inputs: list[Any]) -> tuple[list[Any], Any]:
            known = self._compute({**given, **dict(zip(self.differentiated, inputs, strict=True))})
            results = {
                place: known[x] if isinstance(x, int) else jnp.asarray(x.val)
                for place, x in self.results.items()
            }
            sent = [known[number] for number in self.sent]
            return [known[number] for number in self._ends], (results, sent)

        inputs = [given[number] for number in self.differentiated]
        ends, pull, (results, sent) = jax.vjp(outputs, inputs, has_aux=True)
        return Linearized(ends, pull, results, sent)

    def pull(
        self, found: Linearized, cotangents: Sequence[Sequence[Any]], params: frozenset[int]
    ) -> Backward:
        """Pulls cotangents back through a linearized stage; arguments as for `backward`."""
        # Summed in the order of the stages, the last first, whatever the layout.
        seeds = [functools.reduce(operator.add, each) for each in cotangents]
        if self.share is not None:
            seeds.append(jnp.ones(found.ends[-1].shape, found.ends[-1].dtype))
        (gradients,) = found.pull(seeds)
        by_number = dict(zip(self.differentiated, gradients, strict=True))
        return Backward(
            {number: one for number, one in by_number.items() if number in params},
            {number: one for number, one in by_number.items() if number not in params},
            found.results,
        )

    @property
    def _ends(self) -> tuple[int, ...]:
        return self.answered if self.share is None else (*self.answered, self.share)

    def _compute(self, given: Mapping[int, Any]) -> dict[int, Any]:
        made = self.segment([given[number] for number in self.inputs])
        return {
            **self.segment.consts,
            **given,
            **dict(zip(self.segment.outputs, made, strict=True)),
        }
