"""A function and example arguments, run on the rows of a tower as in a real call."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from multitower.checks.first_look import Read, read_tower
from multitower.engines.collectives import axis_of, first_collective, needs_axis
from multitower.engines.tracing import refuse_other_places
from multitower.errors import ArgumentError, BatchError
from multitower.functions.arguments import Arguments
from multitower.functions.auxiliary import is_state_of, split_state, state_structures
from multitower.functions.gradient_job import enter_states
from multitower.functions.objective import Reduction, as_mean, share_of
from multitower.functions.outputs import check_arrays
from multitower.functions.ratio import RatioSums, is_ratio, keeping_ratios, sums_of
from multitower.models.callables import as_function
from multitower.models.closures import open_function
from multitower.models.modules import Call, call_tower, holes_in, take_call
from multitower.models.state import enter
from multitower.towers.leaves import is_key, without_explicit_axes
from multitower.towers.placement import AXIS
from multitower.towers.rows import SHARED, BatchParts, Tower, axes_of_leaves, take_apart
from multitower.trials.comparison import numbers_of

# For each tower its rows, and the tower.
Towers = list[tuple[list[Any], Tower]]


class Found(NamedTuple):
    """What a function returned on some rows.

    Attributes:
        names: the names of its results, such as `output[0]['loss']`.
        leaves: the results: arrays, and ratios as they are inside a tower.
        has_loss: whether the first of them is a loss: a float or a ratio, alone or before others.
        states: the state for the next call, by kind: of modules, model state, a state in aux.
    """

    names: list[str]
    leaves: list[Any]
    has_loss: bool
    states: dict[str, Any]


def _as_array(leaf: Any, name: str) -> jax.Array:
    check_arrays(leaf, name)
    return jnp.asarray(leaf)


@dataclass(frozen=True)
class Trial:
    """A function with example arguments.

    Attributes:
        fun: the function, or an `OpenFunction`.
        arguments: the names of its arguments in the user's program.
        tree: `(args, kwargs, rows, models, arrays)` of the call.
        axes: their row axes, a prefix of the tree.
        parts: the tree, taken apart.
        reduction: how the losses of rows are combined, `"mean"` or `"sum"`.
    """

    fun: Any
    arguments: Arguments
    tree: tuple[Any, ...]
    axes: tuple[Any, ...]
    parts: BatchParts
    reduction: Reduction

    @classmethod
    def of(
        cls, fn: Any, args: tuple[Any, ...], extras: dict[str, Any], in_axes: Any, reduction: Any
    ) -> "Trial":
        """Takes the arguments of `check_parallel` apart."""
        names = tuple(in_axes) if isinstance(in_axes, Mapping) else ()
        opened, closed = open_function(as_function(fn, names), names, values=True)
        call = take_call(args, _with_what_is_wanted(fn, extras), closed)
        of_args: Any = None if names else tuple(in_axes) if isinstance(in_axes, list) else in_axes
        if of_args is None:
            of_args = 0 if len(args) == 1 and not names else (None, *(0 for _ in args[1:]))
        # Of the keyword arguments, numbers and arrays are shared; keys differ between towers.
        of_kwargs = {
            name: jax.tree.map(lambda leaf: 0 if is_key(leaf) and not leaf.ndim else None, value)
            if name != "model_state"
            else None
            for name, value in call.kwargs.items()
        }
        axes = (of_args, of_kwargs, dict(in_axes) if names else 0, None, None)
        tree = (call.args, call.kwargs, call.rows, call.models, call.arrays)
        tree = jax.tree.map(without_explicit_axes, tree)
        arguments = Arguments(fn)
        parts = take_apart(tree, axes, name=arguments, constants=True)
        if parts.num_rows < 2:
            raise BatchError("check_parallel needs two rows or more: one row cannot be cut.")
        return cls(opened, arguments, tree, axes, parts, reduction)

    def sharing(self, leaf: int) -> "Trial":
        """The same call, with one more leaf whole in every tower."""
        axes = axes_of_leaves(self.axes, self.tree, "in_axes")
        axes[leaf] = None
        own_axes = jax.tree.unflatten(jax.tree.structure(self.tree), axes)
        parts = take_apart(self.tree, own_axes, name=self.arguments, constants=True)
        return replace(self, axes=own_axes, parts=parts)

    def with_other_rows(self, spread: int) -> "Trial":
        """The same call with other rows, which keep shapes, signs and zeros.

        Weights and masks that were all equal differ then. Integers that differ stay as they are:
        they may be indices.

        Args:
            spread: floats are multiplied by up to 2**spread, or by no less than its inverse.
        """
        draw = np.random.default_rng(0)

        def other(leaf: Any) -> Any:
            if is_key(leaf):
                return leaf
            numbers = np.asarray(leaf)
            if jnp.issubdtype(numbers.dtype, jnp.inexact):
                factors = 2.0 ** draw.uniform(-spread, spread, numbers.shape)
                with np.errstate(over="ignore"):
                    return (numbers * factors).astype(numbers.dtype)
            is_even = numbers.size > 0 and (numbers == numbers.flat[0]).all()
            zeros = np.zeros_like(numbers)
            return np.where(draw.random(numbers.shape) < 0.5, numbers, zeros) if is_even else leaf

        rows = [other(leaf) for leaf in self.parts.rows]
        return replace(self, parts=self.parts._replace(rows=rows))

    def towers(self, tower_rows: int, *, strided: int = 0) -> Towers:
        """The rows of full towers: consecutive, or every n-th row; and each tower.

        Args:
            tower_rows: the number of rows of a tower.
            strided: how many neighbours stay together in every n-th; 0 for consecutive rows.
        """
        count = self.parts.num_rows // tower_rows
        num_rows = count * tower_rows
        places = np.arange(num_rows).reshape(count, -1)
        if strided:
            places = places.reshape(-1, count, strided).swapaxes(0, 1).reshape(count, -1)
        return [
            (self._rows(own), Tower(jnp.int32(n), jnp.int32(tower_rows), jnp.int32(num_rows)))
            for n, own in enumerate(places)
        ]

    def whole(self, num_rows: int) -> tuple[list[Any], Tower]:
        """The first `num_rows` rows, as the rows of a single tower."""
        here = Tower(jnp.int32(0), jnp.int32(num_rows), jnp.int32(num_rows))
        return self._rows(np.arange(num_rows)), here

    def _rows(self, places: Any) -> list[Any]:
        def some(leaf: Any) -> jax.Array:
            if isinstance(leaf, np.ndarray):  # indexing in NumPy compiles nothing
                return jnp.asarray(leaf[places])
            return jnp.asarray(leaf)[places]

        return [some(leaf) for leaf in self.parts.rows]

    @functools.cached_property
    def meets(self) -> bool:
        """Whether the function exchanges values between towers, or uses the tower's number."""
        rows, here = self.whole(self.parts.num_rows)
        run = lambda rows: [self._run(rows, here).leaves]
        try:
            program = jax.make_jaxpr(run, axis_env=axis_of(1))(rows)
        except Exception:  # it uses values of arrays: it can be run, not traced
            return False
        refuse_other_places(program)
        if first_collective(program, needs_axis) is not None:
            return True
        try:  # jax.lax.axis_size("towers") is a constant, and no operation in the program
            jax.make_jaxpr(run)(rows)
        except ArgumentError:
            return True
        return False

    def run(self, towers: Towers) -> list[Found]:
        """The results of the function in every tower; for ratios the sums over its rows."""
        if not self.meets:
            return [self._run(*tower) for tower in towers]
        known: list[Found] = []

        def run(tower: tuple[list[Any], Tower]) -> Any:
            known.append(self._run(*tower))
            return known[-1].leaves, known[-1].states

        found = _apart(jax.vmap(run, axis_name=AXIS)(_together(towers)), len(towers))
        return [known[-1]._replace(leaves=leaves, states=states) for leaves, states in found]

    def has_loss(self, tower_rows: int) -> bool:
        """Whether the first result of a tower is a loss: one number, or one for each of its rows.

        Args:
            tower_rows: the number of rows of a tower.
        """
        return self.run(self.towers(tower_rows)[:1])[0].has_loss

    def _run(self, rows: list[Any], here: Tower) -> Found:
        found = self._call(rows, here)
        leaves = [sums_of(x, here, len(rows[0])) if is_ratio(x) else x for x in found.leaves]
        return found._replace(leaves=leaves)

    def _call(self, rows: list[Any], here: Tower, shared: Sequence[Any] | None = None) -> Found:
        shared = self.parts.shared if shared is None else shared
        # Tracers cannot index NumPy arrays; in a real call these arrays are on a device.
        shared = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in shared]
        split = self.parts.split
        call = Call(*split.rebuild(shared, rows, here))
        structures = state_structures(split, [0])
        call = enter_states(call, structures, here)
        if "model_state" in call.kwargs:
            entered = jax.tree.map(lambda leaf: enter(leaf, here), call.kwargs["model_state"])
            call = call._replace(kwargs={**call.kwargs, "model_state": entered})
        with keeping_ratios():
            output, changed = call_tower(self.fun, call, here, len(rows[0]))
        states: dict[str, Any] = {"model": changed}
        if "model_state" in call.kwargs and isinstance(output, tuple) and len(output) == 3:
            states["model_state"] = output[2]
            output = (*output[:2], None)
        states["state"], output = split_state(output, is_state_of(structures.values()))
        flat, _ = jax.tree_util.tree_flatten_with_path(output, is_leaf=is_ratio)
        names = [f"output{jax.tree_util.keystr(path)}" for path, _ in flat]
        leaves = [
            leaf if is_ratio(leaf) or is_key(leaf) else _as_array(leaf, name)
            for name, (_, leaf) in zip(names, flat, strict=True)
        ]
        has_loss = bool(leaves) and names[0] in ("output", "output[0]")
        return Found(names, leaves, has_loss and _may_be_loss(leaves[0], rows), states)

    def reading(self, times: int = 1, *, again: bool = False) -> Read | None:
        """What the program does with rows; None if it accepts only some numbers of rows.

        Args:
            times: trace with numbers of rows that are multiples of this.
            again: trace with another number of rows, and of towers, than the first time.
        """

        def by_kind(rows: list[Any], here: Tower, others: Any) -> dict[str, Any]:
            del others  # their values count: a number of rows may be among them
            found = self._call(rows, here)
            means = [
                as_mean(leaf, len(rows[0]), self.reduction if found.has_loss and not n else "mean")
                for n, leaf in enumerate(found.leaves)
            ]
            first = int(found.has_loss)
            return {"aux": means[first:], "loss": means[:first], **found.states}

        rows = self.parts.num_rows
        read = functools.partial(
            read_tower, by_kind, self.parts.rows, self.parts.shared, batch_rows=rows, again=again
        )
        found = read(times=times)
        if times == 1 and (found is None or found[1].has_state_by_row()):
            found = read(most=rows) or found  # it may have a buffer for so many rows
        return found

    def gradients(
        self, ways: Sequence[tuple[Towers, list[Any]]], *, compiled: bool = True
    ) -> list[dict[str, tuple[Any, Any]]]:
        """The gradient of the loss over all towers, for each way to cut the batch.

        Args:
            ways: the towers, and the `weights_of_ratio` of their results, for each way.
            compiled: as one program, as in a real call; else operation by operation.

        Returns:
            For each way, by name of each float of the first argument, if that is shared: the
            gradient, and the sum over towers of its absolute values.
        """
        numbers = self._weights()
        wanted = {number: jnp.asarray(self.parts.shared[number]) for number in numbers}

        def share(wanted: dict[int, Any], rows: list[Any], here: Tower, weights: list[Any]) -> Any:
            shared = [wanted.get(n, leaf) for n, leaf in enumerate(self.parts.shared)]
            loss = self._call(rows, here, shared).leaves[0]
            return share_of(loss, here, len(rows[0]), self.reduction, weights)

        differentiate = jax.jit(jax.grad(share)) if compiled else jax.grad(share)
        found: list[dict[str, tuple[Any, Any]]] = []
        for towers, weights in ways:
            if self.meets or not _runs_alone(differentiate, wanted, *towers[0], weights):
                all_of = jax.vmap(differentiate, (None, 0, 0, None), axis_name=AXIS)
                parts = _apart(all_of(wanted, *_together(towers), weights), len(towers))
            else:
                parts = [differentiate(wanted, rows, here, weights) for rows, here in towers]
            on_host = [{n: numbers_of(part[n]) for n in numbers} for part in parts]
            with np.errstate(invalid="ignore", over="ignore"):  # infinities of both signs
                sums = {n: sum(part[n] for part in on_host) for n in numbers}
                sizes = {n: sum(np.abs(part[n]) for part in on_host) for n in numbers}
            found.append({name: (sums[n], sizes[n]) for n, name in numbers.items()})
        return found

    def is_coarse(self, rows: list[Any], here: Tower) -> bool:
        """Whether the program computes with 16-bit floats."""
        run = lambda rows: [self._run(rows, here).leaves]
        program = jax.make_jaxpr(run, axis_env=axis_of(1))(rows)
        return "f16[" in program.pretty_print(use_color=False)

    def _weights(self) -> dict[int, str]:
        """The floats of the first argument, by their number among the shared leaves."""
        holes = holes_in(self.tree[0][0]) if self.tree[0] else []
        found: dict[int, str] = {}
        number = 0
        flat, _ = jax.tree_util.tree_flatten_with_path(self.tree)
        for (path, leaf), kind in zip(flat, self.parts.split.kinds, strict=True):
            if not isinstance(kind, str):
                continue
            is_first = path[0].idx == 0 and path[1].idx == 0
            is_weight = path[0].idx == 3 and path[1].idx in holes and path[2].name == "weights"
            if kind == SHARED and (is_first or is_weight) and _is_float(leaf):
                found[number] = self.arguments.of(path)
            number += 1
        return found


def weights_of_ratio(found: Sequence[Found]) -> list[Any]:
    """The weights of a loss that is a ratio, over all towers; none for another loss."""
    losses = [one.leaves[0] for one in found]
    if not isinstance(losses[0], RatioSums):
        return []
    return [sum(one) for one in zip(*(loss.weights for loss in losses), strict=True)]


def _runs_alone(differentiate: Any, *args: Any) -> bool:
    """Whether a gradient needs no other towers; a backward rule may, where the loss does not."""
    try:
        jax.make_jaxpr(differentiate)(*args)
    except (ArgumentError, NameError):  # JAX: unbound axis name
        return False
    return True


def _together(towers: Towers) -> tuple[list[Any], Tower]:
    """All towers stacked along a new axis 0."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *towers)


def _apart(tree: Any, num_towers: int) -> list[Any]:
    return [jax.tree.map(lambda leaf, n=n: leaf[n], tree) for n in range(num_towers)]


def _with_what_is_wanted(fn: Callable[..., Any], extras: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments, with a fixed key for a loss that requires `rng`.

    Raises:
        ArgumentError: the loss requires `model_state`, and it is missing.
    """
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # some builtins and C functions have no signature
        return extras
    needed = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    if "model_state" in needed - extras.keys():
        raise ArgumentError(
            "the function takes model_state, and check_parallel got none: pass what step.init gets,"
            " check_parallel(loss_fn, params, batch, model_state={...})."
        )
    return {"rng": jax.random.key(0), **extras} if "rng" in needed else extras


def _may_be_loss(leaf: Any, rows: list[Any]) -> bool:
    if is_ratio(leaf):
        return True
    is_float = not is_key(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)
    return is_float and leaf.shape in ((), (len(rows[0]),))


def _is_float(leaf: Any) -> bool:
    return not is_key(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
