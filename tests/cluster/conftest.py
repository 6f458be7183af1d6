"""What is in this folder runs by `make test-cluster` alone: it needs the engines and minutes."""

import pytest


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid.startswith("tests/cluster/"):  # comparing paths takes a second
            item.add_marker(pytest.mark.cluster)
