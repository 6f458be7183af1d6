"""Where a state in stages is kept: with its parameter, and the layers of a stack with a stage."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.stages.chain import SPLIT
from multitower.steps.loss import LossFunction
from multitower.steps.parts import StepParts
from multitower.steps.staged.state import _side_by_side
from multitower.steps.staged.update import WholeUpdate, may_be_split
from multitower.steps.state.fields import Fields
from multitower.training.checkpoints.checkpoint import Checkpoints
from staged_steps import WEIGHTS, X, check, losses, make, train
from trees import assert_close

STACKED = {"layers": np.stack([*WEIGHTS, *WEIGHTS[::-1]]), "head": np.ones(4, np.float32)}


def scanned(params, batch):
    def layer(h, w):
        return jnp.tanh(h @ w) + h, None

    h, _ = jax.lax.scan(layer, batch, params["layers"])
    return (h @ params["head"]) ** 2


@pytest.mark.slow
def test_a_scan_over_layers_keeps_each_layer_with_its_stage(tmp_path):
    # The lie: a scan is cut, and the first stage still has all layers.
    options = {"clip_norm": 0.5, "ema_decay": 0.9, "skip_nonfinite": True, "diagnostics": True}
    state, metrics = check(scanned, params=STACKED, **options)
    assert metrics["finite_params"].shape == (2,)
    kept = [block.params for block in state.kept.parts().blocks[0]]
    assert [block[1].shape for block in kept] == [(2, 4, 4)] * 3
    found = {mt.fingerprint((state, metrics))}
    for layout in ((1, 1), (2, 2)):
        step = make(scanned, devices=4, layout=layout, **options)
        other, metrics = train(step, STACKED, X[:2])
        with Checkpoints(tmp_path / str(layout)) as checkpoints:
            checkpoints.save(2, other, {})
            other = checkpoints.restore(like=step.init(STACKED)).state
        other, metrics = step(other, X[2])
        found.add(mt.fingerprint((other, metrics)))
    assert len(found) == 1


@pytest.mark.slow
def test_a_scan_with_an_optimizer_that_looks_at_whole_leaves():
    # Its norms are over all layers: they stay together.
    state, _ = check(scanned, optax.lamb(0.05), params=STACKED)
    assert state.params["layers"].shape == (6, 4, 4)


def _keep_first(params):
    """The first weights, and numbers that no update ever changes."""
    return {"first": params, "rate": jax.tree.map(jnp.ones_like, params), "count": jnp.zeros(())}


def _pull_back(gradients, state, params):
    gradients = jax.tree.map(
        lambda g, p, first, rate: rate * (g + 0.1 * (p - first)),
        *(gradients, params, state["first"], state["rate"]),
    )
    return gradients, {**state, "count": state["count"] + 1}


def _by_ndim(tree):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)


def _by_size(tree):
    return jax.tree.map(lambda leaf: leaf.size > 20, tree)


KEEPS_FIRST = optax.GradientTransformation(_keep_first, _pull_back)


@pytest.mark.slow
def test_state_that_never_changes_is_split_with_its_stacked_parameter():
    # The lies: all layers of it in every stage, so that shapes do not fit; one stage's layers
    # pulled to the first weights of another.
    stacked = {**STACKED, "layers": STACKED["layers"][:4]}
    optimizer = optax.chain(KEEPS_FIRST, optax.sgd(0.1, momentum=0.9))
    state, _ = check(scanned, optimizer, stacked, X[:2], stages=2, devices=1, towers=2)
    np.testing.assert_array_equal(state.opt_state[0]["first"]["layers"], stacked["layers"])
    kept = state.kept.parts().blocks[0]
    assert [sorted(leaf.shape for leaf in own.opt_state.values()) for own in kept] == [
        [(2, 4, 4)] * 3,
        [(2, 4, 4)] * 3 + [(4,)] * 3,
    ]
    other, _ = train(make(scanned, optimizer, 2, 2, 2), stacked, X[:2])
    assert mt.fingerprint(other) == mt.fingerprint(state)


@pytest.mark.slow
def test_state_that_never_changes_is_where_its_parameter_is():
    # The lie: the first weights of all stages on the last one, and copied to each at every step.
    optimizer = optax.chain(
        KEEPS_FIRST, optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9)
    )
    state, _ = check(optimizer=optimizer, batches=X[:2])
    for kept in (state.opt_state[0]["first"], state.opt_state[0]["rate"]):
        assert [leaf.devices() for leaf in kept] == [{device} for device in mt.devices(3)]
    assert set(state.kept.parts().head.opt_state) == {0, 7, 8, 9}  # counts and rates
    one, _ = train(make(optimizer=optimizer, devices=1), batches=X[:2])
    assert mt.fingerprint(one) == mt.fingerprint(state)


def _size(params):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "params"), [(losses, WEIGHTS), (scanned, STACKED)])
def test_a_number_of_all_first_parameters_belongs_to_no_stage(loss, params):
    # The lie: it is made of the parameters of one stage.
    scaled = optax.GradientTransformation(
        _size, lambda gradients, size, _: (jax.tree.map(lambda g: g / size, gradients), size)
    )
    state, _ = check(loss, optax.chain(scaled, optax.sgd(1.0)), params, X[:2])
    np.testing.assert_allclose(state.opt_state[0], _size(params), rtol=1e-5)
    assert set(state.kept.parts().head.opt_state) == {0}


@pytest.mark.slow
def test_a_rate_of_one_stage_alone_is_used_as_written_there():
    # The lie: a rate that never changes and that one group has, left at its first value.
    rates = {
        "first": optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
        "rest": optax.inject_hyperparams(optax.adam)(learning_rate=0.01),
    }
    optimizer = optax.multi_transform(rates, lambda params: ["first", "rest", "rest"])

    def run(**options):
        step = make(optimizer=optimizer, **options)
        state, _ = train(step, batches=X[:1])
        inner = dict(state.opt_state.inner_states)
        kept = inner["first"].inner_state
        kept = kept._replace(hyperparams={"learning_rate": jnp.float32(0.4)})
        inner["first"] = inner["first"]._replace(inner_state=kept)
        changed = state.replace(opt_state=state.opt_state._replace(inner_states=inner))
        return step(changed, X[1])[0]

    found, one = run(stages=2, devices=2), run(stages=2, devices=1)
    assert mt.fingerprint(found) == mt.fingerprint(one)
    params, opt_state = WEIGHTS, optimizer.init(WEIGHTS)
    for n, batch in enumerate(X[:2]):
        gradients = jax.grad(lambda p, x: losses(p, x).mean())(params, batch)
        if n:
            opt_state.inner_states["first"].inner_state.hyperparams["learning_rate"] = 0.4
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
    assert_close(found.params, params, rtol=1e-4)


@pytest.mark.slow
def test_stacked_layers_in_stages_are_trained_as_by_plain_optax():
    # The lies: another stage's layers, or their first weights or squares; a cast that is made in
    # one stage alone.
    stacked = {"layers": STACKED["layers"][:4], "head": STACKED["head"], "shift": WEIGHTS[0][:1]}
    optimizer = optax.chain(KEEPS_FIRST, optax.trace(0.9), optax.scale(-0.1))

    def loss(params, batch):
        shift = params["shift"].T[:, 0]
        layer = lambda h, w: (jnp.tanh(h @ w) + h, None)
        h, _ = jax.lax.scan(layer, batch + shift, params["layers"])
        return (h @ params["head"] + shift.sum()) ** 2

    @jax.jit
    def plain(params, opt_state, average, batch):
        total, gradients = jax.value_and_grad(lambda p: loss(p, batch).mean())(params)
        norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradients)))
        gradients = jax.tree.map(lambda g: g * 0.5 / norm, gradients)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params)
        return (params, opt_state, average), {"loss": total, "gradient_norm": norm}

    step = make(
        loss, optimizer, stages=2, devices=2, towers=2, clip_norm=0.5, ema_decay=0.9,
        diagnostics=True, extra_metrics=["gradient_norm"],
    )  # fmt: skip
    state, expected = step.init(stacked), (stacked, optimizer.init(stacked), stacked)
    for batch in X[:2]:
        state, metrics = step(state, batch)
        expected, wanted = plain(*expected, batch)
        assert wanted["gradient_norm"] > 0.5
        assert metrics["finite_params"].tolist() == [True] * 3
        found = (state.params, state.opt_state, state.ema_params)
        assert_close((found, {name: metrics[name] for name in wanted}), (expected, wanted), 2e-4)
    assert [block.params[1].shape for block in state.kept.parts().blocks[0]] == [(2, 4, 4)] * 2
    assert state.opt_state[0]["first"]["shift"].devices() == state.params["shift"].devices()
    made, _ = step(step.init(lambda: jax.tree.map(jnp.positive, stacked)), X[0])
    given, _ = step(step.init(stacked), X[0])
    assert mt.fingerprint(made) == mt.fingerprint(given)


def _one_late(gradients, state, params=None):
    return state["before"], {"before": state["last"], "last": gradients}


def test_state_is_kept_with_its_parameter_whatever_it_depends_on():
    # The lies: stacks of other lengths that are all split like the first; state that depends on
    # other state alone, on the last device.
    params = {"long": jnp.zeros((4, 2)), "one": jnp.zeros(3), "short": jnp.zeros((2, 2))}
    begin = lambda params: {"before": params, "last": params}
    optimizer = optax.GradientTransformation(begin, _one_late)
    loss = LossFunction.of(losses)
    step = StepParts(loss, optimizer, None, "mean", False, False, None, "mean")
    rows = {0: {0: (0, 2), 1: (2, 4)}, 2: {0: (0, 1), 1: (1, 2)}}
    fields = Fields(jnp.int32(0), params, begin(params), None, (), None)
    homes = WholeUpdate(step, fields, ((SPLIT, 1, SPLIT), rows), jnp.float32(0)).homes
    assert homes.opt_state == (SPLIT, 1, SPLIT) * 2
    assert homes.rows_of_state == {0: rows[0], 2: rows[2], 3: rows[0], 5: rows[2]}


def _over_their_number(updates, state, params=None):
    return jax.tree.map(lambda u: u / jnp.sum(jnp.ones_like(u)), updates), state


def _beside_whole_arrays(params):
    return params["layers"] + jnp.zeros((4, 4, 4))


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (optax.adamw(0.1, mask=_by_ndim), True),
        (optax.adamw(0.1, mask=_by_size), False),
        (optax.masked(optax.adam(0.1), _by_ndim), True),
        (optax.masked(optax.adam(0.1), _by_size), False),
        (optax.sm3(0.1), False),
        (optax.adafactor(0.1, min_dim_size_to_factor=2), False),
        (optax.lamb(0.1), False),
        (optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)), False),
        (KEEPS_FIRST, True),
        (optax.GradientTransformation(lambda params: (), _over_their_number), False),
        (optax.GradientTransformation(_beside_whole_arrays, optax.sgd(0.1).update), False),
    ],
    ids=["decay by ndim", "decay by size", "by ndim", "by size", *("sm3", "adafactor", "lamb"),
         "noise", "first weights", "number", "whole arrays"],
)  # fmt: skip
def test_which_optimizers_split_stacked_parameters(optimizer, expected):
    # The lie: a trial on halves passes a mask that is another one for a stage's quarter.
    params = {"layers": jax.ShapeDtypeStruct((4, 4, 4), jnp.float32), "head": STACKED["head"]}
    rows = {1: {stage: (stage, stage + 1) for stage in range(4)}}
    assert may_be_split(optimizer, params, rows) is expected


def test_what_is_joined_from_stages_cannot_be_written_into():
    """Lie: a write is accepted, and changes a copy alone."""
    whole = _side_by_side([np.zeros(2), np.ones(2)], {0: (0, 2), 1: (2, 4)})
    with pytest.raises(ValueError, match="read-only"):
        whole[0] = 1


@pytest.mark.slow
def test_layers_of_a_loop_that_runs_backwards_come_back_in_their_order():
    """Lie: the layers of the first stage, which are the last ones, come first."""

    def loss(stack, x):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack, reverse=True)
        return h.sum(1)

    draw = np.random.default_rng(0)
    stack, x = (draw.normal(size=size).astype(np.float32) for size in ((4, 3, 3), (2, 3)))
    step = mt.train_step(loss, optax.sgd(0.1), devices=1, towers=1, stages=2)
    state, _ = step(step.init(stack), x)
    gradient = jax.jit(jax.grad(lambda stack: loss(stack, x).mean()))(stack)
    np.testing.assert_allclose(state.params, stack - 0.1 * gradient, rtol=1e-4)
