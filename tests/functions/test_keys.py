"""PRNG keys: tower 0 draws what JAX draws, every other tower something else, keys come back.

The lies: a loss with dropout that one device computes otherwise than JAX, keys that user code
makes too, a key that is taken for two rows.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import looking
import multitower as mt
from tower_keys import tower_key

both_kinds = pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
slowly = functools.partial(pytest.param, marks=pytest.mark.slow)
same_bits_every_day = pytest.mark.parametrize(
    "towers", [slowly(None), 4], ids=["fast", "same bits"]
)
# Every kind of key in every way, and not every number of rows with all of them; every day one of
# them: a key that is closed over has each kind and each way.
every_pair = pytest.mark.parametrize(
    ("make_key", "towers", "num_rows"),
    [
        pytest.param(jax.random.key, None, 6, id="fast"),
        pytest.param(jax.random.PRNGKey, None, 2, id="fast, legacy", marks=pytest.mark.slow),
        pytest.param(jax.random.key, 4, 2, id="same bits", marks=pytest.mark.slow),
        pytest.param(jax.random.PRNGKey, 4, 7, id="same bits, legacy", marks=pytest.mark.slow),
    ],
)
X = np.ones((8, 3), np.float32)


def noise(key, x):
    return jax.random.uniform(key, x.shape)


@functools.partial(jax.jit, static_argnums=(1, 2))
def drawn_by(key, num_towers, num_rows):
    """What all towers draw for their rows, by hand and in one program."""
    rows = np.ones((num_rows, 3), np.float32)
    return jnp.concatenate([noise(tower_key(key, tower), rows) for tower in range(num_towers)])


def data_of(key):
    return np.asarray(jax.random.key_data(key))


@pytest.mark.parametrize(
    ("make_key", "towers"),
    [slowly(jax.random.key, None), (jax.random.PRNGKey, 1)],
    ids=["fast", "bits"],
)
def test_on_one_device_it_is_jax(make_key, towers):
    key = make_key(3)
    options = {"devices": 1, "towers": towers}
    found = mt.make_parallel(noise, **options)(key, X)
    expected = drawn_by(key, 1, 8)
    np.testing.assert_array_equal(found, expected)

    def loss(w, key, x):
        drawn = noise(key, x)
        return (w * x + drawn).sum(1), drawn

    (value, drawn), gradient = mt.value_and_grad(loss, has_aux=True, **options)(2.0, key, X)
    np.testing.assert_array_equal(drawn, expected)
    mean = (2 * X + np.asarray(expected)).sum(1).mean()
    np.testing.assert_allclose((value, gradient), (mean, 3), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "towers"),
    [
        (1, 1),  # one device: what plain JAX draws
        slowly(1, None),
        (4, None),
        slowly(2, 4),
    ],
)
def test_a_training_step_draws_what_jax_draws_with_the_keys_of_towers(devices, towers):
    """Lie: draws that differ from tower to tower, of keys that nobody could work out."""
    places = np.arange(8, dtype=np.float32)  # which tower has which key shows

    def loss(w, batch, *, rng):
        drawn = noise(rng, batch["x"])
        return (w * batch["x"]).sum(1), {"drawn": drawn.sum(1) * batch["place"]}

    step = mt.train_step(loss, optax.sgd(0.1), devices=devices, towers=towers)
    state = step.init(np.float32(1), rng=jax.random.key(7))
    num_towers = towers or devices
    for number in range(2):
        state, metrics = step(state, {"x": X, "place": places})
        key = jax.random.fold_in(jax.random.key(7), number)
        drawn = np.asarray(drawn_by(key, num_towers, 8 // num_towers))
        expected = (drawn.sum(1) * places).mean()
        np.testing.assert_allclose(metrics["drawn"], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("make_key", "towers"),
    [slowly(jax.random.PRNGKey, None), (jax.random.key, 4)],
    ids=["fast", "bits"],
)
def test_the_keys_of_towers(make_key, towers):
    key = make_key(3)
    found = mt.make_parallel(noise, devices=2 if towers else 4, towers=towers)(key, X)
    np.testing.assert_array_equal(found, drawn_by(key, 4, 2))
    others, own = jax.jit(other_keys)(key)
    others, own = ({one.tobytes() for one in np.asarray(keys)} for keys in (others, own))
    assert len(others) == 7
    assert len(own) >= 15
    assert not others & own


def other_keys(key):
    """The keys of towers 1 to 7; and keys that user code makes, of layers, steps, and of Flax."""
    numbers = np.uint32([*range(8), *(2**32 - n for n in range(1, 8))])  # Flax folds in from 0 on
    folded = jax.vmap(lambda n: jax.random.fold_in(key, n))(numbers)
    own = jnp.concatenate(
        [jax.random.key_data(keys) for keys in (folded, jax.random.split(key, 8))]
    )
    others = [jax.random.key_data(tower_key(key, tower)) for tower in range(1, 8)]
    return jnp.stack(others), own


def drawing(w, state, x):
    """The idiom of a loop: split the key, use one half, hand the other on."""
    key, own = jax.random.split(state["key"])
    drawn = noise(own, x)
    return (w * x + drawn).sum(1), {"key": key, "count": state["count"] + 1}


@pytest.mark.slow
@every_pair
def test_a_key_in_a_state_comes_back_as_on_one_device(make_key, towers, num_rows):
    state = mine = {"key": make_key(0), "count": np.int32(0)}
    run = mt.value_and_grad(
        drawing,
        has_aux=True,
        in_axes=(None, None, 0),
        devices=2,
        towers=towers,
    )
    by_hand = jax.jit(drawing)
    for _ in range(3):
        (_, state), _ = run(1.0, state, X[:num_rows])
        _, mine = by_hand(1.0, mine, X[:num_rows])
    np.testing.assert_array_equal(data_of(state["key"]), data_of(mine["key"]))
    assert int(state["count"]) == 3


@every_pair
def test_a_key_that_is_an_argument_comes_back(make_key, towers, num_rows):
    def loss(w, key, x):
        key, own = jax.random.split(key)
        drawn = noise(own, x)
        return (w * x + drawn).sum(1), (key, drawn[:, 0])

    key = make_key(0)
    run = mt.value_and_grad(loss, has_aux=True, devices=2, towers=towers)
    (_, (new, drawn)), _ = run(1.0, key, X[:num_rows])
    np.testing.assert_array_equal(data_of(new), data_of(jax.random.split(key)[0]))
    assert len(set(np.asarray(drawn).tolist())) == num_rows  # every tower draws its own


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_key", "towers"), [(jax.random.PRNGKey, None), (jax.random.key, 4)], ids=["fast", "bits"]
)
def test_a_key_that_is_closed_over_comes_back(make_key, towers):
    key = make_key(0)

    def loss(w, x):
        new, own = jax.random.split(key)
        drawn = noise(own, x)
        return (w * x + drawn).sum(1), (new, drawn[:, 0])

    (_, (new, drawn)), _ = mt.value_and_grad(loss, has_aux=True, devices=2, towers=towers)(1.0, X)
    np.testing.assert_array_equal(data_of(new), data_of(jax.random.split(key)[0]))
    assert len(set(np.asarray(drawn).tolist())) == 8


def test_a_key_that_depends_on_rows_is_refused():
    def loss(w, key, x):
        return (w * x).sum(1), jax.random.fold_in(key, x.sum().astype(jnp.uint32))

    for make_key in (jax.random.key, jax.random.PRNGKey):
        with pytest.raises(mt.OutputError, match="no axis of rows"):
            mt.value_and_grad(loss, has_aux=True, devices=2)(1.0, make_key(0), X)


@pytest.mark.slow
@same_bits_every_day
def test_a_legacy_key_beside_two_rows_is_a_key(towers):
    key = jax.random.PRNGKey(0)
    found = mt.make_parallel(noise, devices=2, towers=towers and 2)(key, X[:2])
    np.testing.assert_array_equal(found, drawn_by(key, 2, 1))


@pytest.mark.parametrize(
    "way",
    [
        "closed over",
        *(pytest.param(way, marks=pytest.mark.slow) for way in ("an argument", "a state")),
    ],
)
def test_a_legacy_key_of_four_numbers_is_a_key(way):
    # The lie: with rbg, a key of PRNGKey is four numbers that all towers share.
    with jax.default_prng_impl("rbg"):
        key = jax.random.PRNGKey(0)
        assert key.shape == (4,)
        if way == "a state":
            used = lambda w, key, x: ((w * x).sum(1), (jax.random.split(key)[0], noise(key, x)))
            run = mt.value_and_grad(used, has_aux=True, in_axes=(None, None, 0), devices=2)
            (_, (_, drawn)), _ = run(1.0, key, X[:2])
        elif way == "closed over":
            drawn = mt.make_parallel(lambda x: noise(key, x), devices=2)(X[:2])
        else:
            drawn = mt.make_parallel(noise, devices=2)(key, X[:2])
    assert not np.array_equal(drawn[0], drawn[1])


@both_kinds
def test_a_key_that_is_shared_by_mistake_is_named(make_key):
    def loss(w, x, extra):
        assert make_key  # another function for the other kind: a function is looked at once
        return (w * x + noise(extra["key"], x)).sum(1)

    run = mt.value_and_grad(loss, in_axes=(None, 0, None), devices=2)
    message = r"in_axes\[2\] is None and shares extra\['key'\]"
    with pytest.warns(mt.MultitowerWarning, match=message):
        looking.look_at_call(run, 1.0, X, {"key": make_key(0)})
    with warnings.catch_warnings():
        warnings.simplefilter("error", mt.MultitowerWarning)
        apart = mt.value_and_grad(loss, in_axes=(None, 0, {"key": 0}), devices=2)
        looking.look_at_call(apart, 1.0, X, {"key": make_key(0)})


@pytest.mark.slow
@pytest.mark.parametrize("towers", [None, 4], ids=["fast", "same bits"])
def test_jax_finds_a_key_that_is_used_twice_in_the_loss_alone(towers):
    """Lie: a key of ours that JAX takes for one of the user's, used twice."""
    once = lambda w, x, key: (w * x * noise(key, x)).sum(1)
    twice = lambda w, x, key: once(w, x, key) * once(w, x, key)
    with jax.debug_key_reuse(True):
        where = {"devices": 1 if towers else 2, "towers": towers}
        mt.grad(once, **where)(1.0, X, jax.random.key(0))
        with pytest.raises(jax.errors.KeyReuseError):
            mt.grad(twice, **where)(1.0, X, jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize("options", [slowly({"skip_nonfinite": True}), {"sync_every": 1}], ids=str)
def test_jax_finds_no_key_that_a_step_uses_twice(options):
    losses = lambda w, x, *, rng: (w * x * noise(rng, x)).sum(1)
    step = mt.train_step(losses, optax.sgd(0.1), devices=2, towers=2, **options)
    with jax.debug_key_reuse(True):
        state = step.init(np.float32(1), rng=jax.random.key(0))
        for _ in range(2):
            state, _ = step(state, X)
