"""The plan of a measurement: what to measure, how, and where to write it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from multitower.processes.together import by_first, is_first, of_first
from multitower.recipes.definition import Recipe
from multitower.runs.directory import fresh_run_directory
from multitower.runs.options import RunOptions
from multitower.scaling.directory import make_scaling_directory, read_measurement
from multitower.scaling.measure import ScalingOptions, check_measurable, scale
from multitower.scaling.summary import OPTIONS, STRONG, WEAK, check_same, joined, not_comparable


@dataclass(frozen=True)
class ScalingPlan:
    """What to measure, and where to write it.

    Attributes:
        recipe: what to train.
        options: of the runs.
        how: what to measure, and how often.
        run_dir: the directory to write to; None for a new one.
        force: whether an existing measurement there may be deleted.
        add: whether this measurement is added to an existing one.
    """

    recipe: Recipe
    options: RunOptions
    how: ScalingOptions
    run_dir: Path | None
    force: bool
    add: bool

    def directory(self, kinds: Sequence[str]) -> str:
        """Makes the directory; with `add` refuses a measurement unlike the existing one."""
        if self.run_dir is None:
            return str(fresh_run_directory(Path("runs"), f"{self.recipe.name}-scale"))
        directory = make_scaling_directory(self.run_dir, overwrite=self.force, add=self.add)
        if self.add and (earlier := read_measurement(directory)) is not None:
            planned = {
                "recipe": self.recipe.name,
                **{name: getattr(self.options, name) for name in ("seed", *OPTIONS)},
                "batch_size": self.options.global_batch or self.recipe.global_batch,
                "steps": self.how.steps,
                "rounds": self.how.rounds,
                **{kind: kind in kinds for kind in (STRONG, WEAK)},
            }
            check_same(earlier, {**earlier, **planned})
        return str(directory)

    def measure(
        self, counts: Sequence[int], begins: Callable[[], None]
    ) -> tuple[Path, dict[str, Any]]:
        """Measures in this process, or together with others; process 0 has the result.

        Args:
            counts: the number of devices of this process, for each run.
            begins: called once the plan is known to be possible.
        """
        how = replace(self.how, predict=None) if self.add else self.how
        all_counts = [jax.process_count() * count for count in counts]
        # Errors are raised before anything is written.
        check_measurable(self.recipe, self.options, jax.process_count())
        kinds = how.kinds_on(all_counts, self.options.towers)
        directory = Path(by_first(lambda: self.directory(kinds)))
        begins()
        if self.add and WEAK in kinds:
            how = replace(how, rows_per_device=of_first(self._rows_per_device(directory)) or None)
        return directory, scale(self.recipe, self.options, counts, how)

    def with_earlier(self, directory: Path, found: dict[str, Any] | None) -> dict[str, Any]:
        """The measurement, with `add` joined to that of the directory, or that alone for None."""
        earlier = read_measurement(directory) if self.add or found is None else None
        if earlier is None or found is None:
            result = earlier or found
            assert result is not None
            return result
        reason = not_comparable(self.recipe, self.options)
        return joined(earlier, found, reason, self.how.predict)

    def _rows_per_device(self, directory: Path) -> int:
        """Rows per device of the weak scaling so far; 0 if there is none, or not in process 0."""
        earlier = read_measurement(directory) if is_first() else None
        if earlier is None or not earlier[WEAK]:
            return 0
        base = earlier[WEAK][0]
        return -(-base["batch_size"] // base["devices"])
