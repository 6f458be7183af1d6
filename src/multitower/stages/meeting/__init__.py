"""Towers that exchange values in a model in stages: where they meet, and what they send.

Read `sums.py` first, then `rounds.py`. Any module of `stages` and `steps` may import from here.
"""
