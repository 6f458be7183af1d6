"""A decoder-only transformer in plain JAX: parameters are a tree, the model is a function of it.

Embedding; blocks of causal attention with rotary positions and a SwiGLU network, each after an
RMSNorm and added to its input; RMSNorm; the embedding again. No biases.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import multitower as mt

Params = dict[str, Any]
# For each block the keys and the values, both of shape (context, heads, width of a head).
Cache = list[tuple[jax.Array, jax.Array]]

_EPSILON = 1e-6
_LONGEST_WAVE = 10_000.0


def init(key: jax.Array, *, vocabulary: int, num_blocks: int, width: int, num_heads: int) -> Params:
    """Draws first parameters: normal weights, scales one.

    Args:
        key: a typed key, shape ().
        vocabulary: how many tokens there are.
        num_blocks: how many blocks.
        width: numbers for each token between blocks, a multiple of `2 * num_heads`.
        num_heads: of the attention.

    Returns:
        A tree of float32 arrays: `"embedding"`, shape (vocabulary, width); `"blocks"`, a list of
        dicts; `"norm"`, shape (width,).

    Example:
        >>> import jax
        >>> from multitower.recipes.networks import transformer
        >>> params = transformer.init(
        ...     jax.random.key(0), vocabulary=257, num_blocks=2, width=16, num_heads=2
        ... )
        >>> params["embedding"].shape, params["blocks"][0]["query"].shape
        ((257, 16), (16, 2, 8))

    Source: Vaswani et al. 2017; Radford et al. 2019 (smaller weights before additions, tied
    embedding); Zhang and Sennrich 2019 (RMSNorm); Su et al. 2021 (rotary positions); Shazeer 2020
    (SwiGLU).
    """
    hidden = 8 * round(width / 3)  # as many weights as four times the width without a gate
    head = (num_heads, width // num_heads)
    keys = iter(jax.random.split(key, 1 + 7 * num_blocks))

    def draw(shape: tuple[int, ...], inputs: int, share: float = 1.0) -> jax.Array:
        return jax.random.normal(next(keys), shape) * (share / math.sqrt(inputs))

    # So that the sum over all blocks is as large as its terms.
    share = 1 / math.sqrt(2 * num_blocks)

    def block() -> Params:
        return {
            "attention_norm": jnp.ones(width),
            "query": draw((width, *head), width),
            "key": draw((width, *head), width),
            "value": draw((width, *head), width),
            "out": draw((*head, width), width, share),
            "mlp_norm": jnp.ones(width),
            "gate": draw((width, hidden), width),
            "up": draw((width, hidden), width),
            "down": draw((hidden, width), hidden, share),
        }

    return {
        "embedding": 0.02 * jax.random.normal(next(keys), (vocabulary, width)),
        "blocks": [block() for _ in range(num_blocks)],
        "norm": jnp.ones(width),
    }


def logits(params: Params, tokens: jax.Array, segments: jax.Array) -> jax.Array:
    """Scores what follows every token.

    Rotary attention depends on differences of positions alone, so that a document has the same
    scores wherever in its row it begins.

    Args:
        params: from `init`.
        tokens: int32, shape (rows, length).
        segments: int32, the same shape: a token sees itself and those before it that have the same
            segment.

    Returns:
        Unnormalised log-probabilities, float32, shape (rows, length, vocabulary).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from multitower.recipes.networks import transformer
        >>> sizes = {"vocabulary": 257, "num_blocks": 2, "width": 16, "num_heads": 2}
        >>> params = jax.eval_shape(lambda key: transformer.init(key, **sizes), jax.random.key(0))
        >>> tokens = jnp.zeros((3, 5), jnp.int32)
        >>> jax.eval_shape(transformer.logits, params, tokens, tokens).shape
        (3, 5, 257)
    """
    positions = jnp.arange(tokens.shape[1])

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        seen = positions[:, None] >= positions
        seen = seen & (segments[:, :, None] == segments[:, None, :])
        query, key = rotate(query, positions), rotate(key, positions)
        given = (query, key, value)
        if value.dtype == jnp.float16:  # on CPUs, JAX has no attention in it
            given = tuple(x.astype(jnp.float32) for x in given)
        return jax.nn.dot_product_attention(*given, mask=seen[:, None]).astype(value.dtype)

    h = params["embedding"][tokens]
    for number, block in enumerate(params["blocks"]):
        h = _block(block, mt.cut(h) if number else h, attend)
    return _scores(params, h)


def empty_cache(params: Params, context: int) -> Cache:
    """Room for the keys and values of so many tokens.

    Args:
        params: from `init`.
        context: how many tokens a token sees.

    Returns:
        Zeros.
    """
    shapes = [(context, *block["key"].shape[1:]) for block in params["blocks"]]
    dtype = params["embedding"].dtype
    return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for shape in shapes]


def decode(
    params: Params, cache: Cache, token: jax.Array, position: jax.Array
) -> tuple[jax.Array, Cache]:
    """Scores what follows one token, with the keys and values of those before it.

    The last scores are those of `logits` for the tokens so far. Where there are more of them than
    the cache has room for, a token sees the last ones only, as many as there is room for.

    Args:
        params: from `init`.
        cache: from the token before; from `empty_cache` for the first one.
        token: int32, shape ().
        position: int32, shape (): how many tokens came before.

    Returns:
        Unnormalised log-probabilities, float32, shape (vocabulary,), and the new cache.
    """
    kept: Cache = []
    h = params["embedding"][token[None, None]]
    for block, (keys, values) in zip(params["blocks"], cache, strict=True):

        def attend(
            query: jax.Array,
            key: jax.Array,
            value: jax.Array,
            keys: Any = keys,
            values: Any = values,
        ) -> jax.Array:
            room = len(keys)
            query, key = rotate(query, position[None]), rotate(key, position[None])
            keys = keys.at[position % room].set(key[0, 0])
            values = values.at[position % room].set(value[0, 0])
            kept.append((keys, values))
            seen = jnp.arange(room) <= position  # all of them, once every place is taken
            return jax.nn.dot_product_attention(
                query, keys[None], values[None], mask=seen[None, None, None]
            )

        h = _block(block, h, attend)
    return _scores(params, h)[0, 0], kept


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Turns pairs of numbers by angles that grow with the position.

    Args:
        x: queries or keys, shape (rows, length, heads, width of a head).
        positions: shape (length,).

    Returns:
        The same shape and dtype. A product of two such vectors depends on the difference of their
        positions alone.

    Source: Su et al. 2021, "RoFormer".
    """
    half = x.shape[-1] // 2
    frequencies = _LONGEST_WAVE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, None, None] * frequencies
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divides by the root of the mean square, in float32, and multiplies by `scale`.

    Source: Zhang and Sennrich 2019.
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + _EPSILON)
    return wide.astype(x.dtype) * scale


def _block(block: Params, h: jax.Array, attend: Callable[..., jax.Array]) -> jax.Array:
    x = rms_norm(h, block["attention_norm"])
    seen = attend(*(jnp.einsum("rtw,whd->rthd", x, block[n]) for n in ("query", "key", "value")))
    h = h + jnp.einsum("rthd,hdw->rtw", seen, block["out"])
    x = rms_norm(h, block["mlp_norm"])
    return h + (jax.nn.silu(x @ block["gate"]) * (x @ block["up"])) @ block["down"]


def _scores(params: Params, h: jax.Array) -> jax.Array:
    h = rms_norm(h, params["norm"])
    return jnp.matmul(h, params["embedding"].T, preferred_element_type=jnp.float32)
