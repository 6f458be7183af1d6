"""`--layouts 1x4,2x2`: a command in several layouts of simulated processes, one after the other."""

import re
import signal
import tempfile
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

from multitower.cli.flags.shared import flag
from multitower.cli.starting.local_processes import run_local_processes
from multitower.cli.starting.together import Together
from multitower.errors import DeviceError, Interrupted, RunError

Layouts = Annotated[
    str | None,
    flag(
        "PxD,PxD",
        "Start P processes on this machine with D simulated devices each, for each of these "
        "layouts.",
        "one process",
    ),
]


class ProcessLayout(NamedTuple):
    """How many processes a run has, and how many devices each of them drives."""

    processes: int
    devices: int

    def __str__(self) -> str:
        return f"{self.processes} x {self.devices}"

    @property
    def total(self) -> int:
        """The devices of all processes."""
        return self.processes * self.devices


def read_layouts(text: str) -> list[ProcessLayout]:
    """The layouts that `--layouts` names.

    Raises:
        RunError: there is none, or a word is not a layout.

    Example:
        >>> from multitower.cli.starting.layouts import read_layouts
        >>> [str(layout) for layout in read_layouts("1x4,2x2")]
        ['1 x 4', '2 x 2']
    """
    words = text.replace(",", " ").split()
    found = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", word) for word in words]
    if not words or None in found:
        wrong = next((word for word, one in zip(words, found, strict=True) if one is None), "")
        raise RunError(
            f"--layouts {text}: {wrong!r} is not a layout. Give processes x devices of each, such "
            "as --layouts 1x4,2x2 for one process with four devices and two with two each."
        )
    return [ProcessLayout(int(one[1]), int(one[2])) for one in found if one is not None]


def check_layouts(layouts: Sequence[ProcessLayout], towers: int | None) -> None:
    """Refuses a layout in which devices would have no tower.

    Raises:
        DeviceError: it has more devices than there are towers.
    """
    for layout in layouts:
        if towers is not None and layout.total > towers:
            raise DeviceError(
                f"the layout {layout} has {layout.total} devices, and {towers} towers cannot fill "
                f"them: use --towers {layout.total}, or layouts of at most {towers} devices."
            )


def refuse_with_layouts(together: Together, **others: object) -> None:
    """Refuses flags that choose processes or devices in another way.

    Args:
        together: the processes that the command line names.
        **others: other flags by name; None or False if not given.

    Raises:
        RunError: one of them is given.
    """
    given = [f"--{name.replace('_', '-')}" for name, value in others.items() if value]
    if together.settings():
        given.append("--distributed")
    if "--devices" in given:
        raise RunError(
            "--layouts simulates its processes and their devices: leave --devices out. For "
            "processes on accelerators, let your cluster's launcher start them with --distributed, "
            "once for each layout."
        )
    if given:
        raise RunError(f"--layouts says which processes and devices to use: leave {given[0]} out.")


def run_in_layout(
    layout: ProcessLayout, words: Sequence[str], environment: Mapping[str, str] | None = None
) -> str:
    """Runs a command as the processes of a layout, and waits for them.

    Args:
        layout: the numbers of simulated processes and devices.
        words: the words of the command after `multitower`, with `--json`.
        environment: environment variables for its processes, added to those of this one.

    Returns:
        The output of process 0. Its exit code was 0, or 1 for a difference.

    Raises:
        RunError: a process failed; its messages were shown, and the others are ended.
        KeyboardInterrupt: the processes were stopped with Ctrl-C.
        Interrupted: the processes were stopped with SIGTERM.
    """
    with tempfile.TemporaryFile("w+") as out:
        words = [*words, "--simulate", str(layout.devices)]
        code = run_local_processes(layout.processes, words, stdout=out, environment=environment)
        out.seek(0)
        text = out.read()
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code == 128 + signal.SIGTERM:
        raise Interrupted("stopped by SIGTERM", signal.SIGTERM)
    if code not in (0, 1) or not text.strip():
        raise RunError(
            f"the layout {layout} failed with exit code {code}: the lines above say why. No "
            "process of it is left."
        )
    return text


def started_words(
    command: str, recipe: str, settings: Mapping[str, str], **flags: object
) -> list[str]:
    """The words of a command that other processes run.

    Args:
        command: the name of the command.
        recipe: the name of its recipe.
        settings: the settings of the recipe.
        **flags: the flags, with or without dashes; None and False for those that are not given.

    Example:
        >>> from multitower.cli.starting.layouts import started_words
        >>> started_words("scale", "digits", {"lr": "1"}, batch_size=8, strong=True, seed=None)
        ['scale', 'digits', '--batch-size', '8', '--strong', '--set', 'lr=1']
    """
    words = [command, recipe]
    for name, value in flags.items():
        if value is None or value is False:
            continue
        word = name if name.startswith("--") else f"--{name.replace('_', '-')}"
        words += [word] if value is True else [word, str(value)]
    for name, value in settings.items():
        words += ["--set", f"{name}={value}"]
    return words
