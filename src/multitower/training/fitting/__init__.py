"""One call of `Trainer.fit`: where it begins, its loop, and why it ends; read `loop.py` first.

Only `Trainer` imports from here, and the package for its public name `EarlyStopping`.
"""
