"""Makes a plan: all layouts, notes and limits, from the arguments of `plan`."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax

from multitower.errors import ArgumentError, whole_number
from multitower.functions.objective import check_reduction
from multitower.hardware.devices import devices as find_devices
from multitower.planning.apart import local_layouts, rotation_layouts
from multitower.planning.layouts import PlannedLayout, Room, fast_layouts, tower_layouts
from multitower.planning.limits import limits_of
from multitower.planning.programs import Programs
from multitower.planning.shapes import Planned, planned
from multitower.planning.sizes import memory_in_bytes
from multitower.planning.staged import staged_layouts
from multitower.steps.arguments import check_numbers
from multitower.steps.local.options import LocalOptions, check_local
from multitower.steps.look import averaged_over_rows
from multitower.steps.loss import LossFunction
from multitower.steps.parts import StepParts
from multitower.steps.precision import check_compute_dtype, check_loss_scale
from multitower.steps.rotation.options import RotationOptions, check_rotation
from multitower.towers.placement import check_towers

_LONG_S = 10


def make_plan(
    step: tuple[Any, Any],
    given: tuple[Any, Any, Any, Any],
    where: tuple[Any, Any, Any],
    memory: Any,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """The attributes of a `Plan`.

    Args:
        step: the loss function and the optimizer.
        given: parameters, batch, model state and key.
        where: devices of a machine, machines, towers.
        memory: memory of a device, as for `plan`.
        options: the other arguments of `plan`, by name.

    Raises:
        MultitowerError: as for `plan`.
    """
    loss_fn, optimizer = step
    devices, machines, towers = where
    room = _room(len(find_devices()) if devices is None else devices, machines, towers)
    ema_decay, _, clip_norm = check_numbers(options["ema_decay"], None, options["clip_norm"])
    check_reduction(options["reduction"])
    memory_bytes = None if memory is None else memory_in_bytes(memory)
    apart = _apart(options, room.towers)
    dtype = check_compute_dtype(options["compute_dtype"])
    check_loss_scale(dtype, {"local or asynchronous updates": apart})
    loss = replace(LossFunction.of(loss_fn), compute_dtype=dtype)
    with_average = (loss, optimizer, ema_decay)
    last = (clip_norm, options["reduction"])
    parts = StepParts(*with_average, "mean", False, False, *last)
    params, batch, model_state, rng = given
    shapes = planned(parts, params, batch, model_state=model_state, rng=rng)
    shapes = shapes._replace(apart=apart)
    return _attributes(shapes, Programs(shapes), room, memory_bytes)


def plan_again(
    before: tuple[Planned, Programs, Room], devices: int, machines: int, memory_bytes: int | None
) -> dict[str, Any]:
    """The attributes of a `Plan` on other devices, with the same rows and towers per device.

    Raises:
        ArgumentError: `devices` or `machines` is not a whole number above 0.
    """
    given, programs, old = before
    room = _room(devices, machines, None)
    rows, towers = (
        None if count is None else max(1, count * room.num_devices // old.num_devices)
        for count in (given.batch.num_rows, old.towers)
    )
    assert rows is not None
    return _attributes(given.with_rows(rows), programs, replace(room, towers=towers), memory_bytes)


def _attributes(
    given: Planned, programs: Programs, room: Room, memory_bytes: int | None
) -> dict[str, Any]:
    notes: list[str] = []
    begin = time.perf_counter()
    room = _with_rows_enough(given, programs, room, notes)
    if isinstance(given.apart, LocalOptions):
        kinds = [(local_layouts(given, programs, room), "with sync_every=")]
    elif given.apart is not None:
        found = rotation_layouts(given, programs, room, notes)
        kinds = [(found, "with updates='asynchronous'")]
    else:
        kinds = [
            (fast_layouts(given, programs, room), "without towers="),
            (tower_layouts(given, programs, room, notes), "with towers="),
        ]
        if given.fields.loss_scale is None:
            kinds.append((staged_layouts(given, programs, room, notes), "with stages="))
    layouts = [layout for made, which in kinds for layout in _compiled(made, which, notes)]
    if not layouts:
        raise ArgumentError(f"the compiler fails for every layout, so there is no plan. {notes[0]}")
    if given.apart is None:
        layouts = _marked(given, layouts, room, notes)
    if (took_s := time.perf_counter() - begin) > _LONG_S:
        notes.append(f"Compiling took {took_s:.0f} s.")
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


def _with_rows_enough(given: Planned, programs: Programs, room: Room, notes: list[str]) -> Room:
    """The room, without numbers of towers that leave each too few rows; appends why to `notes`."""
    counts = room.tower_counts(given.batch.num_rows)
    while len(counts) > 1:
        tower_rows = -(-given.batch.num_rows // counts[-1])
        why = programs.why_it_fails_with(tower_rows)
        if why is None:
            return room
        few = f"{tower_rows} row{'s' if tower_rows > 1 else ''}"
        notes.append(f"towers={counts.pop()} is left out: the loss fails with {few} ({why}).")
        room = replace(room, most_towers=counts[-1])
    return room


def _marked(
    given: Planned, layouts: list[PlannedLayout], room: Room, notes: list[str]
) -> list[PlannedLayout]:
    """The layouts, marked where a step refuses so many rows; appends the reason to `notes`."""
    num_rows = given.batch.num_rows
    count_of = lambda one: one.options.get("towers", room.num_devices)
    ragged = sorted({count for count in map(count_of, layouts) if num_rows % count})
    if not ragged:
        return layouts
    rows_and_towers = (-(-num_rows // ragged[0]), ragged[0])
    averaged = averaged_over_rows(given.step, given.batch, given.fields, *rows_and_towers)
    if averaged is None:
        return layouts
    notes.append(
        f"train_step will refuse {num_rows} rows and {averaged} with "
        f"{' or '.join(map(str, ragged))} towers, which they do not fill evenly (without towers= "
        "there is one on each device). Return one value per example, or use another number of rows."
    )
    return [replace(one, refused=count_of(one) in ragged) for one in layouts]


def _compiled(
    layouts: Iterator[PlannedLayout], which: str, notes: list[str]
) -> Iterator[PlannedLayout]:
    """Yields layouts up to one for which the compiler fails; appends the reason to `notes`."""
    try:
        yield from layouts
    except jax.errors.JaxRuntimeError as error:
        why = str(error).splitlines()[0][:200]
        notes.append(f"Layouts {which} are left out from here on: the compiler fails ({why}).")


def _apart(options: Mapping[str, Any], towers: int | None) -> LocalOptions | RotationOptions | None:
    """The options for local or asynchronous updates, if they are given; else None."""
    local = check_local(
        options["sync_every"], options["outer_optimizer"], options["local_state"], {}
    )
    given = {name: options[name] for name in ("max_staleness", "rotation")}
    given |= {"stale_scale": None, "momentum_correction": False}  # they take no memory
    return check_rotation(options["updates"], given, towers, {"sync_every": local}) or local


def _room(devices: Any, machines: Any, towers: Any) -> Room:
    return Room(
        whole_number("devices", devices, 1),
        whole_number("machines", machines, 1),
        check_towers(towers),
    )
