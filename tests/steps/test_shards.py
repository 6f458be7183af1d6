"""shard_params and shard_update without towers: the same training, a part of the state each."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import multitower as mt
from multitower.engines import spmd
from multitower.steps.state.replicas import check_replicas
from multitower.towers.leaf_shards import shardings_of
from multitower.towers.rows import take_apart
from multitower.training.checkpoints.checkpoint import Checkpoints

DRAW = np.random.default_rng(0)
PARAMS = {
    "table": DRAW.normal(size=(96, 48)).astype(np.float32),  # 3 devices divide both, it is tied
    "hidden": DRAW.normal(size=(48, 96)).astype(np.float32) / 7,
    "odd": DRAW.normal(size=(67, 67)).astype(np.float32) / 8,  # nothing divides it
    "shift": np.zeros(48, np.float32),  # small
}
BATCHES = [
    {
        "word": DRAW.integers(0, 96, rows).astype(np.int32),
        "x": DRAW.normal(size=(rows, 67)).astype(np.float32),
    }
    for rows in (12, 7, 12)  # a ragged one in the middle
]
WAYS = {"params": {"shard_params": True}, "update": {"shard_update": True}}


def first_state(step):
    """Of these parameters."""
    return step.init(PARAMS, rng=jax.random.key(1), model_state=np.float32(0))


def losses(params, batch, *, rng, model_state):
    h = params["table"][batch["word"]] + params["shift"]
    h = h + jnp.tanh(h @ params["hidden"]) @ params["table"]
    loss = (h**2).mean(1) + ((batch["x"] @ params["odd"]) ** 2).mean(1)
    noise = jax.random.uniform(rng, ())  # another one on every device: it must not count here
    return loss, {"norm": jnp.abs(h).sum(1)}, 0.9 * model_state + 0 * noise + params["odd"].mean()


def make(devices=2, optimizer=None, loss=losses, **options):
    return mt.train_step(
        loss, optimizer or optax.adam(1e-2), devices=devices, global_batch=12, **options
    )


def train(step, state, batches=BATCHES):
    metrics = []
    for batch in batches:
        state, found = step(state, batch)
        metrics.append(found)
    return state, metrics


def filled(batch):
    """A batch of twelve rows, for one program in place of two, and how many of them are real."""
    number = len(batch["word"])
    return jax.tree.map(lambda x: np.resize(x, (12, *x.shape[1:])), batch), number


def on_one_device(optimizer, clip_norm, decay):
    """The same in plain JAX and optax."""

    @jax.jit
    def step(params, opt_state, average, model_state, batch, number):
        mean = lambda rows: jnp.where(jnp.arange(12) < number, rows, 0).sum() / number

        def mean_loss(params):
            loss, metrics, new = losses(
                params, batch, rng=jax.random.key(0), model_state=model_state
            )
            return mean(loss), (mean(metrics["norm"]), new)

        (loss, (norm, new)), gradients = jax.value_and_grad(mean_loss, has_aux=True)(params)
        length = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradients)))
        gradients = jax.tree.map(lambda g: g * jnp.minimum(1, clip_norm / length), gradients)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, p: a - (1 - decay) * (a - p), average, params)
        return (params, opt_state, average, new), {"loss": loss, "norm": norm}, length

    params = jax.tree.map(jnp.asarray, PARAMS)
    state, metrics = (params, jax.jit(optimizer.init)(params), params, jnp.float32(0)), []
    for batch in BATCHES:
        state, found, length = step(*state, *filled(batch))
        assert length > clip_norm  # the threshold is in the way of every step
        metrics.append(found)
    return state, metrics


@pytest.mark.parametrize(
    ("optimizer", "devices", "way"),
    [
        pytest.param(optax.lamb(1e-2), 2, "params", marks=pytest.mark.slow),
        pytest.param(
            optax.adafactor(1e-2, min_dim_size_to_factor=32), 2, "update", marks=pytest.mark.slow
        ),
        (optax.sgd(1e-2, momentum=0.9), 2, "params"),
        pytest.param(optax.adam(1e-2), 2, "params", marks=pytest.mark.slow),
        pytest.param(optax.adam(1e-2), 3, "update", marks=pytest.mark.slow),
        pytest.param(optax.adam(1e-2), 1, "params", marks=pytest.mark.slow),
        pytest.param(optax.lamb(1e-2), 3, "update", marks=pytest.mark.slow),
        pytest.param(optax.adafactor(1e-2), 2, "params", marks=pytest.mark.slow),
    ],
    ids=[
        "lamb",
        "adafactor",
        "momentum",
        "adam",
        "adam again",
        "one device",
        "lamb again",
        "adafactor again",
    ],
)
def test_it_equals_plain_optax_on_one_device(optimizer, devices, way):
    # The lies: a norm over a part, a gradient that is N times too big, a part on another device,
    # rows that only fill up.
    expected, wanted = on_one_device(optimizer, 0.05, 0.9)
    step = make(devices, optimizer, clip_norm=0.05, ema_decay=0.9, **WAYS[way])
    state, metrics = train(step, first_state(step))
    found = (state.params, state.opt_state, state.ema_params, state.model_state)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, leaf), other in zip(
        jax.tree_util.tree_flatten_with_path(found)[0], jax.tree.leaves(expected), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert (leaf.shape, leaf.dtype) == (other.shape, other.dtype), name
        np.testing.assert_allclose(leaf, other, rtol=2e-3, atol=2e-5, err_msg=name)
    for one, other in zip(metrics, wanted, strict=True):
        np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-5)
        np.testing.assert_allclose(one["norm"], other["norm"], rtol=1e-5)


def bytes_by_device(tree):
    held = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return held


def nbytes(params, *names):
    return sum(params[name].nbytes for name in names)


@pytest.fixture(scope="module", params=["params", pytest.param("update", marks=pytest.mark.slow)])
def trained(request):
    """A step on three devices, its first state's arrays, and a later state."""
    step = make(3, ema_decay=0.9, **WAYS[request.param])
    first = first_state(step)
    arrays = [first.params["table"], first.opt_state[0].mu["hidden"], first.ema_params["table"]]
    held = bytes_by_device((first.params, first.opt_state, first.ema_params))
    state, metrics = step(first, BATCHES[0])
    return request.param, step, arrays, held, state, metrics


def test_trap_every_device_keeps_its_part_from_the_start(trained):
    # keras#21634: weights that are whole on a device before they are split.
    # Another lie: "sharded", and everything is still everywhere.
    way, _, arrays, held, state, _ = trained
    split, whole = nbytes(PARAMS, "table", "hidden"), nbytes(PARAMS, "odd", "shift")
    of_params = split // 3 if way == "params" else split
    expected = of_params + whole + 3 * (split // 3 + whole) + 4  # Adam's count
    assert list(held.values()) == [expected] * 3
    now = bytes_by_device((state.params, state.opt_state, state.ema_params))
    assert list(now.values()) == [expected] * 3
    for array in arrays:  # the step has used their memory again
        assert array.is_deleted()
    assert state.params["table"].shape == (96, 48)  # to look at it is whole
    assert state.ema_params["table"].sharding.spec == jax.sharding.PartitionSpec("towers")


@pytest.mark.slow
def test_what_a_compiled_step_sends(trained):
    # The lie: an all-reduce of all gradients, of which every device then takes its part.
    _, step, _, _, state, _ = trained
    (runner,) = step._makers.newest.runners.values()
    fields = state.kept.fields()
    fed = runner._feeder.feed(take_apart(BATCHES[0], 0, name="batch"))
    text = runner.program(fields).lower(fields, *fed).compile().as_text()
    sent = {}
    for shapes, name in re.findall(
        r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all)(?:-start)?\(", text
    ):
        for dims in re.findall(r"f32\[([\d,]*)\]", shapes):
            size = int(np.prod([int(n) for n in dims.split(",") if n]))
            sent.setdefault(name, set()).add(size)
    table = PARAMS["table"].size
    assert table // 3 in sent["reduce-scatter"]
    assert table in sent["all-gather"]
    # What is whole on every device travels together, with the loss and the like.
    assert max(sent["all-reduce"]) < 67 * 67 + 48 + 100
    assert "all-to-all" not in sent


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_batch_that_is_not_finite_changes_nothing(way):
    step = make(3, ema_decay=0.9, diagnostics=True, skip_nonfinite=True, **WAYS[way])
    state, metrics = step(first_state(step), BATCHES[0])
    assert float(metrics["skipped"]) == 0
    assert metrics["finite_params"].all()
    assert metrics["tower_losses"].shape == (3,)
    before = jax.device_get(jax.tree.map(jnp.copy, state.params))
    bad = {**BATCHES[0], "x": np.full_like(BATCHES[0]["x"], np.inf)}
    after, metrics = step(jax.tree.map(jnp.copy, state), bad)
    assert float(metrics["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after.params), before)
    assert int(after.step) == int(state.step) + 1
    check_replicas(after)


def test_nothing_compiles_at_the_second_step(trained):
    # The lie: a state whose leaves lie elsewhere than those that the program was made for.
    _, step, _, _, state, _ = trained
    compiled = []

    def listen(name, duration, **_):
        if name.endswith("backend_compile_duration"):
            compiled.append(name)

    state = jax.tree.map(jnp.copy, state)
    state, _ = step(state, BATCHES[0])
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        state, _ = step(state, BATCHES[1])  # a ragged one fits, too
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled


@pytest.mark.slow
def test_what_is_written_into_a_state_is_used(trained):
    # The lies: a change that is read back and ignored; one that puts a leaf whole everywhere.
    _, step, _, _, state, _ = trained
    given, state = state, state.replace(step=state.step)  # which no step has made
    state, _ = step(state, BATCHES[0])
    assert not given.params["table"].is_deleted()  # it was copied
    state.params["table"] = np.zeros_like(PARAMS["table"])
    state.opt_state[0].mu["hidden"] = jnp.ones_like(PARAMS["hidden"])
    old = state.opt_state[0].mu["table"]
    new, _ = step(state, BATCHES[0])
    assert float(jnp.abs(new.params["table"]).max()) < 0.02  # one step of Adam away from zero
    assert float(new.opt_state[0].mu["hidden"].min()) > 0.8
    assert new.params["hidden"].sharding == shardings_of(PARAMS, step.placement)["hidden"] or (
        new.params["hidden"].is_fully_replicated
    )
    assert old.is_deleted()


def test_a_checkpoint_goes_on_anywhere(trained, tmp_path):
    # The lie: a checkpoint of the first device's parts alone.
    _, _, _, _, state, _ = trained
    saved = mt.fingerprint(state)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        for other in (
            make(2, ema_decay=0.9, **WAYS["params"]),
            make(1, ema_decay=0.9),
            make(2, ema_decay=0.9, towers=4),
        ):
            like = first_state(other)
            restored = checkpoints.restore(like=like).state
            assert mt.fingerprint(restored) == saved
            if other.placement.num_towers == 2:
                there = restored.params["table"].sharding
                assert there == like.params["table"].sharding  # on no device whole
                adopted = other._find_way().adopt(other._step, restored.kept.fields(), other)
                assert mt.fingerprint(mt.TrainState(adopted)) == saved


@pytest.mark.slow
@pytest.mark.parametrize("way", ["params", "update"])
def test_a_module_a_ratio_and_towers_that_meet(way):
    # The lie: shards in the hands of a module, or a mean over one device's rows.
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.hidden = nnx.Linear(64, 64, rngs=rngs)
            self.norm = nnx.BatchNorm(64, axis_name="towers", rngs=rngs)

        def __call__(self, x):
            return self.norm(self.hidden(x)).sum(1)

    x = DRAW.normal(size=(8, 64)).astype(np.float32)
    mask = np.array([1, 1, 1, 0, 1, 0, 0, 0], np.float32)

    def loss(net, batch):
        center = jax.lax.pmean(batch["x"].mean(), "towers")
        return mt.ratio((net(batch["x"]) - center) ** 2 * batch["mask"], batch["mask"])

    found = []
    for options in ({}, WAYS[way]):
        step = mt.train_step(loss, optax.sgd(0.1), devices=2, **options)
        state = step.init(Net(nnx.Rngs(0)))
        state, metrics = step(state, {"x": x, "mask": mask})
        found.append((float(metrics["loss"]), jax.device_get((state.params, state.model_state))))
        assert isinstance(step.model(state), Net)
        with pytest.raises(mt.OutputError, match="do not fill 2 towers evenly"):
            step(state, {"x": x[:7], "mask": mask[:7]})
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        found[1][1], found[0][1],
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_stacked_layers_and_a_sum_over_rows(way):
    layers = DRAW.normal(size=(3, 64, 64)).astype(np.float32) / 9

    def loss(layers, x):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, layers)
        return (h**2).sum(1)

    x = DRAW.normal(size=(4, 64)).astype(np.float32)
    found = []
    for options in ({}, WAYS[way]):
        step = mt.train_step(loss, optax.sgd(0.1), devices=2, reduction="sum", **options)
        state, metrics = step(step.init(layers), x)
        found.append((float(metrics["loss"]), np.asarray(state.params)))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5)
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=1e-4, atol=1e-6)


def test_a_loss_in_16_bits_is_sent_its_parameters_in_16_bits():
    # The lie: parameters in float32 on the way, and cast when they have arrived.
    layers = np.zeros((3, 64, 64), np.float32)
    loss = lambda layers, x: jax.lax.scan(lambda h, w: (h @ w, None), x, layers)[0].sum(1)
    options = {"compute_dtype": jnp.bfloat16, "shard_params": True}
    step = mt.train_step(loss, optax.sgd(0.1), devices=2, **options)
    state, parts = step.init(layers), take_apart(np.ones((4, 64), np.float32), 0, name="batch")
    runner = step._runner(step._makers.newest, state.kept, parts, 4, [4])
    fields = state.kept.fields()
    lowered = runner.program(fields).lower(fields, *runner._feeder.feed(parts)).as_text()
    sent = re.findall(r'"stablehlo.(\w+)"\([^\n]*?-> tensor<64x64x(\w+)>', lowered)
    assert {dtype for name, dtype in sent if name == "all_gather"} == {"bf16"}
    # The gradients of a layer are added in float32, of which each device gets half.
    assert re.search(r"\}\) : \(tensor<64x64xf32>\) -> tensor<32x64xf32>", lowered)


def test_parameters_in_parts_are_scored_in_parts(monkeypatch):
    # The lie: a model that is trained in parts, and whole on every device for its score.
    layers = DRAW.normal(size=(3, 64, 64)).astype(np.float32) / 9
    state = mt.train_step(
        lambda layers, x: x[:, 0] * 0 + layers.sum(), optax.sgd(0.1), devices=2, shard_params=True
    ).init(layers)
    x = DRAW.normal(size=(5, 64)).astype(np.float32)

    def score(layers, x):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, layers)
        return {"score": (h**2).sum(1)}

    ran, run = [], spmd.run
    monkeypatch.setattr(
        spmd, "run", lambda *given, axes: ran.append(axes) or run(*given, axes=axes)
    )
    found = mt.evaluate(score, state.params, x, global_batch=2, devices=2)
    h = x.astype(float)
    for w in layers:
        h = np.tanh(h @ w)
    assert found["score"] == pytest.approx((h**2).sum(1).mean(), rel=1e-5)
    infer = mt.make_parallel(lambda layers, x: x @ layers[0], in_axes=(None, 0), devices=2)
    np.testing.assert_allclose(infer(state.params, x), x @ layers[0], rtol=1e-4, atol=1e-5)
    assert len(ran) == 2  # one program each
    assert all(1 in axes for axes in ran)  # which takes the layers in parts
    assert infer(layers, x).shape == x.shape
    assert ran[2:] == [()]


def test_options_that_exclude_each_other():
    sgd = optax.sgd(0.1)
    with pytest.raises(mt.ArgumentError, match=r"Leave towers out; .* stages= or"):
        mt.train_step(losses, sgd, towers=4, shard_params=True)
    with pytest.raises(mt.ArgumentError, match="exclude each other"):
        mt.train_step(losses, sgd, stages=2, shard_params=True)
    with pytest.raises(mt.ArgumentError, match="needs towers="):
        mt.train_step(losses, sgd, stages=2, shard_update=True)


@pytest.mark.slow
def test_a_run_goes_on_with_other_shards(tmp_path):
    # The lie: another way to keep the state, taken for another run.
    def fit(steps, **options):
        trainer = mt.Trainer(
            lambda w, x: ((x @ w) ** 2).sum(1), optax.adam(0.1), run_dir=tmp_path, global_batch=4,
            **options,
        )  # fmt: skip
        rows = np.ones((4, 64), np.float32)
        return trainer.fit(
            np.ones((64, 64), np.float32), lambda first: iter([rows] * 9), steps=steps, resume=True
        )

    assert int(fit(1, devices=2, shard_params=True).step) == 1
    assert int(fit(2, devices=1).step) == 2
    state = fit(3, devices=2, shard_update=True)
    assert not state.opt_state[0].mu.is_fully_replicated
    assert float(state.opt_state[0].count) == 3
