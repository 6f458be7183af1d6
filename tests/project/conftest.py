"""What tests of examples share."""

import pytest

from multitower.hardware import devices


@pytest.fixture
def two_devices(monkeypatch):
    """Two devices, where code does not say how many: each one more compiles the programs anew."""
    find = devices._find
    some = lambda spec, soft: find(2 if spec is None else spec, soft)
    monkeypatch.setattr(devices, "_find", some)
