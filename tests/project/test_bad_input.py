"""Tables of wrong uses: each has its error class, and a message that says what and what to do.

Here is that of devices, and what holds after every error; the other test_bad_*.py have the rest.
The lie each would catch: a program that goes on with something else than what was meant. The
first words of `message` name what was given, the last ones the way out.
"""

import numpy as np
import optax
import pytest

import multitower as mt
from wrong_uses import W, X, add_one, assert_refused, losses

WRONG = {
    "too many devices": (
        lambda: mt.devices(9),
        mt.DeviceError,
        r"devices=9, but .* has 8: cpu:0.*at most 8.*simulated_devices=9",
    ),
    "no devices": (lambda: mt.devices(0), mt.DeviceError, "devices=0.*at least one"),
    "an empty list of devices": (lambda: mt.devices([]), mt.DeviceError, r"\[\].*at least one"),
    "a device twice": (
        lambda: mt.make_parallel(add_one, devices=["cpu:1", "cpu:1"])(X),
        mt.DeviceError,
        "cpu:1 twice.*raise towers=",
    ),
    "a device that is not there": (
        lambda: mt.devices("gpu:3"),
        mt.DeviceError,
        r"no device 'gpu:3'.*it has cpu:0.*soft=True",
    ),
    "no name of a device": (lambda: mt.devices("cpu:"), mt.DeviceError, "'cpu:'.*say 'gpu'"),
    "devices=2.0": (lambda: mt.devices(2.0), mt.DeviceError, "2.0 is neither a number.*say 2"),
    "devices=True": (lambda: mt.devices(True), mt.DeviceError, "True is neither"),
    "configure too late": (
        lambda: mt.configure(simulated_devices=3),
        mt.ConfigurationError,
        r"simulated_devices=3.*too late.*before the first array.*restart the kernel",
    ),
    "half a simulated device": (
        lambda: mt.configure(simulated_devices=0),
        mt.ConfigurationError,
        "simulated_devices=0.*1 or more",
    ),
    "more than all memory": (
        lambda: mt.configure(memory_fraction=90),
        mt.ConfigurationError,
        "memory_fraction=90 .*0.9 for nine tenths",
    ),
    "a share of the memory as text": (
        lambda: mt.configure(memory_fraction="0.5"),
        mt.ConfigurationError,
        "memory_fraction='0.5' must be above 0",
    ),
    "preallocate as text": (
        lambda: mt.configure(preallocate="no"),
        mt.ConfigurationError,
        "preallocate='no' must be True or False",
    ),
    "visible devices by name": (
        lambda: mt.configure(visible_devices="gpu"),
        mt.ConfigurationError,
        "visible_devices='gpu'.*'0,1'",
    ),
    **{
        f"towers={towers}": (
            lambda towers=towers: mt.make_parallel(add_one, towers=towers),
            mt.DeviceError,
            f"towers={towers}: it must be a whole number",
        )
        for towers in (0, -1, True, 2.5)
    },
}


@pytest.mark.parametrize("use", WRONG)
def test_wrong_use(use):
    assert_refused(*WRONG[use])


@pytest.mark.parametrize("towers", [None, 4])
def test_nothing_half_done_is_left_behind(towers):
    """Lie: a failed step spends the state, or remembers the rows of the batch that failed."""
    calls = []

    def picky(w, x):
        calls.append(1)
        if x.shape[1] != 3:
            raise KeyError("only three columns")
        return losses(w, x)

    made = mt.train_step(picky, optax.sgd(0.1), devices=2, towers=towers)
    state = made.init(W)
    for wrong in (X[:0], {"x": "text"}, np.ones((40, 4), np.float32)):
        with pytest.raises((mt.MultitowerError, KeyError)):
            made(state, wrong)
    state, metrics = made(state, X)
    assert float(metrics["loss"]) == 9.0
    assert int(state.step) == 1
    with pytest.raises(mt.BatchError, match="at most 10"):
        made(state, np.ones((13, 3), np.float32))
    state, _ = made(state, X)
    assert int(state.step) == 2


@pytest.mark.parametrize("towers", [None, 4])
def test_nan_is_kept_not_hidden(towers):
    x = X.copy()
    x[7, 1] = np.nan
    value, gradient = mt.value_and_grad(losses, devices=2, towers=towers)(W, x)
    assert np.isnan(value)
    assert np.isnan(gradient).all()
    added = mt.make_parallel(add_one, devices=2, towers=towers)(x)
    np.testing.assert_array_equal(added, x + 1)


def test_errors_are_the_builtins_that_fit():
    """Lie: `except ValueError` in a user's program stops working."""
    assert issubclass(mt.DeviceError, ValueError)
    assert issubclass(mt.BatchError, ValueError)
    assert issubclass(mt.OutputError, ValueError)
    assert issubclass(mt.GradientError, ValueError)
    assert issubclass(mt.StateError, ValueError)
    assert issubclass(mt.ArgumentError, TypeError)
    assert issubclass(mt.ConfigurationError, RuntimeError)
    every = [getattr(mt, n) for n in mt.__all__ if n.endswith("Error")]
    assert all(issubclass(error, mt.MultitowerError) for error in every)
