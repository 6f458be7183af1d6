"""A user's function on towers: `make_parallel`, `value_and_grad`, `grad`, `average_gradients`.

Read `calls.py` first: every parallel function goes through it.
"""
