"""What is around a call: another one, a mesh, disable_jit; dtypes that no device has. Each works
or is refused in words."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback

import multitower as mt

X = np.arange(8.0, dtype=np.float32)
EACH = pytest.mark.parametrize("towers", [None, 4])


def loss(w, x):
    return (w * x - 1) ** 2


def step_once(towers, loss=loss):
    step = mt.train_step(loss, optax.sgd(0.1), devices=1 if towers else 2, towers=towers)
    return step(step.init(np.float32(1)), X)


CALLS = {
    "grad": lambda towers: mt.grad(loss, devices=2, towers=towers)(1.0, X),
    "make_parallel": lambda towers: mt.make_parallel(lambda x: x, devices=2, towers=towers)(X),
    "train_step": step_once,
    "evaluate": lambda towers: mt.evaluate(
        lambda w, x: {"a": w * x}, 1.0, X, global_batch=4, devices=2, towers=towers
    ),
}


@pytest.mark.parametrize("name", CALLS)
@EACH
def test_a_mesh_of_the_users(name, towers):
    """Lie: a page of JAX's words about another mesh."""
    for axis in ("data", "towers"):  # by the name of ours, too
        mesh = jax.make_mesh((4,), (axis,), devices=jax.devices()[:4])
        with (
            jax.set_mesh(mesh),
            pytest.raises(mt.ConfigurationError, match=r"jax.set_mesh is active.*Call it outside"),
        ):
            CALLS[name](towers)
    CALLS[name](towers)


ON_A_MESH = {
    "evaluate": lambda w, x: mt.evaluate(lambda w, x: {"a": w * x}, w, x, global_batch=2),
    "check_parallel": lambda w, x: mt.check_parallel(loss, w, x),
    "make_batch": lambda w, x: mt.make_batch(x, global_batch=2, seed=0, step=0),
    "shard": lambda w, x: mt.shard(x, towers=3, devices=1),
    "average_gradients": lambda w, x: mt.average_gradients([x, x]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_A_MESH)
def test_arrays_on_a_mesh_with_explicit_axes(name):
    """Lie: a page of JAX's words about a gather. jax.make_mesh makes such meshes."""
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    w = jax.device_put(jnp.float32(1), jax.NamedSharding(mesh, jax.P()))
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
    found, expected = (jax.tree.leaves(ON_A_MESH[name](*given)) for given in [(w, x), (1.0, X)])
    if name != "check_parallel":
        np.testing.assert_array_equal(found[0], expected[0])
    with pytest.raises(mt.ArgumentError, match=r"(w|x) is on a mesh with the explicit axes"):
        jax.jit(mt.grad(loss, devices=2))(w, x)


def on_devices(how, mesh):
    split = jax.NamedSharding(mesh, jax.P("data"))
    if how == "shard_map":
        return jax.shard_map(jnp.sin, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"))
    if how == "in_shardings":
        return jax.jit(jnp.sin, in_shardings=split)
    if how == "device_put":
        return lambda x: jax.device_put(x, split)
    return lambda x: jax.lax.with_sharding_constraint(x, split)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["constraint", "device_put", "in_shardings", "shard_map"])
def test_shardings_inside_a_loss(how):
    """Lie: "safe to run data parallel", and then JAX's words about the devices of an argument."""
    auto = (jax.sharding.AxisType.Auto,)
    meshes = [jax.make_mesh((n,), ("data",), auto, devices=jax.devices()[:n]) for n in (1, 2)]
    puts = [on_devices(how, mesh) for mesh in meshes]
    here, apart = (lambda w, x, put=put: loss(w, put(x)) for put in puts)
    assert mt.check_parallel(here, 1.0, X)  # as a program for any number of devices does on one
    for call in (mt.grad(apart, devices=2), mt.grad(apart, devices=1, towers=2)):
        with pytest.raises(mt.ArgumentError, match="on several devices, and a tower runs on one"):
            call(1.0, X)
    with pytest.raises(mt.ArgumentError, match="on several devices, and a tower runs on one"):
        mt.check_parallel(apart, 1.0, X)


def explicit_mesh():
    return jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])


def test_a_reshard_inside_a_loss():
    """Lie: "enter your jit into a mesh context", which multitower then refuses."""
    apart = jax.NamedSharding(explicit_mesh(), jax.P("data"))
    loss_of = lambda w, x: jax.sharding.reshard(loss(w, x), apart)
    meets_others = lambda w, x: loss(w, jax.sharding.reshard(x, apart))
    said = {
        loss_of: r"^reshard .*on several devices, and a tower",
        meets_others: r"by jax.sharding.reshard, leave that out|^reshard .* a tower runs on one",
    }
    for resharded, words in said.items():
        for call in (mt.grad(resharded, devices=2), mt.grad(resharded, devices=1, towers=2)):
            with pytest.raises(mt.ArgumentError, match=words):
                call(1.0, X[:4])


@pytest.mark.parametrize(
    "put",
    [
        lambda x: jax.lax.with_sharding_constraint(x, jax.P("data")),
        lambda x: jnp.einsum("b,b->b", x, x, out_sharding=jax.P("data")),
        lambda x: jax.lax.with_sharding_constraint(
            x, jax.NamedSharding(explicit_mesh(), jax.P("data"))
        ),
    ],
    ids=["a spec", "out_sharding", "explicit axes"],
)
def test_shardings_that_jax_refuses_inside_a_loss(put):
    """Lie: "use jax.set_mesh", or that it were a matter of the number of rows."""
    call = mt.grad(lambda w, x: loss(w, put(x)), devices=2)
    with pytest.raises((RuntimeError, ValueError)) as told:
        call(1.0, X[:4])
    notes = [note for note in told.value.__notes__ if "multitower" in note]
    assert [note[:48] for note in notes] == ["multitower puts rows on devices itself, and a to"]


def test_a_call_in_place_of_pmap():
    """Lie: that the user has called jax.set_mesh."""
    with pytest.raises(mt.ConfigurationError, match=r"inside jax.pmap or jax.shard_map.*neither"):
        jax.pmap(lambda x: mt.grad(loss, devices=2)(1.0, x))(jnp.stack([X, X]))


STEPS = {
    "blocks": {"shard_update": True},
    "stages": {"stages": 1},
    "local": {"sync_every": 2},
    "rotation": {"updates": "asynchronous"},
}
NEED_VALUES = {
    "multitower.evaluate": lambda x: mt.evaluate(lambda w, x: {"a": w * x}, 1.0, x, global_batch=4),
    "multitower.predict": lambda x: mt.predict(lambda w, x: w * x, 1.0, x, global_batch=4),
    "multitower.check_parallel": lambda x: mt.check_parallel(loss, 1.0, x),
    "multitower.fingerprint": mt.fingerprint,
} | {
    f"step.init, {name}": lambda x, options=options: mt.train_step(
        loss, optax.sgd(0.1), devices=2, towers=2, **options
    ).init(x)
    for name, options in STEPS.items()
}


@pytest.mark.parametrize("name", NEED_VALUES)
def test_a_call_that_needs_values_inside_jit(name):
    """Lie: a page of JAX's words about an attribute of a tracer."""
    told = f"{name.split(',')[0]} is called inside jax.jit.*Call it outside"
    for transform in (jax.jit, jax.vmap):
        with pytest.raises(mt.ArgumentError, match=told):
            transform(NEED_VALUES[name])(X)


@pytest.mark.parametrize("towers", [None, 2])
def test_a_state_is_made_inside_jit(towers):
    step = mt.train_step(loss, optax.sgd(0.1, momentum=0.9), devices=2, towers=towers)
    made = step(jax.jit(step.init)(np.float32(1)), X)
    assert mt.fingerprint(made) == mt.fingerprint(step(step.init(np.float32(1)), X))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [  # every operation is a program there, on every device
        "make_parallel",
        "train_step",
        "grad",
        "evaluate",
    ],
)
def test_disable_jit(name):
    with jax.disable_jit():
        CALLS[name](None)
        with pytest.raises(mt.ConfigurationError, match=r"disable_jit.*leave out towers="):
            CALLS[name](4)


@pytest.mark.slow
@EACH
def test_make_parallel_inside_a_tower_is_the_function(towers):
    """Law L1 again: on one device it is the function, and so it is in a tower."""
    double = mt.make_parallel(lambda x: 2 * x, devices=2)
    outer = mt.make_parallel(lambda x: double(x) + x, devices=2, towers=towers)
    np.testing.assert_array_equal(outer(X), 3 * X)
    value, _ = mt.value_and_grad(lambda w, x: w * double(x), devices=2, towers=towers)(1.0, X)
    assert value == 7.0
    step_once(towers, lambda w, x: loss(w, double(x)))


def test_a_jitted_function_knows_where_it_is_called():
    """Lie: what JAX keeps of a call outside, a mean over these rows, is used in a tower too."""
    gradient = jax.jit(mt.grad(loss, devices=2))
    in_towers = mt.make_parallel(lambda x: gradient(1.0, x), devices=2, towers=2)
    gradient(1.0, X[:4])  # as many rows as a tower has
    with pytest.raises(mt.ArgumentError, match="grad is called inside"):
        in_towers(X)


@EACH
def test_gradients_inside_a_tower_are_refused(towers):
    """Lie: a mean over one tower's rows, taken for the mean over all."""
    inner = mt.grad(loss, devices=1)
    with pytest.raises(mt.ArgumentError, match=r"grad is called inside.*jax.value_and_grad"):
        mt.make_parallel(lambda x: x * inner(1.0, x), devices=2, towers=towers)(X)
    step = mt.train_step(loss, optax.sgd(0.1), devices=1)
    state = step.init(np.float32(1))
    with pytest.raises(mt.ArgumentError, match="train_step is called inside"):
        mt.make_parallel(lambda x: x * step(state, x)[1]["loss"], devices=2, towers=towers)(X)


def test_random_numbers_without_a_key_are_refused():
    # The lie: XLA draws the same ones for every device, and whenever it compiles.
    def loss(w, x):
        draw = lambda count, _: (count + 1, jax.lax.rng_uniform(0.0, 1.0, x.shape))
        _, noise = jax.lax.scan(draw, 0, None, 2)
        return (w * x + noise[0]).sum(1)

    with pytest.raises(mt.OutputError, match=r"rng_uniform at .*draws without a key"):
        mt.value_and_grad(loss, devices=2, towers=4)(1.0, np.ones((8, 3), np.float32))


def test_a_callback_in_an_order():
    def ordered(x):
        io_callback(lambda value: None, None, x, ordered=True)
        return x

    with pytest.raises(mt.OutputError, match=r"ordered=True.*Say ordered=False"):
        mt.make_parallel(ordered, devices=2, towers=4)(X)


@pytest.mark.slow
@EACH
def test_a_python_number_in_aux(towers):
    run = mt.value_and_grad(
        lambda w, x: (loss(w, x), {"kl": 0.0}), has_aux=True, devices=2, towers=towers
    )
    (_, aux), _ = run(1.0, X)
    assert aux["kl"] == 0.0
    _, metrics = step_once(towers, lambda w, x: (loss(w, x), {"kl": 0.0}))
    assert metrics["kl"] == 0.0


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (">f4", r"another order than this machine's. Pass x.astype\(x.dtype.newbyteorder"),
        (np.longdouble, r"no device has. Pass x.astype\(np.float32\)"),
    ],
)
def test_arrays_that_no_device_can_have(dtype, said):
    with pytest.raises(mt.ArgumentError, match=said):
        mt.grad(loss, devices=2)(1.0, X.astype(dtype))


@pytest.mark.parametrize("dtype", ["int4", "float8_e4m3fn", "float4_e2m1fn"])
@EACH
def test_narrow_dtypes(dtype, towers):
    rows = (jnp.arange(8) % 5).astype(dtype)
    run = mt.make_parallel(lambda x: x.astype(float) * 2, devices=2, towers=towers)
    refused = {"int4": "int8"}
    if jax.__version_info__ < (0, 11):
        refused["float4_e2m1fn"] = "bfloat16"
    if dtype in refused and towers:
        said = rf"dtype {dtype}.*Pass x.astype\(jnp.{refused[dtype]}\)"
        with pytest.raises(mt.ArgumentError, match=said):
            run(rows)
        return
    found = run(rows)
    np.testing.assert_array_equal(found, rows.astype(float) * 2)


@EACH
def test_a_transfer_guard(towers):
    """Copies of the user's rows are asked for: they are explicit."""
    compared = lambda w, x: loss(w, x) * x.std()
    with jax.transfer_guard("disallow"):
        mt.grad(loss, devices=2, towers=towers)(1.0, X)
        with pytest.warns(mt.MultitowerWarning, match="rows are brought together"):
            mt.grad(compared, devices=2, towers=towers)(1.0, X)  # it is looked at here, too


@pytest.mark.slow
@EACH
def test_a_transfer_guard_and_rows_on_a_device(towers):
    """Lie: NumPy rows pass, and where rows on a device begin is a number that JAX copies itself."""
    step = mt.train_step(loss, optax.sgd(0.1), devices=2, towers=towers)
    state, w, x = step.init(jnp.ones(())), jax.device_put(np.float32(1)), jax.device_put(X)
    few = [jax.device_put(X[:5])] if towers else []
    with jax.transfer_guard("disallow"):
        for rows in (x, *few):
            state, _ = step(state, rows)
            found = mt.predict(
                lambda w, x: w * x, w, rows, global_batch=4, devices=2, towers=towers
            )
            np.testing.assert_array_equal(found, rows)


@pytest.mark.slow
def test_a_step_of_a_loop_that_is_not_made_is_no_nan():
    """Lie: the mean over its rows, of which there are none, is, and jax_debug_nans ends the run."""
    metrics = lambda w, x: (loss(w, x), {"share": mt.ratio(w * x, x >= 0)})
    step = mt.train_step(metrics, optax.sgd(0.1), devices=2, sync_every=2, steps_per_call=2)
    with jax.debug_nans(True):
        state, _ = step(step.init(jnp.ones(())), [X, X])
        state, metrics = step(state, [X])
    assert len(metrics["loss"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [{}, {"sync_every": 2}, {"sync_every": 2, "towers": 2}],
    ids=["all together", "local", "local, same bits"],
)
def test_a_transfer_guard_and_steps(more):
    """Lie: the first look, or metrics of few steps, take numbers of the host; the state is gone."""
    step = mt.train_step(loss, optax.sgd(0.1), devices=2, steps_per_call=2, **more)
    state = step.init(jnp.float32(1))
    with jax.transfer_guard("disallow"):
        _, metrics = step(state, [X])
    assert metrics["loss"].shape == (1,)


@pytest.mark.slow
def test_a_transfer_guard_and_stages():
    two = lambda w, x: loss(w[1], loss(w[0], x))
    step = mt.train_step(two, optax.sgd(0.1), devices=2, towers=2, stages=2)
    state = step.init([jnp.float32(1)] * 2)
    with jax.transfer_guard("disallow"):
        step(state, X)


# ---------------------------------------------------------------- words


@EACH
@pytest.mark.parametrize(
    "fixed",
    [
        lambda w, x: (w * x).reshape(8, 1)[:, 0],
        lambda w, x: jax.lax.top_k(w * x, 5)[0],
    ],
)
def test_an_error_in_a_tower_says_so(fixed, towers):
    """Lie: JAX's words about two rows, where the user has passed eight."""
    for call in (
        lambda: mt.grad(fixed, devices=2, towers=towers)(1.0, X),
        lambda: mt.make_parallel(fixed, (None, 0), devices=2, towers=towers)(1.0, X),
        lambda: step_once(towers, fixed),
    ):
        with pytest.raises(Exception, match=r"reshape|top_k|operand") as told:
            call()
        rows = f"the rows of one tower, {2 if towers else 4} of the batch's"
        assert any(rows in note for note in told.value.__notes__)


def test_a_name_that_is_missing_has_nothing_to_do_with_rows():
    """Lie: a long note on closed-over arrays and shapes, under a misspelled name of a batch."""
    with pytest.raises(KeyError, match="imgae") as told:
        mt.grad(lambda w, batch: w * batch["imgae"], devices=2)(1.0, {"image": X})
    assert not any("multitower" in note for note in getattr(told.value, "__notes__", ()))


@pytest.mark.parametrize(
    ("loss", "given", "said"),
    [
        (lambda w, batch: w, (X, X), "takes 2 positional arguments but 3 were given"),
        (lambda w, batch, step: w, (X,), "missing 1 required positional argument: 'step'"),
        (lambda w, batch: w * batch["x"], ((X, X),), "tuple indices must be integers"),
        (lambda w, batch: w["scale"] * batch, (X,), "does not support string indexing"),
    ],
)
def test_an_error_of_python_says_what_was_passed(loss, given, said):
    """Lie: a long note on rows, where the function takes other arguments."""
    with pytest.raises(TypeError, match=said) as told:
        mt.value_and_grad(loss, devices=2)(1.0, *given)
    (note,) = (note for note in told.value.__notes__ if "multitower" in note)
    assert "to a loss first the parameters, then one batch" in note
    assert "rows of one tower" not in note


def test_a_batch_may_be_a_list_of_parts_with_numbers():
    """Lie: a list of rows, because it is as long as one."""
    parts = [(X, np.float32(weight)) for weight in range(9)]
    loss = lambda w, parts: sum(weight * w * x for x, weight in parts)
    assert mt.grad(loss, devices=2)(1.0, parts) == pytest.approx(36 * X.mean())


def test_an_error_inside_the_function_says_nothing_of_its_arguments():
    scaled = lambda x, scale: scale * x
    loss = lambda w, x: scaled(w * x)
    with pytest.raises(TypeError, match="missing 1 required positional") as told:
        mt.grad(loss, devices=2)(1.0, X)
    assert not any("to a loss first" in note for note in told.value.__notes__)


@EACH
def test_a_forgotten_array_is_told(towers):
    """Lie: JAX's words about shapes, where in_axes names one of two arrays with rows."""
    y = jnp.ones(8)
    forgetful = lambda w: ((w * X - y) ** 2).mean()
    with pytest.raises(TypeError, match="shapes") as told:
        mt.grad(forgetful, in_axes={"X": 0}, devices=2, towers=towers)(1.0)
    assert any("name its variable too, as in in_axes={'x'" in one for one in told.value.__notes__)


@pytest.mark.parametrize(
    ("wrong", "given", "note"),
    [
        (lambda x, n: x[:, : int(n)], (X[:, None], 2), "close over it, functools.partial"),
        (lambda x, n: x.reshape(-1, n), (X, 1), "close over it, functools.partial"),
        (lambda x, n: x * np.asarray(x), (X, 1), "those of jax.numpy"),
        (lambda x, n: x if (x > n).all() else -x, (X, 1), "jnp.where"),
        (lambda key, n: jax.random.normal(key, (n,)), (np.uint32([0, 1]), 1), "counts as two rows"),
    ],
)
def test_a_value_that_python_needs_is_told_what_to_do(wrong, given, note):
    """Lie: JAX's words about a tracer, or words about rows, where a number cannot be traced."""
    with pytest.raises(Exception, match=r"concrete|traced|key data") as told:
        mt.make_parallel(wrong, (0, None), devices=2)(*given)
    assert any(note in one for one in told.value.__notes__)


@EACH
@pytest.mark.parametrize(
    "options", [{}, {"sync_every": 2}, {"stages": 2}, {"updates": "asynchronous"}]
)
def test_a_metric_that_the_loss_keeps_is_refused(options, towers):
    """Lie: JAX's words about meshes, where a loss calls update_state as Keras' tutorials do."""

    class Metric:
        total = jnp.zeros(())

    def counting(w, x):
        Metric.total = Metric.total + loss(w, x).mean()
        return loss(w, x)

    if options and not towers:
        return
    calls = [lambda: mt.grad(counting, devices=2, towers=towers)(1.0, X)]
    step = mt.train_step(counting, optax.sgd(0.1), devices=2, towers=towers, **options)
    calls.append(lambda: step(step.init(1.0), X))
    for call in calls[bool(options) :]:
        Metric.total = jnp.zeros(())
        with pytest.raises(mt.ArgumentError, match="Return them as metrics or aux"):
            call()
    Metric.total = jnp.zeros(())
    with pytest.raises(jax.errors.UnexpectedTracerError) as told:
        mt.check_parallel(counting, 1.0, X)
    assert any("Return them as metrics or aux" in note for note in told.value.__notes__)


def written(x):
    """A function that writes into a reference of its own."""
    ref = jax.new_ref(jnp.zeros_like(x))
    ref[...] = 2 * x
    return ref[...]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"towers": 2}, {"shard_params": True}], ids=str)
def test_a_reference_inside_a_loss(options):
    step = mt.train_step(lambda w, x: loss(1, written(w * x)), optax.sgd(0.1), devices=2, **options)
    with pytest.warns(mt.MultitowerWarning, match=r"jax.new_ref \(swap at.*is not followed here"):
        state, _ = step(step.init(1.0), X)
    expected = 1 - 0.1 * jax.grad(lambda w: loss(2 * w, X).mean())(1.0)
    np.testing.assert_allclose(state.params, expected, rtol=1e-6)


@pytest.mark.slow
def test_a_reference_is_not_cut():
    """Lie: parameters without what was written into them; a page of JAX's words."""
    told = r"a jax.new_ref is used.*x = x\.at\[i\]"
    meeting = lambda w, x: loss(x, written(w * jax.lax.pmean(x.mean(), "towers")))
    with pytest.raises(mt.ArgumentError, match=told):
        mt.grad(meeting, devices=2, towers=2)(1.0, X)
    for options in ({"towers": 2, "stages": 1}, {"shard_params": True}):
        step = mt.train_step(loss, optax.sgd(0.1), devices=2, **options)
        with pytest.raises(mt.ArgumentError, match=told):
            step(step.init(lambda: written(jnp.ones(()))), X)
    step = mt.train_step(
        lambda w, x: loss(x, mt.cut(written(w))), optax.sgd(0.1), devices=2, towers=2, stages=2
    )
    with pytest.raises(mt.ArgumentError, match=told):
        step(step.init(1.0), X)


def test_a_reference_outside_of_a_loss():
    """Lie: an attribute that JAX's types lack; a check that writes, and says "safe"."""
    total = jax.new_ref(jnp.zeros(()))

    def adding(w, x):
        total[...] += x.sum()
        return loss(w, x)

    calls = [
        lambda: mt.grad(adding, devices=2)(1.0, X),
        lambda: mt.grad(adding, devices=2, towers=2)(1.0, X),
        lambda: mt.make_parallel(adding, (None, 0), devices=2)(1.0, X),
        lambda: mt.check_parallel(adding, 1.0, X),
    ]
    for options in ({}, {"towers": 2}, {"towers": 2, "stages": 1}, {"shard_params": True}):
        step = mt.train_step(adding, optax.sgd(0.1), devices=2, **options)
        calls.append(lambda step=step: step(step.init(1.0), X))
    for call in calls:
        with pytest.raises(mt.ArgumentError, match=r"made outside of it.*return the new value"):
            call()
    assert float(total[...]) == 0
    with pytest.raises(mt.ArgumentError, match=r"total is a jax\.Ref.*ref\[\.\.\.\]"):
        mt.grad(lambda w, x, total: loss(w, x) + total[...], in_axes=(None, 0, None))(1.0, X, total)


def test_slices_of_a_batch_are_told_what_to_do():
    """Lie: that every tower needs the whole of a slice, as MXNet's split_and_load makes them."""
    step = mt.train_step(lambda w, batch: w * batch["x"][0], optax.sgd(0.1), devices=2)
    with pytest.raises(mt.BatchError, match=r"slices of one batch, pass jnp\.concatenate"):
        step(step.init(1.0), {"x": [X[:5], X[5:]]})
    with pytest.raises(mt.BatchError) as told:
        step(step.init(1.0), {"x": X, "y": X[5:]})
    assert "slices" not in str(told.value)


def test_a_state_of_the_rows_is_told_where_it_belongs():
    """Lie: JAX's words about shapes, and no word about a recurrent network's carry."""
    step = mt.train_step(
        lambda w, x, *, model_state: (loss(w, x + model_state), {}, x + model_state),
        optax.sgd(0.1),
        towers=4,
        devices=2,
    )
    with pytest.raises(Exception, match="shapes") as told:
        step(step.init(1.0, model_state=jnp.zeros(8)), X)
    assert any("carry: make it an argument of mt.value" in note for note in told.value.__notes__)


@pytest.mark.parametrize("name", ["grad", "train_step", "make_parallel", "jit", "devices"])
def test_a_warning_points_at_the_line_of_the_user(name):
    """Lie: a warning at a line of the library, which nobody can change."""
    mixing = lambda w, x: loss(w, x - x.mean())
    calls = {
        "grad": lambda: mt.grad(mixing, devices=2)(1.0, X),
        "train_step": lambda: step_once(4, mixing),
        "make_parallel": lambda: mt.make_parallel(mixing, (None, 0), devices=2)(1.0, X),
        "jit": lambda: jax.jit(mt.grad(lambda w, x: loss(w, x - x.max()), devices=2))(1.0, X),
        "devices": lambda: mt.devices("gpu", soft=True),
    }
    with pytest.warns(mt.MultitowerWarning) as told:
        calls[name]()
    assert {one.filename for one in told} == {__file__}


def test_a_state_is_shown_as_a_summary():
    state, _ = step_once(4)
    assert repr(state).startswith("TrainState(step=1, params=<1 array, 1 elements>, opt_state=")
    assert "ema_params=None" in repr(state)
