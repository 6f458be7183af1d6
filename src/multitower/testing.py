"""testing: assertions for the test suites of programs that use multitower."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from multitower.errors import ArgumentError
from multitower.hardware.devices import devices as find_devices
from multitower.steps.train import train_step

if TYPE_CHECKING:
    import optax


def assert_same_bits(
    loss_fn: Callable[..., Any],
    optimizer: "optax.GradientTransformation",
    params: Any,
    batches: Iterable[Any],
    *,
    devices: Sequence[int] | None = None,
    towers: int | None = None,
    model_state: Any = None,
    rng: Any = None,
    **options: Any,
) -> None:
    """Asserts that training steps give the same bits on any number of devices.

    For every number of devices n it makes
    `mt.train_step(loss_fn, optimizer, devices=n, towers=towers, **options)` and runs one step for
    each batch. After each step it compares parameters, optimizer state, moving average, model state
    and metrics.

    Args:
        loss_fn: as for `train_step`.
        optimizer: as for `train_step`.
        params: as for `TrainStep.init`.
        batches: the batches of the first few steps, on the host.
        devices: the numbers of devices to compare, at least two; by default 1, 2, ... up to all
            devices, and at most `towers`. The same number twice checks that a run is reproducible.
        towers: the number of towers; by default the largest number of devices.
        model_state: as for `TrainStep.init`.
        rng: as for `TrainStep.init`.
        **options: further options of `train_step`, such as `ema_decay`.

    Raises:
        AssertionError: the bits differ; the message names the first step, stage, leaf and element
            that differ, and the two values.
        ArgumentError: no batches, or fewer than two numbers of devices.
        MultitowerError: an error of `train_step` or of a step.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optax
        >>> import multitower as mt
        >>> losses = lambda w, batch: (batch @ w - 1) ** 2
        >>> rows = np.random.default_rng(0).normal(size=(3, 16, 4)).astype(np.float32)
        >>> mt.testing.assert_same_bits(losses, optax.sgd(0.1), jnp.ones(4), rows, devices=[1, 2])
    """
    batches = list(batches)
    if not batches:
        raise ArgumentError("assert_same_bits: no batches. Give those of the first few steps.")
    if devices is None:
        devices = range(1, min(len(find_devices()), towers or len(find_devices())) + 1)
    counts = list(devices)
    if len(counts) < 2:
        raise ArgumentError(
            f"assert_same_bits: devices={counts}: at least two runs are compared. On a single "
            "device, devices=[1, 1] checks that a run repeats itself; or "
            "mt.configure(simulated_devices=8), before JAX starts, makes eight."
        )
    num_towers = max(counts) if towers is None else towers

    def run(count: int) -> Iterator[Any]:
        step = train_step(loss_fn, optimizer, devices=count, towers=num_towers, **options)
        state = step.init(params, model_state=model_state, rng=rng)
        for batch in batches:
            state, metrics = step(state, batch)
            yield state, metrics

    from multitower.proof.verification import compare  # noqa: PLC0415 (at the first call: importing stays quick)

    differences = compare(counts, run).differences
    if differences:
        raise AssertionError("not the same bits.\n" + "\n".join(str(one) for one in differences))
