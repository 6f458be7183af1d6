"""Several processes as one run: how they join, how one leaves, what all of them must know.

It uses JAX's runtime and `errors`, and nothing of towers. Every other folder may use it.
Read `together.py` first.
"""
