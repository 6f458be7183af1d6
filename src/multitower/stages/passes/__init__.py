"""One stage, forward and backward: what its programs compute; read `stage.py` first.

Everything in `stages` may enter, and planning.
"""
