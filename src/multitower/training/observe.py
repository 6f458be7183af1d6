"""Observers: hooks that write what a run reports, for TensorBoard and for other programs."""

import importlib
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from multitower.errors import RunError, install_command
from multitower.processes.together import is_first
from multitower.training.progress import Progress

if TYPE_CHECKING:
    from multitower.training.event_writer import EventFile

_OWN = frozenset({"phase", "step", "examples_per_s"})  # keys of every line of MetricsFile
_LARGEST = np.float32(9e19)  # the last bin of a histogram of tensorboardX


class MetricsFile:
    """A hook that writes one JSON object per line: phase, step and metrics.

    A resumed run appends to the file. It first removes the lines of steps that it makes again, so
    that every training step has one line. An evaluation before any training removes no line but
    that of the same step and metrics.

    Args:
        path: the path of the file, usually `RUN_DIR/metrics.jsonl`.

    Raises:
        RunError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import multitower as mt
        >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> with mt.MetricsFile(path) as hook:
        ...     hook(mt.Progress("train", 1, 9, {"loss": 0.5}))
        >>> print(path.read_text().strip())
        {"phase": "train", "step": 1, "loss": 0.5}
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path).absolute()  # also after a change of the working directory
        self._file: Any = None
        self._last = math.inf  # the last training step written; the first one may be made again

    def __call__(self, progress: Progress) -> None:
        """Writes one line; with several processes, only process 0 writes.

        Raises:
            RunError: the file cannot be written; or a metric is called `phase`, `step` or
                `examples_per_s`.
        """
        if not is_first():
            return
        if taken := _OWN.intersection(progress.metrics):
            raise RunError(
                f"the metrics hold {', '.join(sorted(map(repr, taken)))}, and every line of "
                f"{self._path.name} has an entry of that name. Rename the metric."
            )
        if progress.phase == "train":
            if progress.step <= self._last:  # it is made again: opening removes its line
                self.close()
            self._last = progress.step
        if self._file is None:
            self._file = self._open(progress)
        # JSON has no NaN and no infinity: null stands for both.
        numbers = {k: v if math.isfinite(v) else None for k, v in progress.metrics.items()}
        line: dict[str, Any] = {"phase": progress.phase, "step": progress.step, **numbers}
        if progress.examples_per_s is not None:
            line["examples_per_s"] = round(progress.examples_per_s, 1)
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Writes what is left to disk.

        Raises:
            RunError: it cannot be written.
        """
        file, self._file = self._file, None
        self._last = math.inf
        try:
            if file is not None:
                file.close()
        except OSError as error:
            raise self._failed(error) from error

    def _open(self, first: Progress) -> Any:
        def is_made_again(line: dict[str, Any]) -> bool:
            # An evaluation, perhaps of an earlier state, makes no training step again.
            if first.phase == "test":
                is_same = set(line) - _OWN == set(first.metrics)
                return is_same and (line["phase"], line["step"]) == ("test", first.step)
            return line["step"] >= first.step

        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            text = ""
            if self._path.exists():
                text = self._path.read_text(encoding="utf-8", errors="replace")
            lines = [line for line in map(read_line, text.splitlines()) if line is not None]
            kept = [line for line in lines if not is_made_again(line)]
            partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
            partial.replace(self._path)  # atomic: a kill or a full disk leaves the old file
            # Line-buffered, so that a killed run leaves whole lines.
            return self._path.open("a", buffering=1, encoding="utf-8")
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> RunError:
        return RunError(f"{self._path} cannot be written: {error.strerror or error}.")

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EventFiles:
    """A hook that writes TensorBoard event files: scalars per phase, weights at evaluations.

    TensorBoard hides the points of steps that a resumed run makes again. An evaluation before any
    training hides none.

    Weights that are split over several processes are left out. Of complex weights it shows the
    absolute values.

    Args:
        directory: usually `RUN_DIR/events`; each phase gets a directory inside.
        texts: texts to show, such as the configuration: Markdown by name.

    Raises:
        RunError: tensorboardX is not installed.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import numpy as np
        >>> import multitower as mt
        >>> directory = Path(tempfile.mkdtemp())
        >>> with mt.EventFiles(directory) as hook:
        ...     hook(mt.Progress("train", 1, 9, {"loss": 0.5}))
        ...     hook.add_images("inputs", np.zeros((2, 8, 8, 1), np.uint8), step=0)
        >>> [path.name for path in directory.iterdir()]
        ['train']
    """

    def __init__(self, directory: str | Path, texts: Mapping[str, str] | None = None) -> None:
        try:
            importlib.import_module("tensorboardX")  # slow, and optional
        except ImportError as error:
            raise RunError(
                "event files need tensorboardX, which is not installed. "
                f"Run: {install_command('tensorboardX')}"
            ) from error
        self._directory = Path(directory).absolute()  # as for `MetricsFile`
        self._texts = dict(texts or {})
        self._writers: dict[str, tuple[Any, EventFile]] = {}
        self._last = math.inf  # the last training step written; the first one may be made again

    def __call__(self, progress: Progress) -> None:
        """Writes a point for every metric, and weights in the phase "test"; only in process 0.

        Raises:
            RunError: an earlier point could not be written.
        """
        if not is_first():
            return
        if progress.phase == "train":
            if progress.step <= self._last:  # it is made again: new files hide its points
                self.close()
            self._last = progress.step
        writer = self._writer(progress)
        for name, value in progress.metrics.items():
            writer.add_scalar(name, value, progress.step)
        if progress.examples_per_s is not None:
            writer.add_scalar("examples_per_s", progress.examples_per_s, progress.step)
        for tower, loss in enumerate(progress.tower_losses):
            writer.add_scalar(f"tower_losses/{tower}", loss, progress.step)
        if progress.state is not None:
            for path, leaf in jax.tree_util.tree_flatten_with_path(progress.state.params)[0]:
                whole = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
                if not (whole or leaf.is_fully_replicated):
                    continue  # other processes hold parts of it and do not run this
                values = np.asarray(leaf)  # host-device sync
                if np.iscomplexobj(values):
                    values = np.abs(values)  # TensorBoard has no complex histograms
                values = values.astype(np.float32)
                values = np.clip(values[~np.isnan(values)], -_LARGEST, _LARGEST)
                if not values.size:
                    continue  # tensorboardX refuses empty histograms and larger numbers
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                writer.add_histogram(f"params/{name}", values, progress.step)

    def add_images(self, name: str, images: Any, step: int) -> None:
        """Shows images in the train phase.

        Args:
            name: the tag in TensorBoard.
            images: uint8 or float in [0, 1], shape (rows, height, width, channels).
            step: updates made.

        Raises:
            RunError: they, or an earlier point, could not be written.
        """
        if not is_first():
            return
        writer = self._writer(Progress("train", step, step, {}))
        writer.add_images(name, np.asarray(images), step, dataformats="NHWC")
        self.flush()

    def flush(self) -> None:
        """Writes all points so far to disk.

        Raises:
            RunError: it cannot be written.
        """
        for writer, file in self._writers.values():
            writer.flush()
            file.check()

    def close(self) -> None:
        """Writes what is left to disk.

        Raises:
            RunError: it cannot be written.
        """
        opened, self._writers = self._writers, {}
        self._last = math.inf
        for writer, _ in opened.values():
            writer.close()
        for _, file in opened.values():
            file.check()

    def _writer(self, progress: Progress) -> Any:
        if progress.phase not in self._writers:
            from multitower.training.event_writer import open_writer  # noqa: PLC0415 (importing stays quick)

            # An evaluation, perhaps of an earlier state, makes no training step again.
            again = progress.step if progress.phase == "train" or "train" in self._writers else None
            writer, file = open_writer(self._directory / progress.phase, again)
            for name, text in self._texts.items():
                writer.add_text(name, text, progress.step)
            self._writers[progress.phase] = writer, file
        writer, file = self._writers[progress.phase]
        file.check()
        return writer

    def __enter__(self) -> "EventFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_line(line: str) -> dict[str, Any] | None:
    """What `MetricsFile` wrote into a line; None if the line is damaged.

    A killed process may leave half a line, and a broken disk anything.
    """
    try:
        found: Any = json.loads(line)
        is_whole = isinstance(found["phase"], str) and isinstance(found["step"], int)
    except (ValueError, KeyError, TypeError):
        return None
    return found if is_whole else None
