"""A training state of which every tower has its own: parameters, optimizer state, model state.

What the towers had when they last met is whole on every device. A user sees what they have of their
own as arrays with a first axis for towers, on the host: a device may lack the memory for them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from multitower.errors import StateError
from multitower.processes.together import whole_on_host
from multitower.steps.runner import as_shown, fresh_on_all_devices, fresh_on_device
from multitower.steps.state.bundles import (
    bundled,
    numbered,
    shown_on_host,
    with_bundles,
    with_changes_in,
    with_leaves,
)
from multitower.steps.state.changes import Changes
from multitower.steps.state.fields import Fields
from multitower.steps.state.kept import KeptState
from multitower.towers.global_arrays import as_global, host_leaf, replicate, stack_on_host
from multitower.towers.placement import Placement


class Own(NamedTuple):
    """What a tower has of its own.

    Attributes:
        params: its parameters.
        opt_state: the inner optimizer's state.
        model_state: what its loss returned last.
        num_rows: real rows that it was given since the last meeting, int32, shape ().
    """

    params: Any
    opt_state: Any
    model_state: Any
    num_rows: Any


class LocalParts(NamedTuple):
    """A state with local updates, in parts.

    Attributes:
        replicas: what is the same for all towers, once per local device; `local` is None, and
            other fields may be bundles.
        towers: the `Own` of each local tower, by its number, on its device; it may be a bundle.
        step: the number of steps made, on the host, which decides when to meet.
    """

    replicas: list[Fields]
    towers: dict[int, Any]
    step: int


def all_alike(fields: Fields, own: Own, placement: Placement) -> LocalParts:
    """The parts of a state in which every tower has `own`; the arguments are not overwritten."""
    on_host = jax.tree.map(host_leaf, own)
    return _parts(fields, lambda tower: on_host, placement)


def parts_of(fields: Fields, placement: Placement) -> LocalParts:
    """The parts of a state that is whole, such as one from a checkpoint.

    Raises:
        StateError: it was made with another number of towers.
    """
    refuse_other_towers(fields, placement)
    on_host = jax.tree.map(host_leaf, fields.local)
    return _parts(fields, lambda tower: _of_tower(on_host, tower), placement)


def refuse_other_towers(fields: Fields, placement: Placement) -> None:
    """Refuses a state of another number of towers.

    Raises:
        StateError: its `local` holds another number of towers than `placement`.
    """
    (num_towers,) = fields.local.num_rows.shape
    if num_towers != placement.num_towers:
        raise StateError(
            f"the state holds what each of {num_towers} towers has of its own, and this step has "
            f"{placement.num_towers} towers: use towers={num_towers}. (Without towers= there is "
            "one for each device.)"
        )


def take_changes(parts: LocalParts, changes: Changes, placement: Placement) -> LocalParts:
    """The parts with what a user has written into the state.

    Every tower gets new parameters and a new model state, too.
    """
    whole = {name: leaves for name, leaves in changes.items() if name != "local"}
    copies = replicate(whole, placement)
    replicas = [with_changes_in(*pair) for pair in zip(parts.replicas, copies, strict=True)]
    on_host = jax.tree.map(host_leaf, dict(changes))

    in_all = {name: on_host.get(name, {}) for name in ("params", "model_state")}

    def changed(own: Any, tower: int) -> Any:
        new = numbered(own, Own._fields, in_all)
        new |= _of_tower(on_host.get("local", {}), tower)
        return with_leaves(own, fresh_on_device(new, placement.homes[tower]))

    return LocalParts(replicas, {t: changed(own, t) for t, own in parts.towers.items()}, parts.step)


def as_state(parts: LocalParts, placement: Placement, maker: object) -> KeptState:
    """The training state that a user gets for these parts."""

    def join_shared(parts: LocalParts) -> Fields:
        return as_shown(parts.replicas, placement)

    def join(parts: LocalParts) -> Fields:
        towers = [parts.towers[tower] for tower in sorted(parts.towers)]
        local = jax.tree.map(lambda *own: stack_on_host(own, placement), *towers)
        return join_shared(parts)._replace(local=shown_on_host(local))

    count = lambda parts: as_global([fields.step for fields in parts.replicas], placement)
    return KeptState.of_parts(
        parts, join, maker, join_shared=join_shared, join_step=count, apart=("local",)
    )


def _parts(fields: Fields, own_of: Callable[[int], Own], placement: Placement) -> LocalParts:
    whole = fresh_on_all_devices(fields._replace(local=None), placement)
    homes = placement.homes
    towers = {tower: fresh_on_device(own_of(tower), home) for tower, home in homes.items()}
    towers = dict(zip(towers, bundled([*towers.values()]), strict=True))
    replicas = with_bundles(replicate(whole, placement))
    return LocalParts(replicas, towers, int(whole_on_host(whole.step)))


def _of_tower(tree: Any, tower: int) -> Any:
    """One tower's leaves, from leaves with a first axis for towers."""
    return jax.tree.map(lambda leaf: leaf[tower], tree)
