"""`--config FILE`: the configuration of a run, as a run saves it or as a person writes it."""

import json
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from multitower.errors import RunError
from multitower.recipes.options import convert_options
from multitower.runs.options import RunOptions


class Config(NamedTuple):
    """The configuration of a run.

    Attributes:
        recipe: the name or file of the recipe; None if it is not in the file.
        settings: the options of the recipe that are set, as text, by name.
        options: the options of `RunOptions` that are set, by name.
    """

    recipe: str | None
    settings: dict[str, str]
    options: dict[str, Any]


def read_config_file(path: Path) -> Config:
    """Reads a configuration.

    Args:
        path: of a JSON file, such as the `config.json` of a run, or of a TOML file:

            ```toml
            recipe = "cifar10"
            [settings]          # options of the recipe
            lr_base = 0.002
            [options]           # options of the run
            towers = 8
            ```

    Returns:
        The configuration.

    Raises:
        RunError: the file cannot be read, or has an unknown entry.
    """
    try:
        text = path.read_text(encoding="utf-8")
        found: Any = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:  # both parsers' errors are
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise RunError(f"{path} cannot be read as {kind}: {error}.") from error
    tables = ("settings", "options")
    if not isinstance(found, dict) or not all(isinstance(found.get(t, {}), dict) for t in tables):
        raise RunError(f"{path}: settings and options must be tables of names and values.")
    unknown = sorted(set(found) - {"recipe", *tables})
    if unknown:
        table = "options" if unknown[0] in RunOptions.__dataclass_fields__ else "settings"
        raise RunError(
            f"{path} has {unknown[0]!r}: there are recipe, settings (options of the recipe) and "
            f"options (of the run). Write it into {table}, in TOML below a line [{table}]."
        )
    if not isinstance(found.get("recipe", ""), str):
        raise RunError(f"{path}: recipe must be the name or the file of a recipe, in quotes.")
    words = {name: str(value) for name, value in found.get("options", {}).items()}
    return Config(
        recipe=found.get("recipe"),
        settings={name: str(value) for name, value in found.get("settings", {}).items()},
        options=convert_options(RunOptions, words, f"{path}: a run"),
    )
