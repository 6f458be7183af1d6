"""L7: an evaluation counts every example exactly once."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.training.scoring.evaluation import evaluate

VALUES = np.random.default_rng(0).normal(size=100).astype(np.float32)
EXACT = math.fsum(VALUES.tolist()) / len(VALUES)


def metrics(scale, batch):
    # Doubling is exact, so the means are, whatever the compiler makes of it.
    return {"value": scale * batch["x"], "one": jnp.ones_like(batch["x"])}


@pytest.mark.parametrize(
    ("global_batch", "towers"),
    [
        (1, None),
        (7, 3),
        pytest.param(64, None, marks=pytest.mark.slow),
        (100, 3),
        (1000, None),
    ],
)
def test_trap_evaluation_samples_duplicated_or_dropped(global_batch, towers):
    """accelerate#226: 10 167 of 10 000 test images, because the last batch is filled up; law L7."""
    # Equal to the last bit: one value twice or never, or a mean of means, would show.
    options = {"global_batch": global_batch, "towers": towers, "devices": 2}
    scores = evaluate(metrics, 2.0, {"x": VALUES}, **options)
    assert scores == {"value": 2 * EXACT, "one": 1.0}


@pytest.mark.parametrize("num_rows", [1, 2, 9])
def test_fewer_examples_than_devices(num_rows):
    scores = evaluate(metrics, 1.0, {"x": VALUES[:num_rows]}, global_batch=4, devices=3)
    assert scores["value"] == math.fsum(VALUES[:num_rows].tolist()) / num_rows


def test_numbers_beside_the_rows():
    """Lie: a TypeError of Python for the batch that a step takes, which has a number for all."""
    data = {"all": 2.0, "key": jax.random.key(0), "scale": np.float32(3), "x": VALUES}
    of_row = lambda params, batch: {"value": params * batch["all"] * batch["scale"] * batch["x"]}
    wanted = np.mean(6 * VALUES.astype(np.float64))
    for given in (data, iter([data, data])):
        found = evaluate(of_row, 1.0, given, global_batch=30, devices=2)["value"]
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_law_l3_of_a_data_set_on_several_devices(devices):
    """Lie: examples that XLA adds up over the devices, which makes 0.0 of -0.0."""
    zeros = mt.shard(np.full(16, -0.0, np.float32), devices=devices)
    where = {"global_batch": 5, "towers": 4, "devices": devices}
    assert evaluate(lambda _, x: {"value": 1 / x}, 0.0, zeros, **where) == {"value": -math.inf}


@pytest.mark.slow
def test_a_model_in_stages_is_scored_in_stages():
    # The lies: cut for training, and copied whole to every device, or to others, to be scored.
    size = 21  # a shape of no other test

    def metrics(params, x):
        h = mt.cut(jnp.tanh(x @ params[0]))
        return {"norm": (mt.cut(h @ params[1]) @ params[2] ** 2).sum(1)}

    def loss(params, x):
        return metrics(params, x)["norm"]

    x = np.random.default_rng(0).normal(size=(7, size)).astype(np.float32)
    where = {"towers": 2, "devices": 2, "global_batch": 4}
    trainer = mt.Trainer(loss, optax.sgd(0.01), stages=3, interleave=True, **where)
    start = [np.eye(size, dtype=np.float32)] * 3
    state, _ = trainer.step(trainer.step.init(start), x[:4])
    scores = trainer.evaluate(metrics, state, x, global_batch=4)
    params = jax.device_get(state.params)
    assert scores["norm"] == pytest.approx(float(loss(params, x).mean()), rel=1e-5)
    held = [(a.unsafe_buffer_pointer(), a.devices()) for a in jax.live_arrays()
            if a.shape == (size, size)]  # fmt: skip
    assert len({where for where, _ in held}) == 3  # each weight once
    assert {device for _, devices in held for device in devices} == {*jax.devices()[:2]}
    assert evaluate(metrics, params, x, stages=3, **where) == scores
    with pytest.warns(mt.MultitowerWarning, match="every device gets the whole model"):
        plain = trainer.evaluate(lambda params, x: {"sum": x.sum(1)}, state, x, global_batch=4)
    assert plain["sum"] == pytest.approx(float(x.sum(1).mean()), rel=1e-5)


def test_sums_and_ratios():
    # The lies: a total that is divided by another ratio's weight, a sum that is divided at all.
    def metrics(_, x):
        ratios = mt.ratio(x, jnp.ones_like(x)) + mt.ratio(x, x) + mt.ratio(x, 2 * x)
        return {"ratios": ratios + 3, "row": x}

    x = np.arange(1, 11, dtype=np.float32)
    scores = evaluate(metrics, 0.0, x, global_batch=4, devices=2, reduction="sum")
    assert scores == {"ratios": 5.5 + 1 + 0.5 + 3, "row": 55.0}


@pytest.mark.parametrize("towers", [None, 3])
def test_law_l7_of_an_iterator_of_batches(towers):
    # The lie: a last smaller batch that is dropped, filled up, or as heavy as the others.
    sizes = [8, 8, 3, 20, 1, 60]
    ends = np.cumsum(sizes)
    assert ends[-1] == len(VALUES)
    batches = ({"x": VALUES[end - size : end]} for size, end in zip(sizes, ends, strict=True))
    options = {"global_batch": 64, "towers": towers, "devices": 2}
    assert evaluate(metrics, 2.0, batches, **options) == {"value": 2 * EXACT, "one": 1.0}


class Loader:
    """As loaders of other libraries are: an iterable that is neither a list nor an iterator."""

    def __iter__(self):
        return iter([{"x": VALUES[:70]}, {"x": VALUES[70:]}])


@pytest.mark.slow
def test_a_loader_is_read_by_a_trainer_too():
    trainer = mt.Trainer(lambda w, x: w * x, optax.sgd(0.1), devices=2, hooks=[])
    state = trainer.step.init(np.float32(2))
    for data in (Loader(), iter(Loader())):
        scores = trainer.evaluate(metrics, state, data, global_batch=16)
        assert scores == {"value": 2 * EXACT, "one": 1.0}
    # The lie: the first batch is lost where the metrics cannot be cut into stages.
    trainer = mt.Trainer(
        lambda w, x: mt.cut(x * 2) * w, optax.sgd(0.1), devices=2, towers=2, stages=2
    )
    state = trainer.step.init(np.float32(2))
    with pytest.warns(mt.MultitowerWarning, match="the metrics: .* every device gets the whole"):
        scores = trainer.evaluate(
            lambda _, batch: {"value": 2 * batch["x"]}, state, iter(Loader()), global_batch=16
        )
    assert scores == {"value": 2 * EXACT}
    # The lie: the others are lost, those before a batch that nobody can score and that batch.
    of_stages = lambda w, batch: {"value": mt.cut(batch["x"] * 2) * w}
    faulty = iter([*Loader(), {"x": VALUES, "name": "c"}, *Loader()])
    with pytest.raises(mt.ArgumentError, match="name"):
        trainer.evaluate(of_stages, state, faulty, global_batch=16)


def test_an_iterator_without_batches_is_an_error():
    with pytest.raises(mt.BatchError, match="the iterator of batches is empty"):
        evaluate(metrics, 1.0, iter([]), global_batch=4)
    with pytest.raises(mt.BatchError, match="zero rows"):
        evaluate(metrics, 1.0, iter([{"x": VALUES}, {"x": VALUES[:0]}]), global_batch=4)


def test_no_examples_are_an_error():
    with pytest.raises(mt.BatchError, match="zero rows"):
        evaluate(metrics, 1.0, {"x": VALUES[:0]}, global_batch=4)


@pytest.mark.parametrize("wrong", [0, 2.5, "2", None])
def test_a_wrong_batch_size_is_an_error(wrong):
    with pytest.raises(mt.BatchError, match=f"global_batch={wrong!r}: it must be a whole number"):
        evaluate(metrics, 1.0, {"x": VALUES}, global_batch=wrong)


@pytest.mark.slow
def test_batches_that_are_on_their_devices_are_scored_too():
    """Lie: batches of prefetch, with the towers that score them, are no batches."""
    halves = [{"x": VALUES[:60]}, {"x": VALUES[60:]}]
    where = {"devices": 2, "towers": 4}
    scores = evaluate(metrics, 1.0, mt.prefetch(halves, **where), global_batch=16, **where)
    assert scores == evaluate(metrics, 1.0, {"x": VALUES}, global_batch=16, **where)


LABELS = np.arange(100) % 3


def of_classes(params, batch):
    own = jax.nn.one_hot(batch["y"], 3)
    guess = jax.nn.one_hot((batch["x"] > params).astype(int), 3)
    return {"confusion": own[:, :, None] * guess[:, None, :], "x_of": own * batch["x"][:, None]}


@pytest.mark.parametrize("towers", [None, 3])
def test_a_metric_may_have_an_array_per_row(towers):
    # The lie: a TypeError of Python, where train_step takes such a metric.
    data = {"x": VALUES, "y": LABELS}
    where = {"global_batch": 30, "towers": towers, "devices": 2}
    means = mt.evaluate(of_classes, 0.0, data, **where)
    counts = mt.evaluate(of_classes, 0.0, data, reduction="sum", **where)
    confusion = np.zeros((3, 3))
    np.add.at(confusion, (LABELS, (VALUES > 0).astype(int)), 1)
    np.testing.assert_array_equal(counts["confusion"], confusion)
    np.testing.assert_array_equal(means["confusion"], confusion / 100)
    exact = [math.fsum(VALUES[label == LABELS].tolist()) for label in range(3)]
    np.testing.assert_array_equal(counts["x_of"], exact)
    np.testing.assert_array_equal(means["x_of"], np.array(exact) / 100)


@pytest.mark.slow
def test_hooks_and_the_best_score_get_the_numbers_alone():
    told = []
    trainer = mt.Trainer(
        lambda w, batch: (w - batch["x"]) ** 2, optax.sgd(0.1), devices=1, hooks=[told.append]
    )
    state = trainer.fit(jnp.float32(0), lambda first: iter([{"x": VALUES}]), steps=1)
    both = lambda w, batch: {**of_classes(w, batch), "x": batch["x"]}
    scores = trainer.evaluate(both, state, {"x": VALUES, "y": LABELS}, global_batch=50)
    assert scores["confusion"].shape == (3, 3)
    assert told[-1].metrics == {"x": EXACT}


def test_a_mean_of_a_tower_is_refused():
    with pytest.raises(mt.OutputError, match=r"\['mean'\]"):
        evaluate(lambda _, batch: {"mean": batch["x"].mean()}, 0.0, {"x": VALUES}, global_batch=4)


def test_model_state_goes_to_metrics_that_take_it():
    def with_state(scale, batch, *, model_state):
        return {"value": scale * batch["x"] * model_state["factor"]}

    # A power of two, so that the mean stays exact; and none that would not be missed.
    options = {"global_batch": 7, "devices": 3, "model_state": {"factor": jnp.float32(4.0)}}
    scores = evaluate(with_state, 2.0, {"x": VALUES}, **options)
    assert scores == {"value": 8 * EXACT}
    assert evaluate(metrics, 2.0, {"x": VALUES}, **options)["value"] == 2 * EXACT


def test_a_model_state_that_is_missing_is_named():
    """Lie: a TypeError inside the user's own function, about None."""

    def needs(scale, batch, *, model_state):
        return {"value": batch["x"] * model_state["factor"]}

    def may_do_without(scale, batch, *, model_state=None):
        return {"value": batch["x"] if model_state is None else batch["x"] * 0}

    rows = {"x": VALUES}
    for score in (evaluate, mt.predict):
        with pytest.raises(mt.ArgumentError, match=r"takes model_state, and \w+ got none"):
            score(needs, 2.0, rows, global_batch=7, devices=3)
    assert evaluate(may_do_without, 2.0, rows, global_batch=7, devices=3)["value"] == EXACT


def test_the_second_evaluation_compiles_nothing():
    # The lie: an evaluation after every epoch that costs a compilation each time.
    traces = []

    def metrics(bound, x):
        traces.append(x.shape)
        return {"above": x > bound}

    data = np.arange(10.0)
    first = evaluate(metrics, 6.0, data, global_batch=4, devices=mt.devices(2))
    count = len(traces)
    assert evaluate(metrics, 8.0, data, global_batch=4, devices=mt.devices(2))["above"] == 0.1
    assert first["above"] == 0.3
    assert len(traces) == count


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*with statistics of their own tower.s rows")
def test_nnx_modules_are_scored_in_evaluation_mode():
    # The lie: 0.841 instead of 0.872: dropout is on, BatchNorm uses the batch.
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(3, 4, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(self.dense(x)))

    def metrics(model, x):
        model.eval()  # as many write it; it changes nothing any more
        return {"size": (model(x) ** 2).mean(1)}

    x = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
    model = Net(nnx.Rngs(0))
    where = {"devices": 2, "towers": 4}
    trainer = mt.Trainer(lambda model, x: (model(x) ** 2).mean(1), optax.sgd(0.1), **where)
    state = trainer.fit(model, lambda first: itertools.repeat(x[:8]), steps=3)
    found = trainer.evaluate(metrics, state, x, global_batch=4)["size"]
    trained = trainer.step.model(state)
    assert not trained.dropout.deterministic  # only the copy that is scored
    before = jax.tree.leaves(nnx.state(trained))
    assert mt.evaluate(metrics, trained, x, global_batch=4, **where)["size"] == found
    assert jax.tree.leaves(nnx.state(trained)) == before
    trained.eval()
    np.testing.assert_allclose(found, (trained(x) ** 2).mean(), rtol=1e-5)


@pytest.mark.slow
def test_equinox_modules_are_scored_in_inference_mode():
    # The lie: an evaluation with dropout, or of some rows twice.
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.Sequential([eqx.nn.Dropout(0.5), eqx.nn.Linear(3, 2, key=jax.random.key(0))])
    metrics = lambda model, x: {"size": jax.vmap(model)(x).sum(1)}
    x = np.arange(15, dtype=np.float32).reshape(5, 3)
    found = mt.evaluate(metrics, model, x, global_batch=4, devices=2)["size"]
    expected = jax.vmap(eqx.nn.inference_mode(model))(x).sum(1).mean()
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (lambda w, x: (x * w, {}), "returned tuple: return a dict with one number per row"),
        (lambda w, x: {"wave": x * (w + 1j)}, r"metrics\['wave'\] is complex"),
        (lambda w, x: {"wave": mt.ratio(x * (w + 1j), x)}, r"metrics\['wave'\] is complex"),
        (
            lambda w, x: {"mean": x.mean()},
            r"metrics\['mean'\] has shape \(\) for . rows: return one entry per row",
        ),
        (
            lambda w, x: {"top": {"1": x, "5": x}},
            r"metrics\['top'\] is dict: each name has one array .* names .* such as 'top/1'",
        ),
        (lambda w, x: {"top": [x, x]}, r"metrics\['top'\] is list: each name has one array"),
        (
            lambda w, x: {"key": jax.random.split(jax.random.key(0), len(x))},
            r"metrics\['key'\] holds PRNG keys, which have no mean\.",
        ),
        (
            lambda w, x: {"table": jnp.zeros((3, 3)) + x.sum()},
            r"result\['table'\] has shape \(3, 3\) for .* Return something per row .* outside\.\n",
        ),
        (
            lambda w, x: {"classes": jnp.ones(4) * x.sum()},
            r"result\['classes'\] has shape \(4,\) .* Return something per row .* outside\.\n",
        ),
    ],
)
def test_metrics_of_another_kind_are_refused_in_words(metrics, message):
    with pytest.raises(mt.OutputError, match=message):
        mt.evaluate(metrics, 1.0, np.arange(8.0), global_batch=8, devices=2)


@pytest.mark.slow
def test_metrics_that_differ_between_batches_are_refused():
    # The lie: a metric of half of the examples, divided by the number of all.
    ones = np.ones(8)
    by_task = lambda w, batch: {task: x * w for task, x in batch.items()}
    with pytest.raises(mt.OutputError, match=r"metrics\['a'\] is in the result of the first batch"):
        mt.evaluate(by_task, 1.0, iter([{"a": ones}, {"b": ones}]), global_batch=8, devices=2)
    rows = iter([np.ones((8, 3)), np.ones((8, 2))])
    with pytest.raises(mt.OutputError, match=r"metrics\['x'\] has shape \(2,\) for a row of one"):
        mt.evaluate(lambda w, x: {"x": x * w}, 1.0, rows, global_batch=8, devices=2)


@pytest.mark.parametrize("towers", [None, 4])
def test_trap_totals_of_four_members_are_taken_for_those_of_four_rows(towers):
    """Lie: of 13 rows in towers of 4, three of the last tower's four totals do not count."""
    rows = np.arange(52, dtype=np.float32).reshape(13, 4)
    by_member = lambda w, y: {"error": mt.ratio(((w - y) ** 2).sum(0), np.ones(4, np.float32))}
    with pytest.raises(mt.OutputError, match=r"mt.ratio has shape \(4,\) for 5 rows"):
        mt.evaluate(by_member, 1.0, rows, global_batch=16, devices=4, towers=towers)


def test_ratios_of_whole_pairs_are_right():
    """Lie: they are refused for a wrong shape with one row more, which no tower has."""

    def of_pairs(w, x):
        first = jnp.repeat(x[: len(x) // 2 * 2 : 2] * w, 2)
        return {"first": mt.ratio(first, jnp.ones_like(first))}

    found = mt.evaluate(of_pairs, 2.0, np.arange(16.0), global_batch=16, devices=4)
    assert found["first"] == pytest.approx(14.0)  # twice the mean of 0, 2, ... 14


def test_a_ratio_beside_a_key_of_two_numbers():
    """Lie: "2 rows", the numbers of a key of `jax.random.PRNGKey`."""
    batch = {"key": jax.random.PRNGKey(0), "x": np.arange(8, dtype=np.float32)}
    metrics = lambda params, batch: {"mean": mt.ratio(batch["x"], jnp.ones(len(batch["x"])))}
    assert mt.evaluate(metrics, 0.0, batch, global_batch=8, towers=2, devices=1) == {"mean": 3.5}
