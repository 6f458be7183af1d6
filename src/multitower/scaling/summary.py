"""summary: compares measured runs: speed-ups, equal losses, a prediction.

Runs of one measurement took turns, and their speed-ups are ratios within a round. Runs of different
measurements, which `--add` joins in one file, have no rounds in common.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from multitower.errors import RunError
from multitower.recipes.definition import Recipe, takes
from multitower.runs.options import OF_UPDATES, RunOptions
from multitower.scaling.fit import check_enough, fit_step_times, held_out
from multitower.scaling.losses import LossCheck, compare_losses

STRONG, WEAK = "strong", "weak"

Entry = dict[str, Any]

# Options of a run that measurements record and compare.
OPTIONS = (
    "towers",
    "shard_update",
    "shard_params",
    "stages",
    "interleave",
    "remat",
    *OF_UPDATES,
)
# Values that must be equal in measurements to be joined in one table.
_SAME = (
    "recipe",
    "seed",
    *OPTIONS,
    "batch_size",
    "steps",
    "rounds",
    "versions",
)
_PATH = "data"  # the same files may be in another directory


def with_summary(
    found: Mapping[str, Any], reason: str | None, predict: int | None
) -> dict[str, Any]:
    """Adds speed-ups, the comparison of losses and the prediction to measured runs.

    Args:
        found: the measurement, with one list of entries for each kind of scaling.
        reason: why loss curves cannot be compared, or None.
        predict: the number of devices for which to predict the step time; None for no prediction.

    Returns:
        The content of `scale.json`.
    """
    tables = {kind: _ordered(found[kind]) for kind in (STRONG, WEAK) if found[kind]}
    measured = [entry for table in tables.values() for entry in table]
    first = next(iter(tables.values()))
    on_layouts = any(entry["layout"] for entry in measured)
    for entry in measured if on_layouts else []:
        entry["layout"] = entry["layout"] or f"1 x {entry['devices']}"
    for table in tables.values():
        for entry in table:
            entry.update(_against(entry, table[0]))
    curves = {
        entry["layout"] or entry["devices"]: entry["losses"] for entry in tables.get(STRONG, [])
    }
    return {
        **found,
        "devices": [entry["devices"] for entry in first],
        "layouts": [entry["layout"] for entry in first] if on_layouts else None,
        "simulated": found["host"]["platform"] == "cpu"
        and any(entry["devices"] > entry["hosts"] for entry in measured),
        STRONG: tables.get(STRONG),
        WEAK: tables.get(WEAK),
        "losses": asdict(_check_losses(curves, reason, exact=found["towers"] is not None)),
        "prediction": _predict(tables.get(STRONG, []), predict),
    }


def joined(
    earlier: Mapping[str, Any], found: Mapping[str, Any], reason: str | None, predict: int | None
) -> dict[str, Any]:
    """Joins two measurements of the same training in different layouts.

    Args:
        earlier: the content of `scale.json`.
        found: the new measurement; its entries replace earlier ones of the same layout.
        reason: as for `with_summary`.
        predict: as for `with_summary`; nothing is predicted until there are enough points.

    Raises:
        RunError: the training or the kind of device is different.
    """
    check_same(earlier, found)
    tables: dict[str, list[Entry] | None] = {}
    job = 1 + max(entry["job"] for kind in (STRONG, WEAK) for entry in earlier[kind] or [])
    for kind in (STRONG, WEAK):
        if kind == WEAK and earlier[kind] and found[kind]:
            _check_rows(earlier[kind], found[kind])
        by_layout = {_layout(entry): dict(entry) for entry in earlier[kind] or []}
        for entry in found[kind] or []:
            by_layout[_layout(entry)] = {**entry, "job": job}
        tables[kind] = list(by_layout.values()) or None
    for entry in tables[STRONG] or tables[WEAK] or []:
        entry["layout"] = "{} x {}".format(*_layout(entry))
    counts = [entry["devices"] for entry in tables[STRONG] or []]
    enough = len(set(counts)) == len(counts) and len(counts) > 2
    return with_summary({**found, **tables}, reason, predict if enough else None)


def check_same(earlier: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Refuses measurements that cannot be joined in one table.

    Raises:
        RunError: they differ in more than the layout.
    """
    kinds = lambda one: " and ".join(kind for kind in (STRONG, WEAK) if one[kind])
    options = lambda one: {name: v for name, v in one["options"].items() if name != _PATH}
    pairs = {name: (earlier[name], found[name]) for name in _SAME}
    pairs["options of the recipe"] = (options(earlier), options(found))
    pairs["kind of scaling"] = (kinds(earlier), kinds(found))
    pairs["device"] = tuple(one["host"]["device_kind"] for one in (earlier, found))
    for name, (before, now) in pairs.items():
        if before != now:
            raise RunError(
                f"--add: the measurements in the directory have {name} {before!r}, and this one "
                f"has {now!r}. Measure in the same way, or name another --run-dir."
            )


def _check_rows(earlier: Sequence[Entry], found: Sequence[Entry]) -> None:
    """Refuses weak scaling with other rows per device, as of two jobs that began together."""
    before, now = (
        {-(-entry["batch_size"] // entry["devices"]) for entry in entries}
        for entries in (earlier, found)
    )
    if before != now:
        raise RunError(
            f"--add: weak scaling in the directory has {_some(before)} rows per device, and this "
            f"one has {_some(now)}: another job was measured meanwhile. Run this command again."
        )


def _some(numbers: set[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))


def not_comparable(recipe: Recipe, options: RunOptions) -> str | None:
    """Why loss curves may differ between numbers of devices, or None."""
    if options.towers is None and takes(recipe.loss, "rng"):
        return "the loss draws random numbers, which differ by device; --towers T fixes them"
    if options.towers is None and recipe.model_state is not None:
        return "the model state depends on the rows of each tower; --towers T fixes them"
    return None


def quartiles(values: Sequence[float] | np.ndarray[Any, Any]) -> dict[str, float]:
    """The median and the quartiles, by name."""
    low, middle, high = (float(one) for one in np.percentile(values, [25, 50, 75]))
    return {"median": middle, "lower_quartile": low, "upper_quartile": high}


def _ordered(entries: Sequence[Entry]) -> list[Entry]:
    return sorted(
        (dict(entry) for entry in entries), key=lambda one: (one["devices"], one["processes"])
    )


def _layout(entry: Mapping[str, Any]) -> tuple[int, int]:
    return entry["processes"], entry["devices"] // entry["processes"]


def _against(entry: Mapping[str, Any], base: Mapping[str, Any]) -> Entry:
    """The speed-up of examples per second over another run, and the efficiency."""
    rate, base_rate = (
        one["batch_size"] / np.array(one["step_s"]["turns"]) for one in (entry, base)
    )
    if entry["job"] == base["job"]:
        speedup = quartiles(rate / base_rate)
    else:  # no turns in common: the spreads of both are combined
        own, other = quartiles(rate), quartiles(base_rate)
        speedup = {
            "median": own["median"] / other["median"],
            "lower_quartile": own["lower_quartile"] / other["upper_quartile"],
            "upper_quartile": own["upper_quartile"] / other["lower_quartile"],
        }
    share = base["devices"] / entry["devices"]
    return {
        "speedup": speedup,
        "efficiency": {name: value * share for name, value in speedup.items()},
    }


def _check_losses(
    curves: Mapping[int | str, Sequence[float]], reason: str | None, *, exact: bool
) -> LossCheck:
    if not curves:
        reason = "weak scaling trains on other batches with every number of devices"
    if reason is not None:
        return LossCheck(None, reason, 0, None, ())
    return compare_losses(curves, exact=exact)


def _predict(strong: Sequence[Mapping[str, Any]], count: int | None) -> Entry | None:
    """The predicted step time on another number of devices; None without one."""
    if count is None:
        return None
    measured = {entry["devices"]: entry["step_s"]["median"] for entry in strong}
    check_enough(len(measured))
    fit = fit_step_times(measured)
    fewest = min(measured)
    return {
        "devices": count,
        "step_s": fit.step_s(count),
        "speedup": measured[fewest] / fit.step_s(count),
        "fit": fit._asdict(),
        "held_out": [one._asdict() for one in held_out(measured)],
    }
