"""Training loops as people write them: jax.value_and_grad replaced, and nothing else.

Each loop is one function of `value_and_grad`; the reference is that loop with JAX's own.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from trees import assert_close

rng = np.random.default_rng(0)
X = rng.normal(size=(4, 8, 5)).astype(np.float32)  # four batches of 8 rows
Y = np.sin(X.sum(-1))


def params_of(seed=1):
    rng = np.random.default_rng(seed)
    dense = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return {"w": dense(5, 4), "b": np.zeros(4, np.float32), "v": dense(4)}


def predict(params, x):
    return jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]


def loss_fn(params, x, y):
    return ((predict(params, x) - y) ** 2).mean()


def optimizer_loop(optimizer, value_and_grad, loss_fn=loss_fn, *, jit=True):
    """A jitted train step with optax: the loop of most scripts."""

    def train_step(params, opt_state, x, y):
        loss, grads = value_and_grad(loss_fn)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    train_step = jax.jit(train_step) if jit else train_step
    params = params_of()
    opt_state = optimizer.init(params)
    for x, y in zip(X, Y, strict=True):
        params, opt_state, loss = train_step(params, opt_state, x, y)
    return params, opt_state, loss


def scan_loop(value_and_grad):
    """All steps in one `jax.lax.scan`."""

    @jax.jit
    def train(params, xs, ys):
        def step(params, batch):
            loss, grads = value_and_grad(loss_fn)(params, *batch)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

        return jax.lax.scan(step, params, (xs, ys))

    return train(params_of(), X, Y)


def gan_loop(value_and_grad, *, jit=True):
    """Two losses, two optimizers; each loss sees the other network as it is."""
    optimizers = optax.sgd(0.05), optax.sgd(0.1)

    def score(discriminator, x):
        return jax.nn.softplus(-predict(discriminator, x))

    def generate(generator, z):
        return jnp.tanh(z @ generator["w"] + generator["b"]) @ generator["w"].T

    def generator_loss(generator, discriminator, z):
        return score(discriminator, generate(generator, z)).mean()

    def discriminator_loss(discriminator, generator, z, x):
        fake = score(discriminator, generate(generator, z))
        return (score(discriminator, x) - fake).mean()

    def train_step(networks, states, z, x):
        g, d = networks
        whole = {"in_axes": (None, None, 0, 0)} if value_and_grad is not jax.value_and_grad else {}
        _, d_grads = value_and_grad(discriminator_loss, **whole)(d, g, z, x)
        updates, d_state = optimizers[1].update(d_grads, states[1])
        d = optax.apply_updates(d, updates)
        whole = {"in_axes": (None, None, 0)} if whole else {}
        _, g_grads = value_and_grad(generator_loss, **whole)(g, d, z)
        updates, g_state = optimizers[0].update(g_grads, states[0])
        return (optax.apply_updates(g, updates), d), (g_state, d_state)

    train_step = jax.jit(train_step) if jit else train_step
    networks = params_of(1), params_of(2)
    states = tuple(o.init(n) for o, n in zip(optimizers, networks, strict=True))
    for x in X:
        networks, states = train_step(networks, states, x[::-1], x)
    return networks


def checkpointed(params, x, y):
    """Activations are computed again on the way back."""
    return ((jax.checkpoint(predict)(params, x) - y) ** 2).mean()


def in_bfloat16(params, x, y):
    """Weights in float32, the work in bfloat16."""
    small = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    return ((predict(small, x.astype(jnp.bfloat16)).astype(jnp.float32) - y) ** 2).mean()


def everything(steps):
    """Clipping, a mask, hyperparameters that can be changed, gradient accumulation."""
    no_decay = lambda params: {name: name != "b" for name in params}
    chain = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.inject_hyperparams(optax.adamw, static_args="mask")(
            learning_rate=optax.linear_schedule(0.1, 0.01, 4), weight_decay=0.1, mask=no_decay
        ),
    )
    return optax.MultiSteps(chain, steps).gradient_transformation()


LOOPS = {
    "a jitted step": functools.partial(optimizer_loop, optax.sgd(0.1, momentum=0.9)),
    "a step without jit": functools.partial(optimizer_loop, optax.sgd(0.1), jit=False),
    "lax.scan over steps": scan_loop,
    "gradient accumulation of a chain": functools.partial(optimizer_loop, everything(2)),
    "a GAN": gan_loop,
    "jax.checkpoint": functools.partial(optimizer_loop, optax.sgd(0.1), loss_fn=checkpointed),
    "bfloat16": functools.partial(optimizer_loop, optax.sgd(0.1), loss_fn=in_bfloat16),
}


# Their likes are tried every day: chains in steps/, 16 bits in steps/test_compute_dtype.py,
# jax.checkpoint in test_all_rows.py.
DEAR = (
    "a GAN",
    "jax.checkpoint",
    "gradient accumulation of a chain",
    "a step without jit",
    "bfloat16",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in DEAR else []) for name in LOOPS],
)
def test_law_l2_two_lines(name):
    """Lie: a loop that runs, and does something else than on one device."""
    found = LOOPS[name](functools.partial(mt.value_and_grad, devices=2))
    # bfloat16 keeps 8 bits; sums over other rows are rounded elsewhere.
    rtol, atol = (2e-2, 2e-2) if name == "bfloat16" else (2e-5, 2e-6)
    assert_close(found, LOOPS[name](jax.value_and_grad), rtol, atol)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a GAN", "jax.checkpoint", "bfloat16"])
def test_law_l3_same_bits_without_jit(name):
    loop = functools.partial(LOOPS[name], jit=False)
    one, two = (
        loop(functools.partial(mt.value_and_grad, devices=devices, towers=2)) for devices in (1, 2)
    )
    assert mt.fingerprint(one) == mt.fingerprint(two)


@pytest.mark.parametrize("towers", [None, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "around",
    [
        lambda f: jax.jit(f)(),
        lambda f: jax.lax.cond(True, f, f),
        lambda f: jax.tree.map(lambda x: x[0], jax.lax.scan(lambda c, _: (c, f()), 0, length=1)[1]),
    ],
    ids=["jit", "cond", "scan"],
)
def test_a_loop_may_close_over_its_parameters_and_its_batch(around, towers):
    """Lie: where none of the arrays is traced, nothing is."""
    params = params_of()
    gradients = mt.value_and_grad(loss_fn, devices=2, towers=towers)
    infer = mt.make_parallel(predict, in_axes=(None, 0), devices=2, towers=towers)
    found = around(lambda: (gradients(params, X[0], Y[0]), infer(params, X[0])))
    assert_close(found, on_one_device(), 2e-5, 2e-6)


@functools.cache
def on_one_device():
    """What a loop that closes over its parameters finds without this library."""
    of = lambda params, x, y: (jax.value_and_grad(loss_fn)(params, x, y), predict(params, x))
    return jax.jit(of)(params_of(), X[0], Y[0])


@pytest.mark.slow
def test_law_l3_same_bits_of_accumulation_and_hyperparameters():
    """The whole step; and its hyperparameters can be read."""
    losses = lambda params, batch: (predict(params, batch[0]) - batch[1]) ** 2
    prints = []
    for devices in (1, 2):
        step = mt.train_step(losses, everything(2), devices=devices, towers=2)
        state = step.init(params_of())
        for batch in zip(X, Y, strict=True):
            state, _ = step(state, batch)
        prints.append(mt.fingerprint(state))
    assert prints[0] == prints[1]
    rate = state.opt_state.inner_opt_state[1].hyperparams["learning_rate"]
    np.testing.assert_allclose(rate, 0.1 - 0.09 / 4, rtol=1e-6)  # the second of two updates
    expected, *_ = optimizer_loop(everything(2), jax.value_and_grad)
    assert_close(state.params, expected, 2e-5, 2e-6)
