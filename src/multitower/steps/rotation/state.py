"""A training state of which every group of towers has a version of its own.

The newest parameters, the optimizer's state and the average are on one device, the home. A version
is on the devices of its group's towers. A user sees all versions in `local`, stacked along axis 0.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from multitower.errors import StateError
from multitower.models.state import enter
from multitower.steps.rotation.turns import Turns
from multitower.steps.runner import own_copy
from multitower.steps.state.bundles import shown, shown_on_host, with_bundles
from multitower.steps.state.fields import Fields
from multitower.steps.state.kept import KeptState
from multitower.towers.global_arrays import replicate, stack_on_host
from multitower.towers.placement import Placement
from multitower.towers.rows import Tower


class Version(NamedTuple):
    """The parameters that a group of towers computes its next gradient with.

    Attributes:
        made: the number of updates that made them, kept on the host to avoid a host-device sync.
        copies: parameters, model state and the run's key, once for each device of the group;
            parameters and model state may be bundles.
    """

    made: int
    copies: list[Fields]


class RotationParts(NamedTuple):
    """A state with asynchronous updates, in parts.

    Attributes:
        num_updates: updates made so far, on the host, which must know whose turn it is.
        home: the state without the versions, on the home device; its fields may be bundles.
        versions: the version of each group.
    """

    num_updates: int
    home: Fields
    versions: list[Version]

    def state(self, maker: object) -> KeptState:
        """The training state that a user gets for these parts."""
        return KeptState.of_parts(
            self,
            RotationParts.fields,
            maker,
            join_shared=lambda parts: shown(parts.home),
            join_step=lambda parts: parts.home.step,
            apart=("local",),
        )

    def fields(self) -> Fields:
        """The whole state, with the versions on the host: a device may lack the memory for them."""
        each = [(one.copies[0].params, one.copies[0].model_state) for one in self.versions]
        stacked = jax.tree.map(lambda *leaves: stack_on_host(leaves), *each)
        params, model_state = map(shown_on_host, stacked)
        made = np.array([one.made for one in self.versions], np.int32)
        made.flags.writeable = False  # what a user wrote into it would be lost
        local = {"params": params, "model_state": model_state, "step": made}
        return shown(self.home)._replace(local=local)

    def after(self, group: int, new: Fields, turns: Turns) -> "RotationParts":
        """The parts after an update of a group, which goes on with the new parameters."""
        count = self.num_updates + 1
        old = self.versions[group].copies
        copies = [
            _seen(jax.device_put((new.params, new.model_state), device), copy.rng)
            for copy, device in zip(old, turns.groups[group].devices, strict=True)
        ]
        versions = [*self.versions]
        versions[group] = Version(count, copies)
        return RotationParts(count, new, versions)


def parts_of(fields: Fields, turns: Turns) -> RotationParts:
    """The parts of a state that is whole; the originals are never overwritten.

    Without versions, as after `init`, all groups begin with the newest parameters. PRNG keys in the
    model state of a group are then those of its first tower.

    Raises:
        StateError: the versions are of other groups.
    """
    check_versions(fields, turns)
    home = Placement((turns.home,), (0,))
    (own,) = replicate(jax.tree.map(own_copy, fields._replace(local=None)), home)
    count = int(fields.step)  # host-device sync
    versions: list[Version] = []
    for number, place in enumerate(turns.groups):
        if fields.local is None:
            first = Tower(np.int32(number * turns.num_towers), None, None)
            own_state = jax.tree.map(lambda leaf, here=first: enter(leaf, here), own.model_state)
            made, pair = count, (own.params, own_state)
        else:
            made = int(fields.local["step"][number])
            given = (fields.local["params"], fields.local["model_state"])
            pair = jax.tree.map(lambda leaf, n=number: own_copy(leaf[n]), given)
        copies = [_seen(*one) for one in replicate((pair, own.rng), place)]
        versions.append(Version(made, with_bundles(copies)))
    (own,) = with_bundles([own])
    return RotationParts(count, own, versions)


def check_versions(fields: Fields, turns: Turns) -> None:
    """Refuses versions that are not those of these groups.

    Raises:
        StateError: `fields.local` holds other groups, or something else.
    """
    if fields.local is None:
        return
    here = len(turns.groups)
    wanted = jax.tree.structure((fields.params, fields.model_state, 0))
    found = fields.local if isinstance(fields.local, dict) else {}
    given = tuple(found.get(name) for name in ("params", "model_state", "step"))
    there = np.shape(found.get("step", 0))
    if jax.tree.structure(given) == wanted and there == (here,):
        return
    kept = f"versions of {there[0]} groups" if len(there) == 1 else "none of this kind"
    raise StateError(
        f"state.local has {kept}, and this step has {here} groups of towers with a version each. "
        "To let all of them begin with state.params, pass state.replace(local=None); to go on "
        "exactly, make the step with the same towers= and max_staleness=."
    )


def _seen(pair: tuple[Any, Any], rng: Any) -> Fields:
    """What a tower gets of a state: everything but the optimizer's state and the average."""
    params, model_state = pair
    return Fields((), params, None, None, model_state, rng)
