"""A first state of a model in stages: arrays are made when it is known where they will live."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from multitower.engines.equal_programs import EqualPrograms
from multitower.engines.segments import is_call, open_calls, slice_of
from multitower.hardware.devices import host_device
from multitower.stages.layout import Layout
from multitower.steps.optimizing.update import begin
from multitower.steps.parts import StepParts
from multitower.steps.staged.state import Block, Head, StagedParts, Trees, copied
from multitower.steps.staged.update import SHARED, Homes
from multitower.steps.state.fields import Fields, shapes_of
from multitower.steps.state.kept import KeptState
from multitower.steps.unmade import Unmade
from multitower.towers.leaves import device_dtype, is_key


class First(NamedTuple):
    """A first state, before its parameters are on their devices.

    Attributes:
        step: what the step is made of, with the optimizer.
        fields: the state without optimizer state and average. Parameters are in the host's
            memory, or `Unmade`.
    """

    step: StepParts
    fields: Fields

    @classmethod
    def state(cls, step: StepParts, fields: Fields, maker: object) -> KeptState:
        """A training state of this kind; the user's arrays are copied to the host's memory."""
        first = cls(step, jax.tree.map(_on_host, fields))
        apart = ["opt_state", "ema_params"]
        seen = first.fields
        if any(isinstance(leaf, Unmade) for leaf in jax.tree.leaves(seen.params)):
            apart.append("params")
            seen = seen._replace(params=None)
        return KeptState.of_parts(
            first, lambda own: own.whole(), maker, join_shared=lambda _: seen, apart=apart
        )

    def whole(self) -> Fields:
        """The whole state in the host's memory, for a user who reads it; keys are not moved."""
        host = host_device()
        with jax.default_device(host):
            params = jax.tree.map(lambda leaf: _made(leaf, host), self.fields.params)
            opt_state, ema = self.begin(params)
        fields = self.fields._replace(params=params, opt_state=opt_state, ema_params=ema)
        return jax.tree.map(_on_host, fields)

    def shapes(self) -> Fields:
        """Shapes and dtypes of the whole state."""
        fields = shapes_of(self.fields)
        opt_state, ema = jax.eval_shape(self.begin, fields.params)
        return fields._replace(opt_state=opt_state, ema_params=ema)

    def on_devices(self, homes: Homes, layout: Layout) -> StagedParts:
        """The parts of the state, each made on its device."""
        params = self._params(homes, layout)
        begin = _Beginning(self, homes, layout)
        blocks = [
            [Block(own, *begin.of(r, stage, own)) for stage, own in enumerate(replica)]
            for r, replica in enumerate(params)
        ]
        shared, _ = begin.of(0, SHARED, {})
        rest = (self.fields.step, self.fields.model_state, self.fields.rng)
        count, model_state, rng = jax.tree.map(lambda leaf: copied(leaf, layout.head), rest)
        head = Head(count, model_state, rng, shared)
        return StagedParts(
            blocks, head, homes, Trees.of(self.shapes()), layout.towers.spans_processes
        )

    def begin(self, params: Any) -> tuple[Any, Any]:
        """The first optimizer state and moving average."""
        return begin(self.step, params)

    def _params(self, homes: Homes, layout: Layout) -> list[list[dict[int, Any]]]:
        """The parameters by number, for each replica and stage; made one by one."""
        replicas = range(len(layout.replicas))
        found: list[list[dict[int, Any]]] = [
            [{} for _ in range(layout.num_stages)] for _ in replicas
        ]
        leaves = jax.tree.leaves(self.fields.params)
        for i, (leaf, home) in enumerate(zip(leaves, homes.params, strict=True)):
            if i not in homes.rows:
                own = found[0][home][i] = _made(leaf, layout.device(0, home))
                for r in replicas[1:]:
                    found[r][home][i] = jax.device_put(own, layout.device(r, home))
                continue
            # Each stage keeps some of the stacked layers, cut on the host from all of them.
            whole = leaf.made(host_device()) if isinstance(leaf, Unmade) else leaf
            for stage, (first, last) in homes.rows[i].items():
                for r in replicas:
                    found[r][stage][i] = copied(whole[first:last], layout.device(r, stage))
        return found


class _Beginning:
    """Programs that compute the leaves of `First.begin` that a stage keeps.

    Args:
        first: the first state.
        homes: where its leaves will live.
        layout: stages on devices.
    """

    def __init__(self, first: First, homes: Homes, layout: Layout) -> None:
        self._first = first
        self._homes = homes
        self._layout = layout
        self._equal = EqualPrograms()
        self._compiled: dict[int, tuple[list[int], list[Any]]] = {}

    def of(self, r: int, stage: int, own: dict[int, Any]) -> tuple[dict[int, Any], dict[int, Any]]:
        """A stage's leaves of the optimizer's state and of the average, or those that are SHARED.

        Args:
            r: the replica.
            stage: the stage.
            own: the stage's parameters by number.
        """
        if stage not in self._compiled:
            self._compiled[stage] = self._compile(stage, own)
        needed, programs = self._compiled[stage]
        device = self._device(r, stage)
        leaves = jax.tree.leaves(self._first.fields.params)
        given = [own[i] if i in own else _made(leaves[i], device) for i in needed]
        return programs[r](given)

    def _compile(self, stage: int, own: dict[int, Any]) -> tuple[list[int], list[Any]]:
        """The numbers of the parameters that are needed, and the programs of all replicas."""
        params, treedef = jax.tree.flatten(shapes_of(self._first.fields.params))
        for i, leaf in own.items():  # a piece, if the leaf is split
            params[i] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        make = jax.make_jaxpr(self._first.begin, return_shape=True)
        closed, shapes = make(treedef.unflatten(params))
        program = open_calls(closed, is_call)
        first = len(jax.tree.leaves(shapes[0]))  # the first leaf of the average
        of_state = self._homes.opt_state_of(stage)
        of_ema = [i for i in sorted(own) if first + i < len(program.outputs)]
        places = [*of_state, *(first + i for i in of_ema)]
        segment = slice_of(program, [program.outputs[place] for place in places])
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(shapes)]
        needed = [i for i, x in enumerate(program.inputs) if x in segment.inputs]

        def run(values: list[Any]) -> tuple[dict[int, Any], dict[int, Any]]:
            found = [
                jnp.array(x, dtype=dtypes[place], copy=True)  # of a strong type
                for x, place in zip(segment(values), places, strict=True)
            ]
            state = dict(zip(of_state, found, strict=False))
            return state, dict(zip(of_ema, found[len(of_state) :], strict=True))

        devices = [self._device(r, stage) for r in range(len(self._layout.replicas))]
        given = ([params[i] for i in needed],)
        return needed, self._equal.compile_for_each(run, given, devices)

    def _device(self, r: int, stage: int) -> jax.Device:
        return self._layout.head if stage == SHARED else self._layout.device(r, stage)


def _made(leaf: Any, device: jax.Device) -> jax.Array:
    """A new array on a device: a leaf made there, or a copy of one."""
    return leaf.made(device) if isinstance(leaf, Unmade) else copied(leaf, device)


def _on_host(leaf: Any) -> Any:
    if is_key(leaf) or isinstance(leaf, Unmade):
        return leaf
    leaf = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
    copy = np.array(leaf, dtype=device_dtype(leaf))
    copy.flags.writeable = False  # what a user wrote into it would be lost
    return copy
