"""What a message says to do is done here, word for word, and then it works.

The lie it would catch: "say in_axes=..." where that leads to the next error. A row is the wrong
call, the words of its message that give the advice, and the call that follows them. Warnings are
errors here.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt

X = np.arange(24, dtype=np.float32).reshape(8, 3)
Y = np.arange(8.0, dtype=np.float32)
W = np.ones(3, np.float32)
CLASSES = np.ones(5, np.float32)
# Its last bias has as many entries as the batch has rows.
TARGET = [
    {"b": np.ones(4, np.float32), "w": np.ones((3, 4), np.float32)},
    {"b": np.ones(8, np.float32), "w": np.ones((4, 8), np.float32)},
]
WITH_CLASSES = {"y": Y, "classes": CLASSES}
batch = {"x": X, "y": Y}  # a global variable, as in a notebook


def losses(params, x):
    return (x @ params) ** 2


def weighted(params, x, weights):
    return losses(params, x) * weights.sum()


def of_batch(params, batch):
    return losses(params, batch["x"])


def of_global(params):
    return losses(params, batch["x"])


def weighted_batch(params, batch, classes=None):
    return of_batch(params, batch) * (batch["classes"] if classes is None else classes).sum()


def weighted_by_two(params, batch, other):
    return weighted_batch(params, batch) * other["y"] * other["classes"].sum()


def predict(params, x):
    for layer in params:
        x = x @ layer["w"] + layer["b"]
    return x


def against(params, target, x):
    return losses(params, x) - predict(target, x).sum(-1)


def against_two(params, target, batch, other):
    return against(params, target, batch["x"]) + predict([other], batch["x"]).sum(-1) * batch["y"]


def against_batch(params, batch):
    return against(params, batch["t"], batch["x"])


def of_kind(params, batch, kind=None):
    return of_batch(params, batch) * len(kind or batch["kind"])


def of_time(params, batch):
    return losses(params, batch["x"]).mean(1) * batch["y"]


def drawn(params, key):
    return params * jax.random.normal(key, (3,))


def named(x, names):
    return x * len(names)


def with_rng(params, batch, *, rng):
    return of_batch(params, batch)


def count(params, x):
    return losses(params, x), {"hits": (x > 0).sum()}


def hits(params, x):
    return losses(params, x), {"hits": (x > 0).any(1)}


def grads(fun, *args, **options):
    return mt.value_and_grad(fun, devices=2, **options)(*args)


def parallel(fun, *args, **options):
    return mt.make_parallel(fun, devices=2, **options)(*args)


def step(loss, batch, *, extras=None, **options):
    made = mt.train_step(loss, optax.sgd(0.1), devices=2, **options)
    return made(made.init(W, **(extras or {})), batch)


def donated(*, use_result):
    x = jnp.asarray(X)
    doubled = jax.jit(lambda x: 2 * x, donate_argnums=0)(x)
    return parallel(jnp.sin, doubled if use_result else x)


def replaced():
    """The loss of each of two target networks."""

    def of_state(params, batch, *, model_state):
        return against(params, model_state, batch["x"]), {}, model_state

    made = mt.train_step(of_state, optax.sgd(0.0), devices=2)
    state = made.init(W, model_state=TARGET)
    state, first = made(state, batch)
    other = jax.tree.map(lambda leaf: 2 * leaf, TARGET)
    _, second = made(state.replace(model_state=other), batch)
    for target, found in ((TARGET, first), (other, second)):
        np.testing.assert_allclose(found["loss"], against(W, target, X).mean(), rtol=1e-5)


def sharded(**options):
    made = mt.train_step(of_batch, optax.sgd(0.1), devices=2, **options)
    return made(made.init(W), mt.shard(batch, devices=2, towers=4))


def twice(*, copies):
    made = mt.train_step(of_batch, optax.sgd(0.1), devices=2)
    state = made.init(W)
    kept = jax.tree.map(jnp.copy, state) if copies else state
    made(state, batch)
    return made(kept, batch)


def grown(**options):
    made = mt.train_step(of_batch, optax.sgd(0.1), devices=2, **options)
    state, _ = made(made.init(W), {"x": X[:6]})
    return made(state, {"x": X})


def with_two_states(params, x, seen, other):  # one row in each, as BatchNorm of Haiku keeps
    return losses(params, x + seen["mean"] + other["mean"])


def with_unlabelled(params, batch):
    unlabelled = losses(params, batch["more"].reshape(-1, 3)).reshape(len(batch["x"]), -1)
    return losses(params, batch["x"]) + unlabelled.mean(1)


MORE = np.ones((16, 3), np.float32)
mean = lambda params, x: losses(params, x).mean()
SEEN = {"mean": np.zeros((1, 3), np.float32), "var": np.ones((1, 3), np.float32)}
ADVICE = {
    "rows differ": (
        lambda: grads(weighted, W, X, CLASSES),
        "weights has 5 rows and x has 8: all split arrays need the same number of rows. If every "
        "tower needs the whole of weights: in_axes=(None, 0, None).",
        lambda: grads(weighted, W, X, CLASSES, in_axes=(None, 0, None)),
    ),
    "rows differ, inside an argument": (
        lambda: grads(weighted_batch, W, {**batch, "classes": CLASSES}),
        "whole of batch['classes']: in_axes=(None, {'classes': None, 'x': 0, 'y': 0}).",
        lambda: grads(
            weighted_batch,
            W,
            {**batch, "classes": CLASSES},
            in_axes=(None, {"classes": None, "x": 0, "y": 0}),
        ),
    ),
    "rows differ, inside two arguments": (
        lambda: grads(weighted_by_two, W, {**batch, "classes": CLASSES}, WITH_CLASSES),
        "batch['classes'] has 5 rows and batch['x'] has 8: all split arrays need the same number "
        "of rows. If every tower needs the whole of batch['classes'] and other['classes']: "
        "in_axes=(None, {'classes': None, 'x': 0, 'y': 0}, {'classes': None, 'y': 0}).",
        lambda: grads(
            weighted_by_two,
            W,
            {**batch, "classes": CLASSES},
            WITH_CLASSES,
            in_axes=(None, {"classes": None, "x": 0, "y": 0}, {"classes": None, "y": 0}),
        ),
    ),
    "rows differ, inside an argument beside rows": (
        lambda: grads(weighted, W, X, {"y": Y, "z": Y, "classes": CLASSES}),
        "whole of weights['classes']: in_axes=(None, 0, {'classes': None, 'y': 0, 'z': 0}).",
        lambda: grads(
            lambda params, x, weights: weighted(params, x, weights["classes"]),
            W,
            X,
            {"y": Y, "z": Y, "classes": CLASSES},
            in_axes=(None, 0, {"classes": None, "y": 0, "z": 0}),
        ),
    ),
    "rows differ, in a second set of weights": (
        lambda: grads(against, W, TARGET, X),
        "target[0]['b'] has 4 rows, target[0]['w'] has 3, target[1]['b'] has 8 and x has 8: all "
        "split arrays need the same number of rows. If every tower needs the whole of target: "
        "in_axes=(None, None, 0).",
        lambda: grads(against, W, TARGET, X, in_axes=(None, None, 0)),
    ),
    "rows differ, in the states of two networks": (
        lambda: grads(with_two_states, W, X, SEEN, SEEN),
        "If every tower needs the whole of seen and other: in_axes=(None, 0, None, None).",
        lambda: grads(with_two_states, W, X, SEEN, SEEN, in_axes=(None, 0, None, None)),
    ),
    "rows differ, in two arguments and a third": (
        lambda: grads(against_two, W, TARGET, {"x": X, "y": Y}, TARGET[0]),
        "the whole of target and other: in_axes=(None, None, 0, None).",
        lambda: grads(
            against_two, W, TARGET, {"x": X, "y": Y}, TARGET[0], in_axes=(None, None, 0, None)
        ),
    ),
    "rows differ, in weights inside an argument": (
        lambda: grads(against_batch, W, {"t": TARGET, "x": X}),
        "whole of batch['t']: in_axes=(None, {'t': None, 'x': 0}).",
        lambda: grads(against_batch, W, {"t": TARGET, "x": X}, in_axes=(None, {"t": None, "x": 0})),
    ),
    "rows differ, in the weights of a parallel function": (
        lambda: parallel(predict, TARGET, X),
        "whole of params: in_axes=(None, 0).",
        lambda: parallel(predict, TARGET, X, in_axes=(None, 0)),
    ),
    "rows differ, in two arrays": (
        lambda: parallel(lambda w, x: x @ w, W, X),
        "w has 3 rows and x has 8: all split arrays need the same number of rows. If every tower "
        "needs the whole of w: in_axes=(None, 0). If of x: in_axes=(0, None).",
        lambda: parallel(lambda w, x: x @ w, W, X, in_axes=(None, 0)),
    ),
    "rows differ, with several to each row of the others": (
        lambda: grads(with_unlabelled, W, {**batch, "more": MORE}),
        "If 2 rows of batch['more'] belong to each row of batch['x']: pass "
        "batch['more'].reshape(8, 2, 3).",
        lambda: grads(with_unlabelled, W, {**batch, "more": MORE.reshape(8, 2, 3)}),
    ),
    "rows differ, in an argument that is named": (
        lambda: mt.grad(weighted, devices=2)(W, X, weights=CLASSES),
        "every tower needs the whole of weights: functools.partial(weighted, weights=weights).",
        lambda: grads(functools.partial(weighted, weights=CLASSES), W, X),
    ),
    "rows differ, in a batch": (
        lambda: step(weighted_batch, {**batch, "classes": CLASSES}),
        "whole of batch['classes']: take it out of batch and let the function close over it, or,",
        lambda: step(functools.partial(weighted_batch, classes=CLASSES), batch),
    ),
    "a batch that is time-major": (
        lambda: step(of_time, {"x": np.ones((5, 8, 3), np.float32), "y": Y}),
        "If the rows of batch['x'] are on axis 1: pass np.swapaxes(batch['x'], 0, 1).",
        lambda: step(of_time, {"x": np.swapaxes(np.ones((5, 8, 3), np.float32), 0, 1), "y": Y}),
    ),
    "a target network in a batch": (
        lambda: step(against_batch, {"t": TARGET, "x": X}),
        "if it changes between steps like a target network, pass it as model_state "
        "(state.replace(model_state=...)).",
        replaced,
    ),
    "a key alone": (
        lambda: parallel(drawn, W, jax.random.key(0), in_axes=(None, 0)),
        "pass n keys, jax.random.split(key, n), and draw with jax.vmap(draw)(keys).",
        lambda: parallel(
            lambda w, keys: jax.vmap(functools.partial(drawn, w))(keys),
            W,
            jax.random.split(jax.random.key(0), 8),
            in_axes=(None, 0),
        ),
    ),
    "a batch in a global variable": (
        lambda: grads(of_global, W),
        "the name of its variable, such as in_axes={'batch': 0}.",
        lambda: grads(of_global, W, in_axes={"batch": 0}),
    ),
    "a batch in a partial": (
        lambda: grads(functools.partial(of_batch, batch=batch), W),
        "the name of its variable, such as in_axes={'batch': 0}.",
        lambda: grads(functools.partial(of_batch, batch=batch), W, in_axes={"batch": 0}),
    ),
    "another name than the partial binds": (
        lambda: grads(functools.partial(of_batch, batch=batch), W, in_axes={"rows": 0}),
        "the function closes over batch. Name a variable",
        lambda: grads(functools.partial(of_batch, batch=batch), W, in_axes={"batch": 0}),
    ),
    "a list of numbers": (
        lambda: grads(weighted, W, X, list(Y)),
        "asarray(...), to cut them into towers. If every tower needs all of them: "
        "in_axes=(None, 0, None).",
        lambda: grads(weighted, W, X, np.asarray(list(Y)), in_axes=(None, 0, None)),
    ),
    "a list of strings": (
        lambda: parallel(named, X, ["a"] * 8),
        "If every tower needs the whole of it: in_axes=(0, None).",
        lambda: parallel(named, X, ["a"] * 8, in_axes=(0, None)),
    ),
    "a string in a batch": (
        lambda: step(of_kind, {**batch, "kind": "mean"}),
        "Close over it instead, e.g. functools.partial(fn, name=value)",
        lambda: step(functools.partial(of_kind, kind="mean"), batch),
    ),
    "a masked array": (
        lambda: parallel(jnp.sin, np.ma.array(X, mask=X > 2)),
        ".filled(value), and the mask as an array of its own.",
        lambda: parallel(jnp.sin, np.ma.array(X, mask=X > 2).filled(0)),
    ),
    "bytes in another order": (
        lambda: parallel(jnp.sin, X.astype(">f4")),
        "Pass x.astype(x.dtype.newbyteorder('=')).",
        lambda: parallel(jnp.sin, X.astype(">f4").astype(X.dtype.newbyteorder("="))),
    ),
    "a donated array": (
        lambda: donated(use_result=False),
        "Pass the result of that call",
        lambda: donated(use_result=True),
    ),
    "split parameters": (
        lambda: grads(losses, W, X, in_axes=(0, 0)),
        "splits params, which is to be differentiated: parameters are shared by all towers. Put "
        "None there.",
        lambda: grads(losses, W, X, in_axes=(None, 0)),
    ),
    "integer parameters": (
        lambda: grads(losses, np.arange(3), X),
        "params has dtype int64: only floats can be differentiated. Convert it with "
        ".astype(jnp.float32)",
        lambda: grads(losses, np.arange(3).astype(jnp.float32), X),
    ),
    "a mean of ragged rows": (
        lambda: mt.grad(mean, devices=4)(W, X[:6]),
        "Return one value per example, or use 4 or 8 rows, or devices=3 (towers=3 if you",
        lambda: [
            mt.grad(losses, devices=4)(W, X[:6]),
            mt.grad(mean, devices=4)(W, X),
            mt.grad(mean, devices=3)(W, X[:6]),
        ],
    ),
    "a count beside the loss": (
        lambda: step(count, X),
        "Return one entry per row (e.g. correct = prediction == label, not their count)",
        lambda: step(hits, X),
    ),
    "a result without rows": (
        lambda: parallel(lambda x: x.shape[1] * jnp.ones(()), X),
        "or say out_axes=None for a result that does not depend on the rows.",
        lambda: parallel(lambda x: x.shape[1] * jnp.ones(()), X, out_axes=None),
    ),
    "rng missing": (
        lambda: step(with_rng, batch),
        "step.init(params, rng=jax.random.key(0)).",
        lambda: step(with_rng, batch, extras={"rng": jax.random.key(0)}),
    ),
    "rows sharded for another step": (
        sharded,
        "pass the same towers=",
        lambda: sharded(towers=4),
    ),
    "a state used twice": (
        lambda: twice(copies=False),
        "copy it first: jax.tree.map(jnp.copy, state).",
        lambda: twice(copies=True),
    ),
    "a batch larger than the first": (
        grown,
        "Pass global_batch=8 to train_step",
        lambda: grown(global_batch=8),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("use", ADVICE)
def test_advice_is_followed_and_works(use):
    wrong, advice, right = ADVICE[use]
    with pytest.raises(mt.MultitowerError) as error:
        wrong()
    assert advice in str(error.value)
    right()


@pytest.mark.parametrize(
    ("fun", "named"),
    [
        (lambda params, image: losses(params, image["raw"]), "image['raw']"),
        (lambda *args: losses(args[0], args[1]["raw"]), "argument 1['raw']"),
        (jax.jit(lambda params, image: losses(params, image["raw"])), "image['raw']"),
        (functools.partial(weighted_batch, classes=CLASSES), "batch['raw']"),
    ],
    ids=["a signature", "none", "jit", "a partial"],
)
def test_arguments_are_called_what_the_signature_calls_them(fun, named):
    # The lie: arguments[0][1]['raw'], which nobody has written.
    with pytest.raises(mt.BatchError) as error:
        grads(fun, W, {"raw": X[:0]})
    assert str(error.value).startswith(f"{named} has zero rows")


def test_warnings_point_at_the_line_that_calls():
    # The lie: a line inside of multitower, which the user has not written.
    total = lambda params, x: losses(params, x).sum()
    runs = [lambda: grads(total, W, X), lambda: step(total, X)]
    for run in runs:
        with pytest.warns(mt.MultitowerWarning, match="it is a sum over rows") as told:
            run()
        assert [one.filename for one in told] == [__file__]
