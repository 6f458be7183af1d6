"""Checkpoints: a training state on disk, complete or absent, written while training continues.

Orbax writes into a temporary directory, and renames it when it is complete. This module adds the
names of all leaves and a fingerprint over them, so that damaged files are detected. The next call
raises the error of a save that failed in the background.

With several processes, all of them save and restore, in a directory that all of them can read.
Process 0 writes, and the others wait for it at Orbax's barriers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from multitower.errors import CheckpointError, warn, whole_number
from multitower.steps.state.fingerprint import fingerprint
from multitower.steps.state.leaves import check_same_leaves, leaf_like, named_leaves, on_host
from multitower.steps.state.train_state import TrainState, check_is_state
from multitower.training.checkpoints.orbax_library import first_line
from multitower.training.checkpoints.orbax_manager import TRIES, OrbaxManager


class Restored(NamedTuple):
    """A checkpoint that was read.

    Attributes:
        step: the number under which it was saved.
        state: the training state; pass it to the step that made `like`.
        about: the JSON values that were saved with it.
    """

    step: int
    state: TrainState
    about: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, in one directory; a context manager.

    Args:
        directory: where the checkpoints are; created if it does not exist.
        keep_last: how many to keep; the oldest is deleted when a newer one is complete.
        read_only: only read, and create, delete or clean up nothing, for a directory to which a run
            may be saving at the same time.

    Raises:
        CheckpointError: the directory cannot be created or written, or Orbax is not installed.
        ArgumentError: `keep_last` is not a whole number, 1 or more.

    Example:
        >>> import tempfile, jax.numpy as jnp, optax
        >>> import multitower as mt
        >>> step = mt.train_step(lambda w, x: (w - x) ** 2, optax.sgd(0.1), devices=2)
        >>> with mt.Checkpoints(tempfile.mkdtemp()) as checkpoints:
        ...     checkpoints.save(7, step.init(jnp.float32(3.0)), {"seed": 0})
        ...     checkpoints.wait()
        ...     numbers, newest = checkpoints.steps(), checkpoints.newest_about()
        ...     restored = checkpoints.restore(like=step.init(jnp.float32(0.0)))
        >>> numbers, newest
        ([7], (7, {'seed': 0}))
        >>> restored.step, float(restored.state.params), restored.about
        (7, 3.0, {'seed': 0})

    Source: Orbax; maxtext#5260 (an incomplete "latest" checkpoint), orbax#605 (a failed background
    save that is not reported).
    """

    def __init__(
        self, directory: str | Path, *, keep_last: int = 3, read_only: bool = False
    ) -> None:
        whole_number("keep_last", keep_last, 1)
        self.directory = Path(directory).absolute()
        self._read_only = read_only
        self._manager = OrbaxManager(self.directory, keep_last=keep_last, read_only=read_only)
        self._runs: dict[int, dict[str, Any]] = {}  # read with a state

    def save(
        self,
        step: int,
        state: TrainState,
        about: Mapping[str, Any],
        *,
        run: Mapping[str, Any] | None = None,
    ) -> None:
        """Saves a state in the background; returns when the state may be overwritten.

        Args:
            step: the number of the checkpoint, usually the updates made. Saving a number that
                exists does nothing; a number below the highest one is refused.
            state: the state to save.
            about: JSON values to save with it.
            run: JSON values that tell this run from others; `Trainer` compares them at a resume.

        Raises:
            CheckpointError: this save, or an earlier one in the background, failed; there is a
                checkpoint with a higher number; or these checkpoints are `read_only`.
            ArgumentError: `step` is not a whole number, or `about` holds no JSON values.
            StateError: it is not a state.
        """
        from multitower.training.checkpoints.about import check_about, digest  # noqa: PLC0415 (importing stays quick)

        check_is_state(state, "Checkpoints.save")
        check_about(about)
        step = whole_number("step", step, 0)  # also an array, such as state.step
        self.raise_failure()
        there = self.steps()
        if step in there:
            return
        if there and step < there[-1]:  # Orbax would skip it without an error
            raise CheckpointError(
                f"{self.directory} has checkpoint {there[-1]}, and step {step} is to be saved "
                "after it: a resume begins at the highest number. To go on from an earlier "
                "checkpoint, save to another directory, or move the later ones away."
            )
        # host-device sync: the next step overwrites the state, so it is copied first.
        leaves = {name: on_host(leaf) for name, leaf in named_leaves(state)}
        written = {
            "about": dict(about),
            "run": dict(run or {}),
            "fingerprint": fingerprint(list(leaves.values())),
            "leaves": {name: [x.dtype.name, list(x.shape)] for name, x in leaves.items()},
            "step": step,
        }
        # As it is read: JSON makes strings of keys that are numbers, and sorts them as such.
        written = json.loads(json.dumps(written))
        written["sha256"] = digest(written)
        # Orbax refuses arrays without elements; their shapes are in `written`.
        numbered = {_key(number): x for number, x in enumerate(leaves.values()) if x.size}
        self._manager.save(step, numbered, written)

    def steps(self) -> list[int]:
        """The numbers of the complete checkpoints, in ascending order."""
        return self._manager.steps()

    def restore(
        self, *, like: TrainState, step: int | None = None, allow_previous: bool = False
    ) -> Restored:
        """Reads a checkpoint, on any number of devices.

        Args:
            like: a state of the same structure, shapes and dtypes: `step.init(params)`.
            step: the number of the checkpoint; by default the newest complete one.
            allow_previous: if it is damaged, read the one before, and so on, with a warning.
                Damaged checkpoints are renamed to `damaged-<step>`, not deleted; with `read_only`
                they are left as they are.

        Returns:
            A `Restored`: the number of the checkpoint, the state, and what was saved about it.

        Raises:
            CheckpointError: there is no such checkpoint; it is damaged; or it was saved with
                another model or optimizer.
            StateError: `like` is not a state.
        """
        check_is_state(like, "Checkpoints.restore(like=...)", "pass like=step.init(params)")
        self.wait()
        candidates, failures = self._candidates(step), dict[int, str]()
        for _ in range(TRIES):
            for candidate in candidates if allow_previous else candidates[:1]:
                try:
                    restored = self._read(candidate, like)
                except _DamageError as damage:
                    failures[candidate] = f"checkpoint {candidate}: {damage}"
                    continue
                if failures:
                    self._pass_over(failures, candidate)
                return restored
            if not self._manager.is_overtaken(candidates[0]):
                break
            again = self._candidates(step)
            if again == candidates:  # no newer checkpoint has replaced it
                break
            candidates, failures = again, {}
        others = [s for s in candidates[1:] if not allow_previous]
        hint = (
            f" Or allow the previous one, {others[0]} (allow_previous=True of Trainer.fit or "
            "Checkpoints.restore; on the command line multitower resume DIR --allow-previous)."
            if others
            else ""
        )
        raise CheckpointError(
            f"{self.directory} is damaged: {'; '.join(failures.values())}. Put the files back from "
            f"a copy.{hint}"
        )

    def newest_about(self) -> tuple[int, dict[str, Any]] | None:
        """Reads the JSON values that were saved with the newest state, without the state.

        Returns:
            The number of the checkpoint, and the values; None if there is no checkpoint.

        Raises:
            CheckpointError: it cannot be read.
        """
        while steps := self.steps():
            try:
                return steps[-1], self.about_of(steps[-1])
            except CheckpointError:
                if not self._manager.is_overtaken(steps[-1]):
                    raise
        return None

    def about_of(self, step: int) -> dict[str, Any]:
        """Reads the JSON values that were saved with a state, without the state.

        Args:
            step: the number of the checkpoint.

        Returns:
            The values.

        Raises:
            CheckpointError: there is no such checkpoint, or they cannot be read.
        """
        return self._entry(step, "about")

    def run_of(self, step: int) -> dict[str, Any]:
        """The settings of the run that saved a checkpoint; empty if none were saved.

        After `restore` they are those that were read with the state: a run may have replaced this
        checkpoint since.

        Args:
            step: the number of the checkpoint.

        Returns:
            The JSON values that were passed to `save` as `run`.

        Raises:
            CheckpointError: there is no such checkpoint, or it cannot be read.
        """
        return self._runs[step] if step in self._runs else self._entry(step, "run")

    def _entry(self, step: int, name: str) -> dict[str, Any]:
        try:
            return self._read_json(step).get(name, {})
        except Exception as error:
            raise CheckpointError(
                f"{self.directory}/{step} cannot be read: {first_line(error)}. Put the files back "
                "from a copy, or move that directory away."
            ) from error

    def raise_failure(self) -> None:
        """Raises the error of a save that failed in the background, if there is one.

        Raises:
            CheckpointError: a save failed.
        """
        self._manager.raise_failure()

    def wait(self) -> None:
        """Waits until everything is on disk.

        Raises:
            CheckpointError: a save has failed.
        """
        self._manager.wait()

    def close(self) -> None:
        """Waits until everything is on disk, and ends the background threads.

        Raises:
            CheckpointError: a save has failed.
        """
        self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, step: int, like: TrainState) -> Restored:
        try:
            written = self._read_json(step)
            named = named_leaves(like)
            check_same_leaves(written["leaves"], named, f"{self.directory}/{step}")
            pattern = [
                np.empty(shape, np.dtype(jnp.dtype(dtype)))
                for dtype, shape in written["leaves"].values()
            ]
            numbered = {_key(number): x for number, x in enumerate(pattern) if x.size}
            read = self._manager.read_arrays(step, numbered)
        except (CheckpointError, _DamageError):
            raise
        except Exception as error:  # Orbax and TensorStore raise many kinds for broken files
            reason = f"it cannot be read ({type(error).__name__}: {first_line(error)})"
            raise _DamageError(reason) from error
        leaves = [np.asarray(read.get(_key(n), empty)) for n, empty in enumerate(pattern)]
        if fingerprint(leaves) != written["fingerprint"]:
            raise _DamageError("its bits are not the ones that were saved")
        filled = [leaf_like(leaf, old) for leaf, (_, old) in zip(leaves, named, strict=True)]
        state: TrainState = jax.tree.unflatten(jax.tree.structure(like), filled)
        state.kept.origin = like.kept.origin  # the model of the state that was passed
        self._runs[step] = written.get("run", {})
        return Restored(step, state, written["about"])

    def _read_json(self, step: int) -> dict[str, Any]:
        from multitower.training.checkpoints.about import digest  # noqa: PLC0415 (importing stays quick)

        found = self._manager.read_json(step)
        if found.pop("sha256", None) != digest(found):
            raise _DamageError("what was saved about it is not what is there")
        if found["step"] != step:
            raise _DamageError(f"it is checkpoint {found['step']} under another name")
        return found

    def _candidates(self, step: int | None) -> list[int]:
        """The numbers of the checkpoints to try, in this order."""
        steps = self.steps()
        if step is not None and step not in steps:
            raise CheckpointError(
                f"{self.directory} has no complete checkpoint {step}; it has {steps or 'none'}."
            )
        if not steps:
            raise CheckpointError(f"{self.directory} has no complete checkpoint to resume from.")
        return [s for s in reversed(steps) if step is None or s <= step]

    def _pass_over(self, failures: Mapping[int, str], found: int) -> None:
        from multitower.training.checkpoints.damaged import set_aside  # noqa: PLC0415 (rarely needed)

        left = f"left as they are in {self.directory}"
        if not self._read_only:
            set_aside(self.directory, failures)
            self._manager.reload()
            left = f"renamed to {self.directory}/damaged-*"
        warn(
            f"{'; '.join(failures.values())}. Continuing from checkpoint {found}; the damaged "
            f"files were {left}."
        )


class _DamageError(Exception):
    """A checkpoint exists but cannot be used."""


def _key(number: int) -> str:
    return f"{number:05d}"
