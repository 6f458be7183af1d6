"""The options for asynchronous updates, and the options that exclude them."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from multitower.errors import ArgumentError, listed, whole_number
from multitower.processes.together import are_several

Updates = Literal["synchronous", "asynchronous"]
StaleScale = Callable[[Any], Any]


class RotationOptions(NamedTuple):
    """Which group of towers makes which update.

    Attributes:
        max_staleness: one less than the number of groups; None for a group for every tower.
        rotation: the numbers of groups in the order of their turns; None for 0, 1, 2, ...
        stale_scale: the factor of an update, as a function of its staleness; None for 1.
        momentum_correction: whether the optimizer's momentum is lowered for stale gradients.
    """

    max_staleness: int | None
    rotation: tuple[int, ...] | None
    stale_scale: StaleScale | None
    momentum_correction: bool = False

    def num_groups(self, num_towers: int) -> int:
        """How many groups this many towers make.

        Raises:
            ArgumentError: the towers do not divide into groups of one size, or the rotation does
                not name every group.
        """
        groups = num_towers if self.max_staleness is None else self.max_staleness + 1
        if num_towers % groups:
            counts = [count - 1 for count in range(1, num_towers + 1) if num_towers % count == 0]
            raise ArgumentError(
                f"max_staleness={self.max_staleness} makes {groups} groups of towers, and "
                f"{num_towers} towers do not divide into {groups} groups of one size. Use "
                f"max_staleness={listed(counts, 'or')}, or another number of towers."
            )
        if self.rotation is not None and set(self.rotation) != set(range(groups)):
            raise ArgumentError(
                f"rotation={self.rotation} must name each of the {groups} groups, 0 to "
                f"{groups - 1}, at least once, and no others; for example "
                f"rotation={tuple(range(groups))}, the default."
            )
        return groups


def check_rotation(
    updates: Any, given: dict[str, Any], towers: int | None, others: dict[str, Any]
) -> RotationOptions | None:
    """The options for asynchronous updates; None for synchronous ones.

    Args:
        updates: `"synchronous"` or `"asynchronous"`.
        given: `max_staleness`, `rotation`, `stale_scale` and `momentum_correction`, as for
            `train_step`; None or False for what is not given.
        towers: as for `train_step`.
        others: options that exclude asynchronous updates, by name, each true if it is set.

    Raises:
        ArgumentError: a value is out of range or of the wrong kind, options exclude each other, or
            several processes make one run.
    """
    if updates not in ("synchronous", "asynchronous"):
        raise ArgumentError(f"updates={updates!r}: say 'synchronous' or 'asynchronous'.")
    if updates == "synchronous":
        for name, value in given.items():
            if value is not None and value is not False:
                raise ArgumentError(
                    f"{name}= is for asynchronous updates, and updates='synchronous': say "
                    f"updates='asynchronous', or leave {name} out."
                )
        return None
    for name, value in others.items():
        if value:
            raise ArgumentError(
                f"updates='asynchronous' and {name}= exclude each other: the parameters, the "
                "optimizer and its update are on one device. Leave one of them out."
            )
    if are_several():
        raise ArgumentError(
            "updates='asynchronous' runs in one process, which drives all devices of one machine, "
            "and this run has several. Start one process, or leave updates= out."
        )
    stale_scale = given["stale_scale"]
    if stale_scale is not None and not callable(stale_scale):
        raise ArgumentError(
            f"stale_scale={stale_scale!r}: it must be a function of the staleness, such as "
            "lambda staleness: 1 / (1 + staleness)."
        )
    options = RotationOptions(
        _checked_staleness(given["max_staleness"]),
        _checked_rotation(given["rotation"]),
        stale_scale,
        given["momentum_correction"],
    )
    if towers is not None:
        options.num_groups(towers)
    return options


def refuse_meeting_in_rotation(meets: str) -> ArgumentError:
    """The error for a loss in which towers exchange values; `meets` names the first place."""
    return ArgumentError(
        f"the loss exchanges values between towers ({meets}), and with updates='asynchronous' a "
        "tower does not wait for others. Leave updates= out, or the exchange."
    )


def _checked_staleness(value: Any) -> int | None:
    if value is None:
        return None
    more = ": with S, the towers take turns in S + 1 groups"
    return whole_number("max_staleness", value, 0, more=more)


def _checked_rotation(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        order = tuple(whole_number("rotation", group, 0) for group in value)
    except (TypeError, ValueError):  # also our own error for one of them
        order = ()
    if not order:
        raise ArgumentError(
            f"rotation={value!r}: it must be the numbers of groups, from 0, in the order of their "
            "turns, such as (0, 1, 0, 2)."
        )
    return order
