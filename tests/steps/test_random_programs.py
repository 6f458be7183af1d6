"""The laws, for training programs that nobody wrote: see tests/shared/random_programs.py.

The lie: laws that hold for the models, optimizers and options that some test thought of together.

    RANDOM_PROGRAMS=100:200 make test-slow ARGS="-k random_programs"     those with these numbers
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from random_programs import STATELESS_LAYERS, as_floats, draw, ratio, weights_of
from same_bits_program import left_by
from trees import assert_close

FIRST, LAST = map(int, os.environ.get("RANDOM_PROGRAMS", "0:10").split(":"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("number", range(FIRST, LAST)),
    pytest.mark.filterwarnings("ignore:stages=. and towers=. keep . of . devices busy"),
]


def left(state, history):
    """Fingerprints of all that training leaves, so that a failure says where."""
    return {name: mt.fingerprint(part) for name, part in left_by(state, history).items()}


def draw_devices(number, towers):
    """Two numbers of devices; where there is a choice, they are different and above one."""
    numbers = np.random.default_rng(number).permutation(np.arange(2, towers + 1))
    return int(numbers[0]), int(numbers[-1])


def test_laws_l3_and_l4_the_same_bits_for_a_run_that_moves_to_other_devices(number, tmp_path):
    program = draw(number)
    before, after = draw_devices(number, program.towers)
    batches = program.batches()
    step = program.step(before)
    state, history = program.train(step, program.begin(step), batches[:2])
    step = program.step(after)
    with mt.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state, {})
        checkpoints.wait()
        state = checkpoints.restore(like=program.begin(step)).state
    state, rest = program.train(step, state, batches[2:])
    moved = left(state, history + rest)
    step = program.step(1)
    never_moved = left(*program.train(step, program.begin(step), batches))
    assert moved == never_moved, f"{before} devices, then {after}: {program}"


# ---------------------------------------------------------------- the numbers of one device


def test_laws_l1_and_l2_the_numbers_of_one_device(number):
    program = draw(number, layers=STATELESS_LAYERS)
    if "sync_every" in program.options:  # a replay is simpler where all towers have equally many
        program = program._replace(rows=program.rows[:1] * len(program.rows))
    assert_numbers_of_one_device(program, draw_devices(number, program.towers)[0])


def test_laws_l1_and_l2_without_towers(number):
    program = draw(number, layers=STATELESS_LAYERS, has_towers=False)
    assert_numbers_of_one_device(program, program.towers)


def assert_numbers_of_one_device(program, devices):
    """In float64, where no wrong term hides in what rounding allows."""
    program.options.pop("compute_dtype", None)
    with jax.enable_x64(True):
        step = program.step(devices)
        state, history = program.train(step, program.begin(step, np.float64), program.batches())
        losses = np.concatenate([np.atleast_1d(metrics["loss"]) for metrics in history])
        found = (state.params, state.ema_params, losses)
        assert_close(found, on_one_device(program), rtol=1e-6, atol=1e-7)


def on_one_device(program):
    """The same in plain JAX and optax: parameters, their moving average, the loss of each step."""
    optimizer, options = program.make_optimizer(), program.options
    if "clip_norm" in options:
        optimizer = optax.chain(optax.clip_by_global_norm(options["clip_norm"]), optimizer)
    combine = jnp.sum if options.get("reduction") == "sum" else jnp.mean
    gradient = jax.jit(jax.value_and_grad(lambda p, batch: combine(loss_of(program, p, batch))))
    params = jax.tree.map(jnp.asarray, as_floats(program.params, np.float64))
    way = locally if "sync_every" in options else in_turns
    versions, losses = way(program, optimizer, gradient, params)
    average = None
    if "ema_decay" in options:
        decay = options["ema_decay"]
        blend = lambda old, new: decay * old + (1 - decay) * new
        blend_all = lambda *versions: jax.tree.map(blend, *versions)
        average = functools.reduce(blend_all, versions, params)
    return [params, *versions][-1], average, np.array(losses)


def loss_of(program, params, batch):
    found = program.loss(params, batch)
    return found[0] if isinstance(found, tuple) else found


def in_turns(program, optimizer, gradient, newest):
    """One update after the other, each with the gradient of the group whose turn it is.

    Synchronous training is the rotation of a single group.
    """
    options = program.options
    groups = options.get("max_staleness", 0) + 1
    seen_by, made_by = [newest] * groups, [0] * groups
    opt_state, versions, losses = optimizer.init(newest), [], []
    for number, batch in enumerate(program.batches()):
        group = number % groups
        staleness = number - made_by[group]
        loss, gradients = gradient(seen_by[group], batch)
        if "momentum_correction" in options:
            momentum = max(0.9 - staleness / (1 + staleness), 0)
            opt_state = optax.tree_utils.tree_set(opt_state, momentum=momentum)
        updates, opt_state = optimizer.update(gradients, opt_state, newest)
        scale = options["stale_scale"](staleness) if "stale_scale" in options else 1.0
        updates = jax.tree.map(lambda update, scale=scale: update * scale, updates)
        newest = optax.apply_updates(newest, updates)
        seen_by[group], made_by[group] = newest, number + 1
        versions.append(newest)
        losses.append(loss)
    return versions, losses


def locally(program, optimizer, gradient, anchor):
    """Local updates of all towers, which have equally many rows; versions are of meetings."""
    options = program.options
    is_sum = options.get("reduction") == "sum"
    towers, rows = program.towers, options["global_batch"] // program.towers
    outer = options.get("outer_optimizer", optax.sgd(0.7, momentum=0.9, nesterov=True))
    own, states = [anchor] * towers, [optimizer.init(anchor)] * towers
    outer_state, versions, losses = outer.init(anchor), [], []
    for number, batch in enumerate(program.batches(), 1):
        parts = [jax.tree.map(lambda x, t=t: x[t * rows :][:rows], batch) for t in range(towers)]
        found = [gradient(params, part) for params, part in zip(own, parts, strict=True)]
        for tower, (_, gradients) in enumerate(found):
            if is_sum:  # of its own rows: an estimate of the sum over all rows
                gradients = jax.tree.map(lambda gradient: gradient * towers, gradients)
            updates, states[tower] = optimizer.update(gradients, states[tower], own[tower])
            own[tower] = optax.apply_updates(own[tower], updates)
        own_losses = [loss for loss, _ in found]
        weights = [weights_of(part).sum() if program.end is ratio else 1 for part in parts]
        losses.append(sum(own_losses) if is_sum else np.average(own_losses, weights=weights))
        if number % options["sync_every"] == 0:
            moved = jax.tree.map(lambda a, *all_own: a - mean(*all_own), anchor, *own)
            updates, outer_state = outer.update(moved, outer_state, anchor)
            anchor = optax.apply_updates(anchor, updates)
            own = [anchor] * towers
            if options["local_state"] == "average":
                states = [jax.tree.map(mean, *states)] * towers
            versions.append(anchor)
    return versions, losses


def mean(first, *others):
    """Of one leaf of all towers; what is no float is alike in all of them."""
    if not jnp.issubdtype(jnp.result_type(first), jnp.floating):
        return first
    return (first + sum(others)) / (1 + len(others))
