"""Finds recipes, which are whole training programs, by name or file."""

import dataclasses
import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import multitower as mt
from multitower.errors import did_you_mean
from multitower.recipes.definition import Recipe
from multitower.recipes.from_file import is_file_name, load_recipe_file
from multitower.recipes.options import as_json, make_options

# Each is a module of this package, imported only when it is used.
SHIPPED = ("digits", "mnist", "cifar10", "cifar10-resnet20", "gpt")


def find_recipe(name: str, settings: Mapping[str, str] | None = None) -> Recipe:
    """Finds a recipe by its name.

    Args:
        name: one of `SHIPPED`, or the path of a Python file that defines `recipe`, or `Options`
            (a dataclass) and `make_recipe` (a function of it).
        settings: values of the recipe's options, as text, by name.

    Returns:
        The recipe. Its data are not loaded yet.

    Raises:
        RunError: there is no such recipe, or it has no such option; the message lists the existing
            ones. Or the file cannot be run, or defines no recipe.

    Example:
        >>> from multitower.recipes import find_recipe
        >>> find_recipe("digits").steps
        500
        >>> find_recipe("cifar10", {"synthetic": "true"}).options["synthetic"]
        True
    """
    module = _module(name)
    options = make_options(_kind(module, name), settings or {}, f"the recipe {name}")
    found = module.recipe if options is None else module.make_recipe(options)
    if not isinstance(found, Recipe):
        raise mt.RunError(
            f"{name} defines a recipe of type {type(found).__name__}: it must be a "
            "Recipe, from multitower.recipes."
        )
    return found if options is None else dataclasses.replace(found, options=as_json(options))


def option_names(name: str) -> tuple[str, ...]:
    """The options of a recipe.

    Args:
        name: as for `find_recipe`.

    Returns:
        Their names.

    Raises:
        RunError: there is no such recipe.

    Example:
        >>> from multitower.recipes import option_names
        >>> option_names("digits"), option_names("cifar10")[:3]
        (('learning_rate', 'momentum', 'penalty_rate'), ('data', 'synthetic', 'lr_base'))
    """
    kind = _kind(_module(name), name)
    return () if kind is None else tuple(field.name for field in dataclasses.fields(kind))


def _module(name: str) -> ModuleType:
    if is_file_name(name):
        return load_recipe_file(Path(name))
    if name not in SHIPPED:
        raise mt.RunError(
            f"there is no recipe {name!r}. {did_you_mean(name, SHIPPED)}There are: "
            f"{', '.join(SHIPPED)}; or name a file of yours, FILE.py."
        )
    return importlib.import_module(f"multitower.recipes.{name.replace('-', '_')}")


def _kind(module: ModuleType, name: str) -> type[Any] | None:
    if not hasattr(module, "make_recipe"):
        return None
    kind = getattr(module, "Options", None)
    if kind is None and hasattr(module, "recipe"):
        return None
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise mt.RunError(
            f"{name} defines make_recipe(options), and no dataclass Options. Write "
            "@dataclasses.dataclass(frozen=True) before class Options, or define recipe = Recipe("
            "...) if there are no options."
        )
    arguments = inspect.signature(module.make_recipe)
    try:
        arguments.bind("options")
    except TypeError:
        raise mt.RunError(
            f"{name}: make_recipe takes the arguments {arguments}: write def make_recipe(options): "
            "..., for one argument, an Options."
        ) from None
    return kind
