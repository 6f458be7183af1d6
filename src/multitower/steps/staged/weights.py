"""The weights of a loss that is a ratio: they must be known before the stages begin."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from multitower.engines import reduction
from multitower.engines.executable import compile_for_each
from multitower.engines.job import Shared
from multitower.engines.segments import is_call, open_calls, slice_of
from multitower.errors import ArgumentError
from multitower.stages.layout import Layout
from multitower.steps.job import make_weights_job
from multitower.steps.parts import StepParts
from multitower.steps.staged.job import rest_of, shapes_of
from multitower.steps.state.fields import Fields
from multitower.towers.rows import Split, Tower
from multitower.towers.split import TowerRows


class StagedWeights:
    """Adds up the weights of all towers, without the model.

    Args:
        step: what to do.
        split: how the batch goes to the towers.
        layout: stages on devices.
        given: (fields, the batch's shared leaves, one tower's rows), arrays or shapes.

    Attributes:
        shapes: of the weights.

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
            (count, model_state, rng), shared = rest
            fields = Fields(count, params, (), (), model_state, rng)
            return job.tower(Shared((), (fields, shared)), rows, here).sums

        number = jax.ShapeDtypeStruct((), np.int32)
        shapes = shapes_of((fields.params, rest_of(fields, shared), list(rows)))
        closed = jax.make_jaxpr(tower)(*shapes, Tower(number, number, number))
        program = open_calls(closed, is_call)
        segment = slice_of(program, program.outputs)
        num_params = len(jax.tree.leaves(fields.params))
        if set(program.inputs[:num_params]).intersection(segment.inputs):
            raise ArgumentError(
                "the weight of mt.ratio(total, weight) is computed from the parameters, and with "
                "stages= it must be known before the first stage begins. Compute it from the "
                "batch, or leave stages= out."
            )
        # Which of the arguments after the parameters it takes.
        self._places = [program.inputs.index(x) - num_params for x in segment.inputs]
        self._layout = layout
        devices = layout.devices_of(layout.num_stages - 1)
        avals = [closed.in_avals[place + num_params] for place in self._places]
        self._programs = compile_for_each(segment.__call__, (shapes_of(avals),), devices)
        self.shapes = list(self._programs[0].out_info)
        given_twice = (self.shapes, self.shapes)
        (self._add,) = compile_for_each(reduction.add_buffers, given_twice, [layout.head])

    def run(self, rest: Sequence[Any], rows: Sequence[TowerRows]) -> list[jax.Array]:
        """The weights of all towers, on the head's device.

        Args:
            rest: the arguments of a tower's program between parameters and rows.
            rows: those after them.
        """

        def of_tower(tower: int) -> list[jax.Array]:
            replica = self._layout.towers.owners[tower]
            numbers = [np.int32(count) for count in rows[0].counts(tower)]
            given = [*rest, *(leaf.pieces[tower] for leaf in rows), *numbers]
            values = [given[place] for place in self._places]
            device = self._layout.device(replica, self._layout.num_stages - 1)
            found = self._programs[replica](jax.device_put(values, device))
            return jax.device_put(found, self._layout.head)

        tree = reduction.sum_tree(0, self._layout.towers.num_towers)
        return reduction.evaluate(tree, of_tower, self._add)
