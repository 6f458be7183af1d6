"""Flax NNX: a module as first argument, state changed inside the loss, nnx.Optimizer, nnx.Rngs.

The reference runs every tower by hand, with NNX alone.
"""

import itertools

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import multitower as mt
from first_weights import spread_in_flax
from looking import look_at_step
from tower_keys import tower_key
from trees import assert_close

# The statistics of a tower's own rows are what these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:.*with statistics of their own tower's rows")

X = np.random.default_rng(0).normal(size=(2, 16, 4)).astype(np.float32)  # two batches of 16 rows


def linear(*sizes, rngs=None, **options):
    return nnx.Linear(*sizes, kernel_init=spread_in_flax, rngs=rngs or nnx.Rngs(0), **options)


class Net(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.hidden = linear(4, 6, use_bias=False, rngs=rngs)  # BatchNorm would cancel it
        self.norm = nnx.BatchNorm(6, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = linear(6, 1, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        self.calls[...] += 1
        return self.out(self.dropout(jnp.tanh(self.norm(self.hidden(x)))))[:, 0]


def losses(model, x):
    return (model(x) - x.sum(-1)) ** 2


def mean_loss(model, x):
    return losses(model, x).mean()


def state_of(*modules):
    """All arrays, keys included, as NumPy arrays."""
    leaves = jax.tree.leaves(nnx.state(modules))
    is_key = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    return [
        np.asarray(jax.random.key_data(leaf) if key else leaf)
        for leaf, key in zip(leaves, is_key, strict=True)
    ]


def train(value_and_grad, jit, num_devices=1):
    """The documented loop; what was `nnx.value_and_grad` is the argument."""
    model = Net()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    if num_devices > 1:  # where the first step leaves it: the second one is the same program
        mesh = jax.sharding.Mesh(mt.devices(num_devices), "towers")
        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        nnx.update((model, optimizer), jax.device_put(nnx.state((model, optimizer)), everywhere))

    def train_step(model, optimizer, x):
        loss, grads = value_and_grad(mean_loss)(model, x)
        optimizer.update(model, grads)
        return loss

    train_step = nnx.jit(train_step) if jit else train_step
    for x in X:
        train_step(model, optimizer, x)
    return state_of(model, optimizer)


def towers_by_hand(num_towers):
    """value_and_grad of NNX, tower by tower: own rows, own keys, everything averaged."""

    def value_and_grad(fun):
        def run(model, x):
            losses, gradients, states = [], [], []
            for tower, rows in enumerate(jnp.split(x, num_towers)):
                copy = nnx.clone(model)
                key = copy.dropout.rngs.key
                key[...] = tower_key(key[...], tower)
                loss, gradient = nnx.value_and_grad(fun)(copy, rows)
                losses.append(loss)
                gradients.append(gradient)
                states.append(nnx.state(copy, nnx.BatchStat))
                rest = (
                    nnx.state(copy, nnx.RngCount),
                    nnx.state(copy, lambda path, _: "calls" in path),
                )
            mean = lambda *trees: jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *trees)
            nnx.update(model, mean(*states), *rest)
            return mean(*losses), mean(*gradients)

        return run

    return value_and_grad


def test_law_l2_dropout_and_batch_norm_as_by_hand():
    """Lie: one dropout mask for all, statistics of one tower only, a counter that counts towers."""
    found = train(lambda fun: mt.value_and_grad(fun, devices=2), jit=True, num_devices=2)
    assert_close(found, train(towers_by_hand(2), jit=True))


@pytest.mark.slow
def test_one_tower_is_one_device():
    """With one tower even dropout is that of NNX alone."""
    found = train(lambda fun: mt.value_and_grad(fun, devices=1), jit=False)
    assert_close(found, train(nnx.value_and_grad, jit=False))


@pytest.mark.slow
def test_law_l3_same_bits():
    """Lie: what changes in the module depends on the devices. Three do not divide four towers."""
    one, three = (
        train(lambda fun, d=d: mt.value_and_grad(fun, devices=d, towers=4), jit=False)
        for d in (1, 3)
    )
    assert mt.fingerprint(one) == mt.fingerprint(three)
    assert_close(one, train(towers_by_hand(4), jit=True))


@pytest.mark.slow
def test_law_l6_every_tower_has_its_own_mask():
    def masks(dropout, x):
        return dropout(x).mean(), dropout(x)

    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    ones = np.ones((4, 64), np.float32)
    (_, found), _ = mt.value_and_grad(masks, has_aux=True, devices=4)(dropout, ones)
    assert len({row.tobytes() for row in np.asarray(found)}) == 4
    assert dropout.rngs.count[...] == 2


@pytest.mark.parametrize(
    "argnums",
    [
        pytest.param(0, marks=pytest.mark.slow),
        (1, 0),
        nnx.DiffState(0, nnx.PathContains("kernel")),
        pytest.param(nnx.DiffState(0, ...), marks=pytest.mark.slow),
    ],
    ids=["0", "1,0", "kernel", "all"],
)
def test_law_l2_gradients_are_what_nnx_gives(argnums):
    """Lie: gradients of another form, which nnx.Optimizer cannot take."""

    def loss(model, scale, x):
        return ((scale * model["net"](x)) ** 2).mean()

    args = {"net": linear(4, 2)}, np.float32(2.0), X[0]
    found = mt.value_and_grad(loss, argnums, devices=2)(*args)
    assert_close(found, nnx.jit(nnx.value_and_grad(loss, argnums=argnums))(*args))


@pytest.mark.slow
def test_modules_beside_the_first_argument():
    """A GAN's generator, and random streams of their own: what changes in them is handed on."""

    def loss(discriminator, generator, x, *, rngs):
        noise = rngs.noise.normal(x.shape)
        return discriminator(generator(x + noise)).mean()

    discriminator = nnx.Linear(4, 1, rngs=nnx.Rngs(1))
    generator = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    rngs = nnx.Rngs(noise=3)
    found = mt.grad(loss, devices=2)(discriminator, generator, X[0], rngs=rngs)
    assert found["kernel"].shape == (4, 1)
    np.testing.assert_allclose(found["bias"], 1, rtol=1e-6)
    assert rngs.noise.count[...] == 1
    seen = []
    for tower, rows in enumerate(np.split(X[0], 2)):
        own = nnx.Rngs(noise=3)
        own.noise.key[...] = tower_key(own.noise.key[...], tower)
        seen.append((rows + own.noise.normal(rows.shape)).mean(0))
    np.testing.assert_allclose(generator.mean[...], 0.01 * np.mean(seen, 0), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_module_that_the_loss_closes_over():
    """Lie: its values are those of the first step for ever, or what it changes is lost."""
    teacher = nnx.BatchNorm(4, momentum=0.5, rngs=nnx.Rngs(0))

    def step(w, x):
        def teach(x):
            return 0 * teacher.var[...] + teacher(x)

        loss = lambda w, x: (w * teach(x)).mean() + 0 * teacher.mean[...].sum()
        return mt.grad(loss, devices=2, towers=2)(w, x)

    step(1.0, X[0])
    np.testing.assert_allclose(teacher.mean[...], X[0].mean(0) / 2, rtol=1e-5)
    teacher.bias[...] = jnp.full(4, 7.0)
    np.testing.assert_allclose(step(1.0, X[1]), 7.0, rtol=1e-5)


class Teacher(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=nnx.Rngs(0))

    def teach(self, x):
        return self.norm(x)


teach_globally = None


@pytest.mark.slow
@pytest.mark.parametrize("is_global", [False, True])
def test_a_method_of_a_module_that_the_loss_uses(is_global, monkeypatch):
    """Lies: an error of Flax about levels of tracing; or what the method changes is lost."""
    teacher = Teacher()
    teach = teacher.teach
    monkeypatch.setitem(globals(), "teach_globally", teach)
    loss = lambda w, x: (w * (teach_globally if is_global else teach)(x)).mean()
    mt.grad(loss, devices=2, towers=2)(1.0, X[0])
    np.testing.assert_allclose(teacher.norm.mean[...], X[0].mean(0) / 2, rtol=1e-5)
    teacher.norm.bias[...] = jnp.full(4, 7.0)
    np.testing.assert_allclose(mt.grad(loss, devices=2)(1.0, X[1]), 7.0, rtol=1e-5)


MODEL = None


def test_a_module_that_is_read_as_a_global(monkeypatch):
    """Lie: predictions of the weights that it had at the first call."""
    monkeypatch.setitem(globals(), "MODEL", linear(4, 2))
    model = linear(4, 2)
    for changing, fn in [(MODEL, lambda x: 1 * MODEL(x)), (model, model)]:
        run = mt.make_parallel(fn, devices=2)
        assert not (run(X[0]) == 7).any()
        changing.kernel[...] = jnp.asarray(np.zeros((4, 2), np.float32))
        changing.bias[...] = jnp.asarray(np.full(2, 7, np.float32))
        assert (run(X[0]) == 7).all()


@pytest.mark.slow
def test_train_step_takes_a_module():
    """The whole step, with per-example losses: `step.model` gives the trained module back."""
    prints = []
    for devices in (1, 2):
        step = mt.train_step(losses, optax.sgd(0.1), devices=devices, towers=2)
        state = step.init(Net())
        for x in X:
            state, metrics = step(state, x)
        prints.append(mt.fingerprint((state, metrics)))
    assert prints[0] == prints[1]
    model = step.model(state)
    assert isinstance(model, Net)
    assert model.calls[...] == 2
    expected = train(lambda fun: mt.value_and_grad(fun, devices=2), jit=True)[
        : len(state_of(model))
    ]
    assert_close(state_of(model), expected)


def test_modules_inside_of_a_tree():
    """Lie: statistics and frozen arrays are trained as parameters, or Flax's own error."""
    step = mt.train_step(lambda m, x: m["a"](x)[:, 0], optax.sgd(0.1), devices=1, towers=2)
    layer, norm = linear(4, 1), nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    with pytest.raises(mt.ArgumentError, match=r"params\['b'\] is a BatchNorm with Variables that"):
        step.init({"a": layer, "b": norm})
    assert jax.tree.leaves(step.init({"a": layer, "b": [layer]}).params)
    assert step.init(nnx.Dict(a=layer, b=norm)).model_state


@pytest.mark.slow
def test_law_l4_a_module_is_saved_and_resumed(tmp_path):
    """On other devices than it was begun; random streams and statistics included."""

    def fit(devices, steps, **options):
        trainer = mt.Trainer(losses, optax.adam(0.1), devices=devices, towers=4, **options)
        return trainer, trainer.fit(Net(), batches, steps=steps, resume="run_dir" in options)

    asked = []

    def batches(first):
        asked.append(first)
        return (X[number % 2] for number in itertools.count(first))

    _, whole = fit(2, 4)
    fit(1, 2, run_dir=tmp_path)
    trainer, resumed = fit(3, 4, run_dir=tmp_path)
    assert asked == [0, 0, 2]  # one that begins anew comes to the same bits
    assert mt.fingerprint(resumed) == mt.fingerprint(whole)
    assert trainer.step.model(resumed).calls[...] == 4


def test_make_parallel_takes_a_module():
    model = Net()
    model.eval()
    run = mt.make_parallel(lambda model, x: model(x), in_axes=(None, 0), devices=3)
    found = run(model, X[0])
    assert_close(found, nnx.jit(lambda model, x: model(x))(model, X[0]))
    assert model.calls[...] == 2


class Adds(nnx.Module):
    def __call__(self, x):
        self.seen = nnx.Variable(x)
        return x


class Grows(nnx.Module):
    def __init__(self):
        self.last = nnx.Variable(jnp.zeros(3))

    def __call__(self, x):
        self.last.set_value(x)
        return x


class Counts(nnx.Module):
    def __init__(self):
        self.average = nnx.metrics.Average()

    def __call__(self, x):
        self.average.update(values=x)
        return x


def trains_itself(model, x):
    model.train()
    return model(x)


def evaluating():
    model = Net()
    model.eval()
    return model


@pytest.mark.parametrize(
    ("make", "loss", "message"),
    [
        (Adds, None, r"adds a Variable to the model, \['seen'\].*Return the value as aux"),
        (Grows, None, r"\['last'\].*float32\[3\] before.*float32\[8, 4\] after"),
        (Counts, None, r"updates a metric of the model, \['average'\].*update the metric after"),
        (evaluating, trains_itself, r"model.train\(\).*before value_and_grad"),
    ],
)
def test_state_that_cannot_be_put_together(make, loss, message):
    loss = loss or (lambda model, x: model(x))
    with pytest.raises(mt.OutputError, match=message):
        mt.value_and_grad(lambda model, x: loss(model, x).mean(), devices=2)(make(), X[0])


class Sows(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        self.sow(nnx.Intermediate, "halves", self.scale * x / 2)
        return self.scale * x


def capturing(model, x):
    answers, sown = nnx.capture(model, nnx.Intermediate)(x)
    return (answers**2).mean(), sown["halves"][0]


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_what_a_model_sows_is_captured_and_returned_as_aux():
    # Lie: a message of which no advice helps a model that sows.
    with pytest.raises(mt.OutputError, match=r"\['halves'\].*nnx.capture\(model, nnx.Interm"):
        mt.value_and_grad(lambda model, x: model(x).mean(), devices=2)(Sows(), X[0])
    model = Sows()
    (_, halves), gradients = mt.value_and_grad(capturing, has_aux=True, devices=2)(model, X[0])
    np.testing.assert_array_equal(halves, X[0] / 2)
    np.testing.assert_allclose(gradients["scale"][...], 2 * (X[0] ** 2).mean(), rtol=1e-6)
    assert not hasattr(model, "halves")


class Decoder(nnx.Module):
    """A model that keeps what it has seen of every row."""

    def __init__(self):
        self.out = linear(4, 4)
        self.seen = None

    def __call__(self, x):
        self.seen = nnx.data(nnx.Cache(jnp.zeros_like(x)))
        for _ in range(2):
            self.seen[...] += self.out(x)
        return self.seen[...]


def test_a_cache_of_rows_belongs_in_a_copy():
    # Lie: a message of which no advice helps a model that decodes with a cache.
    model = Decoder()
    for _ in range(2):  # without a cache, and with one of all rows
        with pytest.raises(mt.OutputError, match=r"\['seen'\].*begin with a copy.*nnx.clone"):
            mt.predict(lambda model, x: model(x), model, X[0], global_batch=8, devices=2)
        answers = mt.predict(
            lambda model, x: nnx.clone(model)(x), model, X[0], global_batch=8, devices=2
        )
        np.testing.assert_allclose(answers, model(X[0]), rtol=1e-5, atol=1e-6)


def test_modules_that_share_a_variable():
    """Lie: two copies of one Variable, of which the last one wins."""
    model = Net()
    with pytest.raises(
        mt.ArgumentError, match=r"share a Variable: Net.norm.*one module that holds"
    ):
        mt.grad(lambda m, n, x: m(x).mean(), devices=2)(model, model.norm, X[0])


def test_model_state_next_to_a_module():
    step = mt.train_step(lambda m, x, *, model_state: (m(x), {}, model_state), optax.sgd(0.1))
    for module in (Net(), Net):
        with pytest.raises(
            mt.ArgumentError, match=r"a Net keeps its own: write loss_fn\(model, batch\)"
        ):
            step.init(module, model_state={"a": 1.0})


@pytest.mark.slow
def test_a_module_in_an_object_that_the_loss_uses_may_change():
    """Lie: a target network that an agent keeps, `self.target`, stays that of the first call."""

    class Agent:
        def __init__(self):
            self.target = linear(4, 1)
            self.scale = nnx.Variable(jnp.float32(1))

        def loss(self, w, x):
            return (x @ w - self.scale[...] * self.target(x)[:, 0]) ** 2

    agent, w = Agent(), np.ones(4, np.float32)
    value_and_grad = mt.value_and_grad(agent.loss, towers=2, devices=1)

    def check(scale, bias):
        target = X[0] @ np.asarray(agent.target.kernel[...])[:, 0] + bias
        wanted = ((X[0] @ w - scale * target) ** 2).mean()
        np.testing.assert_allclose(value_and_grad(w, X[0])[0], wanted, 1e-5)

    check(1, 0)
    agent.target.bias.set_value(jnp.asarray(np.float32([3])))
    check(1, 3)
    agent.scale[...] = 2.0
    check(2, 3)


def test_integers_among_a_module_s_parameters_are_named():
    model = linear(4, 2)
    model.table = nnx.Param(jnp.asarray(np.arange(4)))
    with pytest.raises(mt.GradientError, match=r"model\['table'\].*has dtype int32: only floats"):
        mt.value_and_grad(lambda model, x: model(x).sum(1), devices=2)(model, X[0])


class Halves(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.asarray(np.ones(4, np.float32)))

    def __call__(self, x):
        self.weight[...] = self.weight[...] / 2
        return x @ self.weight[...]


class InLayers(nnx.Module):
    """Transforms that write all parameters, with the values that they had."""

    def __init__(self):
        make = nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs))
        self.layers = nnx.split_rngs(splits=2)(make)(nnx.Rngs(0))
        self.out = nnx.Linear(4, 1, rngs=nnx.Rngs(1))

    def __call__(self, x):
        x = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.layers
        )
        x = nnx.remat(lambda model, x: model.out(x) + x)(self, x)
        out = lambda model, x: model.out(x)
        return nnx.cond(jnp.bool(True), out, out, self, x)[:, 0]


def normed(kind):
    return kind(nnx.Linear(4, 1, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Halves, r"Halves\['weight'\] \(.*self.weight\[...\] / 2\)"),
        pytest.param(
            lambda: normed(nnx.WeightNorm),
            r"WeightNorm\['layer_instance'\]\['kernel'\] \(",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["own", "weight norm"],
)
def test_a_parameter_that_a_call_writes_into_is_named(make, name):
    """Lie: the weights that one device goes on with, or other ones and nobody is told."""
    model = make()
    told = rf"{name}.*only the optimizer changes parameters"
    with pytest.warns(mt.MultitowerWarning, match=f"(?i){told}"):
        mt.grad(lambda model, x: model(x).reshape(-1), devices=1, towers=2)(model, X[0])
    with pytest.warns(mt.MultitowerWarning, match=f"(?i){told}"):
        look_at_step(lambda model, x: model(x).reshape(-1), X[0], w=model, towers=2)
    (problem,) = mt.check_parallel(lambda model, x: model(x).reshape(-1), model, X[0]).problems
    assert problem.kind == "written"


@pytest.mark.slow
def test_parameters_that_keep_their_values_are_not_told_of():
    """Lie: a false alarm at nnx.scan, nnx.cond and nnx.remat; or at a copy that is scored."""
    assert mt.check_parallel(lambda model, x: model(x), InLayers(), X[0])
    mt.grad(lambda model, x: model(x), devices=1, towers=2)(InLayers(), X[0])
    scores = lambda model, x: {"y": model(x)}
    mt.evaluate(scores, Halves(), X[0], global_batch=8, devices=1)  # warnings are errors


def test_random_streams_that_the_loss_of_a_step_takes_from_outside():
    """Lie: Flax's words about trace levels, with a note about numbers of rows."""
    rngs, dropout = nnx.Rngs(0), nnx.Dropout(0.5)
    step = mt.train_step(
        lambda model, x: model(dropout(x, rngs=rngs))[:, 0], optax.sgd(0.1), devices=1, towers=2
    )
    with pytest.raises(flax.errors.TraceContextError) as caught:
        step(step.init(linear(4, 1)), X[0])
    note = "".join(caught.value.__notes__)
    assert "draws from an nnx.Rngs" in note
    assert "part of the module that is the first argument" in note


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 2])
def test_a_model_that_is_put_on_all_devices_stays_there(num):
    # Lie: the line of the guide on existing loops, and yet a second program in the second step.
    everywhere = NamedSharding(Mesh(mt.devices(num), "towers"), PartitionSpec())
    model = Net()
    everything = (model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param))
    nnx.update(everything, jax.device_put(nnx.state(everything), everywhere))
    before = [leaf.sharding for leaf in jax.tree.leaves(nnx.state(everything))]

    @nnx.jit
    def step(model, optimizer, x):
        loss, gradients = mt.value_and_grad(mean_loss, devices=num)(model, x)
        optimizer.update(model, gradients)
        return loss

    step(*everything, X[0])
    assert [leaf.sharding for leaf in jax.tree.leaves(nnx.state(everything))] == before
