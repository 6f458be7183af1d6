"""One update of all stages: one norm, one decision to skip, one weight of each row."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.steps.state.replicas import check_replicas
from staged_steps import WEIGHTS, X, check, losses, make, train
from trees import assert_close


@pytest.mark.slow
@pytest.mark.parametrize("bad", [1, None])
def test_skip_nonfinite_is_decided_once_for_all_stages(bad):
    # The lie: the stage whose gradients are finite moves, the others stay.
    batches = X.copy()
    if bad is not None:
        batches[bad, 3] = np.nan
    found, metrics = check(batches=batches[:2], skip_nonfinite=True, diagnostics=True)
    assert metrics["skipped"] == (bad is not None)
    assert metrics["finite_params"].shape == (3,)
    assert int(found.step) == 2


@pytest.mark.slow
def test_skip_nonfinite_looks_at_the_state_of_every_stage():
    # The lie: squares of gradients overflow, and Adam never moves these parameters again.
    large = lambda params, batch: 1e25 * losses(params, batch)
    found, metrics = check(large, batches=X[:2], skip_nonfinite=True)
    assert metrics["skipped"] == 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found.opt_state))


class Rate(NamedTuple):
    hyperparams: dict


def _by_its_own_rate(gradients, state, params=None):
    """The first weights have a learning rate of their own, which follows their gradient."""
    rate = 0.1 / (1 + jnp.abs(gradients[0]).max())
    scaled = [-rate * gradients[0], *(-0.1 * g for g in gradients[1:])]
    return scaled, Rate({"learning_rate": rate})


@pytest.mark.slow
def test_means_and_rates_are_told_and_a_bad_step_changes_no_stage():
    # The lies: a sum of towers told as their mean; a rate that only the first stage knows; one
    # replica, or one stage, that moves in a step that is skipped.
    first = lambda params: Rate({"learning_rate": jnp.float32(0.1)})
    loss = lambda params, x: (losses(params, x).mean(), {"most": x.max(1).mean()})
    optimizer = optax.GradientTransformation(first, _by_its_own_rate)
    more = {"skip_nonfinite": True, "extra_metrics": ["gradient_norm", "learning_rate"]}
    step = make(loss, optimizer, stages=2, layout=(2, 1), towers=2, **more)
    state, metrics = step(step.init(WEIGHTS[:2]), X[0])
    total, gradients = jax.value_and_grad(lambda p: loss(p, X[0])[0])(WEIGHTS[:2])
    updates, wanted = _by_its_own_rate(gradients, None)
    norm = np.sqrt(sum((np.asarray(g) ** 2).sum() for g in gradients))
    expected = {"loss": total, "most": X[0].max(1).mean(), "gradient_norm": norm, "skipped": 0.0}
    expected |= wanted.hyperparams
    params = [w + update for w, update in zip(WEIGHTS, updates, strict=False)]
    assert_close((state.params, metrics), (params, expected), 1e-4)
    before = mt.fingerprint((state.params, state.opt_state))
    state, metrics = step(state, np.nan * X[1])
    assert metrics["skipped"] == 1
    check_replicas(state)
    assert mt.fingerprint((state.params, state.opt_state)) == before


@pytest.mark.slow
def test_bfloat16_parameters_and_clipping():
    params = [w.astype(jnp.bfloat16) for w in WEIGHTS]
    check(params=params, batches=X.astype(jnp.bfloat16), clip_norm=0.1, rtol=3e-2, ema_decay=0.9)


@pytest.mark.slow
def test_parameters_without_arrays():
    # The lie: an error of JAX about concatenating nothing, where it works without stages.
    more = {"clip_norm": 1.0, "skip_nonfinite": True, "diagnostics": True}
    more["extra_metrics"] = ["gradient_norm"]
    loss = lambda params, x: mt.cut(x).sum(1)
    _, metrics = check(loss, params={}, batches=X[:1], stages=2, devices=2, **more)
    assert metrics["gradient_norm"] == 0
    assert metrics["finite_params"].shape == (0,)


@pytest.mark.slow
def test_trap_clipping_over_stages_for_many_steps():
    # torchtitan#4312: the norm added up in another order parts from step 15 on.
    batches = np.tile(X, (34, 1, 1))
    options = {"clip_norm": 0.002, "optimizer": optax.sgd(0.1, momentum=0.9)}
    one, metrics = train(
        make(devices=1, extra_metrics=["gradient_norm"], **options), batches=batches
    )
    assert metrics["gradient_norm"] > 0.1  # so that it is clipped to the end
    assert int(one.step) == 102
    three, _ = train(make(devices=3, **options), batches=batches)
    assert mt.fingerprint(three.params) == mt.fingerprint(one.params)
    check(batches=batches[:30], **options)


@pytest.mark.slow
def test_trap_tied_weights_over_first_and_last_stage():
    """pytorch#176076, Megatron-LM#844, torchtitan#4486: counted twice in the norm, or one moves."""

    def tied(params, batch):
        h = mt.cut(jnp.tanh(batch @ params["tied"]))
        return ((h @ params["own"] @ params["tied"].T - batch) ** 2).sum(1)

    params = {"tied": WEIGHTS[0], "own": WEIGHTS[1]}
    step = make(tied, optax.sgd(1.0), stages=2, devices=2, clip_norm=0.1)
    state, _ = step(step.init(params), X[0])
    gradients = jax.grad(lambda p: tied(p, X[0]).mean())(params)
    norm = np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in gradients.values()))
    assert norm > 1
    for name, gradient in gradients.items():
        moved = state.params[name] - params[name]
        np.testing.assert_allclose(moved, -0.1 / norm * gradient, rtol=2e-4, atol=1e-6)
    assert state.params["tied"].devices() == {mt.devices(2)[0]}


@pytest.mark.slow
def test_trap_towers_with_unequal_token_counts():
    # torchtitan#1733, DeepSpeed#7773: towers with other numbers of tokens weigh alike.
    def loss(params, batch):
        mask = batch > -1
        return mt.ratio(losses(params, batch)[:, None] * mask, mask) + 0.1 * (params[0] ** 2).sum()

    state, _ = check(loss, optax.sgd(0.1), batches=(X[0], X[1]))
    one = train(make(loss, optax.sgd(0.1), devices=1), batches=(X[0], X[1]))[0]
    assert mt.fingerprint(one) == mt.fingerprint(state)
    ragged = mt.train_step(
        lambda p, b: mt.ratio(losses(p, b), b[:, 0] ** 2), optax.sgd(0.1), towers=3, stages=2,
        devices=2, global_batch=8,
    )  # fmt: skip
    state, metrics = ragged(ragged.init(WEIGHTS), X[0][:7])
    whole = lambda params: losses(params, X[0][:7]).sum() / (X[0][:7, 0] ** 2).sum()
    total, gradients = jax.value_and_grad(whole)(WEIGHTS)
    np.testing.assert_allclose(metrics["loss"], total, rtol=1e-5)
    for new, old, gradient in zip(state.params, WEIGHTS, gradients, strict=True):
        np.testing.assert_allclose((old - new) / 0.1, gradient, rtol=2e-4, atol=2e-5)


def test_a_skipped_step_keeps_the_optimizers_count_and_the_model_state():
    """Lie: what belongs to no stage is chosen by the program for something else."""

    def loss(params, x, *, model_state):
        hidden = mt.cut(jnp.tanh(x @ params[0]))
        return (hidden @ params[1]) ** 2, {}, {"n": model_state["n"] + 1}

    counting = optax.sgd(lambda count: 0.1)
    step = mt.train_step(loss, counting, devices=1, towers=1, stages=2, skip_nonfinite=True)
    params = [np.ones((3, 2), np.float32), np.ones(2, np.float32)]
    state = step.init(params, model_state={"n": np.float32(0)})
    for factor in (1, np.nan, 1):
        state, _ = step(state, np.full((2, 3), factor, np.float32))
    assert (int(state.opt_state[1].count), float(state.model_state["n"])) == (2, 2)
