"""The training state: parameters, optimizer state, averages; how users read and change it.

Read `train_state.py` first.
"""
