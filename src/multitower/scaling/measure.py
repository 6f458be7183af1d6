"""scaling: the speed on more devices, everything else equal, and whether results are the same.

The numbers of devices take turns in short blocks, in an order that rotates, because the speed of a
machine drifts. Speeds are compared as ratios within one round of turns.
"""

import functools
import itertools
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from multitower.errors import DeviceError, RunError
from multitower.hardware.memory import PeakMemory
from multitower.processes.together import lines_of_all, texts_of_all
from multitower.recipes.definition import Recipe
from multitower.runs.options import RunOptions
from multitower.runs.setup import RecipeJob
from multitower.scaling.fit import check_enough
from multitower.scaling.run import ScalingRun, TurnSteps
from multitower.scaling.summary import (
    OPTIONS,
    STRONG,
    WEAK,
    not_comparable,
    quartiles,
    with_summary,
)

_Key = tuple[int, int]  # devices, rows of a step


@dataclass(frozen=True, kw_only=True)
class ScalingOptions:
    """How to measure.

    Attributes:
        kinds: `"strong"` (the global batch is fixed) and `"weak"` (the tower batch is fixed); by
            default both, or only strong with a fixed number of towers.
        steps: measured steps of one turn; with local and asynchronous updates rounded up to whole
            rounds.
        rounds: turns of each number of devices, after one that compiles.
        predict: predict the step time on this number of devices; None for no prediction.
        rows_per_device: rows per device in weak scaling; by default those of the smallest number of
            devices.

    Raises:
        RunError: a number below 1.
    """

    kinds: tuple[str, ...] = ()
    steps: int = 10
    rounds: int = 7
    predict: int | None = None
    rows_per_device: int | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "rounds", "predict"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RunError(f"{name}={value}: it must be 1 or more.")

    def kinds_on(self, devices: Sequence[int], towers: int | None) -> tuple[str, ...]:
        """The kinds of scaling to measure on these numbers of devices, over all processes.

        Raises:
            DeviceError: fewer towers than devices.
            RunError: weak scaling with a fixed number of towers, or too few points to predict.
        """
        if towers is not None and WEAK in self.kinds:
            raise RunError(
                f"weak scaling with {towers} towers: with a fixed number of towers the program is "
                "the same on any number of devices, so that no more rows can come with more "
                "devices. Leave --towers out for weak scaling, or say --strong."
            )
        if towers is not None and towers < max(devices):
            raise DeviceError(
                f"{towers} towers cannot fill {max(devices)} devices: use at most {towers} "
                f"devices, or --towers {max(devices)}."
            )
        kinds = self.kinds or ((STRONG, WEAK) if towers is None else (STRONG,))
        if self.predict is not None:
            check_enough(len(set(devices)) if STRONG in kinds else 0)
        return kinds


def scale(
    recipe: Recipe,
    options: RunOptions,
    devices: Sequence[int],
    how: ScalingOptions | None = None,
) -> dict[str, Any]:
    """Measures a recipe's steps on several numbers of devices.

    Args:
        recipe: what to train.
        options: of the runs; with `towers` the steps with the same bits are measured, else the fast
            ones. `global_batch` is that of strong scaling, and of the smallest number of devices.
        devices: the number of devices of each run; if several processes make one run, a single
            number, of each process.
        how: what to measure, and how often; by default `ScalingOptions()`.

    Returns:
        The content of `scale.json`: `strong` and `weak`, lists with one entry per number of devices
        or None; `losses`, whether the loss curve is the same on all of them; `prediction` or None;
        `simulated`, whether the devices share the cores of one machine, so that they cannot show a
        speed-up; and the recipe, the software and the machine. An entry has
        `devices` (of all processes), `processes`, `hosts`, `layout` ("2 x 4", or None in one
        process), `batch_size` (rows of a step), `losses`, `step_s` (median and quartiles over the
        rounds, and `turns`), `examples_per_s`; `speedup` of the examples per second against the
        fewest devices and `efficiency`, its share of the ideal (medians and quartiles of the ratios
        within a round); `recompilations` in measured turns; `memory`, `split` and `pipeline`, as
        `PeakMemory`, `measure_split` and `measure_stages`. Unknown values are None.

    Raises:
        DeviceError: fewer towers than devices.
        RunError: weak scaling with a fixed number of towers, too few points for a prediction,
            several numbers of devices for several processes, or as `check_measurable`.
        MultitowerError: an error of the recipe's steps.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optax
        >>> from multitower.recipes import DataSets, Recipe
        >>> from multitower.runs.options import RunOptions
        >>> from multitower.scaling.measure import ScalingOptions, scale
        >>> rows = np.arange(8, dtype=np.float32)
        >>> losses = lambda w, batch: (w - batch) ** 2
        >>> mean = Recipe(
        ...     name="mean",
        ...     data=lambda: DataSets(train=rows, test=rows),
        ...     init=lambda key: jnp.float32(0),
        ...     loss=losses,
        ...     metrics=lambda w, batch: {"loss": losses(w, batch)},
        ...     optimizer=lambda steps: optax.sgd(0.1),
        ...     steps=1,
        ...     global_batch=8,
        ... )
        >>> how = ScalingOptions(kinds=("strong",), steps=1, rounds=1)
        >>> found = scale(mean, RunOptions(), [1], how)
        >>> found["strong"][0]["devices"], found["strong"][0]["recompilations"]
        (1, 0)
    """
    how = how or ScalingOptions()
    recipe = replace(recipe, data=functools.cache(recipe.data))  # read once for all runs
    counts = sorted(set(devices))
    num_processes = jax.process_count()
    check_measurable(recipe, options, num_processes)
    if num_processes > 1 and len(counts) > 1:
        raise RunError("several processes make one run, and are measured in one layout at a time.")
    kinds = how.kinds_on([num_processes * count for count in counts], options.towers)
    batch = options.global_batch or recipe.global_batch
    turn = TurnSteps.of(options, how.steps)
    keys = {
        kind: [
            (count, _rows(kind, batch, num_processes * count, num_processes * counts[0], how))
            for count in counts
        ]
        for kind in kinds
    }
    runs = _measure(recipe, options, sorted({key for many in keys.values() for key in many}), how)
    splits = {key: run.split(how.steps) for key, run in runs.items()}
    pipelines = {key: run.stages(how.steps) for key, run in runs.items()}
    entries = {
        key: {**_entry(run, key, splits[key]), "pipeline": pipelines[key]}
        for key, run in runs.items()
    }
    tables = {kind: [dict(entries[key]) for key in many] for kind, many in keys.items()}
    facts = next(iter(runs.values())).facts()
    found = {
        **{name: facts[name] for name in ("recipe", "options", "seed", "versions", "host")},
        **{name: getattr(options, name) for name in OPTIONS},
        "batch_size": batch,
        "steps": how.steps,
        "counted_steps": turn.counted,
        "lead_steps": turn.lead,
        "rounds": how.rounds,
        STRONG: tables.get(STRONG),
        WEAK: tables.get(WEAK),
    }
    return with_summary(found, not_comparable(recipe, options), how.predict)


def check_measurable(recipe: Recipe, options: RunOptions, num_processes: int) -> None:
    """Refuses runs that cannot be made or compared; compiles nothing and starts no devices.

    Args:
        recipe: what to train; its data are read.
        options: of the runs.
        num_processes: the largest number of processes of a run.

    Raises:
        RunError: local or asynchronous updates without `towers`, or asynchronous ones over several
            processes.
        ArgumentError: options exclude each other, or the towers do not divide into the groups of a
            rotation.
    """
    _refuse_incomparable(options, num_processes)
    RecipeJob.of(recipe, replace(options, devices=None), None, keep_best=False)  # checks options


def _refuse_incomparable(options: RunOptions, num_processes: int) -> None:
    if options.sync_every is None and not options.asynchronous:
        return
    what = "asynchronous=True" if options.asynchronous else f"sync_every={options.sync_every}"
    if options.towers is None:
        raise RunError(
            f"{what} without towers=: every number of devices would have another number of towers, "
            "which is another training. Add towers=, such as towers=8."
        )
    if options.asynchronous and num_processes > 1:
        raise RunError(
            f"{what} over {num_processes} processes: asynchronous updates run in one process. "
            "Measure the devices of one process."
        )


def _rows(kind: str, batch: int, count: int, fewest: int, how: ScalingOptions) -> int:
    """The rows of a step; in weak scaling they grow with the number of devices."""
    if kind == STRONG:
        return batch
    return (how.rows_per_device or -(-batch // fewest)) * count


def _measure(
    recipe: Recipe, options: RunOptions, keys: Sequence[_Key], how: ScalingOptions
) -> dict[_Key, ScalingRun]:
    """Makes all runs, and lets them take turns."""
    # The optimizer's schedules end where the measurement does.
    total = TurnSteps.of(options, how.steps).total
    options = replace(options, steps=(how.rounds + 1) * total)
    runs: dict[_Key, ScalingRun] = {}
    # The largest number of devices first: each device then holds the least, so that the peak of
    # the next run can be seen.
    for count, rows in reversed(keys):
        run = ScalingRun(recipe, replace(options, devices=count, global_batch=rows))
        run.warm_up(how.steps)
        runs[count, rows] = run
    for number in range(how.rounds):
        turn = number % len(keys)
        for key in [*keys[turn:], *keys[:turn]]:
            runs[key].take_turn(how.steps)
    return runs


def _entry(run: ScalingRun, key: _Key, split: Mapping[str, Any]) -> dict[str, Any]:
    """The measured values of one run, without speed-up and efficiency, which need the others."""
    assert run.peak is not None
    times = quartiles(run.turns_s)
    hosts = lines_of_all(socket.gethostname())
    per_device = [json.loads(text) for text in texts_of_all(json.dumps(run.peak.per_device_bytes))]
    peak = PeakMemory(tuple(itertools.chain(*per_device)), run.peak.source)
    return {
        "devices": len(hosts) * key[0],
        "processes": len(hosts),
        "hosts": len(set(hosts)),
        "layout": f"{len(hosts)} x {key[0]}" if len(hosts) > 1 else None,
        "job": 0,
        "batch_size": key[1],
        "step_s": {**times, "turns": run.turns_s},
        "examples_per_s": key[1] / times["median"],
        "recompilations": run.num_recompilations,
        "memory": {
            "peak_bytes": peak.largest_bytes(),
            "per_device_bytes": list(peak.per_device_bytes),
            "source": peak.source,
        },
        "split": dict(split),
        "losses": run.losses,
    }
