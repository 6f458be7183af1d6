"""Cases of a test of which some are tried every day."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but_for(everyday: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """All cases as parameters of a test, marked as slow but for those of every day."""
    everyday = tuple(everyday)
    return [
        pytest.param(case, marks=[] if case in everyday else [pytest.mark.slow]) for case in cases
    ]
