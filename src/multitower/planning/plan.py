"""plan: what every layout of a training step takes, before anything runs."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import jax

from multitower.errors import ArgumentError
from multitower.hardware.devices import devices as find_devices
from multitower.planning.layouts import PlannedLayout, Room, fast_layouts, tower_layouts
from multitower.planning.limits import limits_of
from multitower.planning.programs import Programs
from multitower.planning.shapes import Planned, planned
from multitower.planning.sizes import memory_in_bytes
from multitower.planning.staged import staged_layouts
from multitower.planning.words import advise, notes_of, table
from multitower.steps.arguments import check_numbers
from multitower.steps.loss import LossFunction
from multitower.steps.parts import EmaDecay, StepParts
from multitower.towers.placement import check_towers

if TYPE_CHECKING:
    import optax

_LONG_S = 10


def plan(
    loss_fn: Callable[..., Any],
    optimizer: "optax.GradientTransformation",
    params: Any,
    batch: Any,
    *,
    devices: int | None = None,
    machines: int = 1,
    towers: int | None = None,
    memory: int | str | None = None,
    model_state: Any = None,
    rng: Any = None,
    ema_decay: EmaDecay | None = None,
) -> "Plan":
    """Says what a training step takes in every layout: bytes per device, and bytes sent.

    Nothing runs, and no array goes to a device: the arguments may be shapes, so that you can plan a
    model that fits nowhere. The step's programs are compiled on this machine, once for each number
    of rows that a tower has; the compiler says how much memory they need. Layouts that differ in
    the number of devices alone share these, so that 128 machines take no longer than one.

    A slow test compares the total with measured bytes for five programs on 1 to 4 simulated CPU
    devices: it is within 5 % without options, with `towers=`, with `shard_update=True` beside it,
    and with `stages=`. `shard_update=True` and `shard_params=True` without `towers=` are estimates.

    Args:
        loss_fn: as for `train_step`.
        optimizer: as for `train_step`.
        params: arrays, or an NNX or Equinox module; or their shapes, as `jax.eval_shape` or
            `nnx.eval_shape` returns them.
        batch: a pytree of arrays with the rows of one step on axis 0, over all machines; or of
            `jax.ShapeDtypeStruct`.
        devices: how many each machine has; by default those of this process. They need not exist.
        machines: how many there are.
        towers: plan for this number alone; by default for 1, 2, 4 and 8 on each device.
        memory: of one device, in bytes, or as text such as `"24GiB"` or `"80GB"`.
        model_state: as for `TrainStep.init`, or its shapes.
        rng: likewise.
        ema_decay: as for `train_step`.

    Returns:
        A `Plan`. It prints as a table.

    Raises:
        ArgumentError: `memory` is no amount, `devices` or `machines` no number; the compiler fails
            for every layout; or an argument that `train_step` or `TrainStep.init` refuses.
        DeviceError: `towers` is no whole number above 0.
        BatchError: the batch has no rows, or different numbers of them.
        GradientError: a parameter that is no float.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import multitower as mt
        >>> def losses(params, batch):
        ...     return (jnp.tanh(batch @ params["in"]) @ params["out"])[:, 0] ** 2
        >>> shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
        >>> params = {"in": shape(1024, 4096), "out": shape(4096, 1)}
        >>> found = mt.plan(
        ...     losses,
        ...     optax.adam(1e-3),
        ...     params,
        ...     shape(512, 1024),
        ...     devices=4,
        ...     towers=8,
        ...     memory="1GiB",
        ... )
        >>> found.layouts[0].memory["optimizer_state"]
        33587204
        >>> found.fits[0].options
        {'devices': 4}
    """
    devices = len(find_devices()) if devices is None else devices
    room = Room(devices, machines, towers)
    _check(room)
    check_numbers(ema_decay, None, None)
    memory_bytes = None if memory is None else memory_in_bytes(memory)
    step = StepParts(
        LossFunction.of(loss_fn), optimizer, ema_decay, "mean", False, False, None, "mean"
    )
    given = planned(step, params, batch, model_state=model_state, rng=rng)
    return _make(given, Programs(given), room, memory_bytes)


def _check(room: Room) -> None:
    for name, value in (("devices", room.devices), ("machines", room.machines)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(f"{name}={value!r}: it must be a whole number, 1 or more.")
    check_towers(room.towers)


def _make(given: Planned, programs: Programs, room: Room, memory_bytes: int | None) -> "Plan":
    notes: list[str] = []
    begin = time.perf_counter()
    layouts = [
        *_compiled(fast_layouts(given, programs, room), "without towers=", notes),
        *_compiled(tower_layouts(given, programs, room, notes), "with towers=", notes),
        *_compiled(staged_layouts(given, programs, room, notes), "with stages=", notes),
    ]
    if not layouts:
        raise ArgumentError(f"the compiler fails for every layout, so there is no plan. {notes[0]}")
    if (took_s := time.perf_counter() - begin) > _LONG_S:
        notes.append(f"Compiling took {took_s:.0f} s; plan.on(...) uses these programs again.")
    return Plan(
        layouts,
        memory_bytes,
        num_rows=given.batch.num_rows,
        num_parameters=sum(leaf.size for leaf in jax.tree.leaves(given.fields.params)),
        devices=room.devices,
        machines=room.machines,
        notes=tuple(notes),
        limits=limits_of(given, programs.largest_buffer, layouts),
        _of=(given, programs, room),
    )


def _compiled(
    layouts: Iterator[PlannedLayout], which: str, notes: list[str]
) -> Iterator[PlannedLayout]:
    """The layouts up to one for which the compiler fails; `notes` then gets why."""
    try:
        yield from layouts
    except jax.errors.JaxRuntimeError as error:
        why = str(error).splitlines()[0][:200]
        notes.append(f"Layouts {which} are left out from here on: the compiler fails ({why}).")


@dataclass(frozen=True, repr=False)
class Plan:
    """What every layout of a training step takes; made by `plan`. It prints as a table.

    Attributes:
        layouts: a list of `multitower.planning.layouts.PlannedLayout`, the simplest first.
        memory_bytes: of one device, or None if you did not say.
        num_rows: of the batch.
        num_parameters: elements of all parameters.
        devices: how many each machine has.
        machines: how many there are.
        notes: layouts that are left out, and why.
        limits: what breaks with more devices, the first thing first.
    """

    layouts: list[PlannedLayout]
    memory_bytes: int | None
    num_rows: int
    num_parameters: int
    devices: int
    machines: int
    notes: tuple[str, ...]
    limits: tuple[str, ...]
    _of: tuple[Planned, Programs, Room] = field(compare=False)

    def on(self, *, devices: int | None = None, machines: int = 1) -> "Plan":
        """The same on other devices, with as many rows on each of them.

        The programs are those of this plan, so it takes less than a second.

        Args:
            devices: how many each machine has; by default as many as in this plan.
            machines: how many there are.

        Returns:
            A plan for a batch that is larger or smaller, as there are more or fewer devices.

        Raises:
            ArgumentError: one of them is no whole number above 0.
        """
        given, programs, before = self._of
        room = Room(self.devices if devices is None else devices, machines, before.towers)
        _check(room)
        rows = max(1, self.num_rows * room.num_devices // before.num_devices)
        if before.towers is not None:
            towers = max(1, before.towers * room.num_devices // before.num_devices)
            room = Room(room.devices, room.machines, towers)
        return _make(given.with_rows(rows), programs, room, self.memory_bytes)

    @property
    def fits(self) -> list[PlannedLayout]:
        """The layouts that a device has memory for; all of them if you did not say how much."""
        return [layout for layout in self.layouts if layout.fits(self.memory_bytes)]

    @property
    def advice(self) -> str:
        """One or two sentences: the smallest change that makes the run fit."""
        return advise(self.layouts, self.memory_bytes)

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
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
        """The table, and what to say of it."""
        return "\n".join([*table(self.layouts, self.memory_bytes), "", *self._sentences()])

    __repr__ = __str__

    def _sentences(self) -> list[str]:
        return [self.advice, *self.limits, *notes_of(self.layouts), *self.notes]
