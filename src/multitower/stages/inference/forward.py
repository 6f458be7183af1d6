"""Forward alone: the program of one tower in stages, and all towers through them.

Single-device programs, and between them nothing but moves: so the bits are the same on any layout.
Nothing here waits for a device.
"""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from multitower.engines.equal_programs import EqualPrograms
from multitower.engines.segments import Program, Segment, cut
from multitower.stages.chain import avals_of, shapes_of
from multitower.stages.cutting import cut_program
from multitower.stages.inference.placed import Placed
from multitower.stages.layout import Layout
from multitower.stages.order import forward_alone
from multitower.stages.pieces import Pieces, split_params
from multitower.towers.split import TowerRows


class ForwardChain(NamedTuple):
    """A tower's program in stages.

    Attributes:
        stages: in their order; the outputs of each are what others need of it.
        avals: shape and dtype of every number.
        inputs: numbers of the program's arguments.
        num_params: how many of these are whole in every tower; they come first.
        pieces: for each of these that stages only take some rows of, these by stage.
        results: for each result of the tower its stage, and its place among the stage's outputs.
    """

    stages: tuple[Segment, ...]
    avals: Mapping[int, Any]
    inputs: tuple[int, ...]
    num_params: int
    pieces: Pieces
    results: tuple[tuple[int, int], ...]


def make_forward_chain(closed: Any, num_params: int, num_stages: int) -> ForwardChain:
    """Cuts a tower's program.

    Args:
        closed: of `jax.make_jaxpr`; what is whole in every tower comes first.
        num_params: how many arguments that are.
        num_stages: how many stages.

    Raises:
        ArgumentError: it cannot be cut into so many stages.
    """
    found = cut_program(closed, num_stages)
    program, places, pieces = split_params(found.program, found.places, num_params)
    stages = cut(program, places, num_stages)
    made = {x: (s, n) for s, stage in enumerate(stages) for n, x in enumerate(stage.outputs)}
    results: list[tuple[int, int]] = []
    for x in program.outputs:
        if not isinstance(x, int) or x not in made:  # an argument, or a constant
            results.append((num_stages - 1, len(stages[-1].outputs)))
            stages[-1] = _handing_on(stages[-1], x, program)
        else:
            results.append(made[x])
    avals = avals_of(program, closed, pieces)
    inputs = tuple(program.inputs)
    return ForwardChain(tuple(stages), avals, inputs, num_params, pieces, tuple(results))


def _handing_on(stage: Segment, x: Any, program: Program) -> Segment:
    """A stage that has one result more, which nobody computes."""
    inputs, consts = stage.inputs, dict(stage.consts)
    if isinstance(x, int) and x in program.consts:
        consts[x] = program.consts[x]
    elif isinstance(x, int):
        inputs = tuple(sorted({*inputs, x}))
    return replace(stage, inputs=inputs, outputs=(*stage.outputs, x), consts=consts)


class Forward:
    """Runs a chain on a layout; compiles its programs once.

    Args:
        chain: of a program whose last three arguments are what a tower knows of itself.
        layout: stages on devices.
        placed: what lies on devices already.
    """

    def __init__(self, chain: ForwardChain, layout: Layout, placed: Placed) -> None:
        self.chain = chain
        self.layout = layout
        self.placed = placed
        equal = EqualPrograms()
        self.programs = [
            equal.compile_for_each(
                stage.__call__, (shapes_of(chain.avals, stage.inputs),), layout.devices_of(s)
            )
            for s, stage in enumerate(chain.stages)
        ]
        self.users = {
            x: [s for s, stage in enumerate(chain.stages) if x in stage.inputs]
            for stage in chain.stages
            for x in stage.outputs
            if isinstance(x, int)
        }

    def run(self, params: Sequence[Any], rows: Sequence[TowerRows]) -> dict[int, list[jax.Array]]:
        """Runs all towers.

        Args:
            params: the first arguments of the program, anywhere.
            rows: the arguments after these.

        Returns:
            For each tower of this process its results, on the device of its last stage.
        """
        towers_on = self.layout.towers_on
        walks = [_Walk(self, r, params, rows) for r in range(len(towers_on))]
        orders = [
            [turn for tick in forward_alone(len(towers), self.layout.num_stages) for turn in tick]
            for towers in towers_on
        ]
        # Side by side over replicas, so that all of them have work from the start.
        for turns in itertools.zip_longest(*orders):
            for r, turn in enumerate(turns):
                if turn is not None:
                    walks[r].take(towers_on[r][turn.tower], turn.stage)
        return {tower: results for walk in walks for tower, results in walk.results.items()}


class _Walk:
    """What one replica holds while its towers pass.

    Attributes:
        results: of the towers.
    """

    def __init__(
        self, forward: Forward, replica: int, params: Sequence[Any], rows: Sequence[TowerRows]
    ) -> None:
        chain, layout = forward.chain, forward.layout
        self._forward = forward
        self._replica = replica
        self._devices = [layout.device(replica, s) for s in range(layout.num_stages)]
        self._whole = [self._params(s, params) for s in range(layout.num_stages)]
        self._rows = dict(zip(chain.inputs[chain.num_params : -3], rows, strict=True))
        self._counts = [rows[0].counts(tower) for tower in range(layout.towers.num_towers)]
        self._arrived: dict[tuple[int, int], dict[int, jax.Array]] = defaultdict(dict)
        self.results: dict[int, list[Any]] = defaultdict(lambda: [None] * len(chain.results))

    def take(self, tower: int, s: int) -> None:
        """Starts one program, and sends what it makes to where it will be needed."""
        chain = self._forward.chain
        known = {**self._whole[s], **self._arrived.pop((tower, s), {})}
        values = [
            known[x] if x in known else self._own(x, tower, s) for x in chain.stages[s].inputs
        ]
        made = self._forward.programs[s][self._replica](values)
        for x, value in zip(chain.stages[s].outputs, made, strict=True):
            for user in self._forward.users[x] if isinstance(x, int) else []:
                self._arrived[tower, user][x] = self._moved(value, s, user)
        for place, (stage, n) in enumerate(chain.results):
            if stage == s:
                self.results[tower][place] = self._moved(made[n], s, -1)

    def _params(self, s: int, params: Sequence[Any]) -> dict[int, jax.Array]:
        """What a stage needs of them, on its device."""
        chain, placed = self._forward.chain, self._forward.placed
        needed = {*chain.stages[s].inputs}
        found: dict[int, jax.Array] = {}
        for i, (leaf, number) in enumerate(zip(params, chain.inputs, strict=False)):
            piece = chain.pieces.get(i, {}).get(s)
            if number in needed:
                found[number] = placed.on(leaf, self._devices[s])
            elif piece is not None:
                rows = (piece.first, piece.last)
                found[piece.number] = placed.on(leaf, self._devices[s], rows)
        return found

    def _own(self, x: int, tower: int, s: int) -> jax.Array:
        """A tower's rows, or what it knows of itself, on the device of a stage."""
        if x in self._rows:
            return self._moved(self._rows[x].pieces[tower], 0, s)
        count = self._counts[tower][self._forward.chain.inputs[-3:].index(x)]
        return self._forward.placed.number(count, self._devices[s])

    def _moved(self, value: Any, source: int, target: int) -> Any:
        """A value of one stage on the device of another; no call of JAX if it is there."""
        source_device, device = self._devices[source], self._devices[target]
        return value if source_device is device else jax.device_put(value, device)
