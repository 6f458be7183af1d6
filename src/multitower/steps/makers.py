"""Makers: what a step remembers of each model that it was given, and of the batches it ran.

Models may take turns, as in an ensemble: a state is trained with the model that it was made of.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from multitower.engines.executable import settings
from multitower.errors import StateError
from multitower.models.modules import Model
from multitower.steps.loss import LossFunction
from multitower.steps.parts import Looked, StepParts
from multitower.steps.state.kept import KeptState
from multitower.steps.way import Runner
from multitower.towers.rows import BatchParts, Split


class Seen(NamedTuple):
    """What a step remembers of a kind of batch that it has run.

    Attributes:
        split: which of its leaves are rows.
        shared: the numbers of the leaves that are not rows.
        rows: the numbers of the leaves that are rows.
        num_rows: rows of the batch, over all towers.
        runner: what runs it.
    """

    split: Split
    shared: tuple[int, ...]
    rows: tuple[int, ...]
    num_rows: int
    runner: Runner

    @classmethod
    def of(cls, parts: BatchParts, runner: Runner) -> "Seen":
        """Makes it of a batch that has been run; rows are on axis 0."""
        kinds = list(enumerate(parts.split.kinds))
        shared = tuple(number for number, kind in kinds if kind != 0)
        rows = tuple(number for number, kind in kinds if kind == 0)
        return cls(parts.split, shared, rows, parts.num_rows, runner)

    def parts(self, leaves: Sequence[Any]) -> BatchParts:
        """Another batch of this kind, taken apart."""
        return BatchParts(
            self.split,
            [leaves[number] for number in self.shared],
            [leaves[number] for number in self.rows],
            self.num_rows,
        )


def kind_of(leaves: Sequence[Any], treedef: Any) -> Any:
    """What batches must have in common to be taken apart and run in the same way.

    Types are part of it, so a batch that would be refused (such as one with a value inside of
    `jax.jit`) never has the kind of one that was run. So are JAX's settings, which may differ in a
    `with` block.

    Returns:
        Hashable; None for a batch with leaves that are not arrays, which is taken apart anew.
    """
    weak = lambda leaf: getattr(leaf, "weak_type", False)
    try:
        kinds = [(leaf.__class__, leaf.shape, leaf.dtype, weak(leaf)) for leaf in leaves]
        return treedef, settings(), *kinds
    except AttributeError:  # Python numbers
        return None


@dataclass(eq=False)
class Maker:
    """A step with one of the models that it was given; every state remembers its maker.

    Two models have the same maker if they differ only in the values of weights and state. Other
    shapes, integers or functions make another maker.

    Attributes:
        parts: what the step is made of, with a loss that can build the model.
        kind: structure, shapes and dtypes of the parameters; None before `init` is called.
        looked: what is known of the loss, for each kind of batch.
        runners: what runs batches, for each kind.
        seen: what is remembered of batches that have been run, for each kind.
    """

    parts: StepParts
    kind: Any = None
    looked: dict[Any, Looked] = field(default_factory=dict[Any, Looked])
    runners: dict[Any, Runner] = field(default_factory=dict[Any, Runner])
    seen: dict[Any, Seen] = field(default_factory=dict[Any, Seen])


class Makers:
    """The makers of one step: that of the newest model, and those that a living state refers to.

    Attributes:
        newest: the maker of the model that was given last.
    """

    def __init__(self, step: StepParts) -> None:
        self._step = step
        self.newest = Maker(step)
        self._all = weakref.WeakSet({self.newest})

    def see(self, model: Model | None, params: Any) -> Maker:
        """The maker for a model, or for plain parameters; it becomes `newest`."""
        loss = self._step.loss if model is None else self._step.loss.of_model(model)
        self.newest = self._find(loss, _kind_of_params(params))
        return self.newest

    def forget_seen(self) -> None:
        """Has every batch taken apart anew, since another number of rows is a full batch."""
        for maker in self._all:
            maker.seen.clear()

    def of_state(self, state: KeptState) -> Maker:
        """The maker that trains a state: the one whose model the state was made of, if known.

        Raises:
            StateError: the state does not say, and this step was given several models that differ
                in more than their weights.
        """
        if isinstance(state.maker, Maker) and state.maker in self._all:
            return state.maker
        origin, kind = state.origin, _kind_of_params(state.params_shapes())
        if not isinstance(origin, Maker):
            self._refuse_several_models()
            return self._find(self.newest.parts.loss, kind)
        if origin in self._all and origin.kind == kind:
            return origin
        # Of another step, or with other parameters, as state.replace(params=...) may put there.
        found = self._find(replace(self._step.loss, model=origin.parts.loss.model), kind)
        if self.newest.kind is None:  # `init` was never called: this is the first model
            self.newest = found
        return found

    def _refuse_several_models(self) -> None:
        newest = self.newest.parts.loss
        if not all(maker.parts.loss.has_model_of(newest) for maker in self._all):
            raise StateError(
                "this step cannot tell which model this state belongs to: jax.tree.map and pickle "
                "keep only the values, and this step has several models, which differ in integers, "
                "flags, keys or functions. Copy a state with copy.deepcopy(state), or put the "
                "values into a state of that model: step.init(model).replace(params=..., ...)."
            )

    def _find(self, loss: LossFunction, kind: Any) -> Maker:
        """The maker for such a model: one that exists, or a new one."""
        for maker in self._all:
            if maker.kind in (None, kind) and maker.parts.loss.has_model_of(loss):
                maker.kind = kind
                return maker
        maker = Maker(replace(self._step, loss=loss), kind)
        self._all.add(maker)
        return maker


def _kind_of_params(params: Any) -> Any:
    leaves, treedef = jax.tree.flatten(params)
    return treedef, tuple((np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
