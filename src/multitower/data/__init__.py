"""Batch number s as a pure function of data, seed and s; random changes of rows; data sets.

`engines`, `data` and `models` do not use each other. Read `batches.py` first.
"""
