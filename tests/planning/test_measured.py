"""Planned bytes against measured ones.

Measured are, at every program that a step starts on a device: the arrays that live there then, by
their buffers, and what the compiler says this very program needs besides. The most of all is what
the device must have. A plan comes from shapes and formulas, and never looks at a step.
"""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.engines import equal_programs, executable, reduction, same_bits, totals
from multitower.planning.layouts import Room, tower_layouts
from multitower.planning.programs import Programs
from multitower.planning.shapes import planned
from multitower.steps.blocks import update as sharded_update
from multitower.steps.local import meeting
from multitower.steps.local import runner as local_runner
from multitower.steps.rotation import runner as rotation_runner
from multitower.steps.rotation import sums as rotation_sums
from multitower.steps.staged import runner
from multitower.towers.rows import take_apart

# Where local and asynchronous updates compile their programs.
APART = (local_runner, meeting, rotation_runner, rotation_sums)

TOLERANCE = 0.05

left_by_others = {}  # bytes on each device before a test


def live_bytes(device):
    """Bytes of all arrays on a device; of two arrays that share a buffer it counts once."""
    shards = [
        shard.data
        for array in jax.live_arrays()
        if not array.is_deleted()
        for shard in array.addressable_shards
        if shard.device == device
    ]
    return sum({x.unsafe_buffer_pointer(): x.nbytes for x in shards}.values())


def needed_bytes(compiled, device):
    found = compiled.memory_analysis()
    beside = found.output_size_in_bytes - found.alias_size_in_bytes
    live = live_bytes(device) - left_by_others.get(device, 0)
    return live + found.temp_size_in_bytes + beside


class Watched:
    """A program that says how much memory its device needs whenever it is called."""

    def __init__(self, compiled, device, most):
        self._compiled, self._device, self._most = compiled, device, most

    def __getattr__(self, name):
        return getattr(self._compiled, name)

    def __call__(self, *args):
        needed = needed_bytes(self._compiled, self._device)
        self._most[self._device] = max(needed, self._most.get(self._device, 0))
        return self._compiled(*args)


@pytest.fixture
def most(monkeypatch):
    """The most bytes that each device needed so far."""
    gc.collect()
    for device in mt.devices():
        left_by_others[device] = live_bytes(device)
    found = {}
    compile_really, over_devices_really = executable.compile_for_each, reduction._over_devices

    def compile_for_each(fn, arguments, devices, **how):
        programs = compile_really(fn, arguments, devices, **how)
        return [Watched(one, device, found) for one, device in zip(programs, devices, strict=True)]

    def over_devices(placement, *args, **kwargs):
        jitted = over_devices_really(placement, *args, **kwargs)

        def run(*args):
            compiled = jitted.lower(*args).compile()
            for device in placement.devices:
                found[device] = max(needed_bytes(compiled, device), found.get(device, 0))
            return jitted(*args)

        return run

    for module in (same_bits, totals, sharded_update, equal_programs, runner, *APART):
        monkeypatch.setattr(module, "compile_for_each", compile_for_each)
    monkeypatch.setattr(reduction, "_over_devices", over_devices)
    return found


def measured(program, options, most):
    """The most bytes that a device needs in the second step."""
    loss, params, batch, optimizer, more = program
    step = mt.train_step(loss, optimizer, **options, **more)
    state, metrics = step(step.init(params), batch)
    most.clear()
    gc.collect()
    del metrics
    if "towers" in options:
        step(state, batch)
        return max(most.values())
    (run,) = step._makers.newest.runners.values()
    parts, fields = take_apart(batch, 0, name="batch"), state.kept.fields()
    is_split = options.keys() & {"shard_params", "shard_update"}
    program = run.program(fields) if is_split else run.program
    compiled = program.lower(fields, *run._feeder.feed(parts)).compile()
    return max(needed_bytes(compiled, device) for device in step.placement.devices)


def measured_apart(program, options, most):
    """The most bytes that a device needs once all versions of the parameters are different."""
    loss, params, batch, optimizer, more = program
    step = mt.train_step(loss, optimizer, **options, **more)
    state = step.init(params)
    for _ in range(options["towers"] if "updates" in options else options["sync_every"]):
        state, _ = step(state, batch)
    most.clear()
    gc.collect()
    for _ in range(options["towers"] if "updates" in options else options["sync_every"]):
        state, _ = step(state, batch)
    return max(most.values())


def mlp(width, depth, rows, dtype=np.float32):
    draw = np.random.default_rng(0)
    params = [
        {"w": draw.normal(size=(width, width)).astype(dtype), "b": np.zeros(width, dtype)}
        for _ in range(depth)
    ]

    def losses(params, batch):
        h = batch["x"]
        for layer in params:
            h = jnp.tanh(h @ layer["w"] + layer["b"])
        return (h.astype(jnp.float32).sum(-1) - batch["y"]) ** 2

    batch = {
        "x": draw.normal(size=(rows, width)).astype(dtype),
        "y": np.ones(rows, np.float32),
    }
    return losses, params, batch


def convolutions():
    draw = np.random.default_rng(0)
    params = {
        "in": draw.normal(size=(3, 3, 1, 16)).astype(np.float32),
        "out": draw.normal(size=(8 * 8 * 16, 40)).astype(np.float32),
    }

    def losses(params, batch):
        h = jax.lax.conv_general_dilated(
            batch["image"], params["in"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        logits = jax.nn.relu(h).reshape(len(h), -1) @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])

    images = draw.normal(size=(48, 8, 8, 1)).astype(np.float32)
    return losses, params, {"image": images, "label": np.arange(48) % 40}


PROGRAMS = {
    "small leaves, adam": (*mlp(256, 3, 48), optax.adam(1e-3), {}),
    "large leaves, sgd": (*mlp(400, 3, 48), optax.sgd(1e-3), {}),
    "bfloat16, adamw, average": (
        *mlp(400, 2, 48, jnp.bfloat16),
        optax.adamw(1e-3),
        {"ema_decay": 0.9},
    ),
    "sizes that do not divide": (*mlp(301, 2, 48), optax.sgd(1e-3, momentum=0.9), {}),
    "convolutions, large activations": (*convolutions(), optax.adam(1e-3), {}),
}


@pytest.mark.slow
def test_a_plan_is_what_is_measured(most):
    """Lie: a total from which the gradients, or the waiting sums, are missing."""
    losses, params, batch = mlp(64, 1, 16)
    program = (losses, params, batch, optax.sgd(1e-2, momentum=0.9), {})
    step = mt.train_step(losses, program[3])._step
    given = planned(step, params, batch, model_state=None, rng=None)
    layout = next(tower_layouts(given, Programs(given), Room(1, 1, 4), []))
    assert layout.options == {"devices": 1, "towers": 4}
    found = measured(program, layout.options, most)
    assert layout.total_bytes == pytest.approx(found, rel=TOLERANCE)


@pytest.mark.slow
def test_trap_the_heaviest_stage_underestimated(most):
    """Megatron-Bridge#5077: by 32 %, as the last stage's head was taken for a layer."""
    draw = np.random.default_rng(0)
    width, classes = 48, 3000
    params = [draw.normal(size=(width, n)).astype(np.float32) for n in (width, width, classes)]

    def losses(params, batch):
        h = mt.cut(jnp.tanh(batch["x"] @ params[0]))
        logits = mt.cut(jnp.tanh(h @ params[1])) @ params[2]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])

    rows = draw.normal(size=(48, width)).astype(np.float32)
    batch = {"x": rows, "label": np.arange(48)}
    program = (losses, params, batch, optax.adam(1e-3), {})
    plan = mt.plan(losses, program[3], params, batch, devices=3, towers=6)
    (layout,) = [
        one for one in plan.layouts if one.options.get("stages") == 3 and "remat" not in one.options
    ]
    assert layout.memory["parameters"] == params[2].nbytes
    found = measured(program, layout.options, most)
    assert layout.total_bytes == pytest.approx(found, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_devices"), list(zip(PROGRAMS, (2, 4, 2, 3, 1), strict=True)))
def test_all_layouts_are_what_is_measured(name, num_devices, most):
    losses, params, batch, optimizer, more = PROGRAMS[name]
    plan = mt.plan(losses, optimizer, params, batch, devices=num_devices, **more)
    assert not any(one.estimated for one in plan.layouts)
    # All of the first program, and of each other one every second, in turns: they take minutes.
    place = list(PROGRAMS).index(name)
    tried = [
        one
        for number, one in enumerate(plan.layouts)
        if place == 0 or (number + place) % 2 or "shard_params" in one.options
    ]
    kinds = {name for one in tried for name in one.options}
    split = {"shard_update", "shard_params"} if num_devices > 1 else set()
    assert kinds >= {"towers"} | split
    off = {}
    for layout in tried:
        found = measured(PROGRAMS[name], layout.options, most)
        off[str(layout.options)] = layout.total_bytes / found - 1
    assert {name: share for name, share in off.items() if abs(share) > TOLERANCE} == {}


APART_OPTIONS = {
    "local": {"sync_every": 2},
    "local, averaged states": {"sync_every": 2, "local_state": "average"},
    "asynchronous": {"updates": "asynchronous"},
    "asynchronous, two groups": {"updates": "asynchronous", "max_staleness": 1},
}


def off_apart(program, num_devices, options, most, towers=None):
    """How far plans are from what is measured, for every number of towers."""
    losses, params, batch, optimizer, more = program
    where = {"devices": num_devices, "towers": towers}
    plan = mt.plan(losses, optimizer, params, batch, **where, **options, **more)
    off = {}
    for layout in plan.layouts:
        found = measured_apart(program, {**options, **layout.options}, most)
        off[str(layout.options)] = layout.total_bytes / found - 1
    assert off
    return off


@pytest.mark.slow
@pytest.mark.parametrize("name", ["local", "asynchronous"])
def test_towers_apart_are_what_is_measured(name, most):
    """Lie: one optimizer state for all towers, or one version of the parameters."""
    losses, params, batch = mlp(160, 1, 16)  # sums that the host does not pass on
    program = (losses, params, batch, optax.sgd(1e-2, momentum=0.9), {})
    off = off_apart(program, 2, APART_OPTIONS[name], most, towers=4)
    assert {which: share for which, share in off.items() if abs(share) > TOLERANCE} == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "num_devices", "name", "towers"),
    [
        ("small leaves, adam", 2, "local", None),
        ("small leaves, adam", 2, "asynchronous", None),
        ("bfloat16, adamw, average", 3, "local, averaged states", 6),
        ("bfloat16, adamw, average", 3, "asynchronous, two groups", 6),
        ("sizes that do not divide", 2, "local", 4),
    ],
)
def test_all_layouts_of_towers_apart_are_what_is_measured(program, num_devices, name, towers, most):
    off = off_apart(PROGRAMS[program], num_devices, APART_OPTIONS[name], most, towers)
    assert {which: share for which, share in off.items() if abs(share) > TOLERANCE} == {}
