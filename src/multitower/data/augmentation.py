"""Random changes of training examples on the device, each drawn from its example's own key."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from multitower.errors import BatchError

Augment = Callable[[Any, jax.Array], Any]

# The leaf of a batch with a key for every row: uint32, shape (rows, 2). They are plain numbers, so
# that a batch can be a NumPy array, and keys of threefry, whatever JAX's default generator is.
KEYS = "key"
_GENERATOR = "threefry2x32"


def augmented(loss_fn: Callable[..., Any], augment: Augment) -> Callable[..., Any]:
    """Makes a loss with data augmentation on the devices.

    Every row of a batch has its own PRNG key. So a random change depends on the example and the
    epoch, and not on the tower, the device or the place in the batch.

    Args:
        loss_fn: a loss as for `multitower.train_step`, whose batches are dicts.
        augment: `augment(batch, keys)` returns the batch with changes drawn from the keys, one
            typed key per row, shape (rows,). It runs on the device, as a part of the loss.

    Returns:
        The same loss, for batches with one more entry, `"key"`, as
        `multitower.make_batch(..., keyed=True)` makes them.

    Raises:
        BatchError: from the returned loss: a batch has no `"key"`, or a wrong one.

    Example:
        >>> import jax, numpy as np, optax
        >>> import multitower as mt
        >>> def add_noise(batch, keys):
        ...     return {"x": batch["x"] + jax.vmap(jax.random.normal)(keys)}
        >>> loss = mt.augmented(lambda w, batch: (w - batch["x"]) ** 2, add_noise)
        >>> step = mt.train_step(loss, optax.sgd(0.1), devices=2)
        >>> rows = {"x": np.zeros(8, np.float32)}
        >>> batch = mt.make_batch(rows, global_batch=4, seed=0, step=0, keyed=True)
        >>> state, metrics = step(step.init(1.0), batch)
        >>> int(state.step)
        1
    """

    @functools.wraps(loss_fn)  # its signature says whether it takes rng and model_state
    def augmented_loss(params: Any, batch: dict[str, Any], **extras: Any) -> Any:
        return loss_fn(params, augment_batch(augment, batch), **extras)

    return augmented_loss


def augment_batch(augment: Augment, batch: dict[str, Any]) -> Any:
    """Augments one keyed batch, to look at what a loss made by `augmented` gets.

    Args:
        augment: as for `augmented`.
        batch: a dict with the entry `"key"`, uint32, shape (rows, 2).

    Returns:
        The augmented batch, without its keys.

    Raises:
        BatchError: the batch has no `"key"`, or one that is not uint32, shape (rows, 2).

    Example:
        >>> import jax, numpy as np
        >>> import multitower as mt
        >>> def jitter(batch, keys):
        ...     noise = jax.vmap(lambda key: jax.random.normal(key, (2,)))(keys)
        ...     return {"x": batch["x"] + noise}
        >>> rows = {"x": np.zeros((8, 2), np.float32)}
        >>> batch = mt.make_batch(rows, global_batch=4, seed=0, step=0, keyed=True)
        >>> mt.augment_batch(jitter, batch)["x"].shape
        (4, 2)
    """
    if not isinstance(batch, Mapping) or KEYS not in batch:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BatchError(
            f"the batch has no {KEYS!r}, a PRNG key for every row, from which augment draws its "
            "random changes. Make it with mt.make_batches(..., keyed=True)."
        )
    examples = dict(batch)
    data = examples.pop(KEYS)
    if getattr(data, "dtype", None) != np.uint32 or data.shape[-1:] != (2,):
        what = (
            f"{data.dtype}, shape {data.shape}" if hasattr(data, "dtype") else type(data).__name__
        )
        raise BatchError(
            f"batch[{KEYS!r}] is {what}, and the keys of rows are uint32, shape (rows, 2). Make "
            "the batch with mt.make_batches(..., keyed=True), or, from one typed key for each row, "
            "the keys with jax.random.key_data(keys)."
        )
    return augment(examples, jax.random.wrap_key_data(data, impl=_GENERATOR))
