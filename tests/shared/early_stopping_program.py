"""One process of several: `python early_stopping_program.py PORT PROCESSES PROCESS RUN_DIR`.

Process 0 prints why the run ended, and the fingerprint of its state and predictions. Process 1 has
more patience: it must not have a say.
"""

import sys

import numpy as np
import optax

import multitower as mt

X = np.random.default_rng(0).normal(size=(13, 2)).astype(np.float32)


def run(run_dir, devices, patience=2):
    """Trains until it ends early, and predicts."""
    metrics_of_steps = []
    where = {"towers": 2, "devices": devices}
    trainer = mt.Trainer(
        lambda params, x: (x @ params - 1) ** 2,
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
        global_batch=8,
        run_dir=run_dir,
        checkpoint_every=3,
        early_stopping=mt.EarlyStopping("far", patience=patience),
        extra_metrics=["gradient_norm", "learning_rate"],
        hooks=[lambda progress: metrics_of_steps.append(dict(progress.metrics))],
        **where,
    )

    def evaluate(state):
        metrics = lambda params, x: {"far": (x @ params - 1) ** 2}
        trainer.evaluate(metrics, state, iter([X[:8], X[8:]]), global_batch=5)

    batches = lambda first: mt.make_batches(X, global_batch=8, seed=0, first=first)
    given = {"evaluate": evaluate, "evaluate_every": 2}
    state = trainer.fit(np.zeros(2, np.float32), batches, epochs=9, **given)
    found = trainer.predict(lambda params, x: x @ params, state, X, global_batch=8)
    return f"{trainer.stopped} {mt.fingerprint([state, found, metrics_of_steps])}"


if __name__ == "__main__":
    port, count, number = map(int, sys.argv[1:4])
    where = {"coordinator": f"127.0.0.1:{port}", "num_processes": count, "process_id": number}
    mt.configure(simulated_devices=1, distributed=True, **where)
    print(run(sys.argv[4], None, patience=2 + number))
