"""Takes modules of frameworks, and closures, apart into arrays and the rest.

`engines`, `data` and `models` do not use each other. No framework is imported here: a module's
class is looked up in `sys.modules`. Read `modules.py` first.
"""
