"""A chain of stages against jax.grad of the whole, on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import multitower as mt
from multitower.errors import ArgumentError
from multitower.stages.chain import make_chain, shapes_of
from multitower.stages.marks import cut
from multitower.stages.passes.residuals import keep_residuals


def run_chain(loss, params, *rest, stages):
    """Loss, gradients and the chain, by all stages forward and backward."""
    flat, treedef = jax.tree.flatten(params)

    def tower(*leaves):
        value = loss(jax.tree.unflatten(treedef, leaves[: len(flat)]), *leaves[len(flat) :])
        return value, 2 * value

    chain = make_chain(jax.make_jaxpr(tower)(*flat, *rest), len(flat), stages)
    known = dict(zip(chain.inputs, [*flat, *rest], strict=True))
    for stage in chain.stages:
        sent = jax.jit(stage.forward)([known[n] for n in stage.inputs])
        known.update(zip(stage.sent, sent, strict=True))
    gradients = {n: np.zeros_like(known[n]) for n in chain.params}
    answers = {}
    for stage in reversed(chain.stages):
        backward = jax.jit(lambda *given, stage=stage: stage.backward(*given, chain.params))
        back = backward([known[n] for n in stage.inputs], [answers[n] for n in stage.answered])
        for number, one in back.gradients.items():
            gradients[number] = gradients[number] + np.asarray(one)
        for number, one in back.cotangents.items():
            answers.setdefault(number, []).append(one)
        if back.results:
            twice = back.results[0]
    found = [gradients[n] for n in chain.inputs[: len(flat)]]
    return np.asarray(twice) / 2, jax.tree.unflatten(treedef, found), chain


def check(loss, params, *rest, stages):
    value, gradients, chain = run_chain(loss, params, *rest, stages=stages)
    expected, wanted = jax.jit(jax.value_and_grad(loss))(params, *rest)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)
    assert len(chain.stages) == stages
    assert all(stage.segment.steps for stage in chain.stages)
    return chain


def array(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) / 2


BLOCKS = [array(4, 4, seed=n) for n in range(6)]
X = array(5, 4, seed=9)


def blocks(params, x, *, mark=lambda h: h):
    for w in params:
        x = mark(x + jnp.tanh(x @ w))
    return (x**2).mean()


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 3, 6])
def test_a_list_of_blocks_is_cut_into_equal_parts(stages):
    chain = check(blocks, BLOCKS, X, stages=stages)
    assert [chain.homes.count(s) for s in range(stages)] == [6 // stages] * stages


@pytest.mark.parametrize("stages", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 6))])
def test_a_list_of_blocks_is_cut_at_the_marks(stages):
    chain = check(lambda p, x: blocks(p, x, mark=cut), BLOCKS, X, stages=stages)
    assert sorted(chain.homes) == list(chain.homes)


def transformer(params, tokens, labels):
    table, layers = params
    x = table[tokens]
    for w in layers:
        x = cut((x + jnp.tanh(x @ w), tokens))[0]
    logits = x @ table.T
    return -(jax.nn.one_hot(labels, 7) * jax.nn.log_softmax(logits)).sum(-1).mean()


@pytest.mark.slow
def test_trap_tied_embeddings_live_in_the_first_stage_and_are_used_in_the_last():
    # The lie: the gradient of one of the two uses alone.
    tokens = np.arange(6).reshape(2, 3) % 7
    params = (array(7, 4), [array(4, 4, seed=n) for n in range(3)])
    chain = check(transformer, params, tokens, tokens[::-1].copy(), stages=4)
    assert chain.homes[0] == 0
    assert chain.users(chain.inputs[0]) == [0, 3]


def test_trap_residuals_and_shared_tables_skip_stages():
    # pytorch#127964, #152827: splitters that lose what skips a stage, or constants of several.
    def loss(params, x):
        table = jnp.sin(jnp.arange(4.0))
        first = cut(jnp.tanh(x @ params[0]))
        second = cut(jnp.tanh(first @ params[1]) * table)
        third = cut(jnp.tanh(second @ params[2]) + first * table)
        return ((third @ params[3] + first + second) ** 2).mean()

    check(loss, BLOCKS[:4], X, stages=4)


def test_trap_integers_and_keys_across_stages():
    # pytorch#127964: a splitter that wants a gradient of every array that crosses.
    def loss(params, x, key):
        one, two = jax.random.split(key)
        h = x @ params[0]
        order = jnp.argsort(h[:, 0])
        h, order = cut((h * jax.random.bernoulli(one, 0.5, h.shape), order))
        h = cut(jnp.tanh(h[order] @ params[1]))
        h = h * jax.random.bernoulli(two, 0.5, h.shape)
        return (h[order] @ params[2]).var()

    chain = check(loss, BLOCKS[:3], X, jax.random.key(0), stages=3)
    differentiated = [chain.avals[n].dtype for stage in chain.stages for n in stage.differentiated]
    assert {*differentiated} == {np.dtype(np.float32)}


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_trap_dropout_under_other_cuts_and_recomputation(stages):
    """pytorch#55036, OLMo-core#828: other masks when computed again, or when cut elsewhere."""

    def loss(params, x, key):
        for number, w in enumerate(params):
            kept = jax.random.bernoulli(jax.random.fold_in(key, number), 0.5, x.shape)
            x = cut(x + (x * kept) @ w)
        return x.mean()

    # Of powers of two, so that a mask is all that gradients can differ in.
    x, params = np.exp2(np.arange(20.0, dtype=np.float32) % 5).reshape(5, 4), BLOCKS[:3]
    chain = check(loss, params, x, jax.random.key(0), stages=stages)
    known = dict(zip(chain.inputs, [*params, x, jax.random.key(0)], strict=True))
    for stage in chain.stages[:-1]:
        values = [known[n] for n in stage.inputs]
        kept = keep_residuals(stage, shapes_of(chain.avals, stage.inputs), chain.params)
        made = kept.forward(values)
        known.update(zip(stage.sent, made, strict=False))
        cotangents = [[jnp.ones(chain.avals[n].shape)] for n in stage.answered]
        found = kept.backward(kept.take(values, made), cotangents, chain.params)
        again = stage.backward(values, cotangents, chain.params)
        for n, one in again.gradients.items():
            np.testing.assert_allclose(found.gradients[n], one, rtol=1e-6)


@pytest.mark.slow
def test_checkpoint_jit_and_backward_rules_inside():
    @jax.custom_vjp
    def double_back(x):
        return x

    double_back.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))

    @jax.jit
    def block(x, w):
        return cut(jax.checkpoint(lambda x: jax.nn.gelu(double_back(x) @ w))(x))

    def loss(params, x):
        for w in params:
            x = block(x, w)
        return (x**2).mean()

    check(loss, BLOCKS, X, stages=3)

    @jax.jit
    def unmarked(params, x):
        for w in params:
            x = jax.checkpoint(lambda x, w: cut(jax.nn.silu(x @ w)))(x, w)
        return (x**2).mean()

    check(unmarked, BLOCKS, X, stages=2)


@pytest.mark.slow
def test_what_is_done_to_parameters_before_the_model_is_done_where_they_are_used():
    """Lie: all parameters in the first stage, because the loss begins with them."""

    def normalised(params, x):
        return blocks([w / jnp.sqrt((w**2).sum()) for w in params], x)

    chain = check(normalised, BLOCKS, X, stages=3)
    assert list(chain.homes) == [0, 0, 1, 1, 2, 2]


@pytest.mark.slow
def test_a_checkpoint_around_all_is_cut_and_one_that_fits_is_not():
    chain = check(jax.checkpoint(blocks), BLOCKS, X, stages=3)
    assert [chain.homes.count(s) for s in range(3)] == [2, 2, 2]

    def by_pairs(params, x):
        for at in (0, 2, 4):
            x = jax.checkpoint(lambda p, x: x + jnp.tanh(jnp.tanh(x @ p[0]) @ p[1]))(
                params[at : at + 2], x
            )
        return (x**2).mean()

    chain = check(by_pairs, BLOCKS, X, stages=3)
    assert list(chain.homes) == [0, 0, 1, 1, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "reverse"),
    [
        (3, True),
        pytest.param(4, False, marks=pytest.mark.slow),
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(2, True, marks=pytest.mark.slow),
        pytest.param(3, False, marks=pytest.mark.slow),
        pytest.param(4, True, marks=pytest.mark.slow),
    ],
)
def test_a_scan_over_layers_is_cut_by_its_length(stages, reverse):
    def loss(params, x):
        def layer(h, w):
            h = h + jnp.tanh(h @ w)
            return h, h.mean()

        h, means = jax.lax.scan(layer, x, params, reverse=reverse)
        return (h**2).mean() + (means * jnp.arange(6)).sum()

    check(jax.jit(loss), np.stack(BLOCKS), X, stages=stages)


def test_trap_a_mark_that_nothing_uses_is_no_cut():
    def loss(params, x):
        h = jnp.tanh(x @ params[0])
        cut(h * 3)
        return ((cut(h) @ params[1]) ** 2).mean()

    check(loss, BLOCKS[:2], X, stages=2)
    with pytest.raises(ArgumentError, match=r"1 mt.cut.*2 stages at most. Mark 1 more"):
        run_chain(loss, BLOCKS[:2], X, stages=3)


def test_a_parameter_behind_stop_gradient_and_one_that_nobody_uses():
    def loss(params, x):
        h = cut(x @ params[0] * jax.lax.stop_gradient(params[1]).sum())
        return ((h @ params[2]) ** 2).mean()

    assert check(loss, BLOCKS[:4], X, stages=2).homes == (0, 0, 1, 1)


def test_results_that_no_stage_computes_are_those_of_the_tower():
    # The lies: a number of the loss that is 0, another array in place of one that passes through.
    table = jnp.arange(3.0)

    def tower(first, second, x):
        h = cut(x @ first)
        return (h @ second).sum(), 1.5, x, table, h.sum()

    given = [*BLOCKS[:2], X]
    chain = make_chain(jax.make_jaxpr(tower)(*given), 2, 2)
    known, found = dict(zip(chain.inputs, given, strict=True)), {}
    for stage in chain.stages:
        values = [known[n] for n in stage.inputs]
        known.update(zip(stage.sent, stage.forward(values), strict=True))
        ones = [[jnp.ones(chain.avals[n].shape)] for n in stage.answered]
        found.update(stage.backward(values, ones, chain.params).results)
    for place, expected in enumerate(tower(*given)[1:]):
        np.testing.assert_allclose(found[place], expected, rtol=1e-5)


def test_marks_one_right_after_the_other_are_two():
    # As where a block ends with one and the next begins with one.
    loss = lambda params, x: (cut(cut(x @ params[0])) @ params[1]).sum()
    assert len(make_chain(jax.make_jaxpr(loss)(BLOCKS[:2], X), 2, 3).stages) == 3


@jax.custom_vjp
def marked(x):
    return cut(2 * x)


marked.defvjp(lambda x: (marked(x), None), lambda _, g: (2 * g,))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (lambda x: jax.lax.scan(lambda h, _: (cut(2 * h), None), x, None, length=3)[0],
         r"inside a loop"),
        (lambda x: jax.lax.while_loop(lambda h: h.sum() < 9, lambda h: cut(2 * h), x),
         r"inside a loop \(while_loop\)"),
        (lambda x: jax.lax.cond(x.sum() > 0, lambda h: cut(2 * h), lambda h: h, x),
         "inside a branch"),
        (marked, "inside custom_vjp_call"),
    ],
    ids=["scan", "while", "cond", "custom_vjp"],
)  # fmt: skip
def test_trap_a_mark_in_a_loop_is_refused_with_its_line(part, message):
    def loss(params, x):
        return (part(x) @ params[0]).sum()

    with pytest.raises(ArgumentError, match=rf"test_chain.py:\d+: .*{message}"):
        run_chain(loss, BLOCKS[:1], X, stages=2)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (lambda x: x, "dot_general"),
        (lambda x: jax.lax.while_loop(lambda h: h.sum() < 9, lambda h: h @ (h.T @ h) + 1, x),
         "while"),
    ],
)  # fmt: skip
def test_one_equation_with_most_of_the_work_is_refused_with_its_line(part, name):
    def loss(params, x):
        return ((part(x) @ params[0]) ** 2).mean()

    with pytest.raises(ArgumentError, match=rf"{name} at test_chain.py:\d+.*% of the work"):
        run_chain(loss, BLOCKS[:1], X, stages=3)


def test_a_mark_is_the_identity_elsewhere():
    tree = {"h": jnp.ones(2), "n": 3, "s": "text"}
    assert mt.fingerprint(cut({"h": tree["h"]})) == mt.fingerprint({"h": tree["h"]})
    assert cut(tree)["n"] == 3
    assert jax.vmap(jax.grad(lambda x: cut(x) ** 2))(jnp.arange(3.0)).tolist() == [0, 2, 4]
