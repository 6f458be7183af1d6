"""Local updates: every tower makes updates of its own, and the towers meet after every H of them.

Read `job.py` first: what a tower does, and what happens when they meet. Only `steps.ways` enters.
"""
