"""The terminal: words and flags of `multitower ...`, and no logic.

Read `main.py` first; each command has a module of its name. What they share is in `flags/` and
`starting/`.
"""
