"""Flags: what several commands take, and what they set of a recipe.

Read `shared.py` first. Commands import these modules, and none of these imports a command.
"""
