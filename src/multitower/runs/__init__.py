"""One run of a recipe: its settings, its directory, its result, its page.

It knows no flags of the command line. Read `train.py` first.
"""
