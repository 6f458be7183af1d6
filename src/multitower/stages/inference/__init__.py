"""A function cut over devices without gradients, for `make_parallel`: read `forward.py` first.

Only `functions.in_stages` imports from here.
"""
