"""A table of wrong calls: options that do not exist, losses of other arguments, a step inside jit.

The lie each would catch: an option or an argument that is taken, and means nothing.
"""

import functools

import jax
import numpy as np
import optax
import pytest

import multitower as mt
from wrong_uses import SGD, TRAINER, W, X, add_one, assert_refused, losses, step, with_state


def with_rng(w, x, *, rng):
    return losses(w, x)


def step_in_jit():
    made = mt.train_step(losses, optax.sgd(0.1), devices=2)
    jax.jit(made)(made.init(W), X)


def step_in_jit_that_closes_over_all():
    made = mt.train_step(losses, optax.sgd(0.1), devices=2, towers=2)
    state = made.init(W)
    jax.jit(lambda: made(state, X))()


def step_in_scan():
    made = mt.train_step(losses, optax.sgd(0.1), devices=2, towers=2)
    jax.lax.scan(made, made.init(W), np.stack([X, X]))


WRONG = {
    "rng missing, for a trainer": (
        lambda: mt.Trainer(with_rng, SGD, devices=2, hooks=[]).fit(W, lambda first: [X], steps=1),
        mt.ArgumentError,
        r"takes rng, and fit got none\. Write trainer\.fit\(\.\.\., rng=jax\.random\.key\(0\)\)",
    ),
    "model state missing, for a trainer": (
        lambda: mt.Trainer(with_state, SGD, devices=2, hooks=[]).fit(W, lambda _: [X], steps=1),
        mt.ArgumentError,
        r"model_state, and fit got none\. Write trainer\.fit\(\.\.\., model_state=\{",
    ),
    "rng not wanted, for a trainer": (
        lambda: TRAINER.fit(W, lambda first: [X], steps=1, rng=jax.random.key(0)),
        mt.ArgumentError,
        "fit got rng, and the loss does not take it",
    ),
    **{
        f"{called} without global_batch": (
            function,
            mt.ArgumentError,
            rf"^{called} needs global_batch=\. Say how many rows to {verb} at a time, such as",
        )
        for called, verb, function in (
            ("predict", "compute", lambda: mt.predict(losses, W, X)),
            ("evaluate", "score", lambda: mt.evaluate(losses, W, X)),
            ("Trainer.predict", "compute", lambda: TRAINER.predict(losses, W, X)),
            ("Trainer.evaluate", "score", lambda: TRAINER.evaluate(losses, W, X)),
        )
    },
    "predict with batch_size": (
        lambda: mt.predict(losses, W, X, batch_size=5),
        mt.ArgumentError,
        "predict has no argument 'batch_size'.*are global_batch=",
    ),
    "a resume without a directory": (
        lambda: TRAINER.fit(W, lambda first: iter([X]), steps=1, resume=True),
        mt.ArgumentError,
        "resume=True.*no checkpoints: give it a run_dir, or leave resume out",
    ),
    "batches that do not take a step": (
        lambda: TRAINER.fit(W, lambda: iter([X]), steps=1),
        mt.ArgumentError,
        r"batches is <lambda>\(\): give a function, batches\(first\)",
    ),
    "batches that are arrays": (
        lambda: TRAINER.fit(W, {"x": X}, steps=1),
        mt.ArgumentError,
        r"batches is dict: give a function, batches\(first\)",
    ),
    "has_aux, as for jax.grad": (
        lambda: mt.train_step(losses, SGD, has_aux=True),
        mt.ArgumentError,
        r"train_step has no argument 'has_aux'\. A loss may return \(loss, metrics\) as it is\.",
    ),
    "a decorator with arguments, as for eqx.filter_value_and_grad": (
        lambda: mt.value_and_grad(has_aux=True),
        mt.ArgumentError,
        r"value_and_grad needs fun=\. A decorator .* is @functools\.partial\(mt\.value_and_grad, ",
    ),
    "a decorator with arguments for a function of rows": (
        lambda: mt.make_parallel(towers=8),
        mt.ArgumentError,
        r"make_parallel needs fn=\. .*functools\.partial\(mt\.make_parallel, towers=8\)",
    ),
    "the number of GPUs and arguments, as for TensorFlow's make_parallel": (
        lambda: mt.make_parallel(add_one, 2, x=X),
        mt.ArgumentError,
        r"no argument 'x'. Arguments of fn go to .* make_parallel\(fn\)\(x, y=y\).* is devices=",
    ),
    "the number of GPUs, as for Keras' make_parallel": (
        lambda: mt.make_parallel(add_one, gpu_count=2),
        mt.ArgumentError,
        "make_parallel has no argument 'gpu_count'. Say devices=",
    ),
    "axis_name, as for jax.pmap": (
        lambda: mt.make_parallel(add_one, axis_name="batch"),
        mt.ArgumentError,
        "make_parallel has no argument 'axis_name'.*always called 'towers'",
    ),
    "a mistyped option": (
        lambda: mt.train_step(losses, SGD, stepz_per_call=2),
        mt.ArgumentError,
        r"no argument 'stepz_per_call'\. Did you mean 'steps_per_call'\?",
    ),
    "hooks for fit": (
        lambda: TRAINER.fit(W, lambda first: iter([X]), steps=1, hooks=[print]),
        mt.ArgumentError,
        r"Trainer\.fit has no argument 'hooks'\. Give them to the trainer",
    ),
    "early stopping by a name": (
        lambda: mt.Trainer(losses, SGD, early_stopping="accuracy"),
        mt.ArgumentError,
        r"early_stopping='accuracy': pass mt\.EarlyStopping",
    ),
    "a test phase that tells no scores": (
        lambda: mt.Trainer(
            losses, SGD, devices=2, early_stopping=mt.EarlyStopping("score", patience=1), hooks=[]
        ).fit(W, lambda first: iter([X]), steps=1, evaluate=lambda state: 1.0, evaluate_every=1),
        mt.RunError,
        r"early_stopping='score': .*did not call trainer\.evaluate",
    ),
    "a function of one argument to predict with": (
        lambda: mt.predict(add_one, W, X, global_batch=5),
        mt.ArgumentError,
        r"the function add_one\(x\) takes 1 argument, and predict calls it with two",
    ),
    "rng in a function to predict with": (
        lambda: mt.predict(lambda w, x, rng: x, W, X, global_batch=5),
        mt.ArgumentError,
        r"takes 3 arguments, and predict calls it with two",
    ),
    "rng by position": (
        lambda: mt.train_step(lambda w, x, rng: losses(w, x), SGD),
        mt.ArgumentError,
        r"takes rng by position.*Add a star: def loss\(w, x, \*, rng\)",
    ),
    "an argument by name that no step passes": (
        lambda: mt.train_step(lambda w, x, *, rngs: losses(w, rngs), SGD),
        mt.ArgumentError,
        r"\(w, x, \*, rngs\) needs rngs by name, and .* passes rng and model_state by name",
    ),
    "rows of towers inside jit": (
        lambda: jax.jit(lambda x: mt.shard(x, devices=2, towers=2))(X),
        mt.ArgumentError,
        r"multitower\.shard\(\.\.\., towers=\) is called inside jax\.jit.* Call it outside\.",
    ),
    "a step inside jit": (step_in_jit, mt.ArgumentError, "inside jax.jit.*call it directly"),
    "a step inside jit, closing over all": (
        step_in_jit_that_closes_over_all,
        mt.ArgumentError,
        "inside jax.jit.*call it directly",
    ),
    "a step inside scan": (step_in_scan, mt.ArgumentError, r"jax.lax.scan.*mt.value_and_grad"),
    "no function": (lambda: mt.train_step("mse", optax.sgd(0.1)), mt.ArgumentError, "'mse'"),
    "a loss of three arguments": (
        lambda: mt.train_step(lambda w, x, y: (w * x - y) ** 2, optax.sgd(0.1)),
        mt.ArgumentError,
        r"\(w, x, y\) takes 3 arguments.*with two.*def loss\(w, batch\): x, y = batch",
    ),
    "a partial loss that binds what stands before the batch": (
        lambda: mt.train_step(
            functools.partial(lambda w, scale, x: scale * losses(w, x), scale=2.0), SGD
        ),
        mt.ArgumentError,
        "binds scale by name.*stands before the batch.*scale after the batch",
    ),
    "a loss without a batch": (
        lambda: mt.train_step(lambda w: w**2, optax.sgd(0.1)),
        mt.ArgumentError,
        r"\(w\) takes 1 argument,.*def loss\(w, batch\)",
    ),
    "model_state from the last": (
        lambda: step(model_state_from="last"),
        mt.ArgumentError,
        "'last'.*'mean' or 'first'",
    ),
    "an ema_decay above one": (
        lambda: step(ema_decay=99.9),
        mt.ArgumentError,
        "ema_decay=99.9: .* 0 to 1, such as 0.999",
    ),
    "a global_batch of nothing": (
        lambda: step(global_batch=0),
        mt.ArgumentError,
        "global_batch=0: .*1 or more",
    ),
    "rng missing": (
        lambda: step(with_rng),
        mt.ArgumentError,
        r"takes rng.*rng=jax.random.key\(0\)",
    ),
    "rng not wanted": (
        lambda: step(extras=dict(rng=jax.random.key(0))),
        mt.ArgumentError,
        r"init got rng.*loss_fn\(params, batch, \*, rng\)",
    ),
    "a legacy key for rng": (
        lambda: step(with_rng, extras=dict(rng=jax.random.PRNGKey(0))),
        mt.ArgumentError,
        "one typed key.*wrap_key_data",
    ),
    "many keys for rng": (
        lambda: step(with_rng, extras=dict(rng=jax.random.split(jax.random.key(0)))),
        mt.ArgumentError,
        r"one typed key.*shape \(\)",
    ),
    "model_state missing": (
        lambda: step(with_state),
        mt.ArgumentError,
        "takes model_state, and init got none",
    ),
    "model_state not wanted": (
        lambda: step(extras=dict(model_state=W)),
        mt.ArgumentError,
        "init got model_state",
    ),
}


@pytest.mark.parametrize("use", WRONG)
def test_wrong_use(use):
    assert_refused(*WRONG[use])
