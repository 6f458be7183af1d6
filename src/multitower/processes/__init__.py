"""Several processes as one run: how they join, how one leaves, what all of them must know.

Knows JAX's runtime and the errors, nothing of towers. Every other folder may use it.
Read `together.py` first.
"""
