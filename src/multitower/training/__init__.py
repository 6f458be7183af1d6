"""The training loop: checkpoints, test phases, hooks, signals, evaluation, prediction.

Read `trainer.py` first, then `fitting/loop.py`, which reads top to bottom.
"""
