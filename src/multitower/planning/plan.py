"""plan: memory and traffic of every layout of a training step, before anything runs."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from multitower.functions.objective import Reduction
from multitower.steps.local.options import LocalState
from multitower.steps.parts import EmaDecay
from multitower.steps.rotation.options import Updates

if TYPE_CHECKING:
    import optax

    from multitower.planning.layouts import PlannedLayout


def plan(
    loss_fn: Callable[..., Any],
    optimizer: "optax.GradientTransformation",
    params: Any,
    batch: Any,
    *,
    devices: int | None = None,
    machines: int = 1,
    towers: int | None = None,
    memory: float | str | None = None,
    model_state: Any = None,
    rng: Any = None,
    ema_decay: EmaDecay | None = None,
    clip_norm: float | None = None,
    compute_dtype: Any = None,
    reduction: Reduction = "mean",
    sync_every: int | None = None,
    outer_optimizer: "optax.GradientTransformation | None" = None,
    local_state: LocalState = "keep",
    updates: Updates = "synchronous",
    max_staleness: int | None = None,
    rotation: Sequence[int] | None = None,
) -> "Plan":
    """Computes what a training step takes in every layout: bytes per device, and bytes sent.

    Nothing runs, and no array is copied to a device. The arguments may be shapes, so that you can
    plan a model that fits on no device of this machine. The step's programs are compiled here, once
    for each number of rows of a tower, and the compiler reports how much memory they need. Layouts
    that differ only in the number of devices share these programs, so that planning for 128
    machines takes no longer than for one.

    A slow test compares the total with measured bytes for five programs on 1 to 4 simulated CPU
    devices. It is within 5 % without options, with `towers=`, with `towers=` and
    `shard_update=True`, with `stages=`, with `shard_update=True` or `shard_params=True` without
    `towers=`, and for local and asynchronous updates. In other programs, `towers=` with
    `shard_update=True` has taken less than was planned. `shard_update` and `shard_params` without
    `towers=` are compiled for the devices of this process; for more devices they are estimates.

    Args:
        loss_fn: as for `train_step`.
        optimizer: as for `train_step`.
        params: arrays, or an NNX or Equinox module; or their shapes, as `jax.eval_shape` or
            `nnx.eval_shape` returns them; or a function without arguments that makes one of these,
            as for `TrainStep.init`: it is traced, not called.
        batch: a pytree of arrays, or of `jax.ShapeDtypeStruct`, with the rows of one step on axis
            0, over all machines.
        devices: the number of devices of each machine; by default those of this process. They need
            not exist.
        machines: the number of machines.
        towers: plan for this number of towers only; by default for 1, 2, 4 and 8 on each device.
        memory: memory of one device, in bytes, or as text such as `"24GiB"` or `"80GB"`. With it,
            the plan tells which layouts fit.
        model_state: as for `TrainStep.init`, or its shapes.
        rng: as for `TrainStep.init`, or its shape.
        ema_decay: as for `train_step`.
        clip_norm: as for `train_step`.
        compute_dtype: as for `train_step`.
        reduction: as for `train_step`.
        sync_every: as for `train_step`: plan for local updates only. The bytes sent in a step are
            those of a meeting divided by this number, plus the sums for the metrics.
        outer_optimizer: as for `train_step`.
        local_state: as for `train_step`.
        updates: as for `train_step`: `"asynchronous"` to plan for asynchronous updates only. The
            bytes sent are those of an update: a gradient to the first device, and the parameters
            back. The memory is that of the first device, which has the optimizer state.
        max_staleness: as for `train_step`.
        rotation: as for `train_step`.

    Returns:
        A `Plan`. It prints as a table.

    Raises:
        ArgumentError: `memory` is not an amount of memory; `devices` or `machines` is not a whole
            number above 0; the compiler fails for every layout; asynchronous updates on several
            machines; or an argument that `train_step` or `TrainStep.init` refuses.
        DeviceError: `towers` is not a whole number above 0.
        BatchError: the batch has no rows, or arrays with different numbers of rows.
        GradientError: a parameter is not a float.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import multitower as mt
        >>> def losses(params, batch):
        ...     return (jnp.tanh(batch @ params["in"]) @ params["out"])[:, 0] ** 2
        >>> shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
        >>> params = {"in": shape(1024, 4096), "out": shape(4096, 1)}
        >>> found = mt.plan(
        ...     losses,
        ...     optax.sgd(1e-3, momentum=0.9),
        ...     params,
        ...     shape(512, 1024),
        ...     devices=4,
        ...     towers=8,
        ...     memory="1GiB",
        ... )
        >>> found.layouts[0].memory["optimizer_state"]
        16793600
        >>> found.fits[0].options
        {'devices': 4}
    """
    from multitower.planning.make import make_plan  # noqa: PLC0415 (at the first call: importing stays quick)

    where = (devices, machines, towers)
    options = {
        "ema_decay": ema_decay,
        "clip_norm": clip_norm,
        "compute_dtype": compute_dtype,
        "reduction": reduction,
        "sync_every": sync_every,
        "outer_optimizer": outer_optimizer,
        "local_state": local_state,
        "updates": updates,
        "max_staleness": max_staleness,
        "rotation": rotation,
    }
    given = (params, batch, model_state, rng)
    return Plan(**make_plan((loss_fn, optimizer), given, where, memory, options))


@dataclass(frozen=True, repr=False)
class Plan:
    """Memory and traffic of every layout of a training step; made by `plan`. It prints as a table.

    Attributes:
        layouts: a list of `multitower.planning.layouts.PlannedLayout`, the simplest first.
        memory_bytes: memory of one device, or None if it was not given.
        num_rows: rows of the batch, over all machines.
        num_parameters: the number of elements of all parameters.
        devices: the number of devices of each machine.
        machines: the number of machines.
        notes: sentences about layouts that are left out, and why.
        limits: a sentence about what stops scaling with more devices, and beyond how many.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import multitower as mt
        >>> shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
        >>> losses = lambda w, x: (x @ w) ** 2
        >>> given = (losses, optax.sgd(0.1), shape(64), shape(8, 64))
        >>> found = mt.plan(*given, devices=1, towers=1, memory="1MiB")
        >>> [layout.options for layout in found.fits]
        [{'devices': 1}, {'devices': 1, 'towers': 1}]
        >>> found.num_rows, found.on(devices=4).num_rows
        (8, 32)
        >>> found.to_dict()["layouts"][0]["fits"]
        True
    """

    layouts: list["PlannedLayout"]
    memory_bytes: int | None
    num_rows: int
    num_parameters: int
    devices: int
    machines: int
    notes: tuple[str, ...]
    limits: tuple[str, ...]
    _of: Any = field(compare=False)

    def on(self, *, devices: int | None = None, machines: int = 1) -> "Plan":
        """Plans for other devices, with the same number of rows on each of them.

        It uses the programs of this plan, so it takes less than a second.

        Args:
            devices: the number of devices of each machine; by default as in this plan.
            machines: the number of machines.

        Returns:
            A plan for a batch whose rows grow or shrink with the number of devices.

        Raises:
            ArgumentError: `devices` or `machines` is not a whole number above 0.
        """
        from multitower.planning.make import plan_again  # noqa: PLC0415 (importing stays quick)

        devices = self.devices if devices is None else devices
        return Plan(**plan_again(self._of, devices, machines, self.memory_bytes))

    @property
    def fits(self) -> list["PlannedLayout"]:
        """The layouts that a step takes and a device has memory for, if `memory` was given."""
        return [layout for layout in self.layouts if layout.fits(self.memory_bytes)]

    @property
    def advice(self) -> str:
        """One or two sentences: the smallest change that makes the run fit."""
        from multitower.planning.words import advise  # noqa: PLC0415 (importing stays quick)

        return advise(self.layouts, self.memory_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as a dict of JSON values.

        Returns:
            The attributes, `"advice"`, and each layout with `"fits"`: whether it fits.
        """
        return {
            "num_rows": self.num_rows,
            "num_parameters": self.num_parameters,
            "devices": self.devices,
            "machines": self.machines,
            "memory_bytes": self.memory_bytes,
            "layouts": [
                {**asdict(layout), "fits": layout.fits(self.memory_bytes)}
                for layout in self.layouts
            ],
            "advice": self.advice,
            "limits": list(self.limits),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """The table, followed by advice, limits and notes."""
        from multitower.planning.words import in_lines  # noqa: PLC0415 (importing stays quick)

        said = in_lines(self.layouts, self.memory_bytes, self.limits, self.notes)
        return "\n".join(said)

    __repr__ = __str__
