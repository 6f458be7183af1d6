"""Sample predictions: images of the test set beside what the model says they are."""

import base64
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from multitower.errors import RunError
from multitower.runs.report_page.png import encode_png
from multitower.runs.report_page.wording import counted, percent


class Sample(NamedTuple):
    """One test example.

    Attributes:
        image: uint8, shape (height, width, 1 or 3).
        label: the right class.
        predicted: the class that the model finds the most probable.
        probability: that the model gives to it, 0 to 1.
    """

    image: np.ndarray[Any, Any]
    label: int
    predicted: int
    probability: float


def show_samples(samples: Sequence[Sample]) -> str:
    """Shows test examples in the given order; the wrong ones have a frame, a mark and a word.

    Args:
        samples: what to show, at least one.

    Returns:
        HTML.

    Raises:
        RunError: an image has another shape or dtype.

    Example:
        >>> import numpy as np
        >>> from multitower.runs.report_page.samples import Sample, show_samples
        >>> sample = Sample(np.zeros((8, 8, 1), np.uint8), 3, 5, 0.75)
        >>> "1 test example, 1 answered wrongly" in show_samples([sample])
        True
    """
    wrong = sum(sample.label != sample.predicted for sample in samples)
    figures = "\n".join(_figure(number, sample) for number, sample in enumerate(samples))
    # Whoever chose them may have looked for wrong ones: their share is no score.
    return f"""<p>{counted(len(samples), "test example")}, {wrong:,} answered wrongly. This is a \
selection: the scores of the whole test set are at the top. The percentage is the probability that \
the model gives to its answer.</p>
<ul class="samples">
{figures}
</ul>"""


def _figure(number: int, sample: Sample) -> str:
    right = sample.label == sample.predicted
    verdict = "✓ right" if right else "✗ wrong"
    share = sample.probability if math.isfinite(sample.probability) else 0.0
    return f"""<li class="{"right" if right else "wrong"}">
<img src="{_source(number, sample.image)}" alt="Test example {number + 1}, label {sample.label}">
<em>{verdict}</em>
<span>predicted <b>{sample.predicted}</b></span><span>label <b>{sample.label}</b></span>
<span class="bar"><span style="width:{100 * share:.1f}%"></span></span>
<span>{percent(sample.probability)}</span></li>"""


def _source(number: int, image: np.ndarray[Any, Any]) -> str:
    fits = image.dtype == np.uint8 and image.ndim == 3 and image.shape[-1] in (1, 3)
    if not fits or 0 in image.shape:
        raise RunError(
            f"samples[{number}].image is {image.dtype} of shape {image.shape}: it must be uint8 of "
            "shape (height, width, 1) for grey or (height, width, 3) for RGB. For floats from 0 to "
            "1 say (255 * image).round().astype('uint8')."
        )
    return "data:image/png;base64," + base64.b64encode(encode_png(image)).decode("ascii")
