"""Training states on disk, complete or absent. Orbax writes them; only this folder imports Orbax.

Read `checkpoint.py` first.
"""
