"""The built-in training programs, written with the public API only, as by a user.

A recipe is a module with `recipe`, or with `Options` and `make_recipe`; `networks/` has the models.
Read `definition.py` first, then `digits.py`. `catalog.py` finds a recipe by its name.
"""

from multitower.recipes.catalog import SHIPPED, find_recipe, option_names
from multitower.recipes.definition import DataSets, Optimizer, Recipe

__all__ = ["SHIPPED", "DataSets", "Optimizer", "Recipe", "find_recipe", "option_names"]
