"""verified: what `verify --json` prints, and what `verify --against FILE` reads of it."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from multitower.errors import RunError
from multitower.hardware.provenance import versions
from multitower.proof.record import StepRecord, as_facts, from_facts
from multitower.proof.verification import Verification
from multitower.runs.options import RunOptions, flag_of

# What decides the bits, apart from the recipe and its settings.
OPTIONS = (
    "towers",
    "steps",
    "global_batch",
    "seed",
    "shard_update",
    "stages",
    "remat",
    "sync_every",
    "outer_lr",
    "outer_momentum",
    "local_state",
    "asynchronous",
    "max_staleness",
    "rotation",
    "stale_scale",
    "momentum_correction",
    "clip_norm",
    "ema_decay",
    "compute_dtype",
)
_PATH = "data"  # a setting that may differ: the same files lie elsewhere


class Verified(NamedTuple):
    """The first run of a verification.

    Attributes:
        run: what it is called, such as "2 x 1".
        recipe: its name.
        settings: of the recipe.
        options: of the run, as words for `RunOptions`.
        steps: its record.
    """

    run: str
    recipe: str
    settings: dict[str, str]
    options: dict[str, Any]
    steps: list[StepRecord]

    def settings_for(self, given: Mapping[str, str], path: Path) -> dict[str, str]:
        """The settings of a run to be compared: what is given must be the same.

        Raises:
            RunError: it is not.
        """
        kept = {name: value for name, value in self.settings.items() if name != _PATH}
        for name, value in given.items():
            if name != _PATH and kept.get(name) != value:
                raise RunError(
                    f"{path} holds a run with {name}={kept.get(name, 'its default')}, and this "
                    f"command has {name}={value}: leave it out, or compare with another run."
                )
        return {**kept, **given}

    def options_for(self, given: RunOptions, path: Path) -> RunOptions:
        """The options of a run to be compared: what is given must be the same.

        Raises:
            RunError: it is not.
        """
        for name in OPTIONS:
            value, there = getattr(given, name), self.options[name]
            if value not in (getattr(RunOptions, name), there):
                said = flag_of(name) if isinstance(value, bool) else f"{flag_of(name)} {value}"
                raise RunError(
                    f"{path} holds a run with {name} {there}, and this command has {said}: leave "
                    "it out, or compare with another run."
                )
        return replace(given, **{name: self.options[name] for name in OPTIONS})


def verified_facts(
    found: Verification, recipe: str, settings: Mapping[str, str], options: RunOptions
) -> dict[str, Any]:
    """What a verification has found, for JSON.

    Args:
        found: that.
        recipe: the recipe's name.
        settings: of the recipe.
        options: of the runs.
    """
    return {
        "recipe": recipe,
        "settings": dict(settings),
        "options": {name: getattr(options, name) for name in OPTIONS},
        "versions": versions(),
        "runs": list(found.runs),
        "same_bits": not found.differences,
        "fingerprints": found.fingerprints,
        "parts": found.parts,
        "differences": [str(one) for one in found.differences],
        "first_run": as_facts(found.records[0]),
    }


def read_verified(path: Path) -> Verified:
    """Reads the first run from a file with what `verify --json` has printed.

    Raises:
        RunError: there is no such file, or it holds something else.
    """
    try:
        return verified_from(path.read_text())
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it holds something else"
        raise RunError(
            f"--against {path}: cannot be read ({why}). Name a file with what `multitower verify "
            "RECIPE --json > FILE` has printed."
        ) from error


def verified_from(text: str) -> Verified:
    """The first run from what `verify --json` has printed."""
    facts = json.loads(text)
    return Verified(
        str(facts["runs"][0]),
        str(facts["recipe"]),
        dict(facts["settings"]),
        {name: facts["options"][name] for name in OPTIONS},
        from_facts(facts["first_run"]),
    )
