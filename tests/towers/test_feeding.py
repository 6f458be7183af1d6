"""shard and prefetch: every row on its tower's device, in order, ahead of need."""

import threading
import time
import warnings

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import multitower as mt
from forks import Fork
from processes import clean_environment, ended


@settings(max_examples=30)
@given(
    num_rows=st.integers(1, 20),
    num_devices=st.integers(1, 4),
    towers=st.integers(4, 9),
    spare=st.integers(0, 9),
)
def test_towers_hold_all_rows_once_in_order(num_rows, num_devices, towers, spare):
    """Lie: rows lost, doubled or sent to another tower."""
    x = np.arange(num_rows * 2).reshape(num_rows, 2)
    full = num_rows + spare
    cut = mt.shard({"x": x}, devices=num_devices, towers=towers, global_batch=full)["x"]
    assert cut.tower_rows == -(-full // towers)
    np.testing.assert_array_equal(np.asarray(cut), x)
    assert (cut.shape, cut.ndim, cut.num_rows) == (x.shape, 2, num_rows)
    for tower, piece in enumerate(cut.pieces):
        device = cut.placement.devices[cut.placement.owners[tower]]
        assert piece.devices() == {device}
        assert set(np.asarray(piece)[:, 0]) <= set(x[:, 0])  # filled up with real rows
        own = x[tower * cut.tower_rows : (tower + 1) * cut.tower_rows]
        np.testing.assert_array_equal(piece[: len(own)], own)
        assert cut.counts(tower) == (tower, len(own), num_rows)


def test_without_towers_rows_are_split_evenly_or_whole_everywhere():
    even, uneven = (mt.shard(np.arange(n), devices=4) for n in (8, 9))
    rows_on = {s.device: s.data.tolist() for s in even.addressable_shards}
    assert rows_on == dict(zip(mt.devices(4), [[0, 1], [2, 3], [4, 5], [6, 7]], strict=True))
    assert [s.data.tolist() for s in uneven.addressable_shards] == [list(range(9))] * 4


def test_what_is_no_array_of_rows_is_left_alone():
    key = jax.random.key(0)
    for towers in (None, 2):
        cut = mt.shard({"x": np.zeros(4), "n": 3, "key": key, "no": None}, devices=2, towers=towers)
        assert cut["n"] == 3
        assert cut["key"] is key
        assert cut["no"] is None


@pytest.mark.parametrize("towers", [None, 4])
@pytest.mark.parametrize("shape", [(8, 3), (1024, 300)])
def test_trap_host_memory_that_changes_under_the_devices(shape, towers):
    """JAX reads host memory in the background, after device_put has returned."""
    for number in range(20):
        buffer = np.full(shape, number, np.float32)
        placed = mt.shard({"x": buffer}, devices=4, towers=towers)["x"]
        buffer[:] = np.nan
        assert (np.asarray(placed) == number).all()


@pytest.mark.parametrize("towers", [None, 2])
def test_numbers_and_keys_of_a_loader_that_writes_into_its_arrays(towers):
    """Lie: the rows of one batch with the weight and the key of one that was read ahead."""
    batch = {"x": np.zeros(4), "weight": np.zeros(()), "key": np.zeros(2, np.uint32)}

    def stream():
        for number in range(4):
            for leaf in batch.values():
                leaf[...] = number
            yield batch

    found = list(mt.prefetch(stream(), devices=2, towers=towers))
    assert [[np.asarray(leaf).max() for leaf in one.values()] for one in found] == [
        [number] * 3 for number in range(4)
    ]


def test_trap_a_state_made_of_host_memory_that_changes():
    import optax

    for towers in (None, 4):
        step = mt.train_step(lambda w, x: (x @ w) ** 2, optax.sgd(0.1), devices=4, towers=towers)
        for number in range(5):
            params = np.full(50_000, number, np.float32)
            state = step.init(params)
            params[:] = np.nan
            assert (np.asarray(state.params) == number).all()


def stream(num_batches, reached=None):
    for number in range(num_batches):
        if reached is not None:
            reached.append(number)
        yield {"x": 8 * number + np.arange(8, dtype=np.float32).reshape(4, 2)}


def threads():
    return [t for t in threading.enumerate() if t.name == "multitower.prefetch"]


def assert_no_threads_left():
    deadline = time.monotonic() + 60
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not threads()


@pytest.mark.parametrize("towers", [None, 4])
@pytest.mark.parametrize("size", [1, 2, 20])
def test_prefetch_is_shard_of_every_batch_in_order(size, towers):
    options = dict(devices=2, towers=towers)
    found = [np.asarray(b["x"]) for b in mt.prefetch(stream(9), size, **options)]
    np.testing.assert_array_equal(np.ravel(found), np.arange(72))  # rows in order, too
    assert_no_threads_left()


@pytest.mark.parametrize("towers", [None, 5])
@pytest.mark.parametrize("num_rows", [12, 7])
def test_lazy_rows_are_the_rows(num_rows, towers):
    """Lie: other rows than the same batch has as arrays; several processes only compare these."""
    x = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    lazy = mt.LazyRows(num_rows, lambda places: {"x": x[places]})
    options = dict(devices=3, towers=towers, global_batch=12)
    (ahead,) = mt.prefetch([lazy], **options)
    for cut in (mt.shard(lazy, **options), ahead):
        np.testing.assert_array_equal(cut["x"], x[:num_rows])


@pytest.mark.parametrize("towers", [None, 2])
@pytest.mark.parametrize("feed", [mt.shard, lambda x, **how: next(mt.prefetch([x], **how))])
def test_a_batch_larger_than_a_full_one_is_refused(feed, towers):
    """Lie: global_batch= that counts only with towers=."""
    with pytest.raises(mt.BatchError, match="has 4 rows and global_batch is 3"):
        feed(np.zeros(4), towers=towers, devices=2, global_batch=3)
    with pytest.raises(mt.BatchError, match=r"global_batch=4\.5: it must be a whole number"):
        feed(np.zeros(4), towers=towers, devices=2, global_batch=4.5)


def test_without_towers_batches_may_grow():
    """Lie: the first batch as the largest one, where nothing is compiled for it."""
    grown = list(mt.prefetch([np.zeros(4), np.zeros(6)], devices=2))
    assert [len(batch) for batch in grown] == [4, 6]


def test_lazy_rows_that_do_not_come():
    """Lie: a run on the few rows that came."""
    batch = mt.LazyRows(48, lambda places: {"x": np.ones((2, 3))})
    with pytest.raises(mt.BatchError, match="48 rows were asked for and 2 came"):
        mt.shard(batch, towers=5, devices=1)
    with pytest.raises(mt.BatchError, match="must be a whole number"):
        mt.LazyRows(4.0, lambda places: places)
    with pytest.raises(mt.ArgumentError, match=r"give them to mt\.prefetch"):
        mt.make_parallel(lambda x: x)(batch)


def test_what_is_sharded_in_the_same_way_stays_as_it_is():
    """Lie: with several processes, of which none has all rows, a Trainer cannot take it."""
    where = {"devices": 2, "towers": 3}
    batch = {"x": np.arange(12.0).reshape(6, 2), "n": np.float32(1)}
    once = mt.shard(batch, global_batch=7, **where)
    assert mt.shard(once, global_batch=9, **where)["x"] is once["x"]  # three rows in a tower
    (ahead,) = mt.prefetch([once], global_batch=7, **where)
    assert ahead["x"] is once["x"]
    other = mt.shard(once, devices=1, towers=3)["x"]
    assert other.tower_rows == 2
    np.testing.assert_array_equal(other, batch["x"])
    assert mt.shard(once, **where)["x"].tower_rows == 2  # the same towers, with fewer rows
    moved = mt.shard(once, devices=1, towers=3, global_batch=7)["x"]  # and elsewhere
    assert {device for piece in moved.pieces for device in piece.devices()} == {*mt.devices(1)}


def test_prefetch_reads_ahead_and_no_further():
    """Lie: the next batch is made when it is asked for; or all of them are, until memory ends."""
    reached = []
    batches = mt.prefetch(stream(100, reached), 3, devices=2)
    next(batches)
    deadline = time.monotonic() + 60
    while len(reached) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)  # in which it could go too far; a busy machine hides that, and fails nothing
    assert 4 <= len(reached) <= 6  # one read, three waiting, one in the thread's hands
    batches.close()
    assert_no_threads_left()


def test_prefetch_makes_the_dtypes_that_shard_makes():
    """Lie: 64 bits where the caller is, and 32 in the thread that copies."""
    with jax.enable_x64(True):
        (batch,) = mt.prefetch([np.zeros(4)], devices=2)
        assert batch.dtype == mt.shard(np.zeros(4), devices=2).dtype == np.float64


def test_prefetch_keeps_the_size_of_the_first_batch_for_a_ragged_last_one():
    """Trap: a third compilation for the ragged last batch."""
    batches = [np.zeros(8), np.zeros(8), np.ones(3)]
    cut = list(mt.prefetch(batches, devices=2, towers=4))
    assert [c.tower_rows for c in cut] == [2, 2, 2]
    assert [c.num_rows for c in cut] == [8, 8, 3]


def test_prefetch_raises_the_error_of_the_stream_after_the_batches_before_it():
    """Lie: the stream ends early and quietly, or its last good batches are lost."""

    def broken():
        yield from stream(3)
        raise OSError("disk full")

    batches = mt.prefetch(broken(), 5, devices=2)
    assert [int(next(batches)["x"][0, 0]) for _ in range(3)] == [0, 8, 16]
    with pytest.raises(OSError, match="disk full"):
        next(batches)
    assert_no_threads_left()


@pytest.mark.parametrize("given", [None, len, {"x": np.zeros(4)}])
def test_prefetch_of_what_is_no_stream_is_told_at_once(given):
    with pytest.raises(mt.ArgumentError, match=r"batches is .*: pass an iterator .* mt\.shard"):
        mt.prefetch(given, devices=2, towers=2)


def test_prefetch_warns_of_idle_devices_once_where_it_is_called():
    """Lie: a warning of a line in threading.py, one more with every batch."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert len(list(mt.prefetch(stream(4), devices=4, towers=2))) == 4
    assert [one.filename for one in told] == [__file__]


def test_prefetch_raises_what_shard_refuses():
    batches = mt.prefetch([np.zeros(4), np.zeros(0)], devices=2)
    next(batches)
    with pytest.raises(mt.BatchError, match="zero rows"):
        next(batches)
    assert_no_threads_left()


HELD = """
import sys, time
import numpy as np
import multitower as mt

def stream():
    for i in range(10**9):
        if i == 5 and sys.argv[1] == "blocked":
            time.sleep(10**9)
        yield {"x": np.full((4, 2000), i)}

batches = mt.prefetch(stream())
next(batches)
next(batches)
time.sleep(0.2)
if sys.argv[1] == "exit":
    sys.exit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("end", 0), ("exit", 3), ("blocked", 0)])
def test_a_program_ends_with_an_iterator_that_it_holds(how, code):
    """Lie: a finished program that ends with code 134, as its thread is killed inside of XLA."""
    for _ in range(1 if how == "blocked" else 2):
        found = ended(Fork("-c", HELD, how, env=clean_environment()), timeout_s=60)
        assert (found.returncode, found.stderr) == (code, "")


def test_prefetch_that_nobody_reads_to_the_end_leaves_no_thread():
    batches = mt.prefetch(stream(10**9), devices=2)
    next(batches)
    del batches
    assert_no_threads_left()


@pytest.mark.parametrize(
    "batch",
    [np.zeros((4, 3)), (np.zeros((4, 3)), np.zeros(4))],
    ids=["x", "x, y"],
)
def test_one_batch_is_no_stream(batch):
    """Lie: every row is a batch, or the labels are the second batch."""
    with pytest.raises(mt.ArgumentError, match=r"For one batch call mt.shard"):
        mt.prefetch(batch)
