"""Towers that meet in a model that is cut over devices: where, and what passes between them.

Read `sums.py` first, then `rounds.py`. Everything in `stages` may enter, and steps.
"""
