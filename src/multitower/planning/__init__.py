"""What a training step takes, before anything runs: bytes per device, and bytes sent.

Only shapes are looked at, and programs compiled. Read `plan.py` first, then `make.py` and
`layouts.py`; what a layout keeps is in `memory.py`, `staged.py` and `apart.py`, what it sends in
`traffic.py`.
"""
