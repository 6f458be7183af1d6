"""One update of a whole training state: `train_step`, its job, its state, its bits.

Read `train.py` first, then `job.py`.
"""
