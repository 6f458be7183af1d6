"""A stage: what it computes, and how that is differentiated.

A stage's forward program computes what later stages need. Its backward program takes the same
inputs and the cotangents of what was sent, computes the rest again, and returns the gradients of
its parameters, the cotangents of its other inputs, and those results of the tower that it makes.
With `residuals` it takes what the forward program has kept instead.
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
    """A stage at some inputs, ready to be differentiated.

    Attributes:
        ends: what has a cotangent.
        pull: of `jax.vjp`: from the cotangents of `ends` to those of the inputs.
        results: of the tower, by their place among its results.
        sent: what later stages need.
    """

    ends: Sequence[Any]
    pull: Any
    results: dict[int, Any]
    sent: list[Any]


class Backward(NamedTuple):
    """What a stage's backward program returns.

    Attributes:
        gradients: of the parameters, by number.
        cotangents: of the other inputs, by number.
        results: of the tower, by their place among its results.
    """

    gradients: dict[int, Any]
    cotangents: dict[int, Any]
    results: dict[int, Any]


@dataclass(frozen=True)
class Stage:
    """One stage of a tower's program.

    Attributes:
        segment: what it computes.
        sent: numbers of what later stages need of it.
        results: for each result of the tower that it makes its number, or the value itself.
        differentiated: numbers of its inputs that have a gradient here.
        answered: numbers of what it sends that later stages return a cotangent for.
        share: the number of what is differentiated, if it is made here.
    """

    segment: Segment
    sent: tuple[int, ...]
    results: Mapping[int, Any]
    differentiated: tuple[int, ...]
    answered: tuple[int, ...]
    share: int | None

    @property
    def inputs(self) -> tuple[int, ...]:
        """Numbers of what it needs."""
        return self.segment.inputs

    def forward(self, values: Sequence[Any]) -> list[Any]:
        """What is sent, from the values of `inputs`."""
        known = self._compute(dict(zip(self.inputs, values, strict=True)))
        return [known[number] for number in self.sent]

    def backward(
        self, values: Sequence[Any], cotangents: Sequence[Sequence[Any]], params: frozenset[int]
    ) -> Backward:
        """The backward program.

        Args:
            values: of `inputs`.
            cotangents: for each of `answered` those that later stages returned, the last first.
            params: numbers of the parameters.
        """
        return self.pull(self.linearized(values), cotangents, params)

    def linearized(self, values: Sequence[Any]) -> Linearized:
        """What the backward program is made of, from the values of `inputs`."""
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
        """The rest of the backward program; cotangents and params as for `backward`."""
        # In the order of the stages, the last first; the same wherever they run.
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
