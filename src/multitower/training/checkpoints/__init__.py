"""A state on disk, complete or absent. Orbax writes the arrays, and only this folder knows Orbax.

Read `checkpoint.py` first.
"""
