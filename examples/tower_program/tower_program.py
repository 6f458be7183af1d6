"""The tower program with its plumbing, on scikit-learn's digits.

A one-device model, towers, averaged gradients, SGD; train and test phases over epochs; a saver;
summaries per phase for TensorBoard. The parts keep the names that the classic program gave them;
what towers, gradients and variables needed by hand there is `mt.Trainer` here.

    python examples/tower_program/tower_program.py RUN_DIR [EPOCHS]
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import multitower as mt
import numpy as np
import optax
from sklearn.datasets import load_digits

TOWERS = 4
TOWER_BATCH = 32
GLOBAL_BATCH = TOWERS * TOWER_BATCH
LEARNING_RATE = 0.5


def load():
    """1797 images of 8x8 pixels; every fifth one is for the test phase."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    test = np.arange(len(labels)) % 5 == 0
    return (
        {"x": images[~test], "y": labels[~test].astype(np.int32)},
        {"x": images[test], "y": labels[test].astype(np.int32)},
    )


def variables(key):
    """Weights of a perceptron with one hidden layer."""
    first, second = jax.random.split(key)
    return {
        "hidden": {"w": jax.random.normal(first, (64, 128)) * 0.1, "b": jnp.zeros(128)},
        "output": {"w": jax.random.normal(second, (128, 10)) * 0.1, "b": jnp.zeros(10)},
    }


def model(params, images):
    """Scores of the ten classes; one device's code, which knows of no towers."""
    hidden = jax.nn.relu(images @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["output"]["w"] + params["output"]["b"]


def scores(params, batch):
    """Loss and accuracy of every example."""
    logits = model(params, batch["x"])
    return {
        "loss": optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]),
        "accuracy": (logits.argmax(-1) == batch["y"]).astype(jnp.float32),
    }


def tower_loss(params, batch):
    """What every tower computes on its rows."""
    found = scores(params, batch)
    return found["loss"], {"accuracy": found["accuracy"]}


def main(run_dir, epochs=10):
    train, test = load()
    steps_per_epoch = len(train["y"]) // GLOBAL_BATCH
    devices = mt.devices()[:TOWERS]
    tower_losses = {}

    def batches(first):  # the generator: batch number s, from `first` on
        return mt.make_batches(train, global_batch=GLOBAL_BATCH, seed=0, first=first)

    def remember(progress):  # per-tower losses, as every step reports them
        if progress.phase == "train":
            tower_losses[progress.step] = progress.tower_losses

    with mt.EventFiles(Path(run_dir) / "events", {"towers": str(TOWERS)}) as summaries:
        trainer = mt.Trainer(
            tower_loss,
            optax.sgd(LEARNING_RATE),
            run_dir=run_dir,
            towers=TOWERS,
            devices=devices,
            global_batch=GLOBAL_BATCH,
            hooks=[summaries, remember],
        )
        params = variables(jax.random.key(0))
        for epoch in range(1, epochs + 1):
            # Train phase: goes on from what the saver kept of the epoch before.
            state = trainer.fit(params, batches, steps=epoch * steps_per_epoch, resume=True)
            # Test phase: every image counts once, though 360 do not divide by 128.
            result = trainer.evaluate(scores, state, test, global_batch=GLOBAL_BATCH)
            spread = np.ptp(tower_losses[epoch * steps_per_epoch])
            print(
                f"epoch {epoch}: test loss {result['loss']:.4f}, "
                f"accuracy {result['accuracy']:.4f}; tower losses differ by {spread:.4f}"
            )

    # Predictions of the saved model, restored exactly, tower by tower on all devices.
    with mt.Checkpoints(Path(run_dir) / "checkpoints") as saver:
        restored = saver.restore(like=trainer.step.init(params)).state
    predict = mt.make_parallel(
        lambda p, x: model(p, x).argmax(-1), (None, 0), devices=devices, towers=TOWERS
    )
    predictions = np.split(np.asarray(predict(restored.params, test["x"])), TOWERS)
    print(f"restored: {mt.fingerprint(restored) == mt.fingerprint(state)}")
    for tower, answers in enumerate(predictions):
        print(f"tower {tower} of the saved model says {answers[:10]}")
    return result, restored, state, np.concatenate(predictions), tower_losses


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("say where to write: python tower_program.py RUN_DIR [EPOCHS]")
    main(sys.argv[1], *map(int, sys.argv[2:]))
