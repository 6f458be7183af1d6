"""What a training step takes, before anything runs: bytes per device, and bytes sent.

It uses shapes only, and compiles programs without running them. Read `plan.py` first, then
`make.py` and `layouts.py`. What a layout keeps in memory is in `memory.py`, `staged.py` and
`apart.py`, and what it sends in `traffic.py`.
"""
