"""check_parallel: can this function be cut into towers? Said before any training, and why not."""

from collections.abc import Callable
from typing import Any

from multitower.checks.problems import ParallelCheck
from multitower.functions.objective import Reduction, check_reduction
from multitower.towers.placement import check_towers


def check_parallel(
    fn: Callable[..., Any],
    *example_args: Any,
    in_axes: Any = None,
    towers: int | None = None,
    reduction: Reduction = "mean",
    **extras: Any,
) -> ParallelCheck:
    """Says whether a function can be cut into towers, and if not, which result and which line.

    It runs `fn` on the whole batch and on the rows of every tower, and reads its program. By row:
    the towers' results joined must be the whole. Without rows: their mean must be the whole's.
    `mt.ratio`: the totals and weights of the towers, added up, must give the whole's. If the first
    argument is shared, as parameters are, the gradients of the loss must be the whole's, too.
    Results that random numbers went into are judged by the program alone.

    Args:
        fn: a loss, a metric, a model: what is to go to `value_and_grad`, `train_step` or
            `make_parallel`.
        *example_args: real inputs, two rows or more; better as many as a real batch has.
        in_axes: as for `value_and_grad`; by default the first of several arguments is shared, as
            the parameters of a loss are, and the others are cut along axis 0.
        towers: into how many towers the rows are cut; by default one for each device, two at
            least.
        reduction: as for `value_and_grad`: a loss of shape () is the `"mean"` over its rows, or
            their `"sum"`.
        **extras: keyword arguments of `fn` such as `rng` and `model_state`, which are shared; a
            typed key is another one in every tower. Flags, strings and functions are handed on as
            they are. A loss that needs `rng` and gets none has a fixed key. What `fn` itself calls
            `in_axes`, `towers` or `reduction` goes there by `functools.partial`.

    Returns:
        What was found; print it.

    Raises:
        ArgumentError: an argument that can neither be split nor shared; or the loss needs
            `model_state`, and there is none.
        BatchError: fewer than two rows, or row counts that differ.
        DeviceError: `towers` is no number of towers.

    Example:
        >>> import jax.numpy as jnp
        >>> import multitower as mt
        >>> x = jnp.arange(12.0).reshape(6, 2)
        >>> print(mt.check_parallel(lambda w, x: (x @ w - 1) ** 2, jnp.ones(2), x, towers=3))
        can be cut into towers (tried with 6 rows in 3 towers)
        >>> check = mt.check_parallel(lambda w, x: jnp.sum((x @ w - 1) ** 2), jnp.ones(2), x)
        >>> bool(check), check.problems[0].kind
        (False, 'sum')
    """
    check_reduction(reduction)
    check_towers(towers)
    from multitower.trials.trial import Trial  # noqa: PLC0415 (at the first call: importing stays quick)
    from multitower.trials.verdict import judge  # noqa: PLC0415 (at the first call: importing stays quick)

    return judge(Trial.of(fn, example_args, extras, in_axes, reduction), towers)
