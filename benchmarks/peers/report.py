"""What was measured, as numbers and as a table in Markdown."""

import statistics
from dataclasses import dataclass
from typing import Any

from contenders import REFERENCE, Contender
from works import Work

HEAD = (
    "contender",
    "ms/step",
    "ratio",
    "quartiles",
    "host ms",
    "first step s",
    "memory MB",
    "lines",
)


@dataclass(frozen=True)
class Measurement:
    """All about one contender at one work; `step_s` has one number a round."""

    contender: Contender
    losses: list[float]
    step_s: list[float]
    host_s: float | None
    first_step_s: float
    peak_memory_bytes: int | None
    versions: dict[str, str]


def rows_of(measured: dict[str, Measurement]) -> dict[str, dict[str, Any]]:
    """Medians, and ratios within a round to the hand-written step."""
    reference = measured[REFERENCE].step_s
    rows: dict[str, dict[str, Any]] = {}
    for key, found in measured.items():
        ratios = [a / b for a, b in zip(found.step_s, reference, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        rows[key] = {
            "title": found.contender.title,
            "median_ms": statistics.median(found.step_s) * 1e3,
            "ratio": statistics.median(ratios),
            "ratio_quartiles": [low, high],
            "host_ms": None if found.host_s is None else found.host_s * 1e3,
            "first_step_s": found.first_step_s,
            "peak_memory_mb": found.peak_memory_bytes and found.peak_memory_bytes / 1e6,
            "changed_lines": found.contender.changed_lines(),
            "batch_norm": found.contender.batch_norm,
            "losses": found.losses,
            "step_ms": [seconds * 1e3 for seconds in found.step_s],
            "versions": found.versions,
        }
    return rows


def table(work: Work, rows: dict[str, dict[str, Any]]) -> str:
    """One work's table, with what its numbers need to be read."""
    head = (*HEAD, "tokens/s") if work.tokens_per_step else HEAD
    lines = [f"## {work.name}", "", markdown(head), markdown(["---"] * len(head))]
    for row in rows.values():
        mark = " (1)" if work.has_batch_norm and row["batch_norm"] == "global" else ""
        low, high = row["ratio_quartiles"]
        speed = (f"{1e3 * work.tokens_per_step / row['median_ms']:,.0f}",)
        lines.append(
            markdown(
                (
                    row["title"] + mark,
                    f"{row['median_ms']:.3f}",
                    f"{row['ratio']:.2f}",
                    f"{low:.2f}-{high:.2f}",
                    number(row["host_ms"], ".3f"),
                    f"{row['first_step_s']:.1f}",
                    number(row["peak_memory_mb"], ".0f"),
                    str(row["changed_lines"]),
                    *(speed if work.tokens_per_step else ()),
                )
            )
        )
    if work.has_batch_norm and any(row["batch_norm"] == "global" for row in rows.values()):
        lines += ["", "(1) Normalises by the whole batch; the others by each device's rows."]
    return "\n".join(lines)


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def markdown(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def versions_of(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Every package that took part, once."""
    found = {
        f"{name} {version}"
        for rows in results.values()
        for row in rows.values()
        for name, version in row["versions"].items()
    }
    return ", ".join(sorted(found))
