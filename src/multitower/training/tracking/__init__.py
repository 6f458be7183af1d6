"""Experiment trackers: Weights & Biases, MLflow and Trackio. Begin with `log.py`, the hook.

Each service is a class of `services.py`; its client is imported where a run is logged to it.
"""
