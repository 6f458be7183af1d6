"""Scores a model where it was trained: on the same devices, and in the same stages."""

from collections.abc import Callable, Mapping
from typing import Any

from multitower.errors import ArgumentError, warn
from multitower.training.scoring.chunks import Repeatable
from multitower.training.scoring.evaluation import evaluate


def scored_as_trained(
    run: Callable[..., Any],
    options: Mapping[str, Any],
    given: tuple[Any, Any],
    data: Any,
    **how: Any,
) -> Any:
    """Calls `evaluate` or `predict`, in stages if the step has them and the function can be cut.

    Args:
        run: `evaluate` or `predict`.
        options: the options of the step, by the names of `train_step`'s arguments.
        given: the pair of the function, and the parameters or the module.
        data: the data set.
        how: other arguments of `run`.
    """
    batches = Repeatable(data)
    where = {name: options[name] for name in ("devices", "towers")}
    if options["stages"] is not None:
        stages = {name: options[name] for name in ("stages", "layout", "interleave")}
        try:
            return run(*given, batches.again(), **how, **where, **stages)
        except ArgumentError as error:
            if not batches.can_repeat:  # earlier batches cannot be read again
                raise
            what = "the metrics" if run is evaluate else "the function"
            warn(f"{what}: {error} As it is, every device gets the whole model.")
    return run(*given, batches.again(), **how, **where)
