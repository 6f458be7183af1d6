"""shard_update takes the optimizers that are proved to work element by element, and no others.

The lie: a small trial that a norm, a mask or a decision passes because it did not bite there.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt

PARAMS = {
    "half": np.ones((3, 3), np.float32).astype(jnp.bfloat16),
    "in": np.ones((4, 9), np.float32),
    "out": np.ones(9, np.float32),
    "shift": np.float32(0.5),
}
contrib = optax.contrib


def masked(value):
    return {"half": not value, "in": value, "out": not value, "shift": value}


def by_size(params):
    return jax.tree.map(lambda leaf: leaf.size > 10, params)


def by_axes(params):
    return jax.tree.map(lambda leaf: "array" if leaf.ndim > 1 else "vector", params)


def noise_of_all(updates, state, params=None):
    key, own = jax.random.split(state)
    return jax.tree.map(lambda u: u + jax.random.normal(own, u.shape, u.dtype), updates), key


def with_places(updates, state, params=None):
    return jax.tree.map(lambda u: u * jnp.arange(u.size).reshape(u.shape), updates), state


ELEMENT_WISE = {
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(optax.warmup_cosine_decay_schedule(0, 1, 10, 100)),
    "adagrad": optax.adagrad(0.1),
    "ademamix": contrib.ademamix(0.1),
    "amsgrad": optax.amsgrad(0.1),
    "apply_every": optax.chain(optax.apply_every(3), optax.sgd(0.1)),
    "by path": optax.multi_transform({True: optax.adam(0.1), False: optax.sgd(0.1)}, masked(True)),
    "clip": optax.chain(optax.clip(1.0), optax.rmsprop(0.1, centered=True, momentum=0.9)),
    "decay": optax.chain(optax.add_decayed_weights(0.1, masked(False)), optax.sgd(0.1)),
    "inject": optax.inject_hyperparams(optax.adamw)(0.1),
    "inject a schedule": optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(1, 0, 5)),
    "lion": optax.lion(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2),
    "piecewise": optax.adam(optax.piecewise_interpolate_schedule("linear", 0.1, {5: 0.5})),
    "plateau": optax.chain(optax.adam(0.1), contrib.reduce_on_plateau()),
    "radam": optax.radam(0.1),
    "schedule_free": contrib.schedule_free_adamw(0.1),
}
MIXING = {
    "a global norm that does not bite": optax.chain(optax.clip_by_global_norm(1e9), optax.sgd(0.1)),
    "adafactor": optax.adafactor(0.1),
    "adaptive_grad_clip": optax.adaptive_grad_clip(1e9),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "centralize": optax.chain(optax.centralize(), optax.sgd(0.1)),
    "clip_by_block_rms": optax.chain(optax.clip_by_block_rms(1e9), optax.sgd(0.1)),
    "dadapt": contrib.dadapt_adamw(),
    "dog": contrib.dog(),
    "labels by shape": optax.partition(
        {"array": optax.adam(0.1), "vector": optax.sgd(0.1)}, by_axes
    ),
    "lars": optax.lars(0.1),
    "mask by size": optax.masked(optax.sgd(0.1), by_size),
    "momo": contrib.momo(),
    "momo_adam": contrib.momo_adam(),
    "noise": optax.GradientTransformation(lambda params: jax.random.key(0), noise_of_all),
    "places": optax.GradientTransformation(lambda params: (), with_places),
    "prodigy": contrib.prodigy(),
    "skip_large_updates": optax.MultiSteps(
        optax.adam(0.1), 2, should_skip_update_fn=lambda *a: optax.skip_large_updates(*a, 1e9)
    ),
    "skip_not_finite": optax.MultiSteps(
        optax.adam(0.1), 2, should_skip_update_fn=optax.skip_not_finite
    ),
    "zero_nans": optax.chain(optax.zero_nans(), optax.sgd(0.1)),
}


def first(optimizer, params=PARAMS, **options):
    step = mt.train_step(
        lambda p, x: x @ p["out"], optimizer, devices=2, towers=4, shard_update=True, **options
    )
    return step.init(params)


@pytest.mark.parametrize("name", ELEMENT_WISE)
def test_what_works_element_by_element_is_taken(name):
    state = first(ELEMENT_WISE[name])
    whole = ELEMENT_WISE[name].init(jax.tree.map(jnp.asarray, PARAMS))
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(whole)
    for one, other in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_elements_is_refused(name):
    with pytest.raises(mt.ArgumentError, match="needs an optimizer that works element by element"):
        first(MIXING[name])


def test_one_that_fails_on_a_block_is_refused():
    adam = optax.adam(0.1)
    mapped = optax.GradientTransformation(jax.vmap(adam.init), jax.vmap(adam.update))
    ensemble = {"in": np.ones((3, 4, 9), np.float32), "out": np.ones((3, 9), np.float32)}
    said = "works element by element, and it fails on a block: ValueError: vmap got inconsistent"
    with pytest.raises(mt.ArgumentError, match=said):
        first(mapped, ensemble)


def test_mechanize_is_refused():
    params = {"out": np.ones(9, np.float32)}  # it takes no 16-bit parameters
    with pytest.raises(mt.ArgumentError, match="works element by element"):
        first(contrib.mechanize(optax.adam(0.1)), params)


def test_the_message_names_the_leaf_the_operation_and_the_way_out():
    with pytest.raises(mt.ArgumentError) as caught:
        first(MIXING["a global norm that does not bite"])
    message = str(caught.value)
    assert "the update of params['half'] puts elements together (reduce_sum)" in message
    assert "train_step(clip_norm=...)" in message
    with pytest.raises(mt.ArgumentError, match=r"params\['in'\] is computed in another way"):
        first(MIXING["mask by size"])
