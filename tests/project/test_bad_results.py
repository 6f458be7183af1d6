"""A table of what a user's function must not return: losses, aux, metrics and states of models.

The lie each would catch: a mean over towers of what has none, or the result of one tower.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import multitower as mt
from wrong_uses import W, X, add_one, assert_refused, grads, losses, parallel, step


def counting(w, x):
    return losses(w, x), jax.lax.psum((losses(w, x) < 1).sum(), "towers")


def forgets_state(w, x, *, model_state):
    return losses(w, x)


WRONG = {
    "a result without rows": (
        lambda: parallel(lambda x: {"sum": x.sum()}, X),
        mt.OutputError,
        r"result\['sum'\] has shape \(\).*out_axes=None",
    ),
    "a result that lost its rows": (
        lambda: parallel(lambda x: x[:1], X),
        mt.OutputError,
        r"shape \(1, 3\) for a tower of 3 rows: axis 0.*Return something per row",
    ),
    "text among results": (
        lambda: parallel(lambda x: {"name": "a", "x": x}, X),
        mt.OutputError,
        r"result\['name'\] is str: .*arrays and numbers only",
    ),
    "text in aux": (
        lambda: mt.value_and_grad(lambda w, x: (losses(w, x), np.array(["a"])), has_aux=True)(W, X),
        mt.OutputError,
        r"aux is ndarray of <U1: ",
    ),
    "a function among metrics": (
        lambda: step(lambda w, x: (losses(w, x), {"fn": [len]})),
        mt.OutputError,
        r"metrics\['fn'\]\[0\] is builtin_function_or_method: ",
    ),
    "text as a loss": (lambda: step(lambda w, x: "a"), mt.OutputError, r"the loss is str: "),
    "out_axes of another tree": (
        lambda: parallel(add_one, X, out_axes=(0, 0)),
        mt.ArgumentError,
        r"out_axes=\(0, 0\) does not fit",
    ),
    "a scalar loss of ragged rows": (
        lambda: grads(lambda w, x: losses(w, x).mean(), devices=4),
        mt.OutputError,
        r"10 rows and a scalar loss: 10 rows do not fill 4 towers.*use 8 or 12 rows, or devices=2 "
        r"\(towers=2 if you set towers\)\.",
    ),
    "a scalar loss of rows that no number of devices divides": (
        lambda: grads(lambda w, x: losses(w, x).mean(), W, X[:7], devices=4),
        mt.OutputError,
        r"7 rows do not fill 4 towers.*use 4 or 8 rows\.",
    ),
    "a scalar loss of ragged rows in a step": (
        lambda: step(lambda w, x: losses(w, x).mean()),
        mt.OutputError,
        "use 8 or 12 rows, or devices=2",
    ),
    "a scalar metric of ragged rows": (
        lambda: step(lambda w, x: (losses(w, x), {"mean": x.mean()})),
        mt.OutputError,
        r"metrics\['mean'\] is not per example.*use 8 or 12 rows",
    ),
    "a matrix for a loss": (
        lambda: grads(lambda w, x: x),
        mt.OutputError,
        r"the loss has shape \(2, 3\) for 2 rows.*loss.mean",
    ),
    "a loss for each network of an ensemble": (
        lambda: grads(lambda w, x: jnp.stack([losses(w, x)] * 5)),
        mt.OutputError,
        r"the loss has shape \(5, 2\) for 2 rows.*e\.g\. loss\.mean\(axis=0\)\.",
    ),
    "a loss for each token of each network of an ensemble": (
        lambda: grads(lambda w, x: jnp.stack([x * w] * 5)),
        mt.OutputError,
        r"the loss has shape \(5, 2, 3\) for 2 rows.*e\.g\. loss\.mean\(axis=\(0, 2\)\)\.",
    ),
    "targets from outside beside one row per tower": (
        lambda: mt.grad(lambda w, x: x @ w - np.arange(len(X)), devices=2, towers=len(X))(W, X),
        mt.OutputError,
        r"shape \(10,\) for 1 rows.*no argument, such as targets .* make it an argument\.",
    ),
    "a complex loss": (lambda: grads(lambda w, x: x[:, 0] * 1j), mt.OutputError, "complex.*real"),
    "an integer loss": (
        lambda: step(lambda w, x: jnp.argmax(x, 1)),
        mt.OutputError,
        r"dtype int32.*astype\(jnp.float32\)",
    ),
    "a Python number as a loss of local updates": (
        lambda: step(lambda w, x: 0.0, W, X[:8], sync_every=1),
        mt.OutputError,
        "the loss is float, not an array",
    ),
    "no loss": (lambda: grads(lambda w, x: None), mt.OutputError, "the loss is NoneType"),
    "no loss in a step": (lambda: step(lambda w, x: None), mt.OutputError, "loss is NoneType"),
    "a pair without has_aux": (
        lambda: grads(lambda w, x: (losses(w, x), x)),
        mt.OutputError,
        r"the loss is tuple.*has_aux=True",
    ),
    "has_aux without a pair": (
        lambda: grads(has_aux=True),
        mt.OutputError,
        r"must return \(loss, aux\)",
    ),
    "an integer aux without rows": (
        lambda: grads(lambda w, x: (losses(w, x), (x > 0).sum()), has_aux=True),
        mt.OutputError,
        "aux has dtype int32 and no axis of rows.*not their count",
    ),
    "an aux of rows by rows": (
        lambda: grads(lambda w, x: (losses(w, x), {"gram": x @ x.T}), has_aux=True),
        mt.OutputError,
        r"aux\['gram'\]",
    ),
    "an aux of two parts, each of all rows": (
        # Laid side by side over towers, its entries would be in another order than on one device.
        lambda: grads(
            lambda w, x: (losses(w, x), {"z": jnp.concatenate([x, -x])}), W, X[:8], has_aux=True
        ),
        mt.OutputError,
        r"aux\['z'\] has shape \(2, 3\) with 1 rows and \(4, 3\).*2 entries for every row: if they "
        r"lie row by row, return \.reshape\(-1, 2, 3\)\.",
    ),
    "an aux with its rows on axis 1": (
        lambda: grads(lambda w, x: (losses(w, x), jnp.stack([x, -x])), W, X[:8], has_aux=True),
        mt.OutputError,
        r"aux has shape \(2, 1, 3\).*rows are on axis 1: jnp\.moveaxis\(\.\.\., 1, 0\) puts",
    ),
    "an aux with one entry for a group of rows": (
        # The lie: the towers' groups are one group in each, and their mean is that of them all.
        lambda: grads(
            lambda w, x: (losses(w, x), x.reshape(-1, 4, 3).mean(1)),
            W,
            np.ones((64, 3), np.float32),
            has_aux=True,
        ),
        mt.OutputError,
        r"aux has shape \(2, 3\) with 8 rows and \(4, 3\) with 16.*one entry for every 4 rows: "
        r"jnp.repeat\(\.\.\., 4, axis=0\)",
    ),
    "metrics named loss": (
        lambda: step(lambda w, x: (losses(w, x), {"loss": x[:, 0]})),
        mt.OutputError,
        "entry 'loss'.*Rename",
    ),
    "metrics named staleness": (
        lambda: step(lambda w, x: (losses(w, x), {"staleness": x[:, 0]})),
        mt.OutputError,
        "entry 'staleness'.*Rename",
    ),
    "metrics named by numbers": (
        lambda: step(lambda w, x: (losses(w, x), {0: x[:, 0], 1: x[:, 1]})),
        mt.OutputError,
        r"entry 0 \(int\): the names of metrics are strings.*into a dict of their own",
    ),
    "two metrics of one name": (
        lambda: step(lambda w, x: (losses(w, x), {"a": {"b": mt.ratio(x, 1.0)}, "a/b": x[:, 1]})),
        mt.OutputError,
        r"returned metrics\['a'\]\['b'\] and metrics\['a/b'\]: both are called 'a/b'.*Rename one",
    ),
    "metrics that are no dict": (
        lambda: step(lambda w, x: (losses(w, x), x[:, 0])),
        mt.OutputError,
        "metrics of type array: .*dict of metrics",
    ),
    "a count as metric": (
        lambda: step(lambda w, x: (losses(w, x), {"hits": (x[:, 0] > 0).sum()}), W, X[:8]),
        mt.OutputError,
        r"metrics\['hits'\] has dtype int32 and no axis of rows.*correct = prediction == label",
    ),
    "keys as metrics": (
        lambda: step(
            lambda w, x: (losses(w, x), {"k": jax.random.split(jax.random.key(0), len(x))}),
            W,
            X[:8],
        ),
        mt.OutputError,
        r"metrics\['k'\] holds PRNG keys: .*keys have no mean",
    ),
    "a metric of rows by rows": (
        lambda: step(lambda w, x: (losses(w, x), {"gram": x @ x.T}), W, X[:8]),
        mt.OutputError,
        r"metrics\['gram'\]",
    ),
    "four results of a loss": (
        lambda: step(lambda w, x: (losses(w, x), {}, 1, 2)),
        mt.OutputError,
        r"returned 4 values.*model_state",
    ),
    "an aux, and has_aux forgotten": (
        lambda: grads(lambda w, x: (losses(w, x), {}), W, X[:8]),
        mt.OutputError,
        r"the loss is tuple.*To return \(loss, aux\), pass has_aux=True",
    ),
    "has_aux, and no aux": (
        lambda: grads(losses, W, X[:8], has_aux=True),
        mt.OutputError,
        r"must return \(loss, aux\), and it returned array\. .*or drop has_aux",
    ),
    "a count that towers have added up": (
        lambda: grads(counting, has_aux=True),
        mt.OutputError,
        r"a float that is .* the same in every tower, such as jax\.lax\.psum",
    ),
    "targets that lack an axis": (
        lambda: step(lambda w, x: x @ w[:, None] - x[:, 0], W, X[:8]),
        mt.OutputError,
        r"shape \(2, 2\) for 2 rows: .*loss\.mean.*\(2, 1\) minus.*take prediction\[:, 0\]",
    ),
    "metrics of an evaluation that are no dict": (
        lambda: mt.evaluate(losses, W, X, global_batch=5, devices=1),
        mt.OutputError,
        "returned array: return a dict",
    ),
    "model_state not returned": (
        lambda: step(forgets_state, extras=dict(model_state=W)),
        mt.OutputError,
        r"must return \(loss, metrics, model_state\); it returned 1 value",
    ),
    "model_state of another dtype": (
        lambda: step(
            lambda w, x, *, model_state: (losses(w, x), {}, model_state.astype(jnp.bfloat16)),
            extras=dict(model_state=W),
        ),
        mt.OutputError,
        r"state.model_state is float32\[3\] and would become bfloat16\[3\]",
    ),
    "model_state of fewer axes": (
        lambda: step(
            lambda w, x, *, model_state: (losses(w, x), {}, 1.0), extras=dict(model_state=W)
        ),
        mt.OutputError,
        r"would become float32\[\] in the update. Keep both: return an array of the shape that",
    ),
    "model_state with the rows of a tower": (
        lambda: step(
            lambda w, x, *, model_state: (losses(w, x), {}, x),
            W,
            X[:8],
            extras=dict(model_state=X[:8]),
        ),
        mt.OutputError,
        r"float32\[8, 3\] and would become float32\[2, 3\] .* mt\.all_rows\(x\)",
    ),
    "model_state of another structure": (
        lambda: step(
            lambda w, x, *, model_state: (losses(w, x), {}, {"mean": model_state}),
            extras=dict(model_state=W),
        ),
        mt.OutputError,
        r"model_state of another structure.*given: .*returned: .*'mean'",
    ),
    "model_state of ratios": (
        lambda: step(
            lambda w, x, *, model_state: (losses(w, x), {}, mt.ratio(x.sum(1), x[:, 0])),
            extras=dict(model_state=jnp.float32(0)),
        ),
        mt.OutputError,
        r"mt.ratio in its model_state.*psum\(total.sum\(\), .towers.\) /",
    ),
}


@pytest.mark.parametrize("use", WRONG)
def test_wrong_use(use):
    assert_refused(*WRONG[use])
