"""Rewrites messages of the library for the command line: `stages=4` becomes `--stages 4`."""

import dataclasses
import re
import shlex
from collections.abc import Mapping
from typing import Any

import jax

from multitower.runs.options import RunOptions, flag_of

# Arguments of the library that an option of another name sets.
_OPTION_OF = {"updates": "asynchronous", "outer_optimizer": "outer_lr"}
_OF_OTHER_COMMANDS = ("machines", "memory", "predict", "rounds", "simulated_devices", "temperature")
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
# What a message says in both ways: add evaluate_every (--evaluate-every N).
_IN_BOTH = re.compile(rf"\b({_NAMES})(=({_VALUE}))? \((--[^()]*)\)")
_CALLS = (
    (re.compile(rf"\btrain_step\(({_NAMES})=\.\.\.\)"), lambda found: flag_of(found[1])),
    (re.compile(r"\b(?:mt\.)?configure\(simulated_devices=(\d+)\)"), r"--simulate \1"),
)
_CHANGES = ", choose another run_dir, or pass allow_changes=True"  # an argument of Trainer.fit
_SKIPS = re.compile(r"\bskip_nonfinite\b(=True)?( \(on_nonfinite='skip' of a Trainer\))?")
_LEAVE = re.compile(rf"\b([Ll]eave )({_NAMES})\b(?! *=)")


def in_flags(message: str) -> str:
    """An error or a warning with flags in place of arguments.

    Example:
        >>> from multitower.cli.wording import in_flags
        >>> in_flags("stages=4 needs towers=, such as towers=8, or leave stages out.")
        '--stages 4 needs --towers, such as --towers 8, or leave --stages out.'
    """
    message = message.replace(_CHANGES, ", or begin another run in another --run-dir")
    message = _IN_BOTH.sub(r"\4", message)
    for pattern, said in _CALLS:
        message = pattern.sub(said, message)
    message = _LEAVE.sub(lambda found: found[1] + _flag(found[2], None), message)
    message = _SKIPS.sub(f"{flag_of('on_nonfinite')} skip", message)
    return _WITH_VALUE.sub(lambda found: _flag(found[1], found[2]), message)


def options_in_flags(options: Mapping[str, Any]) -> str:
    """Options of a layout as flags, without the devices.

    Example:
        >>> from multitower.cli.wording import options_in_flags
        >>> options_in_flags({"devices": 8, "towers": 8, "layout": (2, 4), "shard_update": True})
        '--towers 8 --layout 2x4 --shard-update'
    """
    given = {name: value for name, value in options.items() if name != "devices"}
    return " ".join(_flag(name, repr(value)) for name, value in given.items()) or "(no flag)"


def _simulates() -> bool:
    """Whether devices are simulated: `--simulate` says how many, and excludes `--devices`."""
    config: Any = jax.config  # its options are not in its type
    return config.jax_platforms == "cpu" and config.jax_num_cpu_devices > 0


def _flag(name: str, value: str | None) -> str:
    option = _OPTION_OF.get(name, name)
    flag = flag_of("simulated_devices" if name == "devices" and _simulates() else option)
    if option != name or value in (None, "True", "False", "None"):
        return flag
    if value.startswith("'"):
        return f"{flag} {shlex.quote(value[1:-1])}"
    said = re.sub(r"[][()' ]|jnp\.", "", value).rstrip(",")
    return f"{flag} {said.replace(',', 'x') if name == 'layout' else said}"
