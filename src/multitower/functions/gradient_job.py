"""The job of value_and_grad: loss and gradients in every tower, and their means."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from multitower.engines.job import Job, Shared, TowerResult
from multitower.engines.tracing import look_by_shapes
from multitower.errors import ArgumentError, GradientError, OutputError
from multitower.functions.arguments import Arguments
from multitower.functions.auxiliary import (
    is_state_of,
    join_aux,
    looks_like_key,
    shared_keys,
    sort_aux,
    split_state,
    state_structures,
    subtrees_like,
)
from multitower.functions.calls import Leaves
from multitower.functions.objective import (
    Reduction,
    for_first_look,
    name_without_rows,
    num_weights,
    share_of,
    weights_of,
)
from multitower.functions.outputs import refuse_ragged, type_in_words
from multitower.functions.ratio import (
    fill_ratios,
    is_ratio,
    join_ratio,
    keeping_ratios,
    sums_of,
    take_ratios,
)
from multitower.models.modules import Call, call_tower, holes_in
from multitower.models.state import Changed, enter
from multitower.towers.refusals import (
    refuse_holder,
    refuse_mapping,
    refuse_what_is_no_number,
    shown,
)
from multitower.towers.rows import Split, Tower


class Wanted(NamedTuple):
    """What is differentiated.

    Attributes:
        args: the arguments, in the order of argnums.
        weights: the weights of the modules in them, by the number of their hole.
    """

    args: tuple[Any, ...]
    weights: dict[int, Any]


class Finished(NamedTuple):
    """The results of all towers, put together.

    Attributes:
        value: the mean loss, or `(loss, aux)`.
        gradients: the gradients, with the structure of what was differentiated.
        changed: what the call has changed in every module.
    """

    value: Any
    gradients: Wanted
    changed: list[Changed]


class ValueAndGrad(NamedTuple):
    """The `Kind` of `value_and_grad`."""

    fun: Any  # a function, or an OpenFunction
    argnums: tuple[int, ...]
    has_aux: bool
    in_axes: Any
    reduction: Reduction
    averages: bool = True

    def axes(self, call: Call, arguments: Arguments) -> tuple[Any, Any, Any]:
        """The row axes of `(args, kwargs, rows)`."""
        args = call.args
        argnums = positive(self.argnums, len(args))
        for argnum in argnums:
            of_user = lambda argnum=argnum: arguments.positional(argnum)
            check_differentiable(args[argnum], of_user)
            for hole in holes_in(args[argnum]):
                check_differentiable(call.models[hole].weights, of_user)
        given, of_rows = self.in_axes, {}
        if isinstance(given, Mapping):  # of variables that the loss closes over
            given, of_rows = None, dict(given)
        if given is None:
            given = tuple(None if i in argnums else 0 for i in range(len(args)))
        elif isinstance(given, int):
            given = tuple(None if i in argnums else given for i in range(len(args)))
        if len(given) != len(args):
            raise ArgumentError(
                f"in_axes={self.in_axes!r} has {len(given)} entries for {len(args)} positional "
                "arguments: give one entry each, None for the ones to differentiate."
            )
        for argnum in argnums:
            if jax.tree.leaves(given[argnum]):
                raise ArgumentError(
                    f"in_axes={self.in_axes!r} splits {arguments.positional(argnum)}, which is to "
                    "be differentiated: parameters are shared by all towers. Put None there. For a "
                    "gradient with respect to rows, such as a saliency map, write "
                    "mt.make_parallel(jax.grad(...)), where ... returns the sum over the rows."
                )
        return tuple(given), 0, of_rows

    def job(self, split: Split, tower_rows: int, ragged: tuple[int, int] | None) -> Job:
        """What one tower computes; `finish` only returns what was put together."""

        def call_of(shared: Shared, rows: list[Any], here: Tower) -> Call:
            return Call(*split.rebuild(shared.rest, rows, here))

        def tower(shared: Shared, rows: list[Any], here: Tower) -> TowerResult:
            whole = call_of(shared, rows, here)
            structures, entered = self._states(split, whole, here, tower_rows)
            is_state = is_state_of(structures.values())

            def forward(
                wanted: Wanted, rows: list[Any], here: Tower
            ) -> tuple[Any, Any, list[Changed]]:
                call = self._with(wanted, call_of(shared, rows, here))
                call = enter_states(call, entered, here)
                output, changed = self._call(call, here, tower_rows)
                return *self._loss_and_aux(output), changed

            def objective(wanted: Wanted) -> tuple[Any, tuple[Any, list[Changed]]]:
                loss, aux, changed = forward(wanted, rows, here)
                offset_of = lambda rows: forward(wanted, rows, here)[0].offset
                without = name_without_rows(loss, tower_rows, offset_of, rows)
                if without and ragged:
                    raise refuse_ragged(without, *ragged)
                weights = shared.rest[len(shared.rest) - num_weights(loss) :]
                share = share_of(loss, here, tower_rows, self.reduction, weights)
                return share.astype(share.dtype if is_ratio(loss) else loss.dtype), (aux, changed)

            wanted = self.wanted(whole)
            (share, (aux, changed)), gradients = jax.value_and_grad(objective, has_aux=True)(wanted)
            aux, ratios = take_ratios(aux)
            aux_of = lambda rows, here: take_ratios(forward(wanted, rows, here)[1])[0]
            sorted_aux = sort_aux(aux, aux_of, rows, is_state, here, ragged=ragged)
            averaged = [changes.averaged for changes in changed]
            first = [changes.first for changes in changed]
            return TowerResult(
                means=(sorted_aux.averaged, averaged),
                sums=(
                    (share, gradients, sorted_aux.first, first),
                    [sums_of(one, here, tower_rows) for one in ratios],
                ),
                rows=sorted_aux.by_row,
            )

        def finish(_: Any, means: Any, sums: Any) -> Any:
            return means, sums[0], [join_ratio(one) for one in sums[1]]

        return Job(tower, finish)

    def weights_job(
        self, split: Split, shared: list[Any], rows: list[Any], *, num_towers: int
    ) -> Job | None:
        """Adds up a ratio's weights over all towers, for its gradients; None without a ratio."""
        tower_rows = rows[0].shape[0]

        def weights(shared: list[Any], rows: list[Any], here: Tower) -> list[Any]:
            call = Call(*split.rebuild(shared, rows, here))
            call = enter_states(call, self._states(split, call, here, tower_rows)[1], here)
            loss = self._loss_and_aux(self._call(call, here, tower_rows)[0])[0]
            return weights_of(loss, here, tower_rows)

        look = lambda: jax.eval_shape(weights, shared, rows, Tower.shapes())
        if not look_by_shapes(look, num_towers=num_towers):
            return None
        return Job(
            lambda shared, rows, here: TowerResult(sums=weights(shared.rest, rows, here)),
            finish=lambda state, means, sums: sums,
        )

    def _call(self, call: Call, here: Tower, tower_rows: int) -> tuple[Any, list[Changed]]:
        with keeping_ratios():
            return call_tower(self.fun, call, here, tower_rows)

    def outputs(self, split: Split, shared: list[Any], rows: list[Any], here: Tower) -> Any:
        """What one tower computes, by name, for the first look."""
        tower_rows = rows[0].shape[0]
        call = Call(*split.rebuild(shared, rows, here))
        structures, entered = self._states(split, call, here, tower_rows)
        call = enter_states(call, entered, here)
        output, changed = self._call(call, here, tower_rows)
        loss, aux = self._loss_and_aux(output)
        of_loss = for_first_look(loss, aux, tower_rows, self.reduction)
        state, aux = split_state(take_ratios(aux)[0], is_state_of(structures.values()))
        return {**of_loss, "aux": aux, "model": changed, "state": state}

    def result(self, finished: Any, rows: Leaves) -> Finished:
        """The results of all towers, put together."""
        (aux_averaged, averaged), (value, gradients, aux_first, first), ratios = finished
        changed = [Changed(*pair) for pair in zip(averaged, first, strict=True)]
        if self.has_aux:
            value = (value, fill_ratios(join_aux(rows, aux_averaged, aux_first), ratios))
        return Finished(value, gradients, changed)

    def wanted(self, call: Call) -> Wanted:
        """What is to be differentiated of a call."""
        args = tuple(call.args[i] for i in positive(self.argnums, len(call.args)))
        return Wanted(args, {hole: call.models[hole].weights for hole in holes_in(args)})

    def _with(self, wanted: Wanted, call: Call) -> Call:
        args = list(call.args)
        for argnum, value in zip(positive(self.argnums, len(args)), wanted.args, strict=True):
            args[argnum] = value
        models = [
            replace(model, weights=wanted.weights.get(hole, model.weights))
            for hole, model in enumerate(call.models)
        ]
        return call._replace(args=tuple(args), models=models)

    def _states(
        self, split: Split, call: Call, here: Tower, tower_rows: int
    ) -> tuple[dict[int, Any], list[int]]:
        """The arguments that are a state, because they come back in `aux`.

        Returns:
            The structures of those that are trees, by position; and the positions of all of them,
            including keys that are an argument by themselves.
        """
        argnums = positive(self.argnums, len(call.args))
        structures = state_structures(split, argnums) if self.has_aux else {}
        keys = shared_keys(split, call.args) if self.has_aux else []
        if not structures and not keys:
            return {}, []

        def aux_of() -> Any:
            return self._loss_and_aux(self._call(call, here, tower_rows)[0])[1]

        aux = jax.eval_shape(aux_of)
        back = subtrees_like(aux, set(structures.values()))
        states = {number: treedef for number, treedef in structures.items() if treedef in back}
        if not any(looks_like_key(leaf) for leaf in jax.tree.leaves(aux)):
            keys = []
        return states, [*states, *keys]

    def _loss_and_aux(self, output: Any) -> tuple[Any, Any]:
        if not self.has_aux:
            return output, ()
        if not isinstance(output, tuple) or len(output) != 2:
            raise OutputError(
                f"with has_aux=True the loss must return (loss, aux), and it returned "
                f"{type_in_words(output)}. Return a pair, or drop has_aux."
            )
        return output


def enter_states(call: Call, numbers: Iterable[int], here: Tower) -> Call:
    """The call, with each argument that is a state as one tower gets it."""
    args = list(call.args)
    for number in numbers:
        args[number] = jax.tree.map(lambda leaf: enter(leaf, here), args[number])
    return call._replace(args=tuple(args))


def check_differentiable(tree: Any, name: Callable[[], str]) -> None:
    """Refuses parameters that have no gradient.

    Args:
        tree: the parameters.
        name: returns what the user calls them; only errors call it.

    Raises:
        GradientError: a leaf that is not a float; the message names its path.
        ArgumentError: an object that holds an array, such as a Keras variable; a `TrainState` of
            Flax Linen; or an array that no device can hold.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        is_number = isinstance(leaf, int | float | complex)
        dtype = jnp.result_type(leaf) if is_number else getattr(leaf, "dtype", type(leaf).__name__)
        if isinstance(dtype, str) or not jnp.issubdtype(dtype, jnp.inexact):
            where = lambda path=path: f"{name()}{jax.tree_util.keystr(path)}"
            refuse_holder(leaf, where)
            refuse_mapping(leaf, where)
            if all(hasattr(tree, field) for field in ("params", "opt_state")):
                raise ArgumentError(
                    f"{name()} is a {type(tree).__name__}, which holds an optimizer and its state, "
                    f"too. Pass {name()}.params to differentiate, and {name()} as another argument "
                    "if the loss needs it, with in_axes=None."
                )
            is_array = not isinstance(dtype, str)
            what = f"has dtype {dtype}" if is_array else f"is {shown(leaf)}"
            how = "Convert it with .astype(jnp.float32), or take it" if is_array else "Take it"
            raise GradientError(
                f"{name()}{jax.tree_util.keystr(path)} {what}: only floats can be differentiated. "
                f"{how} out of the parameters (close over it, or pass it as another argument)."
            )
        if isinstance(leaf, np.ndarray):
            where = lambda path=path: f"{name()}{jax.tree_util.keystr(path)}"
            refuse_what_is_no_number(leaf, where)


def positive(argnums: tuple[int, ...], num_args: int) -> tuple[int, ...]:
    """Turns `argnums` into positions from the front, 0 or more.

    Raises:
        ArgumentError: not a position of an argument, or the same one twice.
    """
    for argnum in argnums:
        if isinstance(argnum, bool) or not isinstance(argnum, int | np.integer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(
                f"argnums={argnum!r}: it must be a position, such as 0, or several."
            )
        if not -num_args <= argnum < num_args:
            raise ArgumentError(
                f"argnums={argnum} needs at least {abs(argnum + (argnum >= 0))} positional "
                f"arguments, and {num_args} were given. Pass what is differentiated by position."
            )
    found = tuple(argnum % num_args for argnum in argnums)
    if len(set(found)) < len(found):
        raise ArgumentError(f"argnums={argnums} names an argument twice: name it once.")
    return found
