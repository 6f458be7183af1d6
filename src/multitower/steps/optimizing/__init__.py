"""One update from the mean gradient: clipping, the optimizer, the average; read `update.py` first.

Any module of `steps` enters, and those above that look at an optimizer.
"""
