"""A scaling measurement as tables and sentences, for the terminal and for a page."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from multitower.hardware.memory import ARRAYS
from multitower.runs.report_page.wording import ABSENT, counted, number

_TITLES = {"strong": "Strong scaling", "weak": "Weak scaling"}
_SPEED_HEADS = (
    "examples per step",
    "ms per step",
    "examples/s",
    "speed-up",
    "efficiency",
    "recompiled",
)
_PARTS = {
    "input_s": "input",
    "host_s": "host",
    "step_s": "step",
    "tower_programs_s": "tower programs",
    "reduction_s": "reduction",
    "update_s": "update",
}


class Table(NamedTuple):
    """A table of text.

    Attributes:
        title: the title of the table.
        heads: the headings of the columns.
        rows: the cells; the first one of a row is its heading.
    """

    title: str
    heads: tuple[str, ...]
    rows: list[tuple[str, ...]]


def speed_tables(result: Mapping[str, Any]) -> list[Table]:
    """Shows the speed of a step on every number of devices, for each kind of scaling.

    Args:
        result: from `multitower.scaling.measure.scale`.

    Returns:
        One table for each kind that was measured.
    """
    return [
        Table(
            _title(kind, result),
            (_where_head(result), *_SPEED_HEADS, _memory_head(result[kind])),
            [_speed_row(entry) for entry in result[kind]],
        )
        for kind in _TITLES
        if result[kind]
    ]


def split_tables(result: Mapping[str, Any]) -> list[Table]:
    """Shows the time of each part of a step, in milliseconds; a table for each kind of scaling."""
    heads = (_where_head(result), *_PARTS.values())
    return [
        Table(
            f"{_TITLES[kind]}: ms in each part of a step",
            heads,
            [
                (_where(entry), *(_ms(entry["split"][part]) for part in _PARTS))
                for entry in result[kind]
            ],
        )
        for kind in _TITLES
        if result[kind] and not _updates(result)
    ]


def split_in_words(result: Mapping[str, Any]) -> str:
    """Explains the parts of a step.

    Example:
        >>> from multitower.scaling.words import split_in_words
        >>> split_in_words({"sync_every": 16, "counted_steps": 32})[:69]
        'A time is the mean over 32 steps, of which one in 16 ends with a meet'
    """
    if updates := _updates(result):
        return updates
    text = (
        "input: make a batch on the host and copy it to the devices (training does this ahead of "
        "need). host: until step() returns; on CPUs small programs may run inside it. step: until "
        "all devices are done."
    )
    if result.get("stages") is not None:
        return (
            f"{text} With stages, programs of several devices overlap in a step. So each program "
            "is measured alone: from the host's view, with the moves before it."
        )
    if result["towers"] is None:
        return f"{text} With --towers T, the parts of a step are measured too."
    return f"{text} Waiting for each part makes tower programs, reduction and update longer."


def _updates(result: Mapping[str, Any]) -> str | None:
    """A sentence about local and asynchronous updates, whose parts are not measured; or None."""
    counted_steps = result.get("counted_steps")
    if (every := result.get("sync_every")) is not None:
        return (
            f"A time is the mean over {counted_steps} steps, of which one in {every} ends with a "
            "meeting of the towers. The parts of a step are not measured with --sync-every."
        )
    if result.get("asynchronous"):
        return (
            f"A step is one update, and a time is the mean over {counted_steps} of them, in whole "
            "rotations. Updates overlap, so that their parts are not measured with --asynchronous."
        )
    return None


def caution(result: Mapping[str, Any]) -> str | None:
    """A caution that simulated devices cannot show a speed-up; None for other devices.

    Example:
        >>> from multitower.scaling.words import caution
        >>> print(caution({"simulated": True, "layouts": None, "host": {"cpu_cores": 2}}))
        Simulated devices share the 2 cores of one machine, so they cannot show a speed-up.
    """
    if not result["simulated"]:
        return None
    cores = result["host"].get("cpu_cores")
    shared = f"the {counted(int(cores), 'core')}" if cores else "the cores"
    what = "devices and processes" if result["layouts"] else "devices"
    return f"Simulated {what} share {shared} of one machine, so they cannot show a speed-up."


def where_in_words(result: Mapping[str, Any]) -> str:
    """Says on which devices, or in which layouts of processes, the steps were measured.

    Example:
        >>> from multitower.scaling.words import where_in_words
        >>> where_in_words({"devices": [1, 2], "layouts": None, "simulated": True})
        '1, 2 simulated devices'
        >>> where_in_words({"devices": [1, 2], "layouts": ["1 x 1", "2 x 1"], "simulated": False})
        '1 x 1, 2 x 1 (processes x devices of each)'
    """
    devices = "simulated devices" if result["simulated"] else "devices"
    if result["layouts"]:
        return f"{', '.join(result['layouts'])} (processes x {devices} of each)"
    return f"{', '.join(map(str, result['devices']))} {devices}"


def turns_in_words(result: Mapping[str, Any]) -> str | None:
    """A caution if layouts of processes were not measured in turns; None if all runs took turns."""
    entries = [*(result["strong"] or []), *(result["weak"] or [])]
    if len({entry["job"] for entry in entries}) < 2:
        return None
    return (
        "The layouts were measured one after the other, and not in turns: a change in the speed of "
        "the machine between them looks like a speed-up. The quartiles of a speed-up have the "
        "spread of both measurements."
    )


def losses_in_words(result: Mapping[str, Any]) -> str:
    """Says whether the loss curve is the same on every number of devices."""
    check = result["losses"]
    if check["same"] is None:
        return f"Loss curves were not compared: {check['rule']}."
    if not check["same"]:
        return f"Loss curves DIFFER, and should be equal, {check['rule']}."
    largest = check["largest_difference"]
    seen = f" (the largest difference is {largest:.1e})" if largest else ""
    return (
        f"The loss curve is the same on {where_in_words(result)}, {check['rule']}, over "
        f"{counted(check['steps'], 'step')}{seen}."
    )


def prediction_in_words(result: Mapping[str, Any]) -> str | None:
    """The prediction of the fit, and its error at points that were held out; or None."""
    prediction = result["prediction"]
    if prediction is None:
        return None
    fit = prediction["fit"]
    told = [_held_out(one) for one in prediction["held_out"]]
    of = "simulated device" if result["simulated"] else "device"
    return (
        f"{counted(prediction['devices'], of)} would take {_ms(prediction['step_s'])} ms per step, "
        f"speed-up {prediction['speedup']:.2f}, by a fit of compute {_ms(fit['compute_s'])} ms / D "
        f"+ transfer {_ms(fit['transfer_s'])} ms * 2 (D - 1) / D + latency "
        f"{_ms(fit['latency_s'])} ms * ({fit['rounds']}). "
        f"Each point predicted from the others: {'; '.join(told)}."
    )


def _held_out(one: Mapping[str, Any]) -> str:
    return (
        f"{counted(one['devices'], 'device')} {_ms(one['predicted_s'])} ms instead of "
        f"{_ms(one['measured_s'])} ms ({100 * one['error']:+.0f} %)"
    )


def _where_head(result: Mapping[str, Any]) -> str:
    return "processes x devices" if result["layouts"] else "devices"


def _where(entry: Mapping[str, Any]) -> str:
    return entry["layout"] or str(entry["devices"])


def _title(kind: str, result: Mapping[str, Any]) -> str:
    entries: Sequence[Mapping[str, Any]] = result[kind]
    if kind == "weak":
        each = entries[0]["batch_size"] / entries[0]["devices"]
        return f"{_TITLES[kind]}: {number(each)} examples per step on every device"
    towers = result["towers"]
    mode = "one tower per device" if towers is None else f"the same {counted(towers, 'tower')}"
    sharded = ", update sharded" if result["shard_update"] else ""
    sharded = ", parameters sharded" if result["shard_params"] else sharded
    if result.get("stages") is not None:
        sharded = f", {counted(result['stages'], 'stage')}"
    each = counted(entries[0]["batch_size"], "example")
    return f"{_TITLES[kind]}: {each} per step, {mode}{sharded}"


def _speed_row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        _where(entry),
        f"{entry['batch_size']:,}",
        _spread({name: 1e3 * entry["step_s"][name] for name in entry["speedup"]}, "{:.4g}"),
        number(round(entry["examples_per_s"], 1)),
        _spread(entry["speedup"], "{:.2f}"),
        f"{100 * entry['efficiency']['median']:.0f} %",
        str(entry["recompilations"]),
        _memory(entry["memory"]),
    )


def _spread(values: Mapping[str, float], form: str) -> str:
    """The median and the quartiles as text."""
    low, high = form.format(values["lower_quartile"]), form.format(values["upper_quartile"])
    return f"{form.format(values['median'])} ({low} to {high})"


def _memory_head(entries: Sequence[Mapping[str, Any]]) -> str:
    """The heading of the memory column: where only arrays are known, programs are not counted."""
    arrays = any(entry["memory"]["source"] == ARRAYS for entry in entries)
    return "peak of arrays" if arrays else "peak memory"


def _memory(memory: Mapping[str, Any]) -> str:
    """The peak memory of the device that held the most, as text."""
    size = memory["peak_bytes"]
    if size is None:
        return ABSENT
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"


def _ms(seconds: float | None) -> str:
    return ABSENT if seconds is None else f"{1e3 * seconds:.3g}"
