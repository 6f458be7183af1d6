"""The result of a run in words: main figures, devices, settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multitower.runs.report_page.wording import ABSENT, counted, duration, name, number, score

_NOUNS = {"cpu": "CPU device", "gpu": "GPU", "tpu": "TPU"}
# Options whose defaults a run fills in, and their names in its result.
_FILLED_IN = {
    "devices": "devices",
    "towers": "towers",
    "steps": "steps",
    "global_batch": "batch_size",
    "seed": "seed",
    "clip_norm": "clip_norm",
}


def describe(result: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The text of the page above and below the curves.

    Args:
        result: the result of the run, as in `result.json`.
        config: as in `config.json`.

    Returns:
        The values for the template, by name.

    Example:
        >>> from multitower.runs.report_page.overview import describe
        >>> config = {"recipe": "digits", "options": {"seed": None}}
        >>> page = describe({"recipe": "digits", "test_accuracy": 0.98, "seed": 7}, config)
        >>> page["figures"][0], page["of_run"]
        (('test accuracy', '98 %'), [('recipe', 'digits', 'digits'), ('seed', None, 7)])
    """
    scores = sorted(key for key in result if key.startswith("test_"))
    speed: float | None = result.get("examples_per_s")
    best: Mapping[str, float] = result.get("best") or {}
    asked: Mapping[str, Any] = config.get("options") or {}
    return {
        "place": place_in_words(result),
        "figures": [
            *((name(key), score(key, result[key])) for key in scores),
            ("steps", number(result.get("steps"))),
            (
                "examples per second",
                number(speed if speed is None or speed < 100 else round(speed)),
            ),
            ("wall time", duration(result.get("seconds"))),
        ],
        "best": ", ".join(f"{name(key)} {score(key, value)}" for key, value in best.items()),
        "fingerprint": result.get("fingerprint", ABSENT),
        "caution": _caution(result),
        "profile": profile_in_words("profile", result["profile"]) if "profile" in result else None,
        "slices": _slices(result),
        "of_run": [
            ("recipe", config.get("recipe"), result.get("recipe")),
            *(
                (name(key), value, result.get(_FILLED_IN.get(key, ""), value))
                for key, value in asked.items()
            ),
        ],
        "of_recipe": {**(config.get("settings") or {}), **(result.get("options") or {})},
    }


def place_in_words(result: Mapping[str, Any]) -> str:
    """The steps, towers and devices of a run, in one line of text.

    Example:
        >>> from multitower.runs.report_page.overview import place_in_words
        >>> host = {"platform": "gpu", "device_kind": "NVIDIA H100"}
        >>> place_in_words({"steps": 9, "towers": 8, "devices": 2, "host": host})
        '9 steps, 8 towers on 2 GPUs (NVIDIA H100)'
    """
    host: Mapping[str, Any] = result.get("host") or {}
    platform, kind = str(host.get("platform", "device")), host.get("device_kind")
    devices = int(result.get("devices") or 1)
    simulated = platform == "cpu" and devices > _num_processes(result)
    noun = "simulated CPU device" if simulated else _NOUNS.get(platform, platform)
    of_kind = f" ({kind})" if kind and kind != platform else ""
    parts = [
        counted(int(result[key]), noun_of)
        for key, noun_of in (("steps", "step"), ("towers", "tower"))
        if key in result
    ]
    return f"{', '.join(parts)} on {counted(devices, noun)}{of_kind}"


def profile_in_words(directory: Path | str, steps: str) -> str:
    """Explains how to open the profile of a run.

    Example:
        >>> from multitower.runs.report_page.overview import profile_in_words
        >>> profile_in_words("runs/a/profile", "10:13")[:40]
        'The profile of steps 10:13 is in runs/a/'
    """
    return (
        f"The profile of steps {steps} is in {directory}. Open it with xprof, a "
        f"package of Python: xprof --logdir {directory}. Or drop its perfetto_trace.json.gz on "
        "ui.perfetto.dev. memory.prof, the devices' memory after the last of them, is for pprof."
    )


def _caution(result: Mapping[str, Any]) -> str | None:
    """A caution that devices share the cores of one machine; None where they do not."""
    host: Mapping[str, Any] = result.get("host") or {}
    if host.get("platform") != "cpu":
        return None
    devices, cores = int(result.get("devices") or 1), host.get("cpu_cores")
    if devices == 1:
        return "This run used one device, the CPU."
    shared = f"the {counted(int(cores), 'core')}" if cores else "the cores"
    processes = _num_processes(result)
    if processes == 1:
        return f"These {devices} devices are simulated: they share {shared} of one machine."
    return (
        f"These {counted(devices, 'CPU device')} belong to {processes} processes: those on one "
        "machine share its cores."
    )


def _num_processes(result: Mapping[str, Any]) -> int:
    """How many processes made a run; a result of one process does not say so."""
    return int(result.get("processes") or 1)


def _slices(result: Mapping[str, Any]) -> str:
    rows, towers = result.get("batch_size"), result.get("towers")
    if not rows or not towers:
        return "Every tower takes its own slice of each batch."
    even = rows % towers == 0
    each = counted(rows // towers, "example") if even else f"about {rows / towers:.1f} examples"
    batch = f"Each batch of {counted(rows, 'example')}"
    if towers == 1:
        return f"{batch} goes to one tower."
    return f"{batch} is cut into {counted(towers, 'tower')} of {each}."
