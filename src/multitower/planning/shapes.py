"""Shapes: a training state and a batch as shapes and dtypes, and how many bytes they take."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from multitower.functions.gradient_job import check_differentiable
from multitower.models.equinox import is_equinox
from multitower.models.modules import Model, is_model, take_model
from multitower.steps.local.options import LocalOptions
from multitower.steps.loss import LossFunction
from multitower.steps.optimizing.update import begin
from multitower.steps.parts import StepParts
from multitower.steps.precision import fitting_scale
from multitower.steps.rotation.options import RotationOptions
from multitower.steps.state.fields import Fields
from multitower.steps.unmade import take_params
from multitower.towers.leaves import device_dtype, is_key, row_shapes
from multitower.towers.rows import BatchParts, take_apart


class Planned(NamedTuple):
    """The step, the state and the batch that a plan is made for.

    Attributes:
        step: what the step is made of; its loss knows the module, if the parameters are one.
        fields: the state, as shapes.
        batch: the batch, taken apart, as shapes.
        apart: the options for local or asynchronous updates; None if towers meet in every step.
    """

    step: StepParts
    fields: Fields
    batch: BatchParts
    apart: LocalOptions | RotationOptions | None = None

    def with_rows(self, num_rows: int) -> "Planned":
        """The same step and state with another number of rows in the batch."""
        rows: list[Any] = [*row_shapes(self.batch.rows, num_rows)]
        return self._replace(batch=self.batch._replace(rows=rows, num_rows=num_rows))


class StateBytes(NamedTuple):
    """Bytes of a whole state; `rest` is as in `Memory`."""

    parameters: int
    optimizer_state: int
    average: int
    rest: int

    @classmethod
    def of(cls, fields: Fields, held: Any) -> "StateBytes":
        """Counts the bytes of a state and of arrays that the loss closes over, or their shapes."""
        rest = (fields.step, fields.model_state, fields.rng, held)
        return cls(*map(num_bytes, (fields.params, fields.opt_state, fields.ema_params, rest)))


def planned(step: StepParts, params: Any, batch: Any, *, model_state: Any, rng: Any) -> Planned:
    """The state and the batch as shapes.

    Raises:
        MultitowerError: as for `TrainStep.init` and `TrainStep.__call__`.
    """
    step.loss.check_extras(model_state, jax.random.key(0) if _is_key_shape(rng) else rng)
    if not is_model(params):
        params = take_params(params, in_parts=True)  # the shapes that a function returns
    if isinstance(params, Model) or is_model(params):
        params, model_state, loss = _take(step.loss, params, model_state)
        step = replace(step, loss=loss)
    params, model_state, rng = jax.tree.map(_shape, (params, model_state, rng))
    check_differentiable(params, lambda: "params")
    opt_state, ema = jax.eval_shape(lambda params: begin(step, params), params)
    count = jax.ShapeDtypeStruct((), np.int32)
    fields = Fields(count, params, opt_state, ema, model_state, rng)
    loss_scale = fitting_scale(step.loss.compute_dtype, None)
    fields = fields._replace(loss_scale=jax.tree.map(_shape, loss_scale))
    parts = take_apart(jax.tree.map(_batch_leaf, batch), 0, name="batch")
    return Planned(step, fields, parts._replace(shared=[_shape(leaf) for leaf in parts.shared]))


def num_bytes(tree: Any) -> int:
    """Bytes of all leaves of a tree, arrays or shapes."""
    return sum(_leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a leaf as it will be on a device."""
    if type(leaf) is jax.ShapeDtypeStruct:
        return leaf
    if not hasattr(leaf, "dtype"):
        leaf = jnp.asarray(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, device_dtype(leaf))


def _leaf_bytes(leaf: Any) -> int:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize


def _take(loss: LossFunction, module: Any, model_state: Any) -> tuple[Any, Any, LossFunction]:
    """Weights and model state of a module, whose arrays may be shapes, or of its `Model`."""
    if is_equinox(module):  # Equinox tells arrays from other leaves by their type
        module = jax.tree.map(_stand_in, module)
    model = module if isinstance(module, Model) else take_model(module)
    loss = loss.of_model(replace(model, fixed=jax.tree.map(_stand_in, model.fixed)))
    return model.weights, model.state if model.how.changes_in_place else model_state, loss


def _stand_in(leaf: Any) -> Any:
    """An array of zeros that takes no memory, in place of a shape."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return leaf


def _batch_leaf(leaf: Any) -> Any:
    """A leaf of a batch: an array becomes a shape; numbers, scalars and keys stay as they are."""
    is_array = isinstance(leaf, jax.Array | np.ndarray) and not is_key(leaf)
    return _shape(leaf) if is_array and leaf.ndim else leaf


def _is_key_shape(leaf: Any) -> bool:
    is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
    return is_shape and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) and not leaf.shape
