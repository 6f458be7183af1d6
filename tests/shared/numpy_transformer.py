"""The recipes' transformer in NumPy, float64, token by token: what the fast one is held to."""

import jax
import numpy as np


def numpy_logits(params, document):
    """Scores of what follows every token of one document, float64, token by token."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def norm(x, scale):
        return x / np.sqrt((x**2).mean() + 1e-6) * scale

    def rotated(x, position):
        half = len(x) // 2
        turns = np.exp(1j * position * 10_000.0 ** (-np.arange(half) / half))
        turned = (x[:half] + 1j * x[half:]) * turns
        return np.concatenate([turned.real, turned.imag])

    h = [p["embedding"][token] for token in document]
    for block in p["blocks"]:
        heads = range(block["query"].shape[1])
        x = [norm(row, block["attention_norm"]) for row in h]
        for t in reversed(range(len(h))):
            for n in heads:
                query = rotated(x[t] @ block["query"][:, n], t)
                keys = [rotated(x[s] @ block["key"][:, n], s) for s in range(t + 1)]
                scores = np.array([query @ key for key in keys]) / np.sqrt(len(query))
                shares = np.exp(scores - scores.max())
                shares /= shares.sum()
                seen = sum(w * (x[s] @ block["value"][:, n]) for s, w in enumerate(shares))
                h[t] = h[t] + seen @ block["out"][n]
        for t, row in enumerate(h):
            x_t = norm(row, block["mlp_norm"])
            gate = x_t @ block["gate"]
            h[t] = row + (gate / (1 + np.exp(-gate)) * (x_t @ block["up"])) @ block["down"]
    return np.stack([norm(row, p["norm"]) @ p["embedding"].T for row in h])
