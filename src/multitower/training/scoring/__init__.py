"""A whole data set through a model, chunk by chunk: scores and predictions; read `chunks.py` first.

`Trainer` and the public names enter.
"""
