"""Equinox: modules whose leaves may be anything, with BatchNorm's state in `eqx.nn.State`.

The reference runs every tower by hand, with Equinox alone.
"""

import copy

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import multitower as mt
from first_weights import filled
from tower_keys import tower_key
from trees import assert_close

# The statistics of a tower's own rows are what these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:.*with statistics of their own tower's rows")

X = np.random.default_rng(0).normal(size=(2, 16, 4)).astype(np.float32)  # two batches of 16 rows
ROWS = {"axis_name": "rows", "in_axes": (0, None, 0), "out_axes": (0, None)}


def made(make, *sizes, **options):
    """A module whose first weights nobody draws."""
    return filled(eqx.filter_eval_shape(lambda: make(*sizes, key=jax.random.key(0), **options)))


class Net(eqx.Module):
    hidden: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    out: eqx.nn.Linear
    order: jax.Array  # integers go round the differentiation
    activation: object  # and so does what is no array

    def __init__(self, key, mode="batch"):
        one, two = jax.random.split(key)
        self.hidden = eqx.nn.Linear(4, 6, use_bias=False, key=one)
        self.norm = eqx.nn.BatchNorm(6, "rows", momentum=0.5, mode=mode)
        self.dropout = eqx.nn.Dropout(0.5)
        self.out = eqx.nn.Linear(6, 1, key=two)
        self.order = jnp.array([3, 2, 1, 0])
        self.activation = jnp.tanh

    def __call__(self, x, state, key):
        x, state = self.norm(self.hidden(x[self.order]), state)
        return self.out(self.dropout(self.activation(x), key=key))[0], state


def mean_loss(model, state, x, key):
    keys = jax.random.split(key, len(x))
    y, state = jax.vmap(model, **ROWS)(x, state, keys)
    return jnp.mean((y - x.sum(-1)) ** 2), state


def train(value_and_grad, jit, mode="batch"):
    """The documented loop; what was `eqx.filter_value_and_grad` is the argument."""
    model, state = eqx.nn.make_with_state(Net)(jax.random.key(0), mode)
    optimizer = optax.sgd(0.1)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    def train_step(model, state, opt_state, x, key):
        (_, state), grads = value_and_grad(mean_loss, has_aux=True)(model, state, x, key)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), state, opt_state

    train_step = eqx.filter_jit(train_step) if jit else train_step
    for number, x in enumerate(X):
        key = jax.random.fold_in(jax.random.key(1), number)  # as train_step does
        model, state, opt_state = train_step(model, state, opt_state, x, key)
    return eqx.filter((model, state, opt_state), eqx.is_array)


def towers_by_hand(num_towers):
    """filter_value_and_grad, tower by tower: own rows, own keys, everything averaged."""

    def value_and_grad(fun, has_aux):
        def run(model, state, x, key):
            one = eqx.filter_value_and_grad(fun, has_aux=has_aux)
            towers = [
                one(model, state, rows, tower_key(key, tower))
                for tower, rows in enumerate(jnp.split(x, num_towers))
            ]
            mean = lambda *leaves: (sum(leaves) / num_towers).astype(leaves[0].dtype)
            return jax.tree.map(mean, *towers)

        return run

    return value_and_grad


@pytest.fixture(scope="module")
def two_towers():
    return train(towers_by_hand(2), jit=True)


@pytest.mark.slow
def test_law_l2_dropout_and_batch_norm_as_by_hand(two_towers):
    """Lie: one dropout mask for all, statistics of one tower only, a counter that counts towers."""
    found = train(lambda fun, **kw: mt.value_and_grad(fun, devices=2, **kw), jit=True)
    assert_close(found, two_towers)


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
def test_law_l2_batch_norm_with_a_flag_in_its_state(jit):
    """BatchNorm's default mode. Lie: a program of one device stops at the mesh in a flag's type."""
    found = train(lambda fun, **kw: mt.value_and_grad(fun, devices=2, **kw), jit, mode="ema")
    assert_close(found, train(towers_by_hand(2), jit=True, mode="ema"))


@pytest.mark.slow
def test_law_l3_same_bits(two_towers):
    one, two = (
        train(lambda fun, d=d, **kw: mt.value_and_grad(fun, devices=d, towers=2, **kw), jit=False)
        for d in (1, 2)
    )
    assert mt.fingerprint(one) == mt.fingerprint(two)
    assert_close(one, two_towers)


def test_law_l2_gradients_are_what_equinox_gives():
    """None for integers and functions; a module may sit inside a tree, or in another argument."""

    def loss(models, frozen, x):
        return (jax.vmap(models["net"])(x) * frozen.weight.sum()).mean()

    mlp = made(eqx.nn.MLP, 4, 4, 4, 1, activation=jax.nn.relu)
    args = {"net": mlp}, made(eqx.nn.Linear, 4, 4), X[0]
    found = mt.value_and_grad(loss, devices=2)(*args)
    assert_close(found, eqx.filter_jit(eqx.filter_value_and_grad(loss))(*args))
    assert found[1]["net"].activation is None


class Scaled(eqx.Module):
    scale: np.float32


def test_a_number_of_numpy_is_a_weight():
    found = mt.value_and_grad(lambda model, x: model.scale * x[:, 0], devices=2)(
        Scaled(np.float32(2)), X[0]
    )
    expected = eqx.filter_value_and_grad(lambda model, x: (model.scale * x[:, 0]).mean())(
        Scaled(np.float32(2)), X[0]
    )
    assert_close(found, expected)


def test_integers_in_a_plain_tree_stay_an_error():
    with pytest.raises(mt.GradientError, match=r"\['n'\] has dtype int32: only floats"):
        mt.grad(lambda p, x: (p["w"] * x).mean())({"w": 1.0, "n": jnp.arange(3)}, X[0])


@pytest.mark.slow
def test_train_step_takes_a_module(two_towers):
    """The loss gets the module; `step.model` gives the trained one back, functions and all.

    Lie: the same on all devices, and wrong.
    """

    def losses(model, x, *, rng, model_state):
        y, state = jax.vmap(model, **ROWS)(x, model_state, jax.random.split(rng, len(x)))
        return (y - x.sum(-1)) ** 2, {}, state

    model, model_state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    step = mt.train_step(losses, optax.sgd(0.1), devices=1, towers=2)
    state = step.init(model, model_state=model_state, rng=jax.random.key(1))
    for x in X:
        state, _ = step(state, x)
    trained = step.model(state)
    assert trained.activation is model.activation
    assert (trained.order == model.order).all()
    assert (trained.out.weight != model.out.weight).any()
    assert state.params.order is None
    (count,) = state.model_state.get(trained.norm.batch_counter)[None]
    assert count == 2
    found = eqx.filter((trained, state.model_state), eqx.is_array)
    for one, other in zip(*map(jax.tree.leaves, (found, two_towers[:2])), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_make_parallel_takes_a_module():
    mlp = eqx.nn.MLP(4, 2, 3, 1, key=jax.random.key(0))
    run = mt.make_parallel(lambda model, x: jax.vmap(model)(x), in_axes=(None, 0), devices=3)
    assert_close(run(mlp, X[0]), eqx.filter_jit(lambda mlp: jax.vmap(mlp)(X[0]))(mlp))
    linear = Holds(jnp.ones(4), lambda x, w: x @ w)
    assert_close(mt.make_parallel(linear, devices=3)(X[0]), linear(X[0]))


class Holds(eqx.Module):
    weight: jax.Array
    what: object

    def __call__(self, x):
        return self.what(x, self.weight)


def test_modules_inside_of_a_tree():
    """Lie: a function has "dtype custom_jvp"."""
    step = mt.train_step(lambda m, x: m[0](x), optax.sgd(0.1), devices=1, towers=2)
    with pytest.raises(mt.ArgumentError, match=r"params\[1\] is a MLP with arrays or functions"):
        step.init([made(eqx.nn.Linear, 4, 2), made(eqx.nn.MLP, 4, 2, 3, 1)])
    assert int(step.init([made(eqx.nn.Linear, 4, 2)]).step) == 0


def test_a_leaf_that_nothing_can_be_remembered_by():
    model = Holds(jnp.ones(4), bytearray(b"x"))
    with pytest.raises(
        mt.ArgumentError, match=r"leaf \.what is bytearray.*eqx.field\(static=True\)"
    ):
        mt.grad(lambda m, x: (x @ m.weight).mean())(model, X[0])


def test_settings_that_are_equal_and_not_the_same():
    """Lie: True, 1 and 1.0 are one program."""
    run = mt.grad(lambda m, x: (x @ m.weight).mean() * (2 if m.what is True else 3), devices=2)
    gradients = [run(Holds(jnp.ones(4), what), np.ones_like(X[0])).weight[0] for what in (True, 1)]
    assert gradients == [2, 3]


@pytest.mark.slow
def test_a_trainer_scores_the_module():
    trainer = mt.Trainer(line_losses, optax.sgd(0.1), devices=2, ema_decay=0.5)
    state = trainer.step.init(eqx.nn.Linear(4, "scalar", key=jax.random.key(0)))
    x = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)
    scores = trainer.evaluate(
        lambda model, x: {"loss": line_losses(model, x)}, state, x, global_batch=4
    )
    expected = np.mean(line_losses(trainer.step.model(state), x))
    np.testing.assert_allclose(scores["loss"], expected, rtol=1e-5)


def test_the_arrays_of_a_partitioned_module_are_scored_in_evaluation_mode():
    """Lie: Equinox's own error about None; or dropout in the scores."""
    model = eqx.nn.Sequential([eqx.nn.Dropout(0.5), made(eqx.nn.Linear, 4, "scalar")])
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def scores(params, x):
        return {"y": jax.vmap(eqx.combine(params, static))(x)}

    x = X[0, :6]
    expected = np.mean(x @ np.asarray(model[1].weight)[0] + np.asarray(model[1].bias))
    found = mt.evaluate(scores, params, x, global_batch=4, devices=2)
    np.testing.assert_allclose(found["y"], expected, rtol=1e-5)
    assert params[0].inference is None


class Noisy(eqx.Module):
    weight: jax.Array
    key: jax.Array
    inference: bool = eqx.field(static=True, default=False)


def test_a_flag_that_cannot_be_set_is_named():
    with pytest.raises(mt.ArgumentError, match=r"of the Noisy has an attribute inference.*static"):
        mt.predict(lambda m, x: x, Noisy(jnp.ones(4), jax.random.key(0)), X[0], global_batch=4)


@pytest.mark.parametrize(
    "make_key", [jax.random.key, pytest.param(jax.random.PRNGKey, marks=pytest.mark.slow)]
)
def test_law_l6_a_key_inside_a_module(make_key):
    """Lie: the same noise in every tower; or in another place than in a closure or an argument."""

    def draws(model, x):
        return (x @ model.weight).mean(), jax.random.uniform(model.key, (len(x),))

    model = Noisy(jnp.ones(4), make_key(7))
    expected = np.concatenate([jax.random.uniform(tower_key(model.key, t), (2,)) for t in range(4)])
    x = X[0, :8]
    (_, found), _ = mt.value_and_grad(draws, has_aux=True, devices=4)(model, x)
    np.testing.assert_array_equal(found, expected)
    step = mt.train_step(
        lambda model, x: (0 * model.weight.sum() + draws(model, x)[1]),
        optax.sgd(0.1), devices=1, towers=4, diagnostics=True,
    )  # fmt: skip
    _, metrics = step(step.init(model), x)
    np.testing.assert_allclose(metrics["tower_losses"], expected.reshape(4, 2).mean(1), rtol=1e-5)


class Permuted(eqx.Module):
    weight: jax.Array
    order: jax.Array

    def __init__(self, seed):
        self.weight = jnp.asarray(np.ones(4, np.float32))
        self.order = jnp.asarray(np.random.default_rng(seed).permutation(4))


def permuted_losses(model, x):
    return (x[:, model.order] @ model.weight - x[:, 0]) ** 2


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"towers": 2}], ids=str)
def test_models_of_one_step_keep_their_own_integers(options):
    """An ensemble. Lie: all of them are trained with the integers of the last one."""

    def train(step, state):
        for x in X:
            state, _ = step(state.replace(rng=None), x)
        return step.model(state.replace(rng=None))

    make = lambda: mt.train_step(permuted_losses, optax.sgd(0.1), devices=2, **options)
    step, models = make(), [Permuted(seed) for seed in range(2)]
    states = [step.init(model) for model in models]
    for model, state in zip(models, states, strict=True):
        alone = make()
        expected = train(alone, alone.init(model))
        found = train(step, state)
        np.testing.assert_array_equal(found.order, model.order)
        np.testing.assert_array_equal(found.weight, expected.weight)


def restored(state, directory):
    with mt.Checkpoints(directory) as checkpoints:
        checkpoints.save(0, state, {})
        return checkpoints.restore(like=state).state


@pytest.mark.parametrize(
    "copied",
    [lambda state, _: copy.copy(state), lambda state, _: copy.deepcopy(state), restored],
    ids=["copy", "deepcopy", "restored"],
)
def test_a_copy_keeps_the_integers_of_its_model(copied, tmp_path):
    """Lie: a copy in an ensemble is trained with the integers of the last model."""
    step = mt.train_step(permuted_losses, optax.sgd(0.1), devices=1)
    states = [step.init(Permuted(seed)) for seed in range(2)]
    found, _ = step(copied(states[0], tmp_path), X[0])
    np.testing.assert_array_equal(step.model(found).order, Permuted(0).order)
    assert mt.fingerprint(found) == mt.fingerprint(step(states[0], X[0])[0])


def test_values_alone_are_of_no_model_where_there_are_several():
    """Lie: they are trained with the integers of the last one."""
    step = mt.train_step(permuted_losses, optax.sgd(0.1), devices=1)
    state = step.init(Permuted(0))
    step(jax.tree.map(jnp.copy, state), X[0])
    other = step.init(Permuted(1))
    for use in (step.model, lambda state: step(state, X[0])):
        with pytest.raises(mt.StateError, match="which model this state belongs to"):
            use(jax.tree.map(jnp.copy, state))
    del state
    step(jax.tree.map(jnp.copy, other), X[0])


@pytest.mark.slow
@pytest.mark.parametrize("knows", [None, Permuted(1)], ids=["nothing", "another model"])
def test_another_step_goes_on_with_the_integers_of_a_state(knows):
    """Lie: the integers of the model that the other step was given, or none."""
    model = Permuted(0)
    one, other = (
        mt.train_step(permuted_losses, optax.sgd(rate), devices=2, towers=2) for rate in (0.1, 0.2)
    )
    if knows is not None:
        other.init(knows)
    state, _ = one(one.init(model), X[0])
    state, _ = other(state, X[1])
    expected = model.weight
    for rate, x in zip((0.1, 0.2), X, strict=True):
        loss = lambda w, x=x: jnp.mean((x[:, model.order] @ w - x[:, 0]) ** 2)
        expected = expected - rate * jax.grad(loss)(expected)
    found = other.model(state)
    np.testing.assert_array_equal(found.order, model.order)
    np.testing.assert_allclose(found.weight, expected, rtol=1e-5)


def test_values_alone_are_of_the_model_of_the_only_state_that_a_step_was_given():
    """Lie: a step that made no state of its own calls None, where a copied state has a function."""
    one, other = (mt.train_step(permuted_losses, optax.sgd(0.1), devices=1) for _ in range(2))
    state, _ = other(one.init(Permuted(0)), X[0])
    copied = jax.tree.map(jnp.copy, state)
    state, _ = other(state, X[1])
    expected = mt.fingerprint(state)
    del state  # the only other one that knows the model
    again, _ = other(copied, X[1])
    assert mt.fingerprint(again) == expected
    np.testing.assert_array_equal(other.model(again).order, Permuted(0).order)


def test_law_l4_a_resume_with_other_integers_is_refused(tmp_path):
    """Lie: the weights of one model, put together with the integers of another one."""

    def trainer():
        return mt.Trainer(
            permuted_losses, optax.sgd(0.1), devices=1, towers=2, run_dir=tmp_path, hooks=[],
            keep_best="y", global_batch=16,
        )  # fmt: skip

    def fit(seed, steps):
        one = trainer()
        score = lambda model, x: {"y": x[:, model.order] @ model.weight}
        test = lambda state: one.evaluate(score, state, X[0], global_batch=16)
        batches = lambda first: iter(X[first:])
        given = {"evaluate": test, "evaluate_every": 1, "resume": True}
        return one.fit(Permuted(seed), batches, steps=steps, **given)

    fit(0, 1)
    with pytest.raises(mt.RunError, match="model has other integers, flags or keys"):
        fit(1, 2)
    for best in (False, True):
        assert trainer().restore(Permuted(0), best=best).step == 1
        with pytest.raises(mt.RunError, match="model has other integers, flags or keys"):
            trainer().restore(Permuted(1), best=best)
    assert fit(0, 2).step == 2


def line_losses(model, x):
    return (jax.vmap(model)(x) - x.sum(-1)) ** 2


@pytest.mark.slow
def test_a_branch_that_any_row_needs_mixes_no_rows():
    # The lie: Diffrax with adaptive steps "brings rows together".
    def of_row(w, x):
        loss = jnp.sum((x @ w - 1) ** 2)
        is_large = eqx.internal.unvmap_any(loss > 1)
        return jax.lax.cond(is_large, lambda: jnp.where(loss > 1, loss / 2, loss), lambda: loss)

    x = np.arange(24, dtype=np.float32).reshape(8, 3)
    loss = jax.vmap(of_row, in_axes=(None, 0))
    value, _ = mt.value_and_grad(loss, devices=2)(np.ones(3, np.float32), x)  # warnings are errors
    np.testing.assert_allclose(value, loss(np.ones(3, np.float32), x).mean(), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 2])
def test_a_model_that_is_put_on_all_devices_stays_there(num):
    # Lie: the line of the guide on existing loops, and yet a second program in the second step.
    everywhere = NamedSharding(Mesh(mt.devices(num), "towers"), PartitionSpec())
    model, optimizer = made(eqx.nn.MLP, 4, "scalar", 6, 1), optax.adam(0.1)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    given = eqx.filter_shard((model, opt_state), everywhere)

    @eqx.filter_jit
    def step(model, opt_state, x):
        mean = lambda model, x: line_losses(model, x).mean()
        _, gradients = mt.value_and_grad(mean, devices=num)(model, x)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return eqx.apply_updates(model, updates), opt_state

    arrays = lambda tree: jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    made_of = [leaf.sharding for leaf in arrays(step(*given, X[0]))]
    assert made_of == [leaf.sharding for leaf in arrays(given)]
