"""One update from the mean gradient: clipping, the optimizer, the average; read `update.py` first.

Any module of `steps` may import from here, and so may higher layers that inspect an optimizer.
"""
