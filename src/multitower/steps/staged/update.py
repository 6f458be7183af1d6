"""The update of everything, cut into one program for each stage.

The whole update is traced once. A stage's program is those of its equations that the stage's own
leaves need, so it computes what the whole update would. That is possible for optimizers that treat
every parameter alone; what is the same for all, such as a count, is kept once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from multitower.engines.segments import Program, Segment, is_call, open_calls, slice_of
from multitower.errors import ArgumentError
from multitower.steps.parts import StepParts
from multitower.steps.state.fields import Fields
from multitower.steps.update import update

SHARED = -1


@dataclass(frozen=True)
class Homes:
    """Where the leaves of a state live.

    Attributes:
        params: for each leaf of the parameters its stage; likewise of the moving average.
        opt_state: for each leaf of the optimizer's state its stage, or SHARED.
    """

    params: tuple[int, ...]
    opt_state: tuple[int, ...]


class WholeUpdate:
    """The update of all parameters, as a program of leaves.

    Args:
        step: what to do.
        fields: the state, arrays or shapes.
        param_homes: for each leaf of the parameters its stage.
        loss: its shape and dtype.

    Raises:
        ArgumentError: the optimizer lets parameters of several stages meet.
    """

    def __init__(
        self, step: StepParts, fields: Fields, param_homes: Sequence[int], loss: Any
    ) -> None:
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), fields._replace(rng=None)
        )
        flat, _ = jax.tree_util.tree_flatten_with_path(fields.params)
        self._names = [f"params{jax.tree_util.keystr(path)}" for path, _ in flat]
        squares = None
        if step.clip_norm is not None:
            squares = jax.ShapeDtypeStruct((len(flat),), squares_dtype(fields.params))

        def run(params: Any, gradients: Any, opt_state: Any, ema: Any, rest: Any) -> Any:
            before = Fields(rest["step"], params, opt_state, ema, (), None)
            squares = rest.get("squares")
            new = update(step, before, gradients, rest["loss"], (), squares=squares)
            return new.params, new.opt_state, new.ema_params

        rest = {"loss": loss, "step": shapes.step}
        if squares is not None:
            rest["squares"] = squares
        given = (shapes.params, shapes.params, shapes.opt_state, shapes.ema_params, rest)
        closed, results = jax.make_jaxpr(run, return_shape=True)(*given)
        self._program: Program = open_calls(closed, is_call)
        self._inputs = _split(self._program.inputs, given)
        self._outputs = _split(self._program.outputs, results)
        self.homes = Homes(tuple(param_homes), self._opt_homes(param_homes))

    def of_stage(self, stage: int) -> Segment:
        """The update of a stage's leaves, or of those that are SHARED.

        Its outputs are those of `own(stage)`, in the same order.
        """
        params, opt_state, ema = self._outputs
        wanted = [params[i] for i in self.params_of(stage)]
        wanted += [opt_state[i] for i in self.opt_state_of(stage)]
        return slice_of(self._program, [*wanted, *(ema[i] for i in self._ema_of(stage))])

    def named(self, own: tuple[Any, Any, Any], rest: tuple[Any, Any]) -> dict[int, Any]:
        """Values by the numbers that the segments of `of_stage` take them by.

        Args:
            own: a stage's leaves by number: parameters, gradients, and (optimizer state, moving
                average).
            rest: shared leaves of the optimizer's state by number; then loss, step, squares.
        """
        params, gradients, (opt_state, ema) = own
        shared, scalars = rest
        of_params, of_gradients, of_state, of_ema, of_rest = self._inputs
        found = {of_params[i]: leaf for i, leaf in params.items()}
        found.update((of_gradients[i], leaf) for i, leaf in gradients.items())
        found.update((of_state[i], leaf) for i, leaf in {**opt_state, **shared}.items())
        found.update((of_ema[i], leaf) for i, leaf in ema.items())
        names = [name for name in ("loss", "squares", "step") if scalars.get(name) is not None]
        found.update(zip(of_rest, (scalars[name] for name in names), strict=True))
        return found

    def params_of(self, stage: int) -> list[int]:
        """Numbers of a stage's leaves of the parameters."""
        return [i for i, home in enumerate(self.homes.params) if home == stage]

    def opt_state_of(self, stage: int) -> list[int]:
        """Numbers of a stage's leaves of the optimizer's state, or of those that are SHARED."""
        return [i for i, home in enumerate(self.homes.opt_state) if home == stage]

    def _ema_of(self, stage: int) -> list[int]:
        return self.params_of(stage) if self._outputs[2] else []

    def _opt_homes(self, param_homes: Sequence[int]) -> tuple[int, ...]:
        params, gradients, opt_state, ema, _ = self._inputs
        known = {
            number: home
            for group in (params, gradients, ema)
            for number, home in zip(group, param_homes, strict=False)
        }
        needs = _needs(self._program)
        new_params, new_state, new_ema = self._outputs
        changed = True
        while changed:
            changed = False
            for i, number in enumerate(opt_state):
                found = self._stages(needs, new_state[i], known) - {SHARED}
                if number not in known and found:
                    self._refuse_several(found, f"its state (leaf {i})")
                    known[number] = found.pop()
                    changed = True
        for outputs in (new_params, new_ema):
            for name, x, home in zip(self._names, outputs, param_homes, strict=False):
                self._refuse_several(
                    self._stages(needs, x, known) | {home}, f"the update of {name}"
                )
        for i, (number, x) in enumerate(zip(opt_state, new_state, strict=True)):
            home = known.get(number, SHARED)
            self._refuse_several(self._stages(needs, x, known) | {home}, f"its state (leaf {i})")
        return tuple(known.get(number, SHARED) for number in opt_state)

    def _stages(
        self, needs: Mapping[int, frozenset[int]], x: Any, known: Mapping[int, int]
    ) -> set[int]:
        """The stages whose leaves a value depends on."""
        inputs = needs[x] if isinstance(x, int) else frozenset[int]()
        return {known[number] for number in inputs if number in known}

    def _refuse_several(self, stages: set[int], what: str) -> None:
        if len(stages - {SHARED}) > 1:
            raise ArgumentError(
                f"stages= needs an optimizer that treats every parameter alone, and {what} depends "
                f"on parameters of stages {sorted(stages - {SHARED})}. Norms over all parameters "
                "(clip_by_global_norm) and decisions over all gradients (apply_if_finite, "
                "MultiSteps) do: leave stages= out, or take them out of the optimizer. To clip by "
                "the global norm write train_step(clip_norm=...); to skip bad steps, "
                "skip_nonfinite=True; to accumulate gradients, use more towers."
            )


def squares_dtype(params: Any) -> Any:
    """The dtype in which sums of squares are kept."""
    dtype = jnp.dtype(jnp.float32)
    for leaf in jax.tree.leaves(params):
        dtype = jnp.promote_types(dtype, jnp.finfo(leaf.dtype).dtype)
    return dtype


def _needs(program: Program) -> dict[int, frozenset[int]]:
    """For each number the inputs that it depends on."""
    needs = {number: frozenset({number}) for number in program.inputs}
    needs.update((number, frozenset()) for number in program.consts)
    for step in program.steps:
        inputs = (needs[x] for x in step.inputs if isinstance(x, int))
        found = frozenset[int]().union(*inputs)
        needs.update((number, found) for number in step.outputs)
    return needs


def _split(numbers: Sequence[Any], trees: Sequence[Any]) -> list[list[Any]]:
    """The numbers of the leaves of each of some trees."""
    left = iter(numbers)
    return [[next(left) for _ in jax.tree.leaves(tree)] for tree in trees]
