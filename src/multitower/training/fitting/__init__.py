"""One call of `Trainer.fit`: where it begins, its loop, and why it ends; read `loop.py` first.

`Trainer` enters, and the public names for `EarlyStopping`.
"""
