"""ExperimentLog: a hook that logs a run to an experiment tracker."""

import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from multitower.errors import (
    ArgumentError,
    Interrupted,
    RunError,
    did_you_mean,
    install_command,
    warn,
)
from multitower.processes.together import is_first
from multitower.training.progress import Progress

if TYPE_CHECKING:
    from multitower.training.tracking.services import Service

LOGGED = "logged.json"
_WAY_OUT = {
    "wandb": "Run wandb login once, or set WANDB_MODE=offline to log to the run directory.",
    "mlflow": "Set MLFLOW_TRACKING_URI to a server, or to a file: sqlite:///mlflow.db.",
    "trackio": "TRACKIO_DIR is the directory that it writes to.",
}


class ExperimentLog:
    """A hook that logs a run to Weights & Biases, MLflow or Trackio.

    It logs the configuration, the metrics of every step (`train/loss`), and those of every test
    phase (`test/accuracy`). With several processes only process 0 logs. The id of the logged run is
    kept in `run_dir/logged.json`, so that a resumed run continues the same logged run.

    If a service stops answering, there is a warning, and the run continues without it.

    Args:
        service: `"wandb"`, `"mlflow"` or `"trackio"`. Each reads its own environment variables,
            such as `WANDB_MODE`, `MLFLOW_TRACKING_URI` and `TRACKIO_DIR`.
        run_dir: directory of the run; its name is the name of the logged run.
        config: the configuration to log, JSON values by name.
        project: the project (in MLflow the experiment) in which the service shows the run.

    Raises:
        ArgumentError: there is no such service.
        RunError: its package is not installed, it cannot start a run, or `logged.json` cannot be
            read.

    Example:
        >>> import multitower as mt
        >>> mt.ExperimentLog("wandbb", "runs/a")
        Traceback (most recent call last):
        multitower.ArgumentError: there is no service 'wandbb'. Did you mean 'wandb'? ...
    """

    def __init__(
        self,
        service: str,
        run_dir: str | Path,
        config: Mapping[str, Any] | None = None,
        *,
        project: str = "multitower",
    ) -> None:
        check_services([service])
        check_installed([service])
        self._service = service
        from multitower.training.tracking.services import SERVICES  # noqa: PLC0415 (importing stays quick)

        self._run: Service | None = None
        if not is_first():
            return
        directory = Path(run_dir).absolute()
        kind, _ = SERVICES[service]
        known = _logged_in(directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._run = run = kind(
                project, directory.name, dict(config or {}), directory, known.get(service)
            )
            _keep(directory, {**known, service: run.id})
        except Exception as error:  # many kinds: no network, no key, an unknown run, a full disk
            why = " ".join(str(error).split())
            raise RunError(f"{service} cannot start a run: {why} {_WAY_OUT[service]}") from error

    def __call__(self, progress: Progress) -> None:
        """Logs the metrics of a step or a test phase."""
        if self._run is None:
            return
        metrics = {f"{progress.phase}/{name}": value for name, value in progress.metrics.items()}
        if progress.examples_per_s is not None:
            metrics[f"{progress.phase}/examples_per_s"] = progress.examples_per_s
        try:
            self._run.log(metrics, progress.step)
        except Exception as error:
            self._give_up(error)

    def flush(self) -> None:
        """Sends metrics that are not sent yet."""
        try:
            if self._run is not None:
                self._run.flush()
        except Exception as error:
            self._give_up(error)

    def close(self, status: str = "finished") -> None:
        """Ends the logged run.

        Args:
            status: `"finished"`, `"stopped"` or `"failed"`, if the service has such a status.
        """
        run, self._run = self._run, None
        try:
            if run is not None:
                run.finish(status)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._run = None
        warn(
            f"{self._service}: {error}. The run goes on and logs nothing more there; a file has "
            "all of it, metrics.jsonl of multitower train, or that of mt.MetricsFile as a hook."
        )

    def __enter__(self) -> "ExperimentLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        stopped = isinstance(error, Interrupted | KeyboardInterrupt)
        self.close("finished" if error is None else "stopped" if stopped else "failed")


def check_services(names: list[str]) -> None:
    """Refuses services that do not exist.

    Raises:
        ArgumentError: there is no such service.
    """
    from multitower.training.tracking.services import SERVICES  # noqa: PLC0415 (importing stays quick)

    for name in names:
        if name not in SERVICES:
            raise ArgumentError(
                f"there is no service {name!r}. {did_you_mean(name, SERVICES)}There are: "
                f"{', '.join(SERVICES)}."
            )


def check_installed(names: list[str]) -> None:
    """Refuses services whose package is missing, before the run begins.

    Raises:
        RunError: a package is not installed; the message says how to install it.
    """
    from multitower.training.tracking.services import SERVICES  # noqa: PLC0415 (importing stays quick)

    for name in names:
        package = SERVICES[name][1]
        if importlib.util.find_spec(name) is None:
            raise RunError(
                f"logging to {name} needs {package}, which is not installed. "
                f"Run: {install_command(package)}"
            )


def _logged_in(directory: Path) -> dict[str, str]:
    """The ids of the logged runs, by name of the service."""
    path = directory / LOGGED
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
    except (OSError, ValueError, TypeError) as error:
        raise RunError(
            f"{path}, which has the id of the logged run, cannot be read: {error}. Put it back "
            "from a copy, or delete it to begin another logged run."
        ) from error


def _keep(directory: Path, ids: Mapping[str, str]) -> None:
    partial = directory / f".{LOGGED}.{os.getpid()}"
    partial.write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")
    partial.replace(directory / LOGGED)  # atomic: readers see no file or the whole file
