"""Training programs that are drawn at random: what nobody thought of together, in one model.

A program is a stack of layers on arrays of shape (rows, TIME, WIDTH), an end that says in which
form the loss is returned, an optimizer, a way to run it and options. `draw(7)` is the same program
everywhere.
"""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import multitower as mt

TIME, WIDTH, WORDS, LABELS = 4, 6, 11, 3

ACTIVATIONS = [jnp.tanh, jax.nn.gelu, jax.nn.relu, jax.nn.silu]

# Those that work element by element can keep a block of their state on every device.
BY_ELEMENT = {
    "sgd": lambda: optax.sgd(0.05),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(1e-2, 10), weight_decay=0.1),
    "lion": lambda: optax.lion(1e-3),
    "rmsprop": lambda: optax.rmsprop(1e-3),
    "adagrad": lambda: optax.adagrad(1e-2),
    "injected": lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=0.05, momentum=0.9),
}
BY_PARAMETER = {
    **BY_ELEMENT,
    "lamb": lambda: optax.lamb(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2),
}
OPTIMIZERS = {
    **BY_PARAMETER,
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.3), optax.adam(1e-2)),
    "in two steps": lambda: optax.MultiSteps(optax.sgd(0.05), 2),
}


def weights(numpy_rng, *shape):
    return numpy_rng.normal(0, shape[-2] ** -0.5, shape)


# ---------------------------------------------------------------- layers
#
# layer(dice, numpy_rng) -> its parameters and apply(parameters, h, context) -> h


def dense(dice, numpy_rng):
    activation = dice.choice(ACTIVATIONS)
    params = {"w": weights(numpy_rng, WIDTH, WIDTH), "b": np.zeros(WIDTH)}
    return params, lambda p, h, context: h + activation(h @ p["w"] + p["b"])


def attention(dice, numpy_rng):
    def apply(p, h, context):
        q, k, v = jnp.split(h @ p["qkv"], 3, -1)
        scores = jnp.einsum("bqd,bkd->bqk", q, k)
        return h + jax.nn.softmax(jnp.where(jnp.tri(TIME, dtype=bool), scores, -1e4)) @ v

    return {"qkv": weights(numpy_rng, WIDTH, 3 * WIDTH)}, apply


def convolution(dice, numpy_rng):
    def apply(p, h, context):
        numbers = ("NWC", "WIO", "NWC")
        mixed = jax.lax.conv_general_dilated(h, p["k"], (1,), "SAME", dimension_numbers=numbers)
        pooled = jax.lax.reduce_window(
            mixed, -jnp.inf, jax.lax.max, (1, 2, 1), (1, 1, 1), ((0, 0), (0, 1), (0, 0))
        )
        return h + pooled

    return {"k": weights(numpy_rng, 3, WIDTH, WIDTH)}, apply


def recurrence(dice, numpy_rng):
    def apply(p, h, context):
        def turn(carry, x):
            carry = jnp.tanh(carry @ p["w"] + x)
            return carry, carry

        return jax.lax.scan(turn, jnp.zeros_like(h[:, 0]), h.swapaxes(0, 1))[1].swapaxes(0, 1)

    return {"w": weights(numpy_rng, WIDTH, WIDTH)}, apply


def stacked(dice, numpy_rng):
    activation = dice.choice(ACTIVATIONS)

    def apply(p, h, context):
        layer = jax.checkpoint(lambda h, w: (h + activation(h @ w), None))
        return jax.lax.scan(layer, h, p["w"])[0]

    return {"w": weights(numpy_rng, 3, WIDTH, WIDTH)}, apply


def experts(dice, numpy_rng):
    def apply(p, h, context):
        gates = jax.nn.softmax(h @ p["gate"])
        chosen = jax.nn.one_hot(jax.lax.top_k(gates, 2)[1], 3, dtype=h.dtype).sum(-2)
        return h + jnp.einsum("bte,btd,edf->btf", gates * chosen, h, p["experts"])

    gate = weights(numpy_rng, WIDTH, 3)
    return {"gate": gate, "experts": weights(numpy_rng, 3, WIDTH, WIDTH)}, apply


def sorted_sums(dice, numpy_rng):
    apply = lambda p, h, context: jnp.cumsum(jnp.sort(h, -1), -1) * p["scale"]
    return {"scale": np.float64(0.3)}, apply


def table(dice, numpy_rng):
    def apply(p, h, context):
        return h + jnp.take(p["rows"], context.words % len(p["rows"]), axis=0)

    return {"rows": weights(numpy_rng, 5, WIDTH)}, apply


def dropout(dice, numpy_rng):
    def apply(p, h, context):
        return jnp.where(jax.random.bernoulli(context.key(), 0.8, h.shape), h / 0.8, 0)

    return {}, apply


def running_norm(dice, numpy_rng):
    """BatchNorm that divides by its running statistics: what it updates is a mean over rows."""

    def apply(p, h, context):
        mean, squares = context.statistics
        context.statistics = [
            0.9 * old + 0.1 * jax.lax.stop_gradient(now.mean((0, 1)))
            for old, now in zip(context.statistics, (h, h * h), strict=True)
        ]
        normal = (h - mean) * jax.lax.rsqrt(squares + 1e-3)
        return normal.astype(h.dtype) * p["scale"]  # model states are not cast to compute_dtype

    return {"scale": np.ones(WIDTH)}, apply


# ---------------------------------------------------------------- layers that are seldom seen


def exactly(h):
    """At least float32: linear algebra and Fourier transforms know no 16-bit floats."""
    return h.astype(jnp.promote_types(h.dtype, jnp.float32))


def solved(dice, numpy_rng):
    """Linear systems and triangular factors of each row's own."""

    def apply(p, h, context):
        rows = exactly(h)
        matrix = 5 * jnp.eye(TIME) + jnp.tanh(rows @ p["w"])
        factor = jnp.linalg.cholesky(jnp.eye(TIME) + matrix @ matrix.mT / 8)
        size = jnp.linalg.slogdet(matrix)[1][:, None, None]
        return h + (size * jnp.linalg.solve(matrix, rows) + factor @ rows / 4).astype(h.dtype)

    return {"w": weights(numpy_rng, WIDTH, TIME)}, apply


def spectral(dice, numpy_rng):
    def apply(p, h, context):
        kernel = exactly(p["real"]) + 1j * exactly(p["imaginary"])
        filtered = jnp.fft.irfft(jnp.fft.rfft(exactly(h)) * kernel, WIDTH)
        return h + filtered.astype(h.dtype)

    names = "real", "imaginary"
    return {name: numpy_rng.normal(0, 0.5, WIDTH // 2 + 1) for name in names}, apply


def associative(dice, numpy_rng):
    """A linear recurrence, as in state space models."""

    def apply(p, h, context):
        both = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
        gates = jax.nn.sigmoid(h * p["gate"])
        return jax.lax.associative_scan(both, (gates, h), axis=1, reverse=dice_says)[1]

    dice_says = dice.random() < 0.5
    return {"gate": numpy_rng.normal(size=WIDTH)}, apply


def scattered(dice, numpy_rng):
    """Adds to places that words name, some of them twice, and reads sorted places."""

    def apply(p, h, context):
        add = lambda h, word: jnp.zeros_like(h).at[word % TIME].add(h)
        order = jnp.argsort(h, axis=1)
        return jax.vmap(add)(h, context.words) * p["scale"] + jnp.take_along_axis(h, order, axis=1)

    return {"scale": np.full(1, 0.3)}, apply


def switched(dice, numpy_rng):
    """Branches that all rows take, and branches that every row has for itself."""
    branches = [jnp.tanh, jnp.sin, lambda h: 0.5 * h]

    def apply(p, h, context):
        h = jax.lax.cond(p["gate"].sum() > 0, jnp.sinh, jnp.arctan, 0.3 * h) * p["gate"]
        return jax.vmap(lambda h, word: jax.lax.switch(word % 3, branches, h))(
            h, context.words[:, 0]
        )

    return {"gate": numpy_rng.normal(size=WIDTH)}, apply


def downhill(dice, numpy_rng):
    """A step down an energy: a gradient with respect to the rows, inside of the loss."""

    def apply(p, h, context):
        energy = lambda h: (jax.nn.softplus(h @ p["w"]) * p["height"]).sum()
        return h - 0.3 * jax.grad(energy)(h)

    params = {"w": weights(numpy_rng, WIDTH, 3), "height": numpy_rng.normal(size=3)}
    return params, apply


@jax.custom_vjp
def rounded(h):
    return jnp.round(4 * h) / 4


rounded.defvjp(
    lambda h: (rounded(h), h), lambda h, gradient: (jnp.where(jnp.abs(h) < 2, gradient, 0),)
)


def quantised(dice, numpy_rng):
    """Rounding with a gradient of its own, and integers that are multiplied."""

    def apply(p, h, context):
        signs = (h + 1e-3 > 0).astype(jnp.int8)
        table = (p["w"] > 0).astype(jnp.int8)
        counts = jnp.matmul(signs, table, preferred_element_type=jnp.int32)
        return rounded(h @ p["w"]) + 0.1 * counts.astype(h.dtype)

    return {"w": weights(numpy_rng, WIDTH, WIDTH)}, apply


def low_rank(dice, numpy_rng):
    """Weights that are made of others and normalised, and a number for itself."""

    def apply(p, h, context):
        w = p["a"] @ p["b"]
        w = w * jax.lax.rsqrt((w**2).sum(0) + 1e-3) * p["scale"]
        return h + jax.lax.map(lambda row: jnp.tanh(row @ w), h)  # row after row

    a, b = weights(numpy_rng, WIDTH, 2), weights(numpy_rng, 2, WIDTH)
    return {"a": a, "b": b, "scale": np.float64(0.7)}, apply


def special(dice, numpy_rng):
    of_a_row = lambda h: jax.nn.logsumexp(h, axis=(1, 2), keepdims=True)
    functions = jax.lax.erf, jnp.expm1, jnp.log1p, jax.lax.lgamma, jnp.cbrt, of_a_row
    chosen = dice.sample(functions, 2)

    def apply(p, h, context):
        for function in chosen:
            h = h + p["scale"] * function(jnp.abs(h) + 0.1)
        return jnp.maximum(h, jax.lax.cummax(h, axis=1) * 0.5)

    return {"scale": np.full((1, WIDTH), 0.2)}, apply


def depthwise(dice, numpy_rng):
    def apply(p, h, context):
        numbers = ("NWC", "WIO", "NWC")
        alone = jax.lax.conv_general_dilated(
            h, p["k"], (1,), "SAME", dimension_numbers=numbers, feature_group_count=WIDTH
        )
        wide = jax.lax.conv_transpose(alone, p["t"], (2,), "SAME", dimension_numbers=numbers)
        return h + 0.5 * (wide[:, ::2] + wide[:, 1::2])

    return {
        "k": numpy_rng.normal(size=(3, 1, WIDTH)),
        "t": weights(numpy_rng, 2, WIDTH, WIDTH),
    }, apply


SELDOM = [
    solved, spectral, associative, scattered, switched, downhill, quantised, low_rank, special,
    depthwise,
]  # fmt: skip
STATELESS_LAYERS = [
    dense, attention, convolution, recurrence, stacked, experts, sorted_sums, table, *SELDOM,
]  # fmt: skip
LAYERS = [*STATELESS_LAYERS, dropout, running_norm]


class Context:
    """What layers get beside the parameters: words, a key of their own, running statistics."""

    def __init__(self, words, rng=None, statistics=None):
        self.words, self.statistics = words, statistics
        self._rng, self._keys = rng, 0

    def key(self):
        self._keys += 1
        return jax.random.fold_in(self._rng, self._keys)


# ---------------------------------------------------------------- ends
#
# end(entropies, hits, weights) -> the loss and its metrics, or None; all have a time axis


def by_row(entropies, hits, weights):
    return entropies.mean(-1), None


def scalar(entropies, hits, weights):
    return entropies.mean(), None


def by_row_with_metrics(entropies, hits, weights):
    return entropies.mean(-1), {"accuracy": hits.mean(-1), "more": {"twice": 2 * entropies[:, 0]}}


def scalar_with_metrics(entropies, hits, weights):
    return entropies.mean(), {"accuracy": hits.mean()}


def ratio(entropies, hits, weights):
    return mt.ratio((entropies * weights).sum(-1), weights.sum(-1)), None


ENDS = [by_row, scalar, by_row_with_metrics, scalar_with_metrics, ratio]


class Program(NamedTuple):
    """A training program; `options` are those of `mt.train_step`, but for the devices."""

    number: int
    words: str  # what it is made of
    end: Callable[..., Any]
    loss: Callable[..., Any]
    params: Any
    model_state: Any  # None if the loss takes neither a model state nor a key
    make_optimizer: Callable[[], Any]
    options: dict[str, Any]
    towers: int  # without the option towers=, how many devices there should be
    rows: list[int]  # of each batch

    def __repr__(self):
        plain = int | float | str | tuple
        told = {
            name: value if isinstance(value, plain) else type(value).__name__
            for name, value in self.options.items()
        }
        return f"random program {self.number}: {self.words}, {told}, batches of {self.rows} rows"

    def batches(self):
        return [make_batch(np.random.default_rng(n), rows) for n, rows in enumerate(self.rows)]

    def step(self, devices, **options):
        options = {**self.options, **options}
        return mt.train_step(self.loss, self.make_optimizer(), devices=devices, **options)

    def begin(self, step, dtype=np.float32):
        """The first state, with parameters and running statistics of this dtype."""
        params, model_state = as_floats((self.params, self.model_state), dtype)
        rng = None if model_state is None else jax.random.key(3)
        return step.init(params, model_state=model_state, rng=rng)

    def train(self, step, state, batches):
        """Goes on with these batches; returns the state and the metrics of all calls."""
        most = self.options.get("steps_per_call")
        calls = [batches[n : n + most] for n in range(0, len(batches), most)] if most else batches
        history = []
        for call in calls:
            state, metrics = step(state, call)
            history.append(metrics)
        return state, history


def as_floats(tree, dtype):
    return jax.tree.map(lambda x: np.asarray(x, dtype), tree)


def make_batch(numpy_rng, rows):
    return {
        "words": numpy_rng.integers(0, WORDS, (rows, TIME)).astype(np.int32),
        "x": numpy_rng.normal(size=(rows, TIME, WIDTH)).astype(np.float32),
        "label": numpy_rng.integers(0, LABELS, (rows, TIME)).astype(np.int32),
    }


def weights_of(batch):
    """Of each word, for losses that are a ratio."""
    return batch["words"] > 2


def draw(number, *, layers=LAYERS, has_towers=True):
    """The program with this number, of these layers; without towers it has one per device."""
    dice, numpy_rng = random.Random(number), np.random.default_rng(number)
    towers = dice.choice([3, 4, 5, 6, 7])
    ways = WAYS if has_towers else FAST_WAYS
    optimizers, way = draw_way(dice, ways[number % len(ways)], towers)
    optimizer = dice.choice(list(optimizers))
    cuts = way.get("stages", 1) - 1
    chosen = [dice.choice(layers) for _ in range(dice.randint(max(1, cuts), 3))]
    end = dice.choice(ENDS)
    is_stateful = not {dropout, running_norm}.isdisjoint(chosen)
    params, loss = make_model(dice, numpy_rng, chosen, end, cuts, is_stateful=is_stateful)
    full = dice.choice([1, 2, 3, 5]) * towers
    # The mean of a tower's rows does not say how many they are: such programs want whole batches.
    is_by_row = "scalar" not in end.__name__ and running_norm not in chosen
    options = {**way, **draw_options(dice, way, optimizer)}
    if end in (by_row, by_row_with_metrics) and dice.random() < 0.4:
        options["reduction"] = "sum"
    return Program(
        number,
        ", ".join([*(layer.__name__ for layer in chosen), end.__name__, optimizer]),
        end,
        loss,
        params,
        [np.zeros(WIDTH), np.ones(WIDTH)] if is_stateful else None,
        optimizers[optimizer],
        {"towers": towers if has_towers else None, "global_batch": full, **options},
        towers,
        [full, full, dice.randint(1, full) if is_by_row else full, full],
    )


def make_model(dice, numpy_rng, layers, end, cuts, *, is_stateful):
    """Parameters, and the loss; marks where stages are cut stand behind the first layers."""
    made = [layer(dice, numpy_rng) for layer in layers]
    params = {
        "embed": weights(numpy_rng, WORDS, WIDTH),
        "layers": [p for p, _ in made],
        "out": weights(numpy_rng, WIDTH, LABELS),
    }

    def run(params, batch, context):
        dtype = params["out"].dtype
        h = params["embed"][batch["words"]] + batch["x"].astype(dtype)
        for number, ((_, apply), p) in enumerate(zip(made, params["layers"], strict=True)):
            h = apply(p, h, context)
            h = mt.cut(h) if number < cuts else h
        logits, labels = h @ params["out"], batch["label"]
        entropies = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        hits = (logits.argmax(-1) == labels).astype(dtype)
        return end(entropies, hits, weights_of(batch).astype(dtype))

    def loss(params, batch):
        loss, metrics = run(params, batch, Context(batch["words"]))
        return loss if metrics is None else (loss, metrics)

    def stateful_loss(params, batch, *, rng, model_state):
        context = Context(batch["words"], rng, model_state)
        loss, metrics = run(params, batch, context)
        return loss, metrics or {}, context.statistics

    return params, stateful_loss if is_stateful else loss


# ---------------------------------------------------------------- ways to run, and options


def staleness_rate(staleness):
    return 1 / (1 + staleness)


WAYS = ["local", "blocks", "stages", "rotation", "whole"]
FAST_WAYS = ["whole", "split update", "split parameters", "calls"]


def draw_way(dice, way, towers):
    """Which optimizers work with a way to run, and the options that ask for it."""
    if way == "blocks":
        return BY_ELEMENT, {"shard_update": True}
    if way == "stages":
        return BY_PARAMETER, {
            "stages": dice.choice([1, 2, 3]),
            "interleave": dice.random() < 0.5,
            "remat": dice.random() < 0.5,
        }
    if way == "local":
        way = {
            "sync_every": dice.choice([1, 2, 3]),
            "local_state": dice.choice(["keep", "average"]),
        }
        way |= {"outer_optimizer": optax.sgd(1.0)} if dice.random() < 0.5 else {}
        way |= {"steps_per_call": 2} if dice.random() < 0.5 else {}
        return OPTIMIZERS, way
    if way == "rotation":
        groups = dice.choice([n for n in range(1, towers + 1) if towers % n == 0])
        way = {"updates": "asynchronous", "max_staleness": groups - 1}
        way |= {"stale_scale": staleness_rate} if dice.random() < 0.3 else {}
        if dice.random() < 0.3:
            return {"injected": OPTIMIZERS["injected"]}, {**way, "momentum_correction": True}
        return OPTIMIZERS, way
    return OPTIMIZERS, {
        "whole": {},
        "split update": {"shard_update": True},
        "split parameters": {"shard_params": True},
        "calls": {"steps_per_call": 2},
    }[way]


def draw_options(dice, way, optimizer):
    """Options that go with every way to run, or with this one."""
    chances = {
        "ema_decay": (0.4, 0.9),
        "diagnostics": (0.3, True),
        "skip_nonfinite": (0.0 if "shard_update" in way else 0.3, True),
        "clip_norm": (0.2, 0.5),
        "compute_dtype": (0.2, "bfloat16"),
        "model_state_from": (0.2, "first"),
        "extra_metrics": (
            0.0 if "sync_every" in way else 0.3,
            ("gradient_norm", "learning_rate")[: 2 if optimizer == "injected" else 1],
        ),
    }
    return {name: value for name, (chance, value) in chances.items() if dice.random() < chance}
