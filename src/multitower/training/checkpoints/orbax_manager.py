"""Orbax's manager of one directory of checkpoints, as `Checkpoints` needs it.

It saves in the background and raises all failures as `CheckpointError`. A reader tries again if a
run replaces the checkpoint meanwhile. If a save fails in one of several processes, no process waits
for the others.
"""

import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from multitower.errors import CheckpointError
from multitower.processes.together import are_several, settle
from multitower.training.checkpoints.orbax_library import first_line, load_orbax

# A reader tries again if a run replaces the checkpoint: how often, and after how many seconds.
TRIES = 50
_PAUSE_S = 0.05


class OrbaxManager:
    """Writes and reads arrays and JSON values by the number of a step.

    Args:
        directory: of the checkpoints; created if it does not exist.
        keep_last: how many checkpoints to keep.
        read_only: create, delete and clean up nothing.

    Raises:
        CheckpointError: the directory cannot be created or written, or Orbax is not installed.
    """

    # Orbax numbers all saves of a program consecutively, and names barriers by these numbers: two
    # saves of different managers at the same time would mix up their barriers.
    _last_to_save: ClassVar["OrbaxManager | None"] = None

    def __init__(self, directory: Path, *, keep_last: int, read_only: bool) -> None:
        if not read_only:
            _refuse_marks(directory)
        self._directory = directory
        self._ocp = load_orbax()
        self._is_broken = False
        self._handled = sys.exception()
        options = self._ocp.CheckpointManagerOptions(
            max_to_keep=keep_last,
            read_only=read_only,
            cleanup_tmp_directories=not read_only,
            async_options=self._ocp.options.AsyncOptions(
                # Else threads wait 20 minutes for a directory that could not be created, and the
                # program does not end before.
                create_directories_asynchronously=False,
                barrier_sync_fn=self._meet,
            ),
        )
        self._read_only = read_only
        self._opened = self._open(options)

    def save(self, step: int, arrays: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Saves in the background; returns when the arrays may be overwritten.

        Raises:
            CheckpointError: this save has failed, or that of another manager in the background; or
                this manager is `read_only`.
        """
        if self._read_only:  # Orbax would skip it without an error
            raise CheckpointError(
                f"Checkpoints({str(self._directory)!r}, read_only=True): nothing can be saved with "
                "them. Leave read_only out."
            )
        before = OrbaxManager._last_to_save
        if before not in (None, self) and not before._is_broken:
            before.wait()
        OrbaxManager._last_to_save = self
        args = self._ocp.args
        self._handled = sys.exception()
        try:
            self._manager.save(
                step,
                args=args.Composite(
                    state=args.StandardSave(dict(arrays)), about=args.JsonSave(dict(about))
                ),
            )
        except Exception as error:  # errors of the file system, or of Orbax
            raise self._failed(error) from error

    def read_json(self, step: int) -> dict[str, Any]:
        """The JSON values saved with the arrays; raises whatever Orbax raises."""
        args = self._ocp.args
        return self._manager.restore(step, args=args.Composite(about=args.JsonRestore())).about

    def read_arrays(
        self, step: int, pattern: Mapping[str, np.ndarray[Any, Any]]
    ) -> dict[str, np.ndarray[Any, Any]]:
        """The arrays, in the shapes and dtypes of a pattern; raises whatever Orbax raises."""
        args = self._ocp.args
        restored = args.Composite(state=args.StandardRestore(dict(pattern)))
        return self._manager.restore(step, args=restored).state

    def steps(self) -> list[int]:
        """The numbers of the complete checkpoints, in ascending order."""
        found = self._manager.all_steps()
        if self._read_only and not found:
            # A run may have replaced the only checkpoint by a newer one while Orbax listed them.
            time.sleep(_PAUSE_S)
            self.reload()
            found = self._manager.all_steps()
        return sorted(found)

    def is_overtaken(self, step: int) -> bool:
        """Whether a run has replaced this checkpoint by a newer one meanwhile.

        While its files are deleted one by one, the old checkpoint is still listed, so this looks at
        the newest one.
        """
        if not self._read_only:
            return False
        time.sleep(_PAUSE_S)
        self.reload()
        return self.steps()[-1:] != [step]

    def reload(self) -> None:
        """Lists the directory again."""
        for _ in range(TRIES):
            with suppress(OSError, ValueError):  # a checkpoint was deleted while Orbax listed them
                return self._manager.reload()
            time.sleep(_PAUSE_S)

    @property
    def _manager(self) -> Any:
        settle()  # Orbax exchanges numbers of steps between processes
        return self._opened

    def raise_failure(self) -> None:
        """Raises the error of a save that failed in the background, if there is one.

        Raises:
            CheckpointError: a save failed.
        """
        try:
            self._opened.check_for_errors()
        except Exception as error:
            raise self._failed(error) from error

    def wait(self) -> None:
        """Waits until everything is on disk.

        Raises:
            CheckpointError: a save has failed.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Waits until everything is on disk, and ends the background threads.

        Raises:
            CheckpointError: a save has failed.
        """
        if OrbaxManager._last_to_save is self:
            OrbaxManager._last_to_save = None
        if self._is_broken and are_several():
            return  # the error was raised; Orbax would wait for processes that wait for this one
        try:
            self.wait()
        finally:
            try:
                self._manager.close()  # it writes, too, and raises an earlier failure again
            except Exception as error:
                raise self._failed(error) from error

    def _open(self, options: Any) -> Any:
        settle()
        for left in reversed(range(TRIES)):
            try:
                return self._ocp.CheckpointManager(self._directory, options=options)
            except (OSError, ValueError) as error:
                # Orbax opens every checkpoint that it listed, also one that was deleted since.
                if self._read_only and left and self._directory.is_dir():
                    time.sleep(_PAUSE_S)
                    continue
                wanted = "read" if self._read_only else "written"
                raise CheckpointError(
                    f"checkpoints cannot be {'read' if self._read_only else 'kept'} in "
                    f"{self._directory}: {error}. Choose a directory that can be {wanted}."
                ) from error

    def _meet(self, *, key: str, timeout_ms: int) -> None:
        """Orbax's barrier, except after a failed save.

        Orbax also waits at its barriers while it raises an error. The other processes do not get
        there, so all would wait for 20 minutes.
        """
        error = sys.exception()
        if error is not None and error is not self._handled:
            raise error
        self._ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

    def _failed(self, error: Exception) -> CheckpointError:
        self._is_broken = True
        free = shutil.disk_usage(self._directory).free if self._directory.exists() else 0
        return CheckpointError(
            f"a checkpoint could not be written to {self._directory}: {first_line(error)} "
            f"({free // 2**20} MiB are free there). The checkpoints before it are untouched. Make "
            "room or mend the directory, and resume."
        )


def _refuse_marks(directory: Path) -> None:
    """Refuses a directory in which Orbax would write, without an error, what it cannot read.

    It looks for its own files by a pattern that begins with the path, and TensorStore takes a
    backslash for a slash.
    """
    if any(mark in directory.as_posix() for mark in "[\\"):
        raise CheckpointError(
            f"checkpoints cannot be kept in {directory}: Orbax takes [ in a path for the beginning "
            "of a pattern, and \\ for /, and could not read again what it writes there. Choose a "
            "directory without these characters, such as lr=0.1 in place of [lr=0.1]."
        )
