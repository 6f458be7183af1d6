"""Law L3: with towers=T everything has the same bits on 1 .. T devices.

The lies: "the same bits" that hold for one optimizer, one precision, full batches, or as long as
all device counts are tried in one process. Processes of their own show the user's situation.
"""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.engines import executable, reduction, totals
from multitower.towers import placement
from multitower.towers import split as tower_rows
from places import PROGRAMS
from processes import run_fork, run_python
from same_bits_program import MODELS, OPTIMIZERS, fingerprints

PROGRAM = PROGRAMS / "same_bits_program.py"

FIRST = ["mlp/adamw/float32", "mlp/sgd/bfloat16", "transformer/sgd/float32"]
# Every model with sums, momenta and norms; every optimizer in both precisions.
SLOW_8 = {
    "mlp": ["lion/float32", "adafactor/float32", "lamb/float32"],
    "mlp in 16 bits": ["adafactor/bfloat16", "lamb/bfloat16"],
    "lenet5": ["sgd/float32", "lion/bfloat16"],
    "transformer": ["adamw/bfloat16"],
    "batchnorm": ["adamw/float32", "sgd/bfloat16"],
}
SLOW_12 = {
    "mlp": ["adafactor/float32"],
    "batchnorm": ["adamw/float32"],
}


def in_own_process(num_devices, towers, cases):
    arguments = (str(PROGRAM), str(num_devices), str(towers), *cases)
    return json.loads(run_fork(*arguments, timeout_s=400))


def assert_same_bits(device_counts, towers, cases):
    first = in_own_process(device_counts[0], towers, cases)
    for num_devices in device_counts[1:]:
        other = in_own_process(num_devices, towers, cases)
        assert other == first, f"{num_devices} devices differ from {device_counts[0]}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("towers", "device_counts", "cases"),
    [
        pytest.param(8, (1, 3), FIRST[:2], id="8 towers"),
        pytest.param(8, (1, 4), FIRST[2:], id="dropout"),
    ],
)
def test_same_bits_in_processes_with_other_device_counts(towers, device_counts, cases):
    assert_same_bits(device_counts, towers, cases)


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="this JAX has no such kernels")
def test_with_kernels_of_onednn():
    """Lie: threads take turns in another order there; or the setting does nothing."""
    cases = ["lenet5/sgd/float32"]
    with_onednn = [in_own_process(devices, 4, ["--onednn", *cases]) for devices in (1, 3)]
    assert with_onednn[0] == with_onednn[1]
    assert with_onednn[0] != in_own_process(1, 4, cases)


def names(table):
    """The cases of a table, one list per row; a row's first word is its model."""
    return [[f"{row.split()[0]}/{case}" for case in cases] for row, cases in table.items()]


@pytest.mark.slow
@pytest.mark.parametrize("cases", names(SLOW_8), ids=list(SLOW_8))
def test_eight_towers_on_other_numbers_of_devices(cases):
    assert_same_bits((1, 3), 8, cases)


@pytest.mark.slow
@pytest.mark.parametrize("cases", names(SLOW_12), ids=list(SLOW_12))
def test_twelve_towers_on_other_numbers_of_devices(cases):
    assert_same_bits((1, 5), 12, cases)


def test_the_slow_tables_leave_no_model_optimizer_or_precision_out():
    cases = {tuple(case.split("/")) for case in [*itertools.chain(*names(SLOW_8)), *FIRST]}
    dtypes = {"float32", "bfloat16"}
    assert {(o, d) for _, o, d in cases} == set(itertools.product(OPTIMIZERS, dtypes))
    assert {(m, d) for m, _, d in cases} == set(itertools.product(MODELS, dtypes))


@pytest.fixture(scope="module")
def on_one_device():
    return fingerprints("mlp/sgd/float32", 6, 1)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 3])
def test_same_bits_on_a_part_of_the_devices(num_devices, on_one_device):
    assert fingerprints("mlp/sgd/float32", 6, num_devices) == on_one_device


@pytest.mark.slow
def test_same_bits_with_the_devices_in_another_order(on_one_device):
    """Lie: bits that depend on which device comes first."""
    assert fingerprints("mlp/sgd/float32", 6, mt.devices(3)[::-1]) == on_one_device


def of_a_model(num_devices):
    return fingerprints("mlp/sgd/float32", 6, num_devices)


def of_sums_in_doubt(num_devices):
    return sums_on((num_devices,))


@pytest.mark.parametrize(
    ("found_on", "num_devices"),
    [
        (of_sums_in_doubt, 2),
        pytest.param(of_a_model, 2, marks=pytest.mark.slow),
        pytest.param(of_a_model, 3, marks=pytest.mark.slow),
    ],
)
def test_same_bits_with_towers_strided_over_devices(found_on, num_devices, monkeypatch):
    """Lie: an order of additions that follows the devices, not the towers."""
    on_one_device = found_on(1)

    def strided(devices, num_towers):
        owners = tuple(tower % len(devices) for tower in range(num_towers))
        return placement.Placement(tuple(devices), owners)

    monkeypatch.setattr(placement, "contiguous", strided)
    assert found_on(num_devices) == on_one_device


@pytest.mark.slow
def test_same_bits_from_sharded_batches(on_one_device):
    """Lie: other bits for batches that were copied ahead of need, or cut for other devices."""

    def sharded(batch):
        return mt.shard(batch, devices=3, towers=6, global_batch=12)

    assert fingerprints("mlp/sgd/float32", 6, 3, sharded) == on_one_device
    assert fingerprints("mlp/sgd/float32", 6, 2, sharded) == on_one_device


@pytest.mark.slow
def test_same_bits_for_seven_towers():
    """Lie: only numbers of towers that are powers of two, or multiples of the devices."""
    found = [fingerprints("mlp/sgd/float32", 7, num_devices) for num_devices in (1, 3)]
    assert found[0] == found[1]


# ---------------------------------------------------------------- programs of our own


def leftovers(loss, params, batches, *, towers, devices, optimizer=None, **extras):
    """Fingerprint of all that a few steps leave behind."""
    optimizer = optimizer or optax.sgd(0.1, momentum=0.9)
    step = mt.train_step(loss, optimizer, towers=towers, devices=devices, ema_decay=0.5)
    state = step.init(params, **extras)
    history = []
    for batch in batches:
        state, metrics = step(state, batch)
        history.append(metrics)
    return mt.fingerprint((state, history))


def line(params, batch):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2


def line_batches(rows, columns=5, steps=2):
    rng = np.random.default_rng(0)
    return [
        {
            "x": rng.normal(size=(rows, columns)).astype(np.float32),
            "y": rng.normal(size=rows).astype(np.float32),
        }
        for _ in range(steps)
    ]


@pytest.mark.slow
def test_same_bits_even_when_a_row_is_nan():
    """Lie: NaN hidden, or a NaN whose bits tell which device it came from."""
    batches = line_batches(8)
    batches[1]["x"][3, 2] = np.nan
    params = {"w": np.ones(5, np.float32)}
    step = mt.train_step(line, optax.sgd(0.1), towers=4, devices=2)
    state = step.init(params)
    for batch in batches:
        state, metrics = step(state, batch)
    assert np.isnan(metrics["loss"])
    assert np.isnan(state.params["w"]).all()
    found = {leftovers(line, params, batches, towers=4, devices=d) for d in (1, 2, 3)}
    assert len(found) == 1


@pytest.mark.parametrize("devices", [(1, 3), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_same_bits_with_nan_and_infinity_of_both_signs(devices):
    """Lie: NaNs whose sign and payload depend on the order of an addition's operands."""
    batches = line_batches(8, steps=1)
    batches[0]["x"][:, 0] = [np.inf, -np.inf, 1, 2, np.nan, -np.nan, 3, np.inf]
    params = {"w": np.ones(5, np.float32)}
    found = {leftovers(line, params, batches, towers=4, devices=d) for d in devices}
    assert len(found) == 1


@pytest.mark.slow
def test_same_bits_for_a_leaf_larger_than_a_buffer_that_devices_do_not_divide():
    """Lie: a large leaf, which travels in chunks, is added or cut in another way."""
    params = {"w": np.full(65 * 1024 + 3, 1e-3, np.float32), "b": np.float32(0)}

    def loss(params, batch):
        return (batch["x"] * params["w"][: batch["x"].shape[1]]).sum(1) ** 2 + params["b"]

    batches = [
        {"x": np.random.default_rng(s).normal(size=(6, 65 * 1024 + 3)).astype(np.float32)}
        for s in range(2)
    ]
    found = {leftovers(loss, params, batches, towers=6, devices=d) for d in (1, 2, 3)}
    assert len(found) == 1


@pytest.mark.slow
def test_same_bits_for_one_row_and_eight_towers():
    """Lie: seven empty towers contribute something, or a NaN."""
    params = {"w": np.ones(5, np.float32)}
    found = {leftovers(line, params, line_batches(1), towers=8, devices=d) for d in (1, 3)}
    assert len(found) == 1


@pytest.mark.slow
def test_same_bits_for_a_mixture_of_dtypes_and_shapes():
    """Lie: scalars, empty leaves and 16-bit leaves travel together and lose bits."""
    params = {
        "scalar": np.float32(0.5),
        "half": jnp.full((3, 2), 0.1, jnp.float16),
        "brain": jnp.full(7, 0.1, jnp.bfloat16),
        "nothing": np.zeros((0, 4), np.float32),
        "void": {},
    }

    def loss(params, batch):
        wide = [params["half"].sum(), params["brain"].sum(), params["nothing"].sum()]
        total = sum(x.astype(jnp.float32) for x in wide)
        return (batch["x"].sum(1) * total + params["scalar"] - batch["y"]) ** 2

    found = {leftovers(loss, params, line_batches(9), towers=4, devices=d) for d in (1, 3)}
    assert len(found) == 1


@pytest.mark.slow
def test_float64_has_the_same_bits_and_keeps_its_digits():
    """Lie: float64 gradients that pass through float32 on the way."""
    program = """
import multitower as mt
mt.configure(simulated_devices=3)
import jax, numpy as np, optax
jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(10, 3)), rng.normal(size=10)
def loss(w, batch):
    return (batch["x"] @ w - batch["y"]) ** 2
w = np.zeros(3)
for _ in range(2):
    w = w - 0.1 * 2 * x.T @ (x @ w - y) / 10
for towers, counts in ((None, (1, 2)), (4, (1, 2, 3)), (3, (1, 3))):
    found = set()
    for devices in counts:
        step = mt.train_step(loss, optax.sgd(0.1), towers=towers, devices=devices)
        state = step.init(np.zeros(3))
        for _ in range(2):
            state, metrics = step(state, {"x": x, "y": y})
        assert state.params.dtype == np.float64
        np.testing.assert_allclose(state.params, w, rtol=1e-14)
        found.add(mt.fingerprint(state))
    assert towers is None or len(found) == 1
"""
    run_python("-c", program)


# ---------------------------------------------------------------- mutations
#
# Each of these breaks the law on purpose; a law checker that stays green would be the lie.

# Sums of these depend on their order: 1 is lost beside 1e8.
ROWS_IN_DOUBT = np.array([1e8, 1, -1e8, 1, 3, 1e8, -1e8, 5], np.float32)


def sums_on(device_counts, towers=8):
    def loss(w, batch):
        return w * batch["x"]

    batch = {"x": ROWS_IN_DOUBT}
    given = {"towers": towers, "optimizer": optax.sgd(0.1)}
    return [leftovers(loss, np.float32(1), [batch], devices=d, **given) for d in device_counts]


@pytest.mark.parametrize("devices", [(1, 3), pytest.param((1, 2, 8), marks=pytest.mark.slow)])
def test_no_mutation_no_difference(devices):
    assert len(set(sums_on(devices))) == 1


def test_two_devices_copy_small_sums_and_run_a_program_for_others(monkeypatch):
    """Lie: other bits from a certain size on."""
    copied = sums_on((2,))
    monkeypatch.setattr(totals, "SMALL_BYTES", 0)
    monkeypatch.delattr(totals, "_copy")
    assert sums_on((2,)) == copied


@pytest.mark.parametrize("by_host", [True, False])
def test_small_sums_that_the_host_passes_on_or_a_device_copies(by_host, monkeypatch):
    """Lie: other bits where there is no way through the host's memory, as on GPUs."""
    kinds: set[type] = set()

    def watched(sums, device):
        there = copy(sums, device)
        kinds.update(map(type, there.packed.buffers))
        return there

    plain, copy = sums_on((1,)), totals._copy
    monkeypatch.setattr(totals, "_copy", watched)
    if not by_host:
        monkeypatch.setattr(totals, "_is_memory_of_host", lambda device: False)
    assert sums_on((2,)) == plain
    assert (np.ndarray in kinds) == by_host


@pytest.mark.slow
def test_sums_that_are_copied_while_steps_run_ahead():
    """Lie: a device overwrites sums while the other one still copies them."""
    params, (batch,) = {"w": np.ones(4096, np.float32)}, line_batches(8, columns=4096, steps=1)
    found = [
        leftovers(line, params, [batch] * 400, towers=4, devices=d, optimizer=optax.sgd(1e-5))
        for d in (1, 2)
    ]
    assert found[0] == found[1]


def test_mutation_sums_that_do_not_arrive(monkeypatch):
    def nothing(sums, device):
        return jax.tree.map(jnp.zeros_like, copy(sums, device))

    copy, plain = totals._copy, sums_on((2,))
    monkeypatch.setattr(totals, "_copy", nothing)
    assert sums_on((2,)) != plain


def test_mutation_psum_instead_of_the_tree(monkeypatch):
    def psum_like(how, num_devices, pieces):
        return jax.lax.psum(sum(pieces), placement.AXIS)

    plain = sums_on((1,))
    monkeypatch.setattr(reduction, "_total", psum_like)
    assert sums_on((3,)) != plain


def test_mutation_another_order_on_each_device(monkeypatch):
    """One after another instead of in pairs: the natural way to accumulate gradients."""

    def one_after_another(first, last):
        if last - first == 1:
            return first
        return reduction.Sum((one_after_another(first, last - 1), last - 1))

    plain = sums_on((1,))
    monkeypatch.setattr(reduction, "sum_tree", one_after_another)
    assert sums_on((1,)) != plain


def test_mutation_a_tower_left_out(monkeypatch):
    def without_tower_1(first, last):
        if last - first <= 2:
            return first
        return reduction.Sum((without_tower_1(first, last - 1), last - 1))

    plain = sums_on((1,))
    monkeypatch.setattr(reduction, "sum_tree", without_tower_1)
    assert sums_on((1,)) != plain


def test_mutation_the_same_rows_on_every_tower(monkeypatch):
    piece = tower_rows._piece
    plain = sums_on((1,))
    monkeypatch.setattr(tower_rows, "_piece", lambda leaf, start, size: piece(leaf, 0, size))
    assert sums_on((1,)) != plain


@pytest.mark.slow
def test_mutation_keys_by_device_instead_of_by_tower(monkeypatch):
    def loss(w, batch, *, rng):
        return w * batch["x"] + jax.random.normal(rng, batch["x"].shape)

    def left(devices):
        extras = dict(rng=jax.random.key(0))
        batches = [{"x": np.ones(8 * 16, np.float32)}]
        return leftovers(loss, np.float32(1), batches, towers=8, devices=devices, **extras)

    on = executable.WholeNumbers.on

    def by_device(self, device, value):
        return on(self, device, device.id if value < 8 else value)  # 16 is a tower's number of rows

    assert left(1) == left(2)
    monkeypatch.setattr(executable.WholeNumbers, "on", by_device)
    assert left(1) != left(2)
