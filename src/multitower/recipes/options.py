"""Options: a dataclass, set by name from text, such as that of a command line."""

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import multitower as mt
from multitower.errors import did_you_mean

Options = TypeVar("Options")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Where the images of a recipe come from; the options of `--data` and `--synthetic`.

    Attributes:
        data: directory with the files of the data set; by default where downloads go.
        synthetic: make up images instead of reading files.
    """

    data: Annotated[Path | None, "directory with the files; None: where downloads go"] = None
    synthetic: Annotated[bool, "make images up instead of reading files"] = False

    def __post_init__(self) -> None:
        if self.synthetic and self.data is not None:
            raise mt.RunError(
                f"both synthetic images and data={self.data} were asked for: leave one out."
            )


def make_options(
    kind: type[Options] | None, settings: Mapping[str, str], owner: str
) -> Options | None:
    """Makes options from text.

    Args:
        kind: as for `convert_options`; None for a recipe without options.
        settings: as for `convert_options`.
        owner: as for `convert_options`.

    Returns:
        The options, or None if there are none.

    Raises:
        RunError: an unknown option, or a word that does not fit its type, or a type that no word
            can set; the message lists the existing options. Or an option without a default and
            without a value, or options that their own class refuses.

    Example:
        >>> from multitower.recipes.cifar10 import Options
        >>> from multitower.recipes.options import make_options
        >>> make_options(Options, {"lr_base": "0.002"}, "the recipe cifar10").lr_base
        0.002
    """
    values = convert_options(kind, settings, owner)
    if kind is None:
        return None
    for one in _fields(kind):
        if _default(one) is dataclasses.MISSING and one.name not in values:
            raise mt.RunError(
                f"{owner} needs a value for its option {one.name!r}, which has no default: say "
                f"--set {one.name}=VALUE, or give the field of Options a default."
            )
    try:
        return kind(**values)
    except ValueError as error:  # the options check themselves, in __post_init__
        if isinstance(error, mt.MultitowerError):
            raise
        raise mt.RunError(f"{owner} refuses its options: {error}") from error


def convert_options(
    kind: type[Any] | None, settings: Mapping[str, str], owner: str
) -> dict[str, Any]:
    """Converts text to the values of options.

    Args:
        kind: a dataclass whose fields are bool, int, float, str or Path, or one of these or None,
            or one of these `Annotated` with a line of text; None if there are no options.
        settings: the word for each option that is set; `"none"` for None.
        owner: the owner of the options, for messages, such as `"the recipe cifar10"`.

    Returns:
        The value of each option that is set.

    Raises:
        RunError: as `make_options`.
    """
    known = {} if kind is None else _kinds(kind)
    values: dict[str, Any] = {}
    for name, word in settings.items():
        if name not in known:
            raise mt.RunError(
                f"{owner} has no option {name!r}. {did_you_mean(name, known)}{describe(kind)}"
            )
        try:
            values[name] = _convert(known[name], word)
        except ValueError:
            if not _CONVERSIONS.keys() >= set(known[name]):
                raise mt.RunError(
                    f"{name}={word}: the field {name} of the options of {owner} has a type that no "
                    "word can set. Give it the type bool, int, float, str or Path, or one of these "
                    "or None, and check the value in __post_init__."
                ) from None
            wanted = " or ".join(_NAMES[one] for one in known[name])
            raise mt.RunError(f"{name}={word}: this option of {owner} is {wanted}.") from None
    return values


def describe(kind: type[Any] | None) -> str:
    """Lists the options of a recipe in words.

    Args:
        kind: the dataclass, or None.

    Returns:
        One line.
    """
    if kind is None:
        return "It has none."
    hints = typing.get_type_hints(kind, include_extras=True)
    described: list[str] = []
    for field in _fields(kind):
        texts: tuple[str, ...] = getattr(hints[field.name], "__metadata__", ())
        default = _default(field)
        value = "VALUE" if default is dataclasses.MISSING else default
        described.append(f"{field.name}={value}" + "".join(f" ({text})" for text in texts))
    return f"There are: {'; '.join(described)}."


def as_json(options: Any) -> dict[str, Any]:
    """The values of options as JSON values, for a result.

    Args:
        options: a dataclass, or None.

    Returns:
        The value of each option by name, with paths as strings.
    """
    if options is None:
        return {}
    values = dataclasses.asdict(options)
    return {name: str(v) if isinstance(v, Path) else v for name, v in values.items()}


def check_range(options: Any, name: str, low: float, high: float) -> None:
    """Refuses a number that is out of range.

    Raises:
        RunError: the option is outside of `low` to `high`.
    """
    value = getattr(options, name)
    if not low <= value <= high:
        raise mt.RunError(f"{name}={value} is out of range: use {low:g} to {high:g}.")


_NAMES: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a word",
    Path: "a path",
    type(None): "none",
}
_FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def _as_flag(word: str) -> bool:
    if word.lower() not in _FLAGS:
        raise ValueError(word)
    return _FLAGS[word.lower()]


def _as_none(word: str) -> None:
    if word.lower() != "none":
        raise ValueError(word)


_CONVERSIONS: dict[type, Callable[[str], Any]] = {
    type(None): _as_none,
    bool: _as_flag,
    int: int,
    float: float,
    Path: Path,
    str: str,
}


def _fields(kind: type[Any]) -> list["dataclasses.Field[Any]"]:
    """The fields that can be set."""
    return [field for field in dataclasses.fields(kind) if field.init]


def _default(field: "dataclasses.Field[Any]") -> Any:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def _kinds(kind: type[Any]) -> dict[str, tuple[type, ...]]:
    """The types that the value of each option may have."""
    hints = typing.get_type_hints(kind)
    found: dict[str, tuple[type, ...]] = {}
    for field in _fields(kind):
        hint = hints[field.name]
        is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)  # of Optional, too
        found[field.name] = typing.get_args(hint) if is_union else (hint,)
    return found


def _convert(kinds: tuple[type, ...], word: str) -> Any:
    for kind, convert in _CONVERSIONS.items():  # in this order: every word is a string
        if kind in kinds:
            try:
                return convert(word)
            except ValueError:
                continue
    raise ValueError(word)
