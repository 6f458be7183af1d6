"""Asynchronous updates against synchronous ones: losses at equal examples, and one slow device.

`losses`: scikit-learn's digits (1438 images of 8 x 8 pixels to train on, 359 to test) and an MLP
of 64-64-10, trained with SGD on the same number of examples over towers and learning rates. A tower
has 32 rows. An asynchronous update takes those of one tower; a synchronous step those of all, so
that it makes fewer updates. One device: the bits are those of any.

`slow`: one of two simulated devices gets its rows 60 milliseconds late, every time. Synchronous
towers wait for it in every step; asynchronous ones give the other device more turns. The slow
device sleeps and the other one has next to nothing to do: this shows the order of dispatch, never a
speed-up.

    python benchmarks/asynchronous.py losses [--epochs 20]
    python benchmarks/asynchronous.py slow [--steps 40]
"""

import argparse
import itertools
import time
from collections import deque
from typing import Any

import multitower as mt

TOWERS = (1, 2, 4, 8)
RATES = (0.05, 0.2)
TOWER_ROWS = 32
SLEEP_S = 0.06


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
        "with `momentum_correction`": {"updates": "asynchronous", "momentum_correction": True},
    }
    print("| towers | updates | momentum | learning rate | made | test loss | test accuracy |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for towers, momentum, name in itertools.product(TOWERS, (0.9, 0.0), ways):
        options = ways[name]
        if towers == 1 and options:
            continue  # it is the synchronous one
        if momentum == 0 and "momentum_correction" in options:
            continue  # there is nothing to lower
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


def make_hold() -> Any:
    """Rows of two devices, which the second one has only after it has slept.

    In one program over both devices: XLA's CPU client runs the callbacks of a program for one
    device in the caller's thread.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, PartitionSpec

    def sleep(device: Any) -> Any:
        time.sleep(SLEEP_S * int(device))
        return np.float32(0)

    def held(x: Any) -> Any:
        number = jax.lax.axis_index("devices")
        return x + jax.pure_callback(sleep, jax.ShapeDtypeStruct((), jnp.float32), number)

    split = PartitionSpec("devices")
    mesh = Mesh(np.array(mt.devices(2)), ("devices",))
    mapped = jax.shard_map(held, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    return jax.jit(mapped)


def compare_speed(num_steps: int) -> None:
    """Prints gradients of a tower a second, with one device slowed down on purpose."""
    import jax
    import numpy as np
    import optax

    hold = make_hold()
    x = np.random.default_rng(0).normal(size=(2 * TOWER_ROWS, 64)).astype(np.float32)
    print("| updates | slow gradients | all gradients | seconds | gradients a second |")
    print("| --- | --- | --- | --- | --- |")
    for rotation in (None, (0, 1), (0, 0, 0, 1), (0,) * 7 + (1,)):
        options: dict[str, Any] = {}
        if rotation is not None:
            options = {"updates": "asynchronous", "rotation": rotation, "global_batch": TOWER_ROWS}
        step = mt.train_step(
            lambda w, x: (x @ w) ** 2, optax.sgd(1e-3), devices=2, towers=2, **options
        )
        turns = rotation or (None,)
        state, waiting, began = step.init(np.ones(64, np.float32)), deque[Any](), 0.0
        for number in range((num_steps + 2) * len(turns)):
            if number == 2 * len(turns):  # all is compiled
                jax.block_until_ready(state.params)
                began = time.perf_counter()
            group = turns[number % len(turns)]
            batch = x[:TOWER_ROWS] if group == 0 else hold(x)
            if group == 1:
                batch = batch.addressable_shards[1].data
            state, metrics = step(state, batch)
            waiting.append(metrics["loss"])
            if len(waiting) > len(turns):
                float(waiting.popleft())  # as Trainer does: the host is never far ahead
        jax.block_until_ready(state.params)
        seconds = time.perf_counter() - began
        gradients = num_steps * (2 if rotation is None else len(rotation))
        name = "synchronous" if rotation is None else f"asynchronous, rotation {rotation}"
        numbers = f"{num_steps} | {gradients} | {seconds:.2f} | {gradients / seconds:.0f}"
        print(f"| {name} | {numbers} |", flush=True)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["losses", "slow"])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=40)
    chosen = parser.parse_args()
    mt.configure(simulated_devices=2)
    if chosen.what == "losses":
        compare_losses(chosen.epochs)
    else:
        compare_speed(chosen.steps)


if __name__ == "__main__":
    main()
