"""multitower: JAX code written for one device runs on all of them, with the same answer."""

from multitower import testing
from multitower.checks.parallel_check import check_parallel
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
from multitower.functions.autodiff import grad, value_and_grad
from multitower.functions.averaging import average_gradients
from multitower.functions.parallel import make_parallel
from multitower.hardware.configuration import configure
from multitower.hardware.devices import device, devices
from multitower.steps.fingerprint import fingerprint
from multitower.steps.train_state import TrainState
from multitower.steps.train_step import TrainStep, train_step
from multitower.towers.feeding import prefetch, shard
from multitower.towers.lazy_rows import LazyRows
from multitower.towers.tower_rows import TowerRows
from multitower.training.progress import Progress
from multitower.training.trainer import Trainer

__all__ = [
    "ArgumentError",
    "BatchError",
    "CheckpointError",
    "ConfigurationError",
    "DataError",
    "DeviceError",
    "GradientError",
    "Interrupted",
    "LazyRows",
    "MultitowerError",
    "MultitowerWarning",
    "NonFiniteError",
    "OutputError",
    "Progress",
    "RunError",
    "StateError",
    "TowerRows",
    "TrainState",
    "TrainStep",
    "Trainer",
    "average_gradients",
    "check_parallel",
    "configure",
    "device",
    "devices",
    "fingerprint",
    "grad",
    "make_parallel",
    "prefetch",
    "shard",
    "testing",
    "train_step",
    "value_and_grad",
]
