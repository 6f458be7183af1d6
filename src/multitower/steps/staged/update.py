"""The update of everything, cut into one program for each stage.

The whole update is traced once. A stage's program consists of the equations that the new values of
the stage's own leaves depend on, so it computes what the whole update would. That is possible for
optimizers that treat every parameter alone. State that is the same for all parameters, such as a
count, is kept once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from multitower.engines.segments import (
    Program,
    Segment,
    is_call,
    needs_of,
    numbers_in,
    open_calls,
    slice_of,
)
from multitower.errors import ArgumentError
from multitower.stages.chain import SPLIT
from multitower.steps.optimizing.clipping import leaf_squares
from multitower.steps.optimizing.update import update
from multitower.steps.parts import StepParts
from multitower.steps.state.fields import Fields, shapes_of

if TYPE_CHECKING:
    import optax

SHARED = -1


# By number of the leaf, then by stage: the rows `first:last` of a leaf that is kept in pieces.
Rows = Mapping[int, Mapping[int, tuple[int, int]]]


@dataclass(frozen=True)
class Homes:
    """The stage that keeps each leaf of a state.

    Attributes:
        params: for each leaf of the parameters its stage, or SPLIT; likewise of the average.
        opt_state: for each leaf of the optimizer's state its stage, or SHARED, or SPLIT.
        rows: the pieces of the parameters that are SPLIT.
        rows_of_state: the pieces of the leaves of the optimizer's state that are SPLIT.
    """

    params: tuple[int, ...]
    opt_state: tuple[int, ...]
    rows: Rows
    rows_of_state: Rows

    def params_of(self, stage: int) -> list[int]:
        """The numbers of the parameters of which a stage keeps all or a piece."""
        return _of_stage(self.params, self.rows, stage)

    def opt_state_of(self, stage: int) -> list[int]:
        """The same for the optimizer's state; with `stage=SHARED` the leaves that are SHARED."""
        return _of_stage(self.opt_state, self.rows_of_state, stage)


def _of_stage(homes: Sequence[int], rows: Rows, stage: int) -> list[int]:
    return [i for i, home in enumerate(homes) if home == stage or stage in rows.get(i, {})]


ParamHomes = tuple[Sequence[int], Rows]


class _Traced(NamedTuple):
    """An update as a program, and the numbers of its inputs and outputs, one list per tree."""

    program: Program
    inputs: list[list[Any]]
    outputs: list[list[Any]]


def _trace(step: StepParts, shapes: Fields, loss: Any) -> _Traced:
    rest = {"loss": loss, "step": shapes.step}
    if step.clip_norm is not None:
        rest["squares"] = jax.eval_shape(leaf_squares, shapes.params)

    def run(params: Any, gradients: Any, opt_state: Any, ema: Any, rest: Any) -> Any:
        before = Fields(rest["step"], params, opt_state, ema, (), None)
        new = update(step, before, gradients, rest["loss"], (), squares=rest.get("squares"))
        return new.params, new.opt_state, new.ema_params

    given = (shapes.params, shapes.params, shapes.opt_state, shapes.ema_params, rest)
    closed, results = jax.make_jaxpr(run, return_shape=True)(*given)
    program = open_calls(closed, is_call)
    return _Traced(program, _split(program.inputs, given), _split(program.outputs, results))


class WholeUpdate:
    """The update of all parameters, as a program of leaves.

    Args:
        step: what the step is made of.
        fields: the state, arrays or shapes.
        homes: the stage of each parameter, or SPLIT, and the pieces of those that are split.
        loss: the shape and dtype of the loss.

    Raises:
        ArgumentError: the optimizer computes an update from parameters of several stages.
    """

    def __init__(self, step: StepParts, fields: Fields, homes: ParamHomes, loss: Any) -> None:
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), fields._replace(rng=None)
        )
        flat, _ = jax.tree_util.tree_flatten_with_path(fields.params)
        self._names = [f"params{jax.tree_util.keystr(path)}" for path, _ in flat]
        self._whole = _trace(step, shapes, loss)
        params, rows = homes
        # Leaves that are split in the same way count as a stage of their own, numbered -3, -4, ...
        self._ways = list({tuple(own.items()): own for own in rows.values()}.values())
        apart = [
            -3 - self._ways.index(rows[i]) if home == SPLIT else home
            for i, home in enumerate(params)
        ]
        found = self._opt_homes(apart, self._split_state(step, shapes, apart))
        of_state = {j: self._ways[-3 - home] for j, home in enumerate(found) if home <= -3}
        opt_homes = tuple(SPLIT if home <= -3 else home for home in found)
        self.homes = Homes(tuple(params), opt_homes, rows, of_state)
        self._of_pieces = {
            stage: _trace(step, self._shapes_in(stage, shapes), loss)
            for stage in {stage for own in rows.values() for stage in own}
        }

    def of_stage(self, stage: int) -> Segment:
        """The update of a stage's leaves, or of those that are SHARED.

        Its outputs are the new parameters, optimizer state and moving average of the stage, in this
        order.
        """
        program, _, (params, opt_state, ema) = self._traced(stage)
        of_params = self.homes.params_of(stage)
        wanted = [params[i] for i in of_params]
        wanted += [opt_state[i] for i in self.homes.opt_state_of(stage)]
        return slice_of(program, [*wanted, *(ema[i] for i in of_params if ema)])

    def named(self, stage: int, own: tuple[Any, Any, Any], rest: tuple[Any, Any]) -> dict[int, Any]:
        """Values by the numbers that the segment of `of_stage` knows them by.

        Args:
            stage: the stage, or SHARED.
            own: its leaves by number: parameters, gradients, and (optimizer state, average).
            rest: the SHARED leaves of the optimizer's state by number; and a dict with `"loss"`,
                `"step"` and, for clipping, `"squares"`.
        """
        params, gradients, (opt_state, ema) = own
        shared, scalars = rest
        of_params, of_gradients, of_state, of_ema, of_rest = self._traced(stage).inputs
        found = {of_params[i]: leaf for i, leaf in params.items()}
        found.update((of_gradients[i], leaf) for i, leaf in gradients.items())
        found.update((of_state[i], leaf) for i, leaf in {**opt_state, **shared}.items())
        found.update((of_ema[i], leaf) for i, leaf in ema.items())
        names = [name for name in ("loss", "squares", "step") if scalars.get(name) is not None]
        found.update(zip(of_rest, (scalars[name] for name in names), strict=True))
        return found

    def _traced(self, stage: int) -> "_Traced":
        return self._of_pieces.get(stage, self._whole)

    def _shapes_in(self, stage: int, shapes: Fields) -> Fields:
        """The shapes of a state in which split leaves are a stage's pieces of them."""
        return shapes._replace(
            params=_pieces_in(stage, shapes.params, self.homes.rows),
            opt_state=_pieces_in(stage, shapes.opt_state, self.homes.rows_of_state),
            ema_params=_pieces_in(stage, shapes.ema_params, self.homes.rows),
        )

    def _split_state(self, step: StepParts, shapes: Fields, apart: Sequence[int]) -> dict[int, int]:
        """The leaves of the optimizer's state that are split like parameters, and their way.

        They are found by calling `init` for a piece of the parameters: these leaves then have fewer
        rows, too.
        """
        found: dict[int, int] = {}
        state = jax.tree.leaves(shapes.opt_state)
        for way, own in enumerate(self._ways):
            stage = next(iter(own))
            rows = {i: own for i, home in enumerate(apart) if home == -3 - way}
            params = _pieces_in(stage, shapes.params, rows)
            for j, part in enumerate(jax.tree.leaves(jax.eval_shape(step.optimizer.init, params))):
                if part.shape != state[j].shape and part.shape == _piece(state[j], own[stage]):
                    found[j] = -3 - way
        return found

    def _opt_homes(
        self, param_homes: Sequence[int], split_state: Mapping[int, int]
    ) -> tuple[int, ...]:
        program, (params, gradients, opt_state, ema, _), results = self._whole
        known = {
            number: home
            for group in (params, gradients, ema)
            for number, home in zip(group, param_homes, strict=False)
        }
        known.update((opt_state[j], home) for j, home in split_state.items())
        needs = needs_of(program)
        new_params, new_state, new_ema = results
        changed = True
        while changed:
            changed = False
            for i, number in enumerate(opt_state):
                if number in known:
                    continue
                found = self._stages(needs, new_state[i], known) - {SHARED}
                if found:
                    self._refuse_several(found, f"its state (leaf {i})")
                    known[number] = found.pop()
                    changed = True
        known.update(self._never_changed(needs, known))
        for outputs in (new_params, new_ema):
            for name, x, home in zip(self._names, outputs, param_homes, strict=False):
                self._refuse_several(
                    self._stages(needs, x, known) | {home}, f"the update of {name}"
                )
        for i, (number, x) in enumerate(zip(opt_state, new_state, strict=True)):
            home = known.get(number, SHARED)
            self._refuse_several(self._stages(needs, x, known) | {home}, f"its state (leaf {i})")
        return tuple(known.get(number, SHARED) for number in opt_state)

    def _never_changed(
        self, needs: Mapping[int, frozenset[int]], known: Mapping[int, int]
    ) -> dict[int, int]:
        """Leaves of the state that no update changes, and the stage that alone uses each.

        An example are the first weights, for an optimizer that pulls parameters back to them.
        """
        program, (_, _, opt_state, _, _), (_, new_state, _) = self._whole
        users: dict[int, set[int]] = {}
        for x in numbers_in(program.outputs):
            stages = self._stages(needs, x, known)
            for number in needs[x]:
                users.setdefault(number, set()).update(stages)
        found: dict[int, int] = {}
        for number, x in zip(opt_state, new_state, strict=True):
            stages = users.get(number, set())
            if number not in known and number == x and len(stages) == 1 and min(stages) >= 0:
                found[number] = stages.pop()
        return found

    def _stages(
        self, needs: Mapping[int, frozenset[int]], x: Any, known: Mapping[int, int]
    ) -> set[int]:
        """The stages whose leaves a value depends on."""
        inputs = needs[x] if isinstance(x, int) else frozenset[int]()
        return {known[number] for number in inputs if number in known}

    def _refuse_several(self, homes: set[int], what: str) -> None:
        if len(homes - {SHARED}) > 1:
            split = {stage for home in homes if home <= -3 for stage in self._ways[-3 - home]}
            stages = sorted({home for home in homes if home >= 0} | split)
            raise ArgumentError(
                f"stages= needs an optimizer that treats every parameter alone, and {what} depends "
                f"on parameters of stages {stages}. Norms over all parameters "
                "(clip_by_global_norm) and decisions over all gradients (apply_if_finite, "
                "MultiSteps) do: leave stages= out, or take them out of the optimizer. To clip by "
                "the global norm write train_step(clip_norm=...); to skip bad steps, "
                "skip_nonfinite=True; to accumulate gradients, use more towers."
            )


def may_be_split(optimizer: "optax.GradientTransformation", params: Any, rows: Rows) -> bool:
    """Whether an optimizer is proved to update pieces of stacked parameters as it does the whole.

    Args:
        optimizer: an optax optimizer.
        params: the parameters, arrays or shapes.
        rows: the pieces of those that would be split.
    """
    from multitower.steps.optimizing.element_wise import is_element_wise  # noqa: PLC0415 (importing stays quick)

    pieces: list[Any] = []
    for stage in sorted({stage for own in rows.values() for stage in own}):
        piece = _pieces_in(stage, params, rows)
        if piece not in pieces:
            pieces.append(piece)
    return is_element_wise(optimizer, params, pieces)


def _pieces_in(stage: int, tree: Any, rows: Rows) -> Any:
    """The shapes of a tree's leaves, with those of a stage's pieces for leaves that are split."""
    leaves, treedef = jax.tree.flatten(shapes_of(tree))
    for i, own in rows.items():
        if stage in own and leaves:
            leaves[i] = jax.ShapeDtypeStruct(_piece(leaves[i], own[stage]), leaves[i].dtype)
    return treedef.unflatten(leaves)


def _piece(leaf: Any, rows: tuple[int, int]) -> tuple[int, ...]:
    """The shape of rows `first:last` of a leaf."""
    return (rows[1] - rows[0], *leaf.shape[1:])


def _split(numbers: Sequence[Any], trees: Sequence[Any]) -> list[list[Any]]:
    """Splits the numbers of leaves into one list per tree."""
    left = iter(numbers)
    return [[next(left) for _ in jax.tree.leaves(tree)] for tree in trees]
