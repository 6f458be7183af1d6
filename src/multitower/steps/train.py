"""train_step: makes a function that updates a whole training state on all devices."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from multitower.errors import ArgumentError, refuse_foreign, true_or_false
from multitower.functions.objective import Reduction, check_reduction
from multitower.hardware.devices import DeviceSpec
from multitower.steps.arguments import check_numbers, check_shards
from multitower.steps.local.options import LocalState, check_local
from multitower.steps.looped import check_loop
from multitower.steps.loss import LossFunction
from multitower.steps.optimizing.extra_metrics import check_extra_metrics
from multitower.steps.parts import EmaDecay, StepParts
from multitower.steps.precision import check_compute_dtype, check_loss_scale
from multitower.steps.rotation.options import StaleScale, Updates, check_rotation
from multitower.steps.staged.options import check_stages
from multitower.steps.step import TrainStep
from multitower.towers.placement import check_towers

if TYPE_CHECKING:
    import optax


@refuse_foreign(
    has_aux="A loss may return (loss, metrics) as it is.",
    argnums="Gradients are taken of the first argument of the loss, the parameters.",
    axis_name="Inside the loss, the axis is always called 'towers'.",
    batch_size="The rows of a full batch, over all towers, are global_batch=.",
)
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
    remat: bool = True,
    steps_per_call: int | None = None,
    sync_every: int | None = None,
    outer_optimizer: "optax.GradientTransformation | None" = None,
    local_state: LocalState = "keep",
    updates: Updates = "synchronous",
    max_staleness: int | None = None,
    rotation: Sequence[int] | None = None,
    stale_scale: StaleScale | None = None,
    momentum_correction: bool = False,
    extra_metrics: Sequence[str] = (),
) -> TrainStep:
    """Makes a training step that runs on all devices and computes the same as on one.

    In one step each tower, a logical replica, computes the loss and the gradients of its rows of
    the batch. Both are averaged over all real rows, and the optimizer makes one update. The
    equivalent one-device step is
    `optimizer.update(jax.grad(lambda p: loss_fn(p, batch).mean())(params), ...)`.

    Args:
        loss_fn: `loss_fn(params, batch)`, where `params` is what you gave to `init`, such as a
            pytree or a Flax NNX or Equinox module. It may also take the keyword-only arguments
            `rng`, a PRNG key that is different in every tower and step (tower 0 gets the key of
            a run on one device), and `model_state`. It returns `loss`, `(loss, metrics)`, or with
            model state `(loss, metrics, model_state)`. The loss has shape (rows,), which is
            recommended, or shape (), the mean over the rows. Metrics are a dict; those with one
            entry per row are averaged over all real rows, others over towers, weighted by rows.
        optimizer: an optax optimizer. Its schedules count updates, whatever the number of devices.
        devices: the devices to run on, as for `multitower.devices`: a number, a name such as
            `"gpu:0"`, or a list; all by default.
        towers: the number of towers. With it, all results have the same bits on any number of
            devices from 1 to `towers`. By default there is one tower per device, which is faster,
            and results on different numbers of devices are equal up to rounding.
        ema_decay: keep an exponential moving average of the parameters, in `state.ema_params`, with
            this decay: a number such as 0.999, or a function of the number of updates made (int32,
            this one included) that returns it. None, the default, for no average.
        model_state_from: floats of the model state are averaged over towers, weighted by rows
            (`"mean"`), or taken from tower 0 (`"first"`). Other dtypes come from tower 0.
        global_batch: rows of a full batch; by default those of the first batch. Pass it if a run
            may begin with a smaller batch.
        diagnostics: add `"tower_losses"`, float32 or wider, shape (towers,), the mean loss of each
            tower's rows (0 for a tower without rows; with `updates="asynchronous"` those of the
            group whose turn it is), and `"finite_params"`, bool, one for each parameter leaf:
            whether all of it is finite after the update.
        skip_nonfinite: make no update if the loss or a new parameter is not finite, on all towers
            together; nor if a number of the optimizer's state stops being finite, as where
            `optax.MultiSteps` adds up gradients. The step still counts, and `"skipped"` is 1.
        clip_norm: clip the mean gradient to this global norm, above 0, as
            `optax.clip_by_global_norm` does; None, the default, for no clipping. It also works
            with `shard_update`.
        compute_dtype: the dtype to compute the loss in: `jnp.bfloat16`, `jnp.float16`, or None, the
            default, for the dtype of the parameters. Parameters in float32 (or float64) are cast on
            their way into the loss. So are such arrays of the batch, except those with one number
            per row, such as targets and weights. Everything else keeps its dtype: the parameters of
            the state, gradients, optimizer state, moving average, model state, and sums over rows
            and towers. Layers that compute with model state, such as BatchNorm, need their own
            `dtype=`.
            With `jnp.float16` the loss is multiplied by a scale before it is differentiated, and
            the mean gradient is divided by it. The scale is 2**15 at first, and it is doubled after
            2000 steps in a row with finite gradients. A step whose gradients are not finite makes
            no update, on all towers together, and the scale is halved, down to 1.
            `state.loss_scale["scale"]` holds it, and `metrics` also has `"loss_scale"`, the scale
            of this step, and `"skipped"`. float16 does not work with `stages`, `sync_every`,
            asynchronous updates, or `shard_update` with `towers`.
        reduction: how the losses of rows are combined: `"mean"`, or `"sum"` for summed losses and
            log densities; `metrics["loss"]` is then that sum. The loss and metrics may also be
            `mt.ratio(total, weight)`.
        shard_update: split the optimizer state and the moving average over the devices, instead of
            a whole copy on every device (ZeRO stages 1 and 2; with `towers`, stage 1). It takes
            less memory, sends the same number of bytes, and results equal those of the whole update
            up to rounding. Without `towers`, leaves of 4096 elements or more are split along the
            first large dimension that the number of devices divides, and any optimizer works. With
            `towers`, every tower keeps and updates one block, and results have the same bits on any
            number of devices. That needs an optimizer that works element by element (sgd, adam,
            adamw, lion, ...; for clipping see `clip_norm`), and excludes `skip_nonfinite` and
            `stages`. Reading `opt_state` or `ema_params` then joins the blocks on the host; with
            several processes, read them on every process.
        shard_params: split the parameters too (FSDP, ZeRO stage 3). A device gathers a parameter
            where the loss uses it, and keeps its part of the gradient. Loops over stacked layers
            (`jax.lax.scan`) gather one layer at a time. `state.params` are ordinary arrays that
            span the devices. It does not work with `towers`; to split a model there, use `stages`.
        stages: pipeline parallelism: cut the model into this many parts, which live on different
            devices. The parameters, gradients, optimizer state and moving average of a stage are on
            its devices only. Write the loss as for one device. Mark places to cut with
            `h = mt.cut(h)`, or leave it to multitower to cut parts of equal work. Towers are the
            microbatches of the pipeline. It needs `towers`, and an optimizer that treats every
            parameter by itself. A loss in which towers exchange values is cut there, too. Results
            have the same bits on any number of devices, and equal those without stages up to
            rounding.
        layout: with `stages`, the pair (replicas of the model, devices of each). By default a
            replica has one device for each stage, or all devices if there are fewer, and there are
            as many replicas as fit. With several processes, each has the same number of replicas,
            on its own devices.
        interleave: with `stages`, stage s runs on device s mod P of the P devices of its replica;
            by default neighbouring stages share a device. The bits are the same.
        remat: with `stages`, keep only the inputs of a stage until its backward pass, and compute
            its forward part again there. `False` keeps the intermediate values that `jax.grad`
            keeps, for each tower between its forward and backward pass: more memory, less time.
            Results are equal up to rounding.
        steps_per_call: make up to this many updates in one call. The call takes a list of batches,
            or one batch whose arrays have a first axis for the steps, and its metrics have that
            axis, too. It saves time on the host, which limits the speed of short steps. Results
            equal those of single calls up to rounding. The batches of a call are on the devices
            together. It works without `towers`, in one process.
            With `sync_every` it also works with `towers` and with several processes, and has the
            bits of single calls. Metrics are sent at the end of a call, so that with
            `steps_per_call=H` and `sync_every=H` processes exchange nothing from one meeting to
            the next. Without `towers`, in one process, the steps between meetings are one program.
        sync_every: local updates (local SGD, DiLoCo). Every tower updates parameters of its own, by
            the mean loss of its own rows, and the towers meet after every step whose number is a
            multiple of this, 1 or more. At a meeting, the mean over towers of how far they moved,
            weighted by rows, is the gradient of one update by `outer_optimizer`, and all towers go
            on from its result. It is for slow links between machines: parameters and gradients are
            sent at meetings only, and metrics at the end of each call (see `steps_per_call`).
            Results have the same bits on any number of devices.
            `state.params`, `ema_params` and `model_state` are those of the last meeting,
            `opt_state` is the outer optimizer's, and `state.local` has the own parameters and state
            of every tower, with a first axis for towers. `ema_decay` counts meetings. `clip_norm`
            clips each tower's own gradient. With `skip_nonfinite`, a tower makes no update if its
            loss or parameters are not finite, and a meeting makes none from such parameters;
            `"skipped"` counts the towers. A tower without rows in a ragged batch makes no update,
            and its schedule does not count. `metrics["loss"]` is the mean over all rows, each
            computed with its own tower's parameters. A device keeps the parameters and the inner
            optimizer's state of each of its towers, in addition to the parameters, the outer
            optimizer's state and the average of the last meeting.
        outer_optimizer: with `sync_every`, an optax optimizer that does not look at the loss; by
            default DiLoCo's, `optax.sgd(0.7, momentum=0.9, nesterov=True)`. With `optax.sgd(1.0)`
            the new parameters are the mean of the towers' own (local SGD, federated averaging);
            with `sync_every=1` and plain SGD inside, that is synchronous training, up to rounding.
        local_state: with `sync_every`, what a meeting does with the inner optimizers' states.
            `"keep"`, as in DiLoCo: every tower keeps its own, and nothing more is sent.
            `"average"`: their floats are averaged like the parameters, so that momenta fit the
            parameters that all towers go on from; they are sent, too.
        updates: `"synchronous"`, the default, or `"asynchronous"` for updates in a fixed rotation,
            without a barrier and without an average over all towers. A call is then one update with
            the gradient of one tower, which gets all rows of the batch. The gradient is computed on
            the parameters that this tower got after its own last update, and the next tower does
            not wait for it. The optimizer and the newest parameters are on the first device.
            Results have the same bits on any number of devices for the same number of towers. Each
            tower keeps its own model state; `state.model_state` is that of the tower of the last
            update. `metrics` also has `"staleness"`, int32, shape (): the number of updates made
            since the parameters of the gradient.
        max_staleness: with `updates="asynchronous"`, let the towers take turns in
            `max_staleness + 1` groups of neighbouring towers; the number of towers must be a
            multiple of it. The rows of a batch are split over the towers of one group, and their
            gradients are averaged. 0 is synchronous training. By default every tower is a group,
            which is `max_staleness = towers - 1`.
        rotation: with `updates="asynchronous"`, the groups in the order of their turns, such as
            `(0, 1, 0, 2)` to give group 0 more turns; by default 0, 1, 2, ... The gradients of a
            group that waits longer for its turn are staler than `max_staleness`.
        stale_scale: with `updates="asynchronous"`, multiply every update by this function of its
            staleness (int32, shape ()), such as `lambda staleness: 1 / (1 + staleness)`.
        momentum_correction: with `updates="asynchronous"`, make every update with less momentum:
            `max(momentum - staleness / (1 + staleness), 0)`, since staleness itself acts like that
            much momentum (Mitliagkas et al. 2016, "Asynchrony begets Momentum"). The learning rate
            does not change. It needs an optimizer made by `optax.inject_hyperparams`, such as
            `optax.inject_hyperparams(optax.sgd)(learning_rate=0.05, momentum=0.9)`. For Adam and
            its variants it lowers `b1`. The state keeps the momentum that you set.
        extra_metrics: names of metrics to add, float32, shape (): `"gradient_norm"`, the global
            norm of the mean gradient before clipping, and `"learning_rate"`, that of this update.
            The learning rate can be read from an optimizer made by `optax.inject_hyperparams`, such
            as `optax.inject_hyperparams(optax.adam)(learning_rate=schedule)`. It does not work with
            `sync_every`, where each tower has its own gradient.

    Returns:
        A `TrainStep`: `state = step.init(params)`, then `state, metrics = step(state, batch)`.

    Raises:
        ArgumentError: the loss is not a function of two arguments, the optimizer is not an optax
            optimizer, or two options exclude each other.
        DeviceError: `devices` that do not exist, or `towers` is not a whole number above 0.

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
        inside = getattr(optimizer, "tx", None)  # of an nnx.Optimizer
        said = f"{optimizer!r}" if inside is None else type(optimizer).__name__
        raise ArgumentError(
            f"the optimizer is {said}: train_step takes an optax optimizer, such as "
            f"{'optax.adam(1e-3)' if inside is None else 'the one inside it, optimizer.tx'}."
        )
    if model_state_from not in ("mean", "first"):
        raise ArgumentError(f"model_state_from={model_state_from!r}: say 'mean' or 'first'.")
    true_or_false(
        diagnostics=diagnostics,
        skip_nonfinite=skip_nonfinite,
        shard_update=shard_update,
        shard_params=shard_params,
        interleave=interleave,
        remat=remat,
        momentum_correction=momentum_correction,
    )
    ema_decay, global_batch, clip_norm = check_numbers(ema_decay, global_batch, clip_norm)
    towers = check_towers(towers)
    check_reduction(reduction)
    shards = check_shards(shard_update, shard_params, towers, stages, skip_nonfinite)
    cut = check_stages(stages, layout, interleave, remat, towers=towers, shard_update=shard_update)
    alone = {"shard_update": shard_update, "shard_params": shard_params, "stages": stages}
    local = check_local(sync_every, outer_optimizer, local_state, alone)
    loop = check_loop(steps_per_call, {"towers": towers, **alone}, is_local=local is not None)
    if local is not None and loop is not None:
        local = local._replace(most=loop.most)
    turns = check_rotation(
        updates,
        {
            "max_staleness": max_staleness,
            "rotation": rotation,
            "stale_scale": stale_scale,
            "momentum_correction": momentum_correction,
        },
        towers,
        {**alone, "steps_per_call": steps_per_call, "sync_every": sync_every},
    )
    extras = check_extra_metrics(extra_metrics, sync_every)
    dtype = check_compute_dtype(compute_dtype)
    check_loss_scale(
        dtype,
        {
            "stages=": stages,
            "sync_every=": sync_every,
            "updates='asynchronous'": updates == "asynchronous",
            "shard_update=True with towers=": shard_update and towers is not None,
        },
    )
    loss = replace(LossFunction.of(loss_fn), compute_dtype=dtype)
    step = StepParts(
        loss,
        optimizer,
        ema_decay,
        model_state_from,
        diagnostics,
        skip_nonfinite,
        clip_norm,
        reduction,
        extras,
    )
    division = turns or local or cut or loop or shards or shard_update
    return TrainStep(step, devices, towers, global_batch, division)
