"""sync_every with steps_per_call: the updates between two meetings are one program.

The lies: a meeting inside of the loop, or at the end of every call; towers that go on from the
parameters of another; metrics of the last step, or of one tower; a schedule that counts calls.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.steps.looped import take_apart_each
from multitower.steps.state.replicas import check_replicas

# Towers are partly full, and copies of rows count in the state: with the same bits everywhere.
pytestmark = pytest.mark.filterwarnings("ignore:the batch has .* rows, and a tower takes")

DRAW = np.random.default_rng(0)
PARAMS = {"w": DRAW.normal(size=3).astype(np.float32), "b": np.float32(0.5)}
KEPT = {"mean": np.zeros(3, np.float32), "key": jax.random.key(3), "n": np.int32(0)}
ROWS = [8, 8, 5, 8, 3, 8, 8, 8]


def batch(rows):
    x = DRAW.normal(size=(rows, 3)).astype(np.float32)
    return {"x": x, "y": x.sum(1) + DRAW.normal(size=rows).astype(np.float32)}


BATCHES = [batch(rows) for rows in ROWS]


def losses(params, batch, *, rng, model_state):
    x = jnp.where(jax.random.bernoulli(rng, 0.8, batch["x"].shape), batch["x"], 0)
    mean = 0.9 * model_state["mean"] + 0.1 * x.mean(0)
    error = ((x - model_state["mean"]) @ params["w"] + params["b"] - batch["y"]) ** 2
    kept = {"mean": mean, "key": jax.random.split(model_state["key"])[0], "n": model_state["n"] + 1}
    return error, {"errors": {"absolute": jnp.sqrt(error)}}, kept


def plain(params, batch):
    return (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2


SGD = optax.sgd(0.05, momentum=0.9)


def make(loss=losses, **options):
    where = {"devices": 2, "sync_every": 3, "global_batch": 8, **options}
    schedule = optax.linear_schedule(0.1, 0.0, 20)
    return mt.train_step(loss, optax.sgd(schedule, momentum=0.9), **where)


def start(step):
    return step.init(PARAMS, rng=jax.random.key(7), model_state=KEPT)


@pytest.fixture(scope="module")
def looped():
    return make(**RICH, steps_per_call=4)


RICH = {"ema_decay": 0.9, "clip_norm": 1.0, "diagnostics": True, "skip_nonfinite": True}


@pytest.fixture(scope="module")
def single():
    """The same a step at a time, by one program for each tower."""
    return make(**RICH)


def by_step(step, batches):
    state, history = start(step), []
    for rows in batches:
        state, metrics = step(state, rows)
        history.append(jax.device_get(metrics))
    return state, jax.tree.map(lambda *values: np.stack(values), *history)


def by_call(step, state, batches, sizes):
    history, first = [], 0
    for size in sizes:
        state, metrics = step(state, batches[first : first + size])
        history.append(jax.device_get(metrics))
        first += size
    return state, jax.tree.map(lambda *values: np.concatenate(values), *history)


def assert_close(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def fields_of(state):
    return {name: getattr(state, name) for name in (*WHOLE, "local")}


WHOLE = ("step", "params", "opt_state", "ema_params", "model_state", "rng")


@pytest.mark.slow
def test_it_is_one_step_a_call(looped, single):
    """Meetings after steps 3 and 6, inside of the calls; ragged batches and short calls."""
    wanted, metrics = by_step(single, BATCHES)
    state, found = by_call(looped, start(looped), BATCHES, [4, 1, 3])
    assert_close(fields_of(state), fields_of(wanted))
    assert_close(found, metrics)
    check_replicas(state)
    homes = state.local.params["w"].sharding
    assert not homes.is_fully_replicated  # a device has its own tower's alone


COLLECTIVE = re.compile(r"= (.*?) (?:all-reduce|all-gather|all-to-all|collective)[\w-]*\(")


def elements(text):
    """How many numbers the collectives of a program return."""
    shapes = re.findall(r"\w+\[([\d,]*)\]", " ".join(COLLECTIVE.findall(text)))
    return sum(np.prod([int(dim) for dim in dims.split(",") if dim], dtype=int) for dims in shapes)


@pytest.mark.slow
def test_nothing_is_sent_in_the_loop(looped):
    """Read off the compiled programs: collectives, and the bodies of loops with what they call."""
    looped(start(looped), BATCHES[:3])
    (runner,) = looped._makers.newest.runners.values()
    given = runner._feeder.feed(take_apart_each(BATCHES[:3], 4))
    sent = {}
    for meets, program in runner._programs.items():
        fields = start(looped).kept.parts().fields
        text = program.lower(fields, given, (np.int32(0), np.int32(3))).compile().as_text()
        computations = dict(re.findall(r"^%?([\w.-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S))
        inside = re.findall(r"body=%?([\w.-]+)", text)
        assert inside
        while inside:
            body = computations[inside.pop()]
            assert not COLLECTIVE.search(body)
            inside += re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.-]+)", body)
        sent[meets] = elements(text)
    # A meeting moves parameters, model state and weights; metrics are added up in any case.
    assert sent[True] - sent[False] >= 4 + 3 + 1
    assert sent[False] > 0


@pytest.mark.slow
def test_states_go_from_one_way_to_the_other(looped, single):
    """Between two meetings, in both directions."""
    wanted, _ = by_step(single, BATCHES[:5])
    state, _ = by_step(single, BATCHES[:2])
    state, _ = looped(state, BATCHES[2:4])
    state, _ = single(state, BATCHES[4])
    assert_close(fields_of(state), fields_of(wanted))
    with pytest.raises(mt.StateError, match="each of 2 towers"):
        make(**{**RICH, "devices": 1}, steps_per_call=4)(state, BATCHES[:1])


@pytest.mark.slow
def test_a_replay_in_numpy_with_metrics_that_a_loss_averages_itself():
    # The lies: a sum of the towers' means; the metric of one tower; a meeting that is left out.
    def loss(w, x):
        return (w * x - 1) ** 2, {"w": w, "x": x.mean()}

    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    step = mt.train_step(
        loss, optax.sgd(0.1), devices=2, sync_every=2, steps_per_call=4, outer_optimizer=outer
    )
    batches = [one["x"].ravel()[:8] for one in BATCHES if len(one["x"]) == 8][:5]
    state, w, own, velocity, expected = step.init(np.float32(0.5)), 0.5, [0.5] * 2, 0.0, []
    for number, x in enumerate(np.array(batches, float).reshape(5, 2, 4), start=1):
        errors = [w * rows - 1 for w, rows in zip(own, x, strict=True)]
        expected.append({"loss": np.square(errors).mean(), "w": np.mean(own), "x": x.mean()})
        own = [w - 0.2 * np.mean(e * rows) for w, e, rows in zip(own, errors, x, strict=True)]
        if number % 2 == 0:
            moved = w - np.mean(own)
            velocity = moved + 0.9 * velocity
            w -= 0.7 * (moved + 0.9 * velocity)
            own = [w] * 2
    state, found = by_call(step, state, batches, [4, 1])
    for name, values in found.items():
        wanted = [one[name] for one in expected]
        np.testing.assert_allclose(values, wanted, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(state.params, w, rtol=1e-5)
    np.testing.assert_allclose(state.local.params, own, rtol=1e-5)


@pytest.mark.slow
def test_what_is_written_into_a_state_is_that_of_every_tower():
    outcomes = []
    for options in ({}, {"steps_per_call": 2}):
        step = make(plain, **options)
        state = step.init(PARAMS)
        call = step if not options else lambda state, rows, step=step: step(state, [rows])
        state, _ = call(state, BATCHES[0])
        state.params["w"] = np.float32([1, 2, 3])
        state.local.opt_state[0].trace["b"] = np.float32([0.5, -0.5])
        state, _ = call(state, BATCHES[1])
        outcomes.append(state)
    assert_close(fields_of(outcomes[1]), fields_of(outcomes[0]))
    assert not np.allclose(outcomes[1].local.params["b"][0], outcomes[1].local.params["b"][1])


def test_a_meeting_that_is_not_finite_is_told_in_its_step():
    step = make(
        plain, sync_every=2, steps_per_call=2, outer_optimizer=optax.sgd(np.inf),
        skip_nonfinite=True,
    )  # fmt: skip
    state, metrics = step(step.init(PARAMS), BATCHES[:2])
    assert metrics["skipped"].tolist() == [0, 2]
    assert_close(state.params, PARAMS)


@pytest.mark.slow
def test_a_run_goes_on_between_two_meetings(tmp_path):
    def batches(first):
        return iter(BATCHES[first:])

    def trainer(**kept):
        how = {"devices": 2, "global_batch": 8, "sync_every": 3, "steps_per_call": 4}
        return mt.Trainer(plain, SGD, **kept, **how)

    kept = {"run_dir": tmp_path, "checkpoint_every": 2}
    wanted = trainer().fit(PARAMS, batches, steps=6)
    with pytest.warns(mt.MultitowerWarning, match="not a multiple of sync_every"):
        trainer(**kept).fit(PARAMS, batches, steps=4)
    found = trainer(**kept).fit(PARAMS, batches, steps=6, resume=True)
    assert_close(fields_of(found), fields_of(wanted))
