"""Equal programs are compiled once for a device, and nothing else is taken for equal."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.engines.equal_programs import EqualPrograms
from multitower.engines.executable import settings, signature
from multitower.stages import programs
from processes import run_python

X = np.arange(6, dtype=np.float32)
SHAPE = jax.ShapeDtypeStruct((6,), np.float32)


def numbered(number, factor=2.0):
    def program(values):
        (value,) = values.values()
        return {number: value * factor}, [value + 1]

    return program


def test_names_are_no_difference_and_all_else_is():
    # The lies: a program per stage though all are equal; the program of another stage.
    equal = EqualPrograms()
    devices = jax.devices()[:2]
    found = [
        equal.compile_for_each(numbered(*given), ({n: SHAPE},), devices)
        for n, given in enumerate([(3,), (5,), (3, 4.0)])
    ]
    one, other, another = (each[0].compiled for each in found)
    assert one is other
    assert one is not another
    assert found[0][1].compiled is found[1][1].compiled
    assert found[0][1].compiled is not one
    for number, factor, each in zip((3, 5, 3), (2, 2, 4), found, strict=True):
        for device, executable in zip(devices, each, strict=True):
            product, (rows,) = executable({7: jax.device_put(X, device)})
            assert product[number].devices() == {device}
            np.testing.assert_array_equal(product[number], X * factor)
            np.testing.assert_array_equal(rows, X + 1)
            assert executable.out_info[0][number].shape == (6,)


def test_a_number_that_adapts_to_other_dtypes_is_another_program():
    # The lie: the type of a result is in the text of a program.
    equal = EqualPrograms()
    shapes = [jax.ShapeDtypeStruct((), np.float32, weak_type=weak) for weak in (True, False)]
    one, other = (
        equal.compile_for_each(lambda x: x * 2, (shape,), jax.devices()[:1])[0] for shape in shapes
    )
    assert one.compiled is not other.compiled
    assert one(jnp.asarray(2.0)).weak_type
    assert not other(jnp.float32(2)).weak_type


WITH_ARRAYS = """
import jax, numpy as np
from multitower.engines.equal_programs import EqualPrograms
from multitower.engines.executable import settings, signature

equal, shape = EqualPrograms(), jax.ShapeDtypeStruct((64,), np.float32)
large = np.arange(64.0 * 64, dtype="f").reshape(64, 64)
for y in (large, -large):
    (program,) = equal.compile_for_each(lambda x, y=y: x + y, (shape,), jax.devices()[:1])
    print(program(jax.numpy.ones(64)).max())
"""


@pytest.mark.slow
def test_arrays_that_programs_close_over_are_a_difference():
    """Lie: the stage of another array, where JAX passes such arrays beside the arguments."""
    told = run_python("-c", WITH_ARRAYS, JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS="True")
    assert told.split() == ["4096.0", "1.0"]


def test_arguments_that_a_program_does_not_need_are_a_difference():
    # The lies: the same text of one that returns its first argument and one with its second; and
    # of two with other arguments that they do not need.
    equal = EqualPrograms()
    number = jax.ShapeDtypeStruct((), np.int32)
    pick = lambda place, *shapes: equal.compile_for_each(
        lambda *values: values[place] + 1, shapes, jax.devices()[:1]
    )[0]
    first, second, third = pick(0, SHAPE, SHAPE), pick(1, SHAPE, SHAPE), pick(1, number, SHAPE)
    x, y = jnp.asarray(X), jnp.asarray(-X)
    np.testing.assert_array_equal(first(x, y), X + 1)
    np.testing.assert_array_equal(second(x, y), 1 - X)
    np.testing.assert_array_equal(third(jnp.int32(0), y), 1 - X)


def test_memory_is_given_away_where_the_arguments_are_several_leaves():
    equal = EqualPrograms()
    add = lambda a, b: jax.tree.map(jnp.add, a, b)
    given = ({"u": SHAPE, "v": SHAPE},) * 2
    (program,) = equal.compile_for_each(add, given, jax.devices()[:1], donate=(1,))
    a, b = ({"u": jnp.asarray(X), "v": jnp.asarray(X + 1)} for _ in range(2))
    np.testing.assert_array_equal(program(a, b)["v"], 2 * X + 2)
    assert not any(leaf.is_deleted() for leaf in a.values())
    assert all(leaf.is_deleted() for leaf in b.values())


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "num_different"), [(1, 2), (2, 3)])
def test_stages_of_equal_layers_share_programs_on_a_device(devices, num_different, monkeypatch):
    # The first stage sends no cotangents back; the others are equal.
    made = []
    init = programs.StagePrograms.__init__

    def noted(self, *given, **options):
        init(self, *given, **options)
        made.append(self)

    monkeypatch.setattr(programs.StagePrograms, "__init__", noted)

    def losses(params, x):
        for w in params:
            x = mt.cut(jnp.tanh(x @ w))
        return (x**2).sum(1)

    step = mt.train_step(losses, optax.sgd(0.1), towers=2, stages=5, devices=devices)
    step(step.init([np.eye(4, dtype=np.float32)] * 4), np.ones((4, 4), np.float32))
    backward = [own[0].compiled for own in made[0].backward[:4]]
    assert len({id(one) for one in backward}) == num_different


def calling(host_function):
    def call(x):
        run = lambda a: host_function(np.asarray(a))
        return jax.pure_callback(run, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    return call


def test_a_callback_is_not_taken_for_another():
    """Lie: the text of a program shows which Python function it calls."""
    program = lambda x: calling(np.cos)(mt.cut(calling(np.sin)(x)))
    found = mt.make_parallel(program, devices=1, towers=2, stages=2)(X)
    np.testing.assert_allclose(found, np.cos(np.sin(X)), rtol=1e-6)


SETTINGS = {
    "jax_accurate_erf_inv": True,
    "jax_default_matmul_precision": "highest",
    "jax_default_prng_impl": "rbg",
    "jax_enable_x64": True,
    "jax_high_dynamic_range_gumbel": True,
    "jax_numpy_dtype_promotion": "strict",
    "jax_random_seed_offset": 1,
    "jax_threefry_partitionable": False,
}


@pytest.mark.parametrize("name", [name for name in SETTINGS if hasattr(jax.config, name)])
def test_a_setting_that_changes_results_is_in_the_key_of_a_program(name):
    """Lie: the program that was compiled under another setting of JAX."""
    before, kept = (settings(), signature(X)), getattr(jax.config, name)
    jax.config.update(name, SETTINGS[name])
    try:
        now = settings(), signature(X)
    finally:
        jax.config.update(name, kept)
    assert now[0] != before[0]
    assert now[1] != before[1]
    assert (settings(), signature(X)) == before
