"""What a training step keeps: parameters, optimizer state, averages; how users see and change it.

Read `train_state.py` first.
"""
