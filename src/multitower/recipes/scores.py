"""Scores the predictions of a classifier."""

import jax
import jax.numpy as jnp
import optax


def score(logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    """Scores each prediction.

    Args:
        logits: float32, shape (rows, classes).
        labels: int32, shape (rows,).

    Returns:
        `"loss"`, the cross-entropy, and `"accuracy"`, 1 for a right answer, 0 for a wrong one;
        both float32, shape (rows,).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from multitower.recipes.scores import score
        >>> jax.jit(score)(jnp.array([[9.0, 0.0], [9.0, 0.0]]), jnp.array([0, 1]))["accuracy"]
        Array([1., 0.], dtype=float32)
    """
    is_right = jnp.argmax(logits, axis=-1) == labels
    return {
        "loss": optax.softmax_cross_entropy_with_integer_labels(logits, labels),
        "accuracy": is_right.astype(jnp.float32),
    }
