"""check_replicas: a checksum that no single bit escapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from multitower.errors import StateError
from multitower.steps.state.replicas import check_replicas_of_stages

ELEMENTS = np.random.default_rng(0).normal(size=300)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int32, np.uint8])
def test_one_bit_of_one_element_is_seen(dtype):
    # The lie: replicas that are alike, but for an element far from the first ones.
    good = (100 * np.abs(ELEMENTS)).astype(dtype)
    width = np.dtype(f"u{good.dtype.itemsize}")
    for place in (0, 1, 31, 32, 70, 299):
        for bit in (0, 8 * width.itemsize - 1):
            bits = good.view(width).copy()
            bits[place] ^= width.type(1 << bit)
            copies = [{"w": jnp.asarray(x)} for x in (good, bits.view(good.dtype))]
            with pytest.raises(StateError, match="holds other bits in statew"):
                check_replicas_of_stages([copies], several=False)
    check_replicas_of_stages([[{"w": jnp.asarray(good)}] * 2], several=False)


def test_exchanged_elements_are_seen():
    good = jnp.asarray(ELEMENTS, jnp.float32)
    with pytest.raises(StateError):
        check_replicas_of_stages([[{"w": good}, {"w": good[::-1]}]], several=False)
    key = jax.random.split(jax.random.key(0))
    with pytest.raises(StateError):
        check_replicas_of_stages([[{"key": key[0]}, {"key": key[1]}]], several=False)
