"""One stage, forward and backward: what its programs compute; read `stage.py` first.

Any module of `stages` and `planning` may import from here.
"""
