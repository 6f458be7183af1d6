"""Fast steps on a state of which every device keeps a part: read `state.py`, then `job.py`."""
