"""The keys of towers as the documentation gives them, worked out beside the library."""

import jax


def tower_key(key, tower):
    """Tower 0 has the key as it is; the others fold in a constant and their number."""
    if tower == 0:
        return key
    return jax.random.fold_in(jax.random.fold_in(key, 0x746F7772), tower)
