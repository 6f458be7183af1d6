"""Asynchronous updates in a fixed rotation: read `turns.py`, then `runner.py`."""
