"""The leaves of a state on the host and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import multitower as mt
from multitower.steps.state.leaves import check_same_leaves, leaf_like, on_host

KEY = jax.random.key(3, impl="rbg")


def test_on_the_host_it_is_a_copy():
    """Lie: the device's own memory, which the next step overwrites."""
    leaf = jax.device_put(np.arange(1000, dtype=np.float32), mt.devices(2)[1])
    copied = on_host(leaf)
    np.testing.assert_array_equal(copied, np.arange(1000))
    assert not np.shares_memory(copied, np.asarray(leaf))
    assert on_host(copied) is copied


def test_a_leaf_is_again_what_it_was():
    """Lie: a state from a checkpoint with NumPy arrays, or with data in place of a key."""
    host = np.arange(3, dtype=np.float32)
    assert leaf_like(host, np.zeros(3)) is host
    assert isinstance(leaf_like(host, jnp.zeros(3)), jax.Array)
    assert leaf_like(on_host(KEY), jax.random.key(0, impl="rbg")) == KEY


NAMED = [("w", jnp.zeros((2, 3))), ("key", KEY)]
WRITTEN = {"w": ("float32", [2, 3]), "key": ("uint32", [4])}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v": ("float32", [])}, "only the checkpoint has a leaf v"),
        ({"w": None}, "only the model has a leaf w"),
        ({".ema_params": ("float32", [])}, r"only the .* was saved with another ema_decay"),
        ({"w": ("int32", [2, 3])}, r"w is int32\[2, 3\] in the checkpoint and float32\[2, 3\] in"),
        ({"w": ("float64", [2, 3])}, r"w is float64.* with jax_enable_x64, which is off here"),
        ({"w": ("float32", [3])}, r"w is float32\[3\] in the checkpoint and float32\[2, 3\] in"),
        ({"key": ("uint32", [2])}, r"key is uint32\[2\] in the checkpoint and uint32\[4\] in"),
    ],
)
def test_leaves_of_another_model_are_named(changes, message):
    check_same_leaves(WRITTEN, NAMED, "here")
    written = {name: one for name, one in {**WRITTEN, **changes}.items() if one}
    with pytest.raises(mt.CheckpointError, match=f"here: {message}"):
        check_same_leaves(written, NAMED, "here")
