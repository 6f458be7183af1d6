"""Same run: the settings that determine a run's results, saved with its checkpoints.

A resume with another learning rate or batch size would give the results of neither run, so the
settings are compared. Devices, processes, `shard_update` and `shard_params` may change.
"""

import functools
import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from multitower.checks.equations import program_inside, small_constant
from multitower.errors import RunError
from multitower.hardware.configuration import uses_onednn
from multitower.hardware.provenance import versions
from multitower.steps.optimizing.optimizer import call_update
from multitower.steps.state.fingerprint import fingerprint
from multitower.training.hyperparameters import first_values

_OPTIMIZER = "optimizer"
_ROWS = "rows"
_FIRST_STATE = "first {} state"
_UNTRAINED = "untrained arrays"
_WAY_OUT = (
    "Resuming would give the results of neither run. Use the saved settings, choose another "
    "run_dir, or pass allow_changes=True."
)
# Settings of JAX that change random numbers or rounding.
_OF_JAX = ("jax_enable_x64", "jax_threefry_partitionable", "jax_default_matmul_precision")
# How many constants of an optimizer's update are kept, to name a learning rate that differs; and
# how often one is kept that is there once for every parameter.
_MANY, _OFTEN = 40, 3


def describe_run(
    optimizer: Any, params: Any, settings: Mapping[str, Any], untrained: Any = ()
) -> dict[str, Any]:
    """The settings that determine a run's results, as JSON values.

    Args:
        optimizer: an optax optimizer.
        params: the parameters, or their shapes and dtypes.
        settings: options that determine the results. A function of the step count is described by
            its traced program, an optimizer by the program of its update.
        untrained: arrays of the model that checkpoints do not hold, from `TrainStep.untrained`.

    Returns:
        The settings, and a description of the optimizer's update.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)

    def update_of(optimizer: Any) -> Any:
        opt_state = jax.eval_shape(optimizer.init, shapes)
        update = functools.partial(call_update, optimizer)
        return _program(jax.make_jaxpr(update)(shapes, opt_state, shapes, np.float32(0)))

    def described(value: Any) -> Any:
        if callable(value):
            return _program(jax.make_jaxpr(value)(np.int32(1)))
        return update_of(value) if hasattr(value, "update") else value

    settings = {**settings, _OPTIMIZER: optimizer}
    found = {name: described(value) for name, value in settings.items()}
    # With optax.inject_hyperparams the learning rate is in the state, not a constant of the update.
    for name, value in settings.items():
        if hasattr(value, "init"):
            found |= first_values(value, shapes, name)
            found[_FIRST_STATE.format(name)] = _program(jax.make_jaxpr(value.init)(shapes))
    found["onednn"] = uses_onednn()
    config: Any = jax.config  # its options are not in its type
    found |= {name: getattr(config, name, None) for name in _OF_JAX}
    found |= describe_arrays(untrained)
    return {**found, "versions": {name: versions()[name] for name in ("jax", "optax")}}


def in_words(run: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with a short text in place of every program, to be shown if they differ."""

    def shown(value: Any) -> Any:
        if not isinstance(value, dict) or "sha256" not in value:
            return value
        return f"one with the numbers {_listed(value['numbers'])}, checksum {value['sha256'][:16]}"

    return {name: shown(value) for name, value in run.items()}


def check_same_run(saved: Mapping[str, Any], now: Mapping[str, Any], where: Any) -> None:
    """Compares the settings of this run with those of a checkpoint.

    Args:
        saved: settings saved with the checkpoint; empty if there are none.
        now: settings of this run, from `describe_run`.
        where: the directory of the checkpoints, for the message.

    Raises:
        RunError: a setting differs; the message names it.
    """
    check_same_arrays(saved, now, where)
    # Other versions of JAX or optax may trace the same update to another program.
    is_comparable = saved.get("versions") == now["versions"]
    for name, value in now.items():
        if name == "versions" or name not in saved or saved[name] == value:
            continue
        is_program = isinstance(value, dict) and isinstance(saved[name], dict)
        # The numbers only name what differs, and a nan that was saved among them equals no other.
        if is_program and (not is_comparable or saved[name]["sha256"] == value["sha256"]):
            continue
        there, here = _difference(saved[name], value)
        raise RunError(
            f"{where} holds a run with another {name}: the run there has {there}, this one has "
            f"{here}. {_WAY_OUT}"
        )


def describe_arrays(untrained: Any) -> dict[str, Any]:
    """The fingerprint of arrays that checkpoints do not hold; part of `describe_run`."""
    return {_UNTRAINED: fingerprint(untrained)}


def check_same_arrays(saved: Mapping[str, Any], now: Mapping[str, Any], where: Any) -> None:
    """Refuses a model whose untrained arrays differ from those of a checkpoint's model.

    Args:
        saved: settings saved with the checkpoint; empty if there are none.
        now: the description of this model, from `describe_arrays`.
        where: the directory of the checkpoints, for the message.

    Raises:
        RunError: they differ.
    """
    if saved.get(_UNTRAINED, now[_UNTRAINED]) != now[_UNTRAINED]:
        raise RunError(
            f"{where} holds a run whose model has other integers, flags or keys. These arrays are "
            "not trained, and a checkpoint does not hold them: the weights would be put together "
            "with those of the model that you passed. Make it as the run did, from the same seed."
        )


class BatchRows:
    """The batch size of a run without `global_batch`, found from its batches.

    Args:
        run: settings from `describe_run`; the largest number of rows so far is written into it.
        saved: settings saved with the checkpoint; empty for a new run, or if changes are allowed.

    Attributes:
        wanted: rows of a full batch of the checkpoint's run; None if unknown.
    """

    def __init__(self, run: dict[str, Any], saved: Mapping[str, Any]) -> None:
        self.wanted: int | None = saved.get(_ROWS) or None
        self._run = run
        self._run[_ROWS] = self.wanted or 0  # a checkpoint may come before the next full batch
        self._num_seen = 0
        self._most = 0

    def see(self, num_rows: int) -> None:
        """Notes the rows of a batch. One smaller batch may end an epoch; a second one is an error.

        Raises:
            RunError: the checkpoint's run has batches of another size.
        """
        if self._num_seen >= 2 and num_rows <= self._most:
            return
        self._num_seen += 1
        most = self._most = max(num_rows, self._most)
        self._run[_ROWS] = max(most, self._run[_ROWS])
        wanted = self.wanted
        if wanted is not None and (most > wanted or (self._num_seen == 2 and most < wanted)):
            larger = (
                f" If batches of {wanted} rows are still to come, also pass "
                f"Trainer(global_batch={wanted})."
            )
            raise RunError(
                f"the run in the checkpoint has batches of {wanted} rows, this one has {most}. "
                f"{_WAY_OUT}{larger if most < wanted else ''}"
            )


def _difference(saved: Any, now: Any) -> tuple[str, str]:
    if not (isinstance(saved, dict) and isinstance(now, dict)):
        return repr(saved), repr(now)
    old, new = Counter(saved["numbers"]), Counter(now["numbers"])
    there, here = list(old - new), list(new - old)
    if not (there or here):
        return "one with another program", "the same numbers in it"
    return f"one with the numbers {_listed(there)}", _listed(here)


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers) or "none"


def _program(program: Any) -> dict[str, Any]:
    """The checksum of a program, and the constants in it by size."""
    # The text shows addresses of functions, which differ from process to process; `str` of a
    # program has colours on a terminal.
    text = re.sub(r"0x[0-9a-f]+", "", program.pretty_print(use_color=False))
    checksum = hashlib.sha256(text.encode())
    for constant in _arrays(program):
        checksum.update(np.asarray(constant).tobytes())
    counts = Counter(number for number in _numbers(program) if not math.isnan(number))
    numbers = [number for number in sorted(counts) for _ in range(min(counts[number], _OFTEN))]
    return {"sha256": checksum.hexdigest(), "numbers": numbers[:_MANY]}


def _arrays(program: Any) -> Iterator[Any]:
    """The constant arrays of a program, and of the programs inside it."""
    yield from getattr(program, "consts", ())
    for equation in program.eqns:
        literals = [atom.val for atom in equation.invars if isinstance(atom, core.Literal)]
        yield from (value for value in literals if np.ndim(value))
        for given in equation.params.values():
            for inner in given if isinstance(given, tuple) else (given,):
                if hasattr(inner, "eqns"):
                    yield from _arrays(inner)


def _numbers(program: Any) -> list[float]:
    """The sizes of the scalar constants of a program, and of the programs inside it."""
    jaxpr = getattr(program, "jaxpr", program)
    values = [small_constant(value) for value in getattr(program, "consts", ())]
    found = [_size(value) for value in values if value is not None and value.ndim == 0]
    atoms = [atom for equation in jaxpr.eqns for atom in equation.invars]
    literals = [x.val for x in (*atoms, *jaxpr.outvars) if isinstance(x, core.Literal)]
    found.extend(_size(value) for value in literals if np.ndim(value) == 0)
    for equation in jaxpr.eqns:
        inside = program_inside(equation.params, len(equation.invars))
        if inside is not None:
            found.extend(_numbers(inside))
    return found


def _size(value: Any) -> float:
    """The absolute value of a number; of a complex one, too, as in updates of complex weights."""
    return float(np.abs(np.asarray(value)))
