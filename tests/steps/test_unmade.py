"""Parameters that a function makes: each array where it will live, and the function's bits."""

import gc
import re
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import multitower as mt
from multitower.errors import ArgumentError
from multitower.stages.pipeline import Pipeline
from multitower.steps.look import look_at_loss
from multitower.steps.staged.first import First
from multitower.steps.staged.runner import StagedRunner

NUM_BLOCKS, DIM = 6, 64
LEAF = 4 * DIM * DIM  # bytes of one block
X = np.random.default_rng(0).normal(size=(2, 8, DIM)).astype(np.float32)


def make_blocks():
    rows = jnp.arange(DIM * DIM, dtype=jnp.float32).reshape(DIM, DIM)
    return [jnp.cos(rows + number) / 8 for number in range(NUM_BLOCKS)]


def losses(params, batch):
    for w in params:
        batch = jnp.tanh(batch @ w)
    return (batch**2).sum(1)


# Most calls are of code that reads programs: it never has an array in its hands.
READERS = "checks/|engines/(segments|collectives|source_lines)|stages/(work|cutting|chain|marks)"
LOOKED_AT = re.compile(f"/multitower/(?!{READERS})")


class StopError(Exception):
    pass


class Watch:
    """The most bytes that JAX's arrays take on a device; of two that share a buffer, once."""

    def __init__(self):
        gc.collect()  # what other tests have left makes every look long
        self._before = {x.unsafe_buffer_pointer() for x in self._pieces(jax.live_arrays())}
        # With the pieces, which are arrays now. Kept so that nobody else gets their memory.
        self._kept = {id(array): array for array in jax.live_arrays()}
        self.most = dict.fromkeys(jax.devices(), 0)

    def __enter__(self):
        def look(frame, event, _):
            if event == "return" and LOOKED_AT.search(frame.f_code.co_filename):
                self.look()

        sys.setprofile(look)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def look(self):
        new = [array for array in jax.live_arrays() if id(array) not in self._kept]
        held = {x.unsafe_buffer_pointer(): x for x in self._pieces(new)}
        for device in self.most:
            own = [
                x.nbytes for at, x in held.items() if x.device == device and at not in self._before
            ]
            self.most[device] = max(sum(own), self.most[device])

    def _pieces(self, arrays):
        return [
            shard.data
            for array in arrays
            if not array.is_deleted() and not jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
            for shard in array.addressable_shards
        ]


def numpy_bytes():
    domain = tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)
    found = tracemalloc.take_snapshot().filter_traces([domain])
    return sum(trace.size for trace in found.traces)


@pytest.fixture
def watch(monkeypatch):
    """A watch that runs while a step makes its first state; the step then stops."""

    def stop(*_, **__):
        raise StopError

    def watched(runner, state):
        with watch:
            return parts(runner, state)

    def looked_at(*args, **kwargs):
        watch.look()
        return look_at_loss(*args, **kwargs)

    parts = StagedRunner._parts
    monkeypatch.setattr(StagedRunner, "_parts", watched)
    monkeypatch.setattr("multitower.steps.look.look_at_loss", looked_at)
    monkeypatch.setattr(Pipeline, "run", stop)  # by then all of the state is on its devices
    watch = Watch()
    return watch


def in_two_stages(loss, optimizer, **options):
    devices = mt.devices(3)[1:]  # not the host
    return mt.train_step(loss, optimizer, towers=2, stages=2, devices=devices, **options)


@pytest.mark.parametrize("is_function", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_trap_a_model_that_fits_no_device_is_made_in_pieces(watch, is_function):
    """keras#21634: parameters or optimizer state are whole somewhere before they are cut."""
    step = in_two_stages(losses, optax.adam(0.1), ema_decay=0.9)
    given = make_blocks if is_function else [np.array(w) for w in make_blocks()]
    tracemalloc.start(1)
    with watch:
        state = step.init(given)
    on_host = numpy_bytes()
    tracemalloc.stop()
    assert sum(watch.most.values()) < LEAF
    # Before the first step there are the user's arrays alone: no optimizer state, no average.
    assert on_host < (1 if is_function else NUM_BLOCKS + 1) * LEAF
    with pytest.raises(StopError):
        step(state, X[0])
    host, *devices = (watch.most[device] for device in mt.devices(3))
    assert host < LEAF
    # Four arrays for each block of a stage, and what one more array is made of.
    share = 4 * NUM_BLOCKS // 2 * LEAF
    assert [share <= most < share + 5 * LEAF for most in devices] == [True, True], devices


@pytest.mark.slow
def test_trap_stacked_layers_are_made_one_array_after_the_other(watch):
    # The lies: all stacks in the host's memory at once, or one of them whole on a device.
    def loss(stacks, batch):
        turn = lambda h, own: (jnp.tanh(sum(h @ w for w in own)), None)
        return (jax.lax.scan(turn, batch, stacks)[0] ** 2).sum(1)

    stack = NUM_BLOCKS * LEAF
    make = lambda: [jnp.cos(jnp.full((NUM_BLOCKS, DIM, DIM), n / 8)) for n in range(8)]
    step = in_two_stages(loss, optax.sgd(0.1))  # no state, which would hide what was there before
    with watch, pytest.raises(StopError):
        step(step.init(make), X[0])
    host, *devices = (watch.most[device] for device in mt.devices(3))
    assert host < 4 * stack  # one, and what it is made of
    # Half of the layers of all eight.
    assert [4 * stack <= most < 4.5 * stack for most in devices] == [True, True], devices


def make_stacked():
    return {
        "in": jax.random.normal(jax.random.key(1), (8,)),
        "layers": jax.vmap(lambda key: jax.random.normal(key, (8, 8)) / 3)(
            jax.random.split(jax.random.key(2), 4)
        ),
    }


def scanned(params, batch):
    turn = lambda h, w: (h + jnp.tanh(h @ w), None)
    return (jax.lax.scan(turn, batch[:, :8] * params["in"], params["layers"])[0] ** 2).sum(1)


def pull_back(params):
    """Its state is made of the parameters: what they were at first, and then their average."""
    return jax.tree.map(lambda p: 2 * p, params)


PULLED_BACK = optax.GradientTransformation(
    pull_back,
    lambda gradients, start, params: (
        jax.tree.map(lambda g, p, s: s - 2 * p - g / 9, gradients, params, start),
        jax.tree.map(lambda p, s: (s + 2 * p) / 2, params, start),
    ),
)


def train(make, loss=scanned, optimizer=PULLED_BACK, **options):
    step = mt.train_step(loss, optimizer, **options)
    state = step.init(make)
    for batch in X:
        state, metrics = step(state, batch)
    return state, metrics


@pytest.mark.slow
def test_a_function_gives_what_its_arrays_give_on_any_layout():
    # The lies: a piece of a stacked array in another stage's place, one array made of another's
    # random numbers, an optimizer's state of stand-ins instead of parameters.
    options = {"towers": 4, "stages": 2, "ema_decay": 0.5}
    state, metrics = train(make_stacked, devices=1, **options)
    other = train(make_stacked, devices=4, layout=(2, 2), **options)
    assert mt.fingerprint((state, metrics)) == mt.fingerprint(other)
    kept = [block.params for block in state.kept.parts().blocks[0]]
    assert [block[1].shape for block in kept] == [(2, 8, 8)] * 2
    whole, _ = train(make_stacked(), towers=4, devices=1, ema_decay=0.5)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
def test_shards_are_made_where_they_live():
    # The lie: all of it made on every device, or on the first one, and then cut.
    blocks = lambda: [jax.random.normal(jax.random.key(n), (256, 256)) / 16 for n in range(4)]
    step = mt.train_step(losses, optax.sgd(0.1), devices=4, shard_params=True)
    with Watch() as watch:
        state = step.init(blocks)
    assert max(watch.most.values()) < 1.1 * 256 * 256 * 4
    for a, b in zip(state.params, blocks(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_arrays_that_a_function_closes_over_are_in_no_program(monkeypatch):
    # The lie: constants of the compiled program, which every device has whole.
    texts, jit = [], jax.jit

    def spied(fun, **options):
        made = jit(fun, **options)

        def run(*args):
            texts.append(made.lower(*args).as_text())
            return made(*args)

        return run

    w = np.random.default_rng(1).normal(size=(DIM, DIM))
    given = jnp.asarray(w[::-1], jnp.float32)
    make = lambda: {"w": w, "also": given, "of_both": given + jnp.asarray(w), "s": 1.5}
    expected = make()
    step = mt.train_step(losses, optax.sgd(0.1), devices=2, shard_params=True)
    with monkeypatch.context() as patched:
        patched.setattr(jax, "jit", spied)
        params = step.init(make).params
    assert texts
    assert max(map(len, texts)) < 4 * DIM * DIM
    for name, value in expected.items():
        np.testing.assert_allclose(params[name], value, rtol=1e-6)
        assert params[name].dtype == np.float32
        assert params[name].addressable_shards[0].data.size == -(-params[name].size // 2)


@pytest.mark.slow
def test_modules():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(DIM, 8, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.last = nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, x):
            return self.last(self.dropout(mt.cut(jnp.tanh(self.first(x)))))[:, 0]

    loss = lambda net, x: net(x) ** 2
    step = mt.train_step(loss, optax.sgd(0.1), towers=2, stages=2, devices=2)
    state = step.init(lambda: Net(nnx.Rngs(0)))
    expected = jax.tree.leaves(nnx.state(Net(nnx.Rngs(0)), nnx.Param))
    for a, b in zip(jax.tree.leaves(state.params), expected, strict=True):
        assert np.array_equal(a, b)
    state, _ = step(state, X[0])
    assert isinstance(step.model(state), Net)


@pytest.mark.slow
def test_a_trainer_never_makes_the_whole(monkeypatch, tmp_path):
    # The lie: a look at the parameters on the way, for their names or shapes, makes all of them.
    monkeypatch.setattr(First, "whole", lambda _: pytest.fail("made the whole state"))
    trainer = mt.Trainer(
        scanned, optax.sgd(0.1), run_dir=tmp_path, towers=2, stages=2, devices=2
    )  # fmt: skip
    state = trainer.fit(make_stacked, lambda first: iter(X[first:]), steps=1)
    assert int(state.step) == 1


@pytest.mark.slow
def test_a_look_makes_it_on_the_host_and_changes_count():
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    step = mt.train_step(scanned, optimizer, towers=2, stages=2, devices=2)
    state = step.init(make_stacked)
    assert isinstance(state.params["in"], np.ndarray)
    state.opt_state.hyperparams["learning_rate"] = 0.0
    state, _ = step(state, X[0])
    assert np.array_equal(state.params["in"], make_stacked()["in"])


def test_what_nobody_would_read_cannot_be_written():
    # The lie: values written into an array that a look has made, and that the step never sees.
    given = {"in": np.ones(8, np.float32), "layers": np.ones((4, 8, 8), np.float32)}
    step = mt.train_step(scanned, optax.adam(0.1), towers=2, stages=2, devices=2, ema_decay=0.5)
    for make in (lambda: given, given):
        for name in ("params", "opt_state", "ema_params"):
            for leaf in jax.tree.leaves(getattr(step.init(make), name)):
                with pytest.raises(ValueError, match="read-only"):
                    leaf[...] = 5
    given["in"][...] = 5  # the user's own


@pytest.mark.parametrize("options", [{}, {"stages": 2}])
def test_a_function_with_arguments_is_refused(options):
    def make(key):
        return jax.random.normal(key, (3,))

    step = mt.train_step(scanned, optax.sgd(0.1), towers=2, devices=2, **options)
    with pytest.raises(ArgumentError, match=r"make, which takes key: .* lambda: make\(...\)"):
        step.init(make)
    shapes = {"w": jax.ShapeDtypeStruct((3,), np.float32)}
    with pytest.raises(ArgumentError, match=r"params\['w'\] is ShapeDtypeStruct.*without values"):
        step.init(shapes)
