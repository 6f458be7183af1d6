"""What tests of trainers share."""

import pytest

import multitower as mt
from trainers import PARAMS, batches, make_trainer


@pytest.fixture(scope="session")
def undisturbed():
    """The fingerprint of 60 steps that nobody stopped."""
    return mt.fingerprint(make_trainer(2).fit(PARAMS, batches, steps=60))
