"""One update of a whole training state: `train_step`, its job, its state, its bits.

Read `train.py` and `step.py` first, then `job.py`; `ways.py` has the ways to keep a state.
"""
