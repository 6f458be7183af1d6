"""What the command line sets of a recipe: `--set`, `--data`, `--synthetic`, `--download`."""

from collections.abc import Sequence
from pathlib import Path

from multitower.cli.console import say
from multitower.errors import RunError
from multitower.recipes import SHIPPED, Recipe, option_names

_OPTIONS = "; ".join(
    f"{name}: {', '.join(names)}" for name in SHIPPED if (names := option_names(name))
)
SET_HELP = f"Set an option of the recipe; may be repeated. {_OPTIONS}."


def collect_settings(pairs: Sequence[str], data: Path | None, synthetic: bool) -> dict[str, str]:
    """Puts together what is set.

    Args:
        pairs: `NAME=VALUE`, each from one `--set`.
        data: from `--data`, which is short for `--set data=DIR`.
        synthetic: from `--synthetic`, which is short for `--set synthetic=true`.

    Returns:
        The word for each option. Paths are absolute, so that a resume finds them from anywhere.

    Raises:
        RunError: a word that is no pair, or one option twice.
    """
    found: list[tuple[str, str]] = []
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise RunError(f"--set {pair}: say NAME=VALUE, for example --set lr_base=0.002.")
        found.append((name, value))
    if data is not None:
        found.append(("data", str(data.absolute())))
    if synthetic:
        found.append(("synthetic", "true"))
    settings = dict(found)
    for name in settings:
        if [one for one, _ in found].count(name) > 1:
            raise RunError(f"the option {name!r} is set twice: leave one out.")
    return settings


def download_data(recipe: Recipe) -> None:
    """Fetches the data set of a recipe, and says how it goes on.

    Args:
        recipe: whose data set.

    Raises:
        RunError: it has nothing to download.
        DataError: the download fails.
    """
    if recipe.download is None:
        raise RunError(f"the recipe {recipe.name} has nothing to download: leave --download out.")
    told: dict[str, int] = {}

    def progress(name: str, done: int, total: int) -> None:
        tenth = 10 * done // max(total, 1)
        if tenth > told.get(name, 0):
            told[name] = tenth
            say(f"downloading {name}: {done / 1e6:.1f} of {total / 1e6:.1f} MB")

    recipe.download(progress)
