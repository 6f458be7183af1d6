"""Same-bits steps in which every tower updates its own block of the parameters.

The reduction leaves every device the gradients of its towers' blocks; one program, the same for
every tower, updates a block; then every device gets all blocks. That sends as much as an all-reduce
does, and the optimizer's state and the moving average are kept once instead of on every device.

Source: ZeRO stage 1 (Rajbhandari et al. 2020); Xu et al. 2020, "Automatic Cross-Replica Sharding
of Weight Update in Data-Parallel Training".
"""

import operator
from collections.abc import Callable
from typing import Any

import jax

from multitower.engines import reduction
from multitower.engines.executable import Compiled, WholeNumbers, compile_for_each, signature
from multitower.engines.same_bits import Finished, SameBits
from multitower.engines.totals import with_one_nan
from multitower.steps.blocks.state import Block, BlockParts, BlockState
from multitower.steps.job import make_job
from multitower.steps.optimizing.clipping import add_towers, leaf_squares
from multitower.steps.optimizing.extra_metrics import NORM, extra_metrics
from multitower.steps.optimizing.update import finite_leaves, update
from multitower.steps.parts import Batches, StepParts
from multitower.steps.runner import Metrics, TowerFeeder
from multitower.steps.state.bundles import bundled_job, laid, laid_like, opened
from multitower.steps.state.fields import Fields
from multitower.steps.state.kept import KeptState
from multitower.towers.placement import Placement
from multitower.towers.rows import BatchParts


class BlockRunner:
    """Steps whose bits do not depend on the number of devices, with a state in blocks."""

    def __init__(
        self,
        step: StepParts,
        batches: Batches,
        placement: Placement,
        sharded: BlockState,
    ) -> None:
        self._feeder = TowerFeeder(step, batches, placement)
        layout, given = sharded.layout, (batches.split, batches.tower_rows)
        job = make_job(step, *given, placement.num_towers, cut=layout.cut)
        self._engine = SameBits(bundled_job(job), placement)
        self._gather = reduction.make_gather(placement, lambda rows: laid(layout.whole(rows)))
        self._step = step
        self._placement = placement
        self._devices = [placement.devices[d] for d in placement.local]
        self._sharded = sharded
        self._gather_squares = reduction.make_gather(placement, operator.itemgetter(0))
        self._numbers = WholeNumbers()
        self._compiled: dict[Any, list[Compiled]] = {}
        self._finite = jax.jit(lambda params: finite_leaves(opened(params)))

    def run(self, state: KeptState, batch: BatchParts) -> tuple[KeptState, Metrics]:
        """Makes one update; the state is overwritten."""
        parts: BlockParts = state.parts()
        replicas, rows = self._feeder.feed(batch, parts.replicas)
        finished = self._engine.run(replicas, rows)
        state.spend()
        new_rows, blocks, told = self._update(finished, parts.blocks)
        params = reduction.gather_values(self._gather, new_rows, self._placement)
        new = [
            fields._replace(params=own)
            for (fields, _), own in zip(finished.results, params, strict=True)
        ]
        metrics = {**finished.results[0][1], **told}
        if self._step.diagnostics:
            metrics["finite_params"] = self._finite(params[0])
        return self._sharded.state(BlockParts(new, blocks), state.maker), metrics

    def _update(
        self, finished: Finished, blocks: dict[int, Block]
    ) -> tuple[dict[int, list[jax.Array]], dict[int, Block], dict[str, jax.Array]]:
        """Updates the blocks of all local towers.

        Returns:
            The new rows of each tower, its new block, and the metrics of the update, which are the
            same for all towers.
        """
        squares = self._squares_of_all(finished)

        def arguments(i: int, tower: int) -> tuple[Any, ...]:
            fields, metrics = finished.results[i]
            number = self._numbers.on(self._devices[i], tower)
            given = (fields.params, fields.step, metrics["loss"], number, squares[i])
            return blocks[tower], finished.blocks[tower], given

        found = self._for_each_tower(self._update_block, arguments, donate=(0,))
        new_rows = {tower: rows for tower, (rows, _, _) in found.items()}
        new_blocks = {tower: block for tower, (_, block, _) in found.items()}
        return new_rows, new_blocks, next(iter(found.values()))[2]

    def _update_block(self, block: Block, rows: Any, given: Any) -> tuple[Any, Block, Any]:
        """The update program: the same for every tower."""
        params, step_after, loss, tower, squares = given
        layout = self._sharded.layout
        own = layout.block(opened(params), tower)
        gradients = self._gradients(rows)
        opt_state, average = map(opened, block)
        fields = Fields(step_after - 1, own, opt_state, average, (), None)
        if squares is not None:
            squares = add_towers(squares)
        new = update(self._step, fields, gradients, loss, (), squares=squares)
        told = extra_metrics(self._step, new.opt_state, squares)
        block = Block(*map(laid_like, block, (new.opt_state, new.ema_params)))
        return layout.to_rows(new.params), block, told

    def _gradients(self, rows: Any) -> Any:
        """A tower's block of the gradients, from its rows of the totals."""
        layout = self._sharded.layout
        return jax.tree.map(
            lambda total, param: with_one_nan(total).astype(param.dtype),
            layout.of_rows(rows),
            layout.shapes_of_block(),
        )

    def _squares_of_all(self, finished: Finished) -> list[Any]:
        """The sums of squares of all towers' blocks, once per local device; None if not needed."""
        if self._step.clip_norm is None and NORM not in self._step.extra_metrics:
            return [None] * len(self._devices)
        arguments = lambda i, tower: (finished.blocks[tower],)
        found = self._for_each_tower(self._squares_of, arguments)
        return reduction.gather_values(self._gather_squares, found, self._placement)

    def _squares_of(self, rows: Any) -> list[jax.Array]:
        """The sums of squares of a tower's block: the same program for every tower."""
        return [leaf_squares(self._gradients(rows))]

    def _for_each_tower(
        self,
        fn: Callable[..., Any],
        arguments: Callable[[int, int], tuple[Any, ...]],
        *,
        donate: tuple[int, ...] = (),
    ) -> dict[int, Any]:
        """What `fn` returns for each local tower, by its number; compiled once for all of them.

        Args:
            fn: a method of this class.
            arguments: its arguments, of (number of the local device, number of the tower).
            donate: positions of the arguments that are overwritten.
        """
        found: dict[int, Any] = {}
        key = None  # the same for every tower
        for i, d in enumerate(self._placement.local):
            for tower in self._placement.towers_on[d]:
                given = arguments(i, tower)
                key = key or (fn.__name__, signature(given))
                if key not in self._compiled:
                    self._compiled[key] = compile_for_each(fn, given, self._devices, donate=donate)
                found[tower] = self._compiled[key][i](*given)
        return found
