"""The transformer against NumPy in float64, and its cached form against the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from multitower.recipes.networks import transformer
from multitower.recipes.packing import SEPARATOR, VOCABULARY, pack, take_tokens
from numpy_transformer import numpy_logits

LENGTH = 12
forward = jax.jit(transformer.logits)


@pytest.fixture(scope="module")
def params():
    made = transformer.init(
        jax.random.key(0), vocabulary=VOCABULARY, num_blocks=2, width=16, num_heads=2
    )
    # Scales that matter: at one, a scale left out would not be seen.
    draw = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: leaf + np.float32(0.1) * draw.normal(size=leaf.shape), made)


@pytest.mark.slow
def test_the_scores_of_packed_documents_are_those_of_each_alone(params):
    # The lies: attention across a border, or to what is yet to come; positions that go on.
    documents = [[SEPARATOR, 1, 2, 3, 4], [SEPARATOR, 9, 8], [SEPARATOR, 7, 7, 7]]
    tokens = np.concatenate(documents, dtype=np.int32)[None]
    segments = np.cumsum(tokens == SEPARATOR, axis=1, dtype=np.int32)
    expected = np.concatenate([numpy_logits(params, document) for document in documents])
    found = forward(params, tokens, segments)
    assert (found.shape, found.dtype) == ((1, 12, VOCABULARY), jnp.float32)
    np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_another_document_does_not_change_a_bit_of_the_others(params):
    rows = pack([b"abc", b"defg", b"hi"], LENGTH)
    others = pack([b"abc", b"XYZW", b"hi"], LENGTH)
    found, changed = (
        np.asarray(forward(params, *take_tokens(one)[:2]))[0] for one in (rows, others)
    )
    is_other = np.isin(np.arange(LENGTH), range(5, 9))
    np.testing.assert_array_equal(found[~is_other], changed[~is_other])
    assert (found[is_other] != changed[is_other]).any(axis=1).all()


@pytest.mark.slow
def test_what_is_yet_to_come_does_not_change_a_bit(params):
    tokens = np.arange(LENGTH, dtype=np.int32)[None]
    other = np.where(np.arange(LENGTH) == 7, np.int32(99), tokens)
    found = forward(params, tokens, np.zeros_like(tokens))
    changed = forward(params, other, np.zeros_like(tokens))
    np.testing.assert_array_equal(found[0, :7], changed[0, :7])
    assert (found[0, 7:] != changed[0, 7:]).any(axis=1).all()


@pytest.mark.slow
def test_cached_scores_are_those_of_the_whole(params):
    tokens = jnp.array([SEPARATOR, *range(60, 60 + LENGTH - 1)])
    whole = forward(params, tokens[None], jnp.zeros((1, LENGTH), int))[0]
    step = jax.jit(transformer.decode)
    cache = transformer.empty_cache(params, LENGTH)
    for position, token in enumerate(tokens):
        scores, cache = step(params, cache, token, jnp.int32(position))
        np.testing.assert_allclose(scores, whole[position], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_full_cache_forgets_the_oldest_token_first(params):
    # One block: a token then depends on its own window alone, wherever that begins.
    small = {**params, "blocks": params["blocks"][:1]}
    step = jax.jit(transformer.decode)
    cache = transformer.empty_cache(small, 4)
    tokens = [5, 6, 7, 8, 9, 10]
    for position, token in enumerate(tokens):
        scores, cache = step(small, cache, jnp.int32(token), jnp.int32(position))
    expected = numpy_logits(small, tokens[-4:])[-1]
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "atol"),
    [(jnp.bfloat16, 0.05), pytest.param(jnp.float16, 0.005, marks=pytest.mark.slow)],
)
def test_16_bit_weights_give_float32_scores_that_are_close(params, dtype, atol):
    tokens = np.arange(LENGTH, dtype=np.int32)[None]
    narrow = jax.tree.map(lambda leaf: np.asarray(leaf).astype(dtype), params)
    found = forward(narrow, tokens, np.zeros_like(tokens))
    assert found.dtype == jnp.float32
    wide = forward(params, tokens, np.zeros_like(tokens))
    # bfloat16 has 8 bits, float16 11; the scores are of size 1.
    np.testing.assert_allclose(found, wide, atol=atol)
