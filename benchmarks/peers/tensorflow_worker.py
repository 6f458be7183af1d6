"""The contender on TensorFlow: `tf.distribute.MirroredStrategy` on two logical CPU devices.

Started by compare.py; protocol.py says what it answers.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from typing import Any

import tensorflow as tf
from protocol import Program, Task, serve
from tensorflow_models import LOSSES, make_variables
from works import BETA_1, BETA_2, EPSILON, NUM_DEVICES


def make_strategy() -> Any:
    (cpu,) = tf.config.list_physical_devices("CPU")
    halves = [tf.config.LogicalDeviceConfiguration()] * NUM_DEVICES
    tf.config.set_logical_device_configuration(cpu, halves)
    return tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(NUM_DEVICES)])


def make(task: Task) -> Program:
    """The custom training loop of TensorFlow's guide: one tf.function for a step."""
    strategy = make_strategy()
    loss_of = LOSSES[task.work.name]
    with strategy.scope():
        weights, statistics = make_variables(task.work, task.weights)
        variables = list(weights.values())
        optimizer = tf.keras.optimizers.Adam(task.work.learning_rate, BETA_1, BETA_2, EPSILON)
        optimizer.build(variables)

    def on_replica(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            # The optimizer adds the replicas' gradients up, so each one takes its share.
            loss = loss_of(weights, statistics, batch["x"], batch["y"]) / NUM_DEVICES
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    @tf.function
    def step(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(on_replica, args=(batch,)), axis=None)

    def place(batch: Any) -> Any:
        def rows_of(context: Any) -> Any:
            rows = len(batch["y"]) // NUM_DEVICES
            first = context.replica_id_in_sync_group * rows
            return {name: tf.constant(a[first : first + rows]) for name, a in batch.items()}

        return strategy.experimental_distribute_values_from_function(rows_of)

    batches = [place(batch) for batch in task.batches]
    steps_done = 0

    def call() -> Any:
        nonlocal steps_done
        loss = step(batches[steps_done % len(batches)])
        steps_done += 1
        return loss

    return Program(call, float)


if __name__ == "__main__":
    serve(make, ("tensorflow-cpu", "keras"))
