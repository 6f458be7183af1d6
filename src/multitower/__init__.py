"""multitower: JAX code written for one device runs on all of them, with the same answer."""

from multitower.autodiff import grad, value_and_grad
from multitower.averaging import average_gradients
from multitower.devices import configure, device, devices
from multitower.errors import (
    ArgumentError,
    BatchError,
    ConfigurationError,
    DeviceError,
    GradientError,
    MultitowerError,
    MultitowerWarning,
    OutputError,
    RunError,
    StateError,
)
from multitower.feeding import TowerRows, prefetch, shard
from multitower.fingerprint import fingerprint
from multitower.parallel import make_parallel
from multitower.train_state import TrainState
from multitower.train_step import TrainStep, train_step

__all__ = [
    "ArgumentError",
    "BatchError",
    "ConfigurationError",
    "DeviceError",
    "GradientError",
    "MultitowerError",
    "MultitowerWarning",
    "OutputError",
    "RunError",
    "StateError",
    "TowerRows",
    "TrainState",
    "TrainStep",
    "average_gradients",
    "configure",
    "device",
    "devices",
    "fingerprint",
    "grad",
    "make_parallel",
    "prefetch",
    "shard",
    "train_step",
    "value_and_grad",
]
