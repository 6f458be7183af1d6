"""The loop around the step: checkpoints, the test phase, hooks, signals, scores.

Read `trainer.py` first, then `fitting/loop.py`, which reads top to bottom.
"""
