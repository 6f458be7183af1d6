"""Words: a plan as a table, and what to do if a run does not fit."""

from collections.abc import Sequence
from typing import Any

from multitower.planning.layouts import PlannedLayout
from multitower.planning.sizes import in_words

_HEADS = (
    "train_step(...)",
    "devices",
    "params",
    "gradients",
    "optimizer",
    "average",
    "batch",
    "activations",
    "total",
    "sent",
    "messages",
    "waits",
)


def table(layouts: Sequence[PlannedLayout], memory_bytes: int | None) -> list[str]:
    """The lines of a table of layouts."""
    heads = [*_HEADS, "" if memory_bytes is None else f"{in_words(memory_bytes)}?"]
    rows = [heads, *(_row(layout, memory_bytes) for layout in layouts)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        ).rstrip()
        for row in rows
    ]
    if any(layout.estimated for layout in layouts):
        lines.append("~ estimated from a program for fewer devices")
    return lines


def call(options: dict[str, Any]) -> str:
    """Options as they are written in a call; without the devices."""
    given = {name: value for name, value in options.items() if name != "devices"}
    return ", ".join(f"{name}={value!r}" for name, value in given.items()) or "(no option)"


def advise(layouts: Sequence[PlannedLayout], memory_bytes: int | None) -> str:
    """The smallest change that makes a run fit, in one or two sentences."""
    first = layouts[0]
    least = min(layouts, key=lambda one: one.total_bytes)
    begin = f"With {call(first.options)}" if len(first.options) > 1 else "Without any option"
    if memory_bytes is None:
        return (
            f"{begin} a device needs {in_words(first.total_bytes)}. "
            f"{call(least.options)} needs least: {in_words(least.total_bytes)}."
        )
    there = f"a device with {in_words(memory_bytes)}"
    if first.fits(memory_bytes):
        return f"{begin} it fits on {there}: {in_words(first.total_bytes)}."
    fitting = [one for one in layouts if one.fits(memory_bytes)]
    if not fitting:
        return (
            f"Nothing fits on {there}: {call(least.options)} needs least, "
            f"{in_words(least.total_bytes)}. Use more devices, smaller batches, jax.checkpoint in "
            "the model, or 16-bit parameters."
        )
    change = fitting[0]
    return (
        f"{begin} it does not fit on {there}: it needs {in_words(first.total_bytes)}. "
        f"The smallest change that makes it fit is {call(change.options)}: "
        f"{in_words(change.total_bytes)}."
    )


def notes_of(layouts: Sequence[PlannedLayout]) -> list[str]:
    """What there is to know of single layouts."""
    return [f"{call(one.options)}: {one.note}." for one in layouts if one.note]


def _row(layout: PlannedLayout, memory_bytes: int | None) -> list[str]:
    took = layout.memory
    kinds = ("parameters", "gradients", "optimizer_state", "average", "rows", "activations")
    about = "~" if layout.estimated else ""
    fits = "" if memory_bytes is None else ("yes" if layout.fits(memory_bytes) else "no")
    return [
        call(layout.options),
        str(layout.devices),
        *(in_words(took[kind]) if took[kind] else "-" for kind in kinds),
        about + in_words(layout.total_bytes),
        in_words(layout.sent_bytes) if layout.sent_bytes else "-",
        str(layout.messages),
        f"{100 * layout.bubble:.0f} %" if layout.bubble else "-",
        fits,
    ]
