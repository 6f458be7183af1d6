"""Steps of a model that is cut over devices: the same bits on any number of them."""

from typing import Any

import jax
import numpy as np

from multitower.engines.executable import compile_for_each
from multitower.engines.same_bits import scale_of, scale_shape
from multitower.engines.tracing import refuse_filled
from multitower.stages.layout import Layout
from multitower.stages.pieces import rows_of
from multitower.stages.pipeline import Pipeline
from multitower.steps.parts import Batches, StepParts
from multitower.steps.runner import Metrics
from multitower.steps.staged.first import First
from multitower.steps.staged.job import StagedJob, rest_of
from multitower.steps.staged.state import Head, StagedParts, parts_of
from multitower.steps.staged.update import WholeUpdate
from multitower.steps.staged.updates import Updates
from multitower.steps.staged.weights import StagedWeights
from multitower.steps.state.fields import Fields
from multitower.steps.state.kept import KeptState
from multitower.steps.state.replicas import check_replicas_of_stages
from multitower.towers.leaves import row_shapes
from multitower.towers.rows import BatchParts
from multitower.towers.split import cut, on_one_device


class StagedRunner:
    """Steps of a model in stages, for batches of one shape.

    Attributes:
        segments: the stages, cut where towers meet.
    """

    def __init__(
        self, step: StepParts, batches: Batches, layout: Layout, fields: Fields, *, remat: bool
    ) -> None:
        batch, tower_rows = batches.first, batches.tower_rows
        rows = row_shapes(batch.rows, tower_rows)
        shared = jax.device_put(_of_this_process(batch), layout.head)
        self._weights = None
        if batches.has_weights:
            self._weights = StagedWeights(step, batch.split, layout, (fields, shared, rows))
            shared = [*shared, *self._weights.shapes]
        self._job = StagedJob(
            step,
            batch.split,
            tower_rows=tower_rows,
            num_towers=layout.towers.num_towers,
            num_stages=layout.num_stages,
            given=(fields, shared, rows),
        )
        self._pipeline = Pipeline(self._job.chain, layout, remat=remat)
        self._tower_rows = tower_rows
        self._layout = layout
        before = (fields.step, fields.model_state)
        given = (before, self._pipeline.shapes_of_results(), scale_shape())
        (self._finish,) = compile_for_each(self._job.finish, given, [layout.head])
        chain = self._job.chain
        loss = self._finish.out_info[2]["loss"]
        whole = WholeUpdate(step, fields, (chain.homes, rows_of(chain.pieces)), loss)
        self._homes = whole.homes
        self.segments = chain.segments
        self._updates = Updates(step, whole, layout, chain)

    def run(self, state: KeptState, batch: BatchParts) -> tuple[KeptState, Metrics]:
        """Makes one update; the state is overwritten."""
        towers = self._layout.towers
        rows = cut(batch.rows, batch.num_rows, towers, self._tower_rows)
        refuse_filled(self._job.meets, batch.num_rows, self._tower_rows, towers)
        parts = self._parts(state)
        rest, scale = jax.device_put(
            (self._rest(parts.head, batch), scale_of(rows[0])), self._layout.head
        )
        if self._weights is not None:
            rest = [*rest, *self._weights.run(rest, rows)]
        totals = self._pipeline.run(self._params(parts), rest, rows)
        head = parts.head
        before = (head.step, head.model_state)
        count, model_state, metrics = self._finish(before, totals.results, scale)
        blocks, opt_state, more = self._updates.run(parts, totals.gradients, metrics["loss"])
        if "good" in more:
            model_state = self._updates.kept(more.pop("good"), model_state, head.model_state)
        state.spend()
        new = parts._replace(blocks=blocks, head=Head(count, model_state, head.rng, opt_state))
        return KeptState.of_parts(new, StagedParts.fields, state.maker), {**metrics, **more}

    def _parts(self, state: KeptState) -> StagedParts:
        """The state in parts for these stages; another runner may have cut the model elsewhere."""
        parts = state.parts()
        if isinstance(parts, First):
            parts = parts.on_devices(self._homes, self._layout)
            if parts.spans_processes:
                check_replicas_of_stages(parts.by_stage(), several=True)  # host-device sync
        elif parts is None or parts.homes != self._homes:
            parts = parts_of(state.fields(), self._homes, self._layout)
        return parts

    def _rest(self, head: Head, batch: BatchParts) -> list[Any]:
        """The arguments of a tower's program that stand between parameters and rows."""
        fields = Fields(head.step, (), (), (), head.model_state, head.rng)
        return jax.tree.leaves(rest_of(fields, _of_this_process(batch)))

    def _params(self, parts: StagedParts) -> list[dict[int, Any]]:
        """The parameters of each replica here, by their numbers in the tower's program."""
        number = self._job.chain.number
        return [
            {
                number(i, stage): leaf
                for stage, block in enumerate(replica)
                for i, leaf in block.params.items()
            }
            for replica in parts.blocks
        ]


def _of_this_process(batch: BatchParts) -> list[Any]:
    """What all towers share; NumPy's arrays are copied, because a loader may use theirs again."""
    copied = lambda leaf: np.array(leaf) if isinstance(leaf, np.ndarray) else on_one_device(leaf)
    return [copied(leaf) for leaf in batch.shared]
