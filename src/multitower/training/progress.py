"""Progress: what a run reports after every step; metrics are read late and checked."""

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from multitower.errors import NonFiniteError, OutputError
from multitower.functions.outputs import metric_name
from multitower.steps.state.train_state import TrainState
from multitower.towers.lazy_rows import LazyRows


@dataclass(frozen=True)
class Progress:
    """The argument of hooks, after a step or an evaluation.

    Attributes:
        phase: `"train"` after a step, `"test"` after an evaluation.
        step: updates made so far.
        num_steps: updates that the run makes in all.
        metrics: metrics of that step, or of the whole evaluation: means over all examples, by name.
            A metric in a nested dict, such as `{"errors": {"top1": ...}}`, is called `errors/top1`.
        examples_per_s: examples per second, a mean since the first step of this process, without
            test phases; None at the first step, which compiles.
        tower_losses: the mean loss of each tower's rows, in the order of towers.
        state: the state that was evaluated, in the phase `"test"`; None in the phase `"train"`.
        epoch: passes over the data made so far, such as 2.5; None if the steps of an epoch are not
            known (see `steps_per_epoch` of `Trainer.fit`).

    Example:
        >>> import multitower as mt
        >>> def hook(progress):  # for mt.Trainer(..., hooks=[hook])
        ...     if progress.phase == "test":
        ...         print(f"step {progress.step}: {progress.metrics['accuracy']:.1%}")
        >>> hook(mt.Progress("test", 50, 100, {"accuracy": 0.975}))
        step 50: 97.5%
    """

    phase: Literal["train", "test"]
    step: int
    num_steps: int
    metrics: Mapping[str, float]
    examples_per_s: float | None = None
    tower_losses: Sequence[float] = ()
    state: TrainState | None = None
    epoch: float | None = None


Hook = Callable[[Progress], None]


def flush_hooks(hooks: Sequence[Hook]) -> None:
    """Calls `flush` of the hooks that have it, so that they write buffered lines to disk.

    It is called before a save, because a run that resumes from a checkpoint does not report the
    earlier steps again.
    """
    for hook in hooks:
        flush: Callable[[], None] | None = getattr(hook, "flush", None)
        if flush is not None:
            flush()


class MetricsReader:
    """Copies metrics to the host, some calls late, checks them, and calls the hooks."""

    def __init__(
        self,
        last: int,
        on_nonfinite: str,
        params: Any,
        tell: Hook,
        *,
        calls_late: int = 1,
        steps_per_epoch: Any = None,
    ) -> None:
        self._last = last
        self._calls_late = calls_late
        self._on_nonfinite = on_nonfinite
        self._tell = tell
        self._steps_per_epoch = steps_per_epoch
        flat, _ = jax.tree_util.tree_flatten_with_path(params)
        self._names = [f"params{jax.tree_util.keystr(path)}" for path, _ in flat]
        self._waiting: deque[tuple[int, Any, Sequence[int]]] = deque()
        self._began: float | None = None
        self._examples = 0

    def wait(self, number: int, metrics: Any, num_rows: Sequence[int]) -> None:
        """Queues the metrics of a call that has been started.

        Args:
            number: the number of the last step of the call.
            metrics: the metrics as the step returned them, with `steps_per_call` with a first axis
                for steps.
            num_rows: the rows of each step of the call.
        """
        self._waiting.append((number, metrics, num_rows))

    def read_late(self) -> None:
        """Reads the metrics of all calls but the newest `calls_late` ones.

        Raises:
            NonFiniteError: a loss or parameter is not finite, and `on_nonfinite` is `"stop"`.
        """
        while len(self._waiting) > self._calls_late:
            self._read_call(*self._waiting.popleft())

    def read_waiting(self) -> None:
        """Reads the metrics of all calls.

        Raises:
            NonFiniteError: a loss or parameter is not finite, and `on_nonfinite` is `"stop"`.
        """
        while self._waiting:
            self._read_call(*self._waiting.popleft())

    def _read_call(self, last: int, metrics: Any, num_rows: Sequence[int]) -> None:
        values = jax.device_get(metrics)  # host-device sync
        rate = self._rate(sum(num_rows))
        is_stacked = np.ndim(values["loss"]) == 1
        for place in range(len(num_rows)):
            at = lambda leaf, place=place: leaf[place] if is_stacked else leaf
            self._read(last - len(num_rows) + 1 + place, jax.tree.map(at, values), rate)

    def _read(self, number: int, values: dict[str, Any], rate: float | None) -> None:
        """Checks the metrics of one step, and calls the hooks.

        Raises:
            OutputError: a metric is complex.
        """
        tower_losses = [float(x) for x in values.pop("tower_losses")]
        finite = values.pop("finite_params")
        numbers: dict[str, float] = {}
        for path, value in jax.tree_util.tree_flatten_with_path(values)[0]:
            name = metric_name(path)
            if np.iscomplexobj(value):
                raise OutputError(
                    f"the metric {name!r} is complex, and metrics are real numbers: return its "
                    ".real and .imag by names of their own, or jnp.abs of it."
                )
            if np.ndim(value) == 0:
                numbers[name] = float(value)
        if self._on_nonfinite == "stop":
            self._refuse_nonfinite(number, numbers["loss"], tower_losses, finite)
        epoch = epoch_of(number, self._steps_per_epoch)
        told = Progress("train", number, self._last, numbers, rate, tower_losses, epoch=epoch)
        self._tell(told)

    @contextmanager
    def uncounted(self) -> Generator[None]:
        """Leaves the time of a test phase out of the examples per second."""
        start = time.perf_counter()
        yield
        if self._began is not None:
            self._began += time.perf_counter() - start

    def _rate(self, num_rows: int) -> float | None:
        now = time.perf_counter()
        if self._began is None:
            self._began = now  # the first step does not count, since it compiles
            return None
        self._examples += num_rows
        return self._examples / (now - self._began)

    def _refuse_nonfinite(
        self, number: int, loss: float, tower_losses: Sequence[float], finite: Any
    ) -> None:
        if math.isfinite(loss) and all(finite):
            return
        facts = [f"the loss is {loss}"]
        towers = [t for t, value in enumerate(tower_losses) if not math.isfinite(value)]
        if towers and len(tower_losses) > 1:
            facts.append(f"the first tower with such a loss is {towers[0]} of {len(tower_losses)}")
        bad = [name for name, good in zip(self._names, finite, strict=True) if not good]
        if bad:
            facts.append(f"the first parameter that is not finite after it is {bad[0]}")
        raise NonFiniteError(
            f"step {number} of {self._last}: {'; '.join(facts)}. The checkpoints before it are "
            "good. Lower the learning rate or look at that batch; on_nonfinite='skip' leaves such "
            "steps out."
        )


def epoch_of(step: int, steps_per_epoch: Any) -> float | None:
    """The passes over the data after `step` updates; None if the steps of one are not known."""
    return None if steps_per_epoch is None else float(step / steps_per_epoch)


def num_rows_of(batch: Any) -> int:
    """The rows of a batch of arrays, `TowerRows` or `LazyRows`; 0 if it has none."""
    leaves = jax.tree.leaves(batch)
    counts = (leaf.shape[0] for leaf in leaves if getattr(leaf, "shape", ()))
    lazy = (leaf.num_rows for leaf in leaves if isinstance(leaf, LazyRows))
    return max((*counts, *lazy), default=0)
