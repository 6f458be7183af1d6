"""Flags that several commands have."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro

from multitower.cli.flags.settings import SET_HELP
from multitower.recipes.catalog import SHIPPED

WHERE = tyro.conf.create_mutex_group(required=False, title="where to run")


def flag(metavar: str, text: str, default: str) -> Any:
    """A flag with its help text."""
    return tyro.conf.arg(metavar=metavar, help=text, help_behavior_hint=f"(default: {default})")


def switch(text: str) -> Any:
    """Help for a flag without a value, to be used with `tyro.conf.FlagCreatePairsOff`."""
    return tyro.conf.arg(help=text, help_behavior_hint="")


def typed(**flags: Any) -> dict[str, Any]:
    """The flags that were typed; others are None, or False for switches.

    A flag that was typed with the default value counts, too.

    Example:
        >>> from multitower.cli.flags.shared import typed
        >>> typed(seed=0, towers=None, local_state="keep", shard_update=False)
        {'seed': 0, 'local_state': 'keep'}
    """
    return {name: v for name, v in flags.items() if v is not None and v is not False}


def _whole_number(words: list[str]) -> int:
    try:
        return int(words[0])
    except ValueError:
        raise ValueError(f"{words[0]!r} is not a whole number, such as 8.") from None


def _number(words: list[str]) -> float:
    try:
        return float(words[0])
    except ValueError:
        raise ValueError(f"{words[0]!r} is not a number, such as 0.5.") from None


def _path(words: list[str]) -> Path:
    if not words[0]:  # from an empty variable of a shell; to Python it is the working directory
        raise ValueError("'' is no path, such as runs/1.")
    try:
        return Path(words[0]).expanduser()  # shells leave the ~ of --run-dir=~/x as it is
    except RuntimeError as error:
        raise ValueError(f"{words[0]!r} is no path: {error}") from None


def one_of(*choices: str) -> Any:
    """Reads one of these words; tyro itself would also offer None."""

    def read(words: list[str]) -> str:
        if words[0] not in choices:
            raise ValueError(f"{words[0]!r} is not one of {', '.join(choices)}.")
        return words[0]

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="|".join(choices),
        instance_from_str=read,
        is_instance=lambda value: value is None or value in choices,
        str_from_instance=lambda value: [str(value)],
    )


def _from_word(convert: Callable[[list[str]], float | Path], metavar: str) -> Any:
    """Reads a word in our own way. For a wrong one, tyro's own message lists all its attempts."""
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=convert,
        is_instance=lambda value: value is None or isinstance(value, int | float | Path),
        str_from_instance=lambda value: [str(value)],
    )


WholeNumber = Annotated[int | None, _from_word(_whole_number, "N")]
Count = Annotated[int, _from_word(_whole_number, "N")]
Number = Annotated[float | None, _from_word(_number, "X")]
FileOrDirectory = Annotated[Path | None, _from_word(_path, "PATH")]

Devices = Annotated[
    WholeNumber,
    WHERE,
    flag(
        "N",
        "Use the first N accelerators, or CPU devices if there are none.",
        "all accelerators, or two simulated devices",
    ),
]
Simulate = Annotated[
    WholeNumber,
    WHERE,
    flag("N", "Use N simulated CPU devices, even if there are accelerators.", "none"),
]
Data = Annotated[
    FileOrDirectory,
    flag(
        "DIR",
        "Read the data set from this directory; gpt also reads one text file.",
        "the directory of --download; for gpt, Python's standard library",
    ),
]
Steps = Annotated[WholeNumber, flag("N", "Make N updates.", "the recipe's number")]
Epochs = Annotated[
    Number,
    flag("X", "Make X passes over the training data instead of --steps.", "see --steps"),
]
EarlyStopping = Annotated[
    str | None,
    flag(
        "NAME[:N[:min]]",
        "With --evaluate-every: end the run when N test phases in a row, 3 by default, have "
        "not improved the test score NAME, upwards or with :min downwards.",
        "never",
    ),
]
MinDelta = Annotated[
    Number,
    flag(
        "X",
        "With --early-stopping: a score must be better by more than X to count as improved.",
        "0",
    ),
]
ExtraMetrics = Annotated[
    str | None,
    flag(
        "NAMES",
        "Report metrics of the update too: gradient_norm, learning_rate; separate them by commas.",
        "none",
    ),
]
EmaDecay = Annotated[
    Number,
    flag("X", "Keep a moving average of the parameters, which is what is scored.", "the recipe's"),
]
OnNonfinite = Annotated[
    str | None,
    one_of("stop", "skip"),
    flag(
        "stop|skip",
        "At a loss or parameter that is not finite: end the run, or make no update in that step.",
        "stop",
    ),
]
BatchSize = Annotated[
    WholeNumber,
    flag(
        "N",
        "Take N examples per step, over all towers that take part in it.",
        "the recipe's number",
    ),
]
Seed = Annotated[
    WholeNumber,
    flag("N", "Seed of the initial parameters and the order of the examples.", "0"),
]
Synthetic = Annotated[
    bool, tyro.conf.FlagCreatePairsOff, switch("Use synthetic images or text instead of files.")
]
ShardUpdate = Annotated[
    bool,
    tyro.conf.FlagCreatePairsOff,
    switch("Split the optimizer state over the devices, to save memory."),
]
ShardParams = Annotated[
    bool,
    tyro.conf.FlagCreatePairsOff,
    switch("Without --towers: split the parameters too, for models larger than a device."),
]
ClipNorm = Annotated[
    Number,
    flag("X", "Clip the mean gradient to this global norm.", "the recipe's"),
]
ComputeDtype = Annotated[
    str | None,
    one_of("float32", "bfloat16", "float16"),
    flag(
        "float32|bfloat16|float16",
        "bfloat16 or float16 for mixed precision, faster on GPUs and slower on CPUs.",
        "float32",
    ),
]
SetOptions = Annotated[
    tuple[str, ...],
    tyro.conf.UseAppendAction,
    tyro.conf.arg(name="set", metavar="NAME=VALUE", help=SET_HELP, help_behavior_hint=""),
]
AsJson = Annotated[
    bool,
    tyro.conf.FlagCreatePairsOff,
    tyro.conf.arg(name="json", help="Print JSON, for programs.", help_behavior_hint=""),
]
RecipeName = Annotated[
    str,
    tyro.conf.Positional,
    tyro.conf.arg(
        metavar="RECIPE",
        help=f"One of {', '.join(SHIPPED)}, or your own recipe, FILE.py.",
        help_behavior_hint="",
    ),
]
RunDirectory = Annotated[
    Path,
    _from_word(_path, "DIR"),
    tyro.conf.Positional,
    tyro.conf.arg(metavar="DIR", help="The directory of the run.", help_behavior_hint=""),
]
