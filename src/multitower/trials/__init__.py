"""Is this function safe to run data parallel? It is tried on all rows and on each tower's rows.

Read `check.py` first. Training does not use this folder.
"""
