"""What the command line sets of a recipe: `--set`, `--data`, `--synthetic`, `--download`."""

import contextlib
import dataclasses
import inspect
import itertools
import signal
import typing
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from multitower.cli.console import say
from multitower.cli.flags.config_file import read_config_file
from multitower.errors import RunError, did_you_mean
from multitower.recipes.catalog import SHIPPED, option_names
from multitower.recipes.definition import Recipe

_SHIPPED_OPTIONS = {name: names for name in SHIPPED if (names := option_names(name))}
_OPTIONS = "; ".join(f"{name}: {', '.join(names)}" for name, names in _SHIPPED_OPTIONS.items())
SET_HELP = (
    "Set an option of the recipe; may be repeated. --lr-base 0.002 is short for --set "
    f"lr_base=0.002. {_OPTIONS}."
)


def expand_flags(words: Sequence[str], commands: Mapping[str, Callable[..., Any]]) -> list[str]:
    """Rewrites flags that are options of the recipe: `--lr-base 0.002` as `--set lr_base=0.002`.

    Args:
        words: after `multitower`.
        commands: those that take a recipe, by name; what they take themselves is left alone.

    Returns:
        The words, with `--set` for each of these flags.

    Raises:
        RunError: there is no such recipe, its file fails, or a flag that neither the command nor a
            recipe has.
    """
    if not words or words[0] not in commands:
        return list(words)
    recipe, known = _named_recipe(words), _flags_of(commands[words[0]])
    if recipe is None or not {_name(word) for word in words if word.startswith("--")} - known:
        return list(words)  # without a look into the recipe's file
    # An option of another recipe is refused where it is set, in words.
    options = {*option_names(recipe), *itertools.chain(*_SHIPPED_OPTIONS.values())} - known
    expanded: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        name, equals, value = _name(word), "=" in word, word.partition("=")[2]
        if word.startswith("--") and name in options:
            if not equals:
                value = left.pop(0) if left and not left[0].startswith("--") else "true"
            expanded += ["--set", f"{name}={value}"]
        elif word.startswith("--") and name not in known:
            flags = [f"--{one.replace('_', '-')}" for one in (*known, *option_names(recipe))]
            raise RunError(
                f"{words[0]} {recipe} has no option {word.partition('=')[0]}. "
                f"{did_you_mean(word.partition('=')[0], flags)}multitower {words[0]} --help lists "
                "all options."
            )
        else:
            expanded.append(word)
    return expanded


def _named_recipe(words: Sequence[str]) -> str | None:
    """The recipe that the words after the command name, themselves or through a file."""
    if len(words) > 1 and not words[1].startswith("-"):
        return words[1]
    for place, word in enumerate(words):
        if word.startswith("--config="):
            return read_config_file(Path(word.partition("=")[2])).recipe
        if word == "--config" and place + 1 < len(words):
            return read_config_file(Path(words[place + 1])).recipe
    return next((word for word in words if word in SHIPPED or word.endswith(".py")), None)


def _flags_of(command: Callable[..., Any]) -> set[str]:
    """The names of the flags that a command takes itself."""
    names = {"set", "json", "help", "help_verbose"}
    for name, parameter in inspect.signature(command).parameters.items():
        kind, *_ = typing.get_args(parameter.annotation) or (None,)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            names |= {field.name for field in dataclasses.fields(kind)}
        else:
            names.add(name)
    return names


def _name(word: str) -> str:
    return word[2:].partition("=")[0].replace("-", "_")


def collect_settings(
    pairs: Sequence[str],
    data: Path | None,
    synthetic: bool,
    before: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Puts together what is set.

    Args:
        pairs: `NAME=VALUE`, each from one `--set`.
        data: from `--data`, which is short for `--set data=DIR`.
        synthetic: from `--synthetic`, which is short for `--set synthetic=true`.
        before: what was set in a file, or by the run that this one goes on from; flags come first.

    Returns:
        The word for each option. Paths are absolute, so that a resume finds them from anywhere.

    Raises:
        RunError: a word that is not `NAME=VALUE`, or one option twice.
    """
    found: list[tuple[str, str]] = []
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise RunError(f"--set {pair}: say NAME=VALUE, for example --set lr_base=0.002.")
        # Paths are absolute, so that a resume finds them from anywhere.
        found.append((name, str(Path(value).expanduser().absolute()) if name == "data" else value))
    if data is not None:
        found.append(("data", str(data.absolute())))
    if synthetic:
        found.append(("synthetic", "true"))
    settings = dict(found)
    for name in settings:
        if [one for one, _ in found].count(name) > 1:
            raise RunError(f"the option {name!r} is set twice: leave one out.")
    kept = dict(before or {})
    for name, other in (("data", "synthetic"), ("synthetic", "data")):
        if name in settings:
            kept.pop(other, None)  # one source takes the place of the other
    return {**kept, **settings}


def download_data(recipe: Recipe) -> None:
    """Downloads the data set of a recipe, and prints the progress.

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

    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    with contextlib.nullcontext() if ignored else _ctrl_c_as_an_exception():
        recipe.download(progress)


@contextlib.contextmanager
def _ctrl_c_as_an_exception() -> Generator[None]:
    """So that half a file is removed before the process ends."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
