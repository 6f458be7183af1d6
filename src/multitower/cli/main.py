"""The command line: `multitower train ...`.

Exit codes: 0 for success; 1 if `verify` or `scale` finds a difference, or no layout of `plan` fits;
2 for wrong flags or settings, or a run that cannot continue, with one line that explains it; 130
when stopped with Ctrl-C (SIGINT) and 143 with SIGTERM, after the step was finished and saved; 134
for one of several processes that JAX ends because another is missing; 141 if nobody reads what a
command prints. A run goes on without its lines.
"""

import importlib.metadata
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from multitower.errors import (
    Interrupted,
    MultitowerError,
    MultitowerWarning,
    RunError,
    did_you_mean,
    install_command,
)

# Those of the extra `cli`, so that one command is enough (guarded by tests/project/test_extras.py).
_PACKAGES = (
    "jinja2",
    "matplotlib",
    "orbax-checkpoint",
    "pillow",
    "rich",
    "scikit-learn",
    "tensorboardX",
    "tyro",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: the words after `multitower`; those of the process by default.

    Returns:
        The exit code.

    Raises:
        SystemExit: `--help`, or flags that cannot be understood (code 2).

    Example:
        >>> from multitower.cli.main import main
        >>> main(["train", "nothing"])
        2
    """
    try:
        import tyro

        from multitower.cli import console
        from multitower.cli.doctor import doctor
        from multitower.cli.flags.settings import expand_flags
        from multitower.cli.plan import plan
        from multitower.cli.resume import evaluate, resume
        from multitower.cli.sample import sample
        from multitower.cli.scale import scale
        from multitower.cli.starting.local_processes import run_local_processes, split_off_processes
        from multitower.cli.train import train
        from multitower.cli.verify import verify
        from multitower.cli.wording import in_flags
        from multitower.processes.leaving import await_verdict_if_lost, leave_if_together
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in ("rich", "tyro"):
            raise
        print(
            f"multitower: the command line needs {library}, which is not installed. "
            f"Run: {install_command(*_PACKAGES)}",
            file=sys.stderr,
        )
        return 2
    with warnings.catch_warnings():
        warnings.simplefilter("always", MultitowerWarning)
        warnings.showwarning = console.make_show_warning()
        try:
            words = sys.argv[1:] if arguments is None else arguments
            count, words = split_off_processes(words)
            if count is not None:
                return run_local_processes(count, words)
            commands: dict[str, Callable[..., Any]] = {
                "train": train,
                "resume": resume,
                "eval": evaluate,
                "sample": sample,
                "verify": verify,
                "scale": scale,
                "plan": plan,
                "doctor": doctor,
            }
            with_recipe = ("train", "verify", "scale", "plan")
            words = expand_flags(words, {name: commands[name] for name in with_recipe})
            code = _run_command(tyro, words, commands)
        except Interrupted as stop:
            console.show_error(str(stop))
            return 128 + stop.signal
        except (MultitowerError, PermissionError) as error:  # up to 3.13 Path.exists raises these
            await_verdict_if_lost(error)
            console.show_error(in_flags(str(error)))
            leave_if_together(2)
            return 2
        except Exception as error:
            leave_if_together(1, error)
            raise
        except KeyboardInterrupt:
            console.show_error("stopped")
            leave_if_together(130)
            return 130
    return code or 0


def _run_command(
    tyro: Any, words: Sequence[str], commands: Mapping[str, Callable[..., Any]]
) -> int | None:
    config = (tyro.conf.OmitArgPrefixes,)
    if words and words[0] in commands:  # alone: its errors point to its own --help
        name = words[0]
        prog = f"multitower {name}"
        return tyro.cli(commands[name], prog=prog, args=words[1:], config=config)
    if list(words) == ["--version"]:
        print(f"multitower {importlib.metadata.version('multitower')}")
        return 0
    if words and not words[0].startswith("-"):
        raise RunError(
            f"there is no command {words[0]!r}. {did_you_mean(words[0], commands)}There are: "
            f"{', '.join(commands)}. multitower --help describes them."
        )
    return tyro.extras.subcommand_cli_from_dict(  # --help, and flags that no command has
        dict(commands),
        prog="multitower",
        description=(
            "Data-parallel training: the same answer on any number of devices. multitower COMMAND "
            "--help lists the flags of a command, multitower --version shows the version."
        ),
        args=words,
        config=config,
    )
