"""An error of the library in the words of the command line: `stages=4` is said as `--stages 4`."""

import dataclasses
import re

from multitower.runs.options import RunOptions, flag_of

# Arguments of the library that are no options of a run, and the options that set them.
_OPTION_OF = {"updates": "asynchronous", "outer_optimizer": "outer_lr"}
_OF_OTHER_COMMANDS = ("machines", "memory", "predict", "rounds", "temperature")
_NAMES = "|".join(
    [
        *(field.name for field in dataclasses.fields(RunOptions)),
        *_OPTION_OF,
        *_OF_OTHER_COMMANDS,
    ]
)
# No match where a message shows code with dots, steps=..., or in a path: runs/seed=3/1.
_VALUE = r"\([\d, ]*\)|\[[^]]*\]|'[^']*'|-?[\w.]*\w"
_WITH_VALUE = re.compile(rf"(?<![\w/=.-])({_NAMES})=(?!\.\.)({_VALUE})?(?![\w.,-]*/)")
_LEAVE = re.compile(rf"\b([Ll]eave )({_NAMES})\b(?! *=)")


def in_flags(message: str) -> str:
    """An error message with flags in the place of arguments.

    Example:
        >>> from multitower.cli.wording import in_flags
        >>> in_flags("stages=4 needs towers=, such as towers=8, or leave stages out.")
        '--stages 4 needs --towers, such as --towers 8, or leave --stages out.'
    """
    message = _LEAVE.sub(lambda found: found[1] + _flag(found[2], None), message)
    message = re.sub(r"\bskip_nonfinite\b(=True)?", f"{flag_of('on_nonfinite')} skip", message)
    return _WITH_VALUE.sub(lambda found: _flag(found[1], found[2]), message)


def _flag(name: str, value: str | None) -> str:
    option = _OPTION_OF.get(name, name)
    flag = flag_of(option)
    if option != name or value in (None, "True", "False", "None"):
        return flag
    said = re.sub(r"[][()' ]|jnp\.", "", value).rstrip(",")
    return f"{flag} {said.replace(',', 'x') if name == 'layout' else said}"
