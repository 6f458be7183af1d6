"""mt.ratio and reduction="sum" in train_step and in evaluations: exact for any rows and towers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from tower_keys import tower_key

WAYS = {
    "fast": {"devices": 2},
    "same bits": {"devices": 1, "towers": 4},  # the same bits on more devices: below
    "shard_update": {"devices": 2, "towers": 4, "shard_update": True},
}
every_way = pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
# Blocks of the update, which compile most, take part in other tests every day.
fast_and_same_bits = pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, marks=[pytest.mark.slow] if way == "shard_update" else [])
        for way, options in WAYS.items()
    ],
    ids=WAYS,
)
PARAMS = np.linspace(-1, 1, 3).astype(np.float32)


def batch_of(num_rows, seed):
    rng = np.random.default_rng(seed)
    lengths = np.arange(num_rows)[::-1] % 5
    x = rng.normal(size=(num_rows, 4, 3)).astype(np.float32)
    return {"x": x, "mask": np.arange(4) < lengths[:, None]}


BATCHES = [batch_of(12, 0), batch_of(7, 1), batch_of(12, 2)]


def losses(w, batch):
    wrong = (batch["x"] @ w - 1) ** 2
    mask = batch["mask"]
    right = (wrong < 1) & mask
    metrics = {
        "right": mt.ratio(right, mask),
        "tokens": mask.sum(1),
        "twice": 2 * _masked(w, batch),
    }
    return _masked(w, batch) + 0.01 * (w**2).sum(), metrics


def _masked(w, batch):
    return mt.ratio((batch["x"] @ w - 1) ** 2 * batch["mask"], batch["mask"])


def numpy_step(w, batch):
    """Loss, metrics and new parameters in float64."""
    x, mask = batch["x"].astype(float), batch["mask"]
    wrong = (x @ w - 1) * mask
    loss = (wrong**2).sum() / mask.sum()
    gradient = (2 * wrong[..., None] * x).sum((0, 1)) / mask.sum() + 0.02 * w
    right = ((x @ w - 1) ** 2 < 1) & mask
    metrics = {
        "loss": loss + 0.01 * (w**2).sum(),
        "right": right.sum() / mask.sum(),
        "tokens": mask.sum() / len(mask),
        "twice": 2 * loss,
    }
    return w - 0.1 * gradient, metrics


@fast_and_same_bits
def test_a_masked_loss_and_its_metrics(options):
    step = mt.train_step(losses, optax.sgd(0.1), global_batch=12, **options)
    state, w = step.init(PARAMS), PARAMS.astype(float)
    for batch in BATCHES:
        state, metrics = step(state, batch)
        w, expected = numpy_step(w, batch)
        np.testing.assert_allclose(state.params, w, rtol=1e-5, atol=1e-6)
        assert set(metrics) == set(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:this function runs without a look")  # weights for fixed rows
@pytest.mark.parametrize(
    ("num_towers", "options"),
    [
        (2, {"shard_params": True}),
        (2, {"shard_update": True}),
        (4, {"towers": 4, "stages": 2}),
    ],
    ids=["shard_params", "shard_update", "stages"],
)
def test_weights_that_are_drawn_by_towers_of_a_model_in_parts(num_towers, options):
    # The lies: weights of one tower, of rows that only fill up, or drawn with another key than the
    # totals; the weights of one ratio in the place of another's.
    each = -(-12 // num_towers)
    draw = lambda key: 1 + jax.random.uniform(key, (each,))
    key = jax.random.key(3)
    params = {"in": np.eye(64, dtype=np.float32), "out": -np.ones(64, np.float32)}

    def loss(params, batch, drawn):
        wrong = (jnp.tanh(batch["x"].reshape(-1, 12) @ params["in"][:12]) @ params["out"] - 1) ** 2
        weight = batch["scale"] * batch["mask"].sum(1) * drawn
        return mt.ratio(wrong * weight, weight) - 0.5 * mt.ratio(wrong, drawn) + 0.1

    @jax.jit
    def plain(params, batch, number):
        keys = [tower_key(jax.random.fold_in(key, number), tower) for tower in range(num_towers)]
        drawn = jnp.concatenate([draw(one) for one in keys])[: len(batch["x"])]
        total, gradients = jax.value_and_grad(loss)(params, batch, drawn)
        return total, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    step = mt.train_step(
        lambda params, batch, *, rng: loss(params, batch, draw(rng)), optax.sgd(0.1), devices=2,
        global_batch=12, **options,
    )  # fmt: skip
    state, expected = step.init(params, rng=key), params
    for number, batch in enumerate(BATCHES[:2]):
        batch = {**batch, "scale": np.float32(3)}
        total, expected = plain(expected, batch, number)
        state, metrics = step(state, batch)
        np.testing.assert_allclose(metrics["loss"], total, rtol=1e-5)
        for name, leaf in expected.items():
            np.testing.assert_allclose(state.params[name], leaf, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("sharded", "towers", "most"), [(False, 3, 2), (True, 4, 3)])
def test_the_same_bits_on_any_number_of_devices(sharded, towers, most):
    found = []
    for devices in (1, most):
        step = mt.train_step(
            losses, optax.sgd(0.1), devices=devices, towers=towers, global_batch=12,
            shard_update=sharded, diagnostics=True, clip_norm=0.5,
        )  # fmt: skip
        state = step.init(PARAMS)
        seen = []
        for batch in BATCHES:
            state, metrics = step(state, batch)
            seen.append(jax.tree.map(np.asarray, metrics))
        found.append(mt.fingerprint((state, seen)))
    assert len(set(found)) == 1


@pytest.mark.slow
def test_nothing_compiles_for_a_ragged_batch():
    traces = []

    def counted(w, batch):
        traces.append(1)
        return losses(w, batch)

    for options in WAYS.values():
        step = mt.train_step(counted, optax.sgd(0.1), global_batch=12, **options)
        state, _ = step(step.init(PARAMS), BATCHES[0])
        before = len(traces)
        for batch in BATCHES:
            state, _ = step(state, batch)
        assert len(traces) == before


@pytest.mark.slow
def test_the_losses_of_towers():
    step = mt.train_step(_masked, optax.sgd(0.1), devices=1, towers=4, diagnostics=True)
    _, metrics = step(step.init(PARAMS), BATCHES[0])
    wrong = (BATCHES[0]["x"] @ PARAMS - 1) ** 2 * BATCHES[0]["mask"]
    own = wrong.reshape(4, -1).sum(1) / np.maximum(BATCHES[0]["mask"].reshape(4, -1).sum(1), 1)
    np.testing.assert_allclose(metrics["tower_losses"], own, rtol=1e-5)


@fast_and_same_bits
def test_a_summed_loss(options):
    def summed(w, batch):
        losses = ((batch["x"] @ w - 1) ** 2).sum(1)
        return losses, {"mean": losses}

    step = mt.train_step(
        summed, optax.sgd(0.001), global_batch=12, reduction="sum", diagnostics=True, **options
    )
    state, w = step.init(PARAMS), PARAMS.astype(float)
    for batch in BATCHES:
        x = batch["x"].astype(float)
        state, metrics = step(state, batch)
        wrong = x @ w - 1
        np.testing.assert_allclose(metrics["loss"], (wrong**2).sum(), rtol=1e-5)
        np.testing.assert_allclose(metrics["mean"], (wrong**2).sum(1).mean(), rtol=1e-5)
        w = w - 0.001 * (2 * wrong[..., None] * x).sum((0, 1))
        np.testing.assert_allclose(state.params, w, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@fast_and_same_bits
def test_a_scalar_that_is_a_sum(options):
    fun = lambda w, batch: ((batch["x"] @ w - 1) ** 2).sum()
    how = {"reduction": "sum", "diagnostics": True}
    step = mt.train_step(fun, optax.sgd(0.001), **how, **options)
    state, metrics = step(step.init(PARAMS), BATCHES[0])
    x = BATCHES[0]["x"].astype(float)
    wrong = x @ PARAMS - 1
    gradient = 2 * (wrong[..., None] * x).sum((0, 1))
    np.testing.assert_allclose(metrics["loss"], (wrong**2).sum(), rtol=1e-5)
    np.testing.assert_allclose(state.params, PARAMS - 0.001 * gradient, rtol=1e-5, atol=1e-6)
    # The lie: the sum over a tower's rows under the name of their mean.
    own = (wrong**2).sum(1).reshape(len(metrics["tower_losses"]), -1).mean(1)
    np.testing.assert_allclose(metrics["tower_losses"], own, rtol=1e-5)


def test_metrics_that_are_sums_need_full_towers():
    real = lambda batch: mt.ratio(batch["mask"].sum(), len(batch["mask"]))
    fun = lambda w, batch: (_masked(w, batch), {"m": real(batch)})
    step = mt.train_step(fun, optax.sgd(0.1), devices=1, towers=4)
    state, metrics = step(step.init(PARAMS), BATCHES[0])
    assert metrics["m"] == BATCHES[0]["mask"].sum() / len(BATCHES[0]["mask"])
    with pytest.raises(mt.OutputError, match="7 rows and a ratio of sums"):
        step(state, BATCHES[1])


def test_what_is_no_reduction_is_refused():
    with pytest.raises(mt.ArgumentError, match="reduction='median'"):
        mt.train_step(losses, optax.sgd(0.1), reduction="median")


# ---------------------------------------------------------------- evaluation


@pytest.mark.parametrize(
    ("where", "global_batch"),
    [
        ({"devices": 2}, 1),
        pytest.param({"devices": 2}, 31, marks=pytest.mark.slow),
        ({"devices": 1, "towers": 4}, 5),
    ],
    ids=str,
)
def test_an_evaluation_counts_every_token_once(where, global_batch):
    data = batch_of(31, 5)

    def metrics(w, batch):
        wrong = (batch["x"] @ w - 1) ** 2
        mask = batch["mask"]
        return {
            "loss": mt.ratio(wrong * mask, mask),
            "right": 1 - mt.ratio((wrong > 1) & mask, mask) / 2,
            "row": wrong[:, 0],
        }

    found = mt.evaluate(metrics, PARAMS, data, global_batch=global_batch, **where)
    wrong, mask = (data["x"] @ PARAMS - 1) ** 2, data["mask"]
    expected = {
        "loss": (wrong * mask).sum() / mask.sum(),
        "right": 1 - ((wrong > 1) & mask).sum() / mask.sum() / 2,
        "row": wrong[:, 0].mean(),
    }
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name


def test_an_evaluation_of_sums():
    data = np.arange(10, dtype=np.float32)
    score = lambda w, x: {"x": x}
    assert mt.evaluate(score, 0.0, data, global_batch=4, reduction="sum") == {"x": 45.0}
    with pytest.raises(mt.ArgumentError, match="reduction='max'"):
        mt.evaluate(score, 0.0, data, global_batch=4, reduction="max")


def test_an_evaluation_refuses_sums_of_a_batch():
    score = lambda w, x: {"x": mt.ratio(x.sum(), 1.0)}
    with pytest.raises(mt.OutputError, match="one entry for every row"):
        mt.evaluate(score, 0.0, np.ones(10, np.float32), global_batch=4)


def test_a_trainer_evaluates_ratios():
    trainer = mt.Trainer(_masked, optax.sgd(0.1), devices=1, towers=4, global_batch=12)
    state = trainer.step.init(PARAMS)
    score = lambda w, batch: {"loss": _masked(w, batch)}
    found = trainer.evaluate(score, state, BATCHES[1], global_batch=12)
    assert found["loss"] == pytest.approx(float(_masked(PARAMS, BATCHES[1])), rel=1e-5)


@pytest.mark.slow
def test_a_loss_that_is_a_ratio_for_some_shapes_alone():
    """Lie: what was found for the first shapes holds for others."""
    loss = lambda w, x: mt.ratio(w * x, 2 * jnp.ones_like(x)) if x.ndim == 2 else w * x
    x = np.arange(8, dtype=np.float32)
    step = mt.train_step(loss, optax.sgd(0.0), devices=1, towers=2)
    state = step.init(np.float32(3))
    for one, factor in [(x, 1.0), (x[:, None], 0.5), (x, 1.0)]:
        state, metrics = step(state, one)
        np.testing.assert_allclose(metrics["loss"], 3 * factor * x.mean())
