"""The same-bits engine: a tower job as one-device programs and additions in a fixed order.

1. *tower program*: one executable per device, run once per tower on the tower's device; where
   towers meet, one for every round between two exchanges (`exchanges`);
2. *reduction*: additions along the tree of `reduction`, on each device and then between devices;
3. *finish program*: one executable per device, on the totals.

Blocks, if a job has any, are returned after the reduction: the caller uses them.

The number of devices only decides where and how often these programs run, so the bits cannot depend
on it.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from multitower.engines.exchanges import Exchanges
from multitower.engines.executable import Compiled, WholeNumbers, compile_for_each, signature
from multitower.engines.job import Job, Shared
from multitower.engines.packing import Packed, pack, unpack
from multitower.engines.totals import Totals, TowerSums, TowerTurn, with_one_nan
from multitower.engines.tracing import refuse_filled, refuse_kept_values, trace
from multitower.towers.placement import Placement
from multitower.towers.rows import Tower
from multitower.towers.split import TowerRows

_SCALE = np.float64  # float32 on the device, unless jax_enable_x64 asks for more


# Is called with (stage, place, sums):
#   ("exchange", tower, what the tower sends), where towers meet;
#   ("tower program", tower, what the tower returns);
#   ("reduction", local device, the totals on it).
# For a model in stages, with trees by stage:
#   ("forward program", tower, what the tower sends);
#   ("backward program", tower, what the tower returns);
#   ("reduction", replica, the totals on it).
Tap = Callable[[str, int, Any], None]

_tap: ContextVar[Tap | None] = ContextVar("tap", default=None)


def current_tap() -> Tap | None:
    """The tap of the enclosing `tapped` block; None outside of one."""
    return _tap.get()


@contextmanager
def tapped(tap: Tap) -> Generator[None]:
    """Calls `tap` with what passes from stage to stage, to find where two runs begin to differ.

    `tap` must copy what it keeps, because the next program overwrites it. It makes steps slow.
    """
    token = _tap.set(tap)
    try:
        yield
    finally:
        _tap.reset(token)


class Finished(NamedTuple):
    """What a job returns.

    Attributes:
        results: what `finish` returns, once per local device; empty if there are no sums.
        rows: the rows that each local tower returned, by tower, on the tower's device.
        blocks: for each local tower its row of the total of every block, on the tower's device.
        programs: the programs that made all of this.
    """

    results: list[Any]
    rows: dict[int, Any]
    blocks: dict[int, list[jax.Array]]
    programs: "JobPrograms"


class _Numbers(NamedTuple):
    """Numbers that programs take as arguments, on their devices.

    Attributes:
        here: for each local tower its `Tower`, by its number.
        scales: for each local device the factor that turns sums into means, shape ().
    """

    here: dict[int, Tower]
    scales: list[jax.Array]


@dataclass(eq=False)
class JobPrograms:
    """Executables, one per local device each.

    Attributes:
        tower: the tower program, or its rounds if towers meet.
        add: adds two towers' sums; empty if nothing is added on a device.
        finish: the finish program; empty if there are no sums.
        meets: where towers meet, for messages; None if they do not.
        numbers: the numbers that these programs take, by the rows of a batch.
    """

    tower: list[Compiled] | Exchanges
    add: list[Compiled]
    finish: list[Compiled]
    meets: str | None
    numbers: dict[int, _Numbers] = field(default_factory=dict)


class SameBits:
    """Runs one job on one placement; compiles once for all arguments of the same shapes."""

    def __init__(self, job: Job, placement: Placement) -> None:
        self._job = job
        self._placement = placement
        self._totals = Totals(placement)
        self._compiled: dict[Any, JobPrograms] = {}
        self._after: dict[Any, JobPrograms] = {}
        self._whole_numbers = WholeNumbers()

    def run(
        self,
        replicas: Sequence[Shared],
        rows: Sequence[TowerRows],
        made_by: JobPrograms | None = None,
    ) -> Finished:
        """Runs the job; nothing here waits for a device.

        Args:
            replicas: what every tower gets, once per local device, on that device; the `state`
                in it is overwritten.
            rows: the split arrays, cut into the towers of this placement.
            made_by: the programs that have made this state, if they are known: what they make has
                the same shapes every time, so that these need not be compared again.

        Returns:
            The results, on their devices.
        """
        programs = self._programs(replicas[0], rows, made_by)
        numbers = self._numbers(programs, rows[0])
        tap = current_tap()
        returned: dict[int, Any] = {}
        run = self._tower_program(programs, replicas, rows, numbers.here, tap)

        def tower(turn: TowerTurn) -> TowerSums:
            sums, returned[turn.tower] = run(turn)
            if tap is not None:
                tap("tower program", turn.tower, sums)
            return sums

        totals = self._totals.run(tower, programs.add)
        if not totals:
            return Finished([], returned, {}, programs)
        if tap is not None:
            for i, total in enumerate(totals):
                tap("reduction", i, total)
        finished = [
            finish(replicas[i].state, totals[i].packed, numbers.scales[i])
            for i, finish in enumerate(programs.finish)
        ]
        blocks = {tower: rows for total in totals for tower, rows in total.blocks.items()}
        return Finished(finished, returned, blocks, programs)

    def _tower_program(
        self,
        programs: JobPrograms,
        replicas: Sequence[Shared],
        rows: Sequence[TowerRows],
        here: dict[int, Tower],
        tap: Any,
    ) -> Callable[[TowerTurn], tuple[TowerSums, Any]]:
        """Returns what runs the tower whose turn it is.

        If towers meet, this runs all rounds but the last one, and returns what runs the last one.

        Raises:
            OutputError: towers meet, and the rows do not fill them evenly.
        """

        def arguments(turn: TowerTurn) -> tuple[Shared, list[Any], Tower]:
            tower = turn.tower
            return replicas[turn.i], [leaf.pieces[tower] for leaf in rows], here[tower]

        tower = programs.tower
        if isinstance(tower, list):
            return lambda turn: tower[turn.i](*arguments(turn))
        refuse_filled(programs.meets, rows[0].num_rows, rows[0].tower_rows, self._placement)

        def see(n: int, number: int, sent: Any) -> None:
            if tap is not None:
                tap("exchange", number, TowerSums(pack(((), {f"round {n}": sent})), []))

        return tower.run(arguments, see if tap else None)

    def _numbers(self, programs: JobPrograms, rows: TowerRows) -> _Numbers:
        """The number arguments of the programs for rows like these; copied to the devices once."""
        if rows.num_rows not in programs.numbers:
            devices, of_tower = self._totals.devices, self._whole_numbers.of_tower
            here = {
                turn.tower: of_tower(devices[turn.i], rows, turn.tower)
                for turn in self._totals.turns
            }
            scales = [jax.device_put(scale_of(rows), device) for device in devices]
            programs.numbers[rows.num_rows] = _Numbers(here, scales)
        return programs.numbers[rows.num_rows]

    def _programs(
        self, shared: Shared, rows: Sequence[TowerRows], made_by: JobPrograms | None
    ) -> JobPrograms:
        pieces = [leaf.piece for leaf in rows]
        if made_by is None:
            return self._programs_for(shared, pieces)
        key = (made_by, signature((shared.rest, pieces)))
        if key not in self._after:
            self._after[key] = self._programs_for(shared, pieces)
        return self._after[key]

    def _programs_for(self, shared: Shared, pieces: list[jax.Array]) -> JobPrograms:
        key = signature((shared, pieces))
        if key not in self._compiled:
            self._compiled[key] = self._compile(shared, pieces)
        return self._compiled[key]

    def _compile(self, shared: Shared, pieces: list[jax.Array]) -> JobPrograms:
        devices = self._totals.devices
        arguments = (shared, pieces, Tower.shapes())
        traced = trace(tower_function(self._job), arguments, self._placement.num_towers)
        refuse_kept_values(traced.program)
        rounds = traced.rounds(final=True)
        if rounds is None:
            towers = compile_for_each(traced.tower, arguments, devices)
            sums: TowerSums = towers[0].out_info[0]
        else:
            towers = Exchanges(rounds, jax.tree.leaves(arguments), self._placement, self._totals)
            sums = towers.out_info[0]
        if not sums.packed.buffers:
            return JobPrograms(towers, [], [], traced.meets)
        adds = self._totals.compile(sums)
        given = (shared.state, sums.packed, scale_shape())
        finishes = compile_for_each(finish_function(self._job), given, devices, donate=(0,))
        return JobPrograms(towers, adds, finishes, traced.meets)


def tower_function(job: Job) -> Callable[[Shared, list[Any], Tower], tuple[TowerSums, Any]]:
    """The function of a tower's program: returns what is added up over towers, and the rows."""

    def tower(shared: Shared, rows: list[Any], here: Tower) -> tuple[TowerSums, Any]:
        result = job.tower(shared, rows, here)
        return TowerSums(pack((result.means, result.sums)), list(result.blocks)), result.rows

    return tower


def finish_function(job: Job) -> Callable[[Any, Packed, Any], Any]:
    """The function of the finish program, of the state, the totals and the scale."""

    def finish(state: Any, totals: Packed, scale: Any) -> Any:
        of_means, _ = totals.layout.treedef.children()
        means, sums = jax.tree.map(with_one_nan, unpack(totals, scale, of_means.num_leaves))
        return job.finish(state, means, sums)

    return finish


def scale_of(rows: TowerRows) -> np.float64:
    """The scale, the factor that turns sums over the towers of these rows into means."""
    return _SCALE(rows.tower_rows / rows.num_rows)


def scale_shape() -> jax.ShapeDtypeStruct:
    """Shape and dtype that the scale has on a device."""
    return jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(_SCALE))
