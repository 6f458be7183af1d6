"""train_step: one update of a whole training state, on all devices."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from multitower.engines.tracing import uneven
from multitower.errors import ArgumentError, BatchError, StateError
from multitower.functions.gradient_job import check_differentiable
from multitower.functions.objective import Reduction, check_reduction
from multitower.functions.outputs import refuse_ragged, wide
from multitower.hardware.devices import DeviceSpec
from multitower.models.modules import is_model, take_model
from multitower.stages.layout import Layout
from multitower.steps.arguments import check_numbers, refuse_tracers
from multitower.steps.job import Looked, look_at_loss
from multitower.steps.loss import LossFunction
from multitower.steps.parts import EmaDecay, StepParts
from multitower.steps.precision import check_compute_dtype
from multitower.steps.runner import (
    FastRunner,
    Metrics,
    SameBitsRunner,
    on_all_devices,
    take_changes,
)
from multitower.steps.sharded_state import ShardedState
from multitower.steps.sharded_update import ShardedRunner
from multitower.steps.shards.options import ShardOptions, check_shards
from multitower.steps.staged.options import StageOptions, check_stages, refuse_meeting
from multitower.steps.staged.runner import StagedRunner
from multitower.steps.staged.state import first_fields, on_cpu
from multitower.steps.state.changes import with_changes
from multitower.steps.state.fields import Fields
from multitower.steps.state.replicas import check_replicas
from multitower.steps.state.train_state import TrainState
from multitower.towers.placement import Placement, check_towers, place
from multitower.towers.rows import Parts, take_apart
from multitower.towers.same_call import check_same_call
from multitower.towers.split import TowerRows
from multitower.towers.surroundings import (
    refuse_a_mesh,
    refuse_disabled_jit,
    refuse_inside_a_tower,
)

if TYPE_CHECKING:
    import optax

    from multitower.steps.shards.runner import ShardsRunner
    from multitower.steps.shards.state import StateShards

    Runner = FastRunner | SameBitsRunner | ShardedRunner | ShardsRunner | StagedRunner


def train_step(
    loss_fn: Callable[..., Any],
    optimizer: "optax.GradientTransformation",
    *,
    devices: DeviceSpec | None = None,
    towers: int | None = None,
    ema_decay: EmaDecay | None = None,
    model_state_from: Literal["mean", "first"] = "mean",
    global_batch: int | None = None,
    diagnostics: bool = False,
    skip_nonfinite: bool = False,
    clip_norm: float | None = None,
    compute_dtype: Any = None,
    reduction: Reduction = "mean",
    shard_update: bool = False,
    shard_params: bool = False,
    stages: int | None = None,
    layout: tuple[int, int] | None = None,
    interleave: bool = False,
) -> "TrainStep":
    """Makes a training step that runs on all devices and computes the same as on one.

    In one step each tower computes the loss and the gradients of its rows, both are averaged over
    all real rows, and the optimizer makes one update. The equivalent one-device step is
    `optimizer.update(jax.grad(lambda p: loss_fn(p, batch).mean())(params), ...)`.

    Args:
        loss_fn: `loss_fn(params, batch)`, where `params` is what you gave to `init`, such as a
            pytree or a Flax NNX or Equinox module. It may also take the keyword-only arguments
            `rng`, a PRNG key that is different in every tower and step (tower 0 gets the key of
            one device), and `model_state`. It returns `loss`, `(loss, metrics)`, or with model
            state `(loss, metrics, model_state)`. The loss has shape (rows,), which is recommended,
            or shape (), the mean over the rows. Metrics are a dict; those with one entry per row
            are averaged over all real rows, other floats over towers.
        optimizer: an optax optimizer. Its schedules count updates, on any number of devices.
        devices: as for `multitower.devices`; all by default.
        towers: the number of towers. With it, all results have the same bits on any number of
            devices from 1 to `towers`. Without it there is one tower per device, which is faster,
            and results are equal up to rounding.
        ema_decay: keep a moving average of the parameters: a decay, or a function of the number
            of updates made (int32, this one included) that returns it.
        model_state_from: floats of the model state are averaged over towers, weighted by rows
            (`"mean"`), or taken from tower 0 (`"first"`). Other dtypes come from tower 0.
        global_batch: rows of a full batch; by default those of the first batch. Pass it if a run
            may begin with a smaller batch.
        diagnostics: add `"tower_losses"`, float32, shape (towers,), the mean loss of each tower's
            rows (0 for a tower without rows), and `"finite_params"`, bool, one for each parameter
            leaf: whether all of it is finite after the update.
        skip_nonfinite: make no update if the loss or a new parameter is not finite, on all towers
            together. The step still counts, and `"skipped"` is 1.
        clip_norm: clip the mean gradient to this global norm, above 0, as
            `optax.clip_by_global_norm` does; None, the default, for no clipping. It also works
            with `shard_update`.
        compute_dtype: the dtype to compute the loss in: `jnp.bfloat16`, or None, the default, for
            that of the parameters. Float32 parameters are cast on their way into the loss, and
            float32 rows of the batch, but for arrays with one number a row, such as targets and
            weights. Everything else stays float32: the parameters of the state, gradients,
            optimizer state, moving average, model state, and sums over rows and towers. Layers
            that compute with model state, such as BatchNorm, need `dtype=` of their own.
        reduction: how the losses of rows are combined: `"mean"`, or `"sum"` for summed losses and
            log densities; `metrics["loss"]` is then that sum. The loss and metrics may also be
            `mt.ratio(total, weight)`.
        shard_update: split the optimizer state and the moving average over the devices, instead of
            a whole copy on every device (ZeRO stages 1 and 2). It takes less memory and sends as
            many bytes, and results equal those of the whole update up to rounding. Without
            `towers`, leaves of 4096 elements or more are split along the first large dimension that
            the number of devices divides, and any optimizer works. With `towers`, every tower keeps
            and updates one block, and results have the same bits on any number of devices. That
            needs an optimizer that treats every element alone (sgd, adam, adamw, lion, ...; for
            clipping see `clip_norm`). Reading `opt_state` or `ema_params` then joins the blocks on
            the host; with several processes, read them on every process.
        shard_params: split the parameters too (FSDP, ZeRO stage 3). A device gathers a parameter
            where the loss uses it, and keeps its part of the gradient. Loops over stacked layers
            (`jax.lax.scan`) gather one layer at a time. `state.params` are ordinary arrays that
            span the devices. Not with `towers`; to cut a model there, see `stages`.
        stages: cut the model into this many parts, which live on different devices: parameters,
            gradients, optimizer state and moving average of a stage are on its devices only. The
            loss is written for one device; mark places to cut with `h = mt.cut(h)`, or have it cut
            into parts of equal work. Towers are the microbatches of the pipeline. It needs
            `towers`, an optimizer that treats every parameter alone, and one process. Results have
            the same bits on any number of devices, and equal those without stages up to rounding.
        layout: with `stages`, (replicas of the model, devices of each); by default one device for
            each stage, or all devices if there are fewer, and as many replicas as fit.
        interleave: with `stages`, stage s runs on device s mod P of the P devices of its replica;
            by default neighbours share a device. Both have the same bits.

    Returns:
        A `TrainStep`: `state = step.init(params)`, then `state, metrics = step(state, batch)`.

    Raises:
        ArgumentError: the loss is not a function of two arguments, the optimizer is not an optax
            optimizer, or two options exclude each other.
        DeviceError: more devices or towers than there are.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optax
        >>> import multitower as mt
        >>> def losses(params, batch):
        ...     return (batch["x"] @ params["w"] - batch["y"]) ** 2
        >>> step = mt.train_step(losses, optax.sgd(0.1), towers=8)
        >>> state = step.init({"w": jnp.zeros(3)})
        >>> batch = {"x": np.ones((24, 3), np.float32), "y": np.ones(24, np.float32)}
        >>> state, metrics = step(state, batch)
        >>> float(metrics["loss"]), int(state.step)
        (1.0, 1)
    """
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ArgumentError(
            f"the optimizer is {optimizer!r}: train_step takes an optax optimizer, such as "
            "optax.adam(1e-3)."
        )
    if model_state_from not in ("mean", "first"):
        raise ArgumentError(f"model_state_from={model_state_from!r}: say 'mean' or 'first'.")
    check_numbers(ema_decay, global_batch, clip_norm)
    check_towers(towers)
    check_reduction(reduction)
    shards = check_shards(shard_update, shard_params, towers, stages, skip_nonfinite)
    cut = check_stages(stages, layout, interleave, towers=towers, shard_update=shard_update)
    loss = replace(LossFunction.of(loss_fn), compute_dtype=check_compute_dtype(compute_dtype))
    step = StepParts(
        loss,
        optimizer,
        ema_decay,
        model_state_from,
        diagnostics,
        skip_nonfinite,
        clip_norm,
        reduction,
    )
    return TrainStep(step, devices, towers, global_batch, cut or shards or shard_update)


class TrainStep:
    """A training step on towers; made by `train_step`. Call it as `step(state, batch)`."""

    def __init__(
        self,
        step: StepParts,
        devices: DeviceSpec | None,
        towers: int | None,
        global_batch: int | None,
        division: "bool | StageOptions | ShardOptions",
    ) -> None:
        self._step = step
        self._devices = devices
        self._towers = towers
        self._global_batch = global_batch
        self._stages = division if isinstance(division, StageOptions) else None
        self._shard_options = division if isinstance(division, ShardOptions) else None
        self._shard_update = division is True
        self._layout: Layout | None = None
        self._placement: Placement | None = None
        if devices is not None:
            self._place()
        self._sharded: ShardedState | None = None
        self._looked: dict[Any, Looked] = {}
        self._runners: dict[Any, Runner] = {}
        self._has_run = False

    @property
    def placement(self) -> Placement:
        """Which device runs which towers. Reading it starts JAX."""
        return self._placement or self._place()

    def init(self, params: Any, *, model_state: Any = None, rng: Any = None) -> TrainState:
        """Makes the initial training state. Your arrays are copied and never overwritten.

        Args:
            params: a pytree of float arrays, or a Flax NNX or Equinox module, which the loss then
                takes as its first argument. `state.params` holds the module's weights, and
                `step.model(state)` returns the module. The other Variables of an NNX module, which
                the loss may change in place, are in `state.model_state`.
            model_state: a pytree of arrays, which the loss takes as `model_state`.
            rng: a typed PRNG key, shape (), from which the loss's `rng` is made.

        Returns:
            A `TrainState` on all devices, with `step` 0.

        Raises:
            GradientError: a parameter that is no float; the message names its path.
            ArgumentError: `rng` or `model_state` is missing, not wanted, or no typed key.
            ConfigurationError: `jax.set_mesh` is active.
        """
        refuse_a_mesh()
        self._step.loss.check_extras(model_state, rng)
        if is_model(params):
            params, model_state = self._take(params, model_state)
        check_differentiable(params, lambda: "params")
        if self._shard_update:
            fields = Fields(np.int32(0), params, None, None, model_state, rng)
            return self._adopt_blocks(fields, first=True)
        if self._stages is not None:
            return TrainState(first_fields(self._step, params, model_state, rng), self)
        if self._shards is not None:
            fields = Fields(np.int32(0), params, None, None, model_state, rng)
            return TrainState(self._shards.first(self._step, fields), self)
        ema = jax.tree.map(wide, params) if self._step.ema_decay is not None else None
        opt_state = self._step.optimizer.init(params)
        return self._adopt(Fields(np.int32(0), params, opt_state, ema, model_state, rng))

    def model(self, state: TrainState) -> Any:
        """Returns the parameters or the module with the values of a state.

        Args:
            state: a state that `init` or this step has made. For a moving average give
                `state.replace(params=state.ema_params)`.

        Returns:
            The parameters, or the NNX or Equinox module in training mode (call `model.eval()`
            before you use it for predictions). Like the state, it is valid until the next step
            overwrites the state.
        """
        maker = state.maker if isinstance(state.maker, TrainStep) else self
        return maker._step.loss.build(state.params, state.model_state)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Makes one update.

        Args:
            state: from `init` or from the previous step; it is overwritten.
            batch: a pytree of arrays with rows on axis 0, on the host or from `shard`/`prefetch`.

        Returns:
            The new state, and the metrics: `"loss"` and those of the loss function, each a mean
            over all real rows, float32, on the first device. The call does not wait for the
            devices.

        Raises:
            StateError: it is not a state, or it has been overwritten; at the first call, processes
                have different variables.
            BatchError: no rows, different row counts, or more rows than a full batch; at the first
                call, processes pass different shapes or have different numbers of towers.
            ArgumentError: the batch has leaves that are not numbers.
            OutputError: the loss returned a value of the wrong kind or shape.
            ConfigurationError: `jax.set_mesh` is active; or `jax.disable_jit`, with `towers`.
        """
        refuse_inside_a_tower("train_step")
        refuse_a_mesh()
        if self._towers is not None:
            refuse_disabled_jit()
        if not isinstance(state, TrainState):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise StateError(
                f"step(state, batch) got {type(state).__name__} as state: make one with "
                "state = step.init(params)."
            )
        parts = take_apart(batch, 0, name="batch")
        refuse_tracers(state, parts, self)
        if state.maker is not self:
            state = self._adopt(state.fields())
        given, state = state, self._with_changes(state)
        global_batch = self._global_batch or self._full_batch(parts)
        if not self._has_run and self.placement.spans_processes:
            passed = [*parts.shared, *parts.rows, *jax.tree.leaves(state.shared())]
            check_same_call("batch", passed, self.placement)
            check_replicas(state)  # host-device sync
        result = self._runner(state, parts, global_batch).run(state, parts, self)
        given.spend()
        self._has_run = True
        self._global_batch = global_batch  # only now: a batch that failed is no measure
        return result

    @property
    def _shards(self) -> "StateShards | None":
        """Where the parts of the state are, if every device keeps some."""
        if self._shard_options is None:
            return None
        from multitower.steps.shards.state import StateShards  # noqa: PLC0415 (importing stays quick)

        return StateShards(self._shard_options, self.placement)

    def _place(self) -> Placement:
        if self._stages is None:
            self._placement = place(self._devices, self._towers)
        else:
            assert self._towers is not None
            self._layout = self._stages.on(self._devices, self._towers)
            self._placement = self._layout.towers
        return self._placement

    def _take(self, module: Any, model_state: Any) -> tuple[Any, Any]:
        """Parameters and model state of a module; the loss is told how to put it together."""
        model = take_model(module)
        loss = self._step.loss
        if model.how.changes_in_place and loss.takes_model_state:
            raise ArgumentError(
                f"the loss takes model_state, and a {type(module).__name__} keeps its own: write "
                "loss_fn(model, batch), and let the model change in it."
            )
        if loss.model is None or loss.model.how != model.how or model.fixed:
            self._step = replace(self._step, loss=loss.of_model(model))
            self._runners.clear()
            self._looked.clear()
        return model.weights, model.state if model.how.changes_in_place else model_state

    def _with_changes(self, state: TrainState) -> TrainState:
        """The state with what somebody has written into it since the step before."""
        changes = state.changes()
        if not changes:
            return state
        if self._sharded is not None:
            parts = self._sharded.take_changes(state.parts(), changes)
            return self._sharded.state(parts, self)
        if self._stages is not None:
            return TrainState(with_changes(state.fields(), changes), self)
        if self._shards is not None:
            return TrainState(self._shards.take_changes(state.fields(), changes), self)
        return take_changes(state, changes, self.placement, self)

    def _adopt(self, fields: Fields) -> TrainState:
        if self._stages is not None:  # it goes to its devices when it is known what lives where
            return TrainState(fields, self)
        if self._shard_update:
            return self._adopt_blocks(fields, first=False)
        if self._shards is not None:
            return TrainState(self._shards.place(fields), self)
        return TrainState(on_all_devices(fields, self.placement), self)

    def _adopt_blocks(self, fields: Fields, *, first: bool) -> TrainState:
        rest = fields._replace(opt_state=None, ema_params=None)
        whole = on_all_devices(rest, self.placement)
        if self._sharded is None or not self._sharded.fits(whole.params):
            self._sharded = ShardedState(self._step.optimizer, whole.params, self.placement)
            self._runners.clear()
        if first:
            with_average = self._step.ema_decay is not None
            parts = self._sharded.first(whole, with_average=with_average)
        else:
            kept = whole._replace(opt_state=fields.opt_state, ema_params=fields.ema_params)
            parts = self._sharded.take_apart(kept)
        return self._sharded.state(parts, self)

    def _full_batch(self, parts: Parts) -> int:
        """Rows of a full batch, if this is one."""
        first = parts.rows[0]
        if isinstance(first, TowerRows):
            return first.tower_rows * first.placement.num_towers
        return parts.num_rows

    def _runner(self, state: TrainState, parts: Parts, global_batch: int) -> "Runner":
        """What runs this batch: the same for every batch that fits the full one."""
        num_towers = self.placement.num_towers
        tower_rows = -(-global_batch // num_towers)
        averaged, meets, num_weights = self._look(state, parts, tower_rows)
        if meets and self._layout is not None:
            raise refuse_meeting(meets)
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
                f"train_step(global_batch={parts.num_rows}), or the largest batch there will be."
            )
        key = (parts.split, tower_rows)
        if key not in self._runners:
            given = (self._step, parts.split, tower_rows, self.placement)
            has_weights = num_weights > 0
            if self._layout is not None:
                first = (state.fields(), parts)
                self._runners[key] = StagedRunner(
                    *given[:-1], self._layout, first, has_weights=has_weights
                )
            elif self._sharded is not None:
                self._runners[key] = ShardedRunner(*given, self._sharded, has_weights=has_weights)
            elif self._shards is not None:
                from multitower.steps.shards.runner import ShardsRunner  # noqa: PLC0415 (importing stays quick)

                self._runners[key] = ShardsRunner(
                    *given[:-1], self._shards, has_weights=has_weights
                )
            else:
                make = FastRunner if self._towers is None else SameBitsRunner
                self._runners[key] = make(*given, has_weights=has_weights)
        return self._runners[key]

    def _look(self, state: TrainState, parts: Parts, tower_rows: int) -> Looked:
        """What there is to know of the loss before a program is made of it."""
        key = (parts.split, tower_rows, tuple((x.shape[1:], x.dtype) for x in parts.rows))
        if key not in self._looked:
            self._looked[key] = look_at_loss(
                self._step,
                parts,
                on_cpu(state.shared()) if self._stages else state.shared(),
                tower_rows,
                num_towers=self.placement.num_towers,
                is_by_device=self._towers is None,
            )
        return self._looked[key]
