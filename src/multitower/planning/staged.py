"""Stages: memory and traffic of a model in stages, on the device that needs the most.

A stage keeps its own part of the state, and the inputs of every tower between its forward and its
backward pass there: of at most as many towers as there are devices from this one to the last.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from multitower.errors import ArgumentError
from multitower.planning.layouts import PlannedLayout, Room, make_layout
from multitower.planning.memory import Memory, Spread
from multitower.planning.programs import Programs
from multitower.planning.shapes import Planned, num_bytes
from multitower.planning.traffic import Traffic
from multitower.stages.chain import Chain, shapes_of
from multitower.stages.layout import Layout
from multitower.stages.order import least_bubble
from multitower.stages.passes.residuals import keep_residuals
from multitower.stages.pieces import rows_of
from multitower.stages.programs import StagePrograms
from multitower.steps.staged.job import StagedJob
from multitower.steps.staged.update import SHARED, Homes, Rows, WholeUpdate
from multitower.towers.leaves import row_shapes
from multitower.towers.placement import contiguous

_MOST_TRIES = 3  # numbers of stages, and towers per device, to try: each needs its own programs


class PlannedStage(NamedTuple):
    """Bytes that one stage needs on its device.

    Attributes:
        state: of its parameters, optimizer state and moving average.
        inputs: of what it receives from earlier stages for one tower.
        residuals: of what it keeps for one tower with `remat=False`.
        rows: of one tower's rows, if it needs them.
        copies: of parameters that live in another stage, of inputs that are not parameters, and of
            large arrays that the loss closes over.
        sums: of what it sums over towers.
        answers: of the cotangents that it receives for one tower.
        returns: of the cotangents that it sends for one tower.
        temporary: temporary bytes of the larger of its two programs.
        sent: bytes that it sends forward for one tower; and the number of its messages, including
            those of the backward pass.
    """

    state: tuple[int, int, int]
    inputs: int
    residuals: int
    rows: int
    copies: int
    sums: int
    answers: int
    returns: int
    temporary: int
    sent: tuple[int, int]


def staged_layouts(
    given: Planned, programs: Programs, room: Room, notes: list[str]
) -> Iterator[PlannedLayout]:
    """Yields layouts with `stages=`, one per device; appends what is left out to `notes`."""
    towers = room.tower_counts(given.batch.num_rows)[:_MOST_TRIES][-1]
    lengths = [p for p in range(2, room.devices + 1) if room.devices % p == 0][-_MOST_TRIES:]
    if programs.tower(-(-given.batch.num_rows // towers), towers).meets is not None:
        return
    for num_stages in lengths:
        replicas = min(room.num_devices // num_stages, towers)
        replicas = replicas // room.machines * room.machines or replicas
        try:
            key = ("stages", -(-given.batch.num_rows // towers), num_stages)
            compile_it = functools.partial(_stages, given, programs, towers, num_stages)
            stages = programs.once(key, compile_it)
        except ArgumentError as error:
            why = str(error).removeprefix(f"stages={num_stages}: ")
            notes.append(f"stages={num_stages} is left out: {why}")
            continue
        passing = -(-towers // replicas)
        waits = least_bubble(num_stages, passing)
        note = _halving(replicas * (2 * passing + num_stages - 1), given.batch.num_rows)
        options = {"towers": towers, "stages": num_stages, "layout": (replicas, num_stages)}
        rows = num_bytes(row_shapes(given.batch.rows, -(-given.batch.num_rows // towers)))
        head = num_bytes((given.fields.model_state, given.fields.rng, given.batch.shared))
        sent, spread = _traffic(stages, replicas, passing), Spread.of(replicas, towers)
        took = _largest(stages, spread, rows, head)
        yield make_layout(room, options, (took, sent), bubble=waits, note=note)
        took = _largest(stages, spread, rows, head, remat=False)
        options = {**options, "remat": False}
        yield make_layout(room, options, (took, sent), bubble=waits)


def _halving(towers: int, num_rows: int) -> str:
    """Advice in words: more and smaller towers that would halve the waiting; or ""."""
    even = next((n for n in range(towers, num_rows + 1) if num_rows % n == 0), None)
    return f"towers={even} would halve the time in which devices wait" if even else ""


def _stages(given: Planned, programs: Programs, towers: int, num_stages: int) -> list[PlannedStage]:
    """The stages of a tower's program, compiled for one device.

    Raises:
        ArgumentError: the loss cannot be cut into so many stages, or the optimizer does not treat
            every parameter by itself.
    """
    step, fields, batch, _ = given
    rows = row_shapes(batch.rows, -(-batch.num_rows // towers))
    job = StagedJob(
        step,
        batch.split,
        tower_rows=rows[0].shape[0],
        num_towers=towers,
        num_stages=num_stages,
        given=(fields, [*batch.shared, *programs.weights], rows),
    )
    chain = job.chain
    loss = jax.ShapeDtypeStruct((), np.float32)
    homes = WholeUpdate(step, fields, (chain.homes, rows_of(chain.pieces)), loss).homes
    device = programs.local[0]
    layout = Layout(((device,) * num_stages,), tuple(range(num_stages)), contiguous([device], 1))
    compiled = StagePrograms(chain, layout)
    row_numbers = chain.inputs[-3 - len(rows) : -3]
    return [_stage(given, (chain, homes), compiled, s, row_numbers) for s in range(num_stages)]


def _stage(
    given: Planned,
    cut: tuple[Chain, Homes],
    compiled: StagePrograms,
    s: int,
    row_numbers: Sequence[int],
) -> PlannedStage:
    chain, homes = cut
    stage = chain.stages[s]
    own = {number for number, home in chain.home_of.items() if home == s}
    arguments, rows = set(chain.inputs) | chain.params, set(row_numbers)
    inputs = set(stage.inputs)
    sums, answers = compiled.backward[s][0].out_info
    both = [*compiled.forward[s], *compiled.backward[s]]
    held = {id(array): array for one in both for array in one.held}
    users = [
        sum(number in other.differentiated for other in chain.stages[s + 1 :])
        for number in stage.answered
    ]
    forward = [(n, user) for n in stage.sent for user in chain.users(n)]
    bytes_of = lambda numbers: num_bytes(shapes_of(chain.avals, numbers))
    return PlannedStage(
        _state_of(given, homes, s),
        bytes_of(inputs - arguments),
        _residuals(chain, s, rows if s == 0 else set()),
        bytes_of(inputs & rows),
        bytes_of((inputs & arguments) - own - rows) + num_bytes([*held.values()]),
        num_bytes(sums),
        sum(n * bytes_of([x]) for n, x in zip(users, stage.answered, strict=True)),
        num_bytes(answers),
        max(one.memory_analysis().temp_size_in_bytes for one in both),
        (bytes_of(number for number, _ in forward), len(forward) + len(answers)),
    )


def _residuals(chain: Chain, s: int, rows: set[int]) -> int:
    """Bytes that a stage keeps of a tower for its backward program, beside parameters and rows."""
    stage = chain.stages[s]
    if not stage.sent:
        return 0
    kept = keep_residuals(stage, shapes_of(chain.avals, stage.inputs), chain.params)
    return sum(
        num_bytes(shape)
        for name, shape in zip(kept.names, kept.shapes, strict=True)
        if name not in chain.params | rows
    )


def _state_of(given: Planned, homes: Homes, s: int) -> tuple[int, int, int]:
    """Bytes of a stage's part of the parameters, the optimizer's state and the average."""
    fields = given.fields

    def part(tree: Any, numbers: Sequence[int], rows: Rows) -> int:
        leaves = jax.tree.leaves(tree)
        total = 0
        for i in numbers:
            if i < len(leaves):
                first, last = rows[i][s] if i in rows else (0, 1)
                length = leaves[i].shape[0] if i in rows else 1
                total += num_bytes(leaves[i]) * (last - first) // length
        return total

    shared = homes.opt_state_of(SHARED) if s + 1 == _num_stages(homes) else []
    of_state = [*homes.opt_state_of(s), *shared]
    return (
        part(fields.params, homes.params_of(s), homes.rows),
        part(fields.opt_state, of_state, homes.rows_of_state),
        part(fields.ema_params, homes.params_of(s), homes.rows),
    )


def _num_stages(homes: Homes) -> int:
    split = [stage for own in homes.rows.values() for stage in own]
    return 1 + max([*homes.params, *split], default=0)


def _largest(
    stages: Sequence[PlannedStage], spread: Spread, rows: int, head: int, *, remat: bool = True
) -> Memory:
    """Memory of the device that needs the most; `spread` is that of towers over replicas."""
    found: list[Memory] = []
    for s, stage in enumerate(stages):
        on_way = min(spread.slots, len(stages) - s)
        # Rows are on the device of the first stage, and are sent to other stages.
        held = on_way * (stage.inputs + (stage.rows if s else 0))
        if not remat and stage.residuals:
            held = on_way * stage.residuals
        gradients = spread.depth * stage.sums
        found.append(
            Memory(
                *stage.state,
                rest=stage.copies + (head if s + 1 == len(stages) else 0),
                rows=0 if s else rows * spread.slots,
                gradients=gradients,
                activations=held + stage.answers + stage.returns + stage.temporary,
                update=stage.sums * min(2, spread.num_devices),
            )
        )
    return max(found, key=lambda memory: memory.total)


def _traffic(stages: Sequence[PlannedStage], replicas: int, passing: int) -> Traffic:
    """Traffic of the busiest device of the first replica, which sends the sums to the others."""
    found: list[Traffic] = []
    for s, stage in enumerate(stages):
        size, messages = stage.sent
        rows = 0 if s else sum(other.rows for other in stages[1:])
        others = replicas - 1
        found.append(
            Traffic(
                passing * (size + stage.returns + rows) + others * stage.sums,
                passing * (messages + (1 if rows else 0)) + others,
            )
        )
    return max(found, key=lambda one: (one.num_bytes, one.messages))
