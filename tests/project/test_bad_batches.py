"""A table of wrong batches and arguments, as test_bad_input.py has one of devices.

The lie each would catch: rows that towers take for something else than what was meant.
"""

from collections import UserDict
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.sparse

import multitower as mt
from wrong_uses import TRAINER, W, X, add_one, assert_refused, grads, losses, parallel, step


class Tensor:
    """As those of PyTorch and TensorFlow: JAX says "is not a valid JAX type", and not which."""

    shape, ndim, dtype = X.shape, X.ndim, X.dtype

    def __array__(self, dtype=None, copy=None):
        return X


class ForDLPack:
    """As some libraries have on GPUs: no array of NumPy, and JAX says "not a valid JAX type"."""

    shape, ndim, dtype = X.shape, X.ndim, X.dtype

    def __dlpack__(self, **options):
        return X.__dlpack__(**options)


class Dataset:
    """As that of Hugging Face: columns by name, in a format of choice."""

    def with_format(self, kind):
        return self


class Table:
    """As pandas and Polars have: no dtype for all columns, and many lines of text."""

    shape, ndim, __array__ = X.shape, X.ndim, Tensor.__array__

    def __repr__(self):
        return "   a  b\n0  1  2\n1  3  4"


@dataclass
class Rows:
    x: np.ndarray


def donated():
    x = jnp.ones((8, 3))
    jax.jit(add_one, donate_argnums=0)(x)
    return x


def step_grown():
    made = mt.train_step(losses, optax.sgd(0.1), devices=4)
    state, _ = made(made.init(W), X)
    made(state, np.ones((13, 3), np.float32))  # four towers of three rows: room for twelve


WRONG = {
    "zero rows": (
        lambda: parallel(add_one, {"x": X[:0]}),
        mt.BatchError,
        r"^x\['x'\] has zero rows.*Skip empty",
    ),
    "zero rows in a step": (lambda: step(losses, W, X[:0]), mt.BatchError, "batch has zero rows"),
    "row counts differ": (
        lambda: step(losses, W, {"x": X, "y": X[:9]}),
        mt.BatchError,
        r"batch\['y'\] has 9 rows and batch\['x'\] has 10.*whole of .*: take it out of batch",
    ),
    "nothing to split": (
        lambda: parallel(add_one, 3.0),
        mt.BatchError,
        "no array to split.*asarray",
    ),
    "a key alone": (
        lambda: step(losses, W, jax.random.key(0)),
        mt.BatchError,
        r"batch has a key and no array.*no rows.*jax.random.split\(key, n\)",
    ),
    **{
        f"a mapping that is no pytree, {name}": (
            use,
            mt.ArgumentError,
            rf"^{given} is a UserDict, which is not a pytree. Pass dict\({given}\)",
        )
        for name, given, use in (
            ("in a step", "batch", lambda: step(losses, W, UserDict(x=X))),
            ("as parameters", "w", lambda: grads(losses, UserDict(w=W))),
            ("scored", "data", lambda: mt.evaluate(losses, W, UserDict(x=X), global_batch=5)),
            ("in a run", "batch", lambda: TRAINER.fit(W, lambda _: iter([UserDict(x=X)]), steps=1)),
        )
    },
    "a dataclass that is no pytree": (
        lambda: parallel(add_one, Rows(X)),
        mt.ArgumentError,
        "^x is a Rows, which is not a pytree.*register_dataclass",
    ),
    "a string in the batch": (
        lambda: step(losses, W, {"x": X, "id": "a"}),
        mt.ArgumentError,
        r"batch\['id'\] is 'a' \(str\), a static Python value.*functools.partial",
    ),
    "an array of strings": (
        lambda: step(losses, W, {"x": X, "id": np.array(["a"] * 10)}),
        mt.ArgumentError,
        r"batch\['id'\] has dtype <U1: only numbers.*Encode",
    ),
    "a masked array": (
        lambda: parallel(add_one, np.ma.array(X, mask=X > 0)),
        mt.ArgumentError,
        r"masked array.*\.filled",
    ),
    "a tensor of another library": (
        lambda: step(losses, W, {"x": Tensor()}),
        mt.ArgumentError,
        r"batch\['x'\] is a Tensor of \w+, and JAX takes.*numpy.asarray.*collate_fn",
    ),
    "an array of another library, for DLPack": (
        lambda: step(losses, W, {"x": ForDLPack()}),
        mt.ArgumentError,
        r"batch\['x'\] is a ForDLPack of \w+, and JAX takes.*jax.numpy.from_dlpack",
    ),
    "a table of pandas": (
        lambda: step(losses, W, {"x": Table()}),
        mt.ArgumentError,
        r"^batch\['x'\] is a Table of \w+, and JAX takes arrays of NumPy.*numpy.asarray",
    ),
    "an array of objects": (
        lambda: grads(losses, W, np.array([None] * 10)),
        mt.ArgumentError,
        "has dtype object: only numbers",
    ),
    "a list of strings for rows": (
        lambda: parallel(lambda x, names: x, X, ["a"] * 10),
        mt.ArgumentError,
        r"names\[0\] is 'a' \(str\), in a list.*array of numbers.*in_axes=\(0, None\)",
    ),
    "a list of flags for rows": (
        lambda: grads(lambda w, batch: losses(w, batch["x"]), W, {"x": X, "hit": [True] * 10}),
        mt.ArgumentError,
        r"batch\['hit'\]\[0\] is True \(bool\), in a list.*in_axes=\(None, {'hit': None, 'x': 0}\)",
    ),
    "a list of lists for rows": (
        lambda: grads(lambda w, batch: w, W, {"x": X, "pairs": [[1.0, 2.0]] * 10}),
        mt.ArgumentError,
        r"batch\['pairs'\] is a list of 10 lists.*in_axes=\(None, {'pairs': None, 'x': 0}\)\.",
    ),
    "a sparse matrix of scipy": (
        lambda: grads(losses, W, scipy.sparse.csr_matrix(X)),
        mt.ArgumentError,
        r"is a csr_matrix of scipy.*toarray\(\)",
    ),
    "a flag to differentiate": (
        lambda: grads(losses, {"w": W, "on": True}),
        mt.GradientError,
        r"w\['on'\] has dtype bool: only floats",
    ),
    "a string to differentiate": (
        lambda: grads(losses, {"w": W, "kind": "linear"}),
        mt.GradientError,
        r"w\['kind'\] is 'linear' \(str\): only floats can be differentiated\. Take it out",
    ),
    "a data set of Hugging Face": (
        lambda: grads(losses, W, Dataset()),
        mt.ArgumentError,
        r"is a Dataset, as Hugging Face has.*with_format\('numpy'\)\[:\]",
    ),
    "any object": (
        lambda: parallel(lambda x, o: x, X, object()),
        mt.ArgumentError,
        r"object.*towers take arrays and numbers.*numpy.asarray",
    ),
    "a list of rows": (lambda: parallel(add_one, [1.0, 2.0]), mt.BatchError, "np.asarray of a"),
    "a donated batch used again": (
        lambda: parallel(add_one, donated()),
        mt.ArgumentError,
        "donated to a jitted call.*Pass the result",
    ),
    "too few in_axes": (
        lambda: parallel(lambda x, y: x, X, X, in_axes=(0,)),
        mt.ArgumentError,
        r"in_axes=\(0,\) has 1 entries for 2 positional",
    ),
    "in_axes of another tree": (
        lambda: parallel(lambda x: x, {"x": X}, in_axes=({"y": 0},)),
        mt.ArgumentError,
        r"in_axes=\({'y': 0},\) does not fit: .* prefix of PyTreeDef\(\({'x': \*},\)\), as",
    ),
    "in_axes as text": (
        lambda: parallel(add_one, X, in_axes="rows"),
        mt.ArgumentError,
        "in_axes.* 'rows'.*use an int",
    ),
    "no such axis": (
        lambda: parallel(add_one, X, in_axes=2),
        mt.ArgumentError,
        r"shape \(10, 3\): there is no axis 2.*\[-2, 1\].* devices is devices=",
    ),
    "argnums out of range": (
        lambda: grads(argnums=2),
        mt.ArgumentError,
        "argnums=2 needs at least 3 positional arguments, and 2 were given",
    ),
    "argnums by name": (lambda: grads(argnums="w"), mt.ArgumentError, "argnums='w'.*a position"),
    "argnums twice": (lambda: grads(argnums=(0, -2)), mt.ArgumentError, "names an argument twice"),
    "split parameters": (
        lambda: grads(in_axes=(0, 0)),
        mt.ArgumentError,
        r"splits w, which is to be differentiated.*Put None",
    ),
    "in_axes for value_and_grad of the wrong length": (
        lambda: grads(in_axes=(None, 0, 0)),
        mt.ArgumentError,
        "has 3 entries for 2",
    ),
    "integer parameters": (
        lambda: grads(losses, {"n": np.arange(3)}),
        mt.GradientError,
        r"w\['n'\] has dtype int.*astype\(jnp.float32\)",
    ),
    "integer parameters of a step": (
        lambda: step(losses, {"n": np.arange(3)}),
        mt.GradientError,
        r"params\['n'\] has dtype int",
    ),
    "text as parameters": (
        lambda: step(losses, {"w": "zeros"}),
        mt.GradientError,
        r"params\['w'\] is 'zeros' \(str\): only floats",
    ),
    "None gradients": (
        lambda: mt.average_gradients([{"w": None}]),
        mt.GradientError,
        r"tower_grads\[0\]\['w'\] is None",
    ),
    "a list of rows as data": (
        lambda: next(mt.make_batches([{"x": X, "y": 1}] * 9, global_batch=4, seed=0)),
        mt.ArgumentError,
        r"data is a list of 9 rows\..*jax\.tree\.map\(lambda \*rows: numpy\.stack\(rows\)",
    ),
    "a list of rows that the loss puts together": (
        lambda: grads(lambda w, x: jnp.stack(x).sum(1) * w.sum(), W, [np.ones(16)] * 24),
        mt.OutputError,
        r"the loss has shape \(24,\).*a list of 24 rows.*np\.stack\(rows\), \*batch",
    ),
    "batch_size of a loader": (
        lambda: mt.make_batches({"x": X}, batch_size=4, seed=0),
        mt.ArgumentError,
        "make_batches has no argument 'batch_size'.*are global_batch=",
    ),
    "batches of no size": (
        lambda: mt.make_batches({"x": X}, seed=0),
        mt.ArgumentError,
        "make_batches needs global_batch=.*such as global_batch=64",
    ),
    "rows that cannot be read": (
        lambda: mt.LazyRows(3, X),
        mt.BatchError,
        "LazyRows got ndarray for read: pass a function",
    ),
    "a first batch that is text": (
        lambda: next(mt.make_batches({"x": X}, global_batch=4, seed=0, first="2")),
        mt.BatchError,
        "first='2': it must be a whole number, 0 or more",
    ),
    "a batch larger than the first": (
        step_grown,
        mt.BatchError,
        r"13 rows.*at most 10.*global_batch=13",
    ),
    "a batch larger than global_batch": (
        lambda: mt.shard(X, devices=2, towers=2, global_batch=8),
        mt.BatchError,
        "10 rows and global_batch is 8",
    ),
    "tower rows for a step without towers": (
        lambda: step(losses, W, mt.shard(X, devices=4, towers=4)),
        mt.ArgumentError,
        "sharded for towers=4.*pass the same towers=",
    ),
    "prefetch nothing": (
        lambda: mt.prefetch([X], 0),
        mt.BatchError,
        "size=0: it must be a whole number, 1 or more, the batches that wait",
    ),
    "prefetch as text": (lambda: mt.prefetch([X], "2"), mt.BatchError, "size='2'"),
    "prefetch for devices that are not there": (
        lambda: mt.prefetch([X], devices=99),
        mt.DeviceError,
        "99",
    ),
}


@pytest.mark.parametrize("use", WRONG)
def test_wrong_use(use):
    assert_refused(*WRONG[use])
