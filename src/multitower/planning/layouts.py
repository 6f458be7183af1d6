"""Layouts: the useful ways to run a training step, with memory and traffic of each."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import jax

from multitower.planning import memory, traffic
from multitower.planning.memory import Memory, Spread
from multitower.planning.programs import Programs
from multitower.planning.shapes import Planned, StateBytes, num_bytes
from multitower.planning.traffic import Traffic
from multitower.steps.optimizing.element_wise import is_element_wise
from multitower.towers.leaves import row_shapes

_TOWERS_PER_DEVICE = (1, 2, 4, 8)


@dataclass(frozen=True)
class PlannedLayout:
    """One way to run a training step, with its memory and traffic.

    Attributes:
        options: options of `train_step`, by name; `devices` is the number on each machine.
        devices: the number of devices on all machines together.
        memory: bytes on the device that needs the most, by kind: `parameters`, `gradients`,
            `optimizer_state`, `average`, `rest` (model state, key, step count), `rows` (of the
            batch), `activations` (temporary bytes of a tower's program, as the compiler counts
            them), and `update` (sums and temporary bytes of the exchange and the update, which
            come after the activations).
        total_bytes: the most bytes on a device at any moment: the sum of `memory`, but only the
            larger of `gradients` + `activations` and of `update`, which come one after the other.
        sent_bytes: bytes that each device sends in a step.
        messages: messages that each device sends in a step; a collective over D devices counts
            D-1, an all-reduce twice as many.
        bubble: the share of the time in which devices wait for each other in a pipeline, 0 to 1.
        estimated: whether the activations are those of a program compiled for fewer devices.
        note: a remark about this layout, or "".
        refused: whether `train_step` refuses so many rows with it; a note of the plan says why.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import multitower as mt
        >>> given = (lambda w, x: (x @ w) ** 2, optax.sgd(0.1), jnp.ones(64), jnp.ones((8, 64)))
        >>> layout = mt.plan(*given, devices=1, towers=1).layouts[0]
        >>> layout.options, layout.memory["parameters"], layout.sent_bytes
        ({'devices': 1}, 256, 0)
        >>> layout.fits(1024**2)
        True
    """

    options: dict[str, Any]
    devices: int
    memory: dict[str, int]
    total_bytes: int
    sent_bytes: int
    messages: int
    bubble: float = 0.0
    estimated: bool = False
    note: str = ""
    refused: bool = False

    def fits(self, memory_bytes: int | None) -> bool:
        """Whether a step takes it, and it fits into this much memory on a device.

        Args:
            memory_bytes: memory of one device, in bytes; None for enough.
        """
        return not self.refused and (memory_bytes is None or self.total_bytes <= memory_bytes)


@dataclass(frozen=True)
class Room:
    """The machines that a step is planned for.

    Attributes:
        devices: the number of devices of each machine.
        machines: the number of machines.
        towers: the number of towers, or None to try several.
        most_towers: with more towers, these have fewer rows than the loss needs; None if not.
    """

    devices: int
    machines: int
    towers: int | None
    most_towers: int | None = None

    @property
    def num_devices(self) -> int:
        """The number of devices on all machines."""
        return self.devices * self.machines

    def idle_in_words(self, used: int) -> str:
        """What is said of devices without a tower, if this many have some."""
        idle = self.num_devices - used
        return f"{idle} device{'s stay' if idle > 1 else ' stays'} idle" if idle > 0 else ""

    def tower_counts(self, num_rows: int) -> list[int]:
        """The numbers of towers to plan for a batch of this many rows."""
        if self.towers is not None:
            return [self.towers]
        tries = [each * self.num_devices for each in _TOWERS_PER_DEVICE]
        most = num_rows if self.most_towers is None else self.most_towers
        return [count for count in tries if count <= most] or [most]


def make_layout(
    room: Room, options: dict[str, Any], found: tuple[Memory, Traffic], **more: Any
) -> PlannedLayout:
    """A layout from its options, memory and traffic."""
    took, sent = found
    return PlannedLayout(
        {"devices": room.devices, **options},
        room.num_devices,
        asdict(took),
        took.total,
        sent.num_bytes,
        sent.messages,
        **more,
    )


def fast_layouts(given: Planned, programs: Programs, room: Room) -> Iterator[PlannedLayout]:
    """Yields the layouts without `towers=`: with the whole state on every device, and split."""
    count = room.num_devices
    num_rows = given.batch.num_rows
    tower_rows = -(-num_rows // count)
    # Rows that devices cannot share evenly are whole on each of them.
    fed = num_rows if num_rows % count else tower_rows
    rows = num_bytes((row_shapes(given.batch.rows, fed), given.batch.shared))
    working = programs.fast(tower_rows, several=count > 1)
    reduced = programs.tower(tower_rows, count).reduced
    state = StateBytes.of(given.fields, programs.held)
    took = memory.without_towers(state, rows, num_bytes(given.fields.params), working)
    yield make_layout(room, {}, (took, traffic.without_towers(reduced, count)))
    if count == 1:
        return
    for params in (False, True):
        program = programs.shards(tower_rows, count, params=params)
        took = memory.with_shards(state, given.fields, rows, program, count, params=params)
        sent = traffic.with_shards(given.fields, count, params=params)
        name = "shard_params" if params else "shard_update"
        estimated = program.num_devices != count
        yield make_layout(room, {name: True}, (took, sent), estimated=estimated)


def tower_layouts(
    given: Planned, programs: Programs, room: Room, notes: list[str]
) -> Iterator[PlannedLayout]:
    """Yields the layouts with `towers=`, without stages; appends what is left out to `notes`."""
    state = StateBytes.of(given.fields, programs.held)
    has_params = bool(jax.tree.leaves(given.fields.params))
    takes_blocks = (has_params and given.fields.loss_scale is None) and is_element_wise(
        given.step.optimizer, given.fields.params
    )
    for towers in room.tower_counts(given.batch.num_rows):
        tower_rows = -(-given.batch.num_rows // towers)
        program = programs.tower(tower_rows, towers)
        if program.meets is not None:
            notes.append(
                "Layouts with towers= are left out: towers exchange values in the loss "
                f"({program.meets}), and plan does not count what waits for them."
            )
            return
        used = min(towers, room.num_devices)
        spread = Spread.of(used, towers)
        idle = room.idle_in_words(used)
        tower = (
            num_bytes(row_shapes(given.batch.rows, tower_rows)),
            program.buffers,
            program.temporary,
        )
        took = memory.with_towers(state, tower, programs.update, spread)
        sent = traffic.with_towers(program.buffers, spread)
        yield make_layout(room, {"towers": towers}, (took, sent), note=idle)
        if takes_blocks and used > 1:
            took = memory.with_blocks(state, given.fields, tower, given.step.optimizer, spread)
            sent = traffic.with_blocks(given.fields, program.buffers, spread)
            options = {"towers": towers, "shard_update": True}
            yield make_layout(room, options, (took, sent), note=idle)
