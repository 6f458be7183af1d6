"""A table of wrong uses: each has its error class, and a message that says what and what to do.

The lie each would catch: a program that goes on with something else than what was meant. The
first words of `message` name what was given, the last ones the way out.
"""

import functools
from collections import UserDict
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import scipy.sparse
from flax import nnx
from flax.training import train_state as linen_state

import multitower as mt

X = np.ones((10, 3), np.float32)
W = np.ones(3, np.float32)


SGD = optax.sgd(0.1)


def losses(w, x):
    return (x @ w) ** 2


MADE = mt.train_step(losses, SGD, devices=2)
WITH_AVERAGE = mt.train_step(losses, SGD, devices=2, ema_decay=0.9)
LINEN_STATE = linen_state.TrainState.create(apply_fn=losses, params={"w": W}, tx=SGD)
TRAINER = mt.Trainer(losses, SGD, devices=2, hooks=[])


class Tensor:
    """As those of PyTorch and TensorFlow: JAX says "is not a valid JAX type", and not which."""

    shape, ndim, dtype = X.shape, X.ndim, X.dtype

    def __array__(self, dtype=None, copy=None):
        return X


class Unusual(nnx.Module):
    """A model whose weights are Variables of another kind."""

    def __init__(self):
        self.w = nnx.Variable(jnp.ones(3))


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


def add_one(x):
    return x + 1


def grads(fun=losses, w=W, x=X, /, *, argnums=0, **options):
    return mt.value_and_grad(fun, argnums, **options)(w, x)


def counting(w, x):
    return losses(w, x), jax.lax.psum((losses(w, x) < 1).sum(), "towers")


def parallel(fn, *args, **options):
    return mt.make_parallel(fn, devices=4, **options)(*args)


def step(loss=losses, w=W, batch=X, /, *, extras=None, optimizer=None, **options):
    made = mt.train_step(loss, optimizer or optax.sgd(0.1), devices=4, **options)
    return made(made.init(w, **(extras or {})), batch)


def with_rng(w, x, *, rng):
    return losses(w, x)


def with_state(w, x, *, model_state):
    return losses(w, x), {}, model_state


def forgets_state(w, x, *, model_state):
    return losses(w, x)


def fast_losses(params, x):
    return losses(getattr(params, "fast", params), x)


def with_phase(gradients, state, params=None, *, phase):
    return gradients, state


OPAQUE_SAM = optax.contrib.sam(SGD, optax.sgd(0.05), opaque_mode=True, reset_state=False)
LOOKAHEAD = optax.lookahead(SGD, 2, 0.5)
FAST_AND_SLOW = optax.LookaheadParams.init_synced(jnp.ones(3))
WITH_PHASE = optax.GradientTransformationExtraArgs(lambda params: (), with_phase)


@dataclass
class Rows:
    x: np.ndarray


class Keras:
    """What is asked of a Keras model, which takes long to import."""

    trainable_variables = ()

    def __call__(self, inputs):
        return inputs

    def stateless_call(self, trainable_variables, non_trainable_variables, inputs):
        return inputs, non_trainable_variables


def donated():
    x = jnp.ones((8, 3))
    jax.jit(add_one, donate_argnums=0)(x)
    return x


def step_twice():
    made = mt.train_step(losses, optax.sgd(0.1), devices=2)
    state = made.init(W)
    made(state, X)
    made(state, X)


def step_of_another(given, **options):
    state = mt.train_step(losses, given, devices=2, **options).init(W)
    mt.train_step(losses, optax.adam(0.1), devices=2, **options)(state, X)


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


def step_grown():
    made = mt.train_step(losses, optax.sgd(0.1), devices=4)
    state, _ = made(made.init(W), X)
    made(state, np.ones((13, 3), np.float32))  # four towers of three rows: room for twelve


WRONG = {
    # -------------------------------------------------------- devices and towers
    "too many devices": (
        lambda: mt.devices(9),
        mt.DeviceError,
        r"devices=9, but .* has 8: cpu:0.*at most 8.*simulated_devices=9",
    ),
    "no devices": (lambda: mt.devices(0), mt.DeviceError, "devices=0.*at least one"),
    "an empty list of devices": (lambda: mt.devices([]), mt.DeviceError, r"\[\].*at least one"),
    "a device twice": (
        lambda: mt.make_parallel(add_one, devices=["cpu:1", "cpu:1"])(X),
        mt.DeviceError,
        "cpu:1 twice.*raise towers=",
    ),
    "a device that is not there": (
        lambda: mt.devices("gpu:3"),
        mt.DeviceError,
        r"no device 'gpu:3'.*it has cpu:0.*soft=True",
    ),
    "no name of a device": (lambda: mt.devices("cpu:"), mt.DeviceError, "'cpu:'.*say 'gpu'"),
    "devices=2.0": (lambda: mt.devices(2.0), mt.DeviceError, "2.0 is neither a number.*say 2"),
    "devices=True": (lambda: mt.devices(True), mt.DeviceError, "True is neither"),
    "configure too late": (
        lambda: mt.configure(simulated_devices=3),
        mt.ConfigurationError,
        r"simulated_devices=3.*too late.*before the first array.*restart the kernel",
    ),
    "half a simulated device": (
        lambda: mt.configure(simulated_devices=0),
        mt.ConfigurationError,
        "simulated_devices=0.*1 or more",
    ),
    "more than all memory": (
        lambda: mt.configure(memory_fraction=90),
        mt.ConfigurationError,
        "memory_fraction=90 .*0.9 for nine tenths",
    ),
    "a share of the memory as text": (
        lambda: mt.configure(memory_fraction="0.5"),
        mt.ConfigurationError,
        "memory_fraction='0.5' must be above 0",
    ),
    "preallocate as text": (
        lambda: mt.configure(preallocate="no"),
        mt.ConfigurationError,
        "preallocate='no' must be True or False",
    ),
    "visible devices by name": (
        lambda: mt.configure(visible_devices="gpu"),
        mt.ConfigurationError,
        "visible_devices='gpu'.*'0,1'",
    ),
    **{
        f"towers={towers}": (
            lambda towers=towers: mt.make_parallel(add_one, towers=towers),
            mt.DeviceError,
            f"towers={towers}: it must be a whole number",
        )
        for towers in (0, -1, True, 2.5)
    },
    # -------------------------------------------------------- arguments and batches
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
    # -------------------------------------------------------- what functions return
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
    # -------------------------------------------------------- optimizers
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
    # -------------------------------------------------------- steps and states
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
    "an optimizer of NNX": (
        lambda: mt.train_step(
            losses, nnx.Optimizer(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), SGD, wrt=nnx.Param)
        ),
        mt.ArgumentError,
        r"the optimizer is Optimizer: .*optimizer\.tx",
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
    "a count that towers have added up": (
        lambda: grads(counting, has_aux=True),
        mt.OutputError,
        r"a float that is .* the same in every tower, such as jax\.lax\.psum",
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
    "no optimizer": (
        lambda: mt.train_step(losses, 0.1),
        mt.ArgumentError,
        "the optimizer is 0.1.*optax.adam",
    ),
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
    "a fingerprint of text": (
        lambda: mt.fingerprint({"a": "text"}),
        TypeError,
        "'text'.*neither a number",
    ),
}


@pytest.mark.parametrize("use", WRONG)
def test_wrong_use(use):
    call, error, message = WRONG[use]
    with pytest.raises(error, match=f"(?s){message}"):
        call()


@pytest.mark.parametrize("towers", [None, 4])
def test_nothing_half_done_is_left_behind(towers):
    """Lie: a failed step spends the state, or remembers the rows of the batch that failed."""
    calls = []

    def picky(w, x):
        calls.append(1)
        if x.shape[1] != 3:
            raise KeyError("only three columns")
        return losses(w, x)

    made = mt.train_step(picky, optax.sgd(0.1), devices=2, towers=towers)
    state = made.init(W)
    for wrong in (X[:0], {"x": "text"}, np.ones((40, 4), np.float32)):
        with pytest.raises((mt.MultitowerError, KeyError)):
            made(state, wrong)
    state, metrics = made(state, X)
    assert float(metrics["loss"]) == 9.0
    assert int(state.step) == 1
    with pytest.raises(mt.BatchError, match="at most 10"):
        made(state, np.ones((13, 3), np.float32))
    state, _ = made(state, X)
    assert int(state.step) == 2


@pytest.mark.parametrize("towers", [None, 4])
def test_nan_is_kept_not_hidden(towers):
    x = X.copy()
    x[7, 1] = np.nan
    value, gradient = mt.value_and_grad(losses, devices=2, towers=towers)(W, x)
    assert np.isnan(value)
    assert np.isnan(gradient).all()
    added = mt.make_parallel(add_one, devices=2, towers=towers)(x)
    np.testing.assert_array_equal(added, x + 1)


def test_errors_are_the_builtins_that_fit():
    """Lie: `except ValueError` in a user's program stops working."""
    assert issubclass(mt.DeviceError, ValueError)
    assert issubclass(mt.BatchError, ValueError)
    assert issubclass(mt.OutputError, ValueError)
    assert issubclass(mt.GradientError, ValueError)
    assert issubclass(mt.StateError, ValueError)
    assert issubclass(mt.ArgumentError, TypeError)
    assert issubclass(mt.ConfigurationError, RuntimeError)
    every = [getattr(mt, n) for n in mt.__all__ if n.endswith("Error")]
    assert all(issubclass(error, mt.MultitowerError) for error in every)
