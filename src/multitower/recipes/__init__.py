"""Recipes: whole training programs, written with the public API only, as a user would."""

import importlib

import multitower as mt
from multitower.recipes.recipe import DataSets, Recipe

__all__ = ["SHIPPED", "DataSets", "Recipe", "find_recipe"]

# Each is a module of this package with a `recipe` in it, imported only when it is asked for.
SHIPPED = ("digits",)


def find_recipe(name: str) -> Recipe:
    """Finds a recipe by its name.

    Args:
        name: one of `SHIPPED`.

    Returns:
        The recipe. Its data are not loaded yet.

    Raises:
        RunError: there is no such recipe; the message lists those there are.

    Example:
        >>> from multitower.recipes import find_recipe
        >>> find_recipe("digits").steps
        500
    """
    if name not in SHIPPED:
        raise mt.RunError(f"there is no recipe {name!r}. There are: {', '.join(SHIPPED)}.")
    return importlib.import_module(f"multitower.recipes.{name}").recipe
