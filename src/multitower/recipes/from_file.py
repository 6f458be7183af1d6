"""Recipes in files of their own: `multitower train FILE.py`."""

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

import multitower as mt
from multitower.errors import did_you_mean


def is_file_name(name: str) -> bool:
    """Whether a recipe's name is that of a file: it ends in .py, or contains a directory."""
    return name.endswith(".py") or "/" in name or "\\" in name


def load_recipe_file(path: Path) -> ModuleType:
    """Runs a file that defines a recipe, as Python would run it.

    Modules beside the file can be imported from it.

    Args:
        path: the path of the file.

    Returns:
        The module, with `recipe`; or with `Options`, a dataclass, and `make_recipe`, a function of
        it.

    Raises:
        RunError: there is no such file, it fails, or it defines no recipe.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from multitower.recipes.from_file import load_recipe_file
        >>> with tempfile.TemporaryDirectory() as here:
        ...     path = Path(here) / "mine.py"
        ...     _ = path.write_text("from multitower.recipes.digits import recipe")
        ...     load_recipe_file(path).recipe.name
        'digits'
    """
    path = path.absolute()
    if not path.is_file():
        files = [one.name for one in path.parent.glob("*.py")]
        raise mt.RunError(
            f"there is no file {path}. {did_you_mean(path.name, files)}Name a Python file that "
            "defines a recipe."
        )
    name = f"multitower_recipe_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise mt.RunError(f"{path} is not a Python file: its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where its dataclasses look for the types of their fields
    folder = str(path.resolve().parent)  # of the file itself, where the path is a link to it
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that nothing there hides another module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise mt.RunError(f"{_where(path, error)}: {type(error).__name__}: {error}") from error
    if not (hasattr(module, "recipe") or hasattr(module, "make_recipe")):
        raise mt.RunError(
            f"{path} defines no recipe. End it with: recipe = Recipe(name=..., data=..., init=..., "
            "loss=..., metrics=..., optimizer=..., steps=..., global_batch=...), with "
            "from multitower.recipes import Recipe."
        )
    return module


def _where(path: Path, error: Exception) -> str:
    """The line of the file that an error came from."""
    if isinstance(error, SyntaxError):
        return f"{error.filename or path}, line {error.lineno}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f"{path}, line {lines[-1]}" if lines else str(path)
