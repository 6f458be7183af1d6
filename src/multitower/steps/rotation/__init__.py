"""Asynchronous updates in a fixed rotation: read `turns.py`, then `runner.py`.

Only `steps.ways` and the options of `train_step` and `Trainer` import from here.
"""
