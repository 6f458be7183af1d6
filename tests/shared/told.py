"""Which of the warnings that a test records are multitower's."""

from collections.abc import Iterable
from typing import Any

import multitower as mt


def ours(told: Iterable[Any]) -> list[str]:
    """Their messages.

    Others may stand beside them: while they are recorded, pytest's filters are off, and JAX may say
    that another worker was just writing the compiled program that it wanted to read.
    """
    return [str(one.message) for one in told if issubclass(one.category, mt.MultitowerWarning)]
