"""Experiment trackers: Weights & Biases, MLflow and Trackio. Read `log.py` first, the hook.

Each service is a class of `services.py`, which imports its client when a run is logged to it.
"""
