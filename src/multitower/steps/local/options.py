"""The options for local updates, and the options that exclude them."""

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from multitower.errors import ArgumentError, whole_number

if TYPE_CHECKING:
    import optax

LocalState = Literal["keep", "average"]
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9  # DiLoCo's


def refuse_meeting_in_local(meets: str) -> ArgumentError:
    """The error for a loss in which towers exchange values; `meets` names the first place."""
    does, way_out = f"exchanges values between towers ({meets})", "leave the exchange out"
    if meets == "axis_index":
        does = "asks for the tower's number, as mt.row_index does"
        way_out = "pass the numbers of the rows as an array of the batch"
    return ArgumentError(
        f"the loss {does}, and with sync_every= towers exchange nothing between two meetings. "
        f"Leave sync_every= out, or {way_out}."
    )


class LocalOptions(NamedTuple):
    """How towers make updates of their own.

    Attributes:
        sync_every: towers meet after every step whose number, from 1, is a multiple of this.
        outer_optimizer: makes the update at a meeting.
        averages_state: whether floats of the inner optimizers' states are averaged there.
        most: steps that a call makes at most; None if a call is one step.
    """

    sync_every: int
    outer_optimizer: "optax.GradientTransformation"
    averages_state: bool
    most: int | None = None


def default_outer_optimizer() -> "optax.GradientTransformation":
    """DiLoCo's: SGD with Nesterov momentum.

    Source: Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training".
    """
    import optax  # noqa: PLC0415 (importing stays quick)

    return optax.sgd(OUTER_LR, OUTER_MOMENTUM, nesterov=True)


def check_local(
    sync_every: Any, outer_optimizer: Any, local_state: Any, others: dict[str, Any]
) -> LocalOptions | None:
    """The options for local updates; None if towers meet in every step.

    Args:
        sync_every: steps from one meeting to the next, 1 or more; None for no local updates.
        outer_optimizer: an optax optimizer, or None.
        local_state: `"keep"` or `"average"`.
        others: options that exclude it, by name, each true if it is set.

    Raises:
        ArgumentError: a value is out of range or of the wrong kind, or options exclude each other.
    """
    if local_state not in get_args(LocalState):
        raise ArgumentError(f"local_state={local_state!r}: say 'keep' or 'average'.")
    if sync_every is None:
        if outer_optimizer is not None or local_state != "keep":
            raise ArgumentError(
                "outer_optimizer= and local_state= are for local updates, and sync_every= is "
                "missing: say after how many steps the towers meet, such as sync_every=16, or "
                "leave them out."
            )
        return None
    more = ": the steps from one meeting of the towers to the next"
    sync_every = whole_number("sync_every", sync_every, 1, more=more)
    given = [name for name, value in others.items() if value]
    if given:
        raise ArgumentError(
            f"sync_every= and {given[0]}= exclude each other: with local updates every tower has "
            "whole parameters and a whole optimizer state of its own. Leave one of them out."
        )
    if outer_optimizer is None:
        outer_optimizer = default_outer_optimizer()
    if not (hasattr(outer_optimizer, "init") and hasattr(outer_optimizer, "update")):
        raise ArgumentError(
            f"outer_optimizer={outer_optimizer!r}: give an optax optimizer, such as "
            "optax.sgd(0.7, momentum=0.9, nesterov=True)."
        )
    return LocalOptions(sync_every, _without_loss(outer_optimizer), local_state == "average")


def _without_loss(outer: "optax.GradientTransformation") -> "optax.GradientTransformation":
    """The optimizer, called without the extra argument `value`: a meeting has no loss."""
    import optax  # noqa: PLC0415 (importing stays quick)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        try:
            return outer.update(updates, state, params)
        except TypeError as error:
            if "argument" not in str(error):
                raise
            raise ArgumentError(
                "the outer_optimizer's update wants more than gradients, state and parameters "
                f"({error}), and where towers meet there is no loss to give it. Use one that does "
                "not look at the loss, such as optax.sgd or optax.adam."
            ) from error

    return optax.GradientTransformation(outer.init, update)
