"""The polynomial in TensorFlow with MirroredStrategy on all devices."""

import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    w = tf.Variable(tf.ones(3))
    optimizer = tf.keras.optimizers.Adam(0.1)
x = tf.linspace(-10.0, 10.0, 100)
dataset = tf.data.Dataset.from_tensor_slices((x, 5 * x**2 + 3)).batch(100)
dataset = strategy.experimental_distribute_dataset(dataset)


def on_replica(x, y):
    with tf.GradientTape() as tape:
        losses = (w[0] * x**2 + w[1] * x + w[2] - y) ** 2
        loss = tf.reduce_sum(losses) / 100
    optimizer.apply_gradients([(tape.gradient(loss, w), w)])
    return loss


@tf.function
def step(x, y):
    return strategy.reduce("SUM", strategy.run(on_replica, (x, y)), axis=None)


for _ in range(20):
    for x, y in dataset:
        loss = step(x, y)
print(w.numpy())
