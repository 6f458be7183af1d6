"""Vector add: a + b, row by row. All devices."""

import sys

import multitower as mt
import numpy as np


@mt.make_parallel
def add(a, b):
    return a + b


def main(num_rows=1000):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, num_rows, 100)).astype(np.float32)
    total = add(a, b)
    print(f"{num_rows} rows, sum of all entries {np.asarray(total).sum():.3f}")
    return total


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
