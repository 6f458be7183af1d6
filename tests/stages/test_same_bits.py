"""A model cut over devices: the same bits on any layout, the same training as without stages."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt

# A tower is partly full, and copies of rows count in the state: on every layout the same ones.
pytestmark = pytest.mark.filterwarnings("ignore:the batch has 7 rows")

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(3, 12, 4)).astype(np.float32)
WEIGHTS = [RNG.normal(size=(4, 4)).astype(np.float32) / 2 for _ in range(4)]


def losses(params, batch, *, rng, model_state):
    """Tied first and last weights, dropout, model state, a residual that skips stages."""
    h = start = batch @ params["in"]
    for number, w in enumerate(params["blocks"]):
        kept = jax.random.bernoulli(jax.random.fold_in(rng, number), 0.9, h.shape)
        h = mt.cut(h + jnp.tanh(h * kept @ w))
    out = (h + start) @ params["in"].T
    loss = ((out - batch) ** 2).sum(-1)
    return loss, {"out": out.mean(1)}, 0.9 * model_state + 0.1 * h.mean()


PARAMS = {"blocks": WEIGHTS[1:], "in": WEIGHTS[0], "unused": np.ones(3, np.float32)}
OPTIONS = {"ema_decay": 0.9, "clip_norm": 0.5, "global_batch": 12}


def make(devices=1, towers=4, stages=3, loss=losses, optimizer=None, **options):
    given = {**OPTIONS, **options}
    optimizer = optimizer or optax.adamw(optax.linear_schedule(0.05, 0.02, 3))
    return mt.train_step(loss, optimizer, devices=devices, towers=towers, stages=stages, **given)


def first(step, params=PARAMS):
    return step.init(params, rng=jax.random.key(0), model_state=jnp.float32(0))


def train(step, batches=(ROWS[0], ROWS[1][:7], ROWS[2])):
    state = first(step)
    for batch in batches:
        state, metrics = step(state, batch)
    return state, metrics


def bits(step):
    state, metrics = train(step)
    return mt.fingerprint((state, metrics))


def close(a, b):
    flat, _ = jax.tree_util.tree_flatten_with_path(a)
    for (path, x), y in zip(flat, jax.tree.leaves(b), strict=True):
        name = jax.tree_util.keystr(path)
        assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        if x.dtype == np.float32:
            np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-6, err_msg=name)


@pytest.fixture(scope="module")
def one_device():
    return train(make(1))


# Every day: a resume on another layout, in steps/test_stages.py, and functions/test_in_stages.py.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (2, {}),
        (4, {"layout": (2, 2), "interleave": True}),
        (6, {"layout": (2, 3)}),
        (3, {"layout": (3, 1)}),
    ],
)
def test_law_l3_the_same_bits_on_any_layout(one_device, devices, options):
    # The lie: gradients added in the order in which devices finish.
    assert bits(make(devices, **options)) == mt.fingerprint(one_device)


@pytest.mark.slow
def test_law_l3_without_recomputation(one_device):
    # The lies: residuals of another tower; a step that ignores remat=False.
    step = make(2, remat=False)
    found = train(step)
    (runner,) = step._makers.newest.runners.values()
    assert [bool(kept) for kept in runner._pipeline.programs.residuals] == [True, True, False]
    assert mt.fingerprint(found) == bits(make(1, remat=False))
    close(found, one_device)


@pytest.mark.slow
def test_it_is_the_training_without_stages(one_device):
    # The lies: a tied weight counted twice in the norm, a tower that is left out.
    step = make(1, stages=None)
    close(train(step), one_device)


STAGES, TOWERS, DEVICES = (1, 2, 3, 4, 6), (1, 4, 8), (1, 2, 3, 4, 8)


def covering():
    """Triples in which every two values of different kinds meet."""
    pairs = {
        (a, x, b, y)
        for (a, xs), (b, ys) in itertools.combinations(enumerate((STAGES, TOWERS, DEVICES)), 2)
        for x, y in itertools.product(xs, ys)
    }
    met = lambda one: {p for p in pairs if one[p[0]] == p[1] and one[p[2]] == p[3]}
    while pairs:
        best = max(itertools.product(STAGES, TOWERS, DEVICES), key=lambda one: len(met(one)))
        pairs -= met(best)
        yield best


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:stages=")
def test_law_l3_every_pair_of_stages_towers_and_devices():
    # The lie: only those counts work that divide each other.
    def blocks(params, batch):
        for w in params:
            batch = batch + jnp.tanh(batch @ w)
        return (batch**2).sum(1)

    weights = [WEIGHTS[n % 4] for n in range(6)]
    expected = {}

    def train_on(stages, towers, devices):
        step = mt.train_step(
            blocks, optax.adam(0.05), devices=devices, towers=towers, stages=stages
        )
        return step(step.init(weights), ROWS[0])

    for stages, towers, devices in covering():
        if (stages, towers) not in expected:
            expected[stages, towers] = mt.fingerprint(train_on(stages, towers, 1))
        found = mt.fingerprint(train_on(stages, towers, devices))
        assert found == expected[stages, towers], (stages, towers, devices)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:stages=")
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_law_l3_a_covering_of_stages_towers_and_devices(stages):
    def blocks(params, batch):
        for w in params:
            batch = batch + jnp.tanh(batch @ w)
        return (batch**2).sum(1)

    # One more device is one more compilation: eight only where they hold two replicas.
    most = 8 if stages == 4 else 4
    optimizers = [optax.sgd(0.1, 0.9), optax.lamb(0.05)]
    # Of seven towers six have rows: more than are added up in the same order one after another.
    for towers, optimizer in zip((1, 7), optimizers[:: 1 if stages == 2 else -1], strict=True):
        found = set[str]()
        for devices, interleave in ((1, False), (2, True), (3, False), (most, True)):
            step = mt.train_step(
                blocks, optimizer, devices=devices, towers=towers, stages=stages,
                interleave=interleave,
            )  # fmt: skip
            state = step.init(WEIGHTS)
            for batch in ROWS:
                state, metrics = step(state, batch)
            found.add(mt.fingerprint((state, metrics)))
        assert len(found) == 1, (stages, towers)
