"""Matrix powers: A^n + B^n. One device, one product after the other."""

import sys

import jax
import jax.numpy as jnp
import numpy as np


def powers(matrices, exponents):
    def power(matrix, exponent):
        identity = jnp.eye(matrix.shape[0], dtype=matrix.dtype)
        return jax.lax.fori_loop(0, exponent, lambda _, product: product @ matrix, identity)

    return jax.vmap(power)(matrices, exponents)


def main(n=10, size=300):
    rng = np.random.default_rng(0)
    matrices = rng.uniform(size=(2, size, size)).astype(np.float32) / size
    a_to_n, b_to_n = powers(matrices, jnp.array([n, n]))
    total = a_to_n + b_to_n
    print(f"A^{n} + B^{n}: shape {total.shape}, sum of all entries {total.sum():.6f}")
    return total


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
