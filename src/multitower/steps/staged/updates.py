"""The compiled update programs of all stages, and the decisions that all stages make together."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multitower.engines.equal_programs import EqualPrograms, Executable
from multitower.engines.packing import Packed, unpack
from multitower.engines.totals import with_one_nan
from multitower.stages.chain import Chain
from multitower.stages.layout import Layout
from multitower.steps.optimizing.clipping import leaf_squares
from multitower.steps.optimizing.extra_metrics import NORM, extra_metrics
from multitower.steps.optimizing.update import finite_leaves, stays_finite
from multitower.steps.parts import StepParts
from multitower.steps.staged.state import Block, StagedParts
from multitower.steps.staged.update import SHARED, WholeUpdate


class Updates:
    """Updates every stage's leaves on its devices.

    Args:
        step: what the step is made of.
        whole: the update of all parameters, from which each stage takes its part.
        layout: stages on devices.
        chain: the model in stages; it numbers the gradients.
    """

    def __init__(self, step: StepParts, whole: WholeUpdate, layout: Layout, chain: Chain) -> None:
        self._step = step
        self._whole = whole
        self._layout = layout
        self._chain = chain
        homes = whole.homes
        stages = range(layout.num_stages)
        self._with_params = [s for s in stages if homes.params_of(s)]
        self._stages = [s for s in stages if homes.params_of(s) or homes.opt_state_of(s)]
        order = (i for s in self._with_params for i in homes.params_of(s))
        self._places: list[list[int]] = [[] for _ in homes.params]
        for place, number in enumerate(order):
            self._places[number].append(place)
        self._needs_finite = step.diagnostics or step.skip_nonfinite
        self._equal = EqualPrograms()
        self._compiled: dict[Any, list[Executable]] = {}

    def run(
        self, parts: StagedParts, gradients: Sequence[Sequence[list[Packed]]], loss: jax.Array
    ) -> tuple[list[list[Block]], dict[int, Any], dict[str, Any]]:
        """Makes one update. Without `skip_nonfinite` it overwrites the blocks.

        Returns:
            The new blocks, the new leaves of the optimizer's state that are shared, and metrics.
        """
        scalars = {"loss": loss, "step": parts.head.step}
        squares = None
        if self._step.clip_norm is not None or NORM in self._step.extra_metrics:
            squares = self._squares(parts, gradients)
        if self._step.clip_norm is not None:
            scalars["squares"] = squares
        rest = (parts.head.opt_state, scalars)
        new = [list(replica) for replica in parts.blocks]
        finite: dict[int, Any] = {}
        for r in range(len(self._layout.replicas)):
            for s in self._stages:
                there = jax.device_put(rest, self._layout.device(r, s))
                given = (parts.blocks[r][s], gradients[r][s], there)
                # With `skip_nonfinite` the old block may be needed again.
                donate = () if self._step.skip_nonfinite else (0,)
                program = functools.partial(self._update, s)
                new[r][s], found = self._call(("update", s), program, given, (r, s), donate)
                finite.setdefault(s, found)
        shared = self._shared(rest)
        told = self._told(parts, new, shared, squares)  # of this update, even if it is not made
        metrics: dict[str, Any] = {}
        if self._needs_finite:
            new, shared, metrics = self._checked(parts, new, shared, finite, loss)
        return new, shared, {**metrics, **told}

    def kept(self, good: jax.Array, new: Any, old: Any) -> Any:
        """The new values if the step is good, else the old ones; both on the head's device."""
        if not jax.tree.leaves(new):
            return new
        key = ("kept", jax.tree.structure(new))
        return self._call(key, _keep, (good, new, old))

    def _told(
        self, parts: StagedParts, new: Any, shared: dict[int, Any], squares: Any
    ) -> dict[str, Any]:
        """The extra metrics of the update, on the head's device."""
        if not self._step.extra_metrics:
            return {}
        tree = parts.trees.opt_state
        kept = {i: leaf for block in new[0] for i, leaf in block.opt_state.items()}
        state = jax.device_put(
            {**{i: leaf for i, leaf in kept.items() if not leaf.ndim}, **shared}, self._layout.head
        )
        squares = jax.device_put(squares, self._layout.head)

        def program(state: dict[int, Any], squares: Any) -> dict[str, Any]:
            numbers = [state.get(i) for i in range(tree.num_leaves)]
            if squares is not None:
                squares = self._by_leaf(squares, operator.add)
            return extra_metrics(self._step, jax.tree.unflatten(tree, numbers), squares)

        return self._call("told", program, (state, squares))

    def _update(self, stage: int, block: Block, packs: list[Packed], rest: Any) -> Any:
        """The update program of a stage: its new block, and what of it is finite.

        That is a bool for each parameter, and with `skip_nonfinite` a list of one for the
        optimizer's state; () if nobody asks.
        """
        shared, scalars = rest
        own = self._whole.homes.opt_state_of(stage)
        segment = self._whole.of_stage(stage)
        gradients = self._gradients(stage, block.params, packs)
        state = (block.opt_state, block.ema_params)
        leaves = (block.params, gradients, state)
        known = self._whole.named(stage, leaves, (shared, self._ordered(scalars)))
        found = iter(segment([known[number] for number in segment.inputs]))
        params = {i: next(found) for i in block.params}
        opt_state = {i: next(found) for i in own}
        new = Block(params, opt_state, {i: next(found) for i in block.ema_params})
        if not self._needs_finite:
            return new, ()
        skips = self._step.skip_nonfinite
        of_state = [stays_finite(block.opt_state, opt_state)] if skips else []
        return new, (finite_leaves(params), of_state)

    def _gradients(
        self, stage: int, params: Mapping[int, Any], packs: Sequence[Packed]
    ) -> dict[int, Any]:
        """Gradients by number: the stage's own, plus those of later stages, last stage first."""
        all_of = [unpack(packed) for packed in packs]
        found: dict[int, Any] = {}
        for i, param in params.items():
            number = self._chain.number(i, stage)
            terms = [each[number] for each in all_of if number in each]
            total = functools.reduce(operator.add, terms) if terms else jnp.zeros_like(param)
            found[i] = with_one_nan(total).astype(param.dtype)
        return found

    def _ordered(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        """The scalars, with squares of all leaves in the order of the leaves."""
        found = dict(scalars)
        if "squares" in found:
            found["squares"] = self._by_leaf(found["squares"], operator.add)
        return found

    def _by_leaf(self, found: Sequence[Any], join: Callable[[Any, Any], Any]) -> jax.Array:
        """One number per leaf, in order, from those of all stages; those of pieces are joined."""
        all_of = jnp.concatenate(found)
        result = all_of[np.array([places[0] for places in self._places], int)]
        for n in range(1, max(map(len, self._places), default=0)):
            more = np.array([len(places) > n for places in self._places])
            at = np.array([places[min(n, len(places) - 1)] for places in self._places])
            result = jnp.where(more, join(result, all_of[at]), result)
        return result

    def _squares(
        self, parts: StagedParts, gradients: Sequence[Sequence[list[Packed]]]
    ) -> list[Any]:
        """The sums of squares of every stage's gradients, from replica 0: all have the same."""

        def program(stage: int, params: dict[int, Any], packs: list[Packed]) -> jax.Array:
            return leaf_squares(list(self._gradients(stage, params, packs).values()))

        return [
            self._call(
                ("squares", s),
                functools.partial(program, s),
                (parts.blocks[0][s].params, gradients[0][s]),
                (0, s),
            )
            for s in self._with_params
        ] or [np.zeros(0, np.float32)]  # parameters without arrays

    def _shared(self, rest: Any) -> dict[int, Any]:
        """The new leaves of the optimizer's state that belong to no stage."""
        if not rest[0]:
            return {}

        def program(shared: Any, scalars: Any) -> dict[int, Any]:
            segment = self._whole.of_stage(SHARED)
            known = self._whole.named(SHARED, ({}, {}, ({}, {})), (shared, self._ordered(scalars)))
            found = segment([known[number] for number in segment.inputs])
            return dict(zip(self._whole.homes.opt_state_of(SHARED), found, strict=True))

        given = jax.device_put(rest, self._layout.head)
        return self._call("shared", program, given)

    def _checked(
        self, parts: StagedParts, new: Any, shared: Any, finite: dict[int, Any], loss: jax.Array
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Checks whether all is finite; if not, `skip_nonfinite` brings back the old state."""
        of_params = [finite[s][0] for s in self._with_params] or [np.zeros(0, bool)]
        of_state = [stays for _, found in finite.values() for stays in found]
        before = parts.head.opt_state
        given = jax.device_put((of_params, of_state, before, shared, loss), self._layout.head)
        all_of, good, skipped = self._call("decide", self._decide, given)
        metrics: dict[str, Any] = {}
        if self._step.diagnostics:
            metrics["finite_params"] = all_of
        if not self._step.skip_nonfinite:
            return new, shared, metrics
        for r in range(len(self._layout.replicas)):
            for s in self._stages:
                there = jax.device_put(good, self._layout.device(r, s))
                given = (there, new[r][s], parts.blocks[r][s])
                new[r][s] = self._call(("keep", s), _keep, given, (r, s), (1,))
        shared = self.kept(good, shared, before)
        return new, shared, {**metrics, "skipped": skipped, "good": good}

    def _decide(
        self, of_params: list[Any], of_state: list[Any], before: Any, shared: Any, loss: jax.Array
    ) -> tuple[Any, Any, Any]:
        all_of = self._by_leaf(of_params, operator.and_)
        good = all_of.all() & jnp.isfinite(loss) & stays_finite(before, shared)
        good = functools.reduce(operator.and_, of_state, good)
        return all_of, good, 1 - good.astype(jnp.float32)

    def _call(
        self,
        key: Any,
        fn: Any,
        given: Any,
        where: tuple[int, int] | None = None,
        donate: tuple[int, ...] = (),
    ) -> Any:
        """Calls a program on (replica, stage), compiled once for all replicas; or on the head."""
        replica, stage = where or (0, self._layout.num_stages - 1)
        if key not in self._compiled:
            devices = self._layout.devices_of(stage)
            self._compiled[key] = self._equal.compile_for_each(fn, given, devices, donate=donate)
        return self._compiled[key][replica](*given)


def _keep(good: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)
