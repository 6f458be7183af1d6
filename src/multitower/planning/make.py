"""Making a plan: all layouts, and what is said beside them, from the arguments of `plan`."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from multitower.errors import ArgumentError
from multitower.hardware.devices import devices as find_devices
from multitower.planning.layouts import PlannedLayout, Room, fast_layouts, tower_layouts
from multitower.planning.limits import limits_of
from multitower.planning.programs import Programs
from multitower.planning.shapes import Planned, planned
from multitower.planning.sizes import memory_in_bytes
from multitower.planning.staged import staged_layouts
from multitower.steps.arguments import check_numbers
from multitower.steps.loss import LossFunction
from multitower.steps.parts import StepParts
from multitower.towers.placement import check_towers

_LONG_S = 10


def make_plan(
    step: tuple[Any, Any, Any],
    given: tuple[Any, Any],
    extras: Mapping[str, Any],
    where: tuple[Any, Any, Any],
    memory: Any,
) -> dict[str, Any]:
    """The attributes of a `Plan`.

    Args:
        step: the loss function, the optimizer, the decay of the average.
        given: parameters and batch.
        extras: model state and key.
        where: devices of a machine, machines, towers.
        memory: of a device.

    Raises:
        MultitowerError: what `plan` raises.
    """
    loss_fn, optimizer, ema_decay = step
    devices, machines, towers = where
    room = Room(len(find_devices()) if devices is None else devices, machines, towers)
    _check(room)
    check_numbers(ema_decay, None, None)
    memory_bytes = None if memory is None else memory_in_bytes(memory)
    loss = LossFunction.of(loss_fn)
    parts = StepParts(loss, optimizer, ema_decay, "mean", False, False, None, "mean")
    shapes = planned(parts, *given, model_state=extras["model_state"], rng=extras["rng"])
    return _attributes(shapes, Programs(shapes), room, memory_bytes)


def plan_again(
    before: tuple[Planned, Programs, Room], devices: int, machines: int, memory_bytes: int | None
) -> dict[str, Any]:
    """The attributes of a `Plan` on other devices, with as many rows and towers on each.

    Raises:
        ArgumentError: a number of devices or machines that is none.
    """
    given, programs, old = before
    room = Room(devices, machines, None)
    _check(room)
    rows, towers = (
        None if count is None else max(1, count * room.num_devices // old.num_devices)
        for count in (given.batch.num_rows, old.towers)
    )
    assert rows is not None
    return _attributes(
        given.with_rows(rows), programs, Room(devices, machines, towers), memory_bytes
    )


def _attributes(
    given: Planned, programs: Programs, room: Room, memory_bytes: int | None
) -> dict[str, Any]:
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
    return {
        "layouts": layouts,
        "memory_bytes": memory_bytes,
        "num_rows": given.batch.num_rows,
        "num_parameters": sum(leaf.size for leaf in jax.tree.leaves(given.fields.params)),
        "devices": room.devices,
        "machines": room.machines,
        "notes": tuple(notes),
        "limits": limits_of(given, programs.largest_buffer, layouts),
        "_of": (given, programs, room),
    }


def _compiled(
    layouts: Iterator[PlannedLayout], which: str, notes: list[str]
) -> Iterator[PlannedLayout]:
    """The layouts up to one for which the compiler fails; `notes` then gets why."""
    try:
        yield from layouts
    except jax.errors.JaxRuntimeError as error:
        why = str(error).splitlines()[0][:200]
        notes.append(f"Layouts {which} are left out from here on: the compiler fails ({why}).")


def _check(room: Room) -> None:
    for name, value in (("devices", room.devices), ("machines", room.machines)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(f"{name}={value!r}: it must be a whole number, 1 or more.")
    check_towers(room.towers)
