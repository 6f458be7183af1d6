"""Orbax's manager of one directory of checkpoints, as `Checkpoints` needs it.

It saves in the background and raises all failures as `CheckpointError`. A reader looks again if a
run replaces the checkpoint meanwhile. If a save fails on several processes, none waits for the
others.
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

# A reader that a run overtakes looks again, so often and after so many seconds.
TRIES = 50
_PAUSE_S = 0.05


class OrbaxManager:
    """Writes and reads arrays and JSON values by the number of a step.

    Args:
        directory: where; made if need be.
        keep_last: how many to keep.
        read_only: nothing is made, deleted or cleaned up there.

    Raises:
        CheckpointError: the directory cannot be made or written, or Orbax is not installed.
    """

    # Orbax numbers all saves of a program in one row, and its processes meet under these names and
    # numbers: two saves of different managers at once would meet each other.
    _last_to_save: ClassVar["OrbaxManager | None"] = None

    def __init__(self, directory: Path, *, keep_last: int, read_only: bool) -> None:
        self._directory = directory
        self._ocp = load_orbax()
        self._is_broken = False
        self._handled = sys.exception()
        options = self._ocp.CheckpointManagerOptions(
            max_to_keep=keep_last,
            read_only=read_only,
            cleanup_tmp_directories=not read_only,
            async_options=self._ocp.options.AsyncOptions(
                # Else threads wait 20 minutes for a directory that could not be made, and with them
                # the end of the program.
                create_directories_asynchronously=False,
                barrier_sync_fn=self._meet,
            ),
        )
        self._read_only = read_only
        self._opened = self._open(options)

    def save(self, step: int, arrays: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Saves in the background; returns when the arrays may be overwritten.

        Raises:
            CheckpointError: this save has failed, or that of another manager in the background.
        """
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
        except Exception as error:  # Orbax raises what the file system, or it itself, raises
            raise self._failed(error) from error

    def read_json(self, step: int) -> dict[str, Any]:
        """What was saved beside the arrays; raises whatever Orbax raises."""
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
            # A run may have put a newer one in the place of the only one while Orbax was looking.
            time.sleep(_PAUSE_S)
            self.reload()
            found = self._manager.all_steps()
        return sorted(found)

    def is_overtaken(self, step: int) -> bool:
        """Whether a run has replaced this checkpoint by a newer one meanwhile.

        While its files are deleted one by one, the old one is still among the steps: the newest
        decides.
        """
        if not self._read_only:
            return False
        time.sleep(_PAUSE_S)
        self.reload()
        return self.steps()[-1:] != [step]

    def reload(self) -> None:
        """Looks at the directory again."""
        for _ in range(TRIES):
            with suppress(OSError, ValueError):  # one of them went while Orbax was looking
                return self._manager.reload()
            time.sleep(_PAUSE_S)

    @property
    def _manager(self) -> Any:
        settle()  # it exchanges numbers of steps between processes
        return self._opened

    def raise_failure(self) -> None:
        """Raises the error of a save that has failed in the background.

        Raises:
            CheckpointError: there was one.
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
        """Waits, and lets the background threads go.

        Raises:
            CheckpointError: a save has failed.
        """
        if OrbaxManager._last_to_save is self:
            OrbaxManager._last_to_save = None
        if self._is_broken and are_several():
            return  # it has been said, and Orbax would wait for the others, who wait for this one
        try:
            self.wait()
        finally:
            try:
                self._manager.close()  # writes too, and says again what has failed before
            except Exception as error:
                raise self._failed(error) from error

    def _open(self, options: Any) -> Any:
        settle()
        for left in reversed(range(TRIES)):
            try:
                return self._ocp.CheckpointManager(self._directory, options=options)
            except (OSError, ValueError) as error:
                # Orbax looks into every checkpoint that it has found, also one that is gone by now.
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

        Orbax also waits for the other processes while it raises an error. They do not come, so all
        processes would wait for 20 minutes.
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
