"""The contender on Keras: `keras.distribution.DataParallel` on JAX, two simulated devices.

Started by compare.py, with the interpreter that runs it; protocol.py says what it answers. A step
is a step of `model.fit`, which is how Keras is used: it copies each batch to the devices itself,
and there is no call whose return could be timed.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

from collections.abc import Iterator
from typing import Any

import keras
from keras_models import MODELS
from protocol import Program, Task, serve
from works import BETA_1, BETA_2, EPSILON, NUM_DEVICES

import multitower as mt


def make(task: Task) -> Program:
    """A compiled model, trained by `fit`."""
    devices = keras.distribution.list_devices("cpu")[:NUM_DEVICES]
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    model = MODELS[task.work.name](task.weights)
    adam = keras.optimizers.Adam(task.work.learning_rate, BETA_1, BETA_2, EPSILON)
    if task.work.name == "Polynomial":
        model.compile(adam, keras.losses.MeanSquaredError())
    else:
        model.compile(adam, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    steps_done = 0

    def batches() -> Iterator[tuple[Any, Any]]:
        # fit looks one batch ahead, so it is not the generator that counts the steps.
        number = steps_done
        while True:
            batch = task.batches[number % len(task.batches)]
            yield batch["x"], batch["y"]
            number += 1

    def run(num_steps: int) -> float:
        nonlocal steps_done
        history = model.fit(batches(), steps_per_epoch=num_steps, shuffle=False, verbose=0)
        steps_done += num_steps
        return history.history["loss"][0]

    return Program(lambda: run(1), float, run, has_host_cost=False)


if __name__ == "__main__":
    # Before JAX starts its backends. It also sets NPROC, without which collectives dead-lock.
    mt.configure(simulated_devices=NUM_DEVICES)
    serve(make, ("keras", "jax", "jaxlib"))
