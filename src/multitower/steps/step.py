"""TrainStep: what `train_step` returns. Compiles a step for each kind of batch, and runs it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from multitower.engines.executable import settings
from multitower.engines.tracing import uneven
from multitower.errors import ArgumentError, BatchError, StateError
from multitower.functions.gradient_job import check_differentiable
from multitower.functions.outputs import refuse_ragged, warn_of_copies
from multitower.hardware.devices import DeviceSpec
from multitower.models.modules import Model, refuse_modules_inside
from multitower.stages.layout import Layout
from multitower.steps.arguments import refuse_tracers
from multitower.steps.looped import take_apart_each
from multitower.steps.makers import Maker, Makers, Seen, kind_of
from multitower.steps.optimizing.extra_metrics import check_learning_rate
from multitower.steps.parts import Batches, Looked, StepParts
from multitower.steps.precision import fitting_scale
from multitower.steps.rotation.options import RotationOptions
from multitower.steps.runner import Metrics
from multitower.steps.state.fields import Fields
from multitower.steps.state.kept import KeptState
from multitower.steps.state.train_state import TrainState, check_is_state, refuse_a_state
from multitower.steps.way import Runner, Way
from multitower.steps.ways import Division, find_way, most_a_call
from multitower.towers.leaves import is_traced, wide_dtype
from multitower.towers.placement import Placement
from multitower.towers.rows import BatchParts, take_apart
from multitower.towers.same_call import check_same_call, check_same_program
from multitower.towers.split import TowerRows
from multitower.towers.surroundings import (
    explaining,
    refuse_a_mesh,
    refuse_disabled_jit,
    refuse_inside_a_tower,
)

if TYPE_CHECKING:
    from multitower.stages.order import Segments
    from multitower.steps.rotation.turns import Turns


class TrainStep:
    """A training step on towers; made by `train_step`. Call it as `step(state, batch)`.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optax
        >>> import multitower as mt
        >>> def losses(w, batch):
        ...     return (w * batch["x"] - 3 * batch["x"]) ** 2
        >>> step = mt.train_step(losses, optax.sgd(0.1), towers=8)
        >>> state = step.init(jnp.float32(0.0))
        >>> for _ in range(20):
        ...     state, metrics = step(state, {"x": np.ones(8, np.float32)})
        >>> int(state.step), round(float(step.model(state)), 1), metrics["loss"].shape
        (20, 3.0, ())
        >>> step.placement.num_towers
        8
    """

    def __init__(
        self,
        step: StepParts,
        devices: DeviceSpec | None,
        towers: int | None,
        global_batch: int | None,
        division: Division,
    ) -> None:
        self._step = step
        self._devices = devices
        self._towers = towers
        self._given_batch = global_batch
        self._global_batch = global_batch  # else that of the first batch
        self._division = division
        self._way: Way | None = None
        if devices is not None:
            self._find_way()
        self._makers = Makers(step)
        self._has_run = False
        self._has_told_of_copies = False

    @property
    def placement(self) -> Placement:
        """Which device runs which towers. Reading it starts JAX."""
        return self._find_way().placement

    @property
    def layout(self) -> Layout | None:
        """Which device runs which stages; None without `stages=`. Reading it starts JAX."""
        return self._find_way().layout

    @property
    def turns(self) -> "Turns | None":
        """Which towers make which update, if updates are asynchronous. Reading it starts JAX."""
        return self._find_way().turns

    @property
    def segments(self) -> "Segments | None":
        """The stages, cut where towers meet; None without `stages=`, and before the first step."""
        return self._find_way().segments

    def init(self, params: Any, *, model_state: Any = None, rng: Any = None) -> TrainState:
        """Makes the initial training state. Your arrays are copied and never overwritten.

        Args:
            params: a pytree of float arrays, or a Flax NNX or Equinox module, which the loss then
                takes as its first argument. `state.params` holds the module's weights, and
                `step.model(state)` returns the module. The other Variables of an NNX module, which
                the loss may change in place, are in `state.model_state`. You may also pass a
                function without arguments that returns one of these. With `stages` or
                `shard_params` it is traced, so that no device holds the whole model: each array is
                made on the device of its stage, or each device makes its own part of it. The guide
                "Models larger than a device" lists the exceptions.
            model_state: a pytree of arrays; required if the loss takes `model_state`.
            rng: a typed PRNG key, shape (), from which the loss's `rng` is made; required if the
                loss takes `rng`.

        Returns:
            A `TrainState` with `step` 0.

        Raises:
            GradientError: a parameter is not a float; the message names its path.
            ArgumentError: `params` is a `TrainState` or a module without parameters, or has shapes
                without values; `rng` or `model_state` is missing or not taken by the loss; `rng` is
                not a typed key; the learning rate is wanted as a metric, and the optimizer's state
                does not hold it; or the call is inside `jax.jit`, and devices keep parts of the
                state.
            DeviceError: the devices do not exist.
            ConfigurationError: `jax.set_mesh` is active, or the call is inside `jax.pmap`.
        """
        refuse_a_mesh()
        refuse_a_state(params)
        self._step.loss.check_extras(model_state, rng)
        from multitower.steps.unmade import refuse_shapes, take_params  # noqa: PLC0415 (importing stays quick)

        way = self._find_way()
        params = take_params(params, in_parts=way.makes_in_parts)
        model = params if isinstance(params, Model) else None
        if model is not None:
            params, model_state = self._take(model, model_state)
        else:
            refuse_modules_inside(params)
        refuse_shapes(params)
        check_differentiable(params, lambda: "params")
        check_learning_rate(self._step, params)
        fields = Fields(np.int32(0), params, None, None, model_state, rng)
        maker = self._makers.see(model, params)
        return TrainState(way.first(maker.parts, self._with_scale(fields), maker))

    def expect(self, global_batch: int | None) -> None:
        """Sets the number of rows of a full batch, for a run that may begin with a smaller batch.

        In your own program, pass `train_step(global_batch=...)` instead. This method is for
        training loops that learn the number after the step is made: `Trainer` reads it from a
        checkpoint, and forgets that of an earlier run. It has no effect if the step was made with
        `global_batch`.

        Args:
            global_batch: rows over all towers; None for those of the next batch.
        """
        if self._given_batch is None and self._global_batch != global_batch:
            self._global_batch = global_batch
            self._makers.forget_seen()  # each with a runner for the rows of the earlier batches

    def model(self, state: TrainState) -> Any:
        """Returns the parameters or the module with the values of a state.

        Args:
            state: a state from `init` or from this step. For the moving average pass
                `state.replace(params=state.ema_params)`.

        Returns:
            The parameters, or the NNX or Equinox module in training mode (call `model.eval()`
            before you use it for predictions). Like the state, it is valid until the next step
            overwrites the state.

        Raises:
            StateError: it is not a state; or it does not say which of several models it belongs to.
        """
        check_is_state(state, "step.model(state)")
        origin = state.kept.origin
        maker = origin if isinstance(origin, Maker) else self._makers.of_state(state.kept)
        return maker.parts.loss.build(state.params, state.model_state)

    @property
    def untrained(self) -> Any:
        """Arrays of the newest module that the state does not hold: integers, flags and keys."""
        model = self._makers.newest.parts.loss.model
        return () if model is None else model.fixed

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Makes one update; with `steps_per_call`, one for each batch.

        Args:
            state: from `init` or from the previous step; it is overwritten.
            batch: a pytree of arrays with rows on axis 0, on the host or from `shard`/`prefetch`.
                With `steps_per_call`, a list of such batches, or one batch whose arrays have a
                first axis for the steps and rows on axis 1. With `updates="asynchronous"`, the rows
                of one group's update.

        Returns:
            The new state, and a dict of metrics: `"loss"` and the metrics of the loss function,
            means over all real rows (with `reduction="sum"` the loss is a sum), float32 or wider.
            They are on the first device; without `towers=` on all, and with `stages=` on that of
            the last stage. With `steps_per_call` they have a first axis for the steps. The call
            does not wait for the devices.

        Raises:
            StateError: it is not a state, or a step has overwritten it. It comes from another step,
                and only one of the two keeps a moving average. It does not say which of several
                models it belongs to. At the first call, processes have different variables.
            BatchError: no rows, arrays with different numbers of rows, or more rows than a full
                batch. At the first call, processes pass different shapes, or have different numbers
                of towers or of batches per call.
            ArgumentError: the batch has leaves that are not numbers.
            OutputError: the loss returned a value of the wrong kind or shape.
            ConfigurationError: `jax.set_mesh` is active; or `jax.disable_jit`, with `towers`.
        """
        refuse_inside_a_tower("train_step")
        refuse_a_mesh()
        if self._towers is not None or isinstance(self._division, RotationOptions):
            refuse_disabled_jit()
        check_is_state(state, "step(state, batch)")
        way, kind, counts = self._find_way(), None, ()
        given = kept = state.kept
        maker = self._makers.newest
        if kept.maker is not maker:
            maker = self._makers.of_state(kept)
        if (most := most_a_call(self._division)) is not None:
            work = take_apart_each(batch, most)
            parts, counts = work.largest, work.counts
        else:
            leaves, treedef = jax.tree.flatten(batch)
            kind = kind_of(leaves, treedef)
            if kept.maker is maker and (seen := maker.seen.get(kind)) is not None:
                return self._run_again(seen, kept, leaves, batch)
            work = parts = take_apart(batch, 0, name="batch")
        refuse_tracers(kept, parts, maker)
        if kept.maker is not maker:
            fields = self._with_scale(way.accepted(kept.contents()))
            self._check_average(fields)
            # As in a first state: 16-bit parameters may have become the average.
            fields = fields._replace(ema_params=jax.tree.map(_widened, fields.ema_params))
            given = kept = way.adopt(maker.parts, fields, maker)
        if changes := kept.changes():
            kept = way.with_changes(kept, changes)
        global_batch = self._global_batch or self._full_batch(parts)
        if not self._has_run and self.placement.spans_processes:
            from multitower.steps.state.replicas import check_replicas  # noqa: PLC0415 (importing stays quick)

            passed = [*parts.shared, *parts.rows, *jax.tree.leaves(kept.shared())]
            check_same_call("batch", passed, self.placement, counts)
            check_replicas(TrainState(kept))  # host-device sync
        runner = self._runner(maker, kept, parts, global_batch, counts or [parts.num_rows])
        with explaining():
            new, metrics = runner.run(kept, work)
        given.spend()
        self._has_run = True
        self._global_batch = global_batch  # only now: a batch that failed must not set it
        if kind is not None:
            maker.seen[kind] = Seen.of(parts, runner)
        return TrainState(new), metrics

    def _run_again(
        self, seen: Seen, state: KeptState, leaves: list[Any], batch: Any
    ) -> tuple[TrainState, Metrics]:
        """Makes an update with a batch of a kind that has been run: the fast path."""
        given = state
        if changes := state.changes():
            state = self._find_way().with_changes(state, changes)
        try:
            new, metrics = seen.runner.run(state, seen.parts(leaves))
        except (RuntimeError, TypeError):
            parts = take_apart(batch, 0, name="batch")  # our own error, for a deleted array
            refuse_tracers(state, parts, state.maker)
            raise
        if is_traced(metrics["loss"]):
            refuse_tracers(state, seen.parts(leaves), state.maker)
        given.spend()
        return TrainState(new), metrics

    def _find_way(self) -> Way:
        """The way in which this step keeps its states, found on first use, since it starts JAX."""
        if self._way is None:
            self._way = find_way(self._division, self._devices, self._towers)
        return self._way

    def _take(self, model: Model, model_state: Any) -> tuple[Any, Any]:
        """Parameters and model state of a module."""
        loss = self._step.loss
        if model.how.changes_in_place and loss.takes_model_state:
            raise ArgumentError(
                f"the loss takes model_state, and a {model.name} keeps its own: write "
                "loss_fn(model, batch), and let the model change in it."
            )
        if not jax.tree.leaves(model.weights):
            raise ArgumentError(
                f"the {model.name} has no parameters, so nothing would be trained. Those of an NNX "
                "module are its nnx.Param, or nnx.Variable of a class that is made of that; those "
                "of an Equinox module are its arrays of floats."
            )
        return model.weights, model.state if model.how.changes_in_place else model_state

    def _with_scale(self, fields: Fields) -> Fields:
        """The fields with the loss scale that this step needs, or without one."""
        dtype = self._step.loss.compute_dtype
        return fields._replace(loss_scale=fitting_scale(dtype, fields.loss_scale))

    def _check_average(self, fields: Fields) -> None:
        """Refuses a state of another step if only one of the two keeps a moving average.

        Raises:
            StateError: the state has an average and this step keeps none, or the reverse.
        """
        keeps, given = self._step.ema_decay is not None, fields.ema_params is not None
        if given and not keeps:
            raise StateError(
                "the state has a moving average (state.ema_params), and this step keeps none: "
                "pass ema_decay= to train_step, or state.replace(ema_params=None)."
            )
        if keeps and not given:
            raise StateError(
                "this step keeps a moving average (ema_decay=), and the state has none: leave "
                "ema_decay out, or begin it with state.replace(ema_params=state.params)."
            )

    def _full_batch(self, parts: BatchParts) -> int:
        """The rows of a full batch, if this batch is full."""
        first = parts.rows[0]
        if not isinstance(first, TowerRows):
            return parts.num_rows
        num_towers = first.placement.num_towers
        fills_them = first.placement.tower_rows(first.num_rows) == first.tower_rows
        if fills_them and num_towers != self._find_way().num_towers:
            return parts.num_rows  # asynchronous: cut again, for one group, as if from the host
        return first.tower_rows * num_towers

    def _runner(
        self,
        maker: Maker,
        state: KeptState,
        parts: BatchParts,
        global_batch: int,
        counts: Sequence[int],
    ) -> Runner:
        """The runner for this batch: the same for every batch of up to the rows of a full one.

        `counts` are the rows of each batch of the call; of the largest, `parts`, and the others.
        """
        way = self._find_way()
        num_towers = way.num_towers
        tower_rows = -(-global_batch // num_towers)
        averaged, meets, num_weights, program, copies_count_in = self._look(
            maker, state, parts, tower_rows
        )
        if not self._has_run:
            check_same_program(*program, self.placement)
        way.check(meets)
        if averaged or meets:  # every row of every tower must be real
            if parts.num_rows % num_towers and meets:
                raise uneven(meets, parts.num_rows, num_towers)
            if parts.num_rows % num_towers and averaged:
                raise refuse_ragged(averaged, parts.num_rows, num_towers)
            tower_rows = parts.num_rows // num_towers
        elif parts.num_rows > tower_rows * num_towers:
            raise BatchError(
                f"the batch has {parts.num_rows} rows, and this step was made for at most "
                f"{global_batch}: global_batch=, or else the rows of its first batch. Pass "
                f"global_batch={parts.num_rows} to train_step or Trainer, or the rows of the "
                "largest batch there will be."
            )
        short = next((num_rows for num_rows in counts if num_rows % tower_rows), None)
        if copies_count_in and short is not None and not self._has_told_of_copies:
            self._has_told_of_copies = True
            warn_of_copies(copies_count_in, short, tower_rows)
        seen = (num_weights > 0, bool(averaged or meets))  # a loss may look at its shapes
        kinds = ()
        if way.one_kind_a_runner:
            kinds = (settings(), *map(_kind, parts.rows), *map(_kind, parts.shared))
        key = (parts.split, tower_rows, seen, kinds)
        if key not in maker.runners:
            batches = Batches(parts, tower_rows, *seen)
            maker.runners[key] = way.make_runner(maker.parts, state, batches)
        return maker.runners[key]

    def _look(self, maker: Maker, state: KeptState, parts: BatchParts, tower_rows: int) -> Looked:
        """What tracing the loss shows before it is compiled; remembered for each kind of batch."""
        key = (parts.split, tower_rows, tuple((x.shape[1:], x.dtype) for x in parts.rows))
        if key not in maker.looked:
            from multitower.steps.look import look_at_loss  # noqa: PLC0415 (importing stays quick)

            way = self._find_way()
            look = lambda fields: look_at_loss(
                maker.parts,
                parts,
                fields,
                tower_rows,
                num_towers=way.num_towers,
                is_by_device=self._towers is None,
                exchange=way.exchange,
            )
            maker.looked[key] = way.look(state, look)  # expensive: it may join the state
        return maker.looked[key]


def _widened(leaf: Any) -> Any:
    """A leaf of at least float32, where it is: one on the host may be larger than a device."""
    narrow = hasattr(leaf, "dtype") and leaf.dtype != wide_dtype(leaf.dtype)
    return leaf.astype(wide_dtype(leaf.dtype)) if narrow else leaf


def _kind(leaf: Any) -> Any:
    """What a program for an array of a batch depends on, but for its number of rows."""
    if isinstance(leaf, int | float | complex):
        return type(leaf)
    return leaf.shape[1:], leaf.dtype, getattr(leaf, "weak_type", False)
