"""L5: batch number s is a pure function of the data, the seed, the batch size and s."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import multitower as mt
from multitower.data.batches import make_batch, make_batches

sizes = {"num_rows": st.integers(1, 30), "global_batch": st.integers(1, 40)}
draws = {"seed": st.integers(0, 2**32 - 1), "step": st.integers(0, 50)}


def noisy(batch, generator):
    batch["x"] += generator.random(len(batch["x"]))
    return batch


def rows(num_rows):
    return {"x": np.arange(float(num_rows)), "y": np.arange(2 * num_rows).reshape(-1, 2)}


@given(**sizes, **draws)
def test_a_resumed_stream_goes_on_with_the_same_batches(num_rows, global_batch, seed, step):
    data = rows(num_rows)
    options = {"global_batch": global_batch, "seed": seed, "distort": noisy}
    never_stopped = next(itertools.islice(make_batches(data, **options), step, None))
    # Asked for other batches in between, in another order: nothing is remembered.
    make_batch(data, **options, step=step + 7)
    resumed = next(make_batches(data, **options, first=step))
    assert mt.fingerprint(never_stopped) == mt.fingerprint(resumed)
    assert mt.fingerprint(data) == mt.fingerprint(rows(num_rows)), "the data set was changed"


@given(**sizes, seed=draws["seed"])
def test_every_epoch_holds_every_example_once(num_rows, global_batch, seed):
    batches = make_batches(rows(num_rows), global_batch=global_batch, seed=seed)
    first = list(itertools.islice(batches, -(-3 * num_rows // global_batch)))
    assert {len(batch["x"]) for batch in first} == {global_batch}
    seen = np.concatenate([batch["x"] for batch in first])[: 3 * num_rows]
    for epoch in seen.reshape(3, num_rows):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(num_rows))


@given(**sizes, **draws)
def test_leaves_stay_side_by_side(num_rows, global_batch, seed, step):
    batch = make_batch(rows(num_rows), global_batch=global_batch, seed=seed, step=step)
    np.testing.assert_array_equal(batch["y"][:, 0], 2 * batch["x"])


@given(**sizes, **draws, keyed=st.booleans(), distort=st.sampled_from([None, noisy]))
def test_rows_read_by_a_process_are_those_of_the_batch(
    num_rows, global_batch, seed, step, keyed, distort
):
    """Lie: each process of several draws rows, keys or distortions for its own rows alone."""
    data, options = rows(num_rows), {"global_batch": global_batch, "seed": seed}
    options |= {"keyed": keyed, "distort": distort}
    whole = make_batch(data, **options, step=step)
    lazy = next(make_batches(data, **options, first=step, lazy=True))
    assert lazy.num_rows == global_batch
    places = np.array([*range(global_batch // 2, global_batch), 0])  # and one that fills up
    for name, leaf in lazy.read(places).items():
        np.testing.assert_array_equal(leaf, whole[name][places], err_msg=name)


@pytest.mark.parametrize("kind", [np.int32, jnp.int32, np.int64])
def test_a_step_of_numpy_or_jax_is_that_number(kind):
    """Lie: the rows of another step, once rows are more than int32 can count."""
    options, step = {"global_batch": kind(48), "seed": 1}, 2**27
    found = make_batch(rows(7), **options, step=kind(step))
    assert mt.fingerprint(found) == mt.fingerprint(
        make_batch(rows(7), global_batch=48, seed=1, step=step)
    )


def test_an_epoch_is_the_rows_over_those_of_a_batch():
    dataset = {"x": np.zeros((6, 5)), "y": np.zeros(6)}
    assert make_batches(dataset, global_batch=4, seed=0).steps_per_epoch == 1.5


def test_epochs_and_seeds_differ():
    orders = {
        tuple(make_batch(np.arange(50), global_batch=50, seed=seed, step=epoch))
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16


def test_the_order_is_the_same_for_ever():
    # The very numbers: a change of NumPy or of this code that draws others would break resumes.
    batch = make_batch(np.arange(10), global_batch=12, seed=7, step=3)
    assert batch.tolist() == [2, 8, 3, 5, 4, 3, 7, 6, 5, 9, 1, 2]


def test_distortions_differ_from_step_to_step_and_from_seed_to_seed():
    data = {"x": np.zeros(4)}
    drawn = {
        tuple(make_batch(data, global_batch=4, seed=s, step=step, distort=noisy)["x"])
        for s in range(3)
        for step in range(3)
    }
    assert len(drawn) == 9


def test_a_distortion_in_place_leaves_the_data_set_as_it_is():
    """Lie: an array without rows that every batch changes once more."""
    data = {"x": np.zeros(4), "scale": np.array(1.0)}

    def louder(batch, generator):
        batch["scale"] *= 2
        batch["x"] += 1
        return batch

    for _ in range(2):
        batch = make_batch(data, global_batch=4, seed=0, step=0, distort=louder)
        assert (batch["scale"], data["scale"], data["x"].sum()) == (2, 1, 0)


def test_distortions_are_the_same_for_ever():
    batch = make_batch({"x": np.zeros(2)}, global_batch=2, seed=7, step=3, distort=noisy)
    assert batch["x"].tolist() == [0.8219707778346799, 0.5585910984475059]


def test_some_rows_of_a_distorted_batch_are_those_of_the_whole():
    """Lie: a process that reads only its own rows gets the distortion of others."""
    options = {"global_batch": 6, "seed": 7, "step": 3, "distort": noisy}
    whole = make_batch(rows(9), **options)
    places = np.array([4, 1, 5])
    own = make_batch(rows(9), **options, places=places)
    np.testing.assert_array_equal(own["x"], whole["x"][places])
    np.testing.assert_array_equal(own["y"], whole["y"][places])


def test_numbers_beside_the_rows_are_in_every_batch():
    """Lie: a data set that can be scored, and not be trained on."""
    dataset = {
        "x": np.arange(5),
        "scale": np.float32(2),
        "limit": np.array(3.0),
        "no": None,
        "n": 4,
    }
    how = {"global_batch": 3, "seed": 0, "step": 1, "distort": lambda batch, _: batch}
    for places in (None, np.array([0, 2])):
        batch = make_batch(dataset, **how, places=places)
        assert (batch["scale"], batch["limit"], batch["no"], batch["n"]) == (2, 3, None, 4)
        assert batch["x"].shape == (3 if places is None else 2,)


def test_rows_that_were_sharded_are_a_data_set_too():
    dataset = mt.shard({"x": np.arange(10)}, devices=2, towers=4)
    batch = make_batch(dataset, global_batch=7, seed=0, step=0)
    whole = make_batch({"x": np.arange(10)}, global_batch=7, seed=0, step=0)
    np.testing.assert_array_equal(batch["x"], whole["x"])


class Series:
    """As pandas has: after a shuffle, [places] finds the rows that were there before."""

    def __init__(self, values, labels):
        self.iloc, self._labels, self.dtype, self.shape = values, labels, values.dtype, values.shape
        self.ndim = 1

    def __getitem__(self, labels):
        return self.iloc[[int(np.flatnonzero(self._labels == label)[0]) for label in labels]]


def test_rows_of_a_shuffled_series_are_its_places():
    """Lie: they are found by their labels, so that an example gets the answer of another one."""
    x = np.random.default_rng(0).permutation(9)
    data = {"x": x, "y": Series(2 * x, x)}
    batch = make_batch(data, global_batch=4, seed=0, step=1)
    np.testing.assert_array_equal(batch["y"], 2 * batch["x"])
    assert isinstance(batch["y"], np.ndarray)


@pytest.mark.parametrize("home", [None, "cpu:1"])
def test_rows_of_a_jax_array_are_bound_as_it_is(home):
    """Lie: they are bound to the device that they lie on, and meet parameters on all of them."""
    where = None if home is None else mt.devices(home)[0]
    whole = jax.device_put(np.arange(12, dtype=np.float32), where)
    batch = make_batch({"x": whole}, global_batch=8, seed=0, step=0)
    assert batch["x"].committed == (home is not None)
    assert batch["x"].devices() == whole.devices()

    @jax.jit
    def train(w, x):
        return mt.grad(lambda w, x: (w - x) ** 2, devices=mt.devices(home) if home else 2)(w, x)

    params = train(jnp.float32(1), batch["x"])
    assert np.isfinite(train(params, batch["x"]))


class Column:
    """As polars has: a shape but no number of axes, and rows that are columns again."""

    def __init__(self, values):
        self._values, self.dtype, self.shape = values, "Float64", values.shape

    def __getitem__(self, places):
        return Column(self._values[places])

    def __array__(self, dtype=None, copy=None):
        return self._values


class Tensor(Column):
    """As TensorFlow has: no list of places may be asked for."""

    ndim = 1

    def __getitem__(self, places):
        raise TypeError("Only integers, slices and ellipsis are valid indices")


def test_a_column_of_another_library_is_rows():
    """Lie: it has no axis, so the whole of it is in every batch; or the step refuses its rows."""
    x = np.arange(9.0)
    batch = make_batch({"x": x, "y": Column(2 * x)}, global_batch=4, seed=0, step=1)
    assert isinstance(batch["y"], np.ndarray)
    np.testing.assert_array_equal(batch["y"], 2 * batch["x"])
    scored = mt.predict(
        lambda w, b: w * b["x"] * b["y"], 1.0, {"x": x, "y": Column(2 * x)}, global_batch=4
    )
    np.testing.assert_array_equal(scored, 2 * x * x)


def test_an_array_that_takes_no_places_is_refused():
    for use in (
        lambda data: make_batch(data, global_batch=4, seed=0, step=1),
        lambda data: mt.predict(lambda w, b: w * b["y"], 1.0, data, global_batch=4),
    ):
        with pytest.raises(mt.ArgumentError, match=r"data\['y'\] is a Tensor of .*numpy.asarray"):
            use({"x": np.arange(9.0), "y": Tensor(np.arange(9.0))})


def test_batches_have_keys_only_when_asked():
    assert next(make_batches(rows(3), global_batch=2, seed=0)).keys() == {"x", "y"}


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (np.zeros(3), {"global_batch": 0}, "global_batch=0: it must be a whole number, 1 or"),
        (np.zeros(3), {"global_batch": 2.5}, "global_batch=2.5: it must be a whole number"),
        (np.zeros(3), {"global_batch": "2"}, "global_batch='2': it must be a whole number"),
        (np.zeros(3), {"step": -1}, "step=-1"),
        (np.zeros(3), {"step": 1.0}, "step=1.0: it must be a whole number, 0 or more"),
        (np.zeros(3), {"seed": -1}, "seed=-1: it must be a whole number, 0 or more"),
        (np.zeros(3), {"seed": None}, "seed=None: it must be a whole number"),
        (np.zeros((0, 2)), {}, "zero rows"),
        (np.zeros(3), {"distort": lambda batch, draw: None}, "returned None: it must return the"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, {}, r"data\['x'\] has 3 rows and data\['y'\] has 4"),
    ],
)
def test_bad_batches_are_errors(data, options, message):
    with pytest.raises(mt.BatchError, match=message):
        make_batch(data, **{"global_batch": 2, "seed": 0, "step": 0, **options})


@given(num_rows=st.integers(1, 30), seed=draws["seed"], epoch=st.integers(0, 5))
def test_a_key_belongs_to_an_example_and_an_epoch(num_rows, seed, epoch):
    # The lie: distortions that change with the batch size, or when a run is cut otherwise.
    def keys_of_epoch(global_batch):
        first, last = num_rows * epoch, num_rows * (epoch + 1)
        seen = {}
        for step in range(first // global_batch, -(-last // global_batch)):
            batch = make_batch(
                rows(num_rows), global_batch=global_batch, seed=seed, step=step, keyed=True
            )
            for place, (x, key) in enumerate(zip(batch["x"], batch["key"], strict=True)):
                if first <= step * global_batch + place < last:
                    seen[float(x)] = tuple(key.tolist())
        return seen

    one, other = keys_of_epoch(1), keys_of_epoch(7)
    assert one == other
    assert len(set(one.values())) == num_rows


def test_keys_differ_from_epoch_to_epoch_and_seed_to_seed():
    keys = {
        tuple(key.tolist())
        for seed in range(3)
        for epoch in range(3)
        for key in make_batch(rows(9), global_batch=9, seed=seed, step=epoch, keyed=True)["key"]
    }
    assert len(keys) == 81


def test_keys_are_the_same_for_ever():
    batch = make_batch(rows(4), global_batch=3, seed=7, step=1, keyed=True)
    assert (batch["key"].dtype, batch["key"].shape) == (np.uint32, (3, 2))
    assert batch["key"].tolist() == [
        [3508744645, 4018348921],
        [2773626213, 3291459073],
        [148422759, 471130662],
    ]


@pytest.mark.parametrize("data", [np.zeros(3), {"key": np.zeros(3)}])
def test_data_without_room_for_keys_are_an_error(data):
    with pytest.raises(mt.BatchError, match="Pass a dict without 'key'"):
        make_batch(data, global_batch=2, seed=0, step=0, keyed=True)


def test_what_is_distorted_does_not_share_the_numbers_of_the_shuffle():
    # The lie: distortions drawn from the shuffle's own stream, so that both go together.
    rows = np.arange(64)
    drawn = []

    def distort(batch, generator):
        drawn.append(generator.bit_generator.random_raw(64))
        return batch

    plain = make_batch(rows, global_batch=64, seed=3, step=0)
    distorted = make_batch(rows, global_batch=64, seed=3, step=0, distort=distort)
    np.testing.assert_array_equal(plain, distorted)
    assert not np.array_equal(rows[np.argsort(drawn[0], kind="stable")], plain)
    for source in ([3, 0], 3, [3], [0, 3]):
        own = np.random.Philox(np.random.SeedSequence(source)).random_raw(64)
        assert not np.array_equal(drawn[0], own)
    make_batch(rows, global_batch=64, seed=3, step=1, distort=distort)
    assert not np.array_equal(*drawn)
