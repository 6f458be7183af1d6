"""check_parallel: is this function safe to run data parallel? If not, why, before any training."""

from collections.abc import Callable
from typing import Any

from multitower.checks.problems import ParallelCheck
from multitower.functions.objective import Reduction, check_reduction
from multitower.towers.placement import check_towers
from multitower.towers.surroundings import refuse_traced


def check_parallel(
    fn: Callable[..., Any],
    *example_args: Any,
    in_axes: Any = None,
    towers: int | None = None,
    reduction: Reduction = "mean",
    **extras: Any,
) -> ParallelCheck:
    """Checks whether a function is safe to run data parallel; names the result and line if not.

    It reads the program of `fn`, and runs `fn` on the whole batch and on the rows of every tower:

    - results with one entry per row: the towers' results, concatenated, must equal the batch's;
    - other results: the mean over towers must equal the batch's value;
    - `mt.ratio`: the towers' totals and weights must add up to the batch's;
    - a state for the next step must not add up rows, since the towers' states are averaged;
    - gradients of the loss, if the first argument is shared like parameters: the mean over towers
      must equal the batch's gradient.

    Results that depend on random numbers are judged from the program only.

    Args:
        fn: a loss, a metric or a model, as for `value_and_grad`, `train_step` or `make_parallel`.
        *example_args: real inputs with two or more rows; ideally as many as in a real batch.
        in_axes: as for `value_and_grad`. By default the first of several arguments is shared, like
            the parameters of a loss, and the others are split along axis 0.
        towers: the number of towers to split the rows into; by default one for each device, and at
            least two.
        reduction: as for `value_and_grad`: a loss of shape () is the `"mean"` over its rows, or
            their `"sum"`.
        **extras: keyword arguments of `fn`, such as `rng` and `model_state`. They are shared, but
            each tower gets a different typed PRNG key. A loss that takes `rng` gets a fixed key if
            you pass none. If `fn` itself has a keyword argument named `in_axes`, `towers` or
            `reduction`, bind it with `functools.partial`.

    Returns:
        A `ParallelCheck`: print it, or use it as a bool.

    Raises:
        ArgumentError: an argument can be neither split nor shared; or the loss takes
            `model_state`, and you passed none; or the call is inside `jax.jit` or the like.
        BatchError: fewer than two rows, or arguments with different numbers of rows.
        OutputError: a result that is neither an array nor a number.
        DeviceError: `towers` is not a whole number above 0.

    Example:
        >>> import jax.numpy as jnp
        >>> import multitower as mt
        >>> x = jnp.arange(12.0).reshape(6, 2)
        >>> print(mt.check_parallel(lambda w, x: (x @ w - 1) ** 2, jnp.ones(2), x, towers=3))
        safe to run data parallel (tried with 6 rows in 3 towers)
        >>> check = mt.check_parallel(lambda w, x: jnp.sum((x @ w - 1) ** 2), jnp.ones(2), x)
        >>> bool(check), check.problems[0].kind
        (False, 'sum')
    """
    check_reduction(reduction)
    refuse_traced("multitower.check_parallel", example_args, extras)
    towers = check_towers(towers)
    from multitower.trials.trial import Trial  # noqa: PLC0415 (at the first call: importing stays quick)
    from multitower.trials.verdict import judge  # noqa: PLC0415 (at the first call: importing stays quick)

    return judge(Trial.of(fn, example_args, extras, in_axes, reduction), towers)
