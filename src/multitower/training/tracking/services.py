"""Experiment trackers: Weights & Biases, MLflow and Trackio, each a class for one run.

The constructor starts a run, or continues the run with a known id. A status is
`"finished"`, `"stopped"` or `"failed"`.
"""

import importlib
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

_SEND_AFTER_S = 5.0
_SEND_AT_MOST = 1000  # metrics of one request to MLflow


class Service(Protocol):
    """A run in an experiment tracker."""

    id: str

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs the metrics of a step."""

    def flush(self) -> None:
        """Sends metrics that are not sent yet."""

    def finish(self, status: str) -> None:
        """Ends the logged run."""


class Wandb:
    """Weights & Biases; its own settings decide where it logs to, such as WANDB_MODE=offline."""

    def __init__(
        self, project: str, name: str, config: Mapping[str, Any], directory: Path, known: str | None
    ) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(
            project=project,
            name=name,
            config=dict(config),
            dir=str(directory),
            id=known,
            resume="allow",
            allow_val_change=True,  # a resumed run may have other devices
        )
        self.id: str = self._run.id

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs the metrics of a step."""
        if step >= self._run.step:  # steps that a resumed run makes again were logged before
            self._run.log(dict(metrics), step=step)

    def flush(self) -> None:
        """Nothing: its own process sends metrics."""

    def finish(self, status: str) -> None:
        """Ends the logged run."""
        self._run.finish(exit_code=0 if status == "finished" else 1)


class Mlflow:
    """MLflow; MLFLOW_TRACKING_URI decides where it logs to."""

    _STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}  # noqa: RUF012 (constant)

    def __init__(
        self, project: str, name: str, config: Mapping[str, Any], _: Path, known: str | None
    ) -> None:
        self._client: Any = importlib.import_module("mlflow").MlflowClient()
        self._metric: Any = importlib.import_module("mlflow.entities").Metric
        self._waiting: list[Any] = []
        self._sent_at = time.monotonic()
        if known is None:
            found = self._client.get_experiment_by_name(project)
            number = self._client.create_experiment(project) if not found else found.experiment_id
            self.id: str = self._client.create_run(number, run_name=name).info.run_id
            for key, value in config.items():
                self._client.log_param(self.id, key, value)
        else:
            self.id = known
            self._client.update_run(known, status="RUNNING")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs the metrics of a step."""
        now = round(1000 * time.time())
        self._waiting += [self._metric(name, value, now, step) for name, value in metrics.items()]
        # Every request may cross a network: one per step would keep the devices waiting.
        is_late = time.monotonic() - self._sent_at > _SEND_AFTER_S
        if is_late or len(self._waiting) >= _SEND_AT_MOST:
            self.flush()

    def flush(self) -> None:
        """Sends metrics that are not sent yet."""
        waiting, self._waiting = self._waiting, []
        self._sent_at = time.monotonic()
        for first in range(0, len(waiting), _SEND_AT_MOST):
            self._client.log_batch(self.id, metrics=waiting[first : first + _SEND_AT_MOST])

    def finish(self, status: str) -> None:
        """Ends the logged run."""
        self.flush()
        self._client.set_terminated(self.id, self._STATUS[status])


class Trackio:
    """Trackio, whose runs have names as ids; it logs to TRACKIO_DIR or TRACKIO_SPACE_ID."""

    def __init__(
        self, project: str, name: str, config: Mapping[str, Any], _: Path, known: str | None
    ) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        self.id: str = known or f"{name}-{time.time_ns():x}"
        self._run = self._trackio.init(
            project=project, name=self.id, config=dict(config), resume="allow", embed=False
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs the metrics of a step."""
        # Its store has no NaN.
        self._run.log({k: v if math.isfinite(v) else None for k, v in metrics.items()}, step=step)

    def flush(self) -> None:
        """Nothing: its own thread writes metrics."""

    def finish(self, status: str) -> None:
        """Ends the logged run."""
        del status  # Trackio has no status
        self._trackio.finish()


# By the name that a user writes: the class, and the package that it needs.
SERVICES: dict[str, tuple[Any, str]] = {
    "wandb": (Wandb, "wandb"),
    "mlflow": (Mlflow, "mlflow"),
    "trackio": (Trackio, "trackio"),
}
