"""Asynchronous updates against synchronous ones: losses at equal examples, and one slow device.

`losses`: scikit-learn's digits (1438 images of 8 x 8 pixels to train on, 359 to test) and an MLP
of 64-64-10, trained with SGD on the same number of examples over towers and learning rates. A tower
has 32 rows. An asynchronous update takes those of one tower; a synchronous step those of all, so
that it makes fewer updates. One device: the bits are those of any.

`slow`: one of two devices takes three times as long for a gradient. Synchronous towers wait for it
in every step; asynchronous ones give the other device more turns. Simulated devices share the
cores: this shows the order of dispatch, never a speed-up of training.

    python benchmarks/asynchronous.py losses [--epochs 20]
    python benchmarks/asynchronous.py slow [--updates 60]
"""

import argparse
import itertools
import time
import warnings
from collections import deque
from typing import Any

import multitower as mt

TOWERS = (1, 2, 4, 8)
RATES = (0.05, 0.2)
TOWER_ROWS = 32
SLOW, FAST = 3000, 1000  # rounds of work for a gradient


def make_model() -> tuple[Any, Any, Any]:
    """Loss, scores and first parameters of the MLP."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    draw = np.random.default_rng(0)
    normal = lambda *shape: (draw.normal(size=shape) / shape[0] ** 0.5).astype(np.float32)
    params = {"in": normal(64, 64), "bias": np.zeros(64, np.float32), "out": normal(64, 10)}

    def scores(params: Any, batch: Any) -> Any:
        hidden = jax.nn.relu(batch["image"] @ params["in"] + params["bias"])
        logits = hidden @ params["out"]
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return {"loss": entropy, "accuracy": (logits.argmax(1) == batch["label"]) * jnp.ones(())}

    return lambda params, batch: scores(params, batch)["loss"], scores, params


def load() -> tuple[Any, Any]:
    """The digits: to train on, and every fifth to test."""
    import numpy as np
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    every = {"image": found.data.astype(np.float32) / 16, "label": found.target.astype(np.int32)}
    is_test = np.arange(len(found.target)) % 5 == 4
    return {k: v[~is_test] for k, v in every.items()}, {k: v[is_test] for k, v in every.items()}


def compare_losses(epochs: int) -> None:
    """Prints test losses and accuracies over towers and learning rates."""
    import optax

    loss, scores, params = make_model()
    train, test = load()
    num_examples = epochs * len(train["label"])
    ways: dict[str, dict[str, Any]] = {
        "synchronous": {},
        "asynchronous": {"updates": "asynchronous"},
        "with `stale_scale`": {
            "updates": "asynchronous",
            "stale_scale": lambda staleness: 1 / (1 + staleness),
        },
    }
    print("| towers | updates | momentum | learning rate | made | test loss | test accuracy |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for towers, momentum, name in itertools.product(TOWERS, (0.9, 0.0), ways):
        options = ways[name]
        if towers == 1 and options:
            continue  # it is the synchronous one
        optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.0, momentum=momentum)
        step = mt.train_step(loss, optimizer, devices=1, towers=towers, **options)
        rows = TOWER_ROWS * (1 if options else towers)
        for rate in RATES:
            state = step.init(params)
            state.opt_state.hyperparams["learning_rate"] = rate
            num_updates = num_examples // rows
            for batch in itertools.islice(
                mt.make_batches(train, global_batch=rows, seed=0), num_updates
            ):
                state, _ = step(state, batch)
            found = mt.evaluate(scores, state.params, test, global_batch=359, devices=1)
            cells = [towers, name, momentum, rate, num_updates]
            cells += [f"{found['loss']:.3f}", f"{found['accuracy']:.3f}"]
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


def compare_speed(num_updates: int) -> None:
    """Prints gradients of a tower a second, with one device slowed down on purpose."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    def losses(w: Any, batch: Any) -> Any:
        # Work that changes nothing, as much as the rows say.
        busy = lambda _, x: jnp.sin(x) + x
        worked = jax.lax.fori_loop(0, batch["work"].max(), busy, jnp.ones(4096))
        return (batch["x"] @ w) ** 2 + 0 * jax.lax.stop_gradient(worked[0])

    asynchronous = {"updates": "asynchronous", "global_batch": TOWER_ROWS}
    ways: dict[str, dict[str, Any]] = {
        "synchronous": {},
        "asynchronous, rotation (0, 1)": asynchronous,
        "asynchronous, rotation (0, 0, 0, 1)": {**asynchronous, "rotation": (0, 0, 0, 1)},
    }
    x = np.random.default_rng(0).normal(size=(2 * TOWER_ROWS, 64)).astype(np.float32)
    work = np.repeat(np.array([FAST, SLOW], np.int32), TOWER_ROWS)
    print("| updates | seconds for all | gradients a second |")
    print("| --- | --- | --- |")
    for name, options in ways.items():
        step = mt.train_step(losses, optax.sgd(1e-3), devices=2, towers=2, **options)
        rotation = options.get("rotation", (0, 1))
        own = [slice(0, TOWER_ROWS), slice(TOWER_ROWS, None)] if options else [slice(None)] * 2
        batches = [{"x": x[rows], "work": work[rows]} for rows in own]
        state, waiting, began = step.init(np.ones(64, np.float32)), deque[Any](), 0.0
        for number in range(num_updates + 4):
            if number == 4:  # all is compiled
                jax.block_until_ready(state.params)
                began = time.perf_counter()
            state, metrics = step(state, batches[rotation[number % len(rotation)]])
            waiting.append(metrics["loss"])
            if len(waiting) > len(rotation):
                float(waiting.popleft())  # as Trainer does: the host is never far ahead
        jax.block_until_ready(state.params)
        seconds = time.perf_counter() - began
        gradients = num_updates * (1 if options else 2)
        print(f"| {name} | {seconds:.2f} | {gradients / seconds:.1f} |", flush=True)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["losses", "slow"])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--updates", type=int, default=60)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore", mt.MultitowerWarning)  # of rows that say how much work there is
    mt.configure(simulated_devices=2)
    if chosen.what == "losses":
        compare_losses(chosen.epochs)
    else:
        compare_speed(chosen.updates)


if __name__ == "__main__":
    main()
