"""One update of a whole training state: `train_step`, the programs it runs, and the state.

Read `train.py` and `step.py` first, then `job.py`; `ways.py` has the ways to keep a state.
"""
