"""verified: the output of `verify --json`, which `verify --against FILE` reads."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from multitower.errors import RunError
from multitower.hardware.provenance import versions
from multitower.proof.record import StepRecord, as_facts, from_facts
from multitower.proof.verification import Verification
from multitower.recipes.catalog import find_recipe, option_names
from multitower.recipes.definition import Recipe
from multitower.runs.options import OF_UPDATES, RunOptions, flag_of
from multitower.steps.local.options import OUTER_LR, OUTER_MOMENTUM
from multitower.steps.rotation.options import RotationOptions

# The options that determine the bits, besides the recipe and its settings.
OPTIONS = (
    "towers",
    "steps",
    "global_batch",
    "seed",
    "shard_update",
    "stages",
    "remat",
    *OF_UPDATES,
)
# Software that may compute other bits in another version.
_DECIDE_BITS = ("jax", "jaxlib", "numpy", "optax", "multitower")
_PATH = "data"  # a setting that may differ: the same files may be in another directory


class Verified(NamedTuple):
    """The first run of a verification.

    Attributes:
        run: the name of the run, such as "2 x 1".
        recipe: the name of the recipe.
        settings: the settings of the recipe, as text.
        options: the options of the run, as for `RunOptions`.
        steps: the record of its steps.
        versions: of the software that made it, by name.
    """

    run: str
    recipe: str
    settings: dict[str, str]
    options: dict[str, Any]
    steps: list[StepRecord]
    versions: Mapping[str, str] = {}

    def other_software(self) -> str | None:
        """What of the software that decides the bits differs here, in words; None if nothing."""
        now = versions()
        differ = [one for one in _DECIDE_BITS if self.versions.get(one, now[one]) != now[one]]
        there, here = (
            " and ".join(f"{name} {of[name]}" for name in differ) for of in (self.versions, now)
        )
        return f"made with {there}, and this is {here}" if differ else None

    def settings_for(self, recipe: str, given: Mapping[str, str], path: Path) -> dict[str, str]:
        """The settings of a run to be compared: what is given must mean the same.

        Args:
            recipe: as for `find_recipe`.
            given: the settings that were typed, as words.
            path: of the file, for messages.

        Raises:
            RunError: it does not, or the file holds a run of another recipe.
        """
        data = {name: value for name, value in given.items() if name == _PATH}
        merged = {**self.settings, **given}
        # Another recipe has other options; typed ones stay, so that unknown ones are refused.
        known = {name: merged[name] for name in merged.keys() & {*option_names(recipe), *given}}
        if (named := find_recipe(recipe, known).name) != self.recipe:
            raise RunError(f"{path} holds a run of {self.recipe}, and this is {named}.")
        before = {**self.settings, **data}
        there, here = (find_recipe(recipe, settings).options for settings in (before, merged))
        for name, value in given.items():
            if name != _PATH and there.get(name) != here.get(name):
                raise RunError(
                    f"{path} holds a run with {name}={self.settings.get(name, 'its default')}, and "
                    f"this command has {name}={value}: leave it out, or compare with another run."
                )
        return before

    def options_for(self, given: Mapping[str, Any], path: Path, recipe: Recipe) -> RunOptions:
        """The options of a run to be compared: what is given must mean the same.

        Args:
            given: the options that were typed, also where they equal their defaults.
            path: of the file, for messages.
            recipe: of the runs.

        Raises:
            RunError: it does not.
            ArgumentError: towers that do not divide into the groups of a rotation.
        """
        before = RunOptions(**self.options)
        options = RunOptions(**{**self.options, **given})
        there, here = (_meant(one, recipe) for one in (before, options))
        for name in OPTIONS:
            if here[name] != there[name]:
                raise RunError(
                    f"{path} holds a run {_held(name, getattr(before, name))}, and this command "
                    f"has {_said(name, given[name])}: leave it out, or compare with another run."
                )
        return replace(options, **{name: getattr(before, name) for name in OPTIONS})


def _meant(options: RunOptions, recipe: Recipe) -> dict[str, Any]:
    """The values of options, with the defaults of the recipe and of updates filled in."""
    values = {name: getattr(options, name) for name in OPTIONS}
    defaults: dict[str, Any] = {
        "global_batch": recipe.global_batch,
        "clip_norm": recipe.clip_norm,
        "ema_decay": recipe.ema_decay,
    }
    if options.sync_every is not None:
        defaults |= {"outer_lr": OUTER_LR, "outer_momentum": OUTER_MOMENTUM}
    if options.asynchronous and options.towers is not None:
        values["rotation"] = order = options.rotation_order()
        groups = RotationOptions(options.max_staleness, order, None).num_groups(options.towers)
        defaults |= {"max_staleness": groups - 1, "rotation": tuple(range(groups))}
        defaults["stale_scale"] = 0
    return values | {name: one for name, one in defaults.items() if values[name] is None}


def _said(name: str, value: Any) -> str:
    """An option as it is typed."""
    return flag_of(name) if value is None or isinstance(value, bool) else f"{flag_of(name)} {value}"


def _held(name: str, value: Any) -> str:
    if value == getattr(RunOptions, name):
        return f"without {flag_of(name)}"
    return f"with {_said(name, value)}"


def verified_facts(
    found: Verification, recipe: str, settings: Mapping[str, str], options: RunOptions
) -> dict[str, Any]:
    """The result of a verification as JSON values.

    Args:
        found: the result.
        recipe: the recipe's name.
        settings: the settings of the recipe.
        options: the options of the runs.
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
    """Reads the first run from a file with the output of `verify --json`.

    Raises:
        RunError: the file cannot be read, or holds something else.
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
    """The first run from the output of `verify --json`."""
    facts = json.loads(text)
    return Verified(
        str(facts["runs"][0]),
        str(facts["recipe"]),
        dict(facts["settings"]),
        {name: facts["options"][name] for name in OPTIONS},
        from_facts(facts["first_run"]),
        dict(facts.get("versions", {})),
    )
