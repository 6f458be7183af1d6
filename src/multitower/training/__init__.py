"""The loop around the step: checkpoints, the test phase, hooks, signals, scores.

Read `trainer.py` first: its loop reads top to bottom.
"""
