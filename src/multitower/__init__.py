"""multitower: JAX code written for one device runs on all of them, with the same answer."""

from multitower import testing
from multitower.autodiff import grad, value_and_grad
from multitower.averaging import average_gradients
from multitower.configuration import configure
from multitower.devices import device, devices
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
from multitower.feeding import prefetch, shard
from multitower.fingerprint import fingerprint
from multitower.lazy_rows import LazyRows
from multitower.parallel import make_parallel
from multitower.parallel_check import check_parallel
from multitower.progress import Progress
from multitower.tower_rows import TowerRows
from multitower.train_state import TrainState
from multitower.train_step import TrainStep, train_step
from multitower.trainer import Trainer

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
