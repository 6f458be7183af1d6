"""A contender's processes, seen from the driver: started, asked, stopped and measured.

A worker that is not asked is stopped with SIGSTOP, all processes of it: thread pools of XLA, OpenMP
and gloo spin while they wait, and would take time from the one that measures.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from contenders import Contender

PATIENCE_S = 600

# What would change the work of one contender and not of another, or spare it a compilation.
_NOT_INHERITED = ("JAX_", "XLA_", "TF_", "TORCH", "OMP_", "MKL_", "NPROC", "KERAS_", "ACCELERATE_")


class WorkerError(RuntimeError):
    """A contender ended, or does not answer."""


class Worker:
    """One contender at one work.

    Attributes:
        contender: which.
        first_losses: one number after the start.
        first_step_s: from the start of the process to the end of its first step.
        versions: of its packages.
    """

    def __init__(self, contender: Contender, work: str, data: Path) -> None:
        self.contender = contender
        self._errors = data.with_name(f"{contender.key}.err").open("w+b")
        command = [str(contender.interpreter()), str(contender.script)]
        command += ["--contender", contender.key, "--work", work, "--data", str(data)]
        start = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment(data.parent / contender.key),
            # A group of its own, to be stopped as a whole. In the driver's session, so that the
            # system wakes it with SIGHUP and SIGCONT should the driver be killed.
            process_group=0,
        )
        try:
            ready = self._read()
        except BaseException:
            self.close()
            raise
        self.first_step_s = time.perf_counter() - start
        self.first_losses: list[float] = ready["losses"]
        self.versions: dict[str, str] = ready["versions"]
        self.pause()

    def ask(self, do: str, steps: int) -> dict[str, Any]:
        """Wakes the worker, has it do this, and stops it again."""
        os.killpg(self._process.pid, signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, "steps": steps}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("ended") from None
        answer = self._read()
        self.pause()
        return answer

    def pause(self) -> None:
        """Stops all its processes where they are."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def peak_memory_bytes(self) -> int | None:
        """The sum over its processes of the most that each had in memory, where Linux tells it."""
        statuses = [Path(f"/proc/{pid}/status") for pid in self.processes()]
        peaks = [
            int(line.split()[1]) * 1024
            for status in statuses
            for line in status.read_text().splitlines()
            if line.startswith("VmHWM:")
        ]
        return sum(peaks) or None

    def processes(self) -> list[int]:
        """The ids of all processes in its group; empty where there is no /proc."""
        found: list[int] = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                # After the command's name, which may hold spaces: state, parent, group.
                group = stat.read_text().rpartition(")")[2].split()[2]
            except OSError:  # it has just ended
                continue
            if int(group) == self._process.pid:
                found.append(int(stat.parent.name))
        return found

    def close(self) -> None:
        """Ends all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()

    def _read(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], PATIENCE_S)[0]:
            raise self._failed(f"did not answer for {PATIENCE_S} s")
        line = stdout.readline()
        if not line:
            raise self._failed("ended")
        return json.loads(line)

    def _failed(self, what: str) -> WorkerError:
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").splitlines()[-20:]
        return WorkerError("\n".join([f"{self.contender.title} {what}. It had said:", *last]))


def environment(scratch: Path) -> dict[str, str]:
    """The driver's own, without what tunes single contenders; nothing compiled is found again."""
    scratch.mkdir()
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)
    }
    return kept | {
        "OMP_NUM_THREADS": "1",  # what torchrun sets; the others do not use OpenMP
        "TORCHINDUCTOR_CACHE_DIR": str(scratch),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of compilers beside the ranks
    }
