"""A table of wrong parameters, optimizers and training states.

The lie each would catch: an update of something else than what is trained.
"""

import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from flax.training import train_state as linen_state

import multitower as mt
from wrong_uses import MADE, SGD, TRAINER, W, X, assert_refused, losses, step

WITH_AVERAGE = mt.train_step(losses, SGD, devices=2, ema_decay=0.9)
LINEN_STATE = linen_state.TrainState.create(apply_fn=losses, params={"w": W}, tx=SGD)


class Unusual(nnx.Module):
    """A model whose weights are Variables of another kind."""

    def __init__(self):
        self.w = nnx.Variable(jnp.ones(3))


def fast_losses(params, x):
    return losses(getattr(params, "fast", params), x)


def with_phase(gradients, state, params=None, *, phase):
    return gradients, state


OPAQUE_SAM = optax.contrib.sam(SGD, optax.sgd(0.05), opaque_mode=True, reset_state=False)
LOOKAHEAD = optax.lookahead(SGD, 2, 0.5)
FAST_AND_SLOW = optax.LookaheadParams.init_synced(jnp.ones(3))
WITH_PHASE = optax.GradientTransformationExtraArgs(lambda params: (), with_phase)


class Keras:
    """What is asked of a Keras model, which takes long to import."""

    trainable_variables = ()

    def __call__(self, inputs):
        return inputs

    def stateless_call(self, trainable_variables, non_trainable_variables, inputs):
        return inputs, non_trainable_variables


def step_twice():
    made = mt.train_step(losses, optax.sgd(0.1), devices=2)
    state = made.init(W)
    made(state, X)
    made(state, X)


def step_of_another(given, **options):
    state = mt.train_step(losses, given, devices=2, **options).init(W)
    mt.train_step(losses, optax.adam(0.1), devices=2, **options)(state, X)


WRONG = {
    **{
        f"{name}, towers={towers}": (
            lambda optimizer=optimizer, params=params, towers=towers: step(
                fast_losses, params, X[:8], optimizer=optimizer, towers=towers
            ),
            mt.ArgumentError,
            f"the optimizer needs {needed}.*loop of your own: .*mt.value_and_grad",
        )
        for name, optimizer, params, needed in (
            ("L-BFGS", optax.lbfgs(), W, "the loss as a function .*, value_fn"),
            ("Sophia", optax.contrib.sophia(0.1), W, "the loss as a function .*, obj_fn"),
            ("SAM", OPAQUE_SAM, W, "the gradient as a function .*, grad_fn"),
            ("lookahead", LOOKAHEAD, W, "fast and slow parameters, optax.LookaheadParams"),
            ("lookahead's parameters", LOOKAHEAD, FAST_AND_SLOW, "fast and slow parameters"),
            ("an update of the user's own", WITH_PHASE, W, "more arguments, 'phase'"),
        )
        for towers in (None, 4)
    },
    **{
        f"differential privacy, towers={towers}": (
            lambda params=params, towers=towers: step(
                lambda params, x: fast_losses(params["w"], x),
                params,
                X[:8],
                optimizer=optax.contrib.differentially_private_aggregate(1.0, 0.1, 0),
                towers=towers,
            ),
            mt.ArgumentError,
            "needs the gradient of every row.* gives it their mean.*mt.make_parallel",
        )
        # One leaf: its first axis would pass for the rows, and a wrong update would be made.
        for params, towers in (({"w": W}, 4), ({"w": W, "b": jnp.zeros((2, 2))}, None))
    },
    "a state in the place of parameters": (
        lambda: MADE.init(MADE.init(W)),
        mt.ArgumentError,
        r"params is a TrainState: .*step\.model\(state\)",
    ),
    "a training state of Flax Linen": (
        lambda: MADE.init(LINEN_STATE),
        mt.ArgumentError,
        r"params is a TrainState, which holds an optimizer.*Pass state\.params",
    ),
    "the gradient of a training state of Flax Linen": (
        lambda: mt.grad(lambda state, x: state.apply_fn(state.params["w"], x))(LINEN_STATE, X),
        mt.ArgumentError,
        r"state is a TrainState.*Pass state\.params to differentiate",
    ),
    "a training state for its parameters": (
        lambda: mt.grad(lambda w, x: x @ w.params)(MADE.init(W), X),
        mt.ArgumentError,
        r"w is a TrainState.*Pass w\.params to differentiate",
    ),
    "a module whose variables are no parameters": (
        lambda: MADE.init(Unusual()),
        mt.ArgumentError,
        r"the Unusual has no parameters.*are its nnx\.Param, or nnx\.Variable of a class that is",
    ),
    "a model of Keras": (
        lambda: MADE.init(Keras()),
        mt.ArgumentError,
        r"params is Keras, a model of Keras\. .*v\.value for v in model\.trainable_variables",
    ),
    "parameters with bytes in another order": (
        lambda: MADE.init({"w": W.astype(">f4")}),
        mt.ArgumentError,
        r"params\['w'\] has dtype >f4, whose bytes are in another order than this machine's\.",
    ),
    "parameters with a mask": (
        lambda: MADE.init(np.ma.array(W, mask=W > 0)),
        mt.ArgumentError,
        r"params is a masked array",
    ),
    "the pair that a step returns": (
        lambda: MADE((MADE.init(W), {}), X),
        mt.StateError,
        r"got the pair that a step returns: write state, metrics = step\(state, batch\)",
    ),
    "parameters in the place of a state": (
        lambda: MADE(W, X),
        mt.StateError,
        r"step\(state, batch\) got ndarray as state: .*step.init\(params\)",
    ),
    "parameters in the place of a state, for the module": (
        lambda: MADE.model(W),
        mt.StateError,
        r"step\.model\(state\) got ndarray",
    ),
    "parameters in the place of a state, for a trainer": (
        lambda: TRAINER.predict(losses, W, X, global_batch=5),
        mt.StateError,
        "the trainer got ndarray as state: .*fit or restore.* mt.predict",
    ),
    "an optimizer of NNX": (
        lambda: mt.train_step(
            losses, nnx.Optimizer(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), SGD, wrt=nnx.Param)
        ),
        mt.ArgumentError,
        r"the optimizer is Optimizer: .*optimizer\.tx",
    ),
    "one dict of gradients": (
        lambda: mt.average_gradients({"w": W}),
        mt.GradientError,
        "one dict.*one pytree per tower",
    ),
    "no gradients at all": (
        lambda: mt.average_gradients(None),
        mt.GradientError,
        "one NoneType.*one pytree per tower",
    ),
    "no optimizer": (
        lambda: mt.train_step(losses, 0.1),
        mt.ArgumentError,
        "the optimizer is 0.1.*optax.adam",
    ),
    "parameters as state": (
        lambda: mt.train_step(losses, optax.sgd(0.1))({"w": W}, X),
        mt.StateError,
        r"got dict as state.*step.init\(params\)",
    ),
    "a state used twice": (
        step_twice,
        mt.StateError,
        "overwritten it.*state, metrics = step.*jnp.copy",
    ),
    "a state with a moving average that the step keeps none of": (
        lambda: MADE(WITH_AVERAGE.init(W), X),
        mt.StateError,
        r"has a moving average.*pass ema_decay=.*state\.replace\(ema_params=None\)",
    ),
    "a state without the moving average that the step keeps": (
        lambda: WITH_AVERAGE(MADE.init(W), X),
        mt.StateError,
        r"state has none: .*state\.replace\(ema_params=state\.params\)",
    ),
    **{
        f"the state of another optimizer, {name}": (
            lambda given=given, options=options: step_of_another(given, **options),
            mt.StateError,
            r"opt_state\[0\]\.(count|mu) is missing\. .*state\.replace\(opt_state=optimizer\.init",
        )
        for name, given, options in [
            ("in whole", optax.sgd(0.1), {}),
            ("in blocks", optax.sgd(0.1, momentum=0.9), {"towers": 2, "shard_update": True}),
            ("in a chain", optax.chain(optax.clip(1.0), optax.adam(0.1)), {"towers": 2}),
        ]
    },
    "a fingerprint of text": (
        lambda: mt.fingerprint({"a": "text"}),
        TypeError,
        "'text'.*neither a number",
    ),
}


@pytest.mark.parametrize("use", WRONG)
def test_wrong_use(use):
    assert_refused(*WRONG[use])
