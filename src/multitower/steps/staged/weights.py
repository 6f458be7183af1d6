"""The weights of a loss that is a ratio, which are summed before the stages begin."""

from collections.abc import Sequence
from typing import Any

import jax

from multitower.engines.collectives import axis_of
from multitower.engines.job import Job, Shared, TowerResult
from multitower.engines.same_bits import SameBits
from multitower.engines.segments import is_call, open_calls, slice_of
from multitower.errors import ArgumentError
from multitower.stages.layout import Layout
from multitower.steps.job import make_weights_job
from multitower.steps.parts import StepParts
from multitower.steps.staged.job import rest_of
from multitower.steps.state.fields import Fields, shapes_of
from multitower.towers.rows import Split, Tower
from multitower.towers.split import TowerRows


class StagedWeights:
    """Adds up the weights of all towers, without the model.

    Args:
        step: what the step is made of.
        split: which leaves of the batch are rows.
        layout: stages on devices.
        given: (fields, the batch's shared leaves, one tower's rows), arrays or shapes.

    Attributes:
        shapes: shapes and dtypes of the weights.

    Raises:
        ArgumentError: a weight is computed from parameters.
    """

    def __init__(
        self,
        step: StepParts,
        split: Split,
        layout: Layout,
        given: tuple[Fields, Sequence[Any], Sequence[Any]],
    ) -> None:
        fields, shared, rows = given
        job = make_weights_job(step, split, rows[0].shape[0])

        def tower(params: Any, rest: Any, rows: Any, here: Tower) -> list[jax.Array]:
            kept, shared = rest
            given = (kept._replace(params=params), shared)
            return job.tower(Shared((), given), rows, here).sums

        shapes = shapes_of((fields.params, rest_of(fields, shared), list(rows)))
        axis = axis_of(layout.towers.num_towers)
        trace = jax.make_jaxpr(tower, axis_env=axis, return_shape=True)
        closed, self.shapes = trace(*shapes, Tower.shapes())
        program = open_calls(closed, is_call)
        segment = slice_of(program, program.outputs)
        num_params = len(jax.tree.leaves(fields.params))
        if set(program.inputs[:num_params]).intersection(segment.inputs):
            raise ArgumentError(
                "the weight of mt.ratio(total, weight) is computed from the parameters, and with "
                "stages= it must be known before the first stage begins. Compute it from the "
                "batch, or leave stages= out."
            )
        # Which of the arguments after the parameters the segment takes.
        places = [program.inputs.index(x) - num_params for x in segment.inputs]

        def alone(shared: Shared, rows: list[Any], here: Tower) -> TowerResult:
            given = [*shared.rest, *rows, *here]
            return TowerResult(sums=segment([given[place] for place in places]))

        self._devices = layout.devices_of(0)  # where the rows are
        self._engine = SameBits(Job(alone, lambda state, means, sums: sums), layout.towers)

    def run(self, rest: Sequence[Any], rows: Sequence[TowerRows]) -> list[jax.Array]:
        """The weights of all towers, on the first device of this process.

        Args:
            rest: the arguments of a tower's program that stand between parameters and rows.
            rows: the split arrays.
        """
        replicas = [Shared((), jax.device_put(list(rest), device)) for device in self._devices]
        return self._engine.run(replicas, rows).results[0]
