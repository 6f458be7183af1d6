"""multitower: JAX code written for one device runs on all of them, with the same answer."""

import sys

if sys.argv[:1] == ["-m"] and "multitower" in sys.orig_argv:  # python -m multitower
    import multitower_command

    multitower_command.hear_signals()  # before the imports below, which take a second

from multitower import testing
from multitower.data.augmentation import augment_batch, augmented
from multitower.data.batches import make_batch, make_batches
from multitower.errors import (
    ArgumentError,
    BatchError,
    CheckpointError,
    ConfigurationError,
    DataError,
    DeviceError,
    GradientError,
    Interrupted,
    MultitowerError,
    MultitowerWarning,
    NonFiniteError,
    OutputError,
    RunError,
    StateError,
)
from multitower.functions.all_rows import all_rows, row_index
from multitower.functions.autodiff import grad, value_and_grad
from multitower.functions.averaging import average_gradients
from multitower.functions.parallel import make_parallel
from multitower.functions.ratio import ratio
from multitower.hardware.configuration import configure
from multitower.hardware.devices import device, devices
from multitower.planning.plan import Plan, plan
from multitower.stages.marks import cut
from multitower.steps.state.fingerprint import fingerprint
from multitower.steps.state.train_state import TrainState
from multitower.steps.step import TrainStep
from multitower.steps.train import train_step
from multitower.towers.feeding import prefetch, shard
from multitower.towers.lazy_rows import LazyRows
from multitower.towers.split import TowerRows
from multitower.training.checkpoints.checkpoint import Checkpoints
from multitower.training.fitting.early_stopping import EarlyStopping
from multitower.training.observe import EventFiles, MetricsFile
from multitower.training.progress import Progress
from multitower.training.scoring.evaluation import evaluate
from multitower.training.scoring.prediction import predict
from multitower.training.tracking.log import ExperimentLog
from multitower.training.trainer import Trainer
from multitower.trials.check import check_parallel

__all__ = [
    "ArgumentError",
    "BatchError",
    "CheckpointError",
    "Checkpoints",
    "ConfigurationError",
    "DataError",
    "DeviceError",
    "EarlyStopping",
    "EventFiles",
    "ExperimentLog",
    "GradientError",
    "Interrupted",
    "LazyRows",
    "MetricsFile",
    "MultitowerError",
    "MultitowerWarning",
    "NonFiniteError",
    "OutputError",
    "Plan",
    "Progress",
    "RunError",
    "StateError",
    "TowerRows",
    "TrainState",
    "TrainStep",
    "Trainer",
    "all_rows",
    "augment_batch",
    "augmented",
    "average_gradients",
    "check_parallel",
    "configure",
    "cut",
    "device",
    "devices",
    "evaluate",
    "fingerprint",
    "grad",
    "make_batch",
    "make_batches",
    "make_parallel",
    "plan",
    "predict",
    "prefetch",
    "ratio",
    "row_index",
    "shard",
    "testing",
    "train_step",
    "value_and_grad",
]


def _name_classes() -> None:
    """Sets the module of public classes, so that a traceback shows multitower.BatchError."""
    for name in __all__:
        if isinstance(globals()[name], type):
            globals()[name].__module__ = "multitower"


_name_classes()


def __dir__() -> list[str]:
    return __all__
