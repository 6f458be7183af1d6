"""Bundles: a state of many small leaves travels in few arrays, and nobody can tell."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.hardware.compilations import counted_compilations
from multitower.steps import runner
from multitower.steps.local.state import LocalParts
from multitower.steps.state import bundles
from multitower.steps.state.bundles import (
    SMALL,
    Bundle,
    bundled,
    first_alone,
    opened,
    shown,
    with_leaves,
)
from multitower.steps.state.leaves import named_leaves, on_host
from multitower.steps.state.replicas import check_replicas

DRAW = np.random.default_rng(0)
FEWEST = 4  # leaves that are worth a vector, for these tests: small programs compile quickly
NAMES = [f"w{number}" for number in range(FEWEST - 1)]  # and "scale"
ROWS = [DRAW.normal(size=(6, 3)).astype(np.float32) for _ in range(4)]


@pytest.fixture(autouse=True, scope="module")
def _few_are_worth_it():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundles, "FEWEST", FEWEST)
        yield


def a_tree():
    """Leaves of all kinds, each with values of its own; dtypes take turns."""
    few = {"few": [jnp.float16(n) for n in range(FEWEST - 1)], "key": jax.random.key(3)}
    keys = {"keys": list(jax.random.split(jax.random.key(4), FEWEST)), "none": None}
    large = {"large": DRAW.normal(size=SMALL + 1), "most": DRAW.normal(size=SMALL)}
    many = {
        f"{number}": {
            "matrix": jnp.full((number % 3, 2), number, jnp.float32),  # also without elements
            "scalar": (jnp.int32(number), jnp.float32(-number)),
            "flag": jnp.array([number % 2 == 0]),
            "brain": jnp.full(2, number, jnp.bfloat16),
        }
        for number in range(FEWEST)
    }
    return few | keys | many | jax.tree.map(jnp.float32, large)


def test_a_tree_of_all_kinds_comes_back_as_it_was():
    tree = a_tree()
    (packed,) = bundled([tree])
    assert len(packed.vectors) == 4  # float32, int32, bool, bfloat16
    assert len(packed.alone) == 2 * FEWEST + 1  # few, keys, large
    for back in (shown(packed), jax.jit(opened)(packed)):
        assert jax.tree.structure(back) == jax.tree.structure(tree)
        assert jax.tree.map(lambda x: x.dtype, back) == jax.tree.map(lambda x: x.dtype, tree)
        assert mt.fingerprint(back) == mt.fingerprint(tree)
    assert shown(packed)["large"] is tree["large"]  # large ones are not copied


def test_leaves_are_replaced_where_they_lie():
    """Lie: a neighbour in the vector that gets the new value, too, or the old tree that has it."""
    tree = a_tree()
    before = mt.fingerprint(tree)
    (packed,) = bundled([tree])
    paths, leaves = zip(*jax.tree_util.tree_flatten_with_path(tree)[0], strict=True)
    names = [jax.tree_util.keystr(path) for path in paths]
    places = [names.index(name) for name in ("['1']['matrix']", "['3']['scalar'][0]", "['large']")]
    new = {place: leaves[place] + jnp.ones((), leaves[place].dtype) for place in places}
    places.append(names.index("['key']"))
    new[places[-1]] = jax.random.key(7)
    replaced = with_leaves(packed, new)
    wanted = [new.get(number, leaf) for number, leaf in enumerate(leaves)]
    assert mt.fingerprint(jax.tree.leaves(shown(replaced))) == mt.fingerprint(wanted)
    assert mt.fingerprint(shown(packed)) == before
    vectors = with_leaves(packed, {places[-1]: new[places[-1]]}).vectors
    assert all(a is b for a, b in zip(vectors, packed.vectors, strict=True))


def test_other_leaves_of_a_shape_need_no_other_program():
    """Lie: a program for every set of leaves that a user writes, in a loop that resets some."""
    tree = [jnp.full(3, number, jnp.float32) for number in range(2 * FEWEST)]
    (packed,) = bundled([tree])
    with_leaves(packed, {0: tree[1]})
    with counted_compilations() as compiled:
        for number in range(1, 2 * FEWEST):
            with_leaves(packed, {number: tree[0], 0: tree[number]})
    assert not compiled


def test_the_first_leaf_is_read_alone():
    tree = [jnp.int32(5), *[jnp.ones(2)] * FEWEST]
    (packed,) = bundled([tree])
    assert first_alone(packed) is first_alone(tree) is tree[0]
    together = [jnp.float32(number) for number in range(FEWEST)]
    assert first_alone(bundled([together])[0]) is None


@pytest.mark.slow
def test_a_state_that_is_read_inside_jit_stays_whole(two):
    """Lie: the arrays of a state for good those of the user's trace, which has ended."""
    step, given = two
    state, _ = step(jax.tree.map(jnp.copy, given), ROWS[0])
    other = jax.tree.map(jnp.copy, state)
    score = jax.jit(lambda x: x * state.params["w2"] + state.step)
    wanted = np.asarray(other.params["w2"]) + int(other.step)
    np.testing.assert_array_equal(score(jnp.ones(2)), wanted)
    assert mt.fingerprint(state) == mt.fingerprint(other)
    new, _ = step(state, ROWS[1])
    assert mt.fingerprint(new) == mt.fingerprint(step(other, ROWS[1])[0])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"sync_every": 2}, {"updates": "asynchronous"}], ids=str)
def test_a_state_with_keys_is_read_inside_jit(options):
    """Lie: it can be read there, as long as it holds no typed key."""

    def loss(params, x, *, rng, model_state):
        return (x @ params["w"]) * jax.random.uniform(rng), {}, model_state

    step = mt.train_step(loss, optax.sgd(0.1), devices=2, towers=2, **options)
    given = {"model_state": {"key": jax.random.key(2)}, "rng": jax.random.key(1)}
    state, _ = step(step.init({"w": np.ones(3, np.float32)}, **given), ROWS[0])
    seen = lambda state: (state.params["w"], state.step, state.local)
    inside = jax.jit(lambda x: (seen(state), x))(0)[0]
    assert mt.fingerprint(inside) == mt.fingerprint(seen(state))
    step(state, ROWS[1])


def test_few_leaves_travel_alone():
    tree = {"few": [jnp.float32(0)] * (FEWEST - 1), "large": [jnp.zeros(SMALL + 1)] * FEWEST}
    assert bundled([tree])[0] is tree
    assert shown(tree) is tree


def losses(params, batch, *, model_state, rng):
    """A ratio, with everything that a state may hold; the last batch has a NaN."""
    slope = sum(jnp.sum(params[name]) * (number + 1) for number, name in enumerate(NAMES))
    error = (batch * slope + params["scale"] - jax.random.uniform(rng)) ** 2
    state = {"seen": model_state["seen"] + error.mean(), "count": model_state["count"] + 1}
    return mt.ratio(error.sum(1), jnp.abs(batch).sum(1)), {}, state


def start(num_devices, **options):
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9)
    step = mt.train_step(losses, optimizer, devices=num_devices, towers=2, ema_decay=0.5, **options)
    params = {name: np.full(2, 0.01 * n, np.float32) for n, name in enumerate(NAMES)}
    params["scale"] = np.float32(0.2)
    model_state = {"seen": np.float32(0), "count": np.int32(0)}
    return step, step.init(params, model_state=model_state, rng=jax.random.key(1))


def finish(num_devices, skips):
    """A step, and its state after four: the second with another learning rate.

    The third makes no update, if it `skips` one.
    """
    step, state = start(num_devices, skip_nonfinite=skips)
    for number, rows in enumerate(ROWS):
        if number == 1:
            state.opt_state.hyperparams["learning_rate"] = jnp.float32(0.05)
        is_bad = skips and number == 2
        state, metrics = step(state, rows * np.float32(np.nan) if is_bad else rows)
        assert int(metrics.get("skipped", 0)) == is_bad
    return step, state


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)])
def skips(request):
    """Updates that may be left out choose between two values of each leaf: twice the compiling."""
    return request.param


@pytest.fixture(scope="module")
def two(skips):
    """A step on two devices, and its state at the end."""
    return finish(2, skips)


@pytest.mark.slow
def test_the_state_travels_in_few_arrays(two):
    # The lie: every leaf enters and leaves the programs, on every device.
    _, state = two
    copies = state.kept.parts()
    assert all(isinstance(copy, Bundle) for copy in copies)
    num_alone = len(jax.tree.leaves(state)) - 3 * len(NAMES)
    assert len(jax.tree.leaves(copies[0])) <= num_alone


def test_values_are_those_of_leaves_alone(two, skips, monkeypatch):
    monkeypatch.setattr(bundles, "FEWEST", 10**9)
    _, alone = finish(1, skips)
    assert not isinstance(alone.kept.parts()[0], Bundle)
    assert_close(two[1], alone)


@pytest.mark.slow
def test_bits_are_those_of_one_device(two, skips):
    assert mt.fingerprint(finish(1, skips)[1]) == mt.fingerprint(two[1])


def assert_close(one, two):
    """Two states are equal, but for rounding."""
    for (name, leaf), (other, wanted) in zip(named_leaves(one), named_leaves(two), strict=True):
        assert (name, leaf.dtype) == (other, wanted.dtype)
        np.testing.assert_allclose(on_host(leaf), on_host(wanted), 1e-5, 1e-6, err_msg=name)


def two_steps(step, state):
    """A step, and another one after a user has written into the state, whose copy is returned."""
    state, _ = step(state, ROWS[0])
    copy = jax.tree.map(jnp.copy, state)
    for name in ("w1", "scale"):
        trace = state.opt_state.inner_state[0].trace
        trace[name] = trace[name] + np.float32(1)
        state.params[name] = state.params[name] * 2
        state.ema_params[name] = state.ema_params[name] * 3
    state, _ = step(state, ROWS[1])
    return state, copy


@pytest.mark.slow
def test_blocks_travel_in_few_arrays_and_nobody_can_tell(monkeypatch):
    """Lie: a block's neighbour in the vector, or the order of towers, where a state is joined."""
    step, state = start(2, shard_update=True)
    state, before = two_steps(step, state)
    replicas, blocks = state.kept.parts()
    trees = [*[one.params for one in replicas], *blocks[0], *blocks[1]]
    assert all(isinstance(tree, Bundle) for tree in trees)
    assert int(state.step) == 2
    one, _ = two_steps(*start(1, shard_update=True))
    assert mt.fingerprint(one) == mt.fingerprint(state)
    whole, _ = two_steps(*start(1, reduction="mean"))
    assert_close(state, whole)
    # What comes from outside, such as a checkpoint, is cut again.
    resumed, _ = step(jax.tree.map(jnp.copy, before), ROWS[1])
    after = step(step(start(2, shard_update=True)[1], ROWS[0])[0], ROWS[1])[0]
    assert mt.fingerprint(resumed) == mt.fingerprint(after)
    monkeypatch.setattr(bundles, "FEWEST", 10**9)
    alone, _ = two_steps(*start(2, shard_update=True))
    assert not isinstance(alone.kept.parts().replicas[0].params, Bundle)
    assert_close(alone, state)


def steps_apart(step, state):
    """Three steps, and two more after a user has written into the state, whose copy is returned."""
    for rows in ROWS[:3]:
        state, _ = step(state, rows)
    copy = jax.tree.map(jnp.copy, state)
    state.params["w1"] = state.params["w1"] * 2
    state.ema_params["w0"] = state.ema_params["w0"] * 3
    state.model_state["seen"] = state.model_state["seen"] + np.float32(1)
    after = state
    for rows in ROWS[:2]:
        after, _ = step(after, rows)
    return after, copy


def trees_in(parts):
    """The bundles of a state with local or asynchronous updates."""
    if isinstance(parts, LocalParts):
        return [*[one.params for one in parts.replicas], *parts.towers.values()]
    versions = [copy.params for one in parts.versions for copy in one.copies]
    return [parts.home.params, parts.home.opt_state, parts.home.ema_params, *versions]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"sync_every": 2}, {"updates": "asynchronous"}], ids=str)
def test_towers_apart_travel_in_few_arrays_and_nobody_can_tell(options, monkeypatch):
    """Lie: leaves of another tower's vector, or a neighbour's place in it for what is written."""
    step, state = start(2, **options)
    firsts = trees_in(state.kept.parts())
    state, before = steps_apart(step, state)
    for tree in [*firsts, *trees_in(state.kept.parts())]:
        assert isinstance(tree, Bundle)
    assert int(state.step) == 5
    check_replicas(state)
    one, _ = steps_apart(*start(1, **options))
    assert mt.fingerprint(one) == mt.fingerprint(state)
    # What comes from outside, such as a checkpoint, is packed again, with what replaces some of it.
    names = ("params", "ema_params", "model_state")
    written = {name: dict(getattr(before, name)) for name in names}
    written["params"]["w1"] = written["params"]["w1"] * 2
    written["ema_params"]["w0"] = written["ema_params"]["w0"] * 3
    written["model_state"]["seen"] = written["model_state"]["seen"] + np.float32(1)
    resumed = before.replace(**written)
    for rows in ROWS[:2]:
        resumed, _ = step(resumed, rows)
    assert mt.fingerprint(resumed) == mt.fingerprint(state)
    monkeypatch.setattr(bundles, "FEWEST", 10**9)
    alone, _ = steps_apart(*start(1, **options))
    assert not any(isinstance(tree, Bundle) for tree in trees_in(alone.kept.parts()))
    assert_close(alone, state)


@pytest.mark.slow
def test_what_was_seen_is_neither_stale_nor_overwritten(two):
    step, given = two
    state = jax.tree.map(jnp.copy, given)
    copy = jax.tree.map(jnp.copy, given)
    state, _ = step(state, ROWS[0])
    before = {name: np.array(leaf) for name, leaf in state.params.items()}
    held = state.params
    last, (state, _) = state, step(state, ROWS[1])
    with pytest.raises(mt.StateError, match="overwritten"):
        last.params  # noqa: B018
    with pytest.raises(mt.StateError, match="overwritten"):
        step(last, ROWS[1])
    assert all(np.any(np.asarray(state.params[name]) != before[name]) for name in NAMES)
    for name in NAMES:
        np.testing.assert_array_equal(held[name], before[name])
    for rows in ROWS[:2]:  # nobody looks at this one
        copy, _ = step(copy, rows)
    assert mt.fingerprint(copy) == mt.fingerprint(state)


def test_what_a_user_writes_into_a_state_is_taken_over(two):
    step, given = two
    state, _ = step(jax.tree.map(jnp.copy, given), ROWS[0])
    other = jax.tree.map(jnp.copy, state)
    state.params["w2"] = np.full(2, 7, np.float32)
    other = other.replace(params={**other.params, "w2": jnp.full(2, 7, jnp.float32)})
    state, _ = step(state, ROWS[1])
    other, _ = step(other, ROWS[1])
    assert mt.fingerprint(state) == mt.fingerprint(other)


def test_the_count_of_steps_is_read_without_the_rest(two, monkeypatch):
    """Lie: `int(state.step)` at every step, for which all parameters are put together."""
    step, given = two
    state, _ = step(jax.tree.map(jnp.copy, given), ROWS[0])
    with monkeypatch.context() as patch:
        patch.setattr(runner, "as_shown", lambda *_: pytest.fail("all was put together"))
        assert int(state.step) == int(given.step) + 1
        assert state.step.is_fully_replicated
    assert int(jax.tree.map(jnp.copy, state).step) == int(given.step) + 1
    new, _ = step(state, ROWS[1])
    assert int(new.step) == int(given.step) + 2
    with pytest.raises(mt.StateError, match="overwritten"):
        state.step  # noqa: B018


def test_a_broken_vector_of_one_device_is_found(two):
    # The lie: the copies that are compared are those of one device.
    step, given = two
    state, _ = step(jax.tree.map(jnp.copy, given), ROWS[0])
    check_replicas(state)
    state, _ = step(state, ROWS[0])
    vectors = state.kept.parts()[1].vectors
    (place,) = (n for n, vector in enumerate(vectors) if vector.dtype == jnp.float32)
    vectors[place] = vectors[place].at[1].add(1)  # after "scale"
    with pytest.raises(mt.StateError, match=r"holds other bits in state\.params\['w0'\]"):
        check_replicas(state)
