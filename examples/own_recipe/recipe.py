"""A recipe of your own: multitower train examples/own_recipe/recipe.py --simulate 4 --towers 4."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from multitower.recipes import DataSets, Recipe


def load():  # the rows of every array belong together: one example each
    generator = np.random.default_rng(0)
    x = generator.uniform(-1, 1, (2000, 2)).astype(np.float32)
    data = {"x": x, "is_inside": np.hypot(*x.T) < 0.75}  # points in a circle
    train, test = ({k: v[rows] for k, v in data.items()} for rows in (np.s_[:1600], np.s_[1600:]))
    return DataSets(train, test)


def init(key):  # any pytree of float arrays
    one, two = jax.random.split(key)
    return {"hidden": jax.random.normal(one, (3, 32)), "out": jax.random.normal(two, (33,)) / 6}


def metrics(params, batch):  # one number per row; never a mean, which is left to multitower
    ones = jnp.ones((len(batch["x"]), 1))
    hidden = jnp.tanh(jnp.concatenate([batch["x"], ones], axis=1) @ params["hidden"])
    logit = jnp.concatenate([hidden, ones], axis=1) @ params["out"]
    loss = optax.sigmoid_binary_cross_entropy(logit, batch["is_inside"].astype(jnp.float32))
    return {"loss": loss, "accuracy": ((logit > 0) == batch["is_inside"]).astype(jnp.float32)}


def loss(params, batch):  # the losses of the rows, and what else is to be shown
    scores = metrics(params, batch)
    return scores["loss"], {"accuracy": scores["accuracy"]}


recipe = Recipe(
    name="circle", data=load, init=init, loss=loss, metrics=metrics,
    optimizer=lambda steps: optax.adam(0.02), steps=300, global_batch=64,
)  # fmt: skip
