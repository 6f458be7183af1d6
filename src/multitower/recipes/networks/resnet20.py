"""ResNet-20 with batch normalisation, in plain JAX: parameters and statistics are two trees.

conv 3x3x16, then three stages of three blocks of two 3x3 convolutions, 16, 32 and 64 channels
wide, each stage but the first with half the height and width of the one before; the mean over the
image; dense 10. Every convolution is followed by batch normalisation, and has no bias.
"""

from typing import Any

import jax
import jax.numpy as jnp

from multitower.recipes.networks.layers import convolve, he_normal

Params = dict[str, Any]
Statistics = dict[str, Any]

_NUM_CLASSES = 10
_NUM_STAGES = 3
_EPSILON = 1e-5
_MOMENTUM = 0.9


def init(key: jax.Array, *, num_blocks: int = 3, width: int = 16) -> Params:
    """Draws first parameters: weights as He et al. for ReLU, scales one, shifts zero.

    Args:
        key: a typed key, shape ().
        num_blocks: of each stage.
        width: channels of the first stage.

    Returns:
        A tree of float32 arrays: for each convolution `"w"`, `"scale"` and `"shift"`.

    Example:
        >>> import jax
        >>> from multitower.recipes.networks import resnet20
        >>> shapes = jax.eval_shape(resnet20.init, jax.random.key(0))
        >>> sum(leaf.size for leaf in jax.tree.leaves(shapes))
        269722

    Source: He et al. 2016, "Deep Residual Learning for Image Recognition", section 4.2.
    """
    keys = iter(jax.random.split(key, 2 + 2 * num_blocks * _NUM_STAGES))

    def layer(channels_in: int, channels_out: int) -> Params:
        weights = he_normal(next(keys), (3, 3, channels_in, channels_out))
        return {"w": weights, "scale": jnp.ones(channels_out), "shift": jnp.zeros(channels_out)}

    stem = layer(3, width)
    stages: list[list[Params]] = []
    channels = width
    for number in range(_NUM_STAGES):
        blocks: list[Params] = []
        for _ in range(num_blocks):
            wide = width * 2**number
            blocks.append({"conv1": layer(channels, wide), "conv2": layer(wide, wide)})
            channels = wide
        stages.append(blocks)
    dense = {"w": he_normal(next(keys), (channels, _NUM_CLASSES)), "b": jnp.zeros(_NUM_CLASSES)}
    return {"stem": stem, "stages": stages, "dense": dense}


def init_statistics(*, num_blocks: int = 3, width: int = 16) -> Statistics:
    """The statistics before any image was seen: means zero, variances one.

    Args:
        num_blocks: as for `init`.
        width: as for `init`.

    Returns:
        A tree of float32 arrays: for each convolution `"mean"` and `"variance"`.
    """

    def layer(channels: int) -> Statistics:
        return {"mean": jnp.zeros(channels), "variance": jnp.ones(channels)}

    stages = [
        [
            {"conv1": layer(width * 2**number), "conv2": layer(width * 2**number)}
            for _ in range(num_blocks)
        ]
        for number in range(_NUM_STAGES)
    ]
    return {"stem": layer(width), "stages": stages}


def logits(
    params: Params, statistics: Statistics, images: Any, *, training: bool
) -> tuple[jax.Array, Statistics]:
    """Scores every class of every image.

    Args:
        params: from `init`.
        statistics: from `init_statistics`, or from the step before.
        images: float32, shape (rows, height, width, 3).
        training: normalise by the batch's own statistics, and learn them; otherwise by those
            learnt.

    Returns:
        Unnormalised log-probabilities, float32, shape (rows, 10), and the new statistics.
    """

    def layer(x: Any, name: str, number: int, index: int, stride: int = 1) -> jax.Array:
        part, learnt, new = (
            tree["stages"][number][index] for tree in (params, statistics, new_statistics)
        )
        x = convolve(x, part[name]["w"], "SAME", stride)
        x, new[name] = batch_norm(part[name], learnt[name], x, training=training)
        return x

    # A copy of the containers, whose entries are filled in one by one.
    new_statistics = jax.tree.map(lambda leaf: leaf, statistics)
    x = convolve(images, params["stem"]["w"], "SAME")
    x, new_statistics["stem"] = batch_norm(params["stem"], statistics["stem"], x, training=training)
    x = jax.nn.relu(x)
    for number, blocks in enumerate(params["stages"]):
        for index in range(len(blocks)):
            stride = 2 if number > 0 and index == 0 else 1
            y = jax.nn.relu(layer(x, "conv1", number, index, stride))
            y = layer(y, "conv2", number, index)
            x = jax.nn.relu(_shortcut(x, y.shape[-1], stride) + y)
    answers = x.mean(axis=(1, 2)) @ params["dense"]["w"] + params["dense"]["b"]
    return answers.astype(jnp.float32), new_statistics


def batch_norm(
    params: Params, statistics: Statistics, x: jax.Array, *, training: bool
) -> tuple[jax.Array, Statistics]:
    """Normalises every channel, and learns its mean and variance.

    Over towers each batch is a tower's own, and the learnt statistics are averaged.

    Args:
        params: `"scale"` and `"shift"`, shape (channels,).
        statistics: `"mean"` and `"variance"`, shape (channels,).
        x: shape (rows, height, width, channels); mean and variance are taken in float32.
        training: as for `logits`.

    Returns:
        The same shape and dtype, and the new statistics: nine tenths old, one tenth of this batch.

    Source: Ioffe and Szegedy 2015.
    """
    wide = x.astype(jnp.float32)
    if training:
        mean = wide.mean(axis=(0, 1, 2))
        variance = jnp.square(wide - mean).mean(axis=(0, 1, 2))
        now = {"mean": mean, "variance": variance}
        new = jax.tree.map(lambda a, b: _MOMENTUM * a + (1 - _MOMENTUM) * b, statistics, now)
    else:
        now = new = statistics
    factor = params["scale"] * jax.lax.rsqrt(now["variance"] + _EPSILON)
    return ((wide - now["mean"]) * factor + params["shift"]).astype(x.dtype), new


def weight_penalty(params: Params) -> jax.Array:
    """Half the sum of squares of all weights; scales, shifts and biases go free.

    Args:
        params: from `init`.

    Returns:
        float32, shape ().
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    squares = [jnp.sum(jnp.square(leaf)) for path, leaf in flat if path[-1].key == "w"]
    return sum(squares[1:], squares[0]) / 2


def _shortcut(x: jax.Array, channels: int, stride: int) -> jax.Array:
    """The input itself, thinned out and with empty channels where the stage changes."""
    missing = channels - x.shape[-1]
    borders = ((0, 0), (0, 0), (0, 0), (missing // 2, missing - missing // 2))
    return jnp.pad(x[:, ::stride, ::stride], borders)
