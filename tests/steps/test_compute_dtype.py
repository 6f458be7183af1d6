"""compute_dtype: narrow inside of the loss, and nowhere else."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt

SGD = optax.sgd(0.1, momentum=0.9)
DRAW = np.random.default_rng(0)
PARAMS = {
    "in": DRAW.normal(size=(4, 6)).astype(np.float32),
    "out": DRAW.normal(size=6).astype(np.float32),
    "bits": np.ones(6, jnp.bfloat16),
}
BATCHES = [
    {
        "x": DRAW.normal(size=(8, 4)).astype(np.float32),
        "y": DRAW.normal(size=8).astype(np.float32),
        "at": np.arange(8, dtype=np.int32),
    }
    for _ in range(2)
]
WAYS = [
    {"devices": 2},
    pytest.param({"devices": 1, "towers": 4}, marks=pytest.mark.slow),
    pytest.param({"devices": 2, "towers": 4, "shard_update": True}, marks=pytest.mark.slow),
    pytest.param({"devices": 2, "towers": 4, "stages": 2}, marks=pytest.mark.slow),
]


def losses(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["in"])
    found = mt.cut(hidden) @ (params["out"] * params["bits"])
    return (found - batch["y"]) ** 2 + 0 * batch["at"]


def cast_by_hand(params, batch):
    narrow = {name: jnp.asarray(leaf, jnp.bfloat16) for name, leaf in params.items()}
    return losses(narrow, {**batch, "x": batch["x"].astype(jnp.bfloat16)})


def train(loss, batches=BATCHES, **options):
    step = mt.train_step(loss, SGD, ema_decay=0.5, clip_norm=0.5, **options)
    state, history = step.init(PARAMS), []
    for batch in batches:
        state, metrics = step(state, batch)
        history.append(metrics)
    return state, history


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_it_is_the_cast_written_by_hand(way):
    # The lies: an optimizer state, a gradient or an average in 16 bits; a cast that is not made.
    found = train(losses, compute_dtype=jnp.bfloat16, **way)
    assert mt.fingerprint(found) == mt.fingerprint(train(cast_by_hand, **way))
    state, (metrics, _) = found
    x, y = BATCHES[0]["x"], BATCHES[0]["y"]
    wide = ((np.tanh(x @ PARAMS["in"]) @ PARAMS["out"] - y) ** 2).mean()
    assert 1e-4 < abs(float(metrics["loss"]) / wide - 1) < 0.03  # the cast is seen
    for tree in (state.params, state.opt_state[0].trace, state.ema_params):
        assert tree["in"].dtype == tree["out"].dtype == jnp.float32
    assert state.params["bits"].dtype == jnp.bfloat16
    assert metrics["loss"].dtype == jnp.float32


def test_what_the_loss_is_given():
    seen = {}

    def loss(params, batch):
        seen.update({name: leaf.dtype for name, leaf in {**params, **batch}.items()})
        return losses(params, batch)

    step = mt.train_step(loss, optax.sgd(0.1), compute_dtype="bfloat16", devices=1)
    step(step.init(PARAMS), BATCHES[0])
    narrow = {name for name, dtype in seen.items() if dtype == jnp.bfloat16}
    assert narrow == {"in", "out", "bits", "x"}
    assert (seen["y"], seen["at"]) == (jnp.float32, jnp.int32)


def test_model_state_keeps_its_dtype():
    def loss(w, x, *, model_state):
        return (x @ w) ** 2, {}, {"mean": x.mean(0)}

    step = mt.train_step(loss, optax.sgd(0.1), compute_dtype=jnp.bfloat16, towers=2, devices=1)
    state = step.init(PARAMS["in"][:, 0], model_state={"mean": np.zeros(4, np.float32)})
    state, _ = step(state, BATCHES[0]["x"])
    assert state.model_state["mean"].dtype == jnp.float32
    np.testing.assert_allclose(state.model_state["mean"], BATCHES[0]["x"].mean(0), atol=0.02)


def test_one_number_a_row_is_not_rounded_in_a_column_either():
    """Lie: targets of shape (rows, 1) lose bits, and those of shape (rows,) do not."""

    def loss(w, batch):
        return ((w * batch["x"]).sum(1) - batch["y"][:, 0]) ** 2 + 0 * batch["z"][:, 0]

    step = mt.train_step(loss, optax.sgd(0.1), compute_dtype="bfloat16", devices=1)
    rows = {"x": np.zeros((2, 3)), "y": np.full((2, 1), 1001.0), "z": np.ones((2, 2))}
    _, metrics = step(step.init(jnp.ones(3)), jax.tree.map(np.float32, rows))
    assert float(metrics["loss"]) == 1001**2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*with statistics of their own tower.s rows")
def test_an_nnx_module_computes_in_bfloat16():
    nnx = pytest.importorskip("flax.nnx")
    seen = []

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(4, dtype=jnp.bfloat16, rngs=rngs)  # it has float32 statistics
            self.out = nnx.Linear(4, 1, kernel_init=nnx.initializers.ones, rngs=rngs)

        def __call__(self, x):
            found = self.out(self.norm(x))
            seen.append(found.dtype)
            return found

    loss = lambda model, batch: (model(batch["x"])[:, 0] - batch["y"]) ** 2
    step = mt.train_step(loss, optax.sgd(0.1), compute_dtype=jnp.bfloat16, towers=2, devices=1)
    state, _ = step(step.init(Net(nnx.Rngs(0))), BATCHES[0])
    assert set(seen) == {jnp.dtype(jnp.bfloat16)}
    model = step.model(state)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("dtype", [jnp.int32, "half a float", 16])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(mt.ArgumentError, match=r"jnp\.bfloat16"):
        mt.train_step(losses, optax.sgd(0.1), compute_dtype=dtype)


@pytest.mark.slow
def test_a_resume_keeps_it(tmp_path):
    def fit(steps, **options):
        trainer = mt.Trainer(
            losses, optax.sgd(0.1), run_dir=tmp_path, towers=2, devices=1, **options
        )
        return trainer.fit(
            PARAMS, lambda first: itertools.repeat(BATCHES[0]), steps=steps, resume=True
        )

    fit(1, compute_dtype=jnp.bfloat16)
    with pytest.raises(mt.RunError, match="another compute_dtype: the run there has 'bfloat16'"):
        fit(2)
    assert fit(2, compute_dtype=jnp.bfloat16).step == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"compute_dtype": jnp.bfloat16, "clip_norm": 1.0},
        {"compute_dtype": jnp.float16, "towers": 2},
        *(
            {"towers": 2, **options}
            for options in (
                {"shard_update": True, "clip_norm": 1.0},
                {"stages": 2, "clip_norm": 1.0},
                {"sync_every": 1},
            )
        ),
    ],
    ids=["bfloat16", "float16", "shard_update", "stages", "sync_every"],
)
def test_dtypes_of_ours_fit_a_program_that_promotes_none(options):
    """Lie: a program that casts every number of its own, and fails for one that it never sees."""

    def loss(params, batch):
        hidden = mt.cut(
            jnp.tanh(batch["x"].astype(jnp.bfloat16) @ params["in"].astype(jnp.bfloat16))
        )
        found = (hidden @ params["bits"].astype(jnp.bfloat16)) ** 2
        return mt.ratio(found, batch["y"] > 0)

    params = {"in": PARAMS["in"], "bits": PARAMS["bits"]}
    step = mt.train_step(loss, SGD, devices=2, **options)
    with jax.numpy_dtype_promotion("strict"):
        _, metrics = step(step.init(params), BATCHES[0])
    np.testing.assert_allclose(metrics["loss"], jax.jit(loss)(params, BATCHES[0]), rtol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("towers", [None, 2])
def test_32_bits_fit_a_program_of_64_that_promotes_none(towers):
    """Lie: counts of rows have 64 bits, and `jax_numpy_dtype_promotion="strict"` fails on them."""

    def losses(w, x):
        return (w - x) ** 2, {"mean": x.mean()}

    rows = np.arange(4, dtype=np.float32)
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
        options = {"towers": towers, "devices": 2, "diagnostics": True}
        step = mt.train_step(losses, optax.sgd(0.1), **options)
        _, metrics = step(step.init(jnp.float32(1)), rows)
    assert (float(metrics["loss"]), float(metrics["mean"])) == (1.5, 1.5)
    assert [float(loss) for loss in metrics["tower_losses"]] == [0.5, 2.5]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager", "jit", "stages"])
def test_numbers_of_towers_fit_a_program_of_64_bits_that_promotes_none(how):
    """Lie: a tower's number has 64 bits where a device runs several, and 32 everywhere else."""

    def losses(w, x):
        return ((mt.cut(w - x)[:, None] * mt.all_rows(x)) ** 2).sum(axis=1)

    rows = np.arange(12, dtype=np.float32)
    want = (((1 - rows)[:, None] * rows) ** 2).sum(axis=1).mean()
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
        if how == "stages":
            step = mt.train_step(losses, SGD, devices=2, towers=3, stages=2)
            loss = step(step.init(jnp.float32(1)), rows)[1]["loss"]
        else:
            find = mt.value_and_grad(losses, devices=2, towers=3)
            loss, _ = (jax.jit(find) if how == "jit" else find)(jnp.float32(1), rows)
    np.testing.assert_allclose(loss, want, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"ema_decay": lambda count: jnp.float32(0.9)},
        {"towers": 2, "updates": "asynchronous", "stale_scale": lambda stale: 1 / (1 + stale)},
        {"towers": 2, "updates": "asynchronous", "momentum_correction": True},
    ],
    ids=["ema_decay", "stale_scale", "momentum_correction"],
)
def test_rules_of_an_update_fit_parameters_of_64_bits_that_promote_none(options):
    """Lie: what a rule returns has 32 bits, whatever the parameters have."""
    momentum = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9)
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
        step = mt.train_step(lambda w, x: (w - x) ** 2, momentum, devices=2, **options)
        state, _ = step(step.init(jnp.float64(1)), np.arange(4.0))
    assert state.params.dtype == np.float64


@pytest.mark.slow
@pytest.mark.parametrize("towers", [None, 2])
def test_a_ratio_of_64_bits_fits_a_program_that_promotes_none(towers):
    """Lie: it starts from a zero of 32 bits."""

    def loss(w, x):
        return mt.ratio((w - x) ** 2, x)

    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
        found, _ = mt.value_and_grad(loss, towers=towers, devices=2)(jnp.float64(1), np.arange(4.0))
    assert (found.dtype, float(found)) == (np.float64, 1.0)
