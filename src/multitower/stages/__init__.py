"""A model cut over devices: which equations belong to which stage, and how stages run.

Read `chain.py` first: the program of a tower as a chain of single-device programs. `cutting.py`
chooses the cuts, `layout.py` the devices and `order.py` the schedule; `pipeline.py` runs it.
`meeting/` is for towers that exchange values, `inference/` for functions without gradients.
"""
