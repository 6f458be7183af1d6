"""Which rows and which device a tower has.

Sorts a call's arguments into rows, shared values and keys, and moves rows to devices.
Knows no model and no gradient. Read `rows.py` first, then `placement.py`.
"""
