"""How fast batches come, against how fast LeNet-5 on two devices takes them.

The work: CIFAR-10's shape, 50 000 images of 32x32x3 bytes in memory, shuffled anew for every epoch,
batches of 128 on two simulated devices (with `--real` on all that there are); once as they are and
once with the distortions of the classic program. Ours makes every batch by a pure function of
(data, seed, step) and distorts on the devices. tf.data, torch's DataLoader and grain do the same
work their own way, where installed; they leave their batches on the host, so ours does more.

All contenders run in one process and take turns; the numbers are medians over the rounds.

    python benchmarks/input_pipeline.py [--rounds 7] [--real] [--json FILE]
"""

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import multitower as mt

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

GLOBAL_BATCH = 128
NUM_EXAMPLES = 50_000
BATCHES_PER_BLOCK = 60
STEPS_PER_BLOCK = 15

Take = Callable[[int], None]  # takes so many batches


def make_data() -> dict[str, Any]:
    """Images of CIFAR-10's shape: random bytes cost what pictures cost."""
    import numpy as np

    rng = np.random.default_rng(0)
    return {
        "image": rng.integers(0, 256, (NUM_EXAMPLES, 32, 32, 3), np.uint8),
        "label": rng.integers(0, 10, NUM_EXAMPLES).astype(np.int32),
    }


def lenet5_step(data: dict[str, Any]) -> Take:
    """What takes the batches: a training step on 28x28 images that are on the devices already."""
    import jax
    import optax

    from multitower.recipes import distortions
    from multitower.recipes.networks import lenet5
    from multitower.recipes.scores import score

    def loss(params: Any, batch: Any) -> Any:
        return score(lenet5.logits(params, batch["image"]), batch["label"])["loss"]

    rows = {name: array[:GLOBAL_BATCH] for name, array in data.items()}
    step = mt.train_step(loss, optax.adam(1e-3))
    state = step.init(lenet5.init(jax.random.key(0), channels=3))
    batch = mt.shard({**rows, "image": distortions.central(rows["image"])})

    def take(count: int) -> None:
        nonlocal state
        for _ in range(count):
            state, _ = step(state, batch)
        jax.block_until_ready(state)

    return take


def ours(data: dict[str, Any], *, distorted: bool) -> Take:
    """`make_batches` and `prefetch`; distortions as one function over the tower batches."""
    import jax

    from multitower.recipes.cifar10 import distort

    change = mt.make_parallel(lambda batch: mt.augment_batch(distort, batch))
    batches = mt.make_batches(data, global_batch=GLOBAL_BATCH, seed=0, keyed=distorted)
    ahead = mt.prefetch(batches)

    def take(count: int) -> None:
        for batch in itertools.islice(ahead, count):
            jax.block_until_ready(change(batch) if distorted else batch)

    return take


def from_iterator(batches: Iterator[Any]) -> Take:
    def take(count: int) -> None:
        for _ in itertools.islice(batches, count):
            pass

    return take


def tf_data(data: dict[str, Any], *, distorted: bool) -> Take:
    import numpy as np
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")

    def distort(example: Any) -> Any:
        x = tf.image.random_crop(example["image"], (28, 28, 3))
        x = tf.image.random_flip_left_right(tf.cast(x, tf.float32))
        x = tf.image.random_contrast(tf.image.random_brightness(x, 63), 0.2, 1.8)
        return {**example, "image": tf.image.per_image_standardization(x)}

    # Places are shuffled, not images: a buffer of 50 000 images would be copied twice.
    places = tf.data.Dataset.range(NUM_EXAMPLES).shuffle(NUM_EXAMPLES, seed=0).repeat()
    images, labels = tf.constant(data["image"]), tf.constant(data["label"])
    if distorted:
        pick = lambda i: distort({"image": images[i], "label": labels[i]})
        batches = places.map(pick, num_parallel_calls=tf.data.AUTOTUNE).batch(GLOBAL_BATCH)
    else:
        pick = lambda i: {"image": tf.gather(images, i), "label": tf.gather(labels, i)}
        batches = places.batch(GLOBAL_BATCH).map(pick, num_parallel_calls=tf.data.AUTOTUNE)
    found = batches.prefetch(tf.data.AUTOTUNE).as_numpy_iterator()
    assert np.shape(next(found)["image"])[0] == GLOBAL_BATCH
    return from_iterator(found)


def torch_loader(data: dict[str, Any], *, distorted: bool) -> Take | None:
    import torch

    if distorted:
        return None  # torch has no image operations of its own
    tensors = [torch.from_numpy(array) for array in data.values()]
    dataset = torch.utils.data.TensorDataset(*tensors)
    sampler = torch.utils.data.BatchSampler(
        torch.utils.data.RandomSampler(dataset), GLOBAL_BATCH, drop_last=True
    )
    # A whole batch at a time (sampler=, batch_size=None): far faster than row by row.
    loader = torch.utils.data.DataLoader(dataset, sampler=sampler, batch_size=None)
    return from_iterator(batch for _ in itertools.count() for batch in loader)


def grain_dataset(data: dict[str, Any], *, distorted: bool) -> Take | None:
    import grain

    if distorted:
        return None  # its transformations would be NumPy code of ours, row by row
    images, labels = data["image"], data["label"]
    places = grain.MapDataset.range(NUM_EXAMPLES).shuffle(seed=0).repeat()
    examples = places.map(lambda i: {"image": images[i], "label": labels[i]})
    return from_iterator(iter(examples.batch(GLOBAL_BATCH).to_iter_dataset()))


def contenders(data: dict[str, Any]) -> dict[str, Take]:
    """All that can run here."""
    found = {"LeNet-5 takes": lenet5_step(data)}
    peers = {"tf.data": tf_data, "torch DataLoader": torch_loader, "grain": grain_dataset}
    for distorted, suffix in ((False, ""), (True, ", distorted")):
        found[f"multitower{suffix}"] = ours(data, distorted=distorted)
        for name, make in peers.items():
            module = {"tf.data": "tensorflow", "torch DataLoader": "torch", "grain": "grain"}[name]
            if importlib.util.find_spec(module) is None:
                continue
            take = make(data, distorted=distorted)
            if take is not None:
                found[f"{name}{suffix}"] = take
    return found


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--real", action="store_true", help="on all devices that there are")
    parser.add_argument("--json", default="", help="also write the numbers to this file")
    arguments = parser.parse_args()
    if not arguments.real:
        mt.configure(simulated_devices=2)
    takes = contenders(make_data())
    rates: dict[str, list[float]] = {name: [] for name in takes}
    for take in takes.values():
        take(5)
    for number in range(arguments.rounds):
        for name in takes if number % 2 == 0 else reversed(takes):
            count = STEPS_PER_BLOCK if name == "LeNet-5 takes" else BATCHES_PER_BLOCK
            start = time.perf_counter()
            takes[name](count)
            rates[name].append(count * GLOBAL_BATCH / (time.perf_counter() - start))
    taken = rates["LeNet-5 takes"]
    print("| | examples/s | times what LeNet-5 takes |\n| --- | --- | --- |")
    found = {}
    for name, values in rates.items():
        ratio = statistics.median(a / b for a, b in zip(values, taken, strict=True))
        found[name] = {"examples_per_s": statistics.median(values), "ratio": ratio}
        print(f"| {name} | {statistics.median(values):,.0f} | {ratio:.1f} |")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
