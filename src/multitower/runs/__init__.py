"""One run of a recipe: its settings, its directory, its result, its page.

Knows no flag of the terminal. Read `train.py` first.
"""
