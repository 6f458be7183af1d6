"""Training steps of a model that is cut over devices: what each stage keeps, and its update.

Read `runner.py` first. The stages themselves, forward and backward, are in `multitower.stages`.
"""
