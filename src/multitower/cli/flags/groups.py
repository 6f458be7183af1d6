"""Flags of stages, local and asynchronous updates, under headings of their own in --help."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import tyro

from multitower.cli.flags.shared import Number, WholeNumber, flag, one_of, switch, typed


class Group:
    """Flags under a heading of their own in --help; their names are those of `RunOptions`."""

    def options(self) -> dict[str, Any]:
        """The options that were typed."""
        return typed(**asdict(self))  # pyright: ignore[reportArgumentType] (of a dataclass)


@dataclass(frozen=True)
class StageFlags(Group):
    """With --towers: a model that is cut into stages, which live on different devices."""

    stages: Annotated[
        WholeNumber, flag("S", "Cut the model into S stages.", "the whole model on every device")
    ] = None
    interleave: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        switch("Put stages on devices in turn: stage 0, P, 2 P, ... on the first of P devices."),
    ] = False
    no_remat: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        switch("Keep what the backward pass needs, and compute nothing again."),
    ] = False

    def options(self) -> dict[str, Any]:
        """The options that were typed."""
        given = super().options()
        return {**given, "remat": False} if given.pop("no_remat", False) else given


@dataclass(frozen=True)
class LaidOutStageFlags(StageFlags):
    """With --towers: a model that is cut into stages, which live on different devices."""

    layout: Annotated[
        str | None,
        flag("RxD", "R replicas in all processes, of D devices each.", "as many as fit"),
    ] = None


@dataclass(frozen=True)
class LocalFlags(Group):
    """Local updates (DiLoCo, local SGD): every tower trains parameters of its own for a while."""

    sync_every: Annotated[
        WholeNumber,
        flag(
            "H",
            "The towers meet every H steps: one update is made from the average of their changes.",
            "all towers make every step together",
        ),
    ] = None
    outer_lr: Annotated[
        Number,
        flag("X", "Learning rate of the update where towers meet, by SGD.", "0.7"),
    ] = None
    outer_momentum: Annotated[
        Number,
        flag("X", "Nesterov momentum of that update; 0 for none.", "0.9"),
    ] = None
    local_state: Annotated[
        str | None,
        one_of("keep", "average"),
        flag(
            "keep|average",
            "At a meeting every tower keeps its optimizer state, or gets the average.",
            "keep",
        ),
    ] = None


@dataclass(frozen=True)
class RotationFlags(Group):
    """Asynchronous updates: each with the gradient of one tower, in a fixed rotation."""

    asynchronous: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        switch("Make asynchronous updates."),
    ] = False
    max_staleness: Annotated[
        WholeNumber,
        flag("S", "Let towers take turns in S + 1 groups.", "T - 1: each tower alone"),
    ] = None
    rotation: Annotated[
        str | None,
        flag(
            "I,I,I",
            "The groups, from 0, in the order of their turns, such as 0,1,0,2.",
            "one after the other",
        ),
    ] = None


@dataclass(frozen=True)
class AsynchronousFlags(RotationFlags):
    """Asynchronous updates: each with the gradient of one tower, in a fixed rotation."""

    stale_scale: Annotated[
        Number,
        flag("X", "Divide each update by (1 + its staleness)^X, with X such as 0.5 or 1.", "0"),
    ] = None
    momentum_correction: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        switch(
            "Lower the optimizer's momentum where gradients are stale, because staleness acts "
            "like momentum."
        ),
    ] = False


STAGES = tyro.conf.arg(name="stages")  # the headings in --help
LOCAL = tyro.conf.arg(name="local-updates")
ASYNCHRONOUS = tyro.conf.arg(name="asynchronous-updates")
NO_STAGES, NOT_LOCAL, SYNCHRONOUS = StageFlags(), LocalFlags(), AsynchronousFlags()
NO_LAID_OUT_STAGES, NO_ROTATION = LaidOutStageFlags(), RotationFlags()
