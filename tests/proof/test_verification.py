"""verification: equal runs agree, and every seeded fault is found and named where it lies."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from faults import change_results, divide_parameters
from multitower.engines import executable, reduction
from multitower.proof.verification import compare
from multitower.stages import programs
from multitower.steps.staged import state

ROWS = np.random.default_rng(0).normal(size=(2, 16, 8)).astype(np.float32)


def losses(w, batch):
    return (batch @ w) ** 2


def check(devices=(1, 2), loss=losses, **options):
    mt.testing.assert_same_bits(
        loss, optax.sgd(0.1), np.ones(8, np.float32), ROWS, devices=devices, towers=4, **options
    )


@pytest.fixture
def fault(monkeypatch):
    """Patches the library. What JAX has traced before would hide that, and outlive it."""
    jax.clear_caches()
    yield monkeypatch
    jax.clear_caches()


@pytest.mark.parametrize("devices", [(1, 3), pytest.param((1, 2, 3), marks=pytest.mark.slow)])
def test_equal_runs_agree(devices):
    check(devices=devices, ema_decay=0.9)


def test_another_order_of_additions_is_found_in_the_reduction(fault):
    # The lie: sums that depend on how many devices there are.
    tree = reduction.sum_tree

    def one_after_another(first, last):
        if last - first == 1:
            return first
        return reduction.Sum((one_after_another(first, last - 1), last - 1))

    def plan(placement):
        order = one_after_another if len(placement.devices) == 2 else tree
        fault.setattr(reduction, "sum_tree", order)
        return right_plan(placement)

    right_plan = reduction.plan
    fault.setattr(reduction, "plan", plan)
    with pytest.raises(AssertionError) as error:
        check()
    (line,) = str(error.value).splitlines()[1:]
    assert line.startswith("step 1: 1 device and 2 devices part in the reduction (the copy on dev")
    assert re.search(r"gradients\[\d\] is -?\d+\.\d+ \(0x[0-9a-f]{8}\) and ", line)


@pytest.mark.slow
def test_a_product_in_the_reduction_is_found_there(fault):
    # The lie: a mean computed on the way, which rounds on a device and not between devices.
    def fused(left, right):
        return [(3 * a + 3 * b) * jnp.float32(1 / 3) for a, b in zip(left, right, strict=True)]

    fault.setattr(reduction, "add_buffers", fused)
    with pytest.raises(AssertionError, match="1 device and 4 devices part in the reduction"):
        check(devices=(1, 4))


@pytest.mark.slow
def test_a_product_in_an_exchange_is_found_in_what_a_tower_sends_next(fault):
    # The lie: only the reduction can part, so that an exchange need not be looked at.
    def fused(left, right):
        return [(3 * a + 3 * b) * jnp.float32(1 / 3) for a, b in zip(left, right, strict=True)]

    def centred(w, batch):
        h = jnp.tanh(batch * w)
        return ((h - jax.lax.pmean(h.mean(0), "towers")) ** 3).sum(1)

    check(devices=(1, 3), loss=centred)
    fault.setattr(reduction, "add_buffers", fused)
    jax.clear_caches()
    with pytest.raises(AssertionError, match=r"part in the exchange \(tower 0\): \['round 1'\]"):
        check(devices=(1, 4), loss=centred)


@pytest.mark.slow
def test_a_key_by_device_is_found_in_the_first_tower_that_has_another(fault):
    # The lie (accelerate#114): towers' random numbers that follow the devices.
    def noisy(w, batch, *, rng):
        return losses(w, batch) * jax.random.uniform(rng)

    on = executable.WholeNumbers.on
    by_device = lambda self, device, value: on(self, device, device.id if value < 4 else value)
    fault.setattr(executable.WholeNumbers, "on", by_device)
    # On one device all towers now have the key of tower 0; on two, 2 and 3 have another one.
    message = r"1 device and 2 devices part in the tower program \(tower 2\): gradients"
    with pytest.raises(AssertionError, match=message):
        check(loss=noisy, rng=jax.random.key(0))


def test_an_update_that_knows_its_devices_is_found_in_the_update(fault):
    # The lie: a mean over devices instead of towers.
    change_results(fault, divide_parameters)
    message = r"step 1: .* part in the update \(the copy on device 0\): params\[0\] is"
    with pytest.raises(AssertionError, match=message):
        check()


@pytest.mark.slow
def test_a_device_that_differs_from_its_neighbours_is_named(fault):
    def change(i, num_devices, fields, metrics):
        if num_devices == 2 and i == 1:
            fields = fields._replace(step=fields.step + 1)
        return fields, metrics

    change_results(fault, change)
    with pytest.raises(AssertionError, match=r"update \(the copy on device 1\): step"):
        check(devices=(1, 2))


@pytest.mark.slow
def test_a_metric_that_depends_on_the_devices_is_found(fault):
    # The lie: states are compared, and what is reported of them is not.
    def change(_, num_devices, fields, metrics):
        return fields, {**metrics, "loss": metrics["loss"] * num_devices}

    change_results(fault, change)
    with pytest.raises(AssertionError, match=r"update \(.*\): \['metrics'\]\['loss'\]"):
        check(devices=(1, 2))


def two_stages(params, batch):
    return (mt.cut(jnp.tanh(batch @ params["in"])) @ params["out"]) ** 2


def check_stages(devices=(1, 4)):
    rows = ROWS[:, :4, :3]
    params = {"in": np.full((3, 2), 0.3, np.float32), "out": np.ones(2, np.float32)}
    mt.testing.assert_same_bits(
        two_stages, optax.sgd(0.1), params, rows[:1], devices=devices, towers=2, stages=2
    )


def change_program(kind, stage, replica, change):
    """Plants a fault into one program of a model in stages, where there are two replicas."""
    init = programs.StagePrograms.__init__

    def changed(self, chain, layout, **how):
        init(self, chain, layout, **how)
        if len(layout.replicas) == 2:
            own = getattr(self, kind)[stage]
            right = own[replica]
            own[replica] = lambda *given: jax.tree.map(change, right(*given))

    return programs.StagePrograms, "__init__", changed


def twice(leaf):
    return leaf * 2 if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stage", "message"),
    [
        ("forward", 0, r"the forward program \(tower 1\): \['stage 0'\]\[0\]\[0\]\[0\] is"),
        ("backward", 1, r"the backward program \(tower 1\): \['stage 1'\]\[0\]\['gradients'\]"),
        ("add", 1, r"the reduction \(the copy of replica 0\): \['stage 1'\]"),
    ],
)
def test_a_stage_that_computes_something_else_is_named(kind, stage, message, fault):
    # The lie: a model in stages is compared after the update alone, where all of it is wrong.
    fault.setattr(*change_program(kind, stage, 1 if kind != "add" else 0, twice))
    with pytest.raises(AssertionError, match=f"1 device and 4 devices part in {message}"):
        check_stages()


@pytest.mark.slow
def test_a_replica_whose_stage_was_not_updated_is_named(fault):
    # The lie: of several replicas only the first one is looked at.
    def copies(self):
        found = right(self)
        if len(found) == 2:
            found[1].params["out"] *= 2
        return found

    right = state.StagedParts.copies
    fault.setattr(state.StagedParts, "copies", copies)
    with pytest.raises(AssertionError, match=r"update \(the copy on device 1\): params\['out'\]"):
        check_stages()


def test_a_run_that_does_not_repeat_itself_says_so():
    # The lie: a difference in numbers of devices that is none.
    counter = itertools.count()

    def run(devices):
        step = mt.train_step(losses, optax.sgd(0.1), devices=devices, towers=1)
        yield step.init(np.float32(next(counter))), {}

    found = compare([1, 1], run)
    (difference,) = found.differences
    assert not difference.repeats
    assert "do not even repeat themselves" in str(difference)
    assert found.fingerprints[0] != found.fingerprints[1]


def test_bits_are_compared_not_values():
    # The lies: -0.0 == 0.0, and NaN that differs from itself.
    def run_with(values):
        def run(devices):
            step = mt.train_step(losses, optax.sgd(0.1), devices=devices, towers=1)
            yield step.init(values.pop(0)), {}

        return run

    zero, nan = np.float32(0), np.float32("nan")
    assert compare([1, 1], run_with([-zero, zero, -zero, zero])).differences
    assert not compare([1, 1], run_with([nan, nan])).differences


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(batches=[]), "no batches"),
        (dict(devices=[2]), r"at least two runs are compared.*devices=\[1, 1\]"),
    ],
)
def test_what_cannot_be_compared_is_refused(given, said):
    arguments = dict(batches=[ROWS[0]], devices=[1, 2]) | given
    with pytest.raises(mt.ArgumentError, match=said):
        mt.testing.assert_same_bits(losses, optax.sgd(0.1), np.ones(8), **arguments)
