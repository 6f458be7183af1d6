"""The built-in training programs, written with the public API only, as by a user.

A recipe is a module with `recipe`, or with `Options` and `make_recipe`; `networks/` has the models.
Read `definition.py` first, then `digits.py`. `catalog.py` finds a recipe by its name.
"""
