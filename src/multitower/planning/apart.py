"""Towers apart: memory and traffic of local and asynchronous updates.

With local updates a device keeps parameters and an optimizer state for each of its towers; the most
memory is needed while a tower runs, or where towers meet. With asynchronous updates the first
device has the optimizer's state, the newest parameters, and a version of them for each group of
its towers; the most memory is needed while one of them runs, or in the update.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from multitower.engines.executable import compile_for_each
from multitower.engines.job import Job, Shared
from multitower.engines.reduction import evaluate, sum_tree
from multitower.engines.same_bits import scale_shape, tower_function
from multitower.engines.tracing import trace
from multitower.errors import ArgumentError
from multitower.planning.layouts import PlannedLayout, Room, make_layout
from multitower.planning.memory import Memory, Spread, exchange_bytes
from multitower.planning.programs import Programs, working_bytes
from multitower.planning.shapes import Planned, StateBytes, num_bytes
from multitower.planning.traffic import Traffic, with_towers
from multitower.steps.local.job import LocalJob, MeetingJob
from multitower.steps.local.options import LocalOptions, refuse_meeting_in_local
from multitower.steps.local.state import Own
from multitower.steps.rotation.options import RotationOptions, refuse_meeting_in_rotation
from multitower.steps.rotation.runner import make_finish
from multitower.steps.rotation.turns import Turns
from multitower.towers.leaves import row_shapes
from multitower.towers.placement import Placement, contiguous
from multitower.towers.rows import Tower


class MeetingBytes(NamedTuple):
    """Bytes that the programs of a meeting need.

    Attributes:
        buffers: the size of each buffer that is summed over towers.
        moved: to make these buffers, in addition to the buffers.
        meet: for the update, in addition to the state and the sums.
        go_on: to give a tower the new parameters.
    """

    buffers: tuple[int, ...]
    moved: int
    meet: int
    go_on: int


def local_layouts(given: Planned, programs: Programs, room: Room) -> Iterator[PlannedLayout]:
    """Yields the layouts with `sync_every=`.

    Raises:
        ArgumentError: towers exchange values in the loss.
    """
    options = given.apart
    assert isinstance(options, LocalOptions)
    meeting = programs.once("meeting", lambda: _compile_meeting(given, programs))
    for towers in room.tower_counts(given.batch.num_rows):
        tower_rows = -(-given.batch.num_rows // towers)
        compile_tower = functools.partial(_compile_local, given, programs, tower_rows)
        working, metrics = programs.once(("local", tower_rows), compile_tower)
        used = min(towers, room.num_devices)
        spread = Spread.of(used, towers)
        rows = spread.slots * num_bytes(row_shapes(given.batch.rows, tower_rows))
        update = _meeting_bytes(meeting, spread)
        took = _local_memory(given, spread, rows, working, update, held=programs.held)
        met = with_towers(meeting.buffers, spread)
        sent = Traffic(*(-(-count // options.sync_every) for count in met))
        if used > 1:  # the sums of the metrics, to the first device
            sent = sent.plus(Traffic(spread.slots * sum(metrics), spread.slots * len(metrics)))
        chosen = {"towers": towers, "sync_every": options.sync_every}
        yield make_layout(room, chosen, (took, sent), note=room.idle_in_words(used))


def _local_memory(
    given: Planned, spread: Spread, rows: int, working: int, update: int, *, held: Any
) -> Memory:
    """What a device keeps for its towers, and for all of them together."""
    options, own = given.apart, _own(given)
    assert isinstance(options, LocalOptions)
    outer_state = jax.eval_shape(options.outer_optimizer.init, given.fields.params)
    outer = StateBytes.of(given.fields._replace(opt_state=outer_state), held)
    gradients = min(outer.parameters, working)
    return Memory(
        outer.parameters + spread.slots * num_bytes(own.params),
        outer.optimizer_state + spread.slots * num_bytes(own.opt_state),
        outer.average,
        outer.rest + spread.slots * num_bytes((own.model_state, own.num_rows)),
        rows,
        gradients,
        working - gradients,
        update,
    )


def rotation_layouts(
    given: Planned, programs: Programs, room: Room, notes: list[str]
) -> Iterator[PlannedLayout]:
    """Yields the layouts with `updates="asynchronous"`; appends what is left out to `notes`.

    Raises:
        ArgumentError: towers exchange values in the loss; there are several machines; or no planned
            number of towers divides into the groups.
    """
    options = given.apart
    assert isinstance(options, RotationOptions)
    if room.machines > 1:
        raise ArgumentError(
            f"machines={room.machines}: updates='asynchronous' runs in one process, which drives "
            "the devices of one machine. Leave machines= out, or updates=."
        )
    refused: list[str] = []
    counts = room.tower_counts(given.batch.num_rows)
    for towers in counts:
        used = min(towers, room.num_devices)
        stand_ins: Any = range(used)
        try:
            turns = Turns.of(options, contiguous(stand_ins, towers))
        except ArgumentError as error:
            refused.append(f"towers={towers} is left out: {error}")
            continue
        chosen: dict[str, Any] = {"towers": towers, "updates": "asynchronous"}
        chosen["max_staleness"] = len(turns.groups) - 1
        found = _rotation(given, programs, turns)
        yield make_layout(room, chosen, found, note=room.idle_in_words(used))
    if len(refused) == len(counts):
        raise ArgumentError(" ".join(refused))
    notes.extend(refused)


def _own(given: Planned) -> Own:
    """What a tower has of its own, as shapes."""
    fields = given.fields
    count = jax.ShapeDtypeStruct((), np.int32)
    return Own(fields.params, fields.opt_state, fields.model_state, count)


def _compile_local(
    given: Planned, programs: Programs, tower_rows: int
) -> tuple[int, tuple[int, ...]]:
    """Bytes that a tower's step needs beside its arguments, and of each buffer for the metrics."""
    step, fields, batch, _ = given
    local = LocalJob(step, batch.split, tower_rows, 1)
    run = tower_function(Job(local.tower, local.finish))
    shared = Shared(_own(given), (fields.step, fields.rng, batch.shared))
    traced = trace(run, (shared, row_shapes(batch.rows, tower_rows), Tower.shapes()), 1)
    if traced.rounds(final=True) is not None:
        raise refuse_meeting_in_local(traced.meets or "axis_index")

    def tower(own: Own, rest: Any, rows: Any, here: Any) -> Any:
        return traced(Shared(own, rest), rows, here)

    arguments = (*shared, row_shapes(batch.rows, tower_rows), Tower.shapes())
    (compiled,) = compile_for_each(tower, arguments, programs.local[:1], donate=(0,))
    sums = compiled.out_info[0]
    return working_bytes(compiled), tuple(map(num_bytes, sums.packed.buffers))


def _compile_meeting(given: Planned, programs: Programs) -> MeetingBytes:
    options, own, device = given.apart, _own(given), programs.local[:1]
    assert isinstance(options, LocalOptions)
    outer = jax.eval_shape(options.outer_optimizer.init, given.fields.params)
    fields = given.fields._replace(opt_state=outer)
    job = MeetingJob(given.step, options)
    number = jax.ShapeDtypeStruct((), np.int32)
    (moved,) = compile_for_each(job.moved, (own, fields.params, number), device)
    packed = moved.out_info.packed
    (meet,) = compile_for_each(job.meet, (fields, packed), device, donate=(0,))
    new, averaged, _ = meet.out_info
    arguments = (own, new.params, new.model_state, averaged)
    (go_on,) = compile_for_each(job.go_on, arguments, device, donate=(0,))
    return MeetingBytes(
        tuple(map(num_bytes, packed.buffers)),
        moved.memory_analysis().temp_size_in_bytes,
        working_bytes(meet),
        working_bytes(go_on) + num_bytes(averaged),
    )


def _meeting_bytes(meeting: MeetingBytes, spread: Spread) -> int:
    """The most bytes that a meeting needs at any moment, in addition to the state."""
    sums = sum(meeting.buffers)
    moments = [spread.depth * sums + meeting.moved]
    parts = 0
    if spread.num_devices > 1:
        moments.append(spread.num_parts * sums + exchange_bytes(meeting.buffers, spread))
        # If there are several parts, the total does not take their place in memory.
        parts = spread.num_parts * sums if spread.num_parts > 1 else 0
    return max(*moments, parts + sums + max(meeting.meet, meeting.go_on))


def _rotation(given: Planned, programs: Programs, turns: Turns) -> tuple[Memory, Traffic]:
    """Memory of the first device, and traffic of an update that other devices compute for it."""
    state, batch = StateBytes.of(given.fields, programs.held), given.batch
    tower_rows = -(-batch.num_rows // turns.num_towers)
    program = programs.tower(tower_rows, turns.num_towers)
    if program.meets is not None:
        raise refuse_meeting_in_rotation(program.meets)
    update = programs.once("update", lambda: _compile_update(given, programs))
    sums = sum(program.buffers)
    waiting = [_waiting(group, turns.home) for group in turns.groups]
    # The newest parameters are also a version here, unless a group on other devices made them.
    here = [turns.home in group.devices for group in turns.groups]
    versions = sum(here) + (not all(here))
    took = Memory(
        versions * state.parameters,
        state.optimizer_state,
        state.average,
        state.rest
        + sum(here) * num_bytes((given.fields.model_state, given.fields.rng))
        + (not all(here)) * num_bytes(given.fields.model_state),  # of the group whose turn it is
        max(one.towers for one in waiting) * num_bytes(row_shapes(batch.rows, tower_rows)),
        max(one.running for one in waiting) * sums,
        program.temporary,
        max(max(one.adding for one in waiting) * sums, sums + update),
    )
    sent = Traffic()
    copies = (given.fields.params, given.fields.model_state)
    for group in turns.groups:
        others = sum(device != turns.home for device in group.devices)
        size, messages = others * num_bytes(copies), others * len(jax.tree.leaves(copies))
        if group.devices[0] != turns.home:  # the model state that the update starts from
            size += num_bytes(given.fields.model_state)
            messages += len(jax.tree.leaves(given.fields.model_state))
        found = Traffic(size + others * sums, messages + others * len(program.buffers))
        sent = max(sent, found)
    return took, sent


class Waiting(NamedTuple):
    """How many sums of one group are on one device at the same time.

    Attributes:
        towers: how many of the group's towers run there.
        running: the most sums while a tower runs, including its own.
        adding: the most sums while two are added.
    """

    towers: int
    running: int
    adding: int


def _waiting(group: Placement, home: jax.Device) -> Waiting:
    """Counts the sums of a group on the device `home`, in the order of `steps.rotation.sums`."""

    def tower(number: int) -> tuple[bool, int, int]:
        is_here = group.devices[group.owners[number]] == home
        return is_here, int(is_here), int(is_here)

    def add(left: tuple[bool, int, int], right: tuple[bool, int, int]) -> tuple[bool, int, int]:
        is_here, running, adding = left
        running = max(running, is_here + right[1])
        return is_here, running, max(adding, is_here + right[2], 2 * is_here)

    _, running, adding = evaluate(sum_tree(0, group.num_towers), tower, add)
    return Waiting(sum(group.devices[d] == home for d in group.owners), running, adding)


def _compile_update(given: Planned, programs: Programs) -> int:
    """Bytes that an update needs beside its arguments; parameters are not overwritten."""
    step, fields, batch, options = given
    assert isinstance(options, RotationOptions)
    count = jax.ShapeDtypeStruct((), np.int32)
    used = (fields.opt_state, fields.ema_params)
    kept = fields._replace(opt_state=None, ema_params=None)
    arguments = (kept, used, programs.sums, scale_shape(), count)
    finish = make_finish(step, batch.split, 1, 1, options)
    (compiled,) = compile_for_each(finish, arguments, programs.local[:1], donate=(1,))
    return working_bytes(compiled)
