"""One tower of a step as a program of leaves, and the metrics from its results."""

from collections.abc import Sequence
from typing import Any

import jax

from multitower.engines.job import Shared
from multitower.engines.packing import Packed, unpack
from multitower.engines.totals import with_one_nan
from multitower.engines.tracing import refuse_kept_values, trace
from multitower.stages.chain import Chain, make_chain
from multitower.stages.meeting.sums import without_collectives
from multitower.stages.pieces import rows_of
from multitower.steps.job import TowerStep
from multitower.steps.optimizing.update import check_same_types
from multitower.steps.parts import StepParts
from multitower.steps.staged.update import may_be_split
from multitower.steps.state.fields import Fields, shapes_of
from multitower.towers.rows import Split, Tower


class StagedJob:
    """Traces one tower of a step, cuts it, and puts the results together again.

    Args:
        step: what the step is made of.
        split: which leaves of the batch are rows.
        tower_rows: rows of a full tower.
        num_towers: how many towers there are.
        num_stages: how many stages there are.
        given: (fields, the batch's shared leaves, one tower's rows), arrays or shapes.

    Attributes:
        chain: the program in stages.
        meets: names the first place where towers exchange values; None if they do not.

    Raises:
        ArgumentError: the loss cannot be cut into so many stages, or keeps values.
        OutputError: towers cannot meet where the loss says so.
    """

    def __init__(
        self,
        step: StepParts,
        split: Split,
        *,
        tower_rows: int,
        num_towers: int,
        num_stages: int,
        given: tuple[Fields, Sequence[Any], Sequence[Any]],
    ) -> None:
        fields, shared, rows = given
        self._one = TowerStep(step, split, tower_rows, num_towers)
        shapes = shapes_of((fields.params, rest_of(fields, shared), list(rows)))
        traced = trace(self._tower, (*shapes, Tower.shapes()), num_towers)
        refuse_kept_values(traced.program)
        self.meets = traced.meets
        _, self._results = traced.treedef.children()
        closed = without_collectives(traced.program, traced.number, num_towers)
        num_params = len(jax.tree.leaves(fields.params))
        may_split = lambda pieces: may_be_split(step.optimizer, fields.params, rows_of(pieces))
        self.chain: Chain = make_chain(closed, num_params, num_stages, may_split=may_split)

    def _tower(
        self, params: Any, rest: tuple[Fields, list[Any]], rows: list[Any], here: Tower
    ) -> tuple[Any, Any]:
        """A tower's share of the loss, and the pair of what is averaged and what is summed."""
        kept, shared = rest
        given = (Shared(kept._replace(params=params), shared), rows, here)
        found = self._one.objective(params, *given)
        return found[0], self._one.results(*given, found)

    def finish(
        self, before: tuple[Any, Any], results: Sequence[Packed], scale: jax.Array
    ) -> tuple[Any, Any, dict[str, Any]]:
        """The new step count and model state, and the metrics, from the results of all stages."""
        of_means, _ = self._results.children()
        by_place: dict[int, Any] = {}
        for packed in results:
            places = jax.tree.unflatten(packed.layout.treedef, packed.layout.places)
            num_means = sum(place < of_means.num_leaves for place in places)
            by_place |= unpack(packed, scale, num_means)  # means have the smaller numbers
        leaves = [with_one_nan(by_place[place]) for place in range(self._results.num_leaves)]
        means, sums = jax.tree.unflatten(self._results, leaves)
        count, model_state = before
        metrics, new = self._one.finish(model_state, means, sums)
        blank = Fields(count, (), (), (), model_state, None)
        check_same_types(blank, blank._replace(model_state=new))
        return count + 1, new, metrics


def rest_of(fields: Fields, shared: Sequence[Any]) -> tuple[Fields, list[Any]]:
    """The arguments of a tower besides parameters and rows: the other fields, and shared leaves."""
    return fields._replace(params=(), opt_state=(), ema_params=()), list(shared)
