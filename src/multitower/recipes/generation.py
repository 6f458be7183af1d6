"""Generates text with a byte transformer, byte by byte, with cached keys and values."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import multitower as mt
from multitower.recipes.networks import transformer
from multitower.recipes.packing import SEPARATOR

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def generate(
    params: transformer.Params,
    prompt: str,
    *,
    context: int,
    num_bytes: int,
    temperature: float,
    seed: int,
) -> str:
    """Continues a text.

    Args:
        params: of a transformer that was trained on rows of `pack`.
        prompt: the beginning of the text, and of a document.
        context: the number of tokens that a token sees: the length of the rows.
        num_bytes: bytes to write.
        temperature: scores are divided by it; 0 takes the most probable byte.
        seed: the seed of the draws.

    Returns:
        The text after the prompt. Bytes that are not UTF-8 are replaced, and so are control
        characters, which could control a terminal, except line ends and tabs.

    Raises:
        RunError: the prompt is empty, or longer than the context.
    """
    given = prompt.encode("utf-8", "surrogateescape")
    if not 0 < len(given) < context:
        raise mt.RunError(
            f"the prompt has {len(given)} bytes: this model takes 1 to {context - 1}."
        )
    tokens = np.full(context + num_bytes, SEPARATOR, np.int32)
    tokens[1 : 1 + len(given)] = np.frombuffer(given, np.uint8)
    size = 1 + len(given)
    written = _continue(
        params,
        tokens,
        size,
        num_bytes=num_bytes,
        key=jax.random.key(seed),
        temperature=temperature,
        context=context,
    )
    found = np.asarray(written)[size : size + num_bytes]
    text = found.astype(np.uint8).tobytes().decode("utf-8", "replace")
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


@functools.partial(jax.jit, static_argnames="context")
def _continue(
    params: transformer.Params,
    tokens: jax.Array,
    size: Any,
    *,
    num_bytes: Any,
    key: jax.Array,
    temperature: Any,
    context: int,
) -> jax.Array:
    """Fills `tokens` in from place `size` on; one program for prompts of all lengths."""

    def step(position: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        tokens, cache = carry
        scores, cache = transformer.decode(params, cache, tokens[position], position)
        scores = scores.at[SEPARATOR].set(-jnp.inf)
        warm = scores / jnp.where(temperature > 0, temperature, 1)
        drawn = jax.random.categorical(jax.random.fold_in(key, position), warm)
        drawn = jnp.where(temperature > 0, drawn, jnp.argmax(scores)).astype(tokens.dtype)
        following = jnp.where(position + 1 < size, tokens[position + 1], drawn)
        return tokens.at[position + 1].set(following), cache

    first = (tokens, transformer.empty_cache(params, context))
    return jax.lax.fori_loop(0, size + num_bytes - 1, step, first)[0]
