"""Recipe: what a training program is made of, apart from where and how long it runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import optax


class DataSets(NamedTuple):
    """The examples of a recipe.

    Attributes:
        train: a pytree of NumPy arrays with one row per example on axis 0.
        test: the same, of examples that no training step sees.
    """

    train: Any
    test: Any


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training program: what `multitower train` needs to know about one.

    Attributes:
        name: what it is called, in results and directories.
        data: makes the data sets. They must not depend on the seed of a run.
        init: makes the first parameters from a typed key.
        loss: `loss(params, batch)`, as for `multitower.train_step`: the losses of the batch's
            rows, shape (rows,), or a pair of these and a dict of metrics.
        metrics: `metrics(params, batch)`, a dict with one number per row, shape (rows,), for each
            name; a test set is scored by their means.
        optimizer: makes the optax optimizer of a run from its number of steps.
        steps: updates of a run that does not say.
        global_batch: rows of a step, over all towers, of a run that does not say.
        distort: `distort(batch, generator)` returns a training batch with random changes, drawn
            from the NumPy generator alone; it may change the arrays in place. None for no changes.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, optax
        >>> from multitower.recipes import DataSets, Recipe
        >>> rows = {"x": np.arange(8.0, dtype=np.float32)}
        >>> errors = lambda w, batch: (w * batch["x"] - 3 * batch["x"]) ** 2
        >>> recipe = Recipe(
        ...     name="line",
        ...     data=lambda: DataSets(train=rows, test=rows),
        ...     init=lambda key: jax.random.normal(key),
        ...     loss=errors,
        ...     metrics=lambda w, batch: {"loss": errors(w, batch)},
        ...     optimizer=lambda steps: optax.adam(0.1),
        ...     steps=100,
        ...     global_batch=4,
        ... )
        >>> recipe.name
        'line'
    """

    name: str
    data: Callable[[], DataSets]
    init: Callable[[jax.Array], Any]
    loss: Callable[..., Any]
    metrics: Callable[[Any, Any], dict[str, jax.Array]]
    optimizer: Callable[[int], optax.GradientTransformation]
    steps: int
    global_batch: int
    distort: Callable[[Any, np.random.Generator], Any] | None = None
