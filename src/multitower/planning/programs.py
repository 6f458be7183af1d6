"""Programs: those of a step, compiled from shapes, and the memory that the compiler reports.

They are the programs that the step itself would compile, and none of them is run.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from multitower.engines.executable import compile_for_each
from multitower.engines.held import HeldArrays
from multitower.engines.job import Shared
from multitower.engines.packing import SMALL, Packed, pack, unpack
from multitower.engines.same_bits import finish_function, scale_shape, tower_function
from multitower.engines.tracing import Traced, trace
from multitower.errors import MultitowerError
from multitower.hardware.devices import devices as find_devices
from multitower.planning.shapes import Planned, num_bytes
from multitower.steps.job import make_job, make_weights_job
from multitower.steps.parts import Batches, ShardOptions
from multitower.steps.runner import FastRunner
from multitower.steps.shards.runner import ShardsRunner
from multitower.steps.shards.state import StateShards
from multitower.steps.state.bundles import bundled, bundled_job
from multitower.towers.leaves import row_shapes
from multitower.towers.placement import Placement, contiguous
from multitower.towers.rows import Tower

_T = TypeVar("_T")


class TowerProgram(NamedTuple):
    """The program of one tower.

    Attributes:
        buffers: bytes of each buffer that is summed over towers, in a step with `towers=`.
        reduced: the same for a step without `towers=`.
        temporary: temporary bytes that it needs while it runs.
        meets: names the place where towers exchange values; such a program is not compiled. None
            if they do not.
    """

    buffers: tuple[int, ...]
    reduced: tuple[int, ...]
    temporary: int
    meets: str | None


class ShardsProgram(NamedTuple):
    """The program of a step without `towers=` whose state is split over the devices.

    Attributes:
        working: bytes that it needs beside the state and the rows.
        num_devices: the number of devices for which it was compiled.
    """

    working: int
    num_devices: int


class Programs:
    """Compiles the programs of a step, each once.

    Args:
        given: the step, the state and the batch.
    """

    def __init__(self, given: Planned) -> None:
        self._given = given
        self.local = find_devices()
        self._towers: dict[int, TowerProgram] = {}
        self._shards: dict[tuple[int, int, bool], ShardsProgram] = {}
        self._others: dict[Any, Any] = {}

    def once(self, key: Any, compile_it: Callable[[], _T]) -> _T:
        """The result of `compile_it`, which is called once for each key."""
        if key not in self._others:
            self._others[key] = compile_it()
        return self._others[key]

    def tower(self, tower_rows: int, num_towers: int) -> TowerProgram:
        """The program of a tower with `tower_rows` rows, the same for any number of towers."""
        if tower_rows not in self._towers:
            self._towers[tower_rows] = self._compile_tower(tower_rows, num_towers)
        return self._towers[tower_rows]

    @functools.cached_property
    def sums(self) -> Packed:
        """Shapes of the packed sums that a tower returns."""
        return self._of_all_rows.shapes[0].packed

    @functools.cached_property
    def held(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the large arrays that the loss closes over; every device has them."""
        return HeldArrays(self._of_all_rows.program).shapes

    def why_it_fails_with(self, tower_rows: int) -> str | None:
        """What the loss says of so few rows, if it works with all rows of the batch; else None."""
        try:
            self._traced(tower_rows)
        except MultitowerError:
            raise
        except Exception as error:
            self._of_all_rows  # noqa: B018 (raises what a user must mend)
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        return None

    @functools.cached_property
    def _of_all_rows(self) -> Traced:
        """The program of a tower with all rows: a loss may need more than one."""
        return self._traced(self._given.batch.num_rows)

    def _traced(self, tower_rows: int) -> Traced:
        step, _, batch, _ = self._given
        job = make_job(step, batch.split, tower_rows, 1)
        return trace(tower_function(job), self._arguments(tower_rows), 1)

    @functools.cached_property
    def update(self) -> int:
        """Bytes that the update needs beside the state and the sums."""
        step, fields, batch, _ = self._given
        job = bundled_job(make_job(step, batch.split, 1, 1))
        (state,) = jax.eval_shape(bundled, [fields])
        given = (state, self.sums, scale_shape())
        (compiled,) = compile_for_each(finish_function(job), given, self.local[:1], donate=(0,))
        return working_bytes(compiled)

    def fast(self, tower_rows: int, *, several: bool) -> int:
        """Bytes that a step without `towers=` needs beside the state and the rows.

        Args:
            tower_rows: rows of each device.
            several: whether it is for several devices.
        """
        compile_it = lambda: self._compile_fast(tower_rows, several)
        return self.once(("fast", tower_rows, several), compile_it)

    def shards(self, tower_rows: int, num_devices: int, *, params: bool) -> ShardsProgram:
        """The program of a step without `towers=` whose state is split over the devices.

        It is compiled for `num_devices`, or for the devices of this process if these are fewer. A
        program for fewer devices is taken if there is one already, so that other devices take no
        compilation. With fewer devices it is an estimate, and the plan says so.

        Args:
            tower_rows: rows of each device.
            num_devices: the planned number of devices.
            params: whether the parameters are split, too.
        """
        most = min(num_devices, len(self.local))
        for count in range(most, 0, -1):
            if (found := self._shards.get((tower_rows, count, params))) is not None:
                return found
        found = self._shards[tower_rows, most, params] = self._compile_shards(
            tower_rows, most, params=params
        )
        return found

    @property
    def largest_buffer(self) -> int:
        """Bytes of the largest buffer that is summed over towers."""
        return max((size for one in self._towers.values() for size in one.buffers), default=0)

    @functools.cached_property
    def weights(self) -> list[Any]:
        """Shapes of the weights that are summed first if the loss is a ratio; else empty."""
        step, fields, batch, _ = self._given
        job = make_weights_job(step, batch.split, batch.num_rows)
        rows = row_shapes(batch.rows, batch.num_rows)
        given = (Shared((), (fields, batch.shared)), rows, Tower.shapes())
        return list(trace(job.tower, given, 1).shapes.sums)

    def _arguments(self, tower_rows: int) -> tuple[Shared, list[Any], Tower]:
        _, fields, batch, _ = self._given
        shared = Shared(fields, [*batch.shared, *self.weights])
        return shared, row_shapes(batch.rows, tower_rows), Tower.shapes()

    def _compile_tower(self, tower_rows: int, num_towers: int) -> TowerProgram:
        step, _, batch, _ = self._given
        job = make_job(step, batch.split, tower_rows, num_towers)
        arguments = self._arguments(tower_rows)
        traced = trace(tower_function(job), arguments, num_towers)
        sums, _ = traced.shapes
        result = jax.eval_shape(unpack, sums.packed)
        buffers = tuple(map(num_bytes, sums.packed.buffers))
        reduced = _reduced(jax.tree.leaves(result))
        if traced.meets is not None:
            return TowerProgram(buffers, reduced, 0, traced.meets)
        (compiled,) = compile_for_each(traced.tower, arguments, self.local[:1])
        return TowerProgram(buffers, reduced, compiled.memory_analysis().temp_size_in_bytes, None)

    def _compile_fast(self, tower_rows: int, several: bool) -> int:
        """Compiles for two devices if `several`, since the exchange takes memory, too."""
        step, fields, _, _ = self._given
        devices = self.local[: 2 if several else 1]
        placement = contiguous(devices, len(devices))
        runner = FastRunner(step, self._batches(tower_rows), placement)
        given = (_on(placement.shared, fields), *self._fed(placement, tower_rows))
        return working_bytes(runner.program.lower(*given).compile())

    def _compile_shards(self, tower_rows: int, count: int, *, params: bool) -> ShardsProgram:
        step, fields, _, _ = self._given
        placement = contiguous(self.local[:count], count)
        shards = StateShards(ShardOptions(params), placement)
        runner = ShardsRunner(step, self._batches(tower_rows), shards)
        state = jax.tree.map(lambda x, there: _on(there, x), fields, shards.shardings(fields))
        lowered = runner.program(fields).lower(state, *self._fed(placement, tower_rows))
        return ShardsProgram(working_bytes(lowered.compile()), count)

    def _batches(self, tower_rows: int) -> Batches:
        return Batches(self._given.batch, tower_rows, bool(self.weights), must_be_full=False)

    def _fed(self, placement: Placement, tower_rows: int) -> tuple[Any, Any, Any]:
        """The arguments of a step without `towers=` after the state, as shapes on devices."""
        batch = self._given.batch
        rows = row_shapes(batch.rows, tower_rows * placement.num_towers)
        count = jax.ShapeDtypeStruct((), np.int32)
        shared = placement.shared
        return _on(shared, batch.shared), _on(placement.split, rows), _on(shared, count)


def _on(sharding: Any, tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def _reduced(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Bytes of each buffer that `spmd` sums: large leaves by themselves, small ones packed."""
    large = [num_bytes(leaf) for leaf in leaves if leaf.size > SMALL]
    small = jax.eval_shape(pack, [leaf for leaf in leaves if leaf.size <= SMALL])
    return (*large, *map(num_bytes, small.buffers))


def working_bytes(compiled: Any) -> int:
    """Bytes that a program needs beside its arguments: temporaries, and results not aliased."""
    found = compiled.memory_analysis()
    return found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
