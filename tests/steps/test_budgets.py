"""What a step may cost, in numbers that no machine changes: programs, bytes, syncs, memory."""

import gc
import math
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import multitower as mt
from multitower.engines import exchanges, reduction, same_bits, totals
from multitower.engines.same_bits import tapped
from multitower.steps.state.kept import KeptState
from multitower.towers.placement import contiguous

SIZE = 8 * 3 * 5 * 7 * 128  # elements; large enough to travel in chunks, divisible by 2, 3, 4, 8
ROWS = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)


# ---------------------------------------------------------------- bytes sent

COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)
ITEM_BYTES = {"f32": 4, "s32": 4, "u32": 4, "pred": 1}


def sent_bytes(compiled, num_devices):
    """Bytes that each device sends, with the best algorithm for each collective."""
    total = 0
    for shapes, name in COLLECTIVE.findall(compiled.as_text()):
        size = sum(
            ITEM_BYTES[dtype] * math.prod(int(n) for n in dims.split(",") if n)
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes)
        )
        share = {"all-reduce": 2, "reduce-scatter": num_devices}.get(name, 1)
        total += size * share * (num_devices - 1) / num_devices
    return total


def programs_of(directory, call):
    """The StableHLO of all programs that a call compiles."""
    directory.mkdir()
    jax.config.update("jax_dump_ir_to", str(directory))
    try:
        call()
    finally:
        jax.config.update("jax_dump_ir_to", "")
    return [path.read_text() for path in directory.iterdir()]


@pytest.mark.slow
def test_stages_use_no_collective(tmp_path):
    # The lie: stages that wait for each other in a program over all devices, whose sums have the
    # order that XLA chooses. A tied weight and the norm of all gradients cross the stages.
    def tied(params, x):
        h = mt.cut(jnp.tanh(x @ params["tied"]))
        return ((h @ params["own"] @ params["tied"].T - x) ** 2).sum(1)

    def programs(name, **options):
        step = mt.train_step(tied, optax.adam(0.1), towers=4, devices=4, clip_norm=1.0, **options)
        state = step.init({"tied": np.eye(4, dtype="f"), "own": np.eye(4, dtype="f")})
        found = programs_of(tmp_path / name, lambda: step(state, ROWS))
        return [re.search(r"num_partitions = (\d+)", program)[1] for program in found]

    assert set(programs("stages", stages=2)) == {"1"}
    assert set(programs("towers")) == {"1", "4"}  # else nothing is counted


def test_bytes_are_read_off_as_they_are():
    # The lie: a budget that is kept because nothing is counted.
    placement = contiguous(mt.devices(4), 4)
    summed = jax.shard_map(
        lambda x: jax.lax.psum(x, "towers"), mesh=placement.mesh,
        in_specs=PartitionSpec("towers"), out_specs=PartitionSpec("towers"), check_vma=False,
    )  # fmt: skip
    compiled = jax.jit(summed).lower(jax.ShapeDtypeStruct((4 * 64,), np.float32)).compile()
    assert sent_bytes(compiled, 4) == 2 * 64 * 4 * 3 / 4


def whole(placement, shape):
    """A global array with one such block on every device."""
    shape = (len(placement.devices) * shape[0], *shape[1:])
    return jax.ShapeDtypeStruct(shape, np.float32, sharding=placement.split)


@pytest.mark.parametrize("num_devices", [2, 4, 8])
@pytest.mark.parametrize("towers_each", [1, 2])
def test_same_bits_send_as_little_as_a_ring(num_devices, towers_each):
    """2 P (D - 1) / D: no all-reduce sends less (Patarasuk and Yuan 2009)."""
    placement = contiguous(mt.devices(num_devices), towers_each * num_devices)
    assert reduction.plan(placement).num_parts == 1
    reduce = reduction.make_reduction(placement)
    compiled = reduce.lower([[whole(placement, (SIZE,))]], [[]]).compile()
    optimum = 2 * 4 * SIZE * (num_devices - 1) / num_devices
    assert sent_bytes(compiled, num_devices) == optimum


@pytest.mark.parametrize(
    ("num_devices", "num_towers", "parts"), [(3, 8, 2), (4, 6, 2), (8, 12, 2), (3, 4, 1)]
)
def test_towers_that_do_not_divide_send_a_part_more(num_devices, num_towers, parts):
    """Each further part costs half a ring: it is sent to where it is added, and not back."""
    placement = contiguous(mt.devices(num_devices), num_towers)
    assert reduction.plan(placement).num_parts == parts
    reduce = reduction.make_reduction(placement)
    sent = [[whole(placement, (SIZE,))]] * parts
    compiled = reduce.lower(sent, [[]] * parts).compile()
    half_a_ring = 4 * SIZE * (num_devices - 1) / num_devices
    assert sent_bytes(compiled, num_devices) == pytest.approx((parts + 1) * half_a_ring, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_a_sharded_update_sends_no_more(num_devices):
    """A reduce-scatter and an all-gather are the two halves of an all-reduce."""
    num_towers = 8
    placement = contiguous(mt.devices(num_devices), num_towers)
    scatter = reduction.make_reduction(placement)
    row = SIZE // num_towers
    scattered = scatter.lower([[]], [[whole(placement, (num_towers, row))]]).compile()
    gather = reduction.make_gather(placement, lambda blocks: [b.reshape(-1) for b in blocks])
    slots = num_towers // num_devices
    gathered = gather.lower([[whole(placement, (row,))] * slots]).compile()
    half_a_ring = 4 * SIZE * (num_devices - 1) / num_devices
    assert sent_bytes(scattered, num_devices) == half_a_ring
    assert sent_bytes(gathered, num_devices) == half_a_ring


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [{}, {"shard_update": True}, {"stages": 2}, {"updates": "asynchronous"}],
    ids=str,
)
def test_a_step_does_not_put_its_state_together(way, monkeypatch):
    """Lie: a look at the loss, made once, whose state is joined anew for every step."""
    joined = []
    for name in ("fields", "shared"):
        there = getattr(KeptState, name)
        monkeypatch.setattr(
            KeptState, name, lambda self, there=there: joined.append(1) or there(self)
        )
    params = {"in": np.ones((4, 4), np.float32), "out": np.ones((4, 2), np.float32)}
    losses = lambda params, x: jnp.tanh(mt.cut(x @ params["in"]) @ params["out"]).sum(1)
    step = mt.train_step(losses, optax.sgd(0.1), devices=2, towers=2, **way)
    state, _ = step(step.init(params), ROWS)
    assert joined
    joined.clear()
    step(state, ROWS)
    assert joined == []


@pytest.mark.slow
def test_a_step_with_stages_waits_for_no_device(monkeypatch):
    """Lie: one stage after the other, because the host looks at what the first one has made."""
    params = [np.eye(4, dtype=np.float32)] * 2
    losses = lambda params, x: (mt.cut(jnp.tanh(x @ params[0])) @ params[1]).sum(1)
    options = {"clip_norm": 1.0, "ema_decay": 0.9, "skip_nonfinite": True, "layout": (2, 2)}
    step = mt.train_step(losses, optax.adam(0.1), devices=4, towers=4, stages=2, **options)
    state, _ = step(step.init(params), ROWS)
    looks = "block_until_ready", "__array__", "__float__", "__int__", "__bool__", "__index__"
    for name in (*looks, "item", "tolist"):
        monkeypatch.setattr(type(jnp.ones(1)), name, lambda *_, **__: pytest.fail("waited"))
    _, metrics = step(state, ROWS)
    monkeypatch.undo()
    assert metrics["skipped"] == 0


def test_the_fast_step_sends_one_all_reduce(monkeypatch):
    params = np.zeros((4, 300), np.float32)
    step = mt.train_step(lambda w, batch: (batch @ w).sum(1), optax.sgd(0.1), devices=4)
    state, _ = step(step.init(params), ROWS)
    (runner,) = step._makers.newest.runners.values()
    shared = NamedSharding(step.placement.mesh, PartitionSpec())
    fields = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shared), state.kept.fields()
    )
    rows = jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype, sharding=step.placement.split)
    count = jax.ShapeDtypeStruct((), np.int32, sharding=shared)
    compiled = runner.program.lower(fields, [], [rows], count).compile()
    # Beside the gradients travel the loss and the number of rows.
    assert 0 <= sent_bytes(compiled, 4) - 2 * params.nbytes * 3 / 4 <= 2 * 2 * 4


def test_small_gradients_travel_together_without_towers():
    # The lie: an exchange for each, of which a CPU or a network takes its time for every one.
    params = {"w": np.ones((4, 2), np.float32), "b": np.ones(2, np.float16), "big": np.ones(SIZE)}

    def losses(params, x):
        return ((x @ params["w"] + params["b"]) ** 2).sum(1) * params["big"].mean()

    compiled = jax.jit(mt.value_and_grad(losses, devices=4)).lower(params, ROWS).compile()
    sent = [shapes for shapes, _ in COLLECTIVE.findall(compiled.as_text())]
    # What is small, with the loss, and the large one.
    assert set(re.findall(r"\w+\[[\d,]*\]", " ".join(sent))) == {"f32[11]", f"f32[{SIZE}]"}


# ---------------------------------------------------------------- programs a step


class Counter:
    """Counts the calls of compiled programs by name."""

    def __init__(self, monkeypatch):
        self.calls = {}
        compile_for_each = same_bits.compile_for_each
        make_reduction = reduction.make_reduction

        def counted(name, program):
            def call(*arguments):
                self.calls[name] = self.calls.get(name, 0) + 1
                return program(*arguments)

            call.out_info = getattr(program, "out_info", None)
            return call

        def compile_counted(fn, *rest, **options):
            made = compile_for_each(fn, *rest, **options)
            return [counted(fn.__name__, program) for program in made]

        for module in (same_bits, totals, exchanges):
            monkeypatch.setattr(module, "compile_for_each", compile_counted)
        monkeypatch.setattr(
            reduction, "make_reduction", lambda where: counted("reduce", make_reduction(where))
        )


@pytest.mark.parametrize(
    ("devices", "towers", "expected"),
    [
        pytest.param(1, 4, {"tower": 4, "add_sums": 3, "finish": 1}, marks=pytest.mark.slow),
        # One of two devices adds the sums of both.
        (2, 4, {"tower": 4, "add_sums": 3, "finish": 2}),
        (3, 3, {"tower": 3, "finish": 3, "reduce": 1}),
        pytest.param(4, 4, {"tower": 4, "finish": 4, "reduce": 1}, marks=pytest.mark.slow),
    ],
)
def test_programs_started_in_one_step(monkeypatch, devices, towers, expected):
    # The lie: an update that is done over and over, a reduction for every leaf.
    counter = Counter(monkeypatch)
    step = mt.train_step(
        lambda w, batch: (batch @ w["a"]) * w["b"], optax.sgd(0.1), devices=devices, towers=towers
    )
    state = step.init({"a": np.ones(4, np.float32), "b": np.float32(1)})
    state, _ = step(state, ROWS)
    counter.calls.clear()
    step(state, ROWS)
    assert counter.calls == expected


# ---------------------------------------------------------------- syncs


@pytest.mark.parametrize(
    "options",
    [{}, {"towers": 4}, pytest.param({"towers": 4, "shard_update": True}, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_step_does_not_wait_for_the_devices(options):
    """A step is made while its batch is still held up on the devices."""
    go = threading.Event()

    def wait(x):
        assert go.wait(60)
        return x

    def hold(x):
        return x * jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32), jnp.float32(1))

    # On several devices: XLA's CPU client runs a callback on one device in the caller's thread.
    held = mt.make_parallel(hold, devices=2)
    optimizer = optax.sgd(0.1, momentum=0.9)
    step = mt.train_step(lambda w, batch: batch @ w, optimizer, devices=2, ema_decay=0.9, **options)
    go.set()
    state, _ = step(step.init(np.ones(4, np.float32)), held(ROWS))  # compiles
    jax.block_until_ready(state.kept.parts())
    go.clear()
    made = {}

    def one_more():
        _, made["metrics"] = step(state, held(ROWS))

    thread = threading.Thread(target=one_more, daemon=True)
    thread.start()
    thread.join(20)
    waits = thread.is_alive()
    go.set()
    thread.join()
    assert not waits
    assert np.isfinite(float(made["metrics"]["loss"]))


# ---------------------------------------------------------------- memory


def bytes_on(device):
    """Each buffer once: an array that others hold, and its shards, share theirs."""
    shards = [shard for array in jax.live_arrays() for shard in array.addressable_shards]
    buffers = {
        shard.data.unsafe_buffer_pointer(): shard.data.nbytes
        for shard in shards
        if shard.device == device
    }
    return sum(buffers.values())


@pytest.mark.parametrize(("towers", "sets"), [pytest.param(2, 1, marks=pytest.mark.slow), (4, 2)])
def test_live_memory_is_state_and_gradients(towers, sets):
    """Parameters, momenta, one set of gradients; two where a device adds its towers'."""
    devices = mt.devices()[6:8]
    params = np.zeros((400, 250), np.float32)
    momentum = optax.sgd(0.1, momentum=0.9)
    step = mt.train_step(
        lambda w, batch: (batch @ w).sum(1), momentum, devices=devices, towers=towers
    )
    gc.collect()  # what other tests have left in circles
    before = bytes_on(devices[0])
    batch = np.ones((8, 400), np.float32)
    state, _ = step(step.init(params), batch)
    gc.collect()  # and what only a first call makes
    seen = []
    with tapped(lambda stage, place, sums: seen.append(bytes_on(devices[0]) - before)):
        state, _ = step(state, batch)
    jax.block_until_ready(state.kept.parts())
    model, rows = params.nbytes, batch.nbytes
    assert max(seen) <= (1 + 1 + sets) * model + rows + 1024
    assert bytes_on(devices[0]) - before <= 2 * model + 1024


# ---------------------------------------------------------------- tracing


@pytest.mark.parametrize(
    ("losses", "metrics", "budget"),
    [
        (lambda w, x: x @ w * 0.5, False, 3),
        (lambda w, x: x @ w * 0.5, True, 4),
        (lambda w, x: x @ w * 0.7071, False, 4),
        (lambda w, x: (x @ w).sum() / len(x), False, 3),
        (lambda w, x: (x * w).mean() * 0.7071, False, 4),
    ],
    ids=["plain number", "metrics", "any number", "mean", "mean of any number"],
)
def test_a_loss_is_traced_so_often(losses, metrics, budget):
    # For its shapes, for the first look and for the program; where there are metrics without rows,
    # with one row more; and with another number of rows where a constant may be made of that. Not
    # more: tracing a large model takes seconds each time.
    traced = []

    def loss(w, x):
        traced.append(x.shape)
        return (losses(w, x), {"scale": jnp.sum(w)}) if metrics else losses(w, x)

    step = mt.train_step(loss, optax.sgd(0.1), devices=1, towers=2)
    step(step.init(jnp.ones(4)), ROWS)
    assert len(traced) == budget
