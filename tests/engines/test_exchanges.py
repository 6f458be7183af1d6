"""Towers that meet: collectives over the axis "towers", against JAX's own and the whole batch.

The lies: a collective that is JAX's in one way to run and another in the other way; gradients that
are N or 1/N times those of the whole batch; bits of an exchange that depend on the devices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import multitower as mt
from multitower.engines import reduction
from multitower.engines.collectives import axis_of
from multitower.engines.rounds import cut_into_rounds

TOWERS, ROWS, COLUMNS = 4, 4, 8
X = np.random.default_rng(0).normal(size=(TOWERS * ROWS, COLUMNS)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(COLUMNS, 6)).astype(np.float32)
WAYS = {
    "one tower a device": {"devices": 4},
    "same bits, 1 device": {"devices": 1, "towers": 4},
    "same bits, 2 devices": {"devices": 2, "towers": 4},
    "in jit, 2 devices": {"devices": 2, "towers": 4},
}
every_way = pytest.mark.parametrize("way", WAYS)
# On one device the programs are those of two: what the bits of both are is compared below.
OVER_DEVICES = [way for way in WAYS if way != "same bits, 1 device"]


def called(way, make, *args, **options):
    """What a function of ours finds in one of the ways to run it."""
    run = make(**WAYS[way], **options)
    return (jax.jit(run) if way.startswith("in jit") else run)(*args)


def by_row(value, x):
    """Anything as rows: all of it for each row of the tower."""
    return jnp.broadcast_to(value, (len(x), *jnp.shape(value)))


@jax.custom_jvp
def in_a_rule(x):
    return lax.pmean(jnp.sin(x), "towers")


@in_a_rule.defjvp
def _(primals, tangents):
    return in_a_rule(*primals), tangents[0]


COLLECTIVES = {
    "psum": lambda x: lax.psum(x, "towers"),
    "psum of several": lambda x: lax.psum((x, x.sum()), "towers")[1],
    "psum of flags": lambda x: lax.psum(x > 0, "towers"),
    "psum of a number": lambda x: lax.psum(1, "towers"),
    "pmean": lambda x: lax.pmean(x.mean(0), "towers"),
    "pmean in 16 bits": lambda x: lax.pmean(x.astype(jnp.bfloat16), "towers"),
    "pmax": lambda x: lax.pmax(x, "towers"),
    "pmin of integers": lambda x: lax.pmin((9 * x).astype(jnp.int8), "towers"),
    "all_gather": lambda x: lax.all_gather(x, "towers"),
    "all_gather, axis 1": lambda x: lax.all_gather(x, "towers", axis=1),
    "all_gather, tiled": lambda x: lax.all_gather(x, "towers", tiled=True),
    "all_gather, tiled, axis 1": lambda x: lax.all_gather(x, "towers", axis=1, tiled=True),
    "all_gather of flags": lambda x: lax.all_gather(x > 0, "towers"),
    "psum_scatter": lambda x: lax.psum_scatter(x, "towers"),
    "psum_scatter, tiled": lambda x: lax.psum_scatter(
        x, "towers", scatter_dimension=1, tiled=True
    ),
    "ppermute": lambda x: lax.ppermute(x, "towers", [(i, (i + 1) % 4) for i in range(4)]),
    "all_to_all": lambda x: lax.all_to_all(x, "towers", 0, 1),
    "all_to_all, tiled": lambda x: lax.all_to_all(x, "towers", 0, 1, tiled=True),
    "axis_index": lambda x: lax.axis_index("towers"),
    "one after another": lambda x: lax.pmax(
        x * lax.pmean(x, "towers") - lax.psum(x, "towers"), "towers"
    ),
    "in jit": jax.jit(jax.jit(lambda x: lax.psum(jnp.sin(x), "towers") * x)),
    "in vmap": jax.vmap(lambda row: lax.all_gather(row, "towers")),
    "along an axis of vmap, too": jax.vmap(
        lambda row: lax.pmean(row, ("rows", "towers")), axis_name="rows"
    ),
    "most along an axis of vmap": jax.vmap(
        lambda row: lax.pmax(row, ("rows", "towers")), axis_name="rows"
    ),
    "in a rule": in_a_rule,
}  # fmt: skip


# All that may be together in one program; what is in a rule may not be under jit: see below.
TOGETHER = {
    "all": [name for name in COLLECTIVES if name != "in a rule"],
    "in a rule": ["in a rule"],
    "of parts": [
        *("all_gather, axis 1", "psum_scatter", "all_to_all", "pmin of integers"),
        "most along an axis of vmap",
    ],
}


# The rows of a test's result are not those of the batch; and some need as many rows as towers.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*rows are brought together:multitower.MultitowerWarning")
@pytest.mark.filterwarnings("ignore:this function runs without a look")
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(names, id=what, marks=[pytest.mark.slow] if what == "all" else [])
        for what, names in TOGETHER.items()
    ],
)
def test_collectives_are_those_of_jax(names):
    """Against `jax.vmap` with the same axis: the same rules, written by others."""
    found_by = lambda x: {name: COLLECTIVES[name](x) for name in names}
    wanted = jax.jit(jax.vmap(found_by, axis_name="towers"))(X.reshape(TOWERS, ROWS, COLUMNS))
    rows = lambda x: {name: by_row(value, x) for name, value in found_by(x).items()}
    for way in OVER_DEVICES:
        if names == ["in a rule"] and way.startswith("in jit"):
            continue  # somebody may yet differentiate it: refused, see below
        found = called(way, functools.partial(mt.make_parallel, rows), X)
        for name in names:
            said = f"{name}, {way}"
            own = np.asarray(wanted[name])
            own = np.broadcast_to(own, (TOWERS, *own.shape[1:]))
            assert found[name].dtype == own.dtype, said
            # In the same bits 16-bit floats are added in float32 and rounded once; JAX rounds
            # every sum.
            close = 2e-2 if name == "pmean in 16 bits" else 1e-5
            np.testing.assert_allclose(
                np.asarray(found[name]).reshape(TOWERS, ROWS, *own.shape[1:]).astype(np.float32),
                np.stack([own.astype(np.float32)] * ROWS, 1),
                rtol=1e-5, atol=close, err_msg=said,
            )  # fmt: skip


# Losses of a tower over rows of all of them, and the same of the whole batch.
def scores(w, x):
    return jnp.tanh(x @ w)


def whitened(z, mean):
    return (z - mean) ** 2 * jnp.arange(1.0, 7.0)


LOSSES = {
    "pmean": (
        lambda w, x: whitened(scores(w, x), lax.pmean(scores(w, x).mean(0), "towers")).sum(1),
        lambda w, x: whitened(scores(w, x), scores(w, x).mean(0)).sum(1).mean(),
    ),
    "pmean as the loss": (
        lambda w, x: lax.pmean(scores(w, x).mean(), "towers") ** 2,
        lambda w, x: scores(w, x).mean() ** 2,
    ),
    "psum": (
        lambda w, x: jnp.sin(scores(w, x).sum(1)) * lax.psum((scores(w, x) ** 2).sum(), "towers"),
        lambda w, x: (jnp.sin(scores(w, x).sum(1)) * (scores(w, x) ** 2).sum()).mean(),
    ),
    "all_gather": (
        lambda w, x: jax.nn.logsumexp(scores(w, x) @ mt.all_rows(scores(w, x)).T, axis=1),
        lambda w, x: jax.nn.logsumexp(scores(w, x) @ scores(w, x).T, axis=1).mean(),
    ),
    "psum_scatter": (
        lambda w, x: (
            lax.psum_scatter(scores(w, x), "towers", tiled=True) ** 3
        ).sum(),
        lambda w, x: (scores(w, x).reshape(TOWERS, ROWS, -1).sum(0) ** 3).sum() / TOWERS,
    ),
    "ppermute": (
        lambda w, x: (
            scores(w, x)
            * lax.ppermute(scores(w, x), "towers", [(i, (i + 1) % 4) for i in range(4)]) ** 2
        ).sum(1),
        lambda w, x: (scores(w, x) * jnp.roll(scores(w, x), ROWS, 0) ** 2).sum(1).mean(),
    ),
    "all_to_all": (
        lambda w, x: (lax.all_to_all(scores(w, x), "towers", 0, 1, tiled=True) ** 3).sum(),
        lambda w, x: (scores(w, x) ** 3).sum() / TOWERS,
    ),
    "recomputed": (
        jax.checkpoint(
            lambda w, x: whitened(scores(w, x), lax.pmean(scores(w, x).mean(0), "towers")).sum(1)
        ),
        lambda w, x: whitened(scores(w, x), scores(w, x).mean(0)).sum(1).mean(),
    ),
}  # fmt: skip


# Losses of rows in one program, and those that are scalars in another.
KINDS = {
    "of rows": ["pmean", "psum", "all_gather", "ppermute", "recomputed"],
    "scalars": ["pmean as the loss", "psum_scatter", "all_to_all"],
}


@pytest.mark.parametrize(
    ("kind", "ways"),
    [
        ("of rows", ["one tower a device", "same bits, 1 device"]),
        pytest.param("of rows", OVER_DEVICES[1:], marks=pytest.mark.slow),
        pytest.param("scalars", OVER_DEVICES, marks=pytest.mark.slow),
    ],
    ids=["of rows", "of rows, 2 devices", "scalars"],
)
def test_trap_gradients_through_collectives_are_those_of_the_whole_batch(kind, ways):
    """open_clip#616, lightly#1977, jax#3970: N or 1/N times the gradient, and nobody noticed.

    Every loss has weights of its own, so their gradient is that of this loss alone.
    """
    assert {name for names in KINDS.values() for name in names} == set(LOSSES)
    names = KINDS[kind]

    def added(which):
        def loss(weights, x):
            own = {name: LOSSES[name][which](weights[name], x) for name in names}
            return sum(own.values()), own

        return loss

    weights = dict.fromkeys(names, W)
    (_, wanted), gradients = jax.jit(jax.value_and_grad(added(1), has_aux=True))(weights, X)
    for way in ways:
        make = functools.partial(mt.value_and_grad, added(0), has_aux=True)
        (value, own), found = called(way, make, weights, X)
        np.testing.assert_allclose(value, sum(wanted.values()), rtol=2e-5, err_msg=way)
        for name in names:
            said = f"{name}, {way}"
            np.testing.assert_allclose(
                np.mean(own[name]), wanted[name], rtol=2e-5, atol=1e-6, err_msg=said
            )
            np.testing.assert_allclose(
                found[name], gradients[name], rtol=2e-5, atol=1e-6, err_msg=said
            )


@pytest.mark.slow
def test_a_loss_may_be_differentiated_from_outside():
    """make_parallel inside jax.grad: the cotangents cross the exchange, too."""
    _, whole = LOSSES["pmean"]
    loss = LOSSES["pmean"][0]
    wanted = jax.jit(jax.grad(whole))(W, X)
    for options in ({"devices": 4}, {"devices": 2, "towers": 4}):
        run = mt.make_parallel(loss, in_axes=(None, 0), **options)
        found = jax.jit(jax.grad(lambda w, run=run: run(w, X).mean()))(W)
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-6)


# ---------------------------------------------------------------- the same bits


def contrastive(params, batch):
    z = jnp.tanh(batch @ params["in"]) @ params["out"]
    z /= jnp.linalg.norm(z, axis=1, keepdims=True) + 1e-3
    alike = z @ mt.all_rows(z).T / 0.2
    right = jnp.take_along_axis(alike, (mt.row_index(z) ^ 1)[:, None], 1)[:, 0]
    return jax.nn.logsumexp(alike, axis=1) - right


def normalised(params, batch):
    h = batch @ params["in"]
    mean = lax.pmean(h.mean(0), "towers")
    h = (h - mean) / jnp.sqrt(lax.pmean(((h - mean) ** 2).mean(0), "towers") + 1e-5)
    losses = ((jax.nn.relu(h) @ params["out"]).sum(1) - batch.sum(1)) ** 2
    return losses, {
        "mean": mean.mean(),
        "most": lax.pmax(lax.stop_gradient(losses).max(), "towers"),
    }


def advantages(params, batch):
    """A policy's loss with advantages that are normalised over the whole batch."""
    value = jnp.tanh(batch @ params["in"]).sum(1)
    gain = lax.stop_gradient(batch.sum(1) - value)
    mean = lax.pmean(gain.mean(), "towers")
    spread = jnp.sqrt(lax.pmean(((gain - mean) ** 2).mean(), "towers"))
    return -(batch @ params["in"] @ params["out"]).sum(1) * (gain - mean) / spread + value**2


L3_LOSSES = {"contrastive": contrastive, "normalised": normalised, "advantages": advantages}


def trained(loss, devices, towers, optimizer=None, **options):
    optimizer = optimizer or optax.adam(0.05)
    step = mt.train_step(loss, optimizer, towers=towers, devices=devices, **options)
    draw = np.random.default_rng(3)
    params = {
        "in": draw.normal(size=(COLUMNS, 6)).astype(np.float32),
        "out": draw.normal(size=(6, 5)).astype(np.float32),
    }
    state, found = step.init(params), []
    for _ in range(3):
        state, metrics = step(state, draw.normal(size=(2 * towers, COLUMNS)).astype(np.float32))
        found.append(metrics)
    return mt.fingerprint((state, found))


@pytest.mark.parametrize(
    ("name", "towers", "devices", "options"),
    [
        pytest.param("contrastive", 6, (1, 2, 4), {}, marks=pytest.mark.slow),
        ("advantages", 3, (1, 2), {"optimizer": optax.sgd(0.05, momentum=0.9)}),
        pytest.param(
            "advantages", 3, (1, 2), {"shard_update": True, "clip_norm": 0.5},
            marks=pytest.mark.slow,
        ),
        pytest.param("normalised", 6, (1, 4), {"ema_decay": 0.9}, marks=pytest.mark.slow),
        pytest.param("normalised", 4, (1, 3), {"shard_update": True}, marks=pytest.mark.slow),
        pytest.param("advantages", 8, (1, 8), {"skip_nonfinite": True}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_law_l3_same_bits_where_towers_meet(name, towers, devices, options):
    found = {d: trained(L3_LOSSES[name], d, towers, **options) for d in devices}
    assert len(set(found.values())) == 1, found


@pytest.mark.slow
def test_law_l3_keys_and_16_bits_cross_an_exchange():
    """A key that is drawn from before an exchange and after it; sums and moves in bfloat16."""

    def loss(params, x, *, rng):
        before, after = jax.random.split(rng)
        h = (x @ params).astype(jnp.bfloat16)
        h *= jax.random.bernoulli(before, 0.8, h.shape)
        h -= lax.pmean(h.mean(0), "towers")
        h *= jax.random.bernoulli(after, 0.8, h.shape)
        return (h @ mt.all_rows(h).T).astype(jnp.float32).sum(1)

    found = set()
    for devices in (1, 3):
        step = mt.train_step(loss, optax.adam(0.1), towers=4, devices=devices)
        state, metrics = step(step.init(W, rng=jax.random.key(1)), X)
        found.add(mt.fingerprint((state, metrics)))
    assert len(found) == 1


@pytest.mark.slow
def test_one_nan_comes_of_many():
    """Which of two an addition passes on depends on the order of its operands."""
    bits = np.array([0x7FC00001, 0x7FC00002, 0xFFC00003, 0x7F800000], np.uint32)
    found = [
        mt.make_parallel(lambda x: lax.psum(x, "towers"), towers=4, devices=devices)(
            bits.view(np.float32)
        )
        for devices in (1, 3)
    ]
    for total in found:
        np.testing.assert_array_equal(np.asarray(total).view(np.uint32), np.full(4, 0x7FC00000))


@pytest.mark.filterwarnings("ignore:this function runs without a look")
@pytest.mark.parametrize(
    "devices", [3, *(pytest.param(devices, marks=pytest.mark.slow) for devices in (1, 4))]
)
def test_negative_zeros_and_nans_arrive_as_they_are(devices):
    """A sum in place of a move would make 0.0 of -0.0."""
    x = np.array([[-0.0], [0.0], [np.nan], [-0.0]], np.float32)
    run = mt.make_parallel(
        lambda x: jnp.broadcast_to(mt.all_rows(x), (len(x), 4, 1)), towers=4, devices=devices
    )
    for row in np.asarray(run(x)):
        assert row.tobytes() == x.tobytes()
    moved = mt.make_parallel(
        lambda x: lax.ppermute(x, "towers", [(0, 3), (2, 0)]), towers=4, devices=devices
    )
    wanted = np.concatenate([x[2:3], np.zeros_like(x[:2]), x[:1]])
    assert np.asarray(moved(x)).tobytes() == wanted.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["another order", "a tower left out"])
def test_mutation_an_exchange_that_adds_in_another_way(monkeypatch, fault):
    """The tests above would see it."""
    first = trained(normalised, 4, 8)

    def one_after_another(low, high):
        if high - low == 1:
            return low
        return reduction.Sum((one_after_another(low, high - 1), high - 1))

    if fault == "another order":
        monkeypatch.setattr(reduction, "sum_tree", one_after_another)
    else:
        monkeypatch.setattr(reduction, "add_buffers", lambda left, right: list(left))
        jax.clear_caches()  # JAX knows the right addition already
    assert trained(normalised, 4, 8) != first
    jax.clear_caches()


# ---------------------------------------------------------------- rounds


def rounds_of(fn, *shapes):
    here = jax.ShapeDtypeStruct((), np.int32)
    program = jax.make_jaxpr(lambda *args: fn(*args[:-1]), axis_env=axis_of(4))(*shapes, here)
    found = cut_into_rounds(program, len(shapes), jax.tree.structure(0), final=True)
    return found and found.rounds


def test_collectives_that_do_not_need_each_other_share_a_round():
    row = jax.ShapeDtypeStruct((4,), np.float32)

    def both(x):
        return lax.pmean(x, "towers") + lax.psum(jnp.sin(x), "towers") * lax.pmax(x, "towers")

    assert len(rounds_of(both, row)) == 2
    assert len(rounds_of(lambda x: lax.psum(x * lax.psum(x, "towers"), "towers"), row)) == 3
    assert rounds_of(lambda x: x + 1, row) is None
    # A collective that nobody needs is none.
    assert len(rounds_of(lambda x: (lax.psum(x, "towers"), x)[1], row)) == 1


# ---------------------------------------------------------------- what is refused


def in_scan(x):
    return lax.fori_loop(0, 3, lambda i, total: lax.psum(total, "towers"), x)


def in_branch(x):
    return lax.cond(x[0, 0] > 0, lambda x: lax.pmean(x, "towers"), lambda x: x, x)


def in_while(x):
    grow = lambda x: x + lax.pmax(x, "towers")
    return lax.while_loop(lambda x: x.sum() < 10, grow, x)


REFUSED = {
    "scan": (in_scan, mt.OutputError, r"psum at test_exchanges.py.*a loop \(scan\).*Python for"),
    "branch": (in_branch, mt.OutputError, r"psum at test_exch.*inside a branch \(cond\).*Move it"),
    "while": (in_while, mt.OutputError, r"pmax at test_exchanges.py.*inside a loop \(while\)"),
    "groups": (
        lambda x: lax.psum(x, "towers", axis_index_groups=[[0, 1], [2, 3]]),
        mt.OutputError,
        r"axis_index_groups, and a collective between towers is for all of them. Leave it out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_towers_cannot_do_is_said(name):
    fn, error, message = REFUSED[name]
    for way in WAYS:
        with pytest.raises(error, match=message):
            called(way, functools.partial(mt.make_parallel, fn), X)


def test_trap_a_misspelt_axis_name():
    """flax#2606: one that nobody understood."""
    fn = lambda x: lax.pmean(x, "tower")
    message = r'names an axis that does not exist here .*: tower.*there is one: "towers"'
    for way in WAYS:
        with pytest.raises(mt.ArgumentError, match=message):
            called(way, functools.partial(mt.make_parallel, fn), X)
    step = mt.train_step(lambda w, x: fn(x @ w).sum(1), optax.sgd(0.1), towers=4, stages=2)
    with pytest.raises(mt.ArgumentError, match=message):
        step(step.init(W), X)


@pytest.mark.parametrize("options", [{}, {"stages": 1}], ids=["whole", "stages"])
def test_keys_are_not_sent(options):
    """Lie: XLA's words about the rank of an operand."""
    fn = lambda x: x + lax.all_gather(jax.random.key(x[0, 0].astype(int)), "towers").size
    with pytest.raises(mt.OutputError, match=r"all_gather at .* sends keys.*key_data"):
        mt.make_parallel(fn, devices=2, towers=4, **options)(X)


def test_a_collective_in_a_rule_that_may_be_needed_yet_is_refused():
    rule = COLLECTIVES["in a rule"]
    with pytest.raises(mt.OutputError, match=r"psum.*inside a function \(custom_jvp_call\)"):
        called("in jit, 2 devices", functools.partial(mt.make_parallel, rule), X)


@every_way
@pytest.mark.parametrize(
    "what", ["make_parallel", pytest.param("value_and_grad", marks=pytest.mark.slow), "train_step"]
)
def test_trap_rows_that_only_fill_up_never_meet_others(way, what):
    message = r"14 rows, which do not fill 4 towers evenly.*\(psum at .*Use 12 or 16 rows"
    loss = lambda w, x: (x @ w - lax.pmean((x @ w).mean(0), "towers")).sum(1)
    step = mt.train_step(loss, optax.sgd(0.1), **WAYS[way])
    run = {
        "make_parallel": lambda: called(
            way, functools.partial(mt.make_parallel, functools.partial(loss, W)), X[:14]
        ),
        "value_and_grad": lambda: called(
            way, functools.partial(mt.value_and_grad, loss), W, X[:14]
        ),
        "train_step": lambda: step(step.init(W), X[:14]),
    }
    with pytest.raises(mt.OutputError, match=message):
        run[what]()


@pytest.mark.slow
@pytest.mark.parametrize("towers", [4, None])
def test_a_smaller_batch_that_fills_the_towers_is_exact(towers):
    """A program made for the full batch would fill it up."""
    loss, whole = LOSSES["pmean"]
    step = mt.train_step(loss, optax.sgd(0.1), towers=towers, devices=4)
    state, _ = step(step.init(W), X)
    params = np.asarray(state.params)
    state, metrics = step(state, X[:8])
    value, gradient = jax.value_and_grad(whole)(params, X[:8])
    assert metrics["loss"] == pytest.approx(float(value), rel=1e-5)
    np.testing.assert_allclose(state.params, params - 0.1 * gradient, rtol=1e-5, atol=1e-6)
