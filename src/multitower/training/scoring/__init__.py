"""Evaluation and prediction of a whole data set, chunk by chunk; read `chunks.py` first.

`Trainer` imports from here, and the package for its public names.
"""
