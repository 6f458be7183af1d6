"""Words: a plan as a table, and what to do if a run does not fit."""

from collections.abc import Callable, Sequence
from typing import Any

from multitower.planning.layouts import PlannedLayout
from multitower.planning.sizes import in_words

_HEADS = (
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


def call(options: dict[str, Any]) -> str:
    """Options as they are written in a call, without `devices`."""
    given = {name: value for name, value in options.items() if name != "devices"}
    return ", ".join(f"{name}={value!r}" for name, value in given.items()) or "(no option)"


def in_lines(
    layouts: Sequence[PlannedLayout],
    memory_bytes: int | None,
    limits: Sequence[str],
    notes: Sequence[str],
    *,
    head: str = "train_step(...)",
    named: Callable[[dict[str, Any]], str] = call,
) -> list[str]:
    """The lines of a printed plan: the table, followed by advice, limits and notes.

    Args:
        layouts: as in `Plan`.
        memory_bytes: as in `Plan`.
        limits: as in `Plan`.
        notes: as in `Plan`.
        head: title of the column of options.
        named: returns the options of a layout as text.
    """
    of_layouts = [f"{named(one.options)}: {one.note}." for one in layouts if one.note]
    advice = advise(layouts, memory_bytes, named)
    table = _table(layouts, memory_bytes, head, named)
    return [*table, "", advice, *limits, *of_layouts, *notes]


def _table(
    layouts: Sequence[PlannedLayout],
    memory_bytes: int | None,
    head: str,
    named: Callable[[dict[str, Any]], str],
) -> list[str]:
    heads = [head, *_HEADS, "" if memory_bytes is None else f"{in_words(memory_bytes)}?"]
    rows = [heads, *([named(one.options), *_cells(one, memory_bytes)] for one in layouts)]
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


def advise(
    layouts: Sequence[PlannedLayout],
    memory_bytes: int | None,
    named: Callable[[dict[str, Any]], str] = call,
) -> str:
    """The smallest change that makes a run fit, in one or two sentences."""
    layouts = [one for one in layouts if not one.refused] or layouts
    first = layouts[0]
    least = min(layouts, key=lambda one: one.total_bytes)
    begin = f"With {named(first.options)}" if len(first.options) > 1 else "Without any option"
    if memory_bytes is None:
        needs = f"{begin} a device needs {in_words(first.total_bytes)}"
        if least is first:
            return f"{needs}, the least of these layouts." if len(layouts) > 1 else f"{needs}."
        return f"{needs}. {named(least.options)} needs least: {in_words(least.total_bytes)}."
    there = f"a device with {in_words(memory_bytes)}"
    if first.fits(memory_bytes):
        return f"{begin} it fits on {there}: {in_words(first.total_bytes)}."
    fitting = [one for one in layouts if one.fits(memory_bytes)]
    if not fitting:
        return (
            f"Nothing fits on {there}: {named(least.options)} needs least, "
            f"{in_words(least.total_bytes)}. Use more devices, smaller batches, jax.checkpoint in "
            "the model, or 16-bit parameters."
        )
    change = fitting[0]
    return (
        f"{begin} it does not fit on {there}: it needs {in_words(first.total_bytes)}. "
        f"The smallest change that makes it fit is {named(change.options)}: "
        f"{in_words(change.total_bytes)}."
    )


def _cells(layout: PlannedLayout, memory_bytes: int | None) -> list[str]:
    took = layout.memory
    kinds = ("parameters", "gradients", "optimizer_state", "average", "rows", "activations")
    about = "~" if layout.estimated else ""
    fits = "" if memory_bytes is None else ("yes" if layout.fits(memory_bytes) else "no")
    return [
        str(layout.devices),
        *(in_words(took[kind]) if took[kind] else "-" for kind in kinds),
        about + in_words(layout.total_bytes),
        in_words(layout.sent_bytes) if layout.sent_bytes else "-",
        str(layout.messages),
        f"{100 * layout.bubble:.0f} %" if layout.bubble else "-",
        fits,
    ]
