"""extra_metrics: the norm of the mean gradient and the learning rate, in every way to step.

The lies: the norm of a tower's gradient, of a block, or after clipping; the rate of another step.
"""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt

BOTH = ("gradient_norm", "learning_rate")
BATCHES = [np.random.default_rng(n).normal(size=(n, 5)).astype(np.float32) for n in (12, 7, 12)]
RATES = [0.5, 0.25, 0.125]
LIMIT = 1.5
# The ways to step, and other devices for those with the same bits.
WAYS = {
    "fast": ({"devices": 2}, None),
    "towers": ({"towers": 4, "devices": 1}, None),
    "same bits": ({"towers": 4, "devices": 2}, 1),
    "blocks": ({"towers": 4, "devices": 2, "shard_update": True}, 1),
    "shards": ({"devices": 2, "shard_params": True}, None),
    "stages": ({"towers": 2, "devices": 2, "stages": 2}, 1),
    "a call for all": ({"devices": 2, "steps_per_call": 3}, None),
}


def losses(params, x):
    hidden = mt.cut(x @ params["w"])
    return (hidden + params["b"]) ** 2


def schedule(count):
    return 0.5 ** (count + 1)


def make_optimizer():
    return optax.inject_hyperparams(optax.sgd)(learning_rate=schedule, momentum=0.9)


def train(options, **more):
    step = mt.train_step(
        losses, make_optimizer(), global_batch=12, extra_metrics=BOTH, **options, **more
    )
    state = step.init({"w": np.linspace(-1, 1, 5).astype(np.float32), "b": np.float32(0.5)})
    if "steps_per_call" in options:
        state, told = step(state, BATCHES)
        return state, [{name: value[n] for name, value in told.items()} for n in range(3)]
    found = []
    for batch in BATCHES:
        state, metrics = step(state, batch)
        found.append(metrics)  # and read after the next step, as Trainer does
    return state, found


def numpy_norms(limit):
    """Momentum SGD with clipping in float64: the norm of each mean gradient before clipping."""
    w, b, tw, tb, norms = np.linspace(-1, 1, 5), 0.5, 0.0, 0.0, []
    for batch, rate in zip(BATCHES, RATES, strict=True):
        x = batch.astype(float)
        wrong = 2 * (x @ w + b)
        gw, gb = (wrong[:, None] * x).mean(0), wrong.mean()
        norms.append(np.sqrt((gw**2).sum() + gb**2))
        factor = min(1, limit / norms[-1])
        tw, tb = 0.9 * tw + factor * gw, 0.9 * tb + factor * gb
        w, b = w - rate * tw, b - rate * tb
    return norms


@pytest.mark.parametrize(
    ("way", "limit"),
    [
        ("fast", LIMIT),
        ("towers", LIMIT),
        pytest.param("same bits", LIMIT, marks=pytest.mark.slow),
        pytest.param("blocks", None, marks=pytest.mark.slow),
        pytest.param("shards", LIMIT, marks=pytest.mark.slow),
        pytest.param("stages", None, marks=pytest.mark.slow),
        pytest.param("a call for all", LIMIT, marks=pytest.mark.slow),
        pytest.param("same bits", None, marks=pytest.mark.slow),
        pytest.param("blocks", LIMIT, marks=pytest.mark.slow),
        pytest.param("stages", LIMIT, marks=pytest.mark.slow),
    ],
)
def test_they_are_those_of_a_replay_in_numpy(way, limit):
    options, others = WAYS[way]
    state, metrics = train(options, clip_norm=limit, diagnostics=True)
    norms = numpy_norms(limit or np.inf)
    assert max(norms) > LIMIT  # clipping bites
    np.testing.assert_allclose([m["gradient_norm"] for m in metrics], norms, rtol=2e-5)
    assert [float(m["learning_rate"]) for m in metrics] == RATES
    assert all(m[name].dtype == jnp.float32 for m in metrics for name in BOTH)
    assert {*BOTH, "finite_params", "tower_losses", "loss"} == set(metrics[0])
    if others is not None:
        elsewhere = train({**options, "devices": others}, clip_norm=limit, diagnostics=True)
        assert mt.fingerprint(elsewhere) == mt.fingerprint((state, metrics))


def test_asynchronous_updates_have_the_norm_of_their_own_gradient():
    x = np.arange(1.0, 5.0, dtype=np.float32)
    step = mt.train_step(
        lambda w, x: w * x,
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.5),
        towers=2,
        devices=1,
        updates="asynchronous",
        extra_metrics=BOTH,
    )
    _, metrics = step(step.init(jnp.float32(1)), -x)
    assert (float(metrics["gradient_norm"]), float(metrics["learning_rate"])) == (2.5, 0.5)


def test_a_skipped_step_says_so_and_keeps_its_rate():
    step = mt.train_step(
        lambda w, x: w * x, make_optimizer(), devices=1, extra_metrics=BOTH, skip_nonfinite=True
    )
    state = step.init(jnp.float32(1))
    state, metrics = step(state, np.array([np.inf], np.float32))
    assert (float(metrics["skipped"]), float(metrics["learning_rate"])) == (1, 0.5)
    assert not np.isfinite(metrics["gradient_norm"])
    assert float(step(state, np.array([2.0], np.float32))[1]["gradient_norm"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"towers": 1, "stages": 1}], ids=["whole", "stages"])
def test_the_rate_of_an_update_that_is_not_made_is_the_one_that_was_tried(how):
    """Lie: that of the update before."""
    options = {"extra_metrics": ["learning_rate"], "skip_nonfinite": True, "devices": 1, **how}
    step = mt.train_step(lambda w, x: w * x, make_optimizer(), **options)
    state, rates = step.init(jnp.float32(1)), []
    for x in (3, np.nan, 3):
        state, metrics = step(state, np.float32([x]))
        rates.append(float(metrics["learning_rate"]))
    assert rates == [0.5, 0.25, 0.25]


@pytest.mark.slow
def test_the_metrics_reach_the_hooks_of_a_trainer():
    told = []
    trainer = mt.Trainer(
        lambda w, x: w * x,
        make_optimizer(),
        devices=1,
        extra_metrics=BOTH,
        hooks=[told.append],
    )
    trainer.fit(jnp.float32(1), lambda first: iter([np.float32([3])] * 2), steps=2)
    assert [p.metrics["learning_rate"] for p in told] == [0.5, 0.25]
    assert [p.metrics["gradient_norm"] for p in told] == [3, 3]


def test_what_is_not_known_is_refused():
    # The lie: a learning rate that somebody has guessed.
    plain = lambda w, x: w * x
    make = mt.train_step
    with pytest.raises(mt.ArgumentError, match=r"does not hold it: wrap one optimizer, such as"):
        make(plain, optax.adam(0.1), extra_metrics=BOTH).init(jnp.float32(1))
    twice = optax.chain(make_optimizer(), make_optimizer())
    with pytest.raises(mt.ArgumentError, match="holds 2 of them"):
        make(plain, twice, extra_metrics=["learning_rate"]).init(jnp.float32(1))
    for names in ("gradient_norm", ["loss"], None):
        with pytest.raises(mt.ArgumentError, match="give a list of names"):
            make(plain, optax.adam(0.1), extra_metrics=names)
    with pytest.raises(mt.ArgumentError, match="sync_every=2 exclude each other"):
        make(plain, optax.sgd(0.1), towers=2, sync_every=2, extra_metrics=["gradient_norm"])
    taken = lambda w, x: (w * x, {"gradient_norm": x})
    for how in ({}, {"towers": 1, "stages": 1}):  # with stages it was overwritten
        step = make(taken, optax.sgd(0.1), devices=1, extra_metrics=["gradient_norm"], **how)
        with pytest.raises(mt.OutputError, match="returns a metric 'gradient_norm'"):
            step(step.init(jnp.float32(1)), np.float32([3]))
