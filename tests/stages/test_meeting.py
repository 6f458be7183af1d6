"""A model in stages whose towers meet: in the last stage, in every stage, and several times in one.

The references: the same step without stages, and a loop of optax on one device, with the loss of
the whole batch, which needs no towers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend import core

import multitower as mt
from multitower.errors import OutputError
from multitower.stages.chain import make_chain
from multitower.stages.meeting.sums import without_collectives
from multitower.stages.order import in_rounds
from multitower.towers.surroundings import inside_a_tower

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(3, 8, 4)).astype(np.float32)
BATCHES = RNG.normal(size=(2, 10, 4)).astype(np.float32)
WEIGHTS = [RNG.normal(size=(4, 4)).astype(np.float32) / 2 for _ in range(3)]


def contrastive(params, batch):
    """InfoNCE over the rows of all towers: it meets in the last stage alone."""
    h = batch
    for w in params:
        h = mt.cut(h + jnp.tanh(h @ w))
    h = h / jnp.linalg.norm(h, axis=1, keepdims=True)
    rows = mt.row_index(h)
    similar = h @ mt.all_rows(h).T / 0.1
    return jax.nn.logsumexp(similar, axis=1) - similar[jnp.arange(len(rows)), rows ^ 1]


def normalized(params, batch):
    """Synchronised BatchNorm in front of every layer: it meets in every stage, twice."""
    h = batch
    for w in params:
        mean = _mean(h)
        variance = _mean((h - mean) ** 2)
        h = mt.cut(h + jnp.tanh((h - mean) / jnp.sqrt(variance + 1e-3) @ w))
    return (h**2).sum(1), {"largest": _largest(jax.lax.stop_gradient(h))}


def _mean(h):
    return _everywhere(jax.lax.pmean, h.mean(0))


def _largest(h):
    return _everywhere(jax.lax.pmax, h.max())


def _everywhere(collective, value):
    try:
        return collective(value, "towers")
    except NameError:  # outside of towers
        return value


def make(loss, optimizer=None, **options):
    given = {"towers": 4, "stages": 2, "devices": 1, **options}
    return mt.train_step(loss, optimizer or optax.adam(0.05), **given)


def train(step, params=WEIGHTS, batches=ROWS[:2]):
    state = step.init(params)
    for batch in batches:
        state, metrics = step(state, batch)
    return state, metrics


def close(found, expected, rtol=2e-4):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol / 50)


def by_hand(loss, params=WEIGHTS, batches=ROWS[:2], optimizer=None):
    """The training of the whole batch on one device."""
    optimizer = optimizer or optax.adam(0.05)
    opt_state = optimizer.init(params)
    mean = lambda params, batch: jnp.mean(jax.tree.leaves(loss(params, batch))[0])

    @jax.jit
    def update(params, opt_state, batch):
        gradients = jax.grad(mean)(params, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for batch in batches:
        params, opt_state = update(params, opt_state, batch)
    return params


def test_trap_gradients_of_stages_that_meet_are_those_of_the_whole_batch():
    # open_clip#616, lightly#1977: a negative of another tower that gets no gradient, or N times it.
    # Another lie: totals in the order of devices.
    sgd = optax.sgd(0.05)  # whose steps are as long as the gradients
    found = train(make(contrastive, sgd, devices=2, layout=(2, 1)), WEIGHTS[:1])
    close(found[0].params, by_hand(contrastive, WEIGHTS[:1], optimizer=sgd))
    assert mt.fingerprint(train(make(contrastive, sgd), WEIGHTS[:1])) == mt.fingerprint(found)


def chain_of(loss, stages):
    """The tower's program in stages, as a step makes it."""
    shapes = [*WEIGHTS, ROWS[0, :2], np.int32(0)]

    def tower(*leaves):
        found = jax.tree.leaves(loss(leaves[:3], leaves[3]))
        return found[0].mean(), found[1:]

    with inside_a_tower(2):
        closed = jax.make_jaxpr(tower, axis_env=[("towers", 4)])(*shapes)
    return make_chain(without_collectives(closed, len(shapes) - 1, 4), 3, stages)


def test_stages_are_cut_where_towers_meet():
    # The lies: a stage that waits for towers that it does not need; parameters that move.
    chain = chain_of(contrastive, 4)
    assert (chain.stage_of, chain.round_of) == ((0, 1, 2, 3, 3), (0, 0, 0, 0, 1))
    assert chain.homes == (0, 1, 2)
    (meeting,) = chain.meetings
    assert meeting.after == 3
    assert chain.answered_at(meeting) == meeting.sent

    chain = chain_of(normalized, 3)
    assert chain.homes == (0, 1, 2)
    assert [chain.stage_of[one.after] for one in chain.meetings] == [0, 0, 1, 1, 2, 2, 2]
    assert chain.round_of[-1] == 7
    assert chain.segments.name(1) == "stage 0, round 1"
    # Nobody differentiates the mean and the variance of the rows as they are, or a maximum.
    answered = [len(chain.answered_at(one)) for one in chain.meetings]
    assert answered == [0, 0, 1, 1, 1, 1, 0]


def test_short_floats_are_sent_as_long_ones():
    # The lie: sums over towers in bfloat16.
    def loss(params, batch):
        h = (batch @ params[0]).astype(jnp.bfloat16)
        return h - jax.lax.psum(h.mean(0), "towers")

    chain = chain_of(loss, 1)
    assert [chain.avals[n].dtype for one in chain.meetings for n in one.sent] == [np.float32]


@pytest.mark.parametrize("collective", [jax.lax.all_gather, jax.lax.psum])
def test_what_a_tower_sends_changes_no_number_of_another(collective):
    # The lies: 0.0 in the places of the others, where they have -0.0; NaNs of two kinds.
    closed = jax.make_jaxpr(lambda x, _: collective(x, "towers"), axis_env=[("towers", 3)])(
        np.float32(0), np.int32(0)
    )
    alone = core.jaxpr_as_fun(without_collectives(closed, 1, 3))
    (zeros,), (one,), (other,) = (
        alone(jnp.float32(x), jnp.int32(1)) for x in (-0.0, np.nan, -np.float32(np.nan))
    )
    assert np.signbit(zeros).all()
    assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize(("towers", "places"), [(1, (0, 0, 1, 1)), (3, (0, 1, 0, 1))])
def test_the_order_of_rounds(towers, places):
    # The lie: a tower that is in the next round before all have made this one.
    phases = in_rounds(towers, places, (0, 0, 1, 1))
    assert len(phases) == 3
    for kind, segments, turns in (("forward", (0, 1), phases[0]), ("backward", (1, 0), phases[2])):
        assert sorted(turns) == sorted((kind, t, s) for t in range(towers) for s in segments)
        for s in segments:
            assert [t for _, t, at in turns if at == s] == list(range(towers))
        for tower in range(towers):
            assert [s for _, t, s in turns if t == tower] == list(segments)
    assert {turn.stage for turn in phases[1]} == {2, 3}
    assert len(phases[1]) == 3 * towers


def test_rounds_come_back_in_the_opposite_order():
    # Of two rounds, as above, only one comes back: there is no order to be wrong.
    phases = in_rounds(2, (0, 0, 0), (0, 1, 2))
    assert [{turn.stage for turn in turns} for turns in phases] == [{0}, {1}, {2}, {1}, {0}]


def test_a_collective_in_a_loop_is_refused_with_the_line():
    def loss(params, batch):
        turn = lambda h, _: (jnp.tanh(h @ params[0]) - _mean(h), None)
        return (jax.lax.scan(turn, batch @ params[1], None, length=2)[0] ** 2).sum(1)

    step = make(loss)
    with pytest.raises(OutputError, match=r"psum at .* inside a loop \(scan\)"):
        step(step.init(WEIGHTS), ROWS[0])


def test_rows_that_only_fill_up_are_refused():
    step = make(contrastive)
    with pytest.raises(OutputError, match="7 rows, which do not fill 4 towers evenly"):
        step(step.init(WEIGHTS), ROWS[0][:7])


@pytest.mark.slow
def test_trap_batch_norm_of_each_tower_alone():
    """torchgpipe#35: stages whose statistics are those of a microbatch, and not of the batch."""
    options = {"devices": 2, "towers": 4}
    found, _ = train(make(normalized, **options), WEIGHTS[:2])
    close(found.params, by_hand(normalized, WEIGHTS[:2]))


def both(params, batch):
    """Meets in every stage, and once more in the last."""
    loss, metrics = normalized(params, batch)
    return loss + contrastive(params, batch), metrics


@pytest.mark.slow
def test_law_l3_with_towers_that_meet_in_every_stage():
    # The lies: totals added in the order in which replicas are done; a replica that gets none.
    options = {"stages": 3, "towers": 5}
    one = train(make(both, **options), batches=BATCHES)
    close(one, train(make(both, **options | {"stages": None}), batches=BATCHES))
    for devices, layout, interleave in ((2, (2, 1), False), (4, (2, 2), True)):
        step = make(both, devices=devices, layout=layout, interleave=interleave, **options)
        found = train(step, batches=BATCHES)
        assert mt.fingerprint(found) == mt.fingerprint(one), (devices, layout)
    close(train(make(both, remat=False, **options), batches=BATCHES), one)


def everything(params, batch):
    """The other collectives, a tied parameter that towers add up, a scan, numbers and truths."""
    layers, out = params
    number = jax.lax.axis_index("towers")
    every = lambda x: jnp.tile(x.mean(0, keepdims=True), (4, 1))
    h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), batch @ out, layers)
    scattered = jax.lax.psum_scatter(every(h), "towers", scatter_dimension=0, tiled=True)
    sent = jax.lax.ppermute(h, "towers", [(0, 1), (1, 2), (2, 3)])
    swapped = jax.lax.all_to_all(every(h), "towers", 0, 0, tiled=True)
    h = jnp.tanh(h + scattered + sent / 2 + swapped.mean(0) + number * 0.01)
    total = jax.vmap(lambda row: jax.lax.psum(row, "towers"))(h)
    loss = ((h @ jax.lax.pmean(out, "towers").T) ** 2).sum(1) + (total**2).sum(1)
    found = {"positive": jax.lax.all_gather(batch.sum() > 0, "towers").sum() / 1.0}
    return loss, {**found, "count": jax.lax.psum((batch > 0).sum(), "towers") / 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_every_collective(dtype):
    # The lies: a collective's derivative that is another's; 16-bit sums that round at every tower.
    layers = RNG.normal(size=(6, 4, 4)).astype(np.float32) / 4
    given = {"optimizer": optax.sgd(0.05), "clip_norm": 0.5, "compute_dtype": dtype}
    steps = [make(everything, devices=d, stages=s, **given) for d, s in ((2, 2), (1, 2), (1, None))]
    found, one, expected = (train(step, (layers, WEIGHTS[0]), ROWS[:2]) for step in steps)
    assert mt.fingerprint(found) == mt.fingerprint(one)
    close(found, expected, rtol=3e-4 if dtype is None else 3e-2)
