"""mt.ratio and reduction="sum": losses that are no mean over rows, exact for any rows and towers.

The lies: the mean of the towers' own quotients, a regulariser for each tower, rows that only fill
up and count.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import multitower as mt
import trees
from slow import slow_but_for

WAYS = {
    "fast": {"devices": 4},
    "same bits": {"devices": 1, "towers": 4},  # the same bits on more devices: below
    "same bits, uneven": {"devices": 2, "towers": 5},
}
# Every way is tried every day with some number of rows, below.
fast_every_day = pytest.mark.parametrize("way", slow_but_for(["fast"], WAYS))
# Every number of rows in some way, and every way with some number of rows.
any_rows = pytest.mark.parametrize(
    ("way", "num_rows"),
    [
        ("fast", 13),
        ("same bits", 3),
        ("same bits, uneven", 16),
        pytest.param("fast", 3, marks=pytest.mark.slow),
        pytest.param("same bits", 16, marks=pytest.mark.slow),
        pytest.param("same bits, uneven", 13, marks=pytest.mark.slow),
    ],
)
RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=4).astype(np.float32), "b": np.float32(0.3)}


def batch_of(num_rows):
    """Sequences of very different lengths, those of the last rows empty."""
    rng = np.random.default_rng(1)
    lengths = np.maximum(np.arange(num_rows)[::-1] % 7 - 1, 0)
    return {
        "x": rng.normal(size=(num_rows, 6, 4)).astype(np.float32),
        "mask": np.arange(6) < lengths[:, None],
    }


def token_losses(params, batch):
    return (batch["x"] @ params["w"] + params["b"]) ** 2


def masked(params, batch):
    return mt.ratio(token_losses(params, batch) * batch["mask"], batch["mask"])


def by_hand(params, batch):
    """The same in float64, with its gradients."""
    x, mask = batch["x"].astype(float), batch["mask"].astype(float)
    wrong = x @ params["w"].astype(float) + float(params["b"])
    count = mask.sum()
    gradients = {
        "w": (2 * (wrong * mask)[..., None] * x).sum((0, 1)) / count,
        "b": 2 * (wrong * mask).sum() / count,
    }
    return (wrong**2 * mask).sum() / count, gradients


assert_close = functools.partial(trees.assert_close, rtol=2e-5)


@any_rows
def test_the_mean_over_tokens_that_are_not_masked(way, num_rows):
    batch = batch_of(num_rows)
    found = mt.value_and_grad(masked, **WAYS[way])(PARAMS, batch)
    value, gradients = by_hand(PARAMS, batch)
    assert_close(found, (value, gradients))
    assert_close(mt.grad(masked, **WAYS[way])(PARAMS, batch), gradients)
    assert found[0].shape == ()


def test_outside_of_towers_it_is_the_quotient():
    batch = batch_of(13)
    assert_close(jax.jit(jax.value_and_grad(masked))(PARAMS, batch), by_hand(PARAMS, batch))
    outside = masked(PARAMS, batch)
    assert isinstance(outside, jax.Array)
    assert_close(outside, by_hand(PARAMS, batch)[0])


@fast_every_day
def test_a_jitted_loss_that_was_called_outside_before(way):
    """Lie: what JAX keeps of the first call is the towers' own quotient."""
    jitted = jax.jit(masked)
    batch = batch_of(13)
    outside = jitted(PARAMS, batch)
    found = mt.value_and_grad(jitted, **WAYS[way])(PARAMS, batch)
    assert_close(found, by_hand(PARAMS, batch))
    assert_close(jitted(PARAMS, batch), outside)


@fast_every_day
def test_inside_other_transformations(way):
    batch = batch_of(13)
    devices = 5 if "uneven" in way else 2  # equally many towers each: a program for all devices
    run = mt.value_and_grad(masked, **{**WAYS[way], "devices": devices})
    assert_close(jax.jit(run)(PARAMS, batch), by_hand(PARAMS, batch))


def mixture(params, batch):
    """Everything that may be done with a ratio."""
    mask = batch["mask"]
    first = masked(params, batch)
    second = mt.ratio(jnp.abs(batch["x"] @ params["w"]).sum(1), np.float32(6) * mask[:, 0])
    decay = 0.1 * (params["w"] ** 2).sum()
    return decay - np.float32(2) * first * 0.5 / 4 + (1 - second) * params["b"] - (-first) + 1


@pytest.mark.slow
@any_rows
def test_sums_products_and_regularisers(way, num_rows):
    batch = batch_of(num_rows)
    if num_rows == 3:
        batch["mask"] = np.ones_like(batch["mask"])
    found = mt.value_and_grad(mixture, **WAYS[way])(PARAMS, batch)
    assert_close(found, jax.jit(jax.value_and_grad(mixture))(PARAMS, batch))


@pytest.mark.slow
@any_rows
def test_losses_of_rows_are_added_as_their_mean(way, num_rows):
    """BERT: masked tokens, and one more loss for every sequence."""

    def loss(params, batch):
        tokens, of_rows = masked(params, batch), token_losses(params, batch).max(1)
        return 3 * of_rows + tokens - of_rows, {"both": tokens - of_rows}

    def on_one_device(params):
        value, metrics = loss(params, batch)
        return value.mean(), metrics["both"].mean()

    batch = batch_of(num_rows)
    (value, aux), gradients = mt.value_and_grad(loss, has_aux=True, **WAYS[way])(PARAMS, batch)
    expected = jax.jit(jax.value_and_grad(on_one_device, has_aux=True))(PARAMS)
    assert_close(((value, aux["both"]), gradients), expected)


@fast_every_day
def test_a_backward_rule_that_is_not_linear(way):
    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.02, 0.02),))

    def loss(params, batch):
        return mt.ratio(clipped(token_losses(params, batch)) * batch["mask"], batch["mask"])

    batch = batch_of(13)
    expected = jax.jit(jax.value_and_grad(loss))(PARAMS, batch)
    assert not np.allclose(expected[1]["b"], by_hand(PARAMS, batch)[1]["b"], rtol=0.1)
    assert_close(mt.value_and_grad(loss, **WAYS[way])(PARAMS, batch), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["fast", *(pytest.param(way, marks=pytest.mark.slow) for way in list(WAYS)[1:])]
)
def test_totals_without_rows_need_full_towers(way):
    def summed(params, batch):
        mask = batch["mask"]
        return mt.ratio((token_losses(params, batch) * mask).sum(), mask.sum())

    batch = batch_of(20)
    found = mt.value_and_grad(summed, **WAYS[way])(PARAMS, batch)
    assert_close(found, by_hand(PARAMS, batch))
    with pytest.raises(
        mt.OutputError, match=r"ratio of sums.*Return mt.ratio of one total and one weight per"
    ):
        mt.value_and_grad(summed, **WAYS[way])(PARAMS, batch_of(13))
    with_mean = lambda p, b: masked(p, b) + token_losses(p, b).mean()
    full = jax.jit(jax.value_and_grad(with_mean))(PARAMS, batch)
    assert_close(mt.value_and_grad(with_mean, **WAYS[way])(PARAMS, batch), full)
    with pytest.raises(mt.OutputError, match="a mean over rows added"):
        mt.value_and_grad(with_mean, **WAYS[way])(PARAMS, batch_of(13))


@pytest.mark.slow
@any_rows
def test_in_aux(way, num_rows):
    def loss(params, batch):
        wrong = token_losses(params, batch)
        seen = {"over": mt.ratio((wrong > 1) & batch["mask"], batch["mask"]), "row": wrong[:, 0]}
        return wrong.mean(1), seen

    batch = batch_of(num_rows)
    (_, aux), _ = mt.value_and_grad(loss, has_aux=True, **WAYS[way])(PARAMS, batch)
    wrong = np.asarray(token_losses(PARAMS, batch))
    expected = ((wrong > 1) & batch["mask"]).sum() / batch["mask"].sum()
    np.testing.assert_allclose(aux["over"], expected, rtol=1e-6)
    np.testing.assert_allclose(aux["row"], wrong[:, 0], rtol=1e-5)


@fast_every_day
def test_a_weight_that_depends_on_the_parameters_is_refused(way):
    def loss(params, batch):
        soft = jax.nn.sigmoid(batch["x"] @ params["w"])
        return mt.ratio(token_losses(params, batch) * soft, soft)

    for fun in (loss, jax.jit(loss)):
        with pytest.raises(mt.OutputError, match=r"depends on the parameters.*all_rows\(weight\)"):
            mt.value_and_grad(fun, **WAYS[way])(PARAMS, batch_of(13))


@fast_every_day
@pytest.mark.parametrize("kind", ["held", pytest.param("chosen", marks=pytest.mark.slow)])
def test_a_weight_that_moves_with_no_parameter_is_taken(way, kind):
    # The lie: it is computed from parameters, so it depends on them.
    def held(params, batch):
        soft = jax.lax.stop_gradient(jax.nn.sigmoid(batch["x"] @ params["w"]))
        return mt.ratio(token_losses(params, batch) * soft, soft)

    def chosen(params, batch):
        sure = batch["x"] @ params["w"] > 0
        return mt.ratio(token_losses(params, batch) * sure, sure)

    batch = batch_of(13)
    fun, *others = {"held": [held], "chosen": [chosen, jax.jit(chosen)]}[kind]
    expected = jax.jit(jax.value_and_grad(fun))(PARAMS, batch)
    for one in (fun, *others):
        assert_close(mt.value_and_grad(one, **WAYS[way])(PARAMS, batch), expected)


def test_other_uses_are_refused_in_words():
    batch = batch_of(20)
    uses = {
        "a product": lambda r: r * r,
        "a number divided": lambda r: 1 / r,
        "a power": lambda r: r**2,
        "its value": lambda r: r * float(r) + abs(r),
        "a comparison": lambda r: r if r > 0 else -r,
        r"\.mean": lambda r: r.mean(),
        r"\+ with float32\[10, 1\]": lambda r: r + jnp.ones((10, 1)),
        "shape \\(2,\\) for 10 rows": lambda r: r + jnp.ones(2),
    }
    for message, use in uses.items():
        with pytest.raises((mt.OutputError, AttributeError), match=message):
            mt.grad(lambda p, b, use=use: use(masked(p, b)), devices=2)(PARAMS, batch)
    with pytest.raises(mt.OutputError, match="for 10 rows"):
        mt.grad(lambda p, b: mt.ratio(token_losses(p, b).sum(0), 6.0), devices=2)(PARAMS, batch)
    with pytest.raises(mt.OutputError, match="Leave reduction out"):
        mt.grad(masked, devices=2, reduction="sum")(PARAMS, batch)


APART = {
    "leaves": lambda ratios: sum(jax.tree.leaves(ratios)),
    "doubled": lambda ratios: jax.tree.map(lambda leaf: 2 * leaf, ratios["tokens"]),
    "jitted": jax.jit(lambda ratios: sum(jax.tree.leaves(ratios))),
}


@pytest.mark.slow
@pytest.mark.parametrize("use", APART.values(), ids=APART)
def test_a_ratio_that_is_taken_apart_is_told_of(use):
    """Lie: weights are losses, too, for what takes all leaves of a tree."""

    def loss(params, batch):
        mask = batch["mask"][:, 0]
        rows = mt.ratio(token_losses(params, batch)[:, 0] * mask, mask)
        return use({"rows": rows, "tokens": 2 * rows})

    with pytest.warns(mt.errors.MultitowerWarning, match="was taken apart"):
        mt.value_and_grad(loss, **WAYS["fast"])(PARAMS, batch_of(4))


def test_a_ratio_may_be_passed_through_trees_and_calls():
    def loss(params, batch):
        stopped = jax.lax.stop_gradient(masked(params, batch))
        both = jax.checkpoint(lambda params: [masked(params, batch), stopped])(params)
        return sum(jax.tree.leaves(both, is_leaf=lambda x: not isinstance(x, list)))

    batch = batch_of(4)
    value, gradients = mt.value_and_grad(loss, **WAYS["fast"])(PARAMS, batch)
    expected, of_one = by_hand(PARAMS, batch)
    assert_close((value, gradients), (2 * expected, of_one))


@pytest.mark.slow
def test_narrow_numbers_are_added_one_after_the_other_as_on_one_device():
    """Lie: 256 + 1 is 256 in bfloat16, if they are added to each other first."""

    def loss(params, batch):
        return masked(params, batch) + jnp.bfloat16(256) + jnp.bfloat16(1)

    batch = batch_of(4)
    value, _ = mt.value_and_grad(loss, **WAYS["fast"])(PARAMS, batch)
    assert_close(value, loss(PARAMS, batch))


def test_uses_that_jax_refuses_get_a_note():
    # Lie: jnp.exp of a ratio has to do with the number of rows of a tower.
    def in_a_loop(p, b):
        return jax.lax.scan(lambda c, _: (c + masked(p, b), None), 0.0, None, 2)[0]

    uses = (
        lambda p, b: jnp.exp(masked(p, b)),
        lambda p, b: jnp.stack([masked(p, b)]).sum(),
        lambda p, b: sum(jnp.sum(x) for x in jax.tree.leaves(jax.grad(masked)(p, b))),
        in_a_loop,
    )
    for use in uses:
        with pytest.raises(TypeError) as told:
            mt.grad(use, devices=2)(PARAMS, batch_of(4))
        (note,) = [one for one in told.value.__notes__ if "tower" in one]
        assert "Return it as the loss or as a metric" in note


@pytest.mark.parametrize("mapped", ["vmap", "map", "sums"])
def test_a_ratio_for_each_row_is_refused(mapped):
    # Lie: the mean over tokens, where one device has the mean over rows of their own means.
    def of_row(params, row):
        losses = token_losses(params, jax.tree.map(lambda x: x[None], row))[0] * row["mask"]
        if mapped == "sums":
            return mt.ratio(losses.sum(), row["mask"].sum())
        return mt.ratio(losses, row["mask"])

    def fun(params, batch):
        if mapped == "map":
            return jax.lax.map(functools.partial(of_row, params), batch)
        return jax.vmap(of_row, (None, 0))(params, batch)

    with pytest.raises(mt.OutputError, match=r"inside jax.vmap.*mt.ratio of both outside"):
        mt.value_and_grad(fun, devices=2)(PARAMS, batch_of(5))
    with pytest.raises(mt.OutputError, match=r"inside jax.vmap"):
        mt.evaluate(lambda p, b: {"loss": fun(p, b)}, PARAMS, batch_of(5), global_batch=4)


@pytest.mark.slow
def test_a_step_inside_the_loss_as_the_note_says_it():
    def added(x):
        return jax.lax.psum(x, "towers")

    def stepped(mean_gradient, p, b):
        return masked(jax.tree.map(lambda w, g: w - 0.1 * g, p, mean_gradient(p, b)), b)

    def over_towers(p, b):
        total = jax.grad(lambda p: (token_losses(p, b) * b["mask"]).sum())(p)
        return jax.tree.map(lambda g: added(g) / added(b["mask"].sum()), total)

    batch = batch_of(8)
    found = mt.value_and_grad(functools.partial(stepped, over_towers), devices=4)(PARAMS, batch)
    expected = jax.value_and_grad(functools.partial(stepped, jax.grad(masked)))(PARAMS, batch)
    assert_close(found, expected)


@pytest.mark.parametrize(
    ("loss", "dtype", "devices"),
    [
        (masked, np.float32, (1, 3)),
        pytest.param(mixture, np.float32, (1, 2, 3), marks=pytest.mark.slow),
        pytest.param(mixture, jnp.bfloat16, (1, 2, 3), marks=pytest.mark.slow),
    ],
)
def test_the_same_bits_on_any_number_of_devices(loss, dtype, devices):
    params = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
    found = {
        mt.fingerprint(mt.value_and_grad(loss, devices=d, towers=8)(params, batch_of(13)))
        for d in devices
    }
    assert len(found) == 1


# ---------------------------------------------------------------- reduction="sum"


def row_losses(params, batch):
    return token_losses(params, batch).sum(1)


@any_rows
def test_a_sum_over_all_rows(way, num_rows):
    batch = batch_of(num_rows)
    expected = jax.jit(jax.value_and_grad(lambda p, b: row_losses(p, b).sum()))(PARAMS, batch)
    options = {**WAYS[way], "reduction": "sum"}
    assert_close(mt.value_and_grad(row_losses, **options)(PARAMS, batch), expected)
    assert_close(mt.grad(row_losses, **options)(PARAMS, batch), expected[1])


@fast_every_day
def test_a_scalar_that_is_a_sum(way):
    summed = lambda p, b: row_losses(p, b).sum()
    options = {**WAYS[way], "reduction": "sum"}
    batch = batch_of(20)
    found = mt.value_and_grad(summed, **options)(PARAMS, batch)
    assert_close(found, jax.jit(jax.value_and_grad(summed))(PARAMS, batch))
    with pytest.raises(mt.OutputError, match="a scalar loss"):
        mt.value_and_grad(summed, **options)(PARAMS, batch_of(13))


def test_what_is_no_reduction_is_refused():
    for make in (mt.value_and_grad, mt.grad):
        with pytest.raises(mt.ArgumentError, match="reduction='median': say 'mean'"):
            make(row_losses, reduction="median")


def test_a_loss_that_is_a_ratio_for_some_shapes_alone():
    """Lie: what was found for the first shapes holds for others; a weight was a parameter."""
    loss = lambda w, x: mt.ratio(w * x, 2 * jnp.ones_like(x)) if x.ndim == 2 else w * x
    x = np.arange(8, dtype=np.float32)
    for order in (1, -1):
        run = mt.value_and_grad(loss, devices=2, towers=4)
        for one, factor in [(x, 1.0), (x[:, None], 0.5)][::order]:
            found = run(3.0, one)
            np.testing.assert_allclose(found, (3 * factor * x.mean(), factor * x.mean()))
