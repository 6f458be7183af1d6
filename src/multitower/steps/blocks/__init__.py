"""With `shard_update` every tower keeps a block of the optimizer's state: read `state.py` first."""
