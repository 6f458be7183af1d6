"""Trains small models on towers and prints a fingerprint of everything they leave behind.

python same_bits_program.py DEVICES TOWERS [--onednn] CASE...      a case is MODEL/OPTIMIZER/DTYPE

Every process simulates its own number of devices, as a user would, and runs all its cases, to
share the start. Each run ends with a ragged batch that leaves towers empty.
"""

import json
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import multitower as mt

STEPS = 3


class Model(NamedTuple):
    params: Any
    loss: Any
    batch: Any  # (rng, rows) -> batch
    model_state: Any = None
    takes_rng: bool = False


def dense(rng, rows, columns):
    return rng.normal(0, rows**-0.5, (rows, columns)).astype(np.float32)


def losses_and_hits(logits, labels):
    """Cross-entropy and correctness of each row; labels may have a time axis."""
    entropies = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    hits = (logits.argmax(-1) == labels).astype(jnp.float32)
    rest = tuple(range(1, labels.ndim))
    return entropies.mean(rest), {"accuracy": hits.mean(rest)}


def images(size):
    def batch(rng, rows):
        x = rng.normal(size=(rows, size, size, 1)).astype(np.float32)
        return {"image": x, "label": rng.integers(0, 10, rows).astype(np.int32)}

    return batch


def mlp(rng):
    params = {
        "hidden": dense(rng, 64, 33),
        "bias": np.zeros(33, np.float32),
        "out": dense(rng, 33, 10),
    }

    def loss(params, batch):
        x = batch["image"].reshape(-1, 64).astype(params["hidden"].dtype)
        x = jnp.tanh(x @ params["hidden"] + params["bias"])
        return losses_and_hits(x @ params["out"], batch["label"])

    return Model(params, loss, images(8))


def lenet5(rng):
    def kernel(size, inputs, outputs):
        scale = (size * size * inputs) ** -0.5
        return rng.normal(0, scale, (size, size, inputs, outputs)).astype(np.float32)

    params = {
        "convolutions": [kernel(5, 1, 6), kernel(5, 6, 16)],
        "dense": [dense(rng, 256, 120), dense(rng, 120, 84), dense(rng, 84, 10)],
    }
    params["biases"] = [np.zeros(n, np.float32) for n in (6, 16, 120, 84, 10)]

    def loss(params, batch):
        x = batch["image"].astype(params["biases"][0].dtype)
        biases = iter(params["biases"])
        for weights in params["convolutions"]:
            numbers = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(x, weights, (1, 1), "VALID", dimension_numbers=numbers)
            x = jnp.tanh(x + next(biases))
            rows, height, width, channels = x.shape
            x = x.reshape(rows, height // 2, 2, width // 2, 2, channels).mean((2, 4))
        x = x.reshape(x.shape[0], -1)
        for weights in params["dense"]:
            x = jnp.tanh(x) @ weights + next(biases)
        return losses_and_hits(x, batch["label"])

    return Model(params, loss, images(28))


def transformer(rng, words=13, time=6, width=16, heads=2, dropout=0.2):
    params = {
        "embed": dense(rng, words, width),
        "qkv": dense(rng, width, 3 * width),
        "up": dense(rng, width, 2 * width),
        "down": dense(rng, 2 * width, width),
    }

    def norm(x):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    def attend(params, x):
        shape = (*x.shape[:2], heads, width // heads)
        q, k, v = (a.reshape(shape) for a in jnp.split(norm(x) @ params["qkv"], 3, -1))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        scores = jnp.where(jnp.tri(time, dtype=bool), scores, -1e4)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape)

    def loss(params, batch, *, rng):
        x = params["embed"][batch["words"]]
        x = x + attend(params, x)
        kept = jax.random.bernoulli(rng, 1 - dropout, x.shape)
        x = x + jnp.where(kept, jnp.tanh(norm(x) @ params["up"]) @ params["down"], 0)
        return losses_and_hits(norm(x) @ params["embed"].T, batch["next"])

    def batch(rng, rows):
        text = rng.integers(0, words, (rows, time + 1)).astype(np.int32)
        return {"words": text[:, :-1], "next": text[:, 1:]}

    return Model(params, loss, batch, takes_rng=True)


def batchnorm(rng):
    plain = mlp(rng)
    params = {**plain.params, "norm_scale": np.ones(33, np.float32)}
    statistics = {"mean": np.zeros(33, np.float32), "var": np.ones(33, np.float32)}
    statistics["updates"] = np.int32(0)

    def loss(params, batch, *, model_state):
        x = batch["image"].reshape(-1, 64).astype(params["hidden"].dtype) @ params["hidden"]
        wide = x.astype(jnp.float32)
        mean, var = wide.mean(0), wide.var(0)
        new = {
            "mean": 0.9 * model_state["mean"] + 0.1 * mean,
            "var": 0.9 * model_state["var"] + 0.1 * var,
            "updates": model_state["updates"] + 1,
        }
        x = ((wide - mean) * jax.lax.rsqrt(var + 1e-5)).astype(x.dtype) * params["norm_scale"]
        return *losses_and_hits(jax.nn.relu(x) @ params["out"], batch["label"]), new

    return Model(params, loss, plain.batch, model_state=statistics)


MODELS = {"mlp": mlp, "lenet5": lenet5, "transformer": transformer, "batchnorm": batchnorm}

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.05, momentum=0.9),
    "adamw": lambda: optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 1, STEPS)),
    ),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=16),
    "lamb": lambda: optax.lamb(1e-2),
}

EMA_DECAYS = {"sgd": 0.9, "adamw": lambda count: jnp.minimum(0.99, count / (count + 10.0))}


def train(case, towers, devices=None, change_batch=None):
    """Three steps of one case; what is left of it, part by part."""
    model_name, optimizer_name, dtype = case.split("/")
    model = MODELS[model_name](np.random.default_rng(1))
    step = mt.train_step(
        model.loss,
        OPTIMIZERS[optimizer_name](),
        devices=devices,
        towers=towers,
        ema_decay=EMA_DECAYS.get(optimizer_name),
    )
    state = step.init(
        jax.tree.map(lambda x: jnp.asarray(x, dtype), model.params),
        model_state=model.model_state,
        rng=jax.random.key(3) if model.takes_rng else None,
    )
    history = []
    for number in range(STEPS):
        # b = 2 rows a tower; at the end only half of the towers have rows, one of them a single.
        rows = 2 * towers if number < STEPS - 1 else towers - 1
        batch = model.batch(np.random.default_rng(number), rows)
        state, metrics = step(state, change_batch(batch) if change_batch else batch)
        history.append(metrics)
    return left_by(state, history)


def left_by(state, history):
    """All that training leaves, part by part."""
    return {
        "params": state.params,
        "opt_state": state.opt_state,
        "ema_params": state.ema_params,
        "model_state": state.model_state,
        "step": state.step,
        "metrics": history,
    }


def fingerprints(case, towers, devices=None, change_batch=None):
    """A fingerprint of each part of what training leaves, so that a failure says where."""
    left = train(case, towers, devices, change_batch)
    return {name: mt.fingerprint(part)[:16] for name, part in left.items()}


def main(num_devices, towers, *cases):
    # Every process compiles for itself, as on machines that share nothing.
    jax.config.update("jax_enable_compilation_cache", False)
    onednn = cases[:1] == ("--onednn",)
    mt.configure(simulated_devices=int(num_devices), onednn=onednn)
    cases = cases[onednn:]
    print(json.dumps({case: fingerprints(case, int(towers)) for case in cases}))


if __name__ == "__main__":
    main(*sys.argv[1:])
